package model

import "github.com/tierlimit/tierlimit/tier"

// slots bound what is out: a lease that was granted in the current slot or the one before is in oc or op.
type slots struct {
	send, pend int64 // end of the current slot and of the one before, 0 for none; they name the slots
	length     int64
	oc, op     int64
}

func (s *slots) out() int64 { return s.oc + s.op }

// open makes the first slot, or the first after nothing was out.
func (s *slots) open(now, length int64) { *s = slots{send: now + length, length: length} }

// roll ends the current slot and returns what was out of the slot before: its leases are dead. Slots do not become shorter while
// something is out.
func (s *slots) roll(length int64) (dead int64) {
	dead = s.op
	s.length = max(length, s.length)
	s.op, s.oc, s.pend = s.oc, 0, s.send
	s.send += s.length
	return dead
}

// find returns the sum that holds the lease of slot id, nil when its leases are dead.
func (s *slots) find(id int64) *int64 {
	switch {
	case id <= 0:
		return nil
	case id == s.send:
		return &s.oc
	case id == s.pend:
		return &s.op
	}
	return nil
}

// stepBack puts the slots right when the server's clock went back.
func (s *slots) stepBack(now int64) {
	if s.send-now > s.length {
		s.oc, s.op = s.oc+s.op, 0
		s.send, s.pend = now+s.length, 0
	}
}

type bucket struct {
	slots
	level, rem, period int64 // tokens, and 1/period of a token
	ts                 int64 // the level is of this time; in the future after a loss
	dm, dn             int64 // darkness as of the last exchange
}

// top clips the level to what may be there.
func (b *bucket) top(capacity int64) {
	if room := max(0, capacity-b.out()); b.level >= room {
		b.level, b.rem = room, 0
	}
}

// refill brings the level to time t.
func (b *bucket) refill(t, rate, capacity int64) {
	if t > b.ts {
		q, r, ok := muldiv(t-b.ts, rate, b.rem, b.period, 4*most)
		if !ok {
			b.level, b.rem = capacity, 0
		} else {
			b.level, b.rem = b.level+q, r
		}
		b.ts = t
	}
	b.top(capacity)
}

// advance brings the bucket to time t, slot by slot, so that what may not be there at the end of a slot is gone.
func (b *bucket) advance(t, rate, capacity, length int64, v *Variant) {
	for t >= b.send && b.out() > 0 { // twice at most
		if !v.NoRollover && !v.NoDiscard {
			b.refill(b.send, rate, capacity)
		}
		b.roll(length)
	}
	if v.NoDiscard {
		oc, op := b.oc, b.op
		b.oc, b.op = 0, 0
		b.refill(t, rate, capacity)
		b.oc, b.op = oc, op
	}
	if t >= b.send {
		b.open(t, length)
	}
	if v.NoDiscard {
		return
	}
	b.refill(t, rate, capacity)
}

func (c *call) exchangeBucket(what claim) (ttl int64) {
	b, a, d := &c.bucket, c.ask, c.dark
	rate, period, capacity := a.Limit.Rate, a.Limit.PeriodUS(), a.Limit.Capacity()
	if rate == 0 {
		capacity = 0 // denies everything
	}
	left := func(x, missing, fleet int64) int64 { return tier.Reserved(x, missing, fleet) }
	until := min(d.Until, c.now)

	switch {
	case what == fresh:
		c.unremembered(rate, period, capacity)
	case what == created:
		b.open(c.now, a.SlotUS)
		b.period, b.ts = period, c.now+2*a.SlotUS
		c.lost = true
	}
	if what != created {
		if b.period != period {
			b.rem = floorDiv(b.rem, period, b.period, period-1)
			b.period = period
		}
		b.stepBack(c.now)
		if b.ts-c.now > 2*max(b.length, a.SlotUS) {
			b.ts = c.now
		}
		if b.ts < until {
			b.advance(until, left(rate, d.Most, d.Least), left(capacity, d.Most, d.Least), a.SlotUS, c.v)
			b.dm, b.dn = d.Missing, d.Fleet
		}
	}
	effRate, effCap := left(rate, d.Missing, d.Fleet), left(capacity, d.Missing, d.Fleet)
	b.advance(c.now, min(effRate, left(rate, b.dm, b.dn)), min(effCap, left(capacity, b.dm, b.dn)), a.SlotUS, c.v)
	b.dm, b.dn = d.Missing, d.Fleet

	if what == reverted || what == replaced && !c.lost {
		b.level, b.rem, b.ts = 0, 0, c.now+2*max(a.SlotUS, b.length)
		c.lost = true
	}

	// Credits.
	sum := b.find(a.Lease)
	if c.v.LateReturns && sum == nil && a.Lease > 0 {
		sum = &b.op
		b.level = min(b.level+a.Return, capacity)
	}
	if sum != nil && what < created {
		c.g.Credited = true
		*sum -= min(a.Spent, *sum)
		back := min(a.Return, *sum)
		*sum -= back
		b.level += back
		b.top(effCap)
		if b.oc+b.op > effCap && !c.v.KeepsCarry { // the rest dies with its slot
			c.g.Credited = sum == &b.oc || a.Carry == 0
		} else {
			carry := min(a.Carry, *sum)
			*sum -= carry
			b.oc += carry
		}
	}
	switch {
	case a.Refund == tier.RefundAll:
		b.level, b.rem, b.ts = capacity, 0, c.now
	case a.Refund > 0:
		b.level += a.Refund
	}
	b.top(effCap)

	// Grants.
	if a.Limit.Algorithm == tier.LeakyBucket {
		if rate > 0 {
			c.g.DelayUS = floorDiv(capacity-b.level, period, rate, most)
		}
	}
	b.level -= c.need(b.level)
	q := c.lease(b.level)
	b.level -= q
	b.oc += q

	c.g.Slot = b.send
	c.g.LifeUS = max(0, b.send+b.length-c.now-1)
	c.g.Remaining = b.level
	c.g.Out = b.out()
	c.g.RetryUS = c.retryBucket(effRate, effCap)
	wait := max(0, b.ts-c.now)
	if b.level < capacity {
		c.g.ResetUS = min(most, timeFor(capacity-b.level, b.rem, rate, period, most)+wait)
	}
	return min(c.g.ResetUS, 20*year) + 2*max(b.length, a.SlotUS) + 1_000_000
}

// unremembered makes the bucket of a key that is not stored: it was never touched, or its time to live is over, in which it would
// have become full had nobody been missing. So it may have been empty (after twenty years: whatever it was) as long ago as it takes to
// fill it; what happened since is known. Where nobody was missing since, that is a full bucket.
func (c *call) unremembered(rate, period, capacity int64) {
	b, d := &c.bucket, c.dark
	b.open(c.now, c.ask.SlotUS)
	b.period = period
	if c.v.FreshFull {
		b.level = capacity
		return
	}
	ago := timeFor(capacity, 0, rate, period, 20*year)
	b.ts = c.now - ago
	b.level = capacity - floorDiv(ago, rate, period, capacity)
	if b.ts < min(d.Until, c.now) && b.ts < d.From {
		b.refill(min(d.From, c.now), rate, capacity)
	}
}

// retryBucket walks over the rollovers to come until the cost has come together.
func (c *call) retryBucket(rate, capacity int64) int64 {
	n := c.room
	if rate == 0 || n > capacity {
		return -1 // not while so many are missing
	}
	b := c.bucket // a copy to play with
	if b.level >= n {
		return 0
	}
	at := max(b.ts, c.now)
	for {
		if n <= capacity-b.out() || b.out() == 0 {
			d := timeFor(n-b.level, b.rem, rate, b.period, most)
			if b.out() == 0 || at+d <= b.send {
				return min(most, at+d-c.now)
			}
		}
		if b.send > at {
			b.ts = at
			b.refill(b.send, rate, capacity)
			at = b.send
		}
		b.roll(c.ask.SlotUS)
	}
}
