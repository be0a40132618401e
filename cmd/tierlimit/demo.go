package main

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

const (
	demoInstances = 4
	demoOverload  = 3
	minDemo       = 8 * time.Second
	maxDemo       = 20 * time.Second
	// The run's share of a demo; the rest is for starting up, closing and judging.
	demoSpare = time.Second

	// An outage should be visible within seconds: the silence is about three heartbeats, and two leases.
	demoHeartbeat = 250 * time.Millisecond
	demoLease     = 250 * time.Millisecond
	// The default of 50ms is for a Redis that does not share two cores with the fleet and its load.
	demoTimeout     = 200 * time.Millisecond
	demoShare       = 0.25
	demoCooldown    = 250 * time.Millisecond
	demoMaxCooldown = 500 * time.Millisecond
)

// demoSettings says what demoOptions differ in from the defaults, which are in brackets.
const demoSettings = "settings here (by default): timeout 200ms (50ms), heartbeat 250ms (1s), lease 250ms (1s),\n" +
	"local share 0.25 (0.1), breaker cool-down 250ms to 500ms (500ms): an outage shows within seconds"

// cuts are what may be done to the connections to Redis.
var cuts = map[string]struct {
	mode redistest.Mode
	says string
}{
	"refuse":     {redistest.Refuse, "connections are reset, new ones refused"},
	"black-hole": {redistest.BlackHole, "every byte is swallowed: offered dips while callers time out, then catches up"},
}

type demoCmd struct {
	Redis    string        `placeholder:"URL" help:"A Redis to use: redis://host:port. Without it, one is started inside this process."`
	Limit    string        `default:"2000/s" help:"The limit, 20/s to 5000/s: \"RATE/PERIOD [ALGORITHM] [burst N]\"."`
	Cut      string        `default:"black-hole" enum:"refuse,black-hole" help:"How Redis is cut: ${enum}."`
	Duration time.Duration `default:"18s" help:"Of the whole demo, 8s to 20s; one second of it is the start and the verdict."`
}

// Help is what demo -h says besides the flags.
func (demoCmd) Help() string {
	return `Four instances share one key and are offered three times the limit. After about a third of the time a proxy in front of Redis cuts it off, and later lets it back. Watch four phases:

  online        tokens are leased from Redis in batches; most checks need no call
  silence       Redis cut: only leases in hand are spent, for the time Bound().Silence says
  outage share  each instance admits a quarter of the limit, without Redis
  online again  the shares have ended; tokens are leased from Redis once more

Columns: offered, admitted and limit in tokens per second, where offered counts checks when they are answered: it dips while callers wait for a time-out, and exceeds the load when the checks queued behind them are made up for. overshoot is of the whole run so far, by the checker. "local %" is the part of the checks decided without asking Redis; one that waited until its time was up has asked. redis/s are script calls, heartbeats included; p50 and p99 are of Allow. breaker is the state of the instances' circuit breakers, fleet what the instances do: one word if all agree, else the most frequent and of how many, as in "open 3/4". A phase is told from the one before once a row.

Examples:

  tierlimit demo
  tierlimit demo -redis redis://127.0.0.1:6379
  tierlimit demo -limit "500/s sliding-log" -cut refuse`
}

// demoOptions make an outage visible within seconds.
func demoOptions() []tierlimit.Option {
	return []tierlimit.Option{
		tierlimit.WithPrefix(runPrefix("demo")),
		tierlimit.WithHeartbeat(demoHeartbeat),
		tierlimit.WithLeaseTTL(demoLease),
		tierlimit.WithRemoteTimeout(demoTimeout),
		tierlimit.WithLocalShare(demoShare),
		tierlimit.WithBreaker(breaker.Settings{Cooldown: demoCooldown, MaxCooldown: demoMaxCooldown}),
	}
}

// Run is the verb.
func (c *demoCmd) Run(ctx context.Context, s streams) error {
	limit, err := parseLimit(c.Limit)
	if err != nil {
		return err
	}
	rate := perSecond(limit)
	switch {
	case rate < 20 || rate > 5000:
		return badInput("-limit: %v is %s a second; the demo shows 20/s to 5000/s", limit, number(rate))
	case limit.Period > time.Second:
		return badInput("-limit: the period of %v is longer than 1s: the outage would be over before its share begins", limit)
	case c.Duration < minDemo || c.Duration > maxDemo:
		return badInput("-duration: %v, want %v to %v", c.Duration, minDemo, maxDemo)
	}
	st, err := openStore(ctx, c.Redis)
	if err != nil {
		return err
	}
	defer st.close()
	if st.opts.Network == "unix" {
		return badInput("-redis: the demo cuts a TCP connection; %s is a socket file", st.opts.Addr)
	}
	proxy, err := redistest.OpenProxy(st.opts.Addr)
	if err != nil {
		return fmt.Errorf("starting the proxy: %w", err)
	}
	defer proxy.Close()

	length := c.Duration - demoSpare
	every := length / 34
	d := &demo{s: s.out, limit: limit, length: length, every: every, rate: rate, waits: waits{timeout: demoTimeout}}
	cutAt, backAt := length*3/10, length*7/10
	s.out.linef("%s", s.out.paint(bold, fmt.Sprintf("%d instances, one key, limit %v, offered %d times that; %s", demoInstances, limit, demoOverload, st.name)))
	s.out.linef("%s", demoSettings)
	s.out.linef("Redis is cut after %s and back after %s of %s; the rest of %v is start and verdict.", seconds(cutAt), seconds(backAt), seconds(length), c.Duration)
	if limit.Algorithm == tierlimit.AlgorithmTokenBucket || limit.Algorithm == tierlimit.AlgorithmLeakyBucket {
		s.out.linef("The bucket starts full: %d may pass at once.", limit.Burst)
	}
	s.out.linef("")
	s.out.linef("%s", s.out.paint(bold, header()))
	skew, err := st.skew(ctx)
	if err != nil {
		return err
	}
	result, err := fleet.Run(ctx, fleet.Config{
		Instances:   demoInstances,
		Client:      func(int) redis.UniversalClient { return st.client(proxy.Addr()) },
		Name:        "demo",
		Limit:       limit,
		Options:     demoOptions(),
		Load:        fleet.Even("demo"),
		AwaitOnline: joinWithin,
		Rate:        demoOverload * rate,
		Duration:    length,
		Every:       every,
		Observe:     d.tick,
		Each:        d.waits.record,
		// More would keep up with a load that waits out its time-outs, and cost more to count than the checks themselves.
		Workers: 32,
		Events: []fleet.Event{
			{At: cutAt, Do: func() {
				d.fault(proxy.SetMode(cuts[c.Cut].mode))
				d.say(cutAt, "Redis cut: "+cuts[c.Cut].says)
			}},
			{At: backAt, Do: func() {
				d.fault(proxy.SetMode(redistest.Pass))
				d.say(backAt, "Redis back: each instance finds out with its next probe")
			}},
		},
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	s.out.wipe()
	if err != nil {
		return err
	}
	if d.failed != nil {
		return fmt.Errorf("the proxy: %w", d.failed)
	}
	after, err := st.skew(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	return d.sum(ctx, result, cutAt, skew.join(after))
}

// A demo is one run as it is shown. mu guards the screen and what follows it.
type demo struct {
	limit  tierlimit.Limit
	rate   float64 // of the limit, a second
	length time.Duration
	every  time.Duration // from row to row
	waits

	mu     sync.Mutex
	s      *screen
	phase  string
	last   time.Duration        // of the tick before
	before [demoInstances]int64 // what each had admitted without Redis when it last was in reach
	waited int64                // time-outs up to then
	shared time.Duration        // when the first share had begun, 0 if none did
	again  time.Duration        // when all were online again, 0 if they were not
	failed error
}

func (d *demo) fault(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		d.failed = err
	}
}

func (d *demo) say(at time.Duration, what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sayLocked(yellow, at, what)
}

func (d *demo) sayLocked(colour string, at time.Duration, what string) {
	d.s.linef("%s", d.s.paint(colour, fmt.Sprintf("%6s  %s", seconds(at), what)))
}

// tick prints what happened since the tick before.
func (d *demo) tick(t fleet.Tick) {
	// Judging takes a while towards the end; an event that is due meanwhile should not have to wait for the screen.
	over := envelope.Check(fleet.Envelope(d.limit), t.History()).Overshoot
	d.mu.Lock()
	defer d.mu.Unlock()
	took := (t.At - d.last).Seconds()
	d.last = t.At
	phases, breakers := map[string]int{}, map[string]int{}
	for i, st := range t.Stats {
		phases[d.phaseOf(i, st.State, t.Limiters[i].Stats().Fallback)]++
		breakers[st.Breaker]++
	}
	d.announceLocked(t, phases)
	timedOut := d.timedOut.Load()
	local := unasked(t.Counts, timedOut-d.waited)
	d.waited = timedOut
	each := func(n int64) int64 { return int64(math.Round(float64(n) / took)) }
	r := row{
		at:        t.At,
		offered:   each(t.Offered),
		admitted:  each(t.Admitted),
		limit:     int64(math.Round(d.rate)),
		overshoot: over,
		local:     share(local, t.Checks),
		calls:     float64(t.Exchanges+t.Heartbeats) / took,
		p50:       t.P50,
		p99:       t.P99,
		breaker:   tally(breakers),
		fleet:     tally(phases),
	}
	d.s.linef("%v", r)
	d.s.progress(bar(t.At, d.length, d.phase))
}

// phaseOf names what an instance does. A share begins when a check is admitted from it: the state that Stats tells is the
// Hybrid's, which knows nothing of how long one limiter's leases may still be in the hands of others.
func (d *demo) phaseOf(i int, s tierlimit.State, fallback int64) string {
	switch s {
	case tierlimit.StateSilent, tierlimit.StateShare:
		if fallback > d.before[i] {
			return "share"
		}
		return "silent"
	case tierlimit.StateConnecting, tierlimit.StateOnline:
	}
	d.before[i] = fallback
	return s.String()
}

// announceLocked says in words what the fleet has come to.
func (d *demo) announceLocked(t fleet.Tick, phases map[string]int) {
	was := d.phase
	away := phases["silent"] + phases["share"]
	switch {
	case phases["share"] > 0 && d.phase != "online again":
		d.phase = "outage share"
	case away == demoInstances:
		d.phase = "silence: leases in hand only"
	case away == 0 && d.phase != "" && d.phase != "online":
		d.phase = "online again"
	case away == 0:
		d.phase = "online"
	}
	if d.phase == was {
		return
	}
	switch d.phase {
	case "outage share":
		if d.shared == 0 {
			d.shared = t.At
		}
		d.sayLocked(yellow, t.At, fmt.Sprintf("outage share: each instance admits its part of the limit, %s/s, without Redis", number(d.rate/demoInstances)))
	case "silence: leases in hand only":
		d.sayLocked(yellow, t.At, fmt.Sprintf("silence: leases in hand only, for %s since Redis last answered (Bound.Silence)", seconds(t.Limiters[0].Bound().Silence)))
	case "online again":
		if d.again == 0 {
			d.again = t.At
		}
		d.sayLocked(green, t.At, "online again: the shares have ended, tokens are leased from Redis once more")
	}
}

// sum prints the end: figures of each phase, and the verdict.
func (d *demo) sum(ctx context.Context, r *fleet.Result, cutAt time.Duration, k skew) error {
	d.s.linef("")
	part := func(name string, from, to time.Duration) {
		if from <= 0 && name != "online" || to-from < 200*time.Millisecond || time.Duration(r.Ended-r.Started) < to {
			return
		}
		n := r.AdmittedIn(r.Started+int64(from), r.Started+int64(to))
		d.s.linef("%-14s %5s to %5s  admitted %6d, %5.1f %% of the rate", name, seconds(from), seconds(to), n, 100*float64(n)/(d.rate*(to-from).Seconds()))
	}
	part("online", 0, cutAt) // more than 100 %: the burst comes on top of the rate
	if d.shared > 0 {
		part("silence", cutAt, d.shared)
		until := d.again
		if until == 0 {
			until = min(d.length, time.Duration(r.Ended-r.Started))
		}
		part("outage share", d.shared, until)
	}
	if d.again > 0 {
		part("online again", d.again, d.length)
	}
	if d.shared > 0 {
		d.s.linef("phases are told apart once a row: each but the cut itself may have begun up to %s earlier", seconds(d.every))
	}
	d.s.linef("whole run: offered %d, admitted %d, denied %d; without asking Redis %.1f %%; Redis calls %d",
		r.Offered, r.Admitted, r.Denied, 100*share(unasked(r.Counts, d.timedOut.Load()), r.Checks), r.Exchanges+r.Heartbeats)
	d.s.linef("Allow p50 %s, p99 %s, longest %s", short(r.Latency.Percentile(50)), short(r.Latency.Percentile(99)), short(r.Latency.Max()))
	if reason, stalled := r.Stalled(); stalled {
		d.s.linef("note: %s; the verdict stands, the rates may not", reason)
	}
	if d.shared == 0 && ctx.Err() == nil {
		d.s.linef("note: no outage share was seen; a longer -duration shows it")
	}
	return judge(ctx, d.s, d.limit, r, k.widen(r.History))
}
