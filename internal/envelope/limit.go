package envelope

import (
	"fmt"
	"time"
)

// Kind names one of the five algorithms, numbered from 1. Zero is none of them.
type Kind uint8

// The five algorithms.
const (
	TokenBucket Kind = iota + 1
	LeakyBucket
	FixedWindow
	SlidingWindow
	SlidingLog
)

// String names the kind in words.
func (k Kind) String() string {
	switch k {
	case TokenBucket:
		return "token bucket"
	case LeakyBucket:
		return "leaky bucket"
	case FixedWindow:
		return "fixed window"
	case SlidingWindow:
		return "sliding window"
	case SlidingLog:
		return "sliding log"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

func (k Kind) bucket() bool { return k == TokenBucket || k == LeakyBucket }

// A Limit is the policy a history is held against: Rate tokens per Period.
type Limit struct {
	Kind       Kind
	Rate       int64         // tokens per Period, >= 0; for windows and logs the limit of one window; 0 allows nothing
	Period     time.Duration // > 0; the window of windows and logs
	Burst      int64         // buckets only, >= 0: the most at once
	SubWindows int           // sliding window only, >= 0: parts the window is cut into; 0 means 1; Period should be a multiple of it
	Tick       time.Duration // tick of the clock the limiter counts by; Called is rounded down to a whole tick; 0 means 1ns
}

// Validate reports what is wrong with l, nil if nothing is.
func (l Limit) Validate() error {
	switch {
	case l.Kind < TokenBucket || l.Kind > SlidingLog:
		return fmt.Errorf("envelope: %v is no algorithm", l.Kind)
	case l.Rate < 0:
		return fmt.Errorf("envelope: rate %d is negative", l.Rate)
	case l.Period <= 0:
		return fmt.Errorf("envelope: period %v is not positive", l.Period)
	case l.Kind.bucket() && l.Burst < 0:
		return fmt.Errorf("envelope: burst %d is negative", l.Burst)
	case l.SubWindows < 0 || l.Kind == SlidingWindow && int64(l.SubWindows) > int64(l.Period):
		return fmt.Errorf("envelope: %d sub-windows in %v", l.SubWindows, l.Period)
	case l.Tick < 0:
		return fmt.Errorf("envelope: tick %v is negative", l.Tick)
	}
	return nil
}

// capacity is the most one request can cost.
func (l Limit) capacity() int64 {
	if l.Kind.bucket() && l.Rate > 0 {
		return l.Burst
	}
	return l.Rate
}

// sub is the length of a sub-window and their number.
func (l Limit) sub() (length, k int64) {
	k = max(1, int64(l.SubWindows))
	return int64(l.Period) / k, k
}

// refilled is floor(Rate*d/Period) and the remainder in 1/Period of a token; d is unsigned because the distance of two
// int64 instants need not fit an int64.
func (l Limit) refilled(d uint64) (whole wide, rest uint64) {
	return mulDiv(uint64(l.Rate), d, uint64(l.Period))
}

// Demandable is the most tokens that an ideal limiter which is full at from admits to one key in [from, to) when more is
// wanted at every instant: the denominator of a utilisation. The ideal limiter never refuses what it may admit.
// from and to are nanoseconds. 0 if from >= to or the limit is invalid; saturates at the greatest int64.
//
// Buckets: Burst + floor(Rate*(to-from)/Period). Fixed window: Rate for each window touched. Sliding log: Rate for each
// Period begun. Sliding window: what the estimate lets pass in whole tokens, which is less than Rate per Period (with one
// sub-window Rate-1, or half when Rate is 1).
//
// O(1), for the sliding window O((to-from)/sub-window).
func Demandable(l Limit, from, to int64) int64 {
	if from >= to || l.Validate() != nil || l.Rate == 0 {
		return 0
	}
	switch l.Kind {
	case FixedWindow:
		w := int64(l.Period)
		windows := floorDiv(to-1, w) - floorDiv(from, w) + 1
		n, _ := mulDiv(uint64(l.Rate), uint64(windows), 1)
		return n.clamp()
	case SlidingLog:
		n, _ := mulDiv(uint64(l.Rate), (uint64(to)-uint64(from)-1)/uint64(l.Period)+1, 1)
		return n.clamp()
	case SlidingWindow:
		return demandableSliding(l, from, to)
	}
	if l.Burst == 0 {
		return 0
	}
	n, _ := l.refilled(uint64(to) - uint64(from))
	return n.add(widen(l.Burst)).clamp()
}

// demandableSliding plays the greedy limiter one sub-window at a time. Within a sub-window the room only grows, so what
// is admitted by its last instant is what the estimate leaves at that instant.
func demandableSliding(l Limit, from, to int64) int64 {
	s, k := l.sub()
	counts := make([]int64, k+1) // by sub-window modulo k+1: the one being filled takes the place of the one that has left
	var total wide
	var recent int64 // sum over the k sub-windows before the one being filled
	for i, j := int64(0), floorDiv(from, s); j*s < to; i, j = i+1, j+1 {
		last := min(s, to-j*s) - 1
		old := counts[(i+1)%(k+1)] // the k-th before this one: it has wrapped round to the next place
		part, rest := mulDiv(uint64(old), uint64(s-last), uint64(s))
		if rest > 0 {
			part = part.add(widen(1))
		}
		full := recent - old
		n := max(0, l.Rate-full-part.clamp())
		counts[i%(k+1)] = n
		recent = full + n
		total = total.add(widen(n))
	}
	return total.clamp()
}
