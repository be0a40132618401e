// Package clock is an instance's monotonic clock. [Clock.Now] is the operating system's and costs about 25 ns. [Clock.Fast] costs about 9:
// it counts processor cycles since the system's clock was last read. No background goroutine moves it, so it cannot fall behind in a
// process that gets no processor: after a stop of any length the first reading is the system's.
package clock

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// A Clock tells the time since it was made. Safe for concurrent use.
type Clock struct {
	start time.Time

	// The anchor, as a sequence lock keeps it: odd is being changed. A pointer to an immutable one would cost an allocation each 5 ms.
	seq                     atomic.Uint32
	cycles, ns, worth, span atomic.Uint64

	mu      sync.Mutex // held to move the anchor, never waited for
	strikes int        // how often in a row the cycles did not go with the time

	dead atomic.Bool // the cycles are not to be counted
	fast int64       // by so many parts in a million: 0 but for Drifting
}

// An anchor is a reading of both clocks at once.
type anchor struct {
	cycles uint64
	ns     uint64 // 0 if there is none
	worth  uint64 // of a cycle, in 2^-32 ns, as of the time up to here; 0 if that is not known
	span   uint64 // so many cycles may be counted from here on
}

const (
	// span is how long is counted from an anchor, and the least that a cycle's worth is learnt from. What may be wrong then: the system's
	// frequency was steered meanwhile, by 500 ppm at most (2.5 µs); readings of an anchor lay apart (1 µs).
	span  = int64(5 * time.Millisecond)
	apart = int64(250 * time.Nanosecond)
	wrong = int64(4 * time.Microsecond)

	// Margin is how far Fast may be ahead.
	Margin = 2 * wrong

	maxStrikes         = 10
	minWorth, maxWorth = 1 << 32 / 20, 20 << 32 // 20 GHz, 50 MHz
)

// New returns a clock that stands at 1 s, so that 0 is never a time of it.
func New() *Clock {
	c := &Clock{start: time.Now().Add(-time.Second)}
	// In a bubble of testing/synctest, whose time begins in the year 2000, time stands still while the processor runs.
	c.dead.Store(!steady() || c.start.Year() < 2020)
	return c
}

// Drifting returns a clock that gains so many nanoseconds in a million, for tests of instances whose clocks do not agree. It counts no cycles.
func Drifting(ppm int64) *Clock {
	c := New()
	c.fast = ppm
	c.dead.Store(true)
	return c
}

// Start is when the clock stood at 0.
func (c *Clock) Start() time.Time { return c.start }

// Now is the time in nanoseconds.
func (c *Clock) Now() int64 {
	ns := int64(time.Since(c.start))
	if c.fast != 0 {
		ns += ns/1_000_000*c.fast + ns%1_000_000*c.fast/1_000_000 // in two parts, that it neither overflows nor goes back
	}
	return ns
}

// Fast is the time in nanoseconds or up to Margin more, never less.
func (c *Clock) Fast() int64 {
	if c.dead.Load() {
		return c.Now()
	}
	seq := c.seq.Load()
	at, ns, worth, span := c.cycles.Load(), c.ns.Load(), c.worth.Load(), c.span.Load()
	// The count comes last: what is loaded before it is not newer than it.
	if d := cycles() - at; d < span && seq&1 == 0 && c.seq.Load() == seq {
		return int64(ns+d*worth>>32) + wrong
	}
	return c.move()
}

// move reads the time and anchors the count there.
func (c *Clock) move() int64 {
	if !c.mu.TryLock() {
		return c.Now()
	}
	defer c.mu.Unlock()
	before := cycles()
	now := c.Now()
	width := cycles() - before
	a, old := anchor{cycles: before, ns: uint64(now)}, c.anchor()
	if old.ns == 0 {
		c.store(a)
		return now
	}
	elapsed, counted := a.ns-old.ns, a.cycles-old.cycles
	switch {
	case elapsed < uint64(span):
		return now
	case elapsed>>32 >= counted: // less than a cycle in a nanosecond, or it would not fit
		c.strike(a)
		return now
	}
	a.worth, _ = bits.Div64(elapsed>>32, elapsed<<32, counted)
	switch {
	case a.worth < minWorth || a.worth > maxWorth:
		c.strike(a)
	case width*a.worth>>32 > uint64(apart):
		// The thread lost the processor between the readings: another time.
	case old.worth == 0:
		c.store(a) // to be confirmed
	case max(a.worth, old.worth)-min(a.worth, old.worth) > old.worth/1000:
		c.strike(a)
	default:
		c.strikes = 0
		a.span, _ = bits.Div64(uint64(span)>>32, uint64(span)<<32, a.worth)
		c.store(a)
	}
	return now
}

// strike learns a cycle's worth anew: it was not what it should be, after a suspend or a migration, or because the processors do not agree
// on the count.
func (c *Clock) strike(a anchor) {
	a.worth = 0
	c.store(a)
	c.strikes++
	c.dead.Store(c.strikes >= maxStrikes)
}

// anchor is the anchor now. Caller holds mu.
func (c *Clock) anchor() anchor {
	return anchor{cycles: c.cycles.Load(), ns: c.ns.Load(), worth: c.worth.Load(), span: c.span.Load()}
}

// store replaces the anchor. Caller holds mu.
func (c *Clock) store(a anchor) {
	c.seq.Add(1)
	c.cycles.Store(a.cycles)
	c.ns.Store(a.ns)
	c.worth.Store(a.worth)
	c.span.Store(a.span)
	c.seq.Add(1)
}
