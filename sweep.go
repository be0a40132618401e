package tierlimit

import (
	"time"

	"github.com/tierlimit/tierlimit/tier/local"
)

// sweepRound is how long a round over all cells takes.
const sweepRound = 10 * time.Second

// sweep lets go of cells of which nothing need be remembered: a key that is full and idle costs no memory.
func (h *Hybrid) sweep() {
	const often = 50
	t := time.NewTicker(sweepRound / often)
	defer t.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-t.C:
			h.table.Sweep(max(h.table.Len()/often, 500), h.idle)
		}
	}
}

// idle gives up a cell, under its shard's lock, if one that is made anew is as good.
func (h *Hybrid) idle(c *local.Cell) bool {
	if !c.Mu.TryLock() {
		return false
	}
	defer c.Mu.Unlock()
	l := h.limiter(c.Owner)
	if h.client == nil {
		p := l.policy.Load()
		c.Dead = c.Share != nil && c.Share.Peek(h.wall(h.now()), p.tier, 1).ResetUS == 0
		return c.Dead
	}
	now := h.now()
	switch {
	case c.Queued || c.InFlight || len(c.Waiters) > 0, // it is being settled,
		c.Settled == 0, // or about to be
		now <= c.Deadline() && (c.Return || c.Slot != 0 && (c.Tokens() > 0 || c.Base > 0) || c.Retired > 0), // holds a lease, or has not reported it
		c.Refund != 0 || c.ChargeCold > 0,                           // or something else
		c.Known > now || c.DeniedUntil() > now,                      // could tell what Redis may forget, or what it said
		c.Share != nil || c.BackReady,                               // counts for an outage
		c.BackSent() != 0 && now < c.Settled+int64(h.longestFill()): // or has counted for one that is remembered
		return false
	}
	c.Dead = true
	h.leased.Add(-c.Counted) // of a lease that ended while nothing could be told of it
	c.Counted = 0
	h.forgetBack(c) // its darkness may be remembered for longer yet
	return true
}
