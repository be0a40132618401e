package local_test

import (
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

func TestTokenBucketTable(t *testing.T) {
	// D33: 5 tokens, 3 per 300 ms, all spent; at 350 ms there are 3.
	runTable(t, tokenBucket(3, 300*time.Millisecond, 5), true, []timedCall{
		at(0, "take", 5, ok(0, 500*msUS)),
		at(0, "take", 1, no(0, 100*msUS, 500*msUS)),
		at(350*msUS, "peek", 0, ok(3, 150*msUS)),
		at(350*msUS, "take", 4, no(3, 50*msUS, 150*msUS)),
		at(350*msUS, "take", 3, ok(0, 450*msUS)),
		at(350*msUS, "take", 1, no(0, 50*msUS, 450*msUS)),  // time stands still
		at(300*msUS, "take", 1, no(0, 100*msUS, 500*msUS)), // and goes back: nothing, and the step is waited for
		at(399999, "take", 1, no(0, 1, 400001)),
		at(400*msUS, "take", 1, ok(0, 500*msUS)), // nothing was refilled twice
		at(400*msUS, "refund", 2, local.Decision{}),
		at(400*msUS, "peek", 0, ok(2, 300*msUS)),
		at(400*msUS, "refund", 9, local.Decision{}),
		at(400*msUS, "peek", 6, no(5, local.Never, 0)),
		at(400*msUS, "take", 5, ok(0, 500*msUS)),
		at(400*msUS, "reset", 0, local.Decision{}),
		at(400*msUS, "take", 1, ok(4, 100*msUS)),
		at(600*msUS, "take", 1, ok(4, 100*msUS)), // full in between: no more than 5
	})
	// Empty at first.
	runTable(t, tokenBucket(10, time.Second, 10), false, []timedCall{
		at(0, "take", 1, no(0, 100*msUS, 1000*msUS)),
		at(100*msUS, "take", 1, ok(0, 1000*msUS)),
	})
	// Uncertain clock: what is spent at 0..200 ms may have been at 200 ms, and the full bucket refills from there.
	runTable(t, tokenBucket(10, time.Second, 10), true, []timedCall{
		{lo: 0, hi: 200 * msUS, call: "take", n: 10, want: ok(0, 1200*msUS)},
		{lo: 150 * msUS, hi: 350 * msUS, call: "take", n: 1, want: no(0, 150*msUS, 1050*msUS)},
		{lo: 300 * msUS, hi: 500 * msUS, call: "take", n: 1, want: ok(0, 1000*msUS)},
		{lo: 400 * msUS, hi: 600 * msUS, call: "take", n: 1, want: ok(0, 1000*msUS)}, // far from full the rate is the whole rate
	})
	// By more than the bucket takes to fill: what has begun to refill is held until it is full.
	runTable(t, tokenBucket(10, time.Second, 10), true, []timedCall{
		{lo: 0, hi: 2 * secUS, call: "take", n: 9, want: ok(1, 2900*msUS)},
		{lo: 0, hi: 2 * secUS, call: "take", n: 1, want: ok(0, 3*secUS)},
		{lo: 2500 * msUS, hi: 4500 * msUS, call: "take", n: 1, want: no(0, 500*msUS, 500*msUS)},
		{lo: 3 * secUS, hi: 5 * secUS, call: "take", n: 1, want: ok(9, 2100*msUS)},
	})
	// The greatest numbers.
	runTable(t, tokenBucket(1, 87600*time.Hour, 1e15), true, []timedCall{
		at(1<<50, "take", 1e15, ok(0, maxI)),
		at(1<<50, "take", 1, no(0, 315360000e6, maxI)),
		at(1<<50+315360000e6-1, "take", 1, no(0, 1, maxI)),
		at(1<<50+315360000e6, "take", 1, ok(0, maxI)),
	})
	runTable(t, tokenBucket(1e15, time.Microsecond, 1e15), true, []timedCall{
		at(1<<50, "take", 1e15, ok(0, 1)),
		at(1<<50+1, "take", 1e15, ok(0, 1)),
	})
	// The time between two calls across a change of the limit refills by the lesser of the two.
	slow, fast := tokenBucket(1, time.Second, 10), tokenBucket(1000, time.Second, 1000)
	runTable(t, slow, false, []timedCall{
		at(0, "peek", 0, ok(0, 10*secUS)),
		{lo: 5 * secUS, hi: 5 * secUS, call: "peek", limit: &fast, want: ok(5, 995*msUS)},
		at(5*secUS+msUS, "peek", 0, ok(6, 994*msUS)),
		{lo: 8*secUS + msUS, hi: 8*secUS + msUS, call: "peek", limit: &slow, want: ok(9, secUS)},
		{lo: 8*secUS + msUS, hi: 8*secUS + msUS, call: "peek", limit: &fast, want: ok(9, 991*msUS)},
	})
}

func TestLeakyBucketTable(t *testing.T) {
	// D37: capacity 3, the fourth at once is refused. The three are due a period/rate apart.
	queued := func(remaining, delay, reset int64) local.Decision {
		return local.Decision{Allowed: true, Remaining: remaining, DelayUS: delay, ResetUS: reset}
	}
	runTable(t, leakyBucket(3, time.Second, 3), true, []timedCall{
		at(0, "take", 1, queued(2, 0, 333334)),
		at(0, "take", 1, queued(1, 333333, 666667)),
		at(0, "take", 1, queued(0, 666666, 1000000)),
		at(0, "take", 1, no(0, 333334, 1000000)),
		at(333333, "take", 1, no(0, 1, 666667)),
		at(333334, "peek", 1, queued(1, 666666, 666666)),
		at(333334, "take", 1, queued(0, 666666, 1000000)),
		at(333334, "take", 4, no(0, local.Never, 1000000)),
		at(10*secUS, "take", 2, queued(1, 0, 666667)),
	})
}

// ratBucket is a token bucket in rationals.
type ratBucket struct {
	level, burst, perUS *big.Rat
	last                int64
}

func (o *ratBucket) advance(now int64) {
	if now <= o.last {
		return
	}
	o.level.Add(o.level, new(big.Rat).Mul(o.perUS, new(big.Rat).SetInt64(now-o.last)))
	if o.level.Cmp(o.burst) > 0 {
		o.level.Set(o.burst)
	}
	o.last = now
}

// wait is the time from now until the level is n, rounded up or down.
func (o *ratBucket) wait(now int64, n *big.Rat, up bool) *big.Int {
	d := new(big.Rat).Sub(n, o.level)
	if d.Sign() <= 0 {
		return new(big.Int)
	}
	d.Quo(d, o.perUS)
	if !up {
		return new(big.Int).Quo(d.Num(), d.Denom())
	}
	q, r := new(big.Int).QuoRem(d.Num(), d.Denom(), new(big.Int))
	if r.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q.Add(q, big.NewInt(o.last-now))
}

func saturated(n *big.Int) int64 {
	if n.IsInt64() {
		return n.Int64()
	}
	return maxI
}

func TestBucketAgainstRationals(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.OneOf(rapid.Int64Range(1, 1000), rapid.Int64Range(1, 1e15)).Draw(t, "rate")
		burst := rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, 1e15)).Draw(t, "burst")
		period := rapid.OneOf(rapid.Int64Range(1, 1000), rapid.SampledFrom([]int64{1, 1e6, 3600e6, 86400e6, 315360000e6})).Draw(t, "period")
		leaky, full := rapid.Bool().Draw(t, "leaky"), rapid.Bool().Draw(t, "full")
		l := tokenBucket(rate, time.Duration(period)*time.Microsecond, burst)
		if leaky {
			l.Algorithm = tier.LeakyBucket
		}
		now := rapid.Int64Range(0, 1<<51).Draw(t, "now")
		s := local.New(l, local.At(now), full)
		o := &ratBucket{level: new(big.Rat), burst: new(big.Rat).SetInt64(burst), perUS: big.NewRat(rate, period), last: now}
		if full {
			o.level.Set(o.burst)
		}
		token := period/rate + 1 // µs
		for range 60 {
			switch rapid.IntRange(0, 7).Draw(t, "step") {
			case 0, 1:
			case 2, 3, 4:
				now += rapid.Int64Range(0, 3*token).Draw(t, "elapsed")
			case 5:
				now += rapid.Int64Range(0, 1<<45).Draw(t, "long")
			case 6:
				now -= rapid.Int64Range(0, 3*token).Draw(t, "back")
			case 7:
				now++
			}
			o.advance(now)
			n := rapid.OneOf(rapid.Int64Range(0, 3), rapid.Int64Range(0, burst)).Draw(t, "n")
			cost := new(big.Rat).SetInt64(n)
			if rapid.IntRange(0, 9).Draw(t, "refund") == 0 {
				s.Refund(local.At(now), l, n)
				if o.level.Add(o.level, cost); o.level.Cmp(o.burst) > 0 {
					o.level.Set(o.burst)
				}
				continue
			}
			var want local.Decision
			if n > burst {
				want.RetryUS = local.Never
			} else if want.Allowed = o.level.Cmp(cost) >= 0; want.Allowed {
				if leaky {
					want.DelayUS = saturated(o.wait(now, o.burst, false))
				}
				o.level.Sub(o.level, cost)
			} else {
				want.RetryUS = saturated(o.wait(now, cost, true))
			}
			want.Remaining = new(big.Int).Quo(o.level.Num(), o.level.Denom()).Int64()
			want.ResetUS = saturated(o.wait(now, o.burst, true))
			if got := s.Take(local.At(now), l, n); got != want {
				t.Fatalf("%s: at %d Take(%d) = %+v, want %+v", nameOf(l), now, n, got, want)
			}
		}
	})
}
