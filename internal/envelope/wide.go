package envelope

import (
	"math"
	"math/bits"
)

// wide is a signed 128-bit integer: sums of int64 costs and products of a rate and a time need more than 64 bits.
type wide struct {
	hi int64
	lo uint64
}

// lowest stands for "no value". It is far below every sum, and far enough from the end that adding to it cannot wrap.
var lowest = wide{hi: math.MinInt64 / 2}

func widen(n int64) wide { return wide{n >> 63, uint64(n)} }

func (a wide) add(b wide) wide {
	lo, carry := bits.Add64(a.lo, b.lo, 0)
	hi, _ := bits.Add64(uint64(a.hi), uint64(b.hi), carry)
	return wide{int64(hi), lo}
}

func (a wide) sub(b wide) wide {
	lo, borrow := bits.Sub64(a.lo, b.lo, 0)
	hi, _ := bits.Sub64(uint64(a.hi), uint64(b.hi), borrow)
	return wide{int64(hi), lo}
}

func (a wide) less(b wide) bool { return a.hi < b.hi || a.hi == b.hi && a.lo < b.lo }

// clamp is the nearest int64.
func (a wide) clamp() int64 {
	switch {
	case a.hi > 0 || a.hi == 0 && a.lo > math.MaxInt64:
		return math.MaxInt64
	case a.hi < -1 || a.hi == -1 && a.lo < 1<<63:
		return math.MinInt64
	}
	return int64(a.lo)
}

// mulDiv is floor(a*b/c) and the remainder. The quotient must be below 2^127: true whenever a or b is below 2^63.
func mulDiv(a, b, c uint64) (quotient wide, rest uint64) {
	hi, lo := bits.Mul64(a, b)
	top, hi := hi/c, hi%c
	low, rest := bits.Div64(hi, lo, c)
	return wide{int64(top), low}, rest
}

// floorDiv is floor(a/b) for b > 0: window numbers before the epoch are negative, and Go's / rounds towards 0.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}
