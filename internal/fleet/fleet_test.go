package fleet

import (
	"context"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

func TestMain(m *testing.M) {
	Main()
	goleak.VerifyTestMain(m)
}

// offered is the checks of a load in a time.
func offered(t *testing.T, l Load, rate float64, instances int, d time.Duration) []Check {
	t.Helper()
	if s, ok := l.(Shape); ok {
		if err := s.Validate(instances); err != nil {
			t.Fatal(err)
		}
	}
	var out []Check
	last := time.Duration(0)
	for k := int64(0); ; k++ {
		c, ok := l.Next(k, rate, instances)
		if !ok || c.At >= d {
			return out
		}
		if c.At < last {
			t.Fatalf("check %d is due at %v, before the one before it at %v", k, c.At, last)
		}
		if c.Instance < 0 || c.Instance >= instances || c.Cost < 1 || c.Key == "" {
			t.Fatalf("check %d is %+v", k, c)
		}
		last = c.At
		out = append(out, c)
	}
}

func perInstance(checks []Check, n int) []int64 {
	out := make([]int64, n)
	for _, c := range checks {
		out[c.Instance] += c.Cost
	}
	return out
}

func TestShapesOfferTheRate(t *testing.T) {
	const rate, n, d = 1000, 4, 2 * time.Second
	for _, s := range []Shape{
		Even(), Even("a", "b"), OneHot(1, 1), OneHot(3, 0.75, "a", "b"), MovingHot(100 * time.Millisecond),
		Bursts(250 * time.Millisecond), Pulse(50*time.Millisecond, 150*time.Millisecond), Trickle(0.1, time.Second),
		IdleThenBurst(time.Second), Hoard(10), Zipf(100, 1), Zipf(5, 0), Even().Costing(4),
	} {
		var sum int64
		checks := offered(t, s, rate, n, d)
		for _, c := range checks {
			sum += c.Cost
		}
		if sum < 1990 || sum > 2010 {
			t.Errorf("%v offers %d tokens in %v at %d/s", s, sum, d, rate)
		}
	}
}

func TestShapes(t *testing.T) {
	if got := perInstance(offered(t, OneHot(2, 0.7), 1000, 4, time.Second), 4); got[2] != 700 || got[0] != 100 || got[3] != 100 {
		t.Errorf("one hot: %v", got)
	}
	for _, c := range offered(t, MovingHot(100*time.Millisecond), 1000, 4, time.Second) {
		if want := int(c.At/(100*time.Millisecond)) % 4; c.Instance != want && c.At%(100*time.Millisecond) > time.Microsecond {
			t.Fatalf("moving hot: instance %d at %v", c.Instance, c.At)
		}
	}
	for _, c := range offered(t, Pulse(50*time.Millisecond, 150*time.Millisecond), 1000, 4, time.Second) {
		if c.At%(200*time.Millisecond) > 50*time.Millisecond {
			t.Fatalf("pulse: a check at %v", c.At)
		}
	}
	if early := offered(t, IdleThenBurst(time.Second), 1000, 4, time.Second-1); len(early) != 0 {
		t.Errorf("idle: %d checks", len(early))
	}
	if early := offered(t, Trickle(0.1, time.Second), 1000, 4, time.Second-1); len(early) != 100 {
		t.Errorf("trickle: %d checks", len(early))
	}
	if all := offered(t, Trickle(0.1, time.Second), 1000, 4, time.Second+1); len(all) != 1001 {
		t.Errorf("trickle: %d checks once all are released", len(all))
	}
	count := map[string]int{}
	for _, c := range offered(t, Zipf(100, 1), 10000, 4, time.Second) {
		count[c.Key]++
	}
	if r := float64(count["k0"]) / float64(count["k1"]); r < 1.7 || r > 2.3 {
		t.Errorf("zipf: %d of the first, %d of the second", count["k0"], count["k1"])
	}
	log := []Check{{At: 0, Key: "a"}, {At: time.Second, Key: "b"}, {At: time.Second, Key: "c", Cost: 3}}
	if got := offered(t, FromLog(log, true), 10, 2, time.Hour); len(got) != 3 || got[2] != (Check{time.Second, 0, "c", 3}) {
		t.Errorf("log: %+v", got)
	}
	if got := offered(t, FromLog(log, false), 10, 2, time.Hour); got[1].At != 100*time.Millisecond || got[1].Instance != 1 {
		t.Errorf("log: %+v", got)
	}
}

func TestBadShapesAndConfigs(t *testing.T) {
	for _, s := range []Shape{
		{}, {Kind: "none"}, OneHot(4, 1), OneHot(-1, 1), OneHot(0, 1.1), OneHot(0, math.NaN()), MovingHot(0), Bursts(-1), Pulse(0, 1),
		Pulse(1, -1), Trickle(-1, 1), Trickle(2, 1), Trickle(0, -1), Zipf(0, 1), Zipf(1<<30, 1), Zipf(3, math.NaN()), Hoard(-1),
	} {
		if s.Validate(4) == nil {
			t.Errorf("%+v is valid", s)
		}
	}
	good := Config{Instances: 1, Limit: tierlimit.TokenBucket(1, time.Second), Load: Even(), Rate: 1, Duration: time.Second}
	for i, edit := range []func(*Config){
		func(c *Config) { c.Instances = 0 }, func(c *Config) { c.Load = nil }, func(c *Config) { c.Rate = 0 },
		func(c *Config) { c.Rate = math.NaN() }, func(c *Config) { c.Duration = 0 }, func(c *Config) { c.Workers = -1 },
		func(c *Config) { c.Events = []Event{{}} }, func(c *Config) { c.Load = MovingHot(0) }, func(c *Config) { c.Limit.Period = 0 },
		func(c *Config) { c.Options = []tierlimit.Option{tierlimit.WithLocalShare(2)} }, func(c *Config) { c.Name = "A B" },
	} {
		c := good
		edit(&c)
		if _, err := Run(t.Context(), c); err == nil {
			t.Errorf("bad config %d runs", i)
		}
	}
	if _, err := RunProcesses(t.Context(), ProcConfig{Instances: 1, Limit: good.Limit, Load: Even(), Rate: 1, Duration: 1}); err == nil {
		t.Error("a run of processes without Addr")
	}
}

func TestHistogram(t *testing.T) {
	h := new(Histogram)
	if h.Percentile(99) != 0 {
		t.Error("an empty histogram has a percentile")
	}
	for i := range 100000 {
		h.Record(time.Duration(i+1) * time.Microsecond)
	}
	h.Record(-1)
	for _, p := range []float64{1, 50, 90, 99, 99.9} {
		want := time.Duration(p/100*100000) * time.Microsecond
		if got := h.Percentile(p); got < want-time.Microsecond || got > want+want/30 {
			t.Errorf("p%v is %v, want %v", p, got, want)
		}
	}
	if h.Percentile(100) != 100*time.Millisecond || h.Max() != 100*time.Millisecond || h.Count() != 100001 {
		t.Errorf("p100 %v, most %v, count %d", h.Percentile(100), h.Max(), h.Count())
	}
	for ns := int64(0); ns < 1<<41; ns += 1 + ns/50 {
		b := bucket(ns)
		if b < 0 || b >= len(h.counts) {
			t.Fatalf("%d ns in bucket %d", ns, b)
		}
		if u := upper(b); ns < 1<<40 && (u < ns || u > ns+ns/subs || bucket(u) != b) {
			t.Fatalf("%d ns in bucket %d up to %d", ns, b, u)
		}
	}
	copied := new(Histogram)
	copied.addDense(h.dense())
	copied.Add(h)
	if copied.Count() != 2*h.Count() || copied.Percentile(50) != h.Percentile(50) {
		t.Error("a copy differs")
	}
}

func TestUtilisation(t *testing.T) {
	second := int64(time.Second)
	// 10 at once, then one each 100 ms.
	bucket := &Result{Started: 100 * second, Ended: 103 * second}
	for i := range 10 {
		bucket.History = append(bucket.History, envelope.Admission{Called: 100*second + int64(i), Returned: 100*second + int64(i), Cost: 1})
	}
	for i := range 30 {
		at := 100*second + int64(i+1)*second/10 - 1
		bucket.History = append(bucket.History, envelope.Admission{Called: at, Returned: at, Cost: 1})
	}
	for _, c := range []struct {
		limit    tierlimit.Limit
		from, to int64
		want     float64
	}{
		{tierlimit.TokenBucket(10, time.Second), 100 * second, 103 * second, 1},
		{tierlimit.TokenBucket(10, time.Second), 101 * second, 103 * second, 1},
		{tierlimit.TokenBucket(20, time.Second), 100 * second, 103 * second, 0.5},
		{tierlimit.TokenBucket(20, time.Second), 101 * second, 103 * second, 0.5},
		{tierlimit.FixedWindow(20, time.Second), 100 * second, 103 * second, 40.0 / 60},
		{tierlimit.FixedWindow(20, time.Second), 100*second + 1, 103*second + 5, 0.5},
		{tierlimit.SlidingLog(20, time.Second), 100*second + second/2, 103 * second, 0.5},
		{tierlimit.SlidingWindow(21, time.Second), 100*second + second/2, 103 * second, 0.5},
	} {
		if got := bucket.Utilisation(c.limit, c.from, c.to); math.Abs(got-c.want) > 1e-3 {
			t.Errorf("%v over [%d, %d): %v, want %v", c.limit, c.from, c.to, got, c.want)
		}
	}
}

func TestRunAlone(t *testing.T) {
	limit := tierlimit.TokenBucket(200, time.Second)
	ticks, happened := 0, 0
	var total Counts
	var told, toldAdmitted atomic.Int64
	r, err := Run(t.Context(), Config{
		Instances: 1, Limit: limit, Load: Even("a", "b"), Rate: 2000, Duration: 600 * time.Millisecond,
		Each: func(a Answer) {
			told.Add(1)
			if a.Result.Allowed {
				toldAdmitted.Add(a.Cost)
			}
			if a.Returned < a.Called || a.Key != "a" && a.Key != "b" || a.Err != nil {
				t.Errorf("%+v", a)
			}
		},
		Every: 100 * time.Millisecond, Observe: func(x Tick) {
			ticks++
			total.add(x.Counts)
			if len(x.Stats) != 1 || int64(len(x.History())) < x.Total.Admitted {
				t.Errorf("tick %+v", x)
			}
		},
		Events: []Event{{300 * time.Millisecond, func() { happened = 10*happened + 2 }}, {0, func() { happened = 1 }}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(r)
	if v := r.Verdict(limit); v.Overshoot != 0 {
		t.Error(v)
	}
	if u := r.Utilisation(limit, r.Started, r.Ended); u > 1.001 {
		t.Errorf("utilisation %v", u)
	} else if why, stalled := r.Stalled(); u < 0.98 && (stalled || raceEnabled) {
		t.Logf("not judged: utilisation %v: %s, race detector %t", u, why, raceEnabled)
	} else if u < 0.98 {
		t.Errorf("utilisation %v", u)
	}
	if r.Checks != 1200-r.Dropped || r.Admitted+r.Denied != r.Offered || r.Admitted != int64(len(r.History)) || r.BySource[tierlimit.Local] != r.Checks {
		t.Errorf("%+v", r.Counts)
	}
	if happened != 12 || ticks < 3 || total.Checks > r.Checks || r.PeakGoroutines < 5 {
		t.Errorf("events %d, ticks %d of %d checks, goroutines %d", happened, ticks, total.Checks, r.PeakGoroutines)
	}
	if told.Load() != r.Checks || toldAdmitted.Load() != r.Admitted {
		t.Errorf("told of %d checks that admitted %d; %v", told.Load(), toldAdmitted.Load(), r)
	}
	// A planted excess must be seen.
	r.History = append(r.History, r.History...)
	if r.Verdict(limit).Overshoot == 0 {
		t.Error("the checker does not see that everything was admitted twice")
	}
}

func TestRunEndsWithItsContextAndItsLog(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	c := Config{Instances: 2, Limit: tierlimit.FixedWindow(10, time.Second), Load: Even(), Rate: 100, Duration: time.Hour}
	r, err := Run(ctx, c)
	if err != nil || r.Elapsed() > 5*time.Second {
		t.Fatal(r, err)
	}
	c.Load = FromLog([]Check{{Key: "a"}, {Key: "b"}, {Key: "b", Cost: 11}}, false)
	if r, err = Run(t.Context(), c); err != nil || r.Checks != 3 || r.Admitted != 2 || r.Denied != 11 {
		t.Fatal(r, err)
	}
}

func TestProcesses(t *testing.T) {
	srv := redistest.Start(t)
	limit := tierlimit.TokenBucket(300, time.Second)
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir) // where the recordings go
	r, err := RunProcesses(t.Context(), ProcConfig{
		Instances: 3, Addr: func(int) string { return srv.Addr() }, Limit: limit, Load: Even(), Rate: 900, Duration: 1200 * time.Millisecond, AwaitOnline: 5 * time.Second,
		Events: []ProcEvent{
			{400 * time.Millisecond, func(p *Processes) error { return p.Kill(0) }},
			{500 * time.Millisecond, func(p *Processes) error { return p.Hang(1) }},
			{600 * time.Millisecond, func(p *Processes) error { return p.Continue(1) }},
			{700 * time.Millisecond, func(p *Processes) error { return p.Start(0) }},
			{900 * time.Millisecond, func(p *Processes) error { return p.Kill(2) }},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(r)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if v := r.Verdict(limit); v.Overshoot != 0 {
		t.Error(v)
	}
	if !r.PerInstance[0].Killed || r.PerInstance[1].Killed || !r.PerInstance[2].Killed {
		t.Errorf("%+v", r.PerInstance)
	}
	if r.Admitted != int64(len(r.History)) || r.Admitted > r.Offered {
		t.Errorf("offered %d, admitted %d, recorded %d", r.Offered, r.Admitted, len(r.History))
	}
	// How far a child gets depends on the machine: one that was started late may not get to anything before the load is over.
	if why, stalled := r.Stalled(); stalled || raceEnabled {
		t.Logf("not judged: %s, race detector %t", why, raceEnabled)
		return
	}
	for i, x := range r.PerInstance {
		if x.Admitted < 20 || i < 2 && x.Checks == 0 {
			t.Errorf("instance %d: %+v", i, x.Counts)
		}
	}
}

func TestProcessesSayWhatFailed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	c := ProcConfig{Instances: 1, Addr: func(int) string { return "127.0.0.1:1" }, Limit: tierlimit.TokenBucket(1000, time.Second),
		Load: Even(), Rate: 2000, Duration: 300 * time.Millisecond, Options: Options{LeaseTTL: time.Hour}}
	if _, err := RunProcesses(t.Context(), c); err == nil {
		t.Error("a lease of an hour runs")
	}
	c.Options = Options{Fallback: tierlimit.FallbackOpen}
	c.Capacity = 10
	if _, err := RunProcesses(t.Context(), c); err == nil {
		t.Error("a recording of 10 holds more")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	c.Capacity, c.Duration = 0, time.Hour
	if _, err := RunProcesses(ctx, c); err == nil {
		t.Error("a run that was cancelled returns no error")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestIdeal(t *testing.T) {
	at := func(l tierlimit.Limit, load Load, rate float64, d time.Duration) int64 {
		r := Result{Started: 100 * int64(time.Second), offer: offer{load, rate, 1, d}}
		return r.Ideal(l)
	}
	const s = time.Second
	for _, c := range []struct {
		limit tierlimit.Limit
		load  Load
		rate  float64
		d     time.Duration
		want  int64
	}{
		{tierlimit.TokenBucket(10, s), Even(), 1000, 3 * s, 39},
		{tierlimit.LeakyBucket(10, s).WithBurst(1), Even(), 1000, 3*s + 1, 31},
		{tierlimit.TokenBucket(10, s), Even(), 5, 3 * s, 15},
		{tierlimit.TokenBucket(10, s), Even("a", "b"), 1000, 3 * s, 78},
		{tierlimit.FixedWindow(10, s), Even(), 1000, 5 * s / 2, 30},
		{tierlimit.FixedWindow(10, s), Even(), 1000, 2*s + 1500*time.Microsecond, 22},
		{tierlimit.FixedWindow(10, s), Bursts(5 * s), 5, 16 * s, 40},
		{tierlimit.SlidingLog(10, s), Even(), 1000, 3 * s, 30},
		{tierlimit.SlidingLog(10, s), Hoard(4), 1000, 3 * s, 24},
		{tierlimit.SlidingWindow(10, s), Even(), 1000, 3 * s, 28},
		{tierlimit.SlidingWindow(10, s).WithSubWindows(10), Even(), 1000, 3 * s, 30},
		{tierlimit.SlidingWindow(10, s), Bursts(5 * s), 5, 16 * s, 40},
	} {
		if got := at(c.limit, c.load, c.rate, c.d); got != c.want {
			t.Errorf("%v, %v at %v for %v: ideal %d, want %d", c.limit, c.load, c.rate, c.d, got, c.want)
		}
	}
}

// A fleet that does not hear from Redis in time does not run.
func TestAwaitOnline(t *testing.T) {
	c := Config{Instances: 2, Limit: tierlimit.FixedWindow(10, time.Second), Load: Even(), Rate: 100, Duration: time.Hour, AwaitOnline: 50 * time.Millisecond,
		Client: func(int) redis.UniversalClient { return Client("127.0.0.1:1") }}
	if r, err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), "has not heard from Redis") {
		t.Errorf("%v, %v", r, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	c.AwaitOnline = time.Hour
	if r, err := Run(ctx, c); err != nil || r.Checks != 0 {
		t.Errorf("cancelled meanwhile: %v, %v", r, err)
	}
	_, err := RunProcesses(t.Context(), ProcConfig{Instances: 1, Addr: func(int) string { return "127.0.0.1:1" }, Limit: c.Limit,
		Load: Even(), Rate: 100, Duration: time.Second, AwaitOnline: 50 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "has not heard from Redis") {
		t.Errorf("in a process: %v", err)
	}
}
