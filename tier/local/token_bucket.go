package local

import (
	"math"

	"github.com/tierlimit/tierlimit/tier"
)

// bucket is a token bucket, and the mirror image of one, the leaky bucket as a meter: its water is burst - level.
//
// The token bucket is that of RFC 2697 and of ATM's GCRA (ITU-T I.371), kept as a level instead of an arrival time so that
// nothing overflows: rate tokens per period flow in continuously, up to burst. Any interval of length T admits at most
// burst + rate*T/period tokens. The leaky bucket's delay is that of nginx's limit_req: request after request is due
// period/rate apart.
//
// An uncertain clock: the level is looked at as of Lo, and an admission lets the bucket be full again no sooner than Hi.
// Let admissions k..j spend n_k..n_j, at true times T in [Lo, Hi]. What is wanted is n_k+...+n_j <= burst + r*(T_j-T_k),
// and T_j-T_k >= max(0, Lo_j-Hi_k). The state stands for two bounds on all sums that end with the latest admission:
// burst - level, and burst - level + r*(at-Hi_k). The second holds for a new k if at >= Hi_k - (burst-level)/r before it
// spends, and from at on the level grows with r. With Lo == Hi that is at = now, the ordinary bucket. Costs of at most
// burst - r*(Hi-Lo) still get the whole rate. A wider interval costs rate, and spending each token as it comes would put
// at off each time, for one token per interval: there a bucket that has begun to refill is held until it is full. A bucket
// does not align to anything, so a caller whose clock is steady but not aligned does better to give that, as a known one.
type bucket struct {
	level  int64 // whole tokens, 0..burst
	frac   int64 // and this many 1/period of a token; 0 when full
	at     int64 // µs; refill is credited up to here. Ahead of the clock where that was uncertain or has gone back
	rate   int64 // the limit as of at; 0 for one that denies everything
	period int64 // µs, 1 or more
	burst  int64
	leaky  bool
}

func newBucket(l tier.Limit, t Time, full bool) *bucket {
	b := &bucket{leaky: l.Algorithm == tier.LeakyBucket}
	b.rate, b.period, b.burst = bucketLimit(l)
	if full {
		b.level, b.at = b.burst, t.Lo
	} else {
		b.at = max(t.Lo, t.Hi)
	}
	return b
}

func bucketLimit(l tier.Limit) (rate, period, burst int64) {
	rate, period, burst = clampTokens(l.Rate), l.PeriodUS(), clampTokens(l.Burst)
	if period < 1 || burst == 0 {
		rate = 0
	}
	return rate, max(period, 1), burst
}

// refill credits the time up to now.
func (b *bucket) refill(now int64) {
	if now <= b.at {
		return
	}
	elapsed := distance(b.at, now)
	b.at = now
	if b.level >= b.burst || b.rate == 0 {
		return
	}
	q, r, ok := mulAddDiv(elapsed, uint64(b.rate), uint64(b.frac), uint64(b.period))
	if !ok || int64(q) >= b.burst-b.level {
		b.level, b.frac = b.burst, 0
		return
	}
	b.level, b.frac = b.level+int64(q), int64(r)
}

// adopt changes the limit and clips the level to it.
func (b *bucket) adopt(rate, period, burst int64) {
	if period != b.period {
		b.frac, _ = MulDiv(b.frac, period, b.period)
	}
	b.rate, b.period, b.burst = rate, period, burst
	if b.level >= burst {
		b.level, b.frac = burst, 0
	}
}

// settle brings the bucket to now under l. When in the time since the last call the limit changed is not known, so that
// time refills by the lesser of the two.
func (b *bucket) settle(now int64, l tier.Limit) {
	rate, period, burst := bucketLimit(l)
	if rate == b.rate && period == b.period && burst == b.burst {
		b.refill(now)
		return
	}
	old := *b
	old.refill(now)
	old.adopt(rate, period, burst)
	b.adopt(rate, period, burst)
	b.refill(now)
	if old.level < b.level || old.level == b.level && old.frac < b.frac {
		*b = old
	}
}

// until is the time from b.at until the level is n, which it is not: rounded down and up.
func (b *bucket) until(n int64) (floor, ceil int64) {
	q, r, ok := mulSubDiv(uint64(n-b.level), uint64(b.period), uint64(b.frac), uint64(b.rate))
	if !ok || q == math.MaxInt64 {
		return math.MaxInt64, math.MaxInt64
	}
	floor, ceil = int64(q), int64(q)
	if r > 0 {
		ceil++
	}
	return floor, ceil
}

// holds says that the level waits to be full, because the clock is so uncertain that not even a token gets the whole rate.
func (b *bucket) holds(t Time) bool {
	if t.Hi <= t.Lo || b.at > t.Lo || b.level >= b.burst {
		return false
	}
	fill, _ := MulDiv(b.burst-1, b.period, b.rate)
	return uint64(fill) < distance(t.Lo, t.Hi)
}

func (b *bucket) decide(t Time, l tier.Limit, n int64, spend bool) Decision {
	b.settle(t.Lo, l)
	if b.rate == 0 {
		return refused()
	}
	ahead := int64(min(distance(t.Lo, b.at), math.MaxInt64)) // settled: at >= t.Lo
	hold := b.holds(t)
	var d Decision
	switch {
	case n < 0 || n > b.burst:
		d.RetryUS = Never
	case hold && n > 0:
		_, d.RetryUS = b.until(b.burst)
	case n > b.level:
		_, wait := b.until(n)
		d.RetryUS = addSat(wait, ahead)
	default:
		d.Allowed = true
		fullIn := int64(0)
		if b.level < b.burst && (b.leaky || t.Hi > t.Lo) {
			fullIn, _ = b.until(b.burst)
		}
		if b.leaky {
			d.DelayUS = fullIn
		}
		if n > 0 && spend {
			if t.Hi > t.Lo && uint64(fullIn) < distance(t.Lo, t.Hi) {
				b.at = max(b.at, t.Hi-fullIn)
			}
			b.level -= n
		}
	}
	if !hold {
		d.Remaining = b.level
	}
	if b.level < b.burst {
		ahead = int64(min(distance(t.Lo, b.at), math.MaxInt64))
		_, wait := b.until(b.burst)
		d.ResetUS = addSat(wait, ahead)
	}
	return d
}

func (b *bucket) Take(t Time, l tier.Limit, n int64) Decision { return b.decide(t, l, n, true) }
func (b *bucket) Peek(t Time, l tier.Limit, n int64) Decision { return b.decide(t, l, n, false) }

func (b *bucket) Refund(t Time, l tier.Limit, n int64) {
	b.settle(t.Lo, l)
	if n <= 0 {
		return
	}
	if n >= b.burst-b.level {
		b.level, b.frac = b.burst, 0
		return
	}
	b.level += n
}

func (b *bucket) Reset(t Time, l tier.Limit) {
	b.rate, b.period, b.burst = bucketLimit(l)
	b.level, b.frac, b.at = b.burst, 0, t.Lo
}

func (b *bucket) Admitted(Time) int64 { return 0 }
