package tierlimit

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// An exchanger is the way to Redis: a remote.Client, or a test's hostile network. Its calls are answered when their context is
// done at the latest and are never sent twice.
type exchanger interface {
	ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(remote.Reply, error))
	Heartbeat(ctx context.Context, domain remote.Domain, b remote.Beat) (remote.View, error)
	Grouped() bool
	Domain(group uint8) remote.Domain
	Refresh(ctx context.Context) error
}

// A domain is what fails together: one Redis, or one master of a Cluster. It has its own loop, which gathers the cells
// that are to be settled and sends them in batches; its own breaker; and its own membership.
//
// Lock order: a shard of the table, a cell, a domain, the Hybrid. No lock is held over a call, a wait or a callback.
type domain struct {
	h       *Hybrid
	tag     remote.Domain
	breaker *breaker.Breaker
	wake    chan struct{}
	flying  sync.WaitGroup // calls on their way
	outage  atomic.Int64   // membership.outage while away, 0 otherwise

	mu       sync.Mutex
	ready    map[batch]*queue // cells to be settled
	queued   int              // places in ready
	tickets  int64            // given out so far
	boarding map[batch]int    // flights that have yet to take their cells
	flights  int              // calls on their way, or whose answers are being taken in
	jobs     chan job         // for pilots that wait for one
	idle     int              // pilots that wait and have not been sent one
	crowd    crowd
	rtt      float64 // smoothed round trip of an exchange, ns
	rttWorst float64 // a slowly falling maximum of it
	rttBest  float64 // a slowly rising minimum of it: the way without the queues
	wheel    wheel
	m        membership
	reported State
	stopped  bool     // no more calls begin
	calls    []func() // to be called by the loop without a lock
}

// batch is what may share a script call: one algorithm, and in a Cluster or Ring one slot group.
type batch struct {
	algorithm tier.Algorithm
	group     uint8
}

// A queue holds the cells of a batch that are to be settled, each kind first come, first served. Callers wait for the first kind: they would
// time out behind all that is to be told anew when Redis has lost its memory.
type queue struct {
	waited, rest []place
	void         int // places of rest without a cell: it has a better one
}

// A place in a queue is that of a cell as long as the cell has its ticket. Tickets are numbered by the domain; those of two domains may be alike.
type place struct {
	c      *local.Cell
	ticket int64
}

func (q *queue) len() int {
	if q == nil {
		return 0
	}
	return len(q.waited) + len(q.rest) - q.void
}

// drop voids the place of c among those that nobody waits for, along which tickets rise. Left there, the places of busy cells would pile up: only
// an eighth of a call is for them. It is false where a flight has taken the place along: it finds that it is void.
func (q *queue) drop(c *local.Cell) bool {
	i, found := slices.BinarySearchFunc(q.rest, c.Ticket, func(p place, ticket int64) int { return cmp.Compare(p.ticket, ticket) })
	if !found || q.rest[i].c != c {
		return false
	}
	q.rest[i].c = nil
	if q.void++; q.void > len(q.rest)/2 {
		q.rest, q.void = slices.DeleteFunc(q.rest, func(p place) bool { return p.c == nil }), 0
	}
	return true
}

// take removes n places: those of the first kind, but for an eighth, which is for the others if there are any.
func (q *queue) take(n int) []place {
	rest := min(len(q.rest)-q.void, max(n/8, n-len(q.waited)))
	waited := n - rest
	places := slices.Clone(q.waited[:waited])
	q.waited = q.waited[waited:]
	for ; rest > 0; q.rest = q.rest[1:] {
		if p := q.rest[0]; p.c == nil {
			q.void--
		} else {
			places = append(places, p)
			rest--
		}
	}
	return places
}

// all are the places of the queue.
func (q *queue) all() []place {
	return slices.DeleteFunc(slices.Concat(q.waited, q.rest), func(p place) bool { return p.c == nil })
}

// leaveLocked takes the cell out of the queue, if this place is still its own. Caller holds the cell's Mu.
func (p place) leaveLocked() bool {
	if p.c.Ticket != p.ticket {
		return false
	}
	p.c.Ticket, p.c.Waited = 0, false
	return true
}

// maxFlights bounds the exchanges on their way at once. One is best while Redis is near: what comes meanwhile joins the
// next. The farther it is, the more are needed to keep it busy.
const maxFlights = 16

const flightsPerRTT = 150 * time.Microsecond

// maxCosts bounds the runs of equal costs in one key's message, so that one key cannot make a call long.
const maxCosts = 64

func newDomain(h *Hybrid, tag remote.Domain) *domain {
	d := &domain{h: h, tag: tag, wake: make(chan struct{}, 1), jobs: make(chan job, maxFlights), ready: map[batch]*queue{}, boarding: map[batch]int{}, reported: StateConnecting}
	d.wheel.tick = h.now() / wheelTick
	// The loop takes a change in: this may be called with d.mu held, by the loop's own Begin.
	b, err := breaker.New(h.cfg.breaker, func(_, _ breaker.State) { d.wakeUp() })
	if err != nil {
		panic(err) // config.faults has checked the settings
	}
	d.breaker = b
	return d
}

func (d *domain) wakeUp() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// laterLocked lets the loop call f without a lock held. Caller holds d.mu.
func (d *domain) laterLocked(f func()) { d.calls = append(d.calls, f) }

// run is the loop: it sends what is pending, looks at the cells that are due, and beats.
func (d *domain) run() {
	t := time.NewTimer(0)
	defer t.Stop()
	var due []*local.Cell
	for {
		select {
		case <-d.h.stop:
			d.mu.Lock()
			d.stopped = true
			close(d.jobs)
			d.mu.Unlock()
			d.flying.Wait()
			d.runCalls()
			return
		case <-d.wake:
		case <-t.C:
		}
		now := d.h.now()
		d.mu.Lock()
		due = d.wheel.pop(now, due[:0])
		d.mu.Unlock()
		for i, c := range due {
			c.Mu.Lock()
			d.visitLocked(c, now)
			c.Mu.Unlock()
			due[i] = nil
		}
		d.mu.Lock()
		if d.down() { // forced, perhaps, before there was this domain
			d.m.shaky = true
			d.awayLocked(now)
		}
		d.beatLocked(now)
		d.dispatchLocked(now)
		d.reportStateLocked(now) // a silence ends by itself
		next := now + int64(d.h.cfg.heartbeat)
		if !d.m.beating && !d.h.forced.Load() && d.h.resolved.Load() {
			next = min(next, d.m.due)
		}
		if at, ok := d.wheel.next(); ok {
			next = min(next, at)
		}
		d.mu.Unlock()
		d.runCalls()
		t.Reset(time.Duration(max(next-d.h.now(), int64(100*time.Microsecond))))
	}
}

func (d *domain) runCalls() {
	d.mu.Lock()
	calls := d.calls
	d.calls = nil
	d.mu.Unlock()
	for _, f := range calls {
		f()
	}
}

// note takes the hint of a warm check that a lease runs low.
func (h *Hybrid) note(c *local.Cell) {
	if !c.Mu.TryLock() {
		c.Renote() // whoever holds it settles the cell, or the next check notes again
		return
	}
	defer c.Mu.Unlock()
	h.noteLocked(c)
}

// noteLocked lets the loop renew a lease that runs low. Caller holds c.Mu.
func (h *Hybrid) noteLocked(c *local.Cell) {
	switch d := h.domainOf(c); {
	case c.Dead:
	case h.now() < c.Pause:
		d.scheduleLocked(c, c.Pause)
	default:
		d.enqueueLocked(c)
	}
}

// enqueueLocked lets the loop settle c. Caller holds c.Mu.
func (d *domain) enqueueLocked(c *local.Cell) {
	waited := len(c.Waiters) > 0
	if c.InFlight || c.Ticket != 0 && (c.Waited || !waited) {
		return // what comes during a flight is looked at when it lands
	}
	l := d.h.limiter(c.Owner)
	b := batch{algorithm: l.policy.Load().tier.Algorithm}
	if d.h.client.Grouped() {
		_, b.group = remote.KeyName(d.h.cfg.prefix, l.name, c.Key)
	}
	d.mu.Lock()
	if d.m.away != 0 {
		d.mu.Unlock()
		d.putOffLocked(c)
		return
	}
	q := d.ready[b]
	if q == nil {
		q = new(queue)
		d.ready[b] = q
	}
	if c.Ticket != 0 && q.drop(c) {
		d.queued--
	}
	d.tickets++
	c.Ticket, c.Waited = d.tickets, waited
	if waited {
		q.waited = append(q.waited, place{c, c.Ticket})
	} else {
		q.rest = append(q.rest, place{c, c.Ticket})
	}
	d.queued++
	// Where others wait too, the loop lets one of them have the room: who has just landed would take it again and again.
	begun := len(d.ready) == 1 && d.flights < d.roomLocked() && d.freshLocked(d.h.now()) && d.flyLocked(b)
	d.mu.Unlock()
	if !begun {
		d.wakeUp()
	}
}

// joinLocked lets w wait for an exchange of c. Caller holds c.Mu.
func (d *domain) joinLocked(c *local.Cell, w *local.Waiter) {
	c.Waiters = append(c.Waiters, w)
	d.crowd.arrived.Add(1)
	d.enqueueLocked(c)
}

// scheduleLocked lets the loop look at c at due. Caller holds c.Mu.
func (d *domain) scheduleLocked(c *local.Cell, due int64) {
	d.mu.Lock()
	c.Due = d.wheel.add(c, due)
	d.mu.Unlock()
	if due-d.h.now() < int64(d.h.cfg.syncInterval) {
		d.wakeUp()
	}
}

// visitLocked looks at a cell that is due: what was spent is reported, what lies idle goes back, an exhausted window
// that is asked for is polled. Caller holds c.Mu.
func (d *domain) visitLocked(c *local.Cell, now int64) {
	if c.Due == 0 || c.Due > now || c.Dead && c.Retired == 0 || c.Ticket != 0 || c.InFlight {
		return
	}
	c.Due = 0
	d = d.h.domainOf(c) // its key may live elsewhere by now
	have := c.Tokens()
	if c.Refund != 0 || c.ChargeCold > 0 {
		d.enqueueLocked(c)
		return
	}
	if c.Dead {
		c.Return = true
		d.enqueueLocked(c)
		return
	}
	if c.Slot == 0 || have == 0 && c.Base == 0 {
		if c.DeniedUntil() > now && c.DeniedDemand() > 0 {
			d.enqueueLocked(c)
		} else if c.DeniedUntil() > now && c.Out > 0 {
			d.scheduleLocked(c, now+pollMax)
		}
		return
	}
	idle := have == c.Base
	switch {
	case idle && now < c.Settled+c.Horizon && now < c.Deadline():
		d.scheduleLocked(c, min(c.Settled+c.Horizon, c.Deadline()))
	case idle || now >= c.Deadline():
		c.Return = true
		d.enqueueLocked(c)
	default:
		d.enqueueLocked(c)
	}
}

// countLocked keeps the sum of tokens in hand. Caller holds c.Mu.
func (d *domain) countLocked(c *local.Cell) {
	have := c.Tokens()
	if c.Dead {
		have = 0
	}
	d.h.leased.Add(have - c.Counted)
	c.Counted = have
}

const (
	pollMin = int64(20 * time.Millisecond)
	pollMax = int64(time.Second)
)

// retireLocked takes a lease out of use at once and sends it back. Caller holds c.Mu.
func (d *domain) retireLocked(c *local.Cell) {
	c.Retired += c.Clear()
	d.enqueueLocked(c)
}

// dispatchLocked sends what is pending while there is room for another flight and the view is fresh. Caller holds d.mu.
func (d *domain) dispatchLocked(now int64) {
	if d.queued == 0 || d.m.away != 0 || !d.h.resolved.Load() {
		return
	}
	if !d.freshLocked(now) {
		d.hurryLocked(now)
		d.beatLocked(now)
		return
	}
	for b := range d.ready {
		for d.flights < d.roomLocked() && d.flyLocked(b) {
		}
	}
}

// roomLocked is how many flights may be on their way. Caller holds d.mu.
func (d *domain) roomLocked() int {
	room := min(maxFlights, 1+int(d.rttBest/float64(flightsPerRTT)))
	left := d.queued // by those that have yet to take their cells
	for _, n := range d.boarding {
		left -= n * remote.MaxKeys
	}
	if left >= remote.MaxKeys {
		room = max(room, 2)
	}
	return room
}

// flyLocked begins a flight for what is pending in b, unless those that have yet to take their cells will take all of it.
func (d *domain) flyLocked(b batch) bool {
	if d.stopped || !d.h.resolved.Load() || d.boarding[b]*remote.MaxKeys >= d.ready[b].len() {
		return false
	}
	d.flights++
	d.boarding[b]++
	d.flying.Add(1)
	j := job{b, time.Duration(d.rttBest / 8)}
	if d.idle > 0 {
		d.idle--
		d.jobs <- j
	} else {
		go d.pilot(j)
	}
	return true
}

// A job is a flight to be flown, after a wait for those who may come along.
type job struct {
	b        batch
	patience time.Duration
}

// pilot flies one flight after the other. A goroutine for each would have to grow its stack each time, which takes a sixth of what this
// process spends on a call; so as many as there is room for stay and wait for the next.
func (d *domain) pilot(j job) {
	for ok := true; ok; j, ok = <-d.jobs {
		d.crowd.gather(j.patience)
		if f := d.board(j.b); f != nil {
			f.fly()
		} else {
			d.flying.Done()
		}
		d.mu.Lock()
		leave := d.stopped || d.idle >= d.roomLocked() || d.h.closed.Load()
		if !leave {
			d.idle++
		}
		d.mu.Unlock()
		if leave {
			return
		}
	}
}

// measureLocked takes in how long a round trip took, in ns. Caller holds d.mu.
func (d *domain) measureLocked(rtt float64) {
	if d.rtt == 0 {
		d.rtt, d.rttWorst, d.rttBest = rtt, rtt, rtt
	}
	d.rtt += (rtt - d.rtt) / 8
	d.rttWorst = max(rtt, d.rttWorst*0.99)
	d.rttBest = min(rtt, d.rttBest*1.001)
}

// board returns a flight with cells of b, nil if there are none or nothing may be sent any more.
func (d *domain) board(b batch) *flight {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.boarding[b]--; d.boarding[b] == 0 {
		delete(d.boarding, b)
	}
	now := d.h.now()
	q := d.ready[b]
	if q.len() == 0 || d.m.away != 0 || !d.freshLocked(now) {
		d.flights--
		d.wakeUp()
		return nil
	}
	f := &flight{d: d, batch: b, places: q.take(min(q.len(), remote.MaxKeys))}
	if q.len() == 0 {
		delete(d.ready, b)
	}
	d.queued -= len(f.places)
	f.fence = min(d.m.clock.fence(now, d.h.cfg.remoteTimeout), d.m.view.Now+shrink(int64(d.h.viewFor()))/1000)
	f.dark = d.m.view.Darkness
	f.change = d.m.change
	f.rtt, f.rttWorst = d.rtt, d.rttWorst
	f.wentAway = d.m.backFrom
	if d.m.backIn == f.dark.Episode {
		f.back = d.m.back
	}
	f.clock = d.m.clock
	return f
}

// putOffLocked is what becomes in an outage of a cell that was to be settled: nothing is sent. Whoever waits is answered; a lease that can still
// be returned, what is to be charged, and an exhausted window that was polled, are looked at again until Redis is back. A refund is not kept: it would be credited
// later than it was given. Caller holds c.Mu.
func (d *domain) putOffLocked(c *local.Cell) {
	if c.Refund > 0 {
		c.Refund = 0
	}
	answerLocked(c, local.Outcome{Down: true})
	if c.Dead {
		c.Retired += c.Clear()
	} else {
		c.Return = false // whether it lies idle is looked at anew: a lease in use that went back would leave its key cold
	}
	now, beat := d.h.now(), int64(d.h.cfg.heartbeat)
	switch {
	case !c.Dead && (c.ChargeCold > 0 || c.DeniedUntil() > now && c.Out > 0):
		d.scheduleLocked(c, now+beat)
	case c.Slot != 0 && !c.Unknown && (c.Base > 0 || c.Retired > 0) && now+leaseLook*beat <= c.Deadline():
		d.scheduleLocked(c, now+leaseLook*beat)
	}
}

// leaseLook is after how many heartbeats a lease that was put off is looked at: not soon, since an exchange while Redis comes and goes may burn it
// and leave its key cold. One that ends before by itself is left alone.
const leaseLook = 30

// putOff is putOffLocked for cells that will not be sent.
func (d *domain) putOff(places []place) {
	for _, p := range places {
		p.c.Mu.Lock()
		if p.leaveLocked() {
			d.putOffLocked(p.c)
		}
		p.c.Mu.Unlock()
	}
}

// drain waits until nothing is pending or on its way, Redis is given up, or ctx ends.
func (d *domain) drain(ctx context.Context) error {
	if err := d.await(ctx, func() bool { return d.m.away != 0 || d.queued+d.flights == 0 }); err != nil {
		return fmt.Errorf("tierlimit: what was on its way to Redis was not waited for: %w", err)
	}
	return nil
}

// await waits until done, which is asked with d.mu held, or ctx ends, whose error it returns as it is.
func (d *domain) await(ctx context.Context, done func() bool) error {
	for {
		d.mu.Lock()
		ok := done()
		d.mu.Unlock()
		if ok {
			return nil
		}
		if err := tick(ctx); err != nil {
			return err
		}
	}
}

// nextLandingLocked is the count of landings of c by which what it holds now has been exchanged. Caller holds c.Mu.
func nextLandingLocked(c *local.Cell) int64 {
	if c.InFlight {
		return c.Landed + 2
	}
	return c.Landed + 1
}

// landed waits until c's flights have come back as often as landing says, nothing more is to be sent for it, or ctx ends, whose error it
// returns as it is: the caller says what was given up.
func (d *domain) landed(ctx context.Context, c *local.Cell, landing int64) error {
	for {
		c.Mu.Lock()
		done := c.Landed >= landing || c.Ticket == 0 && !c.InFlight
		c.Mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-d.h.stop:
			return ErrClosed
		default:
		}
		if err := tick(ctx); err != nil {
			return err
		}
	}
}

// tick sleeps for a millisecond, less if ctx ends.
func tick(ctx context.Context) error {
	t := time.NewTimer(time.Millisecond)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
