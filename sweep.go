package tierlimit

import (
	"time"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// sweepRound is how long a round over all cells takes.
const sweepRound = 10 * time.Second

// sweep lets go of cells that lie idle. A key that is full costs no memory then; of others a memo stays.
func (h *Hybrid) sweep() {
	const often = 50
	t := time.NewTicker(sweepRound / often)
	defer t.Stop()
	for size, part := 0, 0; ; part = (part + 1) % often {
		select {
		case <-h.stop:
			return
		case <-t.C:
			if part == 0 {
				size = h.table.Len()
			}
			h.table.Expire(h.now(), part, often)
			h.table.Sweep(max(size/often, 500), h.idle)
		}
	}
}

// idle gives up a cell, under its shard's lock, if one that is made anew is as good, or is with a memo of it.
func (h *Hybrid) idle(c *local.Cell) local.Fate {
	if !c.Mu.TryLock() {
		return local.Keep
	}
	defer c.Mu.Unlock()
	l := h.limiter(c.Owner)
	if h.client == nil {
		p := l.policy.Load()
		if c.Dead = c.Share != nil && c.Share.Peek(h.wall(h.now()), p.tier, 1).ResetUS == 0; c.Dead {
			return local.Forget
		}
		return local.Keep
	}
	now := h.now()
	fate := local.Forget
	if c.Known > now { // could tell what Redis may forget
		fate = local.Remember
	}
	switch {
	case c.Ticket != 0 || c.InFlight || len(c.Waiters) > 0, // it is being settled,
		now <= c.Deadline() && (c.Return || c.Slot != 0 && (c.Tokens() > 0 || c.Base > 0) || c.Retired > 0), // holds a lease, or has not reported it
		c.Refund != 0 || c.ChargeCold > 0,                                                    // or something else
		c.DeniedUntil() > now,                                                                // knows what Redis said
		h.shareCountsLocked(c, now) || c.BackReady,                                           // counts for an outage
		c.BackSent() != 0 && now < c.Settled+int64(h.longestFill()),                          // or has counted for one that is remembered
		fate == local.Remember && (now < c.Settled+int64(sweepRound) || l.cfg.coldStart > 0): // is in use, or counts what ColdAdmit let through
		return local.Keep
	}
	c.Dead = true
	l.denied.Add(c.TakeDeniedDemand())
	h.leased.Add(-c.Counted) // of a lease that ended while nothing could be told of it
	c.Counted = 0
	h.forgetBackLocked(c) // its darkness may be remembered for longer yet
	if spent := c.Base - c.Tokens() - c.Retired; spent > 0 {
		// It was spent of a lease that ended in an outage. A fixed window is over when its lease is; of others a memo tells it, as spent
		// now, which errs to too few.
		l.local.Add(spent)
		if p := l.policy.Load(); (p.tier.Algorithm == tier.SlidingWindow || p.tier.Algorithm == tier.SlidingLog) && !c.Foreign {
			c.Own.Add(h.domainOf(c).serverClock().at(now).Hi/p.tier.PeriodUS(), spent)
		}
	}
	return fate
}

// shareCountsLocked reports whether what c's outage share admitted may still matter. Caller holds c.Mu.
func (h *Hybrid) shareCountsLocked(c *local.Cell, now int64) bool {
	if c.Share == nil {
		return false
	}
	d, p := h.domainOf(c), h.limiter(c.Owner).policy.Load()
	switch at := c.Outage().ShareAt; {
	case at == neverHeard && p.tier.Algorithm.Bucket(): // it is charged, as long as there is something
		return c.Share.Peek(h.wall(now), p.tier, 1).ResetUS != 0
	case at == neverHeard:
		return c.Share.Admitted(h.wall(now)) > 0
	case at == d.outageID():
		return true
	case p.tier.Algorithm.Bucket(): // it was never in the store: over with its outage
		return false
	}
	return c.Share.Admitted(shareTime(p.tier.Algorithm, d.serverClock(), now)) > 0
}

// recall calls visit, with the lock held, for the cells of those keys of which there is a memo and which are wanted; they are made for it.
func (h *Hybrid) recall(wanted func(owner uint32, key string) bool, visit func(c *local.Cell)) {
	h.table.EachRemembered(func(owner uint32, key string) {
		if !wanted(owner, key) {
			return
		}
		l := h.limiter(owner)
		for hash := l.hash(key); ; {
			c := l.cell(hash, key)
			c.Mu.Lock()
			dead := c.Dead // swept again meanwhile
			if !dead {
				visit(c)
			}
			c.Mu.Unlock()
			if !dead {
				return
			}
		}
	})
}

// evict gives up a cell, under its shard's lock. What it holds is handed to the loop, which settles it like any
// other; the table only forgets it.
func (h *Hybrid) evict(c *local.Cell) bool {
	if !c.Mu.TryLock() {
		return false
	}
	defer c.Mu.Unlock()
	if len(c.Waiters) > 0 || c.InFlight || c.Ticket != 0 {
		return false
	}
	c.Dead = true
	h.limiter(c.Owner).denied.Add(c.TakeDeniedDemand())
	h.leased.Add(-c.Counted)
	c.Counted = 0
	if h.client == nil {
		return true
	}
	if h.shareCountsLocked(c, h.now()) || c.BackReady {
		h.shareEvicted.Store(h.now())
	}
	h.forgetBackLocked(c)
	if c.Slot != 0 && (c.Tokens() > 0 || c.Base != c.Tokens()) || c.Refund != 0 || c.ChargeCold > 0 {
		c.Return = true
		h.domainOf(c).enqueueLocked(c)
	}
	return true
}

// forgetBackLocked takes in that c, which may have handed over what its share admitted, is given up. Caller holds c.Mu.
func (h *Hybrid) forgetBackLocked(c *local.Cell) {
	for {
		last := h.backEvicted.Load()
		if c.BackSent() <= last || h.backEvicted.CompareAndSwap(last, c.BackSent()) {
			return
		}
	}
}
