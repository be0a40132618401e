// Package fleet runs N instances of the limiter under load and keeps the history of what they admitted, for
// internal/envelope to judge: as goroutines of one process (Run), or as child processes that can be killed (RunProcesses).
//
// The generator is open loop: checks are offered at given instants of wall time, whatever the answers. One that comes late is
// reported as late (Result.Late, Result.GeneratorLate), not hidden by offering less.
//
// Times of the history are CLOCK_REALTIME, which a Redis on the same machine reads too.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
)

// A Config describes a run of instances in this process.
type Config struct {
	Instances int
	// Client makes the Redis client of an instance; the fleet closes it. nil gives instances without Redis (NewLocal).
	Client  func(instance int) redis.UniversalClient
	Name    string // of the limiter; "fleet" if empty
	Limit   tierlimit.Limit
	Options []tierlimit.Option

	Load     Load
	Rate     float64       // tokens per second offered to the whole fleet
	Duration time.Duration // of the load
	Workers  int           // goroutines per instance that make checks; 0 is 4. A check that waits for Redis occupies one
	Events   []Event       // in any order; they run one after another

	// AwaitOnline is how long the load may wait until every instance has heard from Redis; if one has not by then, the run fails. An
	// instance that has not since its start counts itself alone (G4 does not cover that). 0 does not wait.
	AwaitOnline time.Duration

	Made func(instance int, h *tierlimit.Hybrid) // if set, is called with each instance before the load

	Every     time.Duration // how often to call Observe; 0 is never
	Observe   func(Tick)    // runs beside the load; must not take longer than Every
	NoHistory bool          // keep no History: for runs of so many checks that it would not fit in memory

	Each func(Answer) // told of every check by the worker that made it, so several at once; must be quick
}

// An Answer is one check and what became of it.
type Answer struct {
	Check
	Called, Returned int64 // ns of the server's clock
	Result           tierlimit.Result
	Err              error
}

// An Event is something to be done during a run.
type Event struct {
	At time.Duration
	Do func()
}

// A Tick is what happened since the Tick before it.
type Tick struct {
	At time.Duration // from the start of the load to now
	Counts
	P50, P99   time.Duration // of the checks since the last tick
	Exchanges  int64
	Asked      int64
	Heartbeats int64
	Failures   int64
	Goroutines int
	Total      Counts                      // since the start
	Stats      []tierlimit.Stats           // of each instance, now
	Limiters   []*tierlimit.Limiter        // of each instance
	History    func() []envelope.Admission // a copy of what was recorded so far
}

func (c *Config) validate() error {
	var faults []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			faults = append(faults, fmt.Errorf("fleet: "+format, args...))
		}
	}
	fault(c.Instances < 1, "%d instances, want at least 1", c.Instances)
	fault(c.Load == nil, "no load")
	fault(!(c.Rate > 0) || math.IsInf(c.Rate, 0), "rate %v, want more than 0", c.Rate)
	fault(c.Duration <= 0, "duration %v, want more than 0", c.Duration)
	fault(c.Workers < 0, "%d workers", c.Workers)
	for _, e := range c.Events {
		fault(e.Do == nil, "an event at %v that does nothing", e.At)
	}
	if s, ok := c.Load.(Shape); ok {
		faults = append(faults, s.Validate(c.Instances))
	}
	return errors.Join(faults...)
}

// Run runs the fleet for c.Duration, closes it, and returns what it did. ctx ends it early, with what was done until then and
// no error. Errors are those of a Config or of options that cannot work.
func Run(ctx context.Context, c Config) (*Result, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	var memory *envelope.Memory
	if !c.NoHistory {
		memory = new(envelope.Memory)
	}
	runners := make([]*runner, 0, c.Instances)
	var fault error
	for i := range c.Instances {
		r, err := newRunner(&c, i)
		if err != nil {
			fault = errors.Join(fault, fmt.Errorf("fleet: instance %d: %w", i, err))
			break
		}
		r.memory = memory
		runners = append(runners, r)
	}
	if fault != nil {
		return nil, errors.Join(append(closeAll(runners), fault)...)
	}
	if err := awaitOnline(ctx, c.AwaitOnline, runners...); err != nil {
		return nil, errors.Join(append(closeAll(runners), err)...)
	}
	res := &Result{Latency: new(Histogram), Late: new(Histogram), Started: envelope.Now(),
		offer: offer{c.Load, c.Rate, c.Instances, c.Duration}}
	start := time.Now()
	g := &generator{load: c.Load, rate: c.Rate, instances: c.Instances, duration: c.Duration, start: start, to: runners}
	var beside, events, workers sync.WaitGroup
	ended := make(chan struct{})
	events.Go(func() { res.EventsLate = runEvents(ended, start, c.Events) })
	beside.Go(func() { watch(ended, start, &c, runners, memory, &res.PeakGoroutines) })
	for _, r := range runners {
		r.work(ctx, &workers, start, c.Duration)
	}
	g.run(ctx)
	workers.Wait()
	res.Ended = res.Started + int64(min(time.Since(start), max(c.Duration, g.lasted)))
	close(ended)
	events.Wait()
	beside.Wait()

	res.GeneratorLate, res.Dropped = g.late, g.dropped
	for _, r := range runners {
		res.take(r.report())
	}
	res.CloseErrors = closeAll(runners)
	if memory != nil {
		res.History = memory.History()
	}
	return res, nil
}

// awaitOnline waits until all instances have heard from Redis, or ctx ends. most 0 does not wait.
func awaitOnline(ctx context.Context, most time.Duration, runners ...*runner) error {
	end := time.Now().Add(most)
	for _, r := range runners {
		for most > 0 && r.client != nil && ctx.Err() == nil && r.hybrid.Stats().State != tierlimit.StateOnline {
			if time.Now().After(end) {
				return fmt.Errorf("fleet: instance %d has not heard from Redis within %v", r.id, most)
			}
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

// closeAll closes all at once, and returns what failed.
func closeAll(runners []*runner) (faults []error) {
	closed := make([]error, len(runners))
	var closing sync.WaitGroup
	for i, r := range runners {
		closing.Go(func() { closed[i] = r.close() })
	}
	closing.Wait()
	return slices.DeleteFunc(closed, func(err error) bool { return err == nil })
}

// take adds what one instance did.
func (r *Result) take(i Instance, latency, late *Histogram) {
	r.PerInstance = append(r.PerInstance, i)
	r.Counts.add(i.Counts)
	r.Exchanges += i.Stats.Exchanges
	r.Asked += i.Stats.Asked
	r.Heartbeats += i.Stats.Heartbeats
	r.Failures += i.Stats.Failures
	r.Latency.Add(latency)
	r.Late.Add(late)
}

// runEvents does the events when they are due, until ended, and returns how late one was at most.
func runEvents(ended <-chan struct{}, start time.Time, events []Event) (late time.Duration) {
	events = slices.Clone(events)
	slices.SortStableFunc(events, func(a, b Event) int { return int(a.At - b.At) })
	for _, e := range events {
		select {
		case <-ended:
			return late
		case <-time.After(time.Until(start.Add(e.At))):
			late = max(late, time.Since(start.Add(e.At)))
			e.Do()
		}
	}
	return late
}

// watch counts goroutines and reports ticks.
func watch(ended <-chan struct{}, start time.Time, c *Config, runners []*runner, memory *envelope.Memory, peak *int) {
	sample := time.NewTicker(20 * time.Millisecond)
	defer sample.Stop()
	var every <-chan time.Time
	if c.Every > 0 && c.Observe != nil {
		t := time.NewTicker(c.Every)
		defer t.Stop()
		every = t.C
	}
	var last Counts
	var lastStats tierlimit.Stats
	lastLatency := new(Histogram)
	for {
		select {
		case <-ended:
			return
		case <-sample.C:
			*peak = max(*peak, runtime.NumGoroutine())
			continue
		case <-every:
		}
		t := Tick{At: time.Since(start), Goroutines: runtime.NumGoroutine(), History: func() []envelope.Admission {
			if memory == nil {
				return nil
			}
			return memory.History()
		}}
		latency := new(Histogram)
		var sum tierlimit.Stats
		for _, r := range runners {
			i, lat, _ := r.report()
			t.Total.add(i.Counts)
			latency.Add(lat)
			t.Stats = append(t.Stats, i.Stats)
			t.Limiters = append(t.Limiters, r.limiter)
			sum.Exchanges += i.Stats.Exchanges
			sum.Asked += i.Stats.Asked
			sum.Heartbeats += i.Stats.Heartbeats
			sum.Failures += i.Stats.Failures
		}
		t.Counts = t.Total.since(last)
		recent := latency.since(lastLatency)
		t.P50, t.P99 = recent.Percentile(50), recent.Percentile(99)
		t.Exchanges, t.Asked = sum.Exchanges-lastStats.Exchanges, sum.Asked-lastStats.Asked
		t.Heartbeats, t.Failures = sum.Heartbeats-lastStats.Heartbeats, sum.Failures-lastStats.Failures
		last, lastStats, lastLatency = t.Total, sum, latency
		c.Observe(t)
	}
}

// A generator hands checks to instances when they are due.
type generator struct {
	load      Load
	rate      float64
	instances int
	duration  time.Duration
	start     time.Time
	to        []*runner     // by instance; nil where the instance is not ours
	skip      time.Duration // checks due before are not made
	late      time.Duration
	dropped   int64
	lasted    time.Duration
}

// pace is the least it sleeps: many checks are due at once at a high rate, and waking up for each would cost more than they do.
const pace = 500 * time.Microsecond

func (g *generator) run(ctx context.Context) {
	defer func() {
		for _, r := range g.to {
			if r != nil {
				close(r.queue)
			}
		}
	}()
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	now := time.Since(g.start)
	for k := int64(0); ; k++ {
		c, ok := g.load.Next(k, g.rate, g.instances)
		if !ok || c.At >= g.duration {
			if !ok { // the load ran out
				return
			}
			break
		}
		if c.Instance < 0 || c.Instance >= len(g.to) || g.to[c.Instance] == nil || c.At < g.skip {
			continue
		}
		if c.At > now {
			now = time.Since(g.start)
		}
		for c.At > now {
			asked := now + max(c.At-now, pace)
			t.Reset(asked - now)
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			now = time.Since(g.start)
			g.late = max(g.late, now-asked)
		}
		g.lasted = c.At
		select {
		case g.to[c.Instance].queue <- c:
		default:
			g.dropped++
		}
	}
	// The load lasts to the end, not to its last check.
	select {
	case <-ctx.Done():
	case <-time.After(g.duration - time.Since(g.start)):
	}
}

// queueLen is how many checks may wait for an instance's workers.
const queueLen = 1 << 15

// A runner is one instance with its workers.
type runner struct {
	id       int
	hybrid   *tierlimit.Hybrid
	limiter  *tierlimit.Limiter
	client   redis.UniversalClient
	queue    chan Check
	each     func(Answer)
	memory   *envelope.Memory // one of these two, or none
	recorder recorder
	workers  []*worker
	faults   atomic.Pointer[error] // the first error of a recording
}

// A recorder takes an admission down before it is asked for, and what became of it: in child processes, which may die between.
type recorder interface {
	begin(a envelope.Admission) (end func(returned int64, allowed bool), err error)
}

// A worker counts what it did. Only it writes; watch reads.
type worker struct {
	offered, admitted, denied, checks, errors atomic.Int64
	bySource                                  [4]atomic.Int64
	latency, late                             Histogram
}

func newRunner(c *Config, i int) (*runner, error) {
	r := &runner{id: i, queue: make(chan Check, queueLen), each: c.Each}
	var err error
	if c.Client == nil {
		r.hybrid, err = tierlimit.NewLocal(c.Options...)
	} else {
		r.client = c.Client(i)
		r.hybrid, err = tierlimit.New(r.client, c.Options...)
	}
	if err == nil {
		name := c.Name
		if name == "" {
			name = "fleet"
		}
		r.limiter, err = r.hybrid.Limiter(name, c.Limit)
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	if c.Made != nil {
		c.Made(i, r.hybrid)
	}
	n := c.Workers
	if n == 0 {
		n = 4
	}
	for range n {
		r.workers = append(r.workers, new(worker))
	}
	return r, nil
}

// close closes the instance and its client. With a Redis that does not answer it takes a second.
func (r *runner) close() error {
	var err error
	if r.hybrid != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err = r.hybrid.Close(ctx)
		cancel()
	}
	if r.client != nil {
		err = errors.Join(err, r.client.Close())
	}
	return err
}

// overtime is how long after the load's end checks that were offered in time are still made.
const overtime = 250 * time.Millisecond

func (r *runner) work(ctx context.Context, wg *sync.WaitGroup, start time.Time, duration time.Duration) {
	for _, w := range r.workers {
		wg.Go(func() {
			for c := range r.queue {
				late := time.Since(start) - c.At
				if late > duration-c.At+overtime || ctx.Err() != nil {
					continue
				}
				w.late.Record(late)
				r.check(ctx, w, c)
			}
		})
	}
}

func (r *runner) check(ctx context.Context, w *worker, c Check) {
	a := envelope.Admission{Called: envelope.Now(), Cost: c.Cost, Instance: int32(r.id)}
	var end func(int64, bool)
	if r.recorder != nil {
		a.Key = envelope.KeyID(c.Key)
		var err error
		if end, err = r.recorder.begin(a); err != nil {
			// What cannot be recorded must not be admitted: the history would be too good.
			r.faults.CompareAndSwap(nil, &err)
			return
		}
		a.Called = envelope.Now()
	}
	res, err := r.limiter.AllowN(ctx, c.Key, c.Cost)
	a.Returned = envelope.Now()
	w.latency.Record(time.Duration(a.Returned - a.Called))
	w.checks.Add(1)
	w.offered.Add(c.Cost)
	allowed := err == nil && res.Allowed
	switch {
	case err != nil:
		w.errors.Add(1)
	case allowed:
		w.admitted.Add(c.Cost)
	default:
		w.denied.Add(c.Cost)
	}
	if err == nil {
		w.bySource[res.Source&3].Add(1)
	}
	if r.each != nil {
		r.each(Answer{Check: c, Called: a.Called, Returned: a.Returned, Result: res, Err: err})
	}
	switch {
	case end != nil:
		end(a.Returned, allowed)
	case r.memory != nil && allowed:
		a.Key = envelope.KeyID(c.Key)
		_ = r.memory.Record(a) // never fails
	}
}

// report is what the instance did so far.
func (r *runner) report() (i Instance, latency, late *Histogram) {
	latency, late = new(Histogram), new(Histogram)
	for _, w := range r.workers {
		c := Counts{Offered: w.offered.Load(), Admitted: w.admitted.Load(), Denied: w.denied.Load(), Checks: w.checks.Load(), Errors: w.errors.Load()}
		for s := range c.BySource {
			c.BySource[s] = w.bySource[s].Load()
		}
		i.Counts.add(c)
		latency.Add(&w.latency)
		late.Add(&w.late)
	}
	i.Stats = r.hybrid.Stats()
	return i, latency, late
}
