package local

import (
	"github.com/tierlimit/tierlimit/tier"
)

// slidingLog remembers when tokens were spent and admits at most the limit in any (t-period, t]: the set of times known from
// ClassDojo's "Better Rate Limiting With Redis Sorted Sets" (2015), but that denied requests are not logged. An entry of time e
// counts up to and including e+period: clocks cut off fractions of a microsecond, and what seems to be exactly a period ago can
// be less.
//
// Memory is bounded: up to exactEntries are kept with their own times; beyond that, entries of the same tick, a 1024th of
// the period, become one with the later time. That is conservative: tokens return up to a tick late, never early. Costs
// make no difference: an entry has a weight.
//
// An uncertain clock: an entry has the time Hi and leaves as of Lo.
type slidingLog struct {
	tallies
	lo     int64 // latest Lo seen
	period int64 // µs, as of the last call
}

const (
	exactEntries = 64
	ticks        = 1024
	mostEntries  = exactEntries + ticks + 4
)

func newSlidingLog(t Time) *slidingLog {
	g := &slidingLog{lo: t.Lo, period: 1}
	g.init(0)
	return g
}

// roll moves the clock to t and drops what has left.
func (g *slidingLog) roll(t Time, period int64) {
	g.period = period
	g.lo = max(g.lo, t.Lo)
	g.drop(addSat(g.lo, -period))
}

// log adds an entry.
func (g *slidingLog) log(t Time, n int64) {
	at := max(t.Hi, g.lo)
	if g.size >= exactEntries {
		last := g.back()
		tick := int64(min((distance(g.lo, at)+uint64(g.period))/ticks+1, maxTokens))
		if at > last.key && floorDiv(at, tick) == floorDiv(last.key, tick) {
			last.key = at
		}
	}
	if g.size == len(g.ring) && g.size < mostEntries && at > g.back().key {
		ring := make([]tally, min(2*g.size, mostEntries))
		for i := range g.size {
			ring[i] = *g.nth(i)
		}
		g.ring, g.head = ring, 0
	}
	g.add(at, n)
}

// end is the first time at which an entry is gone.
func (g *slidingLog) end(at int64) int64 { return addSat(addSat(at, g.period), 1) }

func (g *slidingLog) decide(t Time, l tier.Limit, n int64, spend bool) Decision {
	limit, period := windowLimit(l)
	if limit == 0 {
		return refused()
	}
	g.roll(t, period)
	d := Decision{Allowed: n >= 0 && n <= max(0, limit-g.sum)}
	switch {
	case d.Allowed && spend && n > 0:
		g.log(t, n)
	case d.Allowed:
	case n < 0 || n > limit:
		d.RetryUS = Never
	default:
		rest := g.sum
		for i := 0; i < g.size && n > limit-rest; i++ {
			rest -= g.nth(i).n
			d.RetryUS = waitUS(t.Lo, g.end(g.nth(i).key))
		}
	}
	d.Remaining = max(0, limit-g.sum)
	if g.size > 0 {
		d.ResetUS = waitUS(t.Lo, g.end(g.back().key))
	}
	return d
}

func (g *slidingLog) Take(t Time, l tier.Limit, n int64) Decision { return g.decide(t, l, n, true) }
func (g *slidingLog) Peek(t Time, l tier.Limit, n int64) Decision { return g.decide(t, l, n, false) }

func (g *slidingLog) Refund(t Time, l tier.Limit, n int64) {
	if limit, period := windowLimit(l); limit > 0 {
		g.roll(t, period)
		g.take(addSat(g.lo, -period), n)
	}
}

func (g *slidingLog) Reset(t Time, _ tier.Limit) {
	g.lo = t.Lo
	g.init(0)
}

func (g *slidingLog) Admitted(t Time) int64 {
	return g.since(addSat(max(g.lo, t.Lo), -g.period))
}
