package model

import "math/bits"

// most is the largest integer that Lua's numbers hold exactly; what would be larger is reported as this.
const most = 1<<53 - 1

// year is a year in µs; no key is remembered for more than twenty.
const year = 36525 * 24 * 3600 * 10_000

// muldiv returns floor((a*b + c) / d) and the remainder for a, b, c >= 0 and d > 0, or ok = false when the quotient is above limit.
func muldiv(a, b, c, d, limit int64) (q, r int64, ok bool) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	lo, carry := bits.Add64(lo, uint64(c), 0)
	hi += carry
	if hi >= uint64(d) {
		return 0, 0, false
	}
	uq, ur := bits.Div64(hi, lo, uint64(d))
	if uq > uint64(limit) {
		return 0, 0, false
	}
	return int64(uq), int64(ur), true
}

// floorDiv returns floor(a*b/d), at most limit.
func floorDiv(a, b, d, limit int64) int64 {
	q, _, ok := muldiv(a, b, 0, d, limit)
	if !ok {
		return limit
	}
	return q
}

// ceilDiv returns ceil(a*b/d), at most limit.
func ceilDiv(a, b, d, limit int64) int64 {
	q, _, ok := muldiv(a, b, d-1, d, limit)
	if !ok {
		return limit
	}
	return q
}

// timeFor returns the time, rounded up, in which n tokens and a fraction of rem/period less come at rate per period: the least t with
// floor((t*rate + rem) / period) >= n. At most limit.
func timeFor(n, rem, rate, period, limit int64) int64 {
	if n <= 0 {
		return 0
	}
	if rate <= 0 {
		return limit
	}
	// ceil((n*period - rem) / rate), and n*period > rem because rem < period.
	hi, lo := bits.Mul64(uint64(n), uint64(period))
	lo, borrow := bits.Sub64(lo, uint64(rem), 0)
	hi -= borrow
	lo, carry := bits.Add64(lo, uint64(rate-1), 0)
	hi += carry
	if hi >= uint64(rate) {
		return limit
	}
	q, _ := bits.Div64(hi, lo, uint64(rate))
	if q > uint64(limit) {
		return limit
	}
	return int64(q)
}
