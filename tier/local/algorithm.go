package local

import (
	"math"
	"math/bits"

	"github.com/tierlimit/tierlimit/tier"
)

// Never is what Decision.RetryUS and Decision.ResetUS say for: not by waiting.
const Never = -1

// Time is what the caller knows of the clock that windows align to: the true time is in [Lo, Hi], in microseconds since the
// Unix epoch (any epoch will do for buckets and logs). Lo == Hi where the clock is known. A Hi below Lo counts as Lo.
type Time struct{ Lo, Hi int64 }

// At is the time of a clock that is known exactly, in microseconds.
func At(us int64) Time { return Time{us, us} }

// Decision is the answer to one request.
type Decision struct {
	Allowed   bool
	Remaining int64 // tokens left after this decision, 0..capacity
	RetryUS   int64 // µs until the cost would pass if nobody else spends; 0 when allowed, Never when no wait helps
	ResetUS   int64 // µs until full if nothing more is spent; Never when the limit denies everything
	DelayUS   int64 // leaky bucket, when allowed: µs to hold the request for an even flow; 0 otherwise
}

// State counts one key under one of the five algorithms. Costs are tokens. RetryUS is exact where the clock is known: a
// lone caller that waits that long passes, one that waits a microsecond less does not. RetryUS and ResetUS count from t.Lo.
// Not safe for concurrent use.
type State interface {
	// Take spends n tokens, all or nothing. A denial changes nothing but housekeeping. n == 0 is a peek and is allowed
	// unless the limit denies everything; n above the capacity is denied with RetryUS Never, and so is n < 0, the caller's
	// mistake. Buckets O(1); windows and logs O(1) when allowed, at most O(entries) when denied.
	Take(t Time, l tier.Limit, n int64) Decision
	// Peek says what Take would and spends nothing: when it is allowed, Remaining is what is left before the cost.
	Peek(t Time, l tier.Limit, n int64) Decision
	// Refund gives n tokens back: a bucket's level, never above full; what was spent in the current window or sub-window,
	// never below 0; the newest entries of a log. n <= 0 does nothing.
	Refund(t Time, l tier.Limit, n int64)
	// Reset makes the key full, and forgets a clock that was ahead.
	Reset(t Time, l tier.Limit)
	// Admitted is an upper bound of the admissions, net of refunds, that are still inside the window that t lies in; for a
	// sliding window those of its oldest sub-window in full. 0 for buckets. Changes nothing.
	Admitted(t Time) int64
}

// New returns the state of a key that is full at t, or empty: an empty bucket begins to refill at t.Hi. Windows and logs
// begin with a count of 0 either way. An unknown algorithm gives a state that denies everything.
func New(l tier.Limit, t Time, full bool) State {
	switch l.Algorithm {
	case tier.TokenBucket, tier.LeakyBucket:
		return newBucket(l, t, full)
	case tier.FixedWindow:
		return newFixedWindow(l, t)
	case tier.SlidingWindow:
		return newSlidingWindow(l, t)
	case tier.SlidingLog:
		return newSlidingLog(t)
	}
	return nothing{}
}

// nothing is the state of an algorithm that is none.
type nothing struct{}

func (nothing) Take(Time, tier.Limit, int64) Decision { return refused() }
func (nothing) Peek(Time, tier.Limit, int64) Decision { return refused() }
func (nothing) Refund(Time, tier.Limit, int64)        {}
func (nothing) Reset(Time, tier.Limit)                {}
func (nothing) Admitted(Time) int64                   { return 0 }

// refused is a denial that no wait turns into anything else.
func refused() Decision {
	return Decision{RetryUS: Never, ResetUS: Never}
}

// MulDiv returns a*b/c rounded down and the remainder, with a product of 128 bits. a and b are 0 or more and c is 1 or
// more; a quotient over the greatest int64 is that, with remainder 0. A negative factor counts as 0, and c < 1 saturates.
func MulDiv(a, b, c int64) (q, r int64) {
	if a <= 0 || b <= 0 {
		return 0, 0
	}
	if c < 1 {
		return math.MaxInt64, 0
	}
	uq, ur, ok := mulAddDiv(uint64(a), uint64(b), 0, uint64(c))
	if !ok {
		return math.MaxInt64, 0
	}
	return int64(uq), int64(ur)
}

// MulDivCeil is MulDiv rounded up.
func MulDivCeil(a, b, c int64) int64 {
	q, r := MulDiv(a, b, c)
	if r > 0 && q < math.MaxInt64 {
		q++
	}
	return q
}

// mulAddDiv returns (a*b+d)/c and the remainder; not ok where the quotient is over the greatest int64 or c is 0.
func mulAddDiv(a, b, d, c uint64) (q, r uint64, ok bool) {
	hi, lo := bits.Mul64(a, b)
	lo, carry := bits.Add64(lo, d, 0)
	return div128(hi+carry, lo, c)
}

// mulSubDiv returns (a*b-d)/c and the remainder, for d <= a*b.
func mulSubDiv(a, b, d, c uint64) (q, r uint64, ok bool) {
	hi, lo := bits.Mul64(a, b)
	lo, borrow := bits.Sub64(lo, d, 0)
	return div128(hi-borrow, lo, c)
}

func div128(hi, lo, c uint64) (q, r uint64, ok bool) {
	if hi >= c { // also c == 0
		return 0, 0, false
	}
	if hi == 0 {
		q, r = lo/c, lo%c
	} else {
		q, r = bits.Div64(hi, lo, c)
	}
	return q, r, q <= math.MaxInt64
}

// maxTokens is the greatest capacity: two of them and a remainder still fit into an int64.
const maxTokens = 1 << 60

func clampTokens(n int64) int64 { return min(max(n, 0), maxTokens) }

// floorDiv is a/b rounded down, b >= 1.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

// distance is to-from for from <= to, which may not fit into an int64.
func distance(from, to int64) uint64 { return uint64(to) - uint64(from) }

// addSat is a+b, saturating.
func addSat(a, b int64) int64 {
	s := a + b
	if a > 0 && b > 0 && s < 0 {
		return math.MaxInt64
	}
	if a < 0 && b < 0 && s >= 0 {
		return math.MinInt64
	}
	return s
}

// mulSat is a*b for b >= 0, saturating.
func mulSat(a, b int64) int64 {
	neg := a < 0
	ua := uint64(a)
	if neg {
		ua = -ua
	}
	hi, lo := bits.Mul64(ua, uint64(b))
	switch {
	case hi == 0 && lo <= math.MaxInt64 && neg:
		return -int64(lo)
	case hi == 0 && lo <= math.MaxInt64:
		return int64(lo)
	case neg:
		return math.MinInt64
	}
	return math.MaxInt64
}

// waitUS is the time from from until to, at least 1.
func waitUS(from, to int64) int64 {
	if to <= from {
		return 1
	}
	return int64(min(distance(from, to), math.MaxInt64))
}
