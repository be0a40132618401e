package tierlimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// Fleets of a size that no machine of a test can run: real Hybrids with the real loop in virtual time, against the Go model of the
// scripts behind a network with a round trip and a server that does one thing at a time. docs/simulation.md has the figures, make sim
// makes them (sim_report_test.go).

// simLong is the whole matrix: make sim.
var simLong = os.Getenv("TIERLIMIT_LONG") != ""

// A simServer is a world behind the queue of a server with one thread.
type simServer struct {
	*world
	prices simPrices

	mu    sync.Mutex
	free  time.Time // when it will have worked off what has come
	total simLoad

	// Who has acknowledged what: a heartbeat looks at all members while somebody has yet to acknowledge that another joined.
	acked  map[string]int64
	news   int64 // number of the last beat with which somebody joined, or that proved a loss
	behind int   // members that have not acknowledged it
	lostAt int64
}

// simLook is LOOK of membership.lua.
const simLook = 64

// simLoad is what a server had to do.
type simLoad struct {
	exchanges, keys, beats int64
	busy                   time.Duration
	queue                  time.Duration // the longest that a call has waited for the server
}

func newSimServer(c *simConfig) *simServer {
	w := newWorld(c.variant, c.offset, c.drift)
	w.forget = true
	return &simServer{world: w, prices: c.prices, acked: map[string]int64{}}
}

// work returns when the server has come to a call that has just arrived, and is done with it.
func (s *simServer) work(price func(done *simLoad) time.Duration) {
	s.mu.Lock()
	now := time.Now()
	if s.free.Before(now) {
		s.free = now
	}
	d := price(&s.total)
	s.total.queue = max(s.total.queue, s.free.Sub(now))
	s.total.busy += d
	s.free = s.free.Add(d)
	done := s.free
	s.mu.Unlock()
	time.Sleep(time.Until(done))
}

func (s *simServer) settle(alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) remote.Reply {
	s.work(func(done *simLoad) time.Duration {
		done.exchanges++
		done.keys += int64(len(asks))
		return s.prices.call[alg] + time.Duration(len(asks))*s.prices.key[alg]
	})
	return s.exchange(alg, fence, dark, asks)
}

func (s *simServer) hear(b remote.Beat) remote.View {
	s.work(func(done *simLoad) time.Duration {
		done.beats++
		if n := int64(len(s.acked)); b.Op == remote.OpBeat && s.behind > 0 && (n <= simLook || done.beats%(n/simLook) == 0) {
			return s.prices.beat + time.Duration(len(s.acked))*s.prices.member
		}
		return s.prices.beat
	})
	v := s.heartbeat(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.followLocked(&b, &v)
	return v
}

// followLocked counts who has not acknowledged the last join or loss. Caller holds s.mu.
func (s *simServer) followLocked(b *remote.Beat, v *remote.View) {
	ack, member := s.acked[b.ID]
	switch {
	case v.Late:
		return
	case b.Op == remote.OpLeave:
		delete(s.acked, b.ID)
	case b.Op != remote.OpBeat:
		return
	case !member:
		s.acked[b.ID], s.news = v.Beats-1, v.Beats
	default:
		if ack < s.news && b.Remembered >= s.news {
			s.behind--
		}
		s.acked[b.ID] = b.Remembered
		if v.LostAt == s.lostAt {
			return
		}
		s.news = v.Beats
	}
	s.lostAt = v.LostAt
	s.behind = 0
	for _, ack := range s.acked {
		if ack < s.news {
			s.behind++
		}
	}
}

// forgetMember takes in that a member was forgotten that had not left.
func (s *simServer) forgetMember(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ack, ok := s.acked[id]; ok && ack < s.news {
		s.behind--
	}
	delete(s.acked, id)
}

// lose makes the server forget everything.
func (s *simServer) lose() {
	s.world.mu.Lock()
	s.store.Flush()
	s.world.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.acked)
	s.behind = 0
}

// A simLink is one instance's way to the server.
type simLink struct {
	s     *simServer
	rtt   time.Duration // a call's is up to a tenth shorter or longer
	lossy int           // one call in so many is lost, loses its reply or is late; 0 for none

	mu      sync.Mutex
	rnd     *rand.Rand
	refused int       // cuts under way that refuse connections
	silent  int       // cuts under way in which what is sent goes nowhere
	hangs   time.Time // the server reads again then, and runs what was sent until then
}

func (k *simLink) set(f func(k *simLink)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(k)
}

func (k *simLink) fate() fate {
	k.mu.Lock()
	defer k.mu.Unlock()
	way := func() time.Duration { return time.Duration(float64(k.rtt) / 2 * (0.9 + 0.2*k.rnd.Float64())) }
	f := fate{there: way(), back: way(), refuse: k.refused > 0, lose: k.silent > 0}
	f.there += max(0, time.Until(k.hangs))
	if k.lossy > 0 && k.rnd.IntN(k.lossy) == 0 {
		switch k.rnd.IntN(3) {
		case 0:
			f.lose = true
		case 1:
			f.loseReply = true
		case 2:
			f.there += time.Duration(k.rnd.Int64N(int64(200 * time.Millisecond)))
		}
	}
	return f
}

func (k *simLink) ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(remote.Reply, error)) {
	then(k.Exchange(ctx, alg, fence, dark, asks))
}

func (k *simLink) Exchange(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) (remote.Reply, error) {
	asks = slices.Clone(asks)
	return carry(ctx, &k.s.air, k.fate(), func() remote.Reply { return k.s.settle(alg, fence, dark, asks) })
}

func (k *simLink) Heartbeat(ctx context.Context, _ remote.Domain, b remote.Beat) (remote.View, error) {
	return carry(ctx, &k.s.air, k.fate(), func() remote.View { return k.s.hear(b) })
}

func (k *simLink) Grouped() bool                 { return false }
func (k *simLink) Domain(uint8) remote.Domain    { return remote.Domain{} }
func (k *simLink) Refresh(context.Context) error { return nil }

// A simConfig is one run.
type simConfig struct {
	name     string
	n        int
	limit    Limit
	offered  float64 // checks per second in all, at random instants
	zipf     float64 // instance i is offered 1/(i+1)^zipf as much as the first; 0 is evenly
	keys     int     // how many keys are asked for, the k-th 1/k as often as the first; 0 is one
	rtt      time.Duration
	lossy    int
	opts     []Option
	starts   time.Duration // the instances start within this, one after another; 0 is a second
	cold     bool          // the load begins with the first instance
	warm     time.Duration // of the load, before figures are taken
	length   time.Duration // of the load, from then on
	prices   simPrices     // zero is typicalPrices
	variant  model.Variant // the protocol, or what is left out of it
	offset   time.Duration // the server's clock is ahead by this,
	drift    int64         // and fast by so many parts in a million
	events   []simEvent
	loses    int64 // how often Redis loses its data: each may cost the capacity
	strained bool  // the time-out leaves so little room that the fleet may never come together
	seed     uint64
}

// A simEvent happens at an instant after the load began.
type simEvent struct {
	at   time.Duration
	what string
	do   func(f *simFleet)
}

type simInstance struct {
	h    *Hybrid
	l    *Limiter
	link *simLink

	asked, admitted atomic.Int64
}

// A simFleet is a run under way. The load and the events are of one goroutine, which alone changes who is there.
type simFleet struct {
	t    *testing.T
	c    simConfig
	s    *simServer
	rnd  *rand.Rand
	all  []*simInstance // in the order in which they joined
	live []*simInstance // who is asked
	odds []float64      // of the live ones, added up
	mem  envelope.Memory

	keys    []string
	keyOdds []float64
	ideals  []*simIdeal
	could   int64 // what they have admitted

	callers sync.WaitGroup // checks that wait, and what events left running
	errs    chan error
	sums    simSums
}

type simSums struct {
	source                  [4]atomic.Int64 // checks
	admitted, waits, waited atomic.Int64    // waits: checks that waited for Redis; waited: how long in all, ns
}

// A simIdeal decides at once: what one central counter without a network would do with the same checks.
type simIdeal struct {
	limit    Limit
	level    float64 // buckets: tokens there are at an instant
	at       int64   // that instant; windows: the (sub-)window of the last check
	counts   []int64 // windows: admitted in that one and those before, newest first
	admitted []int64 // log: when, oldest first
}

func newSimIdeal(l Limit, now int64) *simIdeal {
	windows := 1
	if l.Algorithm == AlgorithmSlidingWindow {
		windows = max(1, l.SubWindows) + 1
	}
	return &simIdeal{limit: l, level: float64(l.Burst), at: now, counts: make([]int64, windows)}
}

// take decides a check of one token at an instant of the server's clock.
func (i *simIdeal) take(now int64) bool {
	l := &i.limit
	switch l.Algorithm {
	case AlgorithmFixedWindow, AlgorithmSlidingWindow:
		w := int64(l.Period) / int64(max(1, len(i.counts)-1))
		if steps := now/w - i.at/w; steps > 0 {
			i.counts = append(make([]int64, min(steps, int64(len(i.counts)))), i.counts...)[:len(i.counts)]
		}
		i.at = now
		sum := float64(i.counts[0])
		for k, n := range i.counts[1:] {
			if k == len(i.counts)-2 {
				sum += float64(n) * float64(w-now%w) / float64(w)
			} else {
				sum += float64(n)
			}
		}
		if sum+1 > float64(l.Rate) {
			return false
		}
		i.counts[0]++
	case AlgorithmSlidingLog:
		for len(i.admitted) > 0 && i.admitted[0] <= now-int64(l.Period) {
			i.admitted = i.admitted[1:]
		}
		if int64(len(i.admitted)) >= l.Rate {
			return false
		}
		i.admitted = append(i.admitted, now)
	default:
		i.level = min(float64(l.Burst), i.level+float64(l.Rate)*float64(now-i.at)/float64(l.Period))
		i.at = now
		if i.level+1e-9 < 1 {
			return false
		}
		i.level--
	}
	return true
}

// A simFigure is what a run came to. Overshoot and the longest queue are of the whole run, the rest of the time after the warm-up.
type simFigure struct {
	*simConfig
	verdict          envelope.Verdict
	admitted, could  int64 // could: what an ideal limiter would have admitted
	checks           int64
	source           [4]int64 // checks, by Source
	waits            int64
	wait             time.Duration // mean of the checks that waited
	load             simLoad
	parts            []float64 // what each instance got of what its demand entitles it to; of those there from beginning to end
	failures         int64     // calls that failed
	alone            int       // instances that were without any contact when their breaker opened: they count themselves alone
	online           time.Duration
	apart            bool    // the fleet did not come together
	perSecond        []int64 // admitted, from the beginning of the load
	virtual, elapsed time.Duration
}

func (f *simFigure) use() float64 { return float64(f.admitted) / float64(max(1, f.could)) }

// local is the part of the checks that did not wait for Redis and were not decided for want of it.
func (f *simFigure) local() float64 { return float64(f.source[Local]) / float64(max(1, f.checks)) }

func (f *simFigure) exchanges() float64 { return float64(f.load.exchanges) / f.length.Seconds() }

func (f *simFigure) busy() float64 { return f.load.busy.Seconds() / f.length.Seconds() }

func (f *simFigure) String() string {
	if f.apart {
		return f.name + ": the fleet did not come together"
	}
	return fmt.Sprintf("%s: overshoot %d, %.4f of %d, %.1f %% in process, %d fallback, %.0f exchanges/s of %.1f keys, %.0f beats/s, server busy %.0f %%, queue %v, wait %v, %d failures, %d alone, online in %v; %v in %v",
		f.name, f.verdict.Overshoot, f.use(), f.could, 100*f.local(), f.source[Fallback], f.exchanges(), float64(f.load.keys)/float64(max(1, f.load.exchanges)),
		float64(f.load.beats)/f.length.Seconds(), 100*f.busy(), f.load.queue.Round(time.Microsecond), f.wait.Round(time.Microsecond), f.failures, f.alone, f.online.Round(time.Millisecond),
		f.virtual.Round(time.Second), f.elapsed.Round(time.Millisecond))
}

// simulate plays a run, and fails the test where more was admitted than the limit allows.
func simulate(t *testing.T, c simConfig) *simFigure {
	t.Helper()
	f := playSim(t, c)
	if most := c.loses * c.limit.tier().Capacity(); f.verdict.Overshoot > most {
		t.Errorf("%v: %v, want %d at most", f, f.verdict, most)
	}
	return f
}

// playSim plays a run in a bubble of its own.
func playSim(t *testing.T, c simConfig) *simFigure {
	t.Helper()
	if c.prices == (simPrices{}) {
		c.prices = typicalPrices
	}
	if c.starts == 0 {
		c.starts = time.Second
	}
	out := &simFigure{simConfig: &c}
	began := time.Now()
	var history []envelope.Admission
	synctest.Test(t, func(t *testing.T) {
		f := &simFleet{
			t: t, c: c, s: newSimServer(&c), rnd: rand.New(rand.NewPCG(c.seed, 1)),
			errs: make(chan error, 1), keyOdds: zipf(max(1, c.keys), 1),
		}
		born := time.Now()
		defer f.close()
		for k := range f.keyOdds {
			f.keys = append(f.keys, fmt.Sprint("k", k))
			f.ideals = append(f.ideals, newSimIdeal(c.limit, f.s.nowNS()))
		}
		f.begin(out)
		if !out.apart {
			f.drive(out)
		}
		history = f.mem.History()
		out.virtual = time.Since(born)
	})
	out.verdict = envelope.Check(envelopeOf(c.limit), history)
	out.elapsed = time.Since(began)
	return out
}

// zipf are odds, added up.
func zipf(n int, s float64) (odds []float64) {
	sum := 0.0
	for i := range n {
		sum += math.Pow(float64(i+1), -s)
		odds = append(odds, sum)
	}
	return odds
}

func draw(r *rand.Rand, odds []float64) int {
	if len(odds) == 1 {
		return 0
	}
	i, _ := slices.BinarySearch(odds, r.Float64()*odds[len(odds)-1])
	return min(i, len(odds)-1)
}

// begin lets the fleet come together, or, where the load is to meet it cold, sees to it that it comes.
func (f *simFleet) begin(out *simFigure) {
	each := f.c.starts / time.Duration(f.c.n)
	if f.c.cold {
		for i := range f.c.n {
			f.c.events = append(f.c.events, simEvent{each * time.Duration(i), "", func(f *simFleet) { f.join(1) }})
		}
		return
	}
	born := time.Now()
	for range f.c.n {
		f.join(1)
		time.Sleep(each)
	}
	for !f.complete() {
		if time.Since(born) > 2*time.Minute {
			if out.apart = f.c.strained; !out.apart {
				f.t.Error("the fleet is not one after two minutes")
			}
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	out.online = time.Since(born)
	time.Sleep(2 * time.Second)
}

// complete reports whether all are online and know of each other.
func (f *simFleet) complete() bool {
	for _, i := range f.live {
		if s := i.h.Stats(); s.State != StateOnline || s.Instances != len(f.live) {
			return false
		}
	}
	return true
}

// join starts instances.
func (f *simFleet) join(n int) {
	for range n {
		link := &simLink{s: f.s, rtt: f.c.rtt, lossy: f.c.lossy, rnd: rand.New(rand.NewPCG(f.c.seed, 1000+uint64(len(f.all))))}
		h, err := newHybrid(append([]Option{WithShards(1), WithMaxKeys(max(1024, 2*f.c.keys))}, f.c.opts...))
		if err != nil {
			f.t.Fatal(err)
		}
		h.start = h.start.Add(-time.Duration(f.rnd.Int64N(int64(20 * time.Hour)))) // the machine's clock, off by hours
		h.begin(link)
		l, err := h.Limiter("l", f.c.limit)
		if err != nil {
			f.t.Fatal(err)
		}
		i := &simInstance{h: h, l: l, link: link}
		f.all, f.live = append(f.all, i), append(f.live, i)
	}
	f.odds = zipf(len(f.live), f.c.zipf)
}

// some are n of those who are asked, at random.
func (f *simFleet) some(n int) (out []*simInstance) {
	for _, i := range f.rnd.Perm(len(f.live))[:min(n, len(f.live))] {
		out = append(out, f.live[i])
	}
	return out
}

// remove takes n out of the load.
func (f *simFleet) remove(n int) []*simInstance {
	gone := f.some(n)
	f.live = slices.DeleteFunc(f.live, func(i *simInstance) bool { return slices.Contains(gone, i) })
	f.odds = zipf(len(f.live), f.c.zipf)
	return gone
}

// leave closes n instances in good order.
func (f *simFleet) leave(n int) {
	for _, i := range f.remove(n) {
		f.callers.Go(func() { closeAll(f.t, i.h) })
	}
}

// kill lets n instances vanish: nothing that they have not sent by now reaches the server.
func (f *simFleet) kill(n int) {
	for _, i := range f.remove(n) {
		i.link.set(func(k *simLink) { k.refused++ })
		f.callers.Go(func() {
			closeAll(f.t, i.h)
			time.Sleep(i.h.deadAfter())
			f.s.forgetMember(i.h.id)
		})
	}
}

// cut keeps instances from the server for a while: connections are refused, or what is sent goes nowhere.
func (f *simFleet) cut(who []*simInstance, d time.Duration, refused bool) {
	who = slices.Clone(who)
	add := func(n int) {
		for _, i := range who {
			i.link.set(func(k *simLink) {
				if refused {
					k.refused += n
				} else {
					k.silent += n
				}
			})
		}
	}
	add(1)
	f.callers.Go(func() {
		time.Sleep(d)
		add(-1)
	})
}

// hang stops the server for a while: what is sent meanwhile it runs when it goes on.
func (f *simFleet) hang(d time.Duration) {
	until := time.Now().Add(d)
	for _, i := range f.live {
		i.link.set(func(k *simLink) { k.hangs = until })
	}
}

// ended is a context with which a check that would have to wait returns at once.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// drive offers the load, check by check, lets the events happen, and takes the figures.
func (f *simFleet) drive(out *simFigure) {
	start := time.Now()
	from := f.s.nowNS()
	var warm *simSnapshot
	events := append(f.c.events, simEvent{f.c.warm, "", func(f *simFleet) { warm = f.snapshot() }})
	slices.SortStableFunc(events, func(a, b simEvent) int { return cmp.Compare(a.at, b.at) })
	end := f.c.warm + f.c.length
	for at := time.Duration(0); ; {
		at += time.Duration(f.rnd.ExpFloat64() / f.c.offered * 1e9)
		for len(events) > 0 && events[0].at <= min(at, end) {
			time.Sleep(events[0].at - time.Since(start))
			events[0].do(f)
			events = events[1:]
		}
		time.Sleep(min(at, end) - time.Since(start))
		if at >= end {
			break
		}
		if len(f.live) > 0 {
			f.check(f.live[draw(f.rnd, f.odds)], draw(f.rnd, f.keyOdds))
		}
		select {
		case err := <-f.errs:
			f.t.Fatal(err)
		default:
		}
	}
	last := f.snapshot()
	f.callers.Wait() // who has called is answered
	f.figure(out, warm, last, from)
}

// check makes one check; one that has to wait for Redis does so by itself.
func (f *simFleet) check(i *simInstance, key int) {
	a := envelope.Admission{Called: f.s.nowNS(), Cost: 1, Key: uint64(key + 1)}
	if f.ideals[key].take(a.Called) {
		f.could++
	}
	r, err := i.l.AllowN(ended, f.keys[key], 1)
	if err == nil {
		f.count(i, a, r)
		return
	}
	called := time.Now()
	f.callers.Go(func() {
		r, err := i.l.AllowN(context.Background(), f.keys[key], 1)
		switch {
		case err == nil:
			f.sums.waits.Add(1)
			f.sums.waited.Add(int64(time.Since(called)))
			f.count(i, a, r)
		case !errors.Is(err, ErrClosed): // it left meanwhile
			select {
			case f.errs <- err:
			default:
			}
		}
	})
}

func (f *simFleet) count(i *simInstance, a envelope.Admission, r Result) {
	i.asked.Add(1)
	f.sums.source[r.Source].Add(1)
	if r.Allowed {
		a.Returned = f.s.nowNS()
		_ = f.mem.Record(a)
		i.admitted.Add(1)
		f.sums.admitted.Add(1)
	}
}

// A simSnapshot is where the counts stood.
type simSnapshot struct {
	at              int64 // server's clock
	admitted, could int64
	source          [4]int64
	waits, waited   int64
	load            simLoad
	failures        int64
	who             map[*simInstance][2]int64 // asked, admitted
}

func (f *simFleet) snapshot() *simSnapshot {
	s := &simSnapshot{
		at: f.s.nowNS(), admitted: f.sums.admitted.Load(), could: f.could, waits: f.sums.waits.Load(), waited: f.sums.waited.Load(),
		who: map[*simInstance][2]int64{},
	}
	for k := range s.source {
		s.source[k] = f.sums.source[k].Load()
	}
	f.s.mu.Lock()
	s.load = f.s.total
	f.s.mu.Unlock()
	for _, i := range f.live {
		s.who[i] = [2]int64{i.asked.Load(), i.admitted.Load()}
	}
	for _, i := range f.all {
		s.failures += i.h.failures.Load()
	}
	return s
}

func (f *simFleet) figure(out *simFigure, a, b *simSnapshot, from int64) {
	out.admitted, out.could = b.admitted-a.admitted, b.could-a.could
	for k := range b.source {
		out.source[k] = b.source[k] - a.source[k]
		out.checks += out.source[k]
	}
	if out.waits = b.waits - a.waits; out.waits > 0 {
		out.wait = time.Duration((b.waited - a.waited) / out.waits)
	}
	out.load = simLoad{
		exchanges: b.load.exchanges - a.load.exchanges, keys: b.load.keys - a.load.keys, beats: b.load.beats - a.load.beats,
		busy: b.load.busy - a.load.busy, queue: b.load.queue,
	}
	out.failures = b.failures - a.failures
	for _, i := range f.all {
		if warned := i.h.warned.Load(); warned {
			out.alone++
		}
	}
	fair := float64(out.admitted) / float64(max(1, out.checks))
	for i, then := range a.who {
		if now, ok := b.who[i]; ok && now[0] > then[0] && fair > 0 {
			out.parts = append(out.parts, float64(now[1]-then[1])/float64(now[0]-then[0])/fair)
		}
	}
	slices.Sort(out.parts)
	out.perSecond = make([]int64, int((f.c.warm+f.c.length)/time.Second)+1)
	for _, a := range f.mem.History() {
		if s := (a.Returned - from) / int64(time.Second); s >= 0 && s < int64(len(out.perSecond)) {
			out.perSecond[s] += a.Cost
		}
	}
}

// close ends all instances at once.
func (f *simFleet) close() {
	f.callers.Wait()
	for _, i := range f.live {
		f.callers.Go(func() { closeAll(f.t, i.h) })
	}
	f.callers.Wait()
	f.s.air.Wait()
}

// trouble is what a fleet goes through in d: partitions, outages of three kinds, instances that join, leave and are killed, one
// thing after another. Nothing of it is what docs/guarantees.md does not cover: nobody is cut off alone for 30 s, and nobody
// joins while Redis cannot be heard.
func trouble(seed uint64, n int, d time.Duration) (events []simEvent) {
	r := rand.New(rand.NewPCG(seed, 2))
	between := func(least, most float64) time.Duration {
		return time.Duration((least + (most-least)*r.Float64()) * float64(time.Second))
	}
	for at := between(3, 8); at < d; {
		few, refused := 1+r.IntN(max(1, n/5)), r.IntN(2) == 0
		long := between(0.5, 10)
		if r.IntN(3) == 0 {
			long = between(10, 90)
		}
		e := simEvent{at: at}
		var lasts time.Duration
		switch r.IntN(7) {
		case 0, 1:
			lasts = min(long, 15*time.Second)
			e.what = fmt.Sprintf("%d cut off for %v", few, lasts)
			e.do = func(f *simFleet) { f.cut(f.some(few), lasts, refused) }
		case 2:
			lasts = long
			e.what = fmt.Sprintf("all cut off for %v", lasts)
			e.do = func(f *simFleet) { f.cut(f.live, lasts, refused) }
		case 3:
			lasts = min(long, 20*time.Second)
			e.what = fmt.Sprintf("Redis hangs for %v", lasts)
			e.do = func(f *simFleet) { f.hang(lasts) }
		case 4:
			e.what = fmt.Sprintf("%d join", few)
			e.do = func(f *simFleet) { f.join(max(few, n-len(f.live))) }
		case 5:
			e.what = fmt.Sprintf("%d leave", few)
			e.do = func(f *simFleet) { f.leave(min(few, len(f.live)-1)) }
		case 6:
			e.what = fmt.Sprintf("%d killed", few)
			e.do = func(f *simFleet) { f.kill(min(few, len(f.live)-1)) }
		}
		events = append(events, e)
		at += lasts + between(6, 20) // until all have found their way back
	}
	return events
}

// G1 and G4 with more instances than tokens, through trouble, on clocks that are hours apart and drift.
func TestSimTrouble(t *testing.T) {
	n, length := 50, 75*time.Second
	if raceEnabled {
		n, length = 20, 40*time.Second
	}
	for k, limit := range five(40, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			seed := uint64(k)
			f := simulate(t, simConfig{
				n: n, limit: limit, offered: 120, zipf: float64(k % 2), rtt: 2 * time.Millisecond, lossy: 200, warm: time.Second, length: length,
				offset: time.Duration(k-2) * time.Hour, drift: int64(900 * (k%3 - 1)), events: trouble(seed, n, length), seed: seed,
			})
			t.Log(f)
		})
	}
}

// The trouble is enough to find a rule that is left out. (Rules that only bite in a tight spot have a test each in loop_test.go.)
func TestSimTroubleFindsPlainVariants(t *testing.T) {
	const n, length = 20, 60 * time.Second
	cases := []struct {
		name  string
		limit Limit
		v     model.Variant
	}{
		{"bucket without darkness", TokenBucket(200, time.Second), model.Variant{NoDarkness: true}},
		{"fixed window without darkness", FixedWindow(200, time.Second), model.Variant{NoDarkness: true}},
		{"fixed window without the tie", FixedWindow(200, time.Second), model.Variant{NoTie: true}},
		{"sliding window without darkness", SlidingWindow(200, time.Second), model.Variant{NoDarkness: true}},
		{"log without darkness", SlidingLog(200, time.Second), model.Variant{NoDarkness: true}},
	}
	if raceEnabled {
		cases = cases[:1]
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(5) {
				f := playSim(t, simConfig{
					n: n, limit: tc.limit, offered: 600, rtt: 2 * time.Millisecond, lossy: 100, warm: time.Second, length: length,
					events: trouble(seed, n, length), variant: tc.v, seed: seed,
				})
				if f.verdict.Overshoot > 0 {
					t.Logf("seed %d: %v", seed, f.verdict)
					return
				}
			}
			t.Error("not found in 5 runs")
		})
	}
}
