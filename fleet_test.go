package tierlimit_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Not in TestMain: a child must not get as far as anything else that the test binary does.
func init() { fleet.Main() }

// long says whether the whole matrix runs: make fleet.
var long = os.Getenv("TIERLIMIT_LONG") != ""

// wholeMatrix says so where a test does less without TIERLIMIT_LONG.
func wholeMatrix(t *testing.T) {
	t.Helper()
	if !long {
		t.Log("part of the matrix; TIERLIMIT_LONG=1 runs all")
	}
}

const fleetSize = 8

// online is how long a fleet may take until all instances have heard from Redis. One that has not counts itself alone.
const online = 20 * time.Second

// A table collects a row per run and prints them together, so that they can be compared.
type table struct {
	sync.Mutex
	rows []string
}

// add prints steady only if it is more than 0.
func (tb *table) add(name string, limit tierlimit.Limit, r *fleet.Result, whole, steadily float64) {
	steady := ""
	if steadily > 0 {
		steady = fmt.Sprintf("%.4f", steadily)
	}
	tb.Lock()
	defer tb.Unlock()
	if len(tb.rows) == 0 {
		tb.rows = append(tb.rows, fmt.Sprintf("%-58s %9s %9s %7s %7s %8s %10s %8s", "run", "overshoot", "whole run", "steady", "local", "fallback", "exchange/s", "p99"))
	}
	tb.rows = append(tb.rows, fmt.Sprintf("%-58s %9d %9.4f %7s %6.1f%% %8d %10.0f %8v", name, r.Verdict(limit).Overshoot, whole, steady,
		r.LocalPercent(), r.Fallback(), r.ExchangesPerSecond(), r.Latency.Percentile(99).Round(10*time.Microsecond)))
}

func (tb *table) print(t *testing.T) {
	t.Cleanup(func() {
		t.Log("\n" + strings.Join(tb.rows, "\n"))
		if path := os.Getenv("TIERLIMIT_TABLE"); path != "" {
			f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			fmt.Fprintf(f, "%s\n%s\n\n", t.Name(), strings.Join(tb.rows, "\n"))
		}
	})
}

// run is a run that must work.
func run(t *testing.T, c fleet.Config) *fleet.Result {
	t.Helper()
	r, err := fleet.Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func exact(t *testing.T, limit tierlimit.Limit, r *fleet.Result) {
	t.Helper()
	if v := r.Verdict(limit); v.Overshoot != 0 {
		t.Errorf("%v: %v; %v", limit, v, r)
	}
	if r.Errors != 0 {
		t.Errorf("%d checks returned errors", r.Errors)
	}
	if why, stalled := r.Stalled(); r.Admitted == 0 && stalled {
		t.Logf("nothing was admitted, not judged: %s: %v", why, r)
	} else if r.Admitted == 0 {
		t.Errorf("nothing was admitted: %v", r)
	}
}

// G1: overshoot 0, whatever the algorithm, the split, the load, and the replies that are lost.
func TestFleetExact(t *testing.T) {
	wholeMatrix(t)
	srv := redistest.Start(t)
	rows := new(table)
	rows.print(t)
	rate, duration := int64(400), 1500*time.Millisecond
	loads := []fleet.Shape{fleet.Even(), fleet.MovingHot(130 * time.Millisecond)}
	if long {
		rate, duration = 2000, 6*time.Second
		loads = append(loads, fleet.OneHot(0, 1), fleet.OneHot(0, 0.9), fleet.Bursts(300*time.Millisecond), fleet.Pulse(100*time.Millisecond, 400*time.Millisecond),
			fleet.Trickle(0.05, duration/2), fleet.IdleThenBurst(duration/2), fleet.Hoard(25), fleet.Even("a", "b", "c"))
	}
	var all cases
	for _, limit := range fiveOf(rate/2, 500*time.Millisecond) {
		for _, share := range []float64{0, 0.1, 1} {
			for _, load := range loads {
				for _, lossy := range []bool{false, true} {
					name, seed := fmt.Sprintf("%v/share=%v/%v/lossy=%v", limit.Algorithm, share, load, lossy), rand.Uint64()
					all.add(name, func(t *testing.T) {
						addr := srv.Addr()
						var events []fleet.Event
						if lossy {
							proxy := redistest.StartProxy(t, addr)
							addr = proxy.Addr()
							rnd := rand.New(rand.NewPCG(seed, 0))
							for at := 50 * time.Millisecond; at < duration; at += time.Duration(10+rnd.IntN(80)) * time.Millisecond {
								n := 1 + rnd.IntN(3)
								events = append(events, fleet.Event{At: at, Do: func() { proxy.LoseReplies(n) }})
							}
						}
						r := run(t, fleet.Config{
							Instances: fleetSize, Limit: limit, Load: load, Rate: 3 * float64(rate), Duration: duration, Events: events, AwaitOnline: online,
							Client:  func(int) redis.UniversalClient { return fleet.Client(addr) },
							Options: []tierlimit.Option{tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithLocalShare(share)},
						})
						exact(t, limit, r)
						if lossy && r.Failures == 0 {
							t.Error("no reply was lost")
						}
						if t.Failed() {
							t.Logf("seed %d", seed)
						}
						rows.add(name, limit, r, r.Use(limit), 0)
					})
				}
			}
		}
	}
	all.run(t, 10)
}

// G1 with instances that are killed while they hold leases, hang while others go on, and come back.
func TestFleetExactWithKills(t *testing.T) {
	wholeMatrix(t)
	srv := redistest.Start(t)
	rows := new(table)
	rows.print(t)
	rate, duration := int64(400), 1600*time.Millisecond
	if long {
		rate, duration = 2000, 8*time.Second
	}
	jury := newJury(t)
	kill := func(i int) func(*fleet.Processes) error {
		return func(p *fleet.Processes) error { return p.Kill(i) }
	}
	var all cases
	for i, limit := range fiveOf(rate/2, 500*time.Millisecond) {
		shares := []float64{0, 0.1, 1}
		if !long {
			shares = shares[1+i%2 : 2+i%2] // without leases there is little to lose
		}
		for _, share := range shares {
			for _, load := range []fleet.Shape{fleet.Even(), fleet.MovingHot(130 * time.Millisecond)} {
				name := fmt.Sprintf("%v/share=%v/%v/killed", limit.Algorithm, share, load)
				all.add(name, func(t *testing.T) {
					r, err := fleet.RunProcesses(t.Context(), fleet.ProcConfig{
						Instances: fleetSize, Limit: limit, Load: load, Rate: 3 * float64(rate), Duration: duration, AwaitOnline: online,
						Addr:    func(int) string { return srv.Addr() },
						Options: fleet.Options{Prefix: ownPrefix(t), LocalShare: &share},
						Events: []fleet.ProcEvent{
							{At: duration * 2 / 10, Do: kill(0)},
							{At: duration * 3 / 10, Do: func(p *fleet.Processes) error { return p.Hang(2) }},
							{At: duration * 4 / 10, Do: kill(1)},
							{At: duration * 5 / 10, Do: func(p *fleet.Processes) error { return p.Start(0) }},
							{At: duration * 6 / 10, Do: func(p *fleet.Processes) error { return p.Continue(2) }},
							{At: duration * 8 / 10, Do: kill(0)},
						},
					})
					if err != nil {
						t.Fatal(err)
					}
					exact(t, limit, r)
					rows.add(name, limit, r, r.Use(limit), 0)
					why, _ := r.Stalled()
					jury.judge(t, why, func(short func(string, ...any)) {
						if !r.PerInstance[0].Killed || !r.PerInstance[1].Killed || r.EventsLate > duration/5 {
							short("kills came up to %v late: too late to tell", r.EventsLate)
						}
					})
				})
			}
		}
	}
	all.run(t, 3)
}

// noFaults keeps a machine that is busy with something else from looking like a Redis that is out of reach.
var noFaults = tierlimit.WithRemoteTimeout(500 * time.Millisecond)

// A useCase is a run without faults whose utilisation is judged.
type useCase struct {
	limit    tierlimit.Limit
	offered  float64
	duration time.Duration
	share    float64
	load     fleet.Shape
}

func (u useCase) name() string {
	return fmt.Sprintf("%v/%d per %v/share=%v/%v", u.limit.Algorithm, u.limit.Rate, u.limit.Period, u.share, u.load)
}

// G2: what the limit allows is admitted when it is wanted.
func TestFleetUtilisation(t *testing.T) {
	wholeMatrix(t)
	srv := redistest.Start(t)
	rows := new(table)
	rows.print(t)
	jury := newJury(t)
	var runs []useCase
	hot := fleet.MovingHot(330 * time.Millisecond)
	add := func(limit tierlimit.Limit, offered float64, d time.Duration, shares []float64, loads ...fleet.Shape) {
		for _, share := range shares {
			for _, load := range loads {
				runs = append(runs, useCase{limit, offered, d, share, load})
			}
		}
	}
	split := []float64{0.1}
	if long {
		split = []float64{0, 0.1, 1}
	}
	for i, limit := range fiveOf(1000, time.Second) {
		loads := []fleet.Shape{fleet.Even(), fleet.OneHot(0, 1), hot}
		if !long {
			loads = []fleet.Shape{loads[i%3]}
		}
		add(limit, 3000, 5*time.Second, split, loads...)
	}
	for i, rate := range []int64{10, 100} {
		for j, limit := range fiveOf(rate, time.Second) {
			loads := []fleet.Shape{fleet.Even(), fleet.OneHot(0, 1), hot}
			if !long {
				loads = []fleet.Shape{loads[(i+j)%3]}
			}
			add(limit, 3*float64(rate), 4*time.Second, split, loads...)
		}
	}
	for j, limit := range fiveOf(5000, time.Hour) {
		if long || j != 1 {
			// So many are offered that the hour's tokens are gone early on.
			add(limit, 10000, 3*time.Second, split, fleet.Even())
		}
	}
	for j, limit := range fiveOf(20000, time.Second) {
		if long || j%2 == 0 {
			add(limit, 60000, 3500*time.Millisecond, split, fleet.Even())
		}
	}
	var quiet, loud cases
	for _, u := range runs {
		add := quiet.add
		if u.offered > 10000 {
			add = loud.add
		}
		add(u.name(), func(t *testing.T) {
			r := run(t, fleet.Config{
				Instances: fleetSize, Limit: u.limit, Load: u.load, Rate: u.offered, Duration: u.duration, AwaitOnline: online,
				Client:  func(int) redis.UniversalClient { return fleet.Client(srv.Addr()) },
				Options: []tierlimit.Option{tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithLocalShare(u.share), noFaults},
			})
			exact(t, u.limit, r)
			u.judge(t, jury, r)
			rows.add(u.name(), u.limit, r, r.Use(u.limit), u.steady(r))
		})
	}
	quiet.run(t, 8)
	loud.run(t, 1)
}

// longPeriod is a period of which a run sees less than one: such a limit is exhausted once and stays so.
const longPeriod = time.Minute

// steady is the utilisation once the limit is what holds the load back: from a second after the start on, when a bucket that
// started full has been spent; of a long period the whole run, since then demand is above the limit from the first check on.
func (u useCase) steady(r *fleet.Result) float64 {
	if u.limit.Period >= longPeriod {
		return r.Use(u.limit)
	}
	return r.Utilisation(u.limit, r.Started+int64(time.Second), r.Ended)
}

func (u useCase) judge(t *testing.T, jury *jury, r *fleet.Result) {
	whole, steadily := float64(r.Ideal(u.limit)), float64(u.limit.Rate)*time.Duration(r.Ended-r.Started-int64(time.Second)).Seconds()
	if u.limit.Period >= longPeriod {
		steadily = whole
	}
	jury.run(t, r, func(short func(string, ...any)) {
		judge := func(what string, part, least, ideal float64) {
			// Tokens are whole: with few of them, one that is still on its way at the end is more than the part that may be missing.
			if missing := (1 - part) * ideal; part < least && missing > 1 {
				short("%s: utilisation %.4f, want %.2f: short of %.1f tokens of %.0f; %v", what, part, least, missing, ideal, r)
			}
		}
		judge("whole run", r.Use(u.limit), 0.99, whole)
		judge("steady", u.steady(r), 0.99, steadily)
	})
}

// G2: under equal overload no instance gets less than 80 % of its fair part, and a hot one gets what idle ones leave.
func TestFleetFairness(t *testing.T) {
	srv := redistest.Start(t)
	rows := new(table)
	rows.print(t)
	const hot = 3
	jury := newJury(t)
	var all cases
	for _, limit := range fiveOf(1000, time.Second) {
		do := func(t *testing.T, load fleet.Shape) *fleet.Result {
			r := run(t, fleet.Config{
				Instances: fleetSize, Limit: limit, Load: load, Rate: 3000, Duration: 5 * time.Second, AwaitOnline: online,
				Client:  func(int) redis.UniversalClient { return fleet.Client(srv.Addr()) },
				Options: []tierlimit.Option{tierlimit.WithPrefix(ownPrefix(t)), noFaults},
			})
			exact(t, limit, r)
			return r
		}
		all.add(limit.Algorithm.String()+"/even", func(t *testing.T) {
			r := do(t, fleet.Even())
			rows.add(limit.Algorithm.String()+"/even", limit, r, r.Use(limit), 0)
			jury.run(t, r, func(short func(string, ...any)) {
				fair := r.Admitted / fleetSize
				for i, x := range r.PerInstance {
					if x.Admitted*100 < fair*80 {
						short("instance %d admitted %d, its fair part is %d", i, x.Admitted, fair)
					}
				}
			})
		})
		// One wants three times the limit, the others want a twentieth of their fair part each.
		all.add(limit.Algorithm.String()+"/hot", func(t *testing.T) {
			r := do(t, fleet.OneHot(hot, 1-0.05/3))
			rows.add(limit.Algorithm.String()+"/hot", limit, r, r.Use(limit), 0)
			jury.run(t, r, func(short func(string, ...any)) {
				if u := r.Use(limit); u < 0.99 {
					short("utilisation %.4f; %v", u, r)
				}
				for i, x := range r.PerInstance {
					// A window is used up by its first third, and then there is nothing for anybody.
					bucket := limit.Algorithm == tierlimit.AlgorithmTokenBucket || limit.Algorithm == tierlimit.AlgorithmLeakyBucket
					if bucket && i != hot && x.Admitted*100 < x.Offered*80 {
						short("instance %d wanted %d, a twentieth of its fair part, and got %d", i, x.Offered, x.Admitted)
					}
				}
			})
		})
	}
	all.run(t, 5)
}

// Redis is asked at most once per instance, hot key and sync interval, whatever the traffic; of a key that is exhausted and refills,
// once per instance and pause.
func TestFleetExchanges(t *testing.T) {
	srv := redistest.Start(t)
	jury := newJury(t)
	const sync = 50 * time.Millisecond
	const length = 4 * time.Second // the first millisecond, in which all wait, is to be little of it
	for _, c := range []struct {
		name    string
		limit   tierlimit.Limit
		offered float64
		local   float64       // percent, at least; 0 if not promised
		pause   time.Duration // between two exchanges of an instance, at least
	}{
		{"under the limit", tierlimit.TokenBucket(200000, time.Second), 100000, 99.9, sync},
		{"exhausted", tierlimit.TokenBucket(5000, time.Hour), 20000, 99, sync},
		// The pause is max(2 RTT, min(10 n/r, min(sync, B/100r))), the round trip next to nothing. It is 30 % shorter at times, since
		// a lease may be settled between two asks.
		{"refilling", tierlimit.TokenBucket(1000, time.Second), 3000, 0, 10 * time.Millisecond * 10 / 13},
		{"refilling, a great burst", tierlimit.LeakyBucket(1000, time.Second).WithBurst(3000), 4000, 0, 30 * time.Millisecond * 10 / 13},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := run(t, fleet.Config{
				Instances: fleetSize, Limit: c.limit, Load: fleet.Even(), Rate: c.offered, Duration: length, AwaitOnline: online,
				Client:  func(int) redis.UniversalClient { return fleet.Client(srv.Addr()) },
				Options: []tierlimit.Option{tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithSyncInterval(sync), noFaults},
			})
			exact(t, c.limit, r)
			t.Log(r)
			if most := float64(fleetSize) / c.pause.Seconds(); r.ExchangesPerSecond() > most {
				t.Errorf("%.0f exchanges/s, want at most %.0f", r.ExchangesPerSecond(), most)
			}
			jury.run(t, r, func(short func(string, ...any)) {
				if want := c.offered * length.Seconds(); float64(r.Checks) < 0.95*want {
					short("the generator made %d checks of %.0f", r.Checks, want)
				}
				if r.LocalPercent() < c.local {
					short("%.2f%% answered locally, want %v%%", r.LocalPercent(), c.local)
				}
			})
		})
	}
}

// The long tail is absorbed too: many keys of a slow limit, each checked moderately often, are answered from leases while
// there is plenty.
func TestFleetLongTail(t *testing.T) {
	wholeMatrix(t)
	srv := redistest.Start(t)
	keys := make([]string, 2000)
	if long {
		keys = make([]string, 10_000)
	}
	for i := range keys {
		keys[i] = fmt.Sprint("customer", i)
	}
	limit := tierlimit.TokenBucket(5000, time.Hour)
	r := run(t, fleet.Config{
		Instances: 1, Limit: limit, Load: fleet.Even(keys...), Rate: 20 * float64(len(keys)), Duration: 5 * time.Second, AwaitOnline: online, Workers: 64,
		Client:  func(int) redis.UniversalClient { return fleet.Client(srv.Addr()) },
		Options: []tierlimit.Option{tierlimit.WithPrefix(ownPrefix(t)), noFaults},
	})
	exact(t, limit, r)
	t.Logf("%d keys, %v; %d keys settled a second", len(keys), r, int(float64(r.Asked)/r.Elapsed().Seconds()))
	newJury(t).run(t, r, func(short func(string, ...any)) {
		if p := r.LocalPercent(); p < 90 {
			short("%.2f%% answered locally, want 90%%", p)
		}
	})
}

// A log of a few milliseconds is settled many times a window, with callers preempted in between: when tokens were spent has
// to be told right, or they leave too early.
func TestFleetTinyLogs(t *testing.T) {
	server := redistest.Start(t)
	var all cases
	for i, limit := range []tierlimit.Limit{
		tierlimit.SlidingLog(50, 10*time.Millisecond),
		tierlimit.SlidingLog(50, 12*time.Millisecond),
		tierlimit.SlidingLog(100, 20*time.Millisecond),
	} {
		for k := range 2 {
			all.add(fmt.Sprintf("%v/%d", limit.Period, k), func(t *testing.T) {
				exact(t, limit, run(t, fleet.Config{
					Instances: 4, Limit: limit, Load: fleet.Even("hot"), Rate: 15000, Duration: 2 * time.Second, Workers: 32, AwaitOnline: online,
					Client: func(int) redis.UniversalClient { return fleet.Client(server.Addr()) },
					Options: []tierlimit.Option{tierlimit.WithPrefix(fmt.Sprintf("tiny%d.%d:", i, k)), tierlimit.WithLocalShare(1),
						tierlimit.WithSyncInterval(5 * time.Millisecond)},
				}))
			})
		}
	}
	all.run(t, 3)
}
