package tierlimit

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/clock"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// A world is one Redis: the Go model of the scripts, with a clock of its own that is ahead or behind by any amount and
// runs up to nearly a part in driftParts fast or slow.
type world struct {
	mu       sync.Mutex
	store    *model.Store
	start    time.Time
	offset   time.Duration
	driftPPM int64
	air      sync.WaitGroup // calls on their way
	log      []logged       // every exchange that ran, in the order in which it ran
	forget   bool           // keep no log
}

type logged struct {
	at     int64
	asks   []tier.Ask
	grants []tier.Grant
	late   bool
}

func newWorld(v model.Variant, offset time.Duration, driftPPM int64) *world {
	return &world{store: model.New(v), start: time.Now(), offset: offset, driftPPM: driftPPM}
}

// nowNS is the server's clock.
func (w *world) nowNS() int64 {
	d := int64(time.Since(w.start))
	return w.start.Add(w.offset).UnixNano() + d + d/1_000_000*w.driftPPM
}

func (w *world) exchange(alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) remote.Reply {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.nowNS() / 1000
	late, grants := w.store.Exchange(now, alg, fence, dark, asks)
	if !w.forget {
		w.log = append(w.log, logged{now, asks, grants, late})
	}
	return remote.Reply{Now: now, Late: late, Grants: grants}
}

func (w *world) heartbeat(b remote.Beat) remote.View {
	w.mu.Lock()
	defer w.mu.Unlock()
	return remote.View(w.store.Heartbeat(w.nowNS()/1000, "", model.Beat(b)))
}

// A fate is what the network does to one call.
type fate struct {
	refuse    bool          // not sent, and the caller is told so
	lose      bool          // never arrives
	loseReply bool          // runs, nobody hears of it
	there     time.Duration // on its way to the server; longer than the caller waits makes it a late call
	back      time.Duration
	again     time.Duration // what carries no credit runs a second time, so much later; 0 for not
}

// A wire is one instance's way to the world.
type wire struct {
	w    *world
	mu   sync.Mutex
	fate func(heartbeat bool, asks []tier.Ask) fate
	out  int // calls that wait for an answer
	most int
	dup  bool // repeat credits too, which remote.Client never does
}

func (x *wire) setFate(f func(bool, []tier.Ask) fate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.fate = f
}

// steady is a network without faults.
func steady(rtt time.Duration) func(bool, []tier.Ask) fate {
	return func(bool, []tier.Ask) fate { return fate{there: rtt / 2, back: rtt - rtt/2} }
}

func (x *wire) fateOf(heartbeat bool, asks []tier.Ask) fate {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.fate == nil {
		return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond}
	}
	return x.fate(heartbeat, asks)
}

func carry[T any](ctx context.Context, air *sync.WaitGroup, f fate, run func() T) (answer T, err error) {
	if f.refuse {
		return answer, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	}
	done := make(chan T, 1)
	air.Go(func() {
		if f.lose {
			return
		}
		time.Sleep(f.there)
		v := run()
		if f.again > 0 {
			air.Go(func() {
				time.Sleep(f.again)
				run()
			})
		}
		if f.loseReply {
			return
		}
		time.Sleep(f.back)
		done <- v
	})
	select {
	case v := <-done:
		return v, nil
	case <-ctx.Done():
		return answer, ctx.Err()
	}
}

func credits(a *tier.Ask) bool {
	return a.Spent+a.Carry+a.Return+a.Refund != 0 || a.Back || a.Own != 0 || a.Lease != 0
}

func (x *wire) ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(remote.Reply, error)) {
	then(x.Exchange(ctx, alg, fence, dark, asks))
}

func (x *wire) Exchange(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) (remote.Reply, error) {
	asks = slices.Clone(asks)
	f := x.fateOf(false, asks)
	if !x.dup && slices.ContainsFunc(asks, func(a tier.Ask) bool { return credits(&a) }) {
		f.again = 0
	}
	x.mu.Lock()
	x.out++
	x.most = max(x.most, x.out)
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		x.out--
		x.mu.Unlock()
	}()
	return carry(ctx, &x.w.air, f, func() remote.Reply { return x.w.exchange(alg, fence, dark, asks) })
}

func (x *wire) Heartbeat(ctx context.Context, _ remote.Domain, b remote.Beat) (remote.View, error) {
	return carry(ctx, &x.w.air, x.fateOf(true, nil), func() remote.View { return x.w.heartbeat(b) })
}

func (x *wire) Grouped() bool                 { return false }
func (x *wire) Domain(uint8) remote.Domain    { return remote.Domain{} }
func (x *wire) Refresh(context.Context) error { return nil }

// join returns an instance on the wire whose own clock began so long ago, and its limiter "l".
func join(t *testing.T, x *wire, limit Limit, began time.Duration, opts ...Option) (*Hybrid, *Limiter) {
	t.Helper()
	return joinDrifting(t, x, limit, began, 0, opts...)
}

// joinDrifting is join with a clock that is fast by so many parts in a million.
func joinDrifting(t *testing.T, x *wire, limit Limit, began time.Duration, ppm int64, opts ...Option) (*Hybrid, *Limiter) {
	t.Helper()
	h, err := newHybrid(opts)
	if err != nil {
		t.Fatal(err)
	}
	if ppm != 0 {
		h.clock = clock.Drifting(ppm)
	}
	h.start = h.start.Add(-began)
	h.begin(x)
	l, err := h.Limiter("l", limit)
	if err != nil {
		t.Fatal(err)
	}
	return h, l
}

// until waits in steps of a millisecond, at most a minute: of the bubble's time where the test is in one, else of the machine's.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 60_000 {
		if f() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("did not happen in a minute: %s", what)
}

func online(h *Hybrid) bool { return h.Stats().State == StateOnline }

func closeAll(t *testing.T, hs ...*Hybrid) {
	t.Helper()
	for _, h := range hs {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_ = h.Close(ctx) // a Redis that is away cannot be told
		cancel()
	}
}

func envelopeOf(l Limit) envelope.Limit {
	return envelope.Limit{
		Kind: envelope.Kind(l.Algorithm), Rate: l.Rate, Period: l.Period, Burst: l.Burst, SubWindows: l.SubWindows,
		Tick: time.Microsecond,
	}
}

// five are the algorithms with the same rate and period.
func five(rate int64, period time.Duration) []Limit {
	return []Limit{
		TokenBucket(rate, period), LeakyBucket(rate, period), FixedWindow(rate, period),
		SlidingWindow(rate, period).WithSubWindows(2), SlidingLog(rate, period),
	}
}

// ---- hostile schedules ----

// A phase is a stretch of one instance's load.
type phase struct {
	length time.Duration
	gap    time.Duration // between two calls of a caller; 0: no calls
	cost   int64
	burst  int // calls at once at the beginning
}

// A cut is a stretch in which one instance cannot reach Redis.
type cut struct {
	from, to time.Duration
	refuse   bool // connections are refused, else swallowed
}

type schedule struct {
	limit    Limit
	share    float64
	leaseTTL time.Duration
	loads    [][]phase
	cuts     [][]cut
	began    []time.Duration
	offset   time.Duration
	driftPPM int64
	rtt      time.Duration
	lossy    int  // one call in so many is lost, loses its reply, is late or is repeated; 0 for none
	refunds  int  // one admission in so many is refunded; 0 for none
	twice    bool // and counts twice: what the checker must find
	setLimit int  // one check in so many is followed by a SetLimit, to half the limit or back; 0 for none
	seed     uint64
}

const (
	simBeat    = 100 * time.Millisecond
	simTimeout = 20 * time.Millisecond
	simSync    = 20 * time.Millisecond
)

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func drawSchedule(t *rapid.T, alg Algorithm, cuts bool) schedule {
	rate := rapid.Int64Range(1, 200).Draw(t, "rate")
	period := ms(100 * rapid.IntRange(2, 10).Draw(t, "period"))
	limit := five(rate, period)[alg-1]
	if alg.bucket() {
		limit = limit.WithBurst(rapid.Int64Range(1, 300).Draw(t, "burst"))
	}
	n := rapid.IntRange(2, 4).Draw(t, "instances")
	s := schedule{
		limit:    limit,
		share:    rapid.SampledFrom([]float64{1, 0.5, 0.1, 0}).Draw(t, "share"),
		leaseTTL: ms(rapid.SampledFrom([]int{20, 50, 200, 1000}).Draw(t, "lease ttl")),
		offset:   time.Duration(rapid.Int64Range(-3600_000_000, 3600_000_000).Draw(t, "server clock")) * time.Microsecond,
		driftPPM: rapid.Int64Range(-900, 900).Draw(t, "drift"),
		rtt:      time.Duration(rapid.SampledFrom([]int{200, 2000, 8000}).Draw(t, "rtt")) * time.Microsecond,
		lossy:    rapid.SampledFrom([]int{0, 0, 30, 8}).Draw(t, "lossy"),
		refunds:  rapid.SampledFrom([]int{0, 0, 20, 3}).Draw(t, "refunds"),
		setLimit: rapid.SampledFrom([]int{0, 0, 0, 100}).Draw(t, "set limit"),
		seed:     rapid.Uint64().Draw(t, "seed"),
	}
	for range n {
		var load []phase
		for range rapid.IntRange(1, 5).Draw(t, "phases") {
			load = append(load, phase{
				length: ms(rapid.IntRange(10, 900).Draw(t, "length")),
				gap:    time.Duration(rapid.SampledFrom([]int{0, 0, 300, 1000, 5000, 40000}).Draw(t, "gap")) * time.Microsecond,
				cost:   rapid.SampledFrom([]int64{1, 1, 1, 2, 7}).Draw(t, "cost"),
				burst:  rapid.SampledFrom([]int{0, 0, 20, 400}).Draw(t, "burst calls"),
			})
		}
		s.loads = append(s.loads, load)
		s.began = append(s.began, ms(rapid.IntRange(0, 100_000).Draw(t, "own clock")))
		var c []cut
		if cuts {
			for range rapid.IntRange(0, 2).Draw(t, "cuts") {
				from := ms(rapid.IntRange(0, 1500).Draw(t, "cut from"))
				c = append(c, cut{from, from + ms(rapid.IntRange(50, 3000).Draw(t, "cut for")), rapid.Bool().Draw(t, "refused")})
			}
		}
		s.cuts = append(s.cuts, c)
	}
	if cuts && rapid.Bool().Draw(t, "saturated") {
		s.saturate()
	}
	return s
}

// saturate gives the schedule enough load and time for outage shares to be used.
func (s *schedule) saturate() {
	s.limit.Rate, s.limit.Burst, s.limit.Period = 100, 100, ms(400)
	s.leaseTTL = simSync
	for i := range s.loads {
		s.loads[i] = []phase{{length: 4 * time.Second, gap: time.Duration(1+i) * time.Millisecond, cost: 1}}
	}
}

// drawFate is the network of a schedule: what is lost, late or repeated, and when nothing passes.
func (s *schedule) drawFate(r *rand.Rand, start time.Time, cuts []cut) func(bool, []tier.Ask) fate {
	return func(bool, []tier.Ask) fate {
		f := fate{
			there: s.rtt/4 + time.Duration(r.Int64N(int64(s.rtt/2))),
			back:  s.rtt/4 + time.Duration(r.Int64N(int64(s.rtt/2))),
		}
		at := time.Since(start)
		for _, c := range cuts {
			if at >= c.from && at < c.to {
				switch {
				case c.refuse:
					f.refuse = true
				case r.IntN(2) == 0:
					f.there += c.to - at // a server that hangs runs it when it goes on
				default:
					f.lose = true
				}
				return f
			}
		}
		if s.lossy > 0 && r.IntN(s.lossy) == 0 {
			switch r.IntN(5) {
			case 0:
				f.lose = true
			case 1:
				f.loseReply = true
			case 2:
				f.there += time.Duration(r.Int64N(int64(5 * simTimeout))) // overtaken by later ones, perhaps late
			case 3:
				f.back += time.Duration(r.Int64N(int64(2 * simTimeout)))
			case 4:
				f.again = time.Duration(1 + r.Int64N(int64(5*simTimeout)))
			}
		}
		return f
	}
}

type outcome struct {
	verdict  envelope.Verdict
	admitted int64
	refunded int64
	sources  [4]int64
	err      error
}

// half is the other limit of a schedule that changes it. The bound is the greatest in use.
func half(l Limit) Limit {
	l.Rate = (l.Rate + 1) / 2
	l.Burst = (l.Burst + 1) / 2
	return l
}

// play runs a schedule in a bubble and judges what was admitted, net of what was refunded.
func play(t *testing.T, s schedule, v model.Variant) (o outcome) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(v, s.offset, s.driftPPM)
		var hs []*Hybrid
		var ls []*Limiter
		var wires []*wire
		for i := range s.loads {
			x := &wire{w: w}
			h, l := join(t, x, s.limit, s.began[i], WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync),
				WithLeaseTTL(s.leaseTTL), WithLocalShare(s.share))
			hs, ls, wires = append(hs, h), append(ls, l), append(wires, x)
		}
		for _, h := range hs {
			until(t, "the fleet is one", func() bool {
				s := h.Stats()
				return s.State == StateOnline && s.Instances == len(hs)
			})
		}
		var mem envelope.Memory
		var mu sync.Mutex
		start := time.Now()
		var wg sync.WaitGroup
		for i, l := range ls {
			wires[i].setFate(s.drawFate(rand.New(rand.NewPCG(s.seed, uint64(i))), start, s.cuts[i]))
			check := func(rnd *rand.Rand, cost int64) {
				a := envelope.Admission{Called: w.nowNS(), Cost: cost, Key: 1, Instance: int32(i)}
				r, err := l.AllowN(context.Background(), "k", cost)
				a.Returned = w.nowNS()
				var refunded int64
				if r.Allowed {
					_ = mem.Record(a)
					if s.refunds > 0 && rnd.IntN(s.refunds) == 0 {
						a.Called, a.Cost = w.nowNS(), -cost
						err = errors.Join(err, l.Refund(context.Background(), "k", cost))
						if s.twice {
							err = errors.Join(err, l.Refund(context.Background(), "k", cost))
						}
						a.Returned = w.nowNS()
						refunded = cost
						_ = mem.Record(a)
					}
				}
				if s.setLimit > 0 && rnd.IntN(s.setLimit) == 0 {
					err = errors.Join(err, l.SetLimit([]Limit{s.limit, half(s.limit)}[rnd.IntN(2)]))
				}
				mu.Lock()
				defer mu.Unlock()
				if r.Allowed {
					o.admitted += cost
					o.sources[r.Source] += cost
					o.refunded += refunded
				}
				if err != nil {
					o.err = err
				}
			}
			for caller := range 2 { // so that some wait together
				rnd := rand.New(rand.NewPCG(s.seed, uint64(100+10*i+caller)))
				wg.Go(func() {
					end := start
					for _, p := range s.loads[i] {
						end = end.Add(p.length)
						for range p.burst {
							check(rnd, p.cost)
						}
						for p.gap > 0 && time.Now().Before(end) {
							check(rnd, p.cost)
							time.Sleep(p.gap)
						}
						time.Sleep(time.Until(end))
					}
				})
			}
		}
		wg.Wait()
		closeAll(t, hs...)
		w.air.Wait()
		o.verdict = envelope.Check(envelopeOf(s.limit), mem.History())
	})
	return o
}

// checks sets how many schedules rapid tries; under the race detector a few are enough, since each is deterministic.
func checks(t *testing.T, n int) {
	t.Helper()
	if raceEnabled {
		n = max(1, n/5)
	}
	_ = flag.Set("rapid.nofailfile", "true") // the seed it prints is enough
	f := flag.Lookup("rapid.checks")
	old := f.Value.String()
	if old != f.DefValue {
		return // asked for on the command line
	}
	if err := f.Value.Set(fmt.Sprint(n)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Value.Set(old) })
}

// variantSchedules is how many schedules a broken variant may take to be caught, and with TIERLIMIT_LONG=1 how many of each kind the
// protocol itself has to stand.
const variantSchedules = 250

func hostileChecks(t *testing.T) int {
	if os.Getenv("TIERLIMIT_LONG") != "" {
		return variantSchedules
	}
	t.Logf("20 schedules; TIERLIMIT_LONG=1 makes it %d", variantSchedules)
	return 20
}

// G1 and G4: whatever the network does to whatever load, refunds and changes of the limit included, the fleet stays within the limit.
// The server's clock is hours off and up to 900 ppm fast or slow against those of the instances. These began at different instants
// but run alike: a bubble has one clock, so no schedule has one instance fast and another slow. None compares its clock with
// another's, only with the server's.
func TestHostileNetworkNeverOvershoots(t *testing.T) {
	checks(t, hostileChecks(t))
	for alg := AlgorithmTokenBucket; alg <= AlgorithmSlidingLog; alg++ {
		for _, cuts := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/cuts=%t", alg, cuts), func(t *testing.T) {
				t.Parallel()
				rapid.Check(t, func(r *rapid.T) {
					s := drawSchedule(r, alg, cuts)
					o := play(t, s, model.Variant{})
					if o.err != nil {
						r.Fatal(o.err)
					}
					if o.verdict.Overshoot > 0 {
						r.Fatalf("%v: %v (admitted %d, refunded %d, sources %v)", s.limit, o.verdict, o.admitted, o.refunded, o.sources)
					}
				})
			})
		}
	}
}

// The generator is strong enough to find each rule of the protocol when it is left out.
func TestPlainVariantsAreCaught(t *testing.T) {
	for _, tc := range []struct {
		name string
		alg  Algorithm
		cuts bool
		v    model.Variant
	}{
		{"bucket with refunds that count twice", AlgorithmTokenBucket, false, model.Variant{}},
		{"fixed window with refunds that count twice", AlgorithmFixedWindow, false, model.Variant{}},
		{"bucket with late returns", AlgorithmTokenBucket, false, model.Variant{LateReturns: true}},
		{"fixed window without the tie", AlgorithmFixedWindow, false, model.Variant{NoTie: true}},
		{"sliding window without the tie", AlgorithmSlidingWindow, false, model.Variant{NoTie: true}},
		{"log without the stretch", AlgorithmSlidingLog, false, model.Variant{NoStretch: true}},
		{"bucket without darkness", AlgorithmTokenBucket, true, model.Variant{NoDarkness: true}},
		{"fixed window without darkness", AlgorithmFixedWindow, true, model.Variant{NoDarkness: true}},
		{"sliding window without darkness", AlgorithmSlidingWindow, true, model.Variant{NoDarkness: true}},
		{"log without darkness", AlgorithmSlidingLog, true, model.Variant{NoDarkness: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			const most = variantSchedules
			gen := rapid.Custom(func(r *rapid.T) schedule {
				s := drawSchedule(r, tc.alg, tc.cuts)
				s.refunds, s.setLimit = 0, 0 // which explain away part of an overshoot
				if tc.v == (model.Variant{}) {
					s.refunds, s.twice = 3, true
				}
				if tc.cuts {
					s.saturate()
					s.share = 0
				}
				return s
			})
			for seed := range most {
				if v := play(t, gen.Example(seed), tc.v).verdict; v.Overshoot > 0 {
					t.Logf("schedule %d: %v", seed, v)
					return
				}
			}
			t.Errorf("not caught in %d schedules", most)
		})
	}
}

// A directed is a small fleet in a bubble that a test drives by hand.
type directed struct {
	t     *testing.T
	w     *world
	hs    []*Hybrid
	ls    []*Limiter
	wires []*wire
	mem   envelope.Memory
}

func newDirected(t *testing.T, n int, limit Limit, v model.Variant, opts ...Option) *directed {
	t.Helper()
	return newDrifting(t, make([]int64, n), limit, v, opts...)
}

// newDrifting is newDirected with a clock for each instance that is fast by so many parts in a million.
func newDrifting(t *testing.T, ppm []int64, limit Limit, v model.Variant, opts ...Option) *directed {
	t.Helper()
	n := len(ppm)
	d := &directed{t: t, w: newWorld(v, time.Hour, 0)}
	opts = append([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync)}, opts...)
	for i := range n {
		x := &wire{w: d.w}
		h, l := joinDrifting(t, x, limit, ms(i*700), ppm[i], opts...)
		d.hs, d.ls, d.wires = append(d.hs, h), append(d.ls, l), append(d.wires, x)
	}
	for _, h := range d.hs {
		until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == n })
	}
	time.Sleep(3 * simBeat)
	return d
}

// spend makes calls of cost 1 at once, spendN of any cost, and returns how many were admitted.
func (d *directed) spend(i, calls int) (admitted int) { return d.spendN(i, calls, 1) }

func (d *directed) spendN(i, calls int, cost int64) (admitted int) {
	d.t.Helper()
	for range calls {
		a := envelope.Admission{Called: d.w.nowNS(), Cost: cost, Key: 1, Instance: int32(i)}
		r, err := d.ls[i].AllowN(context.Background(), "k", cost)
		if err != nil {
			d.t.Fatal(err)
		}
		if a.Returned = d.w.nowNS(); r.Allowed {
			admitted++
			_ = d.mem.Record(a)
		}
	}
	return admitted
}

func (d *directed) verdict() envelope.Verdict {
	closeAll(d.t, d.hs...)
	d.w.air.Wait()
	return envelope.Check(envelopeOf(d.ls[0].Limit()), d.mem.History())
}

// caught runs f on the protocol, which must not overshoot, and on the variant, which must.
func caught(t *testing.T, v model.Variant, f func(t *testing.T, v model.Variant) envelope.Verdict) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		if got := f(t, model.Variant{}); got.Overshoot > 0 {
			t.Errorf("the protocol: %v", got)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		if got := f(t, v); got.Overshoot == 0 {
			t.Errorf("the variant %+v is not caught: %v", v, got)
		}
	})
}

// What may not be there at the end of a slot is discarded then, not when a call happens to come.
func TestRefillUnderALeaseIsDiscardedAtTheRollover(t *testing.T) {
	caught(t, model.Variant{NoRollover: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
		d := newDirected(t, 2, TokenBucket(1000, time.Second), v, WithLocalShare(1), WithLeaseTTL(time.Second))
		d.spend(0, 3)
		for range 100 { // a demand that is worth a lease over the horizon
			d.spend(0, 1)
			time.Sleep(2 * time.Millisecond)
		}
		c := d.hs[0].table.Find(d.ls[0].hash("k"), d.ls[0].id, "k")
		if c.Tokens() < 100 {
			t.Fatalf("%d tokens leased, want 100 or more", c.Tokens())
		}
		// Its exchanges do not pass from here on: it keeps the lease to the end.
		d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate { return fate{lose: !heartbeat} })
		time.Sleep(time.Duration(c.Deadline()-d.hs[0].now()) - time.Millisecond)
		d.spend(0, int(c.Tokens()))
		time.Sleep(5 * time.Millisecond) // past the end of the slot, which lies a drift behind the deadline
		if n := d.spendN(1, 1, 1000); n == 0 {
			d.spendN(1, 1, 450)
		}
		return d.verdict()
	})
}

// While a lease is out the bucket fills only to what is left of it.
func TestRefillUnderALeaseIsDiscarded(t *testing.T) {
	for _, limit := range []Limit{TokenBucket(1000, time.Second), LeakyBucket(1000, time.Second)} {
		caught(t, model.Variant{NoDiscard: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
			d := newDirected(t, 2, limit, v, WithLocalShare(1), WithLeaseTTL(time.Second))
			for i := 0; i < 300 || d.cell(0).Tokens() < 300; i++ {
				if d.spend(0, 1); i == 2000 {
					t.Fatal("there never is a lease of 300")
				}
				time.Sleep(2 * time.Millisecond)
			}
			time.Sleep(400 * time.Millisecond) // were it not for the lease, there would be as many more
			c := d.cell(0)
			leased := c.Tokens()
			if n := d.spend(0, int(leased)); n < 100 {
				t.Errorf("%d of %d spent of a lease that was to be in hand", n, leased)
			}
			c.Mu.Lock()
			d.hs[0].only.enqueueLocked(c) // reported: no longer outstanding
			c.Mu.Unlock()
			time.Sleep(2 * time.Millisecond)
			for n := int64(1000); n > 100; n -= 50 {
				d.spendN(1, 1, n)
			}
			return d.verdict()
		})
	}
}

// A lease that each report renews is not renewed for ever while other members may be using their shares.
func TestALeaseIsNotCarriedThroughTheDark(t *testing.T) {
	caught(t, model.Variant{KeepsCarry: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
		d := newDirected(t, 4, SlidingLog(1000, 10*time.Second), v, WithLocalShare(1), WithLeaseTTL(500*time.Millisecond), WithBreaker(quick))
		d.spend(0, 1)
		time.Sleep(time.Second)
		held := int64(0)
		for range 10 { // bursts of demand, until there is a lease of more than what one of four may hold
			d.spendN(3, 1, 180)
			time.Sleep(time.Millisecond)
			d.spend(3, 1)
			if held = d.cell(3).Tokens(); held > 400 {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		if held <= 400 {
			t.Errorf("a lease of %d", held)
		}
		for _, x := range d.wires[:3] {
			x.setFate(func(bool, []tier.Ask) fate { return fate{refuse: true} })
		}
		for end := time.Now().Add(d.ls[0].Bound().Silence + 12*time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			d.spend(3, 1) // hardly any demand is left, but some
		}
		for i := range 4 {
			d.spend(i, 500)
		}
		return d.verdict()
	})
}

// Darkness is remembered: a key that nobody touched in the outage is not full when all are back.
func TestDarknessIsRemembered(t *testing.T) {
	caught(t, model.Variant{NoMemory: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
		d := newDirected(t, 2, TokenBucket(40, time.Second), v, WithLocalShare(0), WithBreaker(quick))
		d.spend(0, 1)
		d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{refuse: true} })
		time.Sleep(3 * time.Second)
		if n := d.spend(0, 40); n != 20 {
			t.Errorf("the share of two is %d of 40, want 20", n)
		}
		d.wires[0].setFate(nil)
		until(t, "it is back", func() bool { return online(d.hs[0]) })
		time.Sleep(simBeat) // the other has heard of it
		d.spend(1, 60)
		return d.verdict()
	})
}

// Late calls: a sign of life that runs after its fence is none.
func TestALateHeartbeatIsNoSignOfLife(t *testing.T) {
	caught(t, model.Variant{NoFence: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
		d := newDirected(t, 2, TokenBucket(400, time.Second).WithBurst(40), v, WithLocalShare(0), WithBreaker(quick))
		d.spend(0, 1)
		d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate {
			return fate{there: 2 * time.Second, refuse: !heartbeat}
		})
		time.Sleep(2*time.Second + simBeat*12/10) // the last beat has just run
		if n := d.spend(0, 40); n != 20 {
			t.Errorf("the share of two is %d of 40, want 20", n)
		}
		d.spend(1, 60)
		d.wires[0].setFate(nil)
		return d.verdict()
	})
}

var quick = breaker.Settings{Failures: 2, Cooldown: 50 * time.Millisecond, MaxCooldown: 100 * time.Millisecond}

// ---- the loop, by hand ----

func (w *world) entries() []logged {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.log)
}

func (d *directed) cell(i int) *local.Cell {
	return d.hs[i].table.Find(d.ls[i].hash("k"), d.ls[i].id, "k")
}

func (d *directed) close() {
	closeAll(d.t, d.hs...)
	d.w.air.Wait()
}

// Late joiners: callers that join during a flight are in the next one, and are not denied on this one's reply.
func TestLateJoinersWaitForTheNextFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1, time.Minute).WithBurst(2), model.Variant{}, WithLocalShare(0))
		defer d.close()
		d.wires[0].setFate(steady(10 * time.Millisecond))
		var results [3]Result
		var wg sync.WaitGroup
		for i := range results {
			wg.Go(func() {
				time.Sleep(ms(2 * i))
				r, err := d.ls[0].Allow(t.Context(), "k")
				if err != nil {
					t.Error(err)
				}
				results[i] = r
			})
		}
		wg.Wait()
		log := d.w.entries()
		if len(log) != 2 {
			t.Fatalf("%d exchanges, want 2: the first alone, the two that joined together", len(log))
		}
		if n := log[1].asks[0].Need; len(n) != 1 || n[0] != (tier.Cost{N: 1, Count: 2}) {
			t.Errorf("the second exchange needs %v, want two callers", n)
		}
		if !results[0].Allowed || !results[1].Allowed || results[2].Allowed {
			t.Errorf("%v, want two admitted in the order they came", results)
		}
	})
}

// A denial counts from the receipt, so that a round trip longer than the retry-after does not make every check a call.
func TestDenialCountsFromTheReceipt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(100, time.Second).WithBurst(1), model.Variant{}, WithLocalShare(0))
		defer d.close()
		d.wires[0].setFate(steady(8 * time.Millisecond))
		d.spend(0, 1) // debited after 4 ms, known after 8
		// Asked after 8 ms, denied by Redis after 12 for another 2, known after 16.
		r, err := d.ls[0].Allow(t.Context(), "k")
		if err != nil || r.Allowed || r.Source != Remote || r.RetryAfter < time.Millisecond || r.RetryAfter > 3*time.Millisecond {
			t.Fatalf("%v, %v, want a denial for 2ms", r, err)
		}
		calls := len(d.w.entries())
		r, err = d.ls[0].Allow(t.Context(), "k")
		if err != nil || r.Allowed || r.Source != Local || r.RetryAfter <= 0 {
			t.Errorf("%v, %v: want the denial that was just received to be kept", r, err)
		}
		if n := len(d.w.entries()); n != calls {
			t.Errorf("%d exchanges for a denial that is kept", n-calls)
		}
		time.Sleep(r.RetryAfter)
		if r, err = d.ls[0].Allow(t.Context(), "k"); err != nil || !r.Allowed {
			t.Errorf("after exactly RetryAfter: %v, %v", r, err)
		}
	})
}

// Tokens debited for a caller who is gone are burnt; handing them back would mint them twice.
func TestLeftoversOfWaitersAreNotReturned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(10, time.Minute), model.Variant{}, WithLocalShare(0.5))
		defer d.close()
		d.wires[0].setFate(steady(10 * time.Millisecond))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		if _, err := d.ls[0].AllowN(ctx, "k", 3); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%v, want the context's end", err)
		}
		time.Sleep(time.Second)
		if err := d.hs[0].Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, e := range d.w.entries() {
			if a := e.asks[0]; a.Return+a.Carry+a.Spent+a.Refund != 0 {
				t.Errorf("credits for a caller who was gone: %+v", a)
			}
		}
		if r, err := d.ls[0].Peek(t.Context(), "k"); err != nil || r.Remaining != 7 {
			t.Errorf("%v, %v, want 7 left: the 3 are burnt", r, err)
		}
	})
}

// After an exchange with an unknown outcome nothing is claimed of the lease, what is left of it is spent under the
// old deadline, and burnt at the next good reply.
func TestUnknownOutcomeClaimsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1000, time.Second), model.Variant{}, WithLocalShare(0.5), WithLeaseTTL(time.Second))
		defer d.close()
		for range 100 {
			d.spend(0, 1)
			time.Sleep(2 * time.Millisecond)
		}
		c := d.cell(0)
		if c.Tokens() < 10 {
			t.Fatalf("%d tokens leased, want 10 or more", c.Tokens())
		}
		d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate { return fate{loseReply: !heartbeat} })
		c.Mu.Lock()
		d.hs[0].only.enqueueLocked(c)
		c.Mu.Unlock()
		time.Sleep(2 * simTimeout)
		old := c.Deadline()
		c.Mu.Lock()
		unknown := c.Unknown
		c.Mu.Unlock()
		if !unknown {
			t.Fatal("the outcome of a call without an answer is taken for known")
		}
		if n := d.spend(0, 3); n != 3 {
			t.Errorf("%d of 3 admitted from what was in hand", n)
		}
		if c.Deadline() != old {
			t.Error("the deadline moved without a reply")
		}
		before := len(d.w.entries())
		d.wires[0].setFate(nil)
		c.Mu.Lock()
		d.hs[0].only.enqueueLocked(c)
		c.Mu.Unlock()
		time.Sleep(simTimeout)
		log := d.w.entries()
		if len(log) == before {
			t.Fatal("no exchange")
		}
		if a := log[before].asks[0]; a.Lease != 0 || a.Spent+a.Carry+a.Return != 0 || len(a.Spends) > 0 {
			t.Errorf("claims after an unknown outcome: %+v", a)
		}
		if left := c.Tokens(); left > log[before].grants[0].Lease {
			t.Errorf("%d tokens in hand, %d granted: the old ones were not burnt", left, log[before].grants[0].Lease)
		}
	})
}

// A credit is sent at most once, whatever became of the call that carried it; and if it were not, the checker would see it.
func TestCreditsAreNeverSentTwice(t *testing.T) {
	play := func(again bool) (v envelope.Verdict) {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 2, FixedWindow(2000, time.Hour), model.Variant{}, WithLocalShare(1), WithLeaseTTL(100*time.Millisecond))
			d.wires[0].dup = true
			for range 20 {
				d.wires[0].setFate(nil)
				for range 20 {
					d.spend(0, 1)
					time.Sleep(4 * time.Millisecond)
				}
				d.wires[0].setFate(func(_ bool, asks []tier.Ask) fate {
					f := fate{there: 100 * time.Microsecond}
					if again && len(asks) == 1 && asks[0].Return > 0 && len(asks[0].Need) == 0 {
						f.again = time.Millisecond // only pure returns: doubled debits would hide them
					}
					return f
				})
				time.Sleep(300 * time.Millisecond)
			}
			for range 100 {
				d.spend(1, 100)
				time.Sleep(simBeat)
			}
			v = d.verdict()
			// The second run of a repeated call is not the instance's doing.
			seen := map[string]bool{}
			for _, e := range d.w.entries() {
				a := e.asks[0]
				if a.Return == 0 || a.Lease == 0 || again {
					continue
				}
				id := fmt.Sprintf("%+v", a)
				if seen[id] {
					t.Errorf("sent twice: %s", id)
				}
				seen[id] = true
			}
		})
		return v
	}
	if v := play(false); v.Overshoot > 0 {
		t.Error(v)
	}
	if v := play(true); v.Overshoot == 0 {
		t.Errorf("returns that count twice are not caught: %v", v)
	}
}

// The clock is read after the take: a token taken from a lease that is over by then is burnt, not spent.
func TestALeaseEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(10, time.Minute), model.Variant{}, WithLocalShare(0.5))
		defer d.close()
		l, h := d.ls[0], d.hs[0]
		d.spend(0, 1)
		c := d.cell(0)
		p := l.policy.Load()
		c.Mu.Lock()
		defer c.Mu.Unlock()
		c.Deposit(5, h.now()+int64(time.Millisecond), 0)
		warm := func() (r Result, ok bool) {
			ok = l.warm(&r, c, p, 1)
			return r, ok
		}
		if r, ok := warm(); !ok || !r.Allowed {
			t.Fatalf("%v, %t: a lease in hand is spent", r, ok)
		}
		time.Sleep(time.Millisecond)
		if r, ok := warm(); !ok || !r.Allowed {
			t.Errorf("%v, %t: at its deadline a lease still is", r, ok)
		}
		time.Sleep(time.Nanosecond)
		if r, ok := warm(); ok || r.Allowed {
			t.Errorf("%v, %t: a lease was spent after its deadline", r, ok)
		}
		if left := c.Tokens(); left != 2 {
			t.Errorf("%d tokens left, want 2: the void one is burnt, not put back", left)
		}
		c.Clear()
	})
}

// Many keys due at once are sent in chunks that do not block Redis, and a key in flight is not sent again.
func TestManyKeysAreChunked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(10, time.Minute), model.Variant{})
		defer d.close()
		const keys = 10_001
		var wg sync.WaitGroup
		for i := range keys {
			wg.Go(func() {
				if r, err := d.ls[0].Allow(t.Context(), fmt.Sprint(i)); err != nil || !r.Allowed || r.Source != Remote {
					t.Errorf("key %d: %v, %v", i, r, err)
				}
			})
		}
		wg.Wait()
		total := 0
		for _, e := range d.w.entries() {
			if len(e.asks) > remote.MaxKeys {
				t.Errorf("%d keys in one call", len(e.asks))
			}
			total += len(e.asks)
		}
		if total != keys {
			t.Errorf("%d keys settled, want %d", total, keys)
		}
		if d.wires[0].most > maxFlights {
			t.Errorf("%d calls at once, want at most %d", d.wires[0].most, maxFlights)
		}
	})
}

// One exchange of a key is in flight at a time; the callers of a cold key share it.
func TestCallersOfOneKeyShareAnExchange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1000, time.Minute), model.Variant{}, WithLocalShare(0))
		defer d.close()
		d.wires[0].setFate(steady(4 * time.Millisecond))
		var wg sync.WaitGroup
		var admitted atomic.Int64
		for range 2000 {
			wg.Go(func() {
				r, err := d.ls[0].Allow(t.Context(), "k")
				if err != nil {
					t.Error(err)
				}
				if r.Allowed {
					admitted.Add(1)
				}
			})
		}
		wg.Wait()
		if admitted.Load() != 1000 {
			t.Errorf("%d admitted, want 1000", admitted.Load())
		}
		if n := len(d.w.entries()); n > 3 {
			t.Errorf("%d exchanges for callers that came at once", n)
		}
		if d.wires[0].most > 1 {
			t.Errorf("%d exchanges of one key at once", d.wires[0].most)
		}
	})
}

// An answer that comes after its caller gave up changes nothing any more.
func TestALateAnswerIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(100, time.Hour), model.Variant{}, WithLocalShare(0), WithBreaker(breaker.Settings{Failures: 100}))
		defer d.close()
		d.spend(0, 2)
		late := steady(6 * simTimeout)
		d.wires[0].setFate(func(heartbeat bool, asks []tier.Ask) fate {
			if heartbeat {
				return fate{}
			}
			return late(false, asks)
		})
		r, err := d.ls[0].Allow(t.Context(), "k") // given up after one timeout
		if err != nil || r.Allowed || r.Source != Fallback {
			t.Fatalf("%v, %v", r, err)
		}
		d.wires[0].setFate(nil)
		d.spend(0, 10)
		c := d.cell(0)
		before, deadline := c.Remaining(), c.Deadline()
		time.Sleep(ms(5))
		if c.Remaining() > before || c.Deadline() < deadline {
			t.Errorf("remaining %d then %d, deadline %d then %d", before, c.Remaining(), deadline, c.Deadline())
		}
		time.Sleep(time.Second)
		// What ran late was refused by the fence or debited without an owner: too few, never too many.
		admitted := d.spend(0, 200) + 12
		if admitted > 100 {
			t.Errorf("%d admitted of 100", admitted)
		}
	})
}

// A reset and a raised limit beat kept denials, here at once and elsewhere within a heartbeat.
func TestResetBeatsKeptDenials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, TokenBucket(3, time.Hour), model.Variant{})
		defer d.close()
		d.spend(0, 10)
		d.spend(1, 10)
		for i := range 2 {
			if r, err := d.ls[i].Allow(t.Context(), "k"); err != nil || r.Allowed || r.Source != Local {
				t.Fatalf("instance %d: %v, %v, want a kept denial", i, r, err)
			}
		}
		if err := d.ls[0].Reset(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		if r, err := d.ls[0].Allow(t.Context(), "k"); err != nil || !r.Allowed {
			t.Errorf("after a reset: %v, %v", r, err)
		}
		time.Sleep(simBeat)
		if r, err := d.ls[1].Allow(t.Context(), "k"); err != nil || !r.Allowed {
			t.Errorf("elsewhere, a heartbeat later: %v, %v", r, err)
		}
		// A raise fills nothing for free, but the denial of before is void.
		d.spend(0, 10)
		d.spend(1, 10)
		for i := range 2 {
			if err := d.ls[i].SetLimit(TokenBucket(1000, time.Second)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(50 * time.Millisecond) // enough for a lease of either
		for i := range 2 {
			if r, err := d.ls[i].Allow(t.Context(), "k"); err != nil || !r.Allowed {
				t.Errorf("after a raise: %v, %v", r, err)
			}
		}
	})
}

// The outage of one of two: its lease in hand, then silence, then its share, then back.
func TestStatesOfAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := &states{}
		d := newDirected(t, 1, TokenBucket(100, time.Second), model.Variant{}, WithBreaker(quick), WithObserver(seen))
		other, _ := join(t, &wire{w: d.w}, TokenBucket(100, time.Second), 0, WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync))
		d.hs = append(d.hs, other)
		time.Sleep(3 * simBeat)
		defer d.close()
		d.spend(0, 1)
		silence := d.ls[0].Bound().Silence
		d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{refuse: true} })
		cut := time.Now()
		until(t, "the outage is noticed", func() bool { return d.hs[0].Stats().State == StateSilent })
		for time.Since(cut) < silence-simBeat {
			if r, err := d.ls[0].Allow(t.Context(), "k"); err != nil || r.Allowed && r.Source == Fallback {
				t.Fatalf("%v after the cut, of a silence of %v: %v, %v", time.Since(cut), silence, r, err)
			}
			time.Sleep(ms(10))
		}
		time.Sleep(time.Until(cut.Add(silence + time.Second))) // the share begins empty and fills
		n := d.spend(0, 200)
		if n < 45 || n > 50 {
			t.Errorf("%d admitted at once by half of a burst of 100", n)
		}
		if s := d.hs[0].Stats(); s.State != StateShare || s.Breaker == "closed" {
			t.Errorf("state %v, breaker %s", s.State, s.Breaker)
		}
		d.wires[0].setFate(nil)
		until(t, "it is back", func() bool { return online(d.hs[0]) })
		if got, want := seen.of(), []State{StateOnline, StateSilent, StateShare, StateOnline}; !slices.Equal(got, want) {
			t.Errorf("the observer saw %v, want %v", got, want)
		}
	})
}

type states struct {
	mu  sync.Mutex
	all []State
}

func (s *states) Exchange(ExchangeEvent) {}
func (s *states) State(e StateEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, e.To)
}
func (s *states) of() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// ---- the parts ----

func TestWheel(t *testing.T) {
	var w wheel
	if at, ok := w.next(); ok {
		t.Fatalf("an empty wheel is due at %d", at)
	}
	a, b, far := &local.Cell{}, &local.Cell{}, &local.Cell{}
	for _, tc := range []struct {
		name string
		cell *local.Cell
		due  int64
		want int64
	}{
		{"rounded up, never early", a, 1, wheelTick},
		{"on the tick", b, 3 * wheelTick, 3 * wheelTick},
		{"far off: looked at early", far, 1e18, (wheelSlots - 1) * wheelTick},
		{"past: now", b, -5, 0},
	} {
		if got := w.add(tc.cell, tc.due); got != tc.want {
			t.Errorf("%s: due at %d, want %d", tc.name, got, tc.want)
		}
	}
	if at, ok := w.next(); !ok || at != 0 {
		t.Errorf("next at %d, %t, want 0", at, ok)
	}
	if got := w.pop(wheelTick-1, nil); !slices.Equal(got, []*local.Cell{b}) {
		t.Errorf("%v due before the first tick", got)
	}
	if got := w.pop(wheelTick-1, nil); len(got) != 0 {
		t.Errorf("%v popped twice", got)
	}
	if got := w.pop(3*wheelTick, nil); !slices.Equal(got, []*local.Cell{a, b}) {
		t.Errorf("%v", got)
	}
	// Time going back pops nothing and loses nothing.
	if got := w.pop(0, nil); len(got) != 0 {
		t.Errorf("%v", got)
	}
	if at, ok := w.next(); !ok || at != (wheelSlots-1)*wheelTick {
		t.Errorf("next at %d, %t", at, ok)
	}
	// A jump over the whole wheel.
	if got := w.pop(1e15, nil); !slices.Equal(got, []*local.Cell{far}) {
		t.Errorf("%v after a jump", got)
	}
	if w.n != 0 {
		t.Errorf("%d entries left", w.n)
	}
	if got, want := w.add(a, 0), int64(1e15/wheelTick+1)*wheelTick; got != want {
		t.Errorf("after a jump due at %d, want %d", got, want)
	}
}

func TestWheelLosesNothing(t *testing.T) {
	checks(t, 200)
	rapid.Check(t, func(r *rapid.T) {
		var w wheel
		now := rapid.Int64Range(0, 1e12).Draw(r, "now")
		w.tick = now / wheelTick
		due := map[*local.Cell]int64{}
		for range rapid.IntRange(1, 200).Draw(r, "steps") {
			if rapid.Bool().Draw(r, "add") {
				c := &local.Cell{}
				at := now + rapid.Int64Range(-1e9, 1e10).Draw(r, "due")
				due[c] = min(max(at, now), w.add(c, at))
				continue
			}
			now += rapid.Int64Range(0, 3e9).Draw(r, "step")
			for _, c := range w.pop(now, nil) {
				if _, ok := due[c]; !ok {
					r.Fatal("popped twice")
				}
				delete(due, c)
			}
			for _, at := range due {
				if at+2*wheelTick <= now {
					r.Fatalf("due at %d and not popped at %d", at, now)
				}
			}
		}
		if w.n != len(due) {
			r.Fatalf("%d entries, want %d", w.n, len(due))
		}
	})
}

func TestServerClock(t *testing.T) {
	if (serverClock{}).known() {
		t.Error("the zero clock is known")
	}
	k := serverClock{us: 5_000_000, sent: 1_000_000, received: 3_000_000} // a round trip of 2 ms
	for _, now := range []int64{3_000_000, 4_000_000, 1_000_000_000, 3_600_000_000_000} {
		at := k.at(now)
		// The server read its clock between sent and received, and either clock may be a part in a thousand fast.
		for _, read := range []int64{k.sent, k.received} {
			for _, drift := range []float64{0.9991, 1, 1.0009} {
				us := float64(k.us) + float64(now-read)*drift/1000
				if us < float64(at.Lo)-1 || us > float64(at.Hi)+1 {
					t.Errorf("at %d: the server's %f is outside of %v", now, us, at)
				}
			}
		}
		if fence := k.fence(now, time.Second); fence != at.Hi+1_000_000 {
			t.Errorf("fence %d, want the latest time now and a second", fence)
		}
	}
	// A time before the reading: as far back as either clock may say.
	for _, ago := range []int64{1_000, 1_000_000, 3_600_000_000_000} {
		at := k.at(k.sent - ago)
		for _, read := range []int64{k.sent, k.received} {
			for _, drift := range []float64{0.9991, 1, 1.0009} {
				if us := float64(k.us) - float64(read-k.sent+ago)*drift/1000; us < float64(at.Lo)-1 || us > float64(at.Hi)+1 {
					t.Errorf("%d ns before: the server's %f is outside of %v", ago, us, at)
				}
			}
		}
	}
	// Stretching what opens and shrinking what closes never cross.
	for _, ns := range []int64{0, 1, 999, 1000, 1e9, 1e15} {
		if stretch(ns) <= ns || shrink(ns) >= ns {
			t.Errorf("%d: stretch %d, shrink %d", ns, stretch(ns), shrink(ns))
		}
	}
}

func TestRateOf(t *testing.T) {
	const sync = 50 * time.Millisecond
	c := &local.Cell{}
	if got := rateOf(c, 0, 1, sync); got != 0 {
		t.Errorf("no demand gives %v", got)
	}
	// A steady demand is found within a few intervals, whatever the pace of looking.
	for _, step := range []time.Duration{time.Millisecond, 10 * time.Millisecond, sync, time.Second} {
		c := &local.Cell{}
		now := int64(1)
		for range 2000 {
			now += int64(step)
			c.Rate = rateOf(c, int64(step/time.Millisecond), now, sync)
			c.Settled = now
		}
		if perMS := c.Rate * 1e6; perMS < 0.99 || perMS > 1.01 {
			t.Errorf("looked at every %v: %v/ms, want 1", step, perMS)
		}
		for range 20 {
			now += int64(sync)
			c.Rate = rateOf(c, 0, now, sync)
			c.Settled = now
		}
		if c.Rate*1e6 > 1e-6 {
			t.Errorf("after a second of nothing: %v/ms", c.Rate*1e6)
		}
	}
	// Time standing still or going back is no reason for an infinite or negative rate.
	c = &local.Cell{}
	c.Settled = 1e9
	for _, now := range []int64{1e9, 5e8} {
		if got := rateOf(c, 10, now, sync); got < 0 || math.IsInf(got, 0) || math.IsNaN(got) || got > 10.0/float64(time.Millisecond) {
			t.Errorf("at %d: %v", now, got)
		}
	}
}

func parts(t *testing.T, limit Limit, opts ...Option) (*flight, *policy) {
	t.Helper()
	h, err := NewLocal(opts...)
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter("l", limit)
	if err != nil {
		t.Fatal(err)
	}
	return &flight{d: &domain{h: h}, rtt: 1e6, rttWorst: 1e6}, l.policy.Load()
}

func TestHorizonAndWant(t *testing.T) {
	f, p := parts(t, TokenBucket(5000, time.Hour)) // share 500
	const later = int64(time.Minute)               // after demand began
	const second = float64(time.Second)
	report := func(remaining int64) *local.Cell {
		c := &local.Cell{}
		c.Active = 1
		c.Report(remaining, 0)
		return c
	}
	for _, tc := range []struct {
		name      string
		remaining int64
		rate      float64
		carry     int64
		horizon   time.Duration
		low, high int64
	}{
		{"nobody asks", 5000, 0, 0, 50 * time.Millisecond, 0, 0},
		{"plentiful: the lease's time to live", 5000, 20 / second, 0, time.Second, 20, 24},
		{"plentiful, some carried", 5000, 20 / second, 10, time.Second, 10, 14},
		{"scarcer", 20, 20 / second, 0, 500 * time.Millisecond, 10, 13},
		{"scarce: call by call", 1, 15 / second, 0, 50 * time.Millisecond, 0, 0},
		{"at most the share", 5000, 1e6 / second, 0, 50 * time.Millisecond, 500, 500},
		{"more carried than wanted", 5000, 20 / second, 100, time.Second, 0, 0},
		{"an absurd rate", 5000, 1e30, 0, 50 * time.Millisecond, 500, 500},
	} {
		c := report(tc.remaining)
		h := f.horizon(p, c, tc.rate, later)
		if d := time.Duration(h) - tc.horizon; d < -time.Millisecond || d > time.Millisecond {
			t.Errorf("%s: horizon %v, want %v", tc.name, time.Duration(h), tc.horizon)
		}
		if got := f.want(c, p, tc.rate, tc.carry, later); got < tc.low || got > tc.high {
			t.Errorf("%s: want %d, should be %d to %d", tc.name, got, tc.low, tc.high)
		}
	}
	// More instances on the key make what remains scarcer.
	c := report(100)
	alone := f.horizon(p, c, 40/second, later)
	c.Active = 8
	if eight := f.horizon(p, c, 40/second, later); eight >= alone {
		t.Errorf("horizon of one %d, of eight %d", alone, eight)
	}
	// A bucket that is full makes nothing. While demand has just begun, its first leases are over before that costs more than a hundredth of
	// it, and those after them before it is full again.
	if f, p := parts(t, TokenBucket(1000, time.Second)); true {
		for _, tc := range []struct {
			remaining, out int64
			horizon        time.Duration
		}{{960, 40, 10 * time.Millisecond}, {940, 30, 30 * time.Millisecond}, {100, 100, 50 * time.Millisecond}} {
			c := report(tc.remaining)
			c.Out, c.Busy, c.Settled = tc.out, later-int64(20*time.Millisecond), later
			if h := time.Duration(f.horizon(p, c, 100/second, later)); h != tc.horizon {
				t.Errorf("just begun, %d remain and %d are out: horizon %v, want %v", tc.remaining, tc.out, h, tc.horizon)
			}
		}
	}
	// A limit that cannot be split is not leased.
	for _, l := range []Limit{TokenBucket(5, time.Second), FixedWindow(1000, 50*time.Millisecond), TokenBucket(0, time.Second)} {
		if f, p := parts(t, l); p.leased || f.want(report(1000), p, 1, 0, later) != 0 {
			t.Errorf("%v is leased", l)
		}
	}
	if f, p := parts(t, TokenBucket(1000, time.Second), WithLocalShare(0)); p.leased || f.want(report(1000), p, 1, 0, later) != 0 {
		t.Error("a local share of 0 is leased")
	}
}

// With a longer period the windows are others: what was spent of a lease of before is not counted in them.
func TestALongerWindowCountsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(1000, time.Second), model.Variant{})
		defer d.close()
		for i := 0; i < 200 || d.cell(0).Tokens() == 0 || d.cell(0).Tokens() == d.cell(0).Base; i++ {
			d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
		if err := d.ls[0].SetLimit(FixedWindow(300, 4*time.Second)); err != nil {
			t.Fatal(err)
		}
		for range 3 { // windows, each of which is used up
			d.intoWindow(4*time.Second, 0)
			for range 1500 {
				d.spend(0, 1)
				time.Sleep(time.Millisecond)
			}
		}
		d.intoWindow(4*time.Second, 0)
		n := 0
		for range 100 {
			n += d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
		var own atomic.Int64
		d.wires[0].setFate(func(_ bool, asks []tier.Ask) fate {
			for _, a := range asks {
				own.Store(max(own.Load(), a.Own))
			}
			return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond}
		})
		d.w.mu.Lock()
		d.w.store.Flush()
		d.w.mu.Unlock()
		time.Sleep(200 * time.Millisecond)
		told := own.Load()
		for range 1000 {
			n += d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
		if told < 50 || told > 100 || n < 200 || n > 300 {
			t.Errorf("Redis was told of %d of a window of 300 of which 100 were spent, and %d were admitted in all", told, n)
		}
	})
}

// A bucket's denial that is kept for a small cost tells a larger one how long all of it takes.
func TestAKeptDenialOfASmallerCost(t *testing.T) {
	for _, limit := range []Limit{TokenBucket(10, time.Second), LeakyBucket(10, time.Second), FixedWindow(10, time.Second)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(0))
				defer d.close()
				d.intoWindow(time.Second, 100*time.Millisecond)
				for range 12 { // not all at once, so that it comes back bit by bit
					d.spend(0, 1)
					time.Sleep(20 * time.Millisecond)
				}
				small, _ := d.ls[0].AllowN(t.Context(), "k", 1)
				large, _ := d.ls[0].AllowN(t.Context(), "k", 10)
				if small.Allowed || large.Allowed || large.RetryAfter < small.RetryAfter {
					t.Fatal(small, large)
				}
				time.Sleep(large.RetryAfter)
				if again, _ := d.ls[0].AllowN(t.Context(), "k", 10); !again.Allowed {
					t.Errorf("waiting %v was not enough: another %v", large.RetryAfter, again.RetryAfter)
				}
			})
		})
	}
}

func TestPause(t *testing.T) {
	for _, tc := range []struct {
		limit     Limit
		rtt       time.Duration
		active    int64
		low, high time.Duration
	}{
		{TokenBucket(1000, time.Second), time.Millisecond, 1, 10 * time.Millisecond, 10 * time.Millisecond},
		{TokenBucket(1000, time.Second), 100 * time.Microsecond, 8, 10 * time.Millisecond, 10 * time.Millisecond},
		{TokenBucket(20000, time.Second), 100 * time.Microsecond, 1, 499 * time.Microsecond, 500 * time.Microsecond},
		{TokenBucket(1000, time.Second).WithBurst(5), time.Millisecond, 1, 0, 0}, // so small a bucket is asked call by call
		{TokenBucket(10, time.Second), time.Millisecond, 1, 10 * time.Millisecond, 50 * time.Millisecond},
		{TokenBucket(1000, time.Second), 15 * time.Millisecond, 1, 30 * time.Millisecond, 30 * time.Millisecond}, // never below two round trips
	} {
		f, p := parts(t, tc.limit)
		f.rtt = float64(tc.rtt)
		if got := time.Duration(f.pause(p, tc.active)); got < tc.low || got > tc.high {
			t.Errorf("%v, %v away, %d active: %v, want %v to %v", tc.limit, tc.rtt, tc.active, got, tc.low, tc.high)
		}
	}
}

func TestDropWaiter(t *testing.T) {
	waiters := make([]*local.Waiter, 4)
	for i := range waiters {
		waiters[i] = &local.Waiter{N: int64(i)}
	}
	c := &local.Cell{}
	c.Waiters = slices.Clone(waiters)
	inFlight := c.Waiters[:2:2] // a flight holds the first two
	c.Waiters = c.Waiters[2:]
	dropWaiter(c, waiters[0]) // no longer among them
	if !slices.Equal(c.Waiters, waiters[2:]) {
		t.Errorf("%v", c.Waiters)
	}
	dropWaiter(c, waiters[2])
	if !slices.Equal(c.Waiters, waiters[3:]) {
		t.Errorf("%v", c.Waiters)
	}
	dropWaiter(c, waiters[2])
	dropWaiter(c, waiters[3])
	if len(c.Waiters) != 0 {
		t.Errorf("%v", c.Waiters)
	}
	if !slices.Equal(inFlight, waiters[:2]) {
		t.Errorf("what is in flight changed: %v", inFlight)
	}
}

// ---- cases that take longer than a test may ----

// Ten instances without Redis admit the limit together, and a limit that does not divide is split without a rest.
func TestSharesSumToTheLimit(t *testing.T) {
	for _, tc := range []struct {
		n, rate int64
		want    []int64 // per second, sorted
	}{
		{10, 100, []int64{10, 10, 10, 10, 10, 10, 10, 10, 10, 10}},
		{3, 7, []int64{2, 2, 3}},
		{4, 2, []int64{0, 0, 1, 1}},
	} {
		for _, limit := range five(tc.rate, time.Second) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, int(tc.n), limit, model.Variant{}, WithBreaker(quick))
				for _, x := range d.wires {
					x.setFate(func(bool, []tier.Ask) fate { return fate{refuse: true} })
				}
				time.Sleep(d.ls[0].Bound().Silence + 3*time.Second)
				from := time.Now()
				got := make([]int64, tc.n)
				for time.Since(from) < 10*time.Second {
					for i := range d.ls {
						got[i] += int64(d.spend(i, 1))
					}
					time.Sleep(7 * time.Millisecond)
				}
				slices.Sort(got)
				total := int64(0)
				for i, n := range got {
					total += n
					// Ten seconds, the burst that had come together, and a window begun. A weighted estimate rounds up.
					low, high := 9*tc.want[i], 12*tc.want[i]
					if limit.Algorithm == AlgorithmSlidingWindow {
						low = 5 * tc.want[i]
					}
					if n < low || n > high {
						t.Errorf("%v over %d: instance %d admitted %d in 10s, want about %d", limit, tc.n, i, n, 10*tc.want[i])
					}
				}
				if total > 12*tc.rate {
					t.Errorf("%v over %d: %d in 10s", limit, tc.n, total)
				}
				if v := d.verdict(); v.Overshoot > 0 {
					t.Errorf("%v over %d: %v", limit, tc.n, v)
				}
			})
		}
	}
}

// A minute of three times 1000/s over five instances.
func TestAMinuteOfOverload(t *testing.T) {
	for _, limit := range five(1000, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 5, limit, model.Variant{}, WithHeartbeat(time.Second), WithRemoteTimeout(50*time.Millisecond), WithSyncInterval(50*time.Millisecond))
				d.w.forget = true
				length := time.Minute
				if raceEnabled {
					length = 5 * time.Second
				}
				from := d.w.nowNS()
				var wg sync.WaitGroup
				for i := range d.ls {
					wg.Go(func() {
						for end := time.Now().Add(length); time.Now().Before(end); {
							d.spend(i, 1)
							time.Sleep(time.Second / 600)
						}
					})
				}
				wg.Wait()
				to := d.w.nowNS()
				history := d.mem.History()
				if v := d.verdict(); v.Overshoot > 0 {
					t.Errorf("%v: %v", limit, v)
				}
				got, could := envelope.Admitted(history, from, to), envelope.Demandable(envelopeOf(limit), from, to)
				t.Logf("%v: %d of %d", limit, got, could)
				if !raceEnabled && float64(got) < 0.97*float64(could) { // of so few windows one touched at its end counts too much
					t.Errorf("%v: %d admitted of %d", limit, got, could)
				}
			})
		})
	}
}

// Leases of ten instances, their leftovers spent when the window is over.
func TestLeftoversAtTheEndOfTheWindow(t *testing.T) {
	caught(t, model.Variant{NoStretch: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
		d := newDirected(t, 10, SlidingLog(100, 2*time.Second), v, WithLeaseTTL(time.Second))
		// Leases of ten or so, of which a few are spent, and nothing that gives them back.
		for range 3 {
			for i := range d.ls {
				d.spend(i, 1)
			}
			time.Sleep(12 * time.Millisecond)
		}
		began, leased := time.Now(), int64(0)
		for i, x := range d.wires {
			x.setFate(func(heartbeat bool, _ []tier.Ask) fate { return fate{lose: !heartbeat} })
			leased += d.cell(i).Tokens()
		}
		if leased < 20 {
			t.Errorf("%d tokens leased, want 20 or more", leased)
		}
		time.Sleep(500 * time.Millisecond)
		for i := range d.ls {
			d.spend(i, int(d.cell(i).Tokens()))
		}
		for _, x := range d.wires {
			x.setFate(nil)
		}
		time.Sleep(time.Until(began.Add(2 * time.Second)))
		for range 200 {
			for i := range d.ls {
				d.spend(i, 1)
			}
			time.Sleep(5 * time.Millisecond)
		}
		return d.verdict()
	})
}

// A server that is a minute ahead or behind, or whose clock steps an hour: nobody starves, nothing is made.
func TestClocks(t *testing.T) {
	for _, limit := range five(100, time.Second) {
		for _, offset := range []time.Duration{time.Minute, -time.Minute, 1000 * time.Hour} {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 3, limit, model.Variant{})
				d.w.mu.Lock()
				d.w.offset += offset // all instances' idea of it is wrong from here on
				d.w.mu.Unlock()
				time.Sleep(2 * time.Second)
				if offset < 0 && !limit.Algorithm.bucket() {
					time.Sleep(-offset) // a window that had begun goes on until it is there again
				}
				d.mem = envelope.Memory{}
				var n [3]int
				r := rand.New(rand.NewPCG(1, 1))
				for from := time.Now(); time.Since(from) < 4*time.Second; {
					for _, i := range r.Perm(len(d.ls)) {
						n[i] += d.spend(i, 1)
					}
					time.Sleep(5 * time.Millisecond)
				}
				if total := n[0] + n[1] + n[2]; total < 350 || min(n[0], n[1], n[2]) < 80 {
					t.Errorf("%v, clock steps %v: %v admitted in 4s", limit, offset, n)
				}
				if v := d.verdict(); v.Overshoot > 0 {
					t.Errorf("%v, clock steps %v: %v", limit, offset, v)
				}
			})
		}
	}
}

// Instances whose clocks run at different speeds, apart by not more than a thousandth: what they admit together is within the limit, with
// Redis and in an outage of minutes in which only their own clocks tell them how much is theirs. Clocks that are apart by more are seen.
func TestClocksOfDifferentSpeed(t *testing.T) {
	run := func(t *testing.T, limit Limit, ppm ...int64) (v envelope.Verdict, alone int) {
		synctest.Test(t, func(t *testing.T) {
			d := newDrifting(t, ppm, limit, model.Variant{})
			spend := func(length time.Duration) (admitted int) {
				for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
					for i := range d.ls {
						admitted += d.spend(i, 1)
					}
				}
				return admitted
			}
			spend(3 * time.Second)
			d.cutAll()
			spend(time.Minute)
			alone = spend(2 * time.Minute)
			for _, x := range d.wires {
				x.setFate(nil)
			}
			spend(3 * time.Second)
			v = d.verdict()
		})
		return v, alone
	}
	for _, limit := range five(60, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			for _, ppm := range [][]int64{{490, -490, 0}, {900, 950, 980}, {-980, -900, -950}} {
				v, alone := run(t, limit, ppm...)
				if v.Overshoot > 0 {
					t.Errorf("%v ppm: %v", ppm, v)
				}
				if alone < 120*60/2 {
					t.Errorf("%v ppm: %d admitted in two minutes of an outage, of %d", ppm, alone, 120*60)
				}
			}
			if v, _ := run(t, limit, 20_000, 20_000, 20_000); v.Overshoot == 0 {
				t.Errorf("clocks that gain a fiftieth are not seen: %v", v)
			}
		})
	}
}

// Callers who come while a lease is on its way are served from it. Sent to Redis after it, they would take it back with them, and so would
// whoever came meanwhile: a busy key would never be warm.
func TestALeaseServesThoseWhoWait(t *testing.T) {
	for _, limit := range five(10_000, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(1))
				d.wires[0].setFate(steady(500 * time.Microsecond))
				d.intoWindow(time.Second, 100*time.Millisecond)
				before := d.hs[0].Stats().Exchanges
				var callers sync.WaitGroup
				for range 4 {
					callers.Go(func() {
						for range 100 {
							d.spend(0, 1)
							time.Sleep(100 * time.Microsecond)
						}
					})
				}
				callers.Wait()
				if n := d.hs[0].Stats().Exchanges - before; n > 8 {
					t.Errorf("%d calls for 400 checks within 10 ms or so, want a few", n)
				}
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// A kept denial that is only a pause says nothing of what Redis has: a larger cost is not told to wait until all of it is made.
func TestAPauseIsNoEmptyBucket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 4, TokenBucket(1000, time.Second), model.Variant{}, WithLocalShare(0.2))
		defer d.close()
		stop := time.Now().Add(8 * time.Second)
		var wrong, denials atomic.Int64
		var worst, stood time.Duration
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for k := 0; time.Now().Before(stop); k++ {
					for range 3 {
						_, _ = d.ls[i].Allow(t.Context(), "k")
					}
					if i == 0 && k%7 == 0 {
						r, err := d.ls[0].AllowN(t.Context(), "k", 100)
						if err == nil && !r.Allowed && r.Source == Local {
							denials.Add(1)
							ctx, cancel := context.WithTimeout(t.Context(), r.RetryAfter*3/4)
							werr := d.ls[0].WaitN(ctx, "k", 100)
							cancel()
							began := time.Now()
							for time.Since(began) < r.RetryAfter/2 {
								time.Sleep(time.Millisecond)
								if again, err := d.ls[0].AllowN(t.Context(), "k", 100); err == nil && again.Allowed {
									if errors.Is(werr, context.DeadlineExceeded) {
										wrong.Add(1)
										if r.RetryAfter > worst {
											worst, stood = r.RetryAfter, time.Since(began)
										}
									}
									break
								}
							}
						}
					}
					time.Sleep(4 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		if wrong.Load() > 0 {
			t.Errorf("of %d local denials of 100, %d told WaitN that its time is too short, and it passed in less than half of RetryAfter: worst %v, passed after %v",
				denials.Load(), wrong.Load(), worst, stood)
		}
		if denials.Load() == 0 {
			t.Error("no cost was denied in process")
		}
	})
}
