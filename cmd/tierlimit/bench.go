package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
)

const (
	minBench       = 300 * time.Millisecond
	maxBench       = 10 * time.Minute
	maxWarmUp      = time.Second
	maxConcurrency = 4096
	// How long a check may wait for Redis: the default of 50ms would measure what this machine falls back to, not what it asks.
	benchTimeout = time.Second
	// The embedded Redis takes longer than that for a call of hundreds of keys.
	embeddedTimeout = 10 * time.Second
	// From this part of the checks on, a run that fell back is not compared with the floor.
	maxFallback = 0.01
	// A hundred thousand leases take longer to hand back than anybody here wants to wait; they end by themselves.
	closeWithin = 500 * time.Millisecond
)

type benchCmd struct {
	Redis       string        `placeholder:"URL" help:"The Redis to measure: redis://host:port. Without it, one is started inside this process."`
	Keys        string        `default:"zipf:100k" help:"Which keys are checked: zipf:N, uniform:N (N up to 1000k) or hot, a single one."`
	Concurrency int           `default:"128" help:"Goroutines that check, each after the answer of its check before."`
	Limit       string        `default:"1000/s" help:"The limit of each key: \"RATE/PERIOD [ALGORITHM] [burst N]\"."`
	Share       float64       `default:"0.1" help:"WithLocalShare of the third run: how much of a limit one instance may lease."`
	Duration    time.Duration `default:"10s" help:"Of the three runs together, 300ms to 10m. Each is warmed up before for a tenth of that, at most 1s."`
	Instances   int           `default:"1" help:"Size of the fleet, in this process; the goroutines are divided among them."`
	JSON        bool          `name:"json" help:"Print one JSON object instead of the table."`
}

// Help is what bench -h says besides the flags.
func (benchCmd) Help() string {
	return `Measures what a check costs with this machine and this Redis. Three runs, one after another, by the same goroutines on the same keys:

  floor      a bare EVALSHA of an empty script per check: what asking Redis costs
  share 0    tierlimit without leases: Redis decides, but for denials that are kept
  share S    tierlimit with leases of up to -share of a limit: warm keys stay in process

Columns: p50 to max are of a check, waiting for a processor included; "local %" is the part answered in process, from leases and kept denials; redis/s are script calls, heartbeats included; cpu/check is what the Redis process used (INFO cpu, so other clients count too), by checks; "x floor" is checks/s by the floor's. The floor decides nothing. share 0 may be above it: many checks go in one call.

The load is a closed loop: it asks as fast as it is answered, far more than a service would, so throughput is what to compare; while a cold key waits for Redis, so does its goroutine. Keys beyond their limit are denied, mostly in process; raise -limit to see checks that are allowed. A check of zipf:N draws key i with odds 1/i^1.1.

Keys in Redis have a prefix of their own and expire by themselves: each when its limit would be full again, the few that list the fleet after a day.

Examples:

  tierlimit bench
  tierlimit bench -redis redis://127.0.0.1:6379
  tierlimit bench -redis redis://127.0.0.1:6379 -keys hot -limit 1000000/s
  tierlimit bench -redis "redis://10.0.0.5:6379?pool_size=128" -instances 4 -json`
}

func (c *benchCmd) check() (limit tierlimit.Limit, form string, keys int, err error) {
	if limit, err = parseLimit(c.Limit); err != nil {
		return limit, "", 0, err
	}
	if form, keys, err = parseKeys(c.Keys); err != nil {
		return limit, "", 0, err
	}
	switch {
	case c.Concurrency < 1 || c.Concurrency > maxConcurrency:
		err = badInput("-concurrency: %d, want 1 to %d", c.Concurrency, maxConcurrency)
	case c.Instances < 1 || c.Instances > maxInstances:
		err = badInput("-instances: %d, want 1 to %d", c.Instances, maxInstances)
	case c.Instances > c.Concurrency:
		err = badInput("-instances: %d, more than -concurrency %d: some would have nothing to do", c.Instances, c.Concurrency)
	case !(c.Share > 0 && c.Share <= 1):
		err = badInput("-share: %v, want more than 0, at most 1 (share 0 has a run of its own)", c.Share)
	case c.Duration < minBench || c.Duration > maxBench:
		err = badInput("-duration: %v, want %v to %v", c.Duration, minBench, maxBench)
	}
	return limit, form, keys, err
}

// Run is the verb.
func (c *benchCmd) Run(ctx context.Context, s streams) error {
	limit, form, n, err := c.check()
	if err != nil {
		return err
	}
	st, err := openStore(ctx, c.Redis)
	if err != nil {
		return err
	}
	defer st.close()
	b := &bench{cmd: c, limit: limit, st: st, timeout: benchTimeout, keys: newKeySet(form, n), s: s}
	if st.embedded != nil {
		b.timeout = embeddedTimeout
		st.opts.ReadTimeout = embeddedTimeout
	}
	b.admin = st.client("")
	defer func() { _ = b.admin.Close() }()
	if !c.JSON {
		b.headline()
	}
	err = b.all(ctx)
	s.err.wipe()
	if c.JSON {
		return errors.Join(err, b.printJSON(ctx, n))
	}
	b.notes(ctx)
	return err
}

// A bench is the three runs as they come about.
type bench struct {
	cmd     *benchCmd
	limit   tierlimit.Limit
	st      *store
	timeout time.Duration // of a check that waits for Redis
	keys    *keySet
	s       streams
	admin   *redis.Client // asks for INFO
	runs    []benchRun
}

// all makes the runs, and stops at the first that fails.
func (b *bench) all(ctx context.Context) error {
	for _, r := range []struct {
		name string
		open func(ctx context.Context) (*subject, error)
	}{
		{"floor", b.openFloor},
		{"share 0", func(ctx context.Context) (*subject, error) { return b.openShare(ctx, 0) }},
		{fmt.Sprintf("share %.3g", b.cmd.Share), func(ctx context.Context) (*subject, error) { return b.openShare(ctx, b.cmd.Share) }},
	} {
		if err := b.one(ctx, r.name, r.open); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// one opens a subject, warms it up, measures it and closes it.
func (b *bench) one(ctx context.Context, name string, open func(context.Context) (*subject, error)) error {
	sub, err := open(ctx)
	if err != nil {
		return err
	}
	defer sub.close()
	part := b.cmd.Duration / 3
	whole := b.cmd.Duration
	before := time.Duration(len(b.runs)) * part
	drive(ctx, sub.checks, b.keys, b.cmd.Concurrency, min(b.cmd.Duration/10, maxWarmUp), func(time.Duration) {
		b.s.err.progress(bar(before, whole, name+", warming up"))
	})
	if ctx.Err() != nil {
		return nil
	}
	cpu, known := b.redisCPU(ctx)
	calls := sub.calls()
	o := drive(ctx, sub.checks, b.keys, b.cmd.Concurrency, part, func(at time.Duration) {
		b.s.err.progress(bar(before+min(at, part), whole, name))
	})
	calls = sub.calls() - calls
	if sub.share == nil { // nobody counts for the floor
		calls = o.checks + o.errors
	}
	r := newBenchRun(name, sub.share, o, calls)
	if used, still := b.redisCPU(ctx); known && still && o.checks > 0 {
		ns := float64(used-cpu) / float64(o.checks)
		r.RedisCPU = &ns
	}
	floor := r.Throughput
	if len(b.runs) > 0 {
		floor = b.runs[0].Throughput
	}
	if floor > 0 && !r.fellBack() {
		ratio := r.Throughput / floor
		r.RatioToFloor = &ratio
	}
	b.runs = append(b.runs, r)
	if !b.cmd.JSON {
		b.s.err.wipe()
		b.s.out.linef("%v", r)
	}
	if o.errors > 0 {
		return fmt.Errorf("%d checks failed, one of them with: %w", o.errors, o.err)
	}
	return nil
}

// A subject is what is measured.
type subject struct {
	share  *float64 // nil: the floor, which calls Redis once for each check
	checks []checkFunc
	calls  func() int64 // to Redis so far
	close  func()
}

// openFloor is one EVALSHA for each check, by as many clients as there are instances.
func (b *bench) openFloor(ctx context.Context) (*subject, error) {
	sub := &subject{calls: func() int64 { return 0 }}
	var clients []*redis.Client
	sub.close = func() {
		for _, c := range clients {
			_ = c.Close()
		}
	}
	empty := redis.NewScript("return 1")
	keys := []string{runPrefix("bench") + "floor"} // named, as a limiter has to; never written
	for range b.cmd.Instances {
		c := b.st.client("")
		clients = append(clients, c)
		sub.checks = append(sub.checks, func(ctx context.Context, _ string) (tierlimit.Result, error) {
			return tierlimit.Result{}, empty.Run(ctx, c, keys).Err()
		})
	}
	if _, err := sub.checks[0](ctx, ""); err != nil {
		sub.close()
		return nil, err
	}
	return sub, nil
}

// openShare is a fleet of which every instance has heard from Redis.
func (b *bench) openShare(ctx context.Context, localShare float64) (*subject, error) {
	sub := &subject{share: &localShare}
	var (
		clients []*redis.Client
		hybrids []*tierlimit.Hybrid
	)
	sub.calls = func() (n int64) {
		for _, h := range hybrids {
			s := h.Stats()
			n += s.Exchanges + s.Heartbeats
		}
		return n
	}
	sub.close = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
		defer cancel()
		var done sync.WaitGroup
		for _, h := range hybrids {
			done.Go(func() { _ = h.Close(ctx) })
		}
		done.Wait()
		for _, c := range clients {
			_ = c.Close()
		}
	}
	prefix := runPrefix("bench")
	for range b.cmd.Instances {
		c := b.st.client("")
		clients = append(clients, c)
		h, err := tierlimit.New(c, tierlimit.WithPrefix(prefix), tierlimit.WithLocalShare(localShare),
			tierlimit.WithRemoteTimeout(b.timeout), tierlimit.WithHeartbeat(max(time.Second, b.timeout)))
		if err != nil {
			sub.close()
			return nil, err
		}
		hybrids = append(hybrids, h)
		l, err := h.Limiter("bench", b.limit)
		if err != nil {
			sub.close()
			return nil, err
		}
		sub.checks = append(sub.checks, l.Allow)
	}
	deadline := time.Now().Add(joinWithin)
	for _, h := range hybrids {
		for h.Stats().State != tierlimit.StateOnline && ctx.Err() == nil {
			if time.Now().After(deadline) {
				sub.close()
				return nil, fmt.Errorf("an instance has not heard from Redis within %v", joinWithin)
			}
			time.Sleep(time.Millisecond)
		}
	}
	return sub, nil
}

// redisCPU is what the Redis process has used so far. False where that cannot be known: INFO may be forbidden, and an embedded Redis
// has no process of its own.
func (b *bench) redisCPU(ctx context.Context) (time.Duration, bool) {
	if b.st.embedded != nil {
		return 0, false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
	defer cancel()
	info, err := b.admin.InfoMap(ctx, "cpu").Result()
	if err != nil {
		return 0, false
	}
	var sum time.Duration
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		s, err := strconv.ParseFloat(info["CPU"][name], 64)
		if err != nil {
			return 0, false
		}
		sum += time.Duration(s * 1e9)
	}
	return sum, true
}

// A benchRun is the figures of one run, as -json prints them. A pointer is nil where there is no such figure.
type benchRun struct {
	Name         string     `json:"name"`
	LocalShare   *float64   `json:"local_share,omitempty"`
	Seconds      float64    `json:"seconds"`
	Checks       int64      `json:"checks"` // answered
	Errors       int64      `json:"errors"` // not answered
	Throughput   float64    `json:"checks_per_second"`
	P50          int64      `json:"check_p50_ns"`
	P99          int64      `json:"check_p99_ns"`
	P999         int64      `json:"check_p99_9_ns"`
	Max          int64      `json:"check_max_ns"`
	Decisions    *decisions `json:"decisions,omitempty"`
	RedisCalls   int64      `json:"redis_calls"`
	CallsRate    float64    `json:"redis_calls_per_second"`
	RedisCPU     *float64   `json:"redis_cpu_ns_per_check"`
	RatioToFloor *float64   `json:"ratio_to_floor"`
}

// decisions are what became of the checks: allowed + denied and local + remote + fallback are both all of them.
type decisions struct {
	Allowed        int64   `json:"allowed"`
	Denied         int64   `json:"denied"`
	Local          int64   `json:"local"`
	Remote         int64   `json:"remote"`
	Fallback       int64   `json:"fallback"`
	AllowedPercent float64 `json:"allowed_percent"`
	LocalPercent   float64 `json:"local_percent"`
}

func newBenchRun(name string, localShare *float64, o *outcome, calls int64) benchRun {
	s := o.elapsed.Seconds()
	r := benchRun{
		Name: name, LocalShare: localShare, Seconds: s, Checks: o.checks, Errors: o.errors, Throughput: float64(o.checks) / s,
		P50: int64(o.latency.Percentile(50)), P99: int64(o.latency.Percentile(99)), P999: int64(o.latency.Percentile(99.9)), Max: int64(o.latency.Max()),
		RedisCalls: calls, CallsRate: float64(calls) / s,
	}
	if localShare != nil {
		local := o.bySource[tierlimit.Local]
		r.Decisions = &decisions{
			Allowed: o.allowed, Denied: o.checks - o.allowed,
			Local: local, Remote: o.bySource[tierlimit.Remote], Fallback: o.bySource[tierlimit.Fallback],
			AllowedPercent: 100 * share(o.allowed, o.checks), LocalPercent: 100 * share(local, o.checks),
		}
	}
	return r
}

// fellBack says that too much was decided without Redis for the run to say what Redis costs.
func (r benchRun) fellBack() bool {
	return r.Decisions != nil && float64(r.Decisions.Fallback) > maxFallback*float64(r.Checks)
}

// benchFormat is the table's lines; %*s and %s count runes, so that a µ does not shift the columns.
const benchFormat = "%-11s%10s%7s%7s%7s%7s%11s%9s%9s%11s%9s"

func benchHeader() string {
	return fmt.Sprintf(benchFormat, "run", "checks/s", "p50", "p99", "p99.9", "max", "allowed %", "local %", "redis/s", "cpu/check", "x floor")
}

// String is the row under benchHeader.
func (r benchRun) String() string {
	allowed, local, cpu, ratio := "-", "-", "-", "-"
	if d := r.Decisions; d != nil {
		allowed, local = fmt.Sprintf("%.1f", d.AllowedPercent), fmt.Sprintf("%.1f", d.LocalPercent)
	}
	if r.RedisCPU != nil {
		cpu = short(time.Duration(*r.RedisCPU))
	}
	if r.RatioToFloor != nil {
		ratio = fmt.Sprintf("%.3g", *r.RatioToFloor)
		if *r.RatioToFloor >= 1000 {
			ratio = fmt.Sprintf("%.0f", *r.RatioToFloor)
		}
	}
	at := func(ns int64) string { return short(time.Duration(ns)) }
	return fmt.Sprintf(benchFormat, r.Name, fmt.Sprintf("%.0f", r.Throughput), at(r.P50), at(r.P99), at(r.P999), at(r.Max), allowed, local,
		fmt.Sprintf("%.0f", r.CallsRate), cpu, ratio)
}

const noMeasure = "this is no measure of Redis: the embedded one shares this process; -redis URL measures yours"

// headline says what is about to be measured, and on what.
func (b *bench) headline() {
	c, s := b.cmd, b.s.out
	fleet := "1 instance"
	if c.Instances > 1 {
		fleet = fmt.Sprintf("%d instances", c.Instances)
	}
	s.linef("%s", s.paint(bold, cut(fmt.Sprintf("bench: keys %s, limit %v each, %d goroutines, %s; %s", c.Keys, b.limit, c.Concurrency, fleet, b.st.name), width)))
	if b.st.embedded != nil {
		s.linef("%s", s.paint(yellow, noMeasure))
	}
	s.linef("%s, %s/%s, %d processors; each run %s, after a warm-up", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.GOMAXPROCS(0), seconds(c.Duration/3))
	s.linef("")
	s.linef("%s", s.paint(bold, benchHeader()))
}

// notes says what the table does not.
func (b *bench) notes(ctx context.Context) {
	s := b.s.out
	for _, r := range b.runs {
		if d := r.Decisions; d != nil && d.Fallback > 0 {
			text := fmt.Sprintf("%s: %d checks were decided without Redis, which did not answer in time", r.Name, d.Fallback)
			if r.fellBack() {
				text += "; so this is not compared"
			}
			s.linef("%s", s.paint(yellow, text))
		}
	}
	if ctx.Err() != nil {
		if len(b.runs) == 0 {
			s.linef("%s", s.paint(yellow, "interrupted before anything was measured"))
			return
		}
		last := b.runs[len(b.runs)-1]
		s.linef("%s", s.paint(yellow, fmt.Sprintf("interrupted: %s ran for %.1fs of %s; runs not listed were not made", last.Name, last.Seconds, seconds(b.cmd.Duration/3))))
	}
}

// printJSON prints what was measured, be it a part.
func (b *bench) printJSON(ctx context.Context, keys int) error {
	if b.runs == nil {
		b.runs = []benchRun{}
	}
	return json.NewEncoder(b.s.out.w).Encode(struct {
		Redis       string     `json:"redis"`
		Embedded    bool       `json:"embedded"`
		Note        string     `json:"note,omitempty"`
		Keys        string     `json:"keys"`
		KeyCount    int        `json:"key_count"`
		Limit       string     `json:"limit"`
		Concurrency int        `json:"concurrency"`
		Instances   int        `json:"instances"`
		Go          string     `json:"go"`
		Processors  int        `json:"processors"`
		Interrupted bool       `json:"interrupted"`
		Runs        []benchRun `json:"runs"`
	}{
		Redis: strings.TrimPrefix(b.st.name, "Redis at "), Embedded: b.st.embedded != nil, Note: b.note(), Keys: b.cmd.Keys, KeyCount: keys,
		Limit: b.limit.String(), Concurrency: b.cmd.Concurrency, Instances: b.cmd.Instances,
		Go: runtime.Version(), Processors: runtime.GOMAXPROCS(0), Interrupted: ctx.Err() != nil, Runs: b.runs,
	})
}

func (b *bench) note() string {
	if b.st.embedded != nil {
		return noMeasure
	}
	return ""
}
