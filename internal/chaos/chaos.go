// Package chaos is the suite that breaks a real Redis under a fleet: every fault, before, during and after, judged by
// internal/envelope on what was admitted.
//
// A Fault happens in a World, which a Topology starts on a back end of internal/redistest: child processes or containers. What a
// run came to is a Row. The suite fails where docs/guarantees.md is broken; that nothing is admitted beyond the limit and that no
// check returns an error is judged always, how much and how soon only where the machine let the load run (Row.NotJudged).
//
// TIERLIMIT_LONG=1 runs every fault with all five algorithms and for longer. TIERLIMIT_CHAOS_ROWS=FILE appends each Row to FILE as
// a line of JSON. TIERLIMIT_CHAOS_PARALLEL=N sets how many fleets run side by side; with 1 each Row's heap is its own.
// TIERLIMIT_CHAOS_SEED=N draws as a run did that logged this seed.
package chaos

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A World is a fleet's Redis and the ways to break it. What is set before a Topology starts it says so; the rest the Topology sets.
type World struct {
	TB        testing.TB
	Seed      uint64          // of Rand; set before
	Rand      *rand.Rand      // for one goroutine at a time: Start, Begin, During and End follow one another; set before
	Instances int             // set before
	Limit     tierlimit.Limit // set before
	Prefix    string          // WithPrefix of the fleet, unlike any other's; set before
	Timeout   time.Duration   // WithRemoteTimeout of the fleet; set before

	Servers []redistest.Server                       // single: one; replica: the primary, then the replica
	Proxies []*redistest.Proxy                       // single, replica: one per instance, in front of the primary
	Group   *redistest.Group                         // cluster, sentinel: its nodes; else nil
	Client  func(instance int) redis.UniversalClient // a new client of an instance, which closes it
	Keys    []string                                 // the keys that the load uses; none is one, "hot"
	Spared  []string                                 // those of Keys that the fault must not touch: they go on as if nothing had happened

	Hybrids      []*tierlimit.Hybrid // by instance, once the fleet runs
	Begun, Ended int64               // ns of the server's clock: when Begin was called, and when End returned
	Struck       int64               // when Begin returned

	parts
	asides asides

	options  []tierlimit.Option
	limiters string // whose keys are lost, as a pattern
	started  time.Time
	extra    extra

	mu     sync.Mutex
	lost   []int64  // when Redis lost something
	calm   int64    // when what else happened with that was over, 0 for nothing else
	told   []int64  // when an instance said that it has
	shorts []string // what else falls short
}

// A Topology is a way to set up Redis.
type Topology struct {
	Name string
	// Start starts it for the fleet of w. It fails the test if it cannot.
	Start func(w *World, b redistest.Backend, opts ...redistest.Option)
	Local bool // needs child processes
}

// A Course is what a fleet is to do while a fault lasts.
type Course uint8

const (
	// Any is judged by nothing but overshoot and errors.
	Any Course = iota
	// Steady goes on as before: 90 % of the limit is to be expected, and a run fails below leastUsed.
	Steady
	// Away means that an instance at least notices that Redis is out of reach.
	Away
	// Shares is Away, and once the silence is over as much is admitted as with Steady.
	Shares
)

// A Fault is one thing that happens to Redis, or to the fleet. It begins some seconds after the load does; the load goes on for some
// seconds after it has ended.
type Fault struct {
	Name     string
	Topology Topology
	Local    bool // needs child processes
	Main     bool // runs with three algorithms at least: on child processes, without the race detector

	Server    []redistest.Option
	Instances int           // 0: four
	Timeout   time.Duration // WithRemoteTimeout; 0: 100 ms
	Options   []tierlimit.Option
	Load      func(keys []string) fleet.Load // nil: all want all keys evenly, three times the limit
	Loose     bool                           // how much is admitted, and how soon again, is not judged

	Prepare func(w *World) error                      // before the fleet is there
	Begin   func(w *World) error                      // nil: nothing
	During  func(ctx context.Context, w *World) error // beside the load, from when Begin returned to the fault's end, when ctx ends
	End     func(w *World) error                      // once During returned; nil: nothing
	Back    func(w *World) error                      // when the fleet has to be back
	// Children, instead of all these, is done to a fleet of child processes, at times from the fault's begin.
	Children []fleet.ProcEvent

	For      time.Duration // how long the fault lasts,
	Silences int           // and this many times Bound().Silence on top
	After    time.Duration // how much longer than usual the load goes on, for an End that takes its time

	// Allowed is the overshoot that docs/guarantees.md allows; nil is 0.
	Allowed func(w *World, r *fleet.Result) int64
	Course  Course
	Recover time.Duration // the latest at which the fleet is back after the end; 0 is 2 s
	Dead    int           // instances whose shares are kept aside from then on
	Refusal string        // the error code with which a server must have refused something, such as OOM, or the test has shown nothing

	random touches
}

// singleFaults are those of a single server.
func singleFaults() []Fault {
	all := slices.Concat(serverFaults, networkFaults, memoryFaults, fleetFaults)
	for i := range all {
		all[i].Topology = Single
	}
	return all
}

// faults are all, by topology.
func faults() []Fault {
	return slices.Concat(singleFaults(), replicaFaults, sentinelFaults, clusterFaults, ringFaults, randomFaults)
}

const (
	instances = 4
	limitRate = 200 // tokens a period
	period    = 500 * time.Millisecond
	perSecond = limitRate * int64(time.Second/period)
	heartbeat = 200 * time.Millisecond
	timeout   = 100 * time.Millisecond
	heapLeft  = 16 << 20
)

// limits are the five algorithms.
func limits() []tierlimit.Limit {
	return []tierlimit.Limit{
		tierlimit.TokenBucket(limitRate, period), tierlimit.SlidingWindow(limitRate, period), tierlimit.SlidingLog(limitRate, period),
		tierlimit.FixedWindow(limitRate, period), tierlimit.LeakyBucket(limitRate, period),
	}
}

// long says whether everything runs with all algorithms.
var long = os.Getenv("TIERLIMIT_LONG") != ""

// atOnce is how many fleets run side by side: they mostly wait. Fewer under the race detector, with which they wait less.
func atOnce() int {
	if n, err := strconv.Atoi(os.Getenv("TIERLIMIT_CHAOS_PARALLEL")); err == nil && n > 0 {
		return n
	}
	if raceEnabled {
		return 5 // ten times slower: an instance has to come online, and is judged for nothing but overshoot and errors
	}
	return 18
}

// A run is one fault with one limit.
type run struct {
	fault Fault
	limit tierlimit.Limit
}

func (r run) name() string {
	return fmt.Sprintf("%s/%s/%v", r.fault.Topology.Name, r.fault.Name, r.limit.Algorithm)
}

// weight is the slots that it takes: child processes, and clusters of them, cost most when they are started.
func (r run) weight() int {
	switch {
	case r.fault.Children != nil:
		return 4
	case r.fault.Topology.Local:
		return 2
	}
	return 1
}

// runs are what there is to do on back end b, the longest first.
func runs(b redistest.Backend) []run {
	_, local := b.(redistest.ProcessBackend)
	all := limits()
	var out []run
	turn := 0 // of the algorithms, where a fault has one
	for _, f := range faults() {
		if (f.Local || f.Topology.Local) && !local {
			continue
		}
		if raceEnabled && local && !f.Local && !f.Topology.Local && os.Getenv("TIERLIMIT_CONTAINERS") == "1" {
			turn++
			continue // under the race detector it runs on containers, and once is enough
		}
		some := all
		switch {
		case long:
		case f.Main && local && !raceEnabled:
			some = all[:3]
		default:
			some = all[turn%len(all) : turn%len(all)+1]
			turn++
		}
		for _, l := range some {
			out = append(out, run{f, l})
		}
	}
	slices.SortStableFunc(out, func(a, b run) int { return cmp.Compare(b.fault.length(), a.fault.length()) })
	return out
}

// Run puts fleets through every fault that back end b can cause, as subtests "topology/fault/algorithm". A back end that is
// missing fails them.
func Run(t *testing.T, b redistest.Backend) {
	j := newJury(t)
	if !long {
		t.Log("part of the matrix; TIERLIMIT_LONG=1 runs all")
	}
	began := heap()
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce())
	for _, r := range runs(b) {
		n := min(r.weight(), cap(slots))
		for range n {
			slots <- struct{}{}
		}
		wg.Go(func() {
			defer func() {
				for range n {
					<-slots
				}
			}()
			t.Run(r.name(), func(t *testing.T) { j.ordeal(t, b, r.fault, r.limit) })
		})
	}
	wg.Wait()
	// All fleets are gone. What each run leaves with package testing is its name and its log.
	more := heap() - began
	t.Logf("%d kB of heap more than before the suite", more/1024)
	if more > heapLeft {
		t.Errorf("want at most %d kB", heapLeft/1024)
	}
}

// newWorld is a world without servers yet.
func newWorld(tb testing.TB, f Fault, limit tierlimit.Limit) *World {
	seed := rand.Uint64()
	if s, err := strconv.ParseUint(os.Getenv("TIERLIMIT_CHAOS_SEED"), 10, 64); err == nil {
		seed = s
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(tb.Name()))
	return &World{
		TB: tb, Seed: seed, Rand: rand.New(rand.NewPCG(seed, 0)), Limit: limit,
		Instances: cmp.Or(f.Instances, instances), Timeout: cmp.Or(f.Timeout, timeout),
		Prefix: fmt.Sprintf("chaos-%x:", h.Sum64()),
	}
}

// IntN is a draw of the world's Rand, from any goroutine.
func (w *World) IntN(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Rand.IntN(n)
}

// short notes what falls short, to be judged unless the machine did not let the load run.
func (w *World) short(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shorts = append(w.shorts, fmt.Sprintf(format, args...))
}

// length is about how long the fault lasts.
func (f Fault) length() time.Duration { return f.For + time.Duration(f.Silences)*1500*time.Millisecond }

// recover is the latest at which the fleet is back.
func (f Fault) recover() time.Duration { return cmp.Or(f.Recover, recovery) }

// present is the part of the limit that is for the instances that are left.
func (f Fault) present(w *World) float64 { return 1 - float64(f.Dead)/float64(w.Instances) }
