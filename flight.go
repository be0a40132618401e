package tierlimit

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// A flight is one script call with the cells that it settles. What ends in Locked here is called with the Mu of the cell that it is about.
type flight struct {
	d      *domain
	batch  batch
	places []place
	fence  int64         // the latest server time at which it may run, us
	dark   tier.Darkness // who was missing, as of the view it is sent under
	change int64         // the change counter as of the boarding
	back   int64         // the number of this instance's last return from being missing, 0 for none in this episode
	clock  serverClock   // as of the boarding

	wentAway int64 // when the outage began that the return back ended, ns

	rtt, rttWorst float64 // as of the boarding: smoothed, and a slowly falling maximum, ns
	callers       int     // who wait for it
	entries       []entry
	asks          []tier.Ask
	answers       []answered
}

// answered is what a waiter is told once no lock is held: whoever is told may call again at once, and would wait for the cell.
type answered struct {
	w *local.Waiter
	o local.Outcome
}

func (f *flight) tell(w *local.Waiter, o local.Outcome) {
	f.answers = append(f.answers, answered{w, o})
}

// deliver tells the waiters what has been decided. None is looked at again: it may be another caller's a moment later.
func (f *flight) deliver() {
	for i := range f.answers {
		a := &f.answers[i]
		a.w.Done <- a.o
		a.w = nil
	}
	f.answers = f.answers[:0]
}

// An entry is what a flight took out of one cell, so that it can be put back if the call proves not to have run.
type entry struct {
	c       *local.Cell
	l       *Limiter
	p       *policy
	waiters []*local.Waiter
	charge  int64 // tokens admitted without asking, to be charged
	spent   int64 // tokens of the lease that were spent since it was last reported
	carry   int64 // tokens of the lease that are kept
	back    bool  // hand-over after an outage
	settle  bool  // the exchange before it
	demand  int64 // tokens that were spent, waited for or refused since the last exchange
	known   bool  // the lease was reported
	poll    bool  // sent with a kept denial standing
}

// outdated reports whether SetLimit has changed the period since e was packed.
func (e *entry) outdated() bool { return e.p.tier.Period != e.l.policy.Load().tier.Period }

// fly takes along what the cells have to tell, sends it, and lets land take in the answer.
func (f *flight) fly() {
	d := f.d
	now := d.h.now()
	for _, p := range f.places {
		c := p.c
		c.Mu.Lock()
		if p.leaveLocked() {
			c.InFlight = true
			f.packLocked(c, now)
			f.callers += len(f.entries[len(f.entries)-1].waiters)
		}
		c.Mu.Unlock()
	}
	f.deliver()
	if len(f.entries) == 0 {
		d.mu.Lock()
		d.flights--
		d.mu.Unlock()
		d.flying.Done()
		d.wakeUp()
		return
	}
	if slices.ContainsFunc(f.asks, func(a tier.Ask) bool { return a.Refund > 0 }) {
		// It must not be credited once whoever gave it has been told that it timed out, however little is known of Redis's clock.
		f.fence = min(f.fence, f.clock.at(now).Lo+shrink(int64(d.h.cfg.remoteTimeout))/1000)
	}
	done, err := d.breaker.Begin()
	sent := d.h.now()
	if err != nil {
		f.land(&remote.Reply{}, err, sent, sent, false)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), d.h.cfg.remoteTimeout)
	d.h.client.ExchangeThen(ctx, f.batch.algorithm, f.fence, f.dark, f.asks, func(reply remote.Reply, err error) {
		received := d.h.now()
		done(err)
		cancel()
		f.land(&reply, err, sent, received, true)
	})
}

// land takes in what came of the call, or that none began.
func (f *flight) land(reply *remote.Reply, err error, sent, received int64, begun bool) {
	d := f.d
	defer d.flying.Done()
	late := err == nil && reply.Late
	refused := !begun || late || err != nil && remote.NotExecuted(err)
	if begun {
		d.h.exchanges.Add(1)
		d.h.asked.Add(int64(len(f.asks)))
		if err != nil {
			d.h.failures.Add(1)
		}
	}
	d.mu.Lock()
	if err == nil {
		d.m.clock = d.m.clock.learn(reply.Now, sent, received)
		d.measureLocked(float64(min(received-sent, int64(d.h.cfg.remoteTimeout)))) // more is this process's own doing: it was stopped, say
		if late {
			d.m.due = min(d.m.due, received)
		}
	}
	d.mu.Unlock()
	d.crowd.leave(f.callers)
	var again []*local.Cell
	reset, refunded := false, false
	for i := range f.entries {
		e := &f.entries[i]
		e.c.Mu.Lock()
		e.c.InFlight = false
		e.c.Landed++
		switch {
		case refused:
			if late { // nothing ran and Redis answers: on with the next flight
				e.c.Waiters = append(e.waiters, e.c.Waiters...)
				e.waiters = nil
			}
			f.unpackLocked(e, &f.asks[i])
		case err != nil:
			f.lostLocked(e)
		default:
			f.landLocked(e, f.asks[i].Want, &reply.Grants[i], reply.Now, sent, received)
			f.serveLocked(e)
		}
		switch refund := f.asks[i].Refund; {
		case refused:
		case refund > 0:
			// Only of a key that had nothing left can others keep a denial of one token.
			refunded = refunded || err != nil || reply.Grants[i].Remaining+reply.Grants[i].Lease <= refund
		case refund == tier.RefundAll:
			reset = true
			if err == nil {
				e.c.Resets = e.c.Landed
			}
		}
		if e.c.Dead {
			answerLocked(e.c, local.Outcome{Down: true})
			if refused && e.c.Retired > 0 && received <= e.c.Deadline() {
				d.scheduleLocked(e.c, received+int64(d.h.cfg.syncInterval))
			}
		} else if len(e.c.Waiters) == 0 && (refused || err != nil && (e.poll || e.c.ChargeCold > 0 && e.c.Refund == 0 && !e.c.Return)) {
			d.scheduleLocked(e.c, received+int64(d.h.cfg.syncInterval)) // not at once: what refuses, or fails, is quick to do so again
		} else if e.c.Ticket == 0 && (len(e.c.Waiters) > 0 || e.c.Refund != 0 || e.c.ChargeCold > 0 || e.c.Return && e.c.Slot != 0) {
			e.c.InFlight = true // until it is queued again, below; what landLocked has queued may be on its way by then
			again = append(again, e.c)
		}
		e.c.Mu.Unlock()
		f.deliver()
	}
	// What others were denied is there now. Of refunds, which may be many, they are told once a heartbeat.
	if reset || refunded && d.h.closed.Load() {
		d.changed()
	}
	// After the answers, so that who asks again at once comes along.
	d.mu.Lock()
	d.m.untold = d.m.untold || refunded
	d.flights--
	d.mu.Unlock()
	d.wakeUp()
	for _, c := range again {
		c.Mu.Lock()
		c.InFlight = false
		d.h.domainOf(c).enqueueLocked(c) // its key may live elsewhere by now
		c.Mu.Unlock()
	}
	if o := d.h.cfg.observer; o != nil && begun {
		o.Exchange(ExchangeEvent{Algorithm: Algorithm(f.batch.algorithm), Keys: len(f.asks), Waiters: f.callers, Duration: time.Duration(received - sent), Err: err})
	}
}

// packLocked moves what c has to tell into an ask. Caller holds c.Mu.
func (f *flight) packLocked(c *local.Cell, now int64) {
	l := f.d.h.limiter(c.Owner)
	p := l.policy.Load()
	name, _ := remote.KeyName(f.d.h.cfg.prefix, l.name, c.Key)
	e := entry{c: c, l: l, p: p}
	a := tier.Ask{Key: name, Limit: p.tier, SlotUS: p.slotUS, Seen: c.Activity}
	if c.Born != 0 && now < c.Known {
		a.Born, a.Version = c.Born, c.Version
	}
	f.packShareLocked(&e, &a, now)
	f.dropLateLocked(c, now)
	give := c.Return || len(c.Waiters) > 0 || now > c.Deadline()
	f.packLeaseLocked(&e, &a, give, now)
	if !e.settle || c.Refund < 0 { // whoever gave it comes along, with the next
		a.Refund, c.Refund = c.Refund, 0
	}
	refused := c.TakeDeniedDemand()
	l.denied.Add(refused)
	e.demand = e.spent + refused
	if !e.settle {
		packNeedLocked(&e, &a)
		e.poll = len(e.waiters) == 0 && c.DeniedUntil() > now
		if first := c.Settled == 0 && len(e.waiters) < 2; !c.Dead && !first && !l.h.closed.Load() && (!give || len(e.waiters) > 0 || e.poll) {
			a.Want = f.want(c, p, rateOf(c, e.demand, now, l.h.cfg.syncInterval), a.Carry, now)
		}
		packHoldLocked(&e, &a)
	}
	f.d.countLocked(c)
	f.asks = append(f.asks, a)
	f.entries = append(f.entries, e)
}

// packShareLocked settles what c's outage share admitted. Before Redis was first heard: it is charged, as far as there is
// something to charge. A window's after an outage: settle first, so that Redis's own memory of the key is known, then hand
// over what was admitted; until then Redis keeps the share aside.
func (f *flight) packShareLocked(e *entry, a *tier.Ask, now int64) {
	c, p := e.c, e.p
	if c.Share != nil && c.Outage().ShareAt == neverHeard {
		e.l.chargeNeverHeardLocked(c, p, now)
		c.Share = nil
	}
	if c.Dead || p.tier.Algorithm.Bucket() || f.back == 0 || c.BackSent() == f.back || !f.mayHandOverLocked(c) {
		return
	}
	if a.Born != 0 && !c.BackReady {
		e.settle = true
		return
	}
	e.back = true
	a.Back, a.Born, a.Version = true, 0, 0
	o := c.Outage()
	a.Own = o.BackOwn
	if !c.BackReady && c.Share != nil {
		a.Own = c.Share.Admitted(shareTime(p.tier.Algorithm, f.clock, now))
	}
	o.BackSent, c.BackReady, c.Share = f.back, false, nil
}

// packLeaseLocked reports the lease in hand. With give it goes back whole: with callers waiting it is too small for them, and
// Redis can serve them from all there is.
func (f *flight) packLeaseLocked(e *entry, a *tier.Ask, give bool, now int64) {
	c, p := e.c, e.p
	at := f.clock.at(now).Hi
	have := c.Tokens()
	if give {
		have = c.Clear()
	}
	e.spent = max(0, c.Base-have-c.Retired)
	c.Base = have
	if give {
		c.Base = 0
	}
	var spends []tier.Spend
	if c.Log != nil {
		spends, c.LogSkip = drainLogLocked(c, now, e.spent)
	}
	// Of a lease whose exchange timed out nothing may be claimed: what is left of it is spent under its old deadline and burnt
	// at the next good reply. And the lease of a fixed window that is over would say which window Own, or a share, belongs to.
	e.known = c.Slot != 0 && !c.Unknown && !((e.back || e.settle) && p.tier.Algorithm == tier.FixedWindow && c.Slot != at/p.tier.PeriodUS())
	switch {
	case e.known && give:
		a.Return = have + c.Retired
	case e.known:
		a.Carry, a.Return = have, c.Retired
	}
	if e.known {
		a.Lease, a.Spent, a.Spends = c.Slot, e.spent, spends
		e.carry = a.Carry
	} else if a.Born != 0 && p.tier.Algorithm == tier.FixedWindow {
		a.Lease = at / p.tier.PeriodUS() // the window that Own belongs to
	}
	c.Retired, c.Return = 0, false
	e.l.local.Add(e.spent)
	if p.tier.Algorithm.Bucket() {
		return
	}
	if e.spent > 0 && !c.Foreign {
		c.Own.Add(f.ownAt(p, c.Slot, at), e.spent)
	}
	if a.Born != 0 {
		// With what is reported just now: of a key that was lost no report is taken.
		a.Own = c.Own.Sum(at/p.tier.PeriodUS(), p.tier.Algorithm != tier.FixedWindow)
		if c.Share != nil {
			a.Own += c.Share.Admitted(shareTime(p.tier.Algorithm, f.clock, now))
		}
	}
}

// dropLateLocked answers the callers that will have stopped waiting before an answer can be here: what Redis granted them would be
// burnt.
func (f *flight) dropLateLocked(c *local.Cell, now int64) {
	c.Waiters = slices.DeleteFunc(c.Waiters, func(w *local.Waiter) bool {
		late := w.N > 0 && w.Left < now+int64(f.rtt)
		if late {
			f.tell(w, local.Outcome{Down: true})
		}
		return late
	})
}

// packNeedLocked asks for the callers that wait, as far as their costs fit into one message.
func packNeedLocked(e *entry, a *tier.Ask) {
	c := e.c
	if e.charge = c.ChargeCold; e.charge > 0 {
		c.ChargeCold = 0
		a.Need = append(a.Need, tier.Cost{N: 1, Count: e.charge})
		e.demand += e.charge
	}
	charges := len(a.Need)
	n := 0
	for _, w := range c.Waiters {
		last := len(a.Need) - 1
		switch {
		case w.N == 0: // it waits for the exchange itself
		case last >= charges && a.Need[last].N == w.N:
			a.Need[last].Count++
		case len(a.Need) < maxCosts:
			a.Need = append(a.Need, tier.Cost{N: w.N, Count: 1})
		default:
			// Who waits for the exchange itself comes along all the same: what a refund gave is in it.
			e.waiters = c.Waiters[:n:n]
			c.Waiters = slices.DeleteFunc(c.Waiters[n:], func(w *local.Waiter) bool {
				if w.N == 0 {
					e.waiters = append(e.waiters, w)
				}
				return w.N == 0
			})
			return
		}
		e.demand += w.N
		n++
	}
	e.waiters, c.Waiters = c.Waiters, nil
}

// packHoldLocked asks for a lease for those who take tokens of several keys at once. Where an equal part of what is left might be too small
// for them, it is to be no more than they need.
func packHoldLocked(e *entry, a *tier.Ask) {
	hold := int64(0)
	for _, w := range e.waiters {
		hold += w.Hold
	}
	c := e.c
	if hold == 0 || c.Dead {
		return
	}
	hold = min(hold, e.p.capacity)
	if want := max(a.Want, hold); c.Remaining()/max(1, c.Active) >= want {
		a.Want = want
	} else {
		a.Want, a.Whole = hold, true
	}
}

// mayHandOverLocked reports whether it is certain what this instance's share of c admitted in the last outage, and that it has
// not been handed over yet: not if a cell that knew was evicted since.
func (f *flight) mayHandOverLocked(c *local.Cell) bool {
	evicted := f.d.h.shareEvicted.Load()
	return (evicted == 0 || evicted < f.wentAway) && (c.Share != nil || f.d.h.backEvicted.Load() < f.back)
}

// ownAt is the index of the whole window in which tokens of a lease count as admitted.
func (f *flight) ownAt(p *policy, slot, at int64) int64 {
	if p.tier.Algorithm == tier.FixedWindow && slot != 0 {
		return slot
	}
	return at / p.tier.PeriodUS()
}

// drainLogLocked returns when the spent tokens were spent. A caller takes a token first and records the time after: what is not
// recorded yet counts as spent now (which errs to too few), and its record is skipped later.
func drainLogLocked(c *local.Cell, now, spent int64) (spends []tier.Spend, skip int64) {
	spends, sum := c.Log.Drain(now, spent+c.LogSkip, nil)
	skip = c.LogSkip
	for len(spends) > 0 && skip > 0 {
		k := min(skip, spends[0].Count)
		spends[0].Count -= k
		skip, sum = skip-k, sum-k
		if spends[0].Count == 0 {
			spends = spends[1:]
		}
	}
	if rest := spent - sum; rest > 0 {
		spends = append(spends, tier.Spend{Count: rest})
		skip += rest
	}
	return spends, skip
}

// unpackLocked puts back what a call took that certainly did not run. Caller holds c.Mu.
func (f *flight) unpackLocked(e *entry, a *tier.Ask) {
	c := e.c
	if e.known && a.Lease == c.Slot {
		// Carried tokens were spendable all along; what was to be returned is returned later.
		c.Retired += a.Return
		c.Base += a.Return + e.spent
		if c.Log != nil {
			c.Log.Record(f.d.h.now(), e.spent) // their ages are lost: spent now errs to too few
		}
		if e.spent > 0 && !e.p.tier.Algorithm.Bucket() && !c.Foreign {
			c.Own.Add(f.ownAt(e.p, c.Slot, f.clock.at(f.d.h.now()).Hi), -e.spent)
		}
		e.l.local.Add(-e.spent)
	}
	if a.Refund == tier.RefundAll {
		c.Refund = a.Refund // any other refund is not credited later than it was given
	}
	c.ChargeCold += e.charge
	if e.back {
		c.BackReady = true
		c.Outage().BackSent, c.Outage().BackOwn = 0, a.Own
	}
	for _, w := range e.waiters {
		f.tell(w, local.Outcome{Down: true})
	}
}

// lostLocked takes in that nobody knows whether a call ran. Caller holds c.Mu.
func (f *flight) lostLocked(e *entry) {
	e.c.Unknown = true
	e.c.Lost++
	e.c.ChargeCold += e.charge // a debit, which may run twice
	for _, w := range e.waiters {
		f.tell(w, local.Outcome{Down: true})
	}
}

// landLocked takes in what Redis granted. Caller holds c.Mu.
func (f *flight) landLocked(e *entry, want int64, g *tier.Grant, serverNow, sent, received int64) {
	c, p, d := e.c, e.p, f.d
	c.Born, c.Version, c.Activity = g.Born, g.Version, g.Activity
	c.Known = sent + shrink(g.TTLUS*1000)
	c.Active, c.Out = max(1, g.Active), g.Out
	if e.settle {
		// Ready to hand over what the share admitted; if Redis had lost the key, it has just been told all of it.
		c.BackReady, c.Outage().BackOwn = true, 0
		if c.Share != nil && !g.Lost {
			c.Outage().BackOwn = c.Share.Admitted(shareTime(p.tier.Algorithm, f.clock, received))
		}
		c.Share = nil
		d.enqueueLocked(c)
	}
	admitted, unserved := f.answerServedLocked(e, g, serverNow)
	e.l.remote.Add(admitted)
	if !p.tier.Algorithm.Bucket() && admitted+e.charge > 0 && !e.outdated() {
		c.Own.Add(serverNow/p.tier.PeriodUS(), admitted+e.charge)
	}
	deadline := sent + shrink(g.LifeUS*1000)
	c.Rate = rateOf(c, e.demand, received, d.h.cfg.syncInterval)
	f.takeLeaseLocked(e, g, admitted, deadline, received)

	short := len(unserved) > 0 || want > 0 && g.Lease < want
	exhausted := admitted == 0 && g.Lease == 0
	pause := int64(0)
	if short && p.leased && p.tier.Algorithm != tier.FixedWindow {
		pause = f.pause(p, c.Active)
	}
	switch {
	case len(unserved) > 0:
		f.refuseLocked(e, g, unserved, pause, f.retryNS(p, g, serverNow), received)
	case short && pause > 0:
		c.Deny(1, received+pause)
	case e.poll && exhausted && g.Remaining < c.DeniedCost():
		// the kept denial stands
	default:
		c.Allow()
	}
	if d.changedSince(f.change) {
		c.Allow() // a key was reset or a limit raised while this was on its way
	}
	c.Pause = received + pause
	if c.Dead {
		return
	}
	d.countLocked(c)
	f.scheduleNextLocked(c, p, exhausted, deadline, received)
	if received-c.Settled > int64(d.h.cfg.syncInterval) {
		c.Busy = received
	}
	c.Settled = received
}

// answerServedLocked answers the callers that were served at the server, in the order they came, and those that only looked. It
// returns what was admitted and who is left.
func (f *flight) answerServedLocked(e *entry, g *tier.Grant, serverNow int64) (admitted int64, unserved []*local.Waiter) {
	served, lease := g.Served-min(g.Served, e.charge), g.Lease
	for _, w := range e.waiters {
		o := local.Outcome{Remaining: g.Remaining + g.Lease, ResetNS: g.ResetUS * 1000}
		switch n := w.N; {
		case w.Hold > 0:
			if o.Allowed = w.Hold <= lease; o.Allowed {
				lease -= w.Hold
			} else {
				o.RetryNS, o.Never = f.holdRetryNS(e.p, g, w.Hold-lease-g.Remaining, serverNow), e.p.capacity == 0
			}
		case n == 0:
			if o.Allowed = o.Remaining > 0; !o.Allowed {
				o.RetryNS, o.Never = max(1, f.retryNS(e.p, g, serverNow)), e.p.capacity == 0
			}
		case n <= served:
			o.Allowed = true
			o.DelayNS = g.DelayUS*1000 + (e.charge+admitted)*e.p.stepNS
			served -= n
			admitted += n
		default:
			unserved = append(unserved, w)
			continue
		}
		f.tell(w, o)
	}
	return admitted, unserved
}

// serveLocked answers from the new lease those who came while it was on its way, in their order, as far as it goes. Were they sent to
// Redis, the lease would go back with them, and whoever came meanwhile would have to wait in turn: on a busy key for ever.
// Caller holds c.Mu.
func (f *flight) serveLocked(e *entry) {
	c := e.c
	enough := !c.Dead && c.Base > 0
	c.Waiters = slices.DeleteFunc(c.Waiters, func(w *local.Waiter) bool {
		var r Result
		if w.N == 0 || !enough {
			return false
		}
		if enough = c.Tokens() >= w.N && e.l.warm(&r, c, e.p, w.N) && r.Allowed; enough {
			f.tell(w, local.Outcome{Allowed: true, Leased: true, Remaining: r.Remaining, ResetNS: int64(r.ResetAfter), DelayNS: int64(r.Delay)})
		}
		return enough
	})
}

// retryNS is how long it takes until a cost that could not be served may pass. While shares are kept aside that is a heartbeat at most: a bucket
// makes nothing then, and what is aside of a window may be handed back at any time.
func (f *flight) retryNS(p *policy, g *tier.Grant, serverNow int64) int64 {
	beat := int64(f.d.h.cfg.heartbeat)
	if g.RetryUS < 0 {
		return beat
	}
	aside := f.dark.Missing > 0 || f.dark.Until > 0 && serverNow <= f.dark.Until+2*p.tier.PeriodUS()
	if aside && !p.tier.Algorithm.Bucket() {
		return min(beat, g.RetryUS*1000)
	}
	return g.RetryUS * 1000
}

// holdRetryNS is how long it takes until so many tokens more are there than Redis has left and has leased: 0 or less when they are there now, but
// were not leased.
func (f *flight) holdRetryNS(p *policy, g *tier.Grant, missing, serverNow int64) int64 {
	wait := max(1, f.retryNS(p, g, serverNow))
	switch {
	case missing <= 0 || g.RetryUS < 0:
	case p.tier.Algorithm.Bucket():
		wait = max(wait, int64(timeToFull(p.tier, missing)))
	case missing > 1:
		wait = max(wait, g.ResetUS*1000) // when it is enough only Redis could tell; then it is
	}
	return wait
}

// refuseLocked answers the callers that could not be served and keeps the denial: at least for the pause, counted from the receipt. Redis
// says when the largest cost would pass. In a bucket the smaller ones pass earlier by what they are smaller; of a sliding window or log
// only Redis can tell, so they are asked for once more, on their own.
func (f *flight) refuseLocked(e *entry, g *tier.Grant, unserved []*local.Waiter, pause, wait, received int64) {
	c, p := e.c, e.p
	wait = max(wait, pause)
	least, most := unserved[0].N, unserved[0].N
	for _, w := range unserved {
		least, most = min(least, w.N), max(most, w.N)
	}
	after := func(n int64) int64 {
		if p.tier.Algorithm.Bucket() && p.perNS > 0 && g.RetryUS >= 0 {
			return max(pause, 1, wait-int64(float64(most-n)/p.perNS))
		}
		return wait
	}
	switch {
	case p.tier.Algorithm.Bucket() || least == most || pause == wait:
		c.Deny(least, received+after(least))
	case pause > 0:
		c.Deny(least, received+pause) // a smaller cost may pass before the largest
	default:
		c.Deny(most, received+wait)
	}
	var again []*local.Waiter
	for _, w := range unserved {
		if w.N < most && !w.Again && w.Left > received+2*int64(f.rtt) && (p.tier.Algorithm == tier.SlidingWindow || p.tier.Algorithm == tier.SlidingLog) && !c.Dead {
			w.Again = true
			again = append(again, w)
			continue
		}
		if w.Left > received { // else it has been decided, and counted, without Redis
			e.l.denied.Add(w.N)
		}
		f.tell(w, local.Outcome{Remaining: min(g.Remaining+g.Lease, w.N-1), ResetNS: max(g.ResetUS*1000, wait), RetryNS: after(w.N)})
	}
	c.Waiters = append(again, c.Waiters...)
}

// takeLeaseLocked puts the lease into the cell.
func (f *flight) takeLeaseLocked(e *entry, g *tier.Grant, admitted, deadline, received int64) {
	c, p := e.c, e.p
	if !g.Credited || e.carry == 0 {
		// Void under the new slot, what was taken out of use included. What was spent meanwhile was spent under the old
		// one, which takes no more reports: it must not be reported under the new.
		have := c.Clear()
		if spent := c.Base - have - c.Retired; spent > 0 {
			e.l.local.Add(spent)
			if c.Log != nil {
				c.LogSkip += spent
			}
			if !p.tier.Algorithm.Bucket() && !c.Foreign {
				c.Own.Add(f.ownAt(p, c.Slot, f.clock.at(received).Hi), spent)
			}
		}
		c.Base, c.Retired = 0, 0
	}
	c.Unknown = false
	c.Slot, c.Foreign = g.Slot, e.outdated()
	if c.Flow != nil && g.Lease > 0 {
		// The lease's places come after those of the callers served; tokens carried keep theirs, before it.
		first := received + g.DelayUS*1000 + (e.charge+admitted)*p.stepNS
		if c.Base > 0 {
			first = max(c.Flow.Next(), first-c.Base*p.stepNS)
		}
		c.Flow.Begin(first)
	}
	m := c.Rate * f.rttWorst
	mark := int64(math.Ceil(m + 3*math.Sqrt(m)))
	c.Deposit(g.Lease, deadline, min(mark, max(1, (e.carry+g.Lease)/2)))
	c.Base += g.Lease
	c.Report(g.Remaining, received+g.ResetUS*1000)
	if p != e.l.policy.Load() && c.Base > 0 { // SetLimit came between
		c.Retired += c.Clear()
		c.Return = true
	}
}

// scheduleNextLocked says when the loop looks at c again: to report and renew or return a lease, or to poll a window that others
// may give back to.
func (f *flight) scheduleNextLocked(c *local.Cell, p *policy, exhausted bool, deadline, received int64) {
	sync := int64(f.d.h.cfg.syncInterval)
	switch {
	case c.Base > 0 || c.Tokens() > 0:
		c.Backoff = 0
		idle := min(pollMin, sync)
		if c.Rate > 0 {
			idle = max(idle, min(int64(2/c.Rate), p.horizon))
		}
		c.Horizon = max(idle, f.horizon(p, c, c.Rate, received))
		f.d.scheduleLocked(c, received+min(c.Horizon, (deadline-received)*8/10))
	case exhausted && c.Out > 0 && c.DeniedUntil() > received:
		c.Backoff = min(max(pollMin, 2*c.Backoff), pollMax)
		if at := received + c.Backoff; at < c.DeniedUntil() {
			f.d.scheduleLocked(c, at)
		}
	}
}
