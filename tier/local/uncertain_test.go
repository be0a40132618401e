package local_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// envelope judges a history of admissions at their true times, net of refunds at theirs (n < 0). It returns by how much
// the limit was overshot, 0 or less for not at all. It knows the algorithms' promises, not the code: buckets burst + r*T in
// every interval, in products of whole numbers; windows from the full history.
func envelope(l tier.Limit, history []spent) (over int64) {
	over = -1 << 62
	period := l.PeriodUS()
	for j, last := range history {
		if last.n < 0 {
			continue
		}
		switch l.Algorithm {
		case tier.TokenBucket, tier.LeakyBucket:
			var sum int64
			for i := j; i >= 0; i-- {
				sum += history[i].n
				// sum <= burst + rate*T/period, in units of 1/period
				excess := (sum-l.Burst)*period - l.Rate*(last.at-history[i].at)
				over = max(over, (excess+period-1)/period)
			}
		case tier.FixedWindow:
			var sum int64
			for i := j; i >= 0 && history[i].at/period == last.at/period; i-- {
				sum += history[i].n
			}
			over = max(over, sum-l.Rate)
		case tier.SlidingWindow:
			over = max(over, estimateOf(history[:j+1], last.at, l.SubWindowUS(), max(1, int64(l.SubWindows)))-l.Rate)
		case tier.SlidingLog:
			var sum int64
			for i := j; i >= 0 && history[i].at > last.at-period; i-- {
				sum += history[i].n
			}
			over = max(over, sum-l.Rate)
		}
	}
	return over
}

// intervalRun draws a run under a clock that is known only as an interval around the true time and returns the overshoot.
// seen is what the algorithm is told of an interval.
func intervalRun(t *rapid.T, l tier.Limit, steps int, seen func(local.Time) local.Time) (over int64) {
	truth := rapid.Int64Range(1000, 2000).Draw(t, "start")
	width := rapid.Int64Range(0, 3*l.PeriodUS()).Draw(t, "width")
	clock := func() local.Time {
		return seen(local.Time{
			Lo: truth - rapid.Int64Range(0, width).Draw(t, "before"),
			Hi: truth + rapid.Int64Range(0, width).Draw(t, "after"),
		})
	}
	s := local.New(l, clock(), rapid.Bool().Draw(t, "full"))
	var history []spent
	for range steps {
		truth += rapid.OneOf(rapid.Just[int64](0), rapid.Int64Range(0, 3), rapid.Int64Range(0, l.PeriodUS())).Draw(t, "elapsed")
		now := clock()
		n := rapid.Int64Range(1, l.Capacity()).Draw(t, "n")
		if rapid.IntRange(0, 7).Draw(t, "refund") == 0 {
			// What was really given back: of a bucket the rise of the level.
			level, count := s.Peek(local.At(now.Lo), l, 0).Remaining, s.Admitted(now)
			s.Refund(now, l, n)
			back := count - s.Admitted(now)
			if l.Algorithm.Bucket() {
				back = s.Peek(local.At(now.Lo), l, 0).Remaining - level
			}
			if back < 0 || back > n {
				t.Fatalf("%s: refund of %d gave back %d", nameOf(l), n, back)
			}
			history = append(history, spent{truth, -back})
			continue
		}
		// What is admitted twice in a run of small takes finds more than one big take.
		for n > 0 {
			part := rapid.Int64Range(1, n).Draw(t, "part")
			if d := s.Take(now, l, part); d.Allowed {
				history = append(history, spent{truth, part})
			}
			n -= part
		}
	}
	return envelope(l, history)
}

func drawLimit(t *rapid.T, a tier.Algorithm) tier.Limit {
	k := rapid.SampledFrom([]int64{1, 2, 5}).Draw(t, "k")
	period := time.Duration(rapid.Int64Range(1, 40).Draw(t, "period")*k) * time.Microsecond
	limit := rapid.Int64Range(1, 12).Draw(t, "limit")
	switch a {
	case tier.TokenBucket:
		return tokenBucket(limit, period, rapid.Int64Range(1, 20).Draw(t, "burst"))
	case tier.LeakyBucket:
		return leakyBucket(limit, period, rapid.Int64Range(1, 20).Draw(t, "burst"))
	case tier.FixedWindow:
		return fixed(limit, period)
	case tier.SlidingWindow:
		return sliding(limit, period, int(k))
	}
	return slidingLog(limit, period)
}

func algorithms(yield func(tier.Algorithm) bool) {
	for a := tier.TokenBucket; a <= tier.SlidingLog && yield(a); a++ {
	}
}

// Wherever in its interval the true time was, the limit holds for the true times.
func TestUncertainClockNeverOvershoots(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		for a := range algorithms {
			l := drawLimit(t, a)
			if over := intervalRun(t, l, 40, func(i local.Time) local.Time { return i }); over > 0 {
				t.Fatalf("%s: overshot by %d", nameOf(l), over)
			}
		}
	})
}

// The generator is strong enough to catch the plain variants, which take one end of the interval for the time (and so
// charge to the window of Lo, or leave by Hi).
func TestPlainClockOvershoots(t *testing.T) {
	for _, plain := range []struct {
		name string
		seen func(local.Time) local.Time
	}{
		{"lo", func(i local.Time) local.Time { return local.At(i.Lo) }},
		{"hi", func(i local.Time) local.Time { return local.At(i.Hi) }},
	} {
		t.Run(plain.name, func(t *testing.T) {
			caught := map[tier.Algorithm]int{}
			rapid.Check(t, func(t *rapid.T) {
				for a := range algorithms {
					l := drawLimit(t, a)
					if over := intervalRun(t, l, 40, plain.seen); over > 0 {
						caught[a]++
					}
				}
			})
			t.Logf("caught in 100 runs, by algorithm: %v", caught)
			for a := range algorithms {
				if caught[a] == 0 {
					t.Errorf("algorithm %d was not caught", a)
				}
			}
		})
	}
}

// Limits that change while they are used: the bound is the greatest in use, and a change by itself gives nothing.
func TestChangingLimitsNeverOvershoot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		for a := range algorithms {
			most := drawLimit(t, a)
			l, truth := most, int64(1000)
			s := local.New(l, local.At(truth), true)
			var history []spent
			for range 40 {
				truth += rapid.OneOf(rapid.Just[int64](0), rapid.Int64Range(0, 3), rapid.Int64Range(0, 2*l.PeriodUS())).Draw(t, "elapsed")
				now := local.Time{Lo: truth - rapid.Int64Range(0, 5).Draw(t, "before"), Hi: truth + rapid.Int64Range(0, 5).Draw(t, "after")}
				before := s.Peek(local.At(now.Lo), l, 0).Remaining
				was := l
				l.Rate = rapid.Int64Range(0, most.Rate).Draw(t, "rate")
				l.Burst = rapid.Int64Range(0, most.Burst).Draw(t, "burst")
				if a.Bucket() { // the same rate or a lower one, in other units
					scale := rapid.Int64Range(1, 3).Draw(t, "scale")
					l.Rate, l.Period = l.Rate*scale, most.Period*time.Duration(scale)
				}
				after := s.Peek(local.At(now.Lo), l, 0).Remaining
				if a.Bucket() && after > before && was.Rate > 0 {
					t.Fatalf("%s: a change from %s gave %d", nameOf(l), nameOf(was), after-before)
				}
				n := rapid.Int64Range(1, most.Capacity()).Draw(t, "n")
				for range 3 {
					if s.Take(now, l, n).Allowed {
						history = append(history, spent{truth, n})
					}
				}
			}
			if over := envelope(most, history); over > 0 {
				t.Fatalf("%s: overshot by %d", nameOf(most), over)
			}
		}
	})
}

// An uncertain clock costs little where it is uncertain by little, and never starves.
func TestUncertainClockUtilisation(t *testing.T) {
	for _, c := range []struct {
		width   int64
		percent int64
	}{{5 * msUS, 97}, {50 * msUS, 90}, {950 * msUS, 48}, {secUS, 48}, {5 * secUS, 10}} {
		for _, l := range limitsOf(300, time.Second) {
			start := 20 * secUS
			s := local.New(l, local.Time{Lo: start, Hi: start + c.width}, true)
			var passed int64
			for now := start; now < start+40*secUS; now += 2222 {
				if s.Take(local.Time{Lo: now - c.width/2, Hi: now + c.width/2}, l, 1).Allowed {
					passed++
				}
			}
			t.Logf("%s: width %v: %d of 12000", nameOf(l), time.Duration(c.width)*time.Microsecond, passed)
			least := 120 * c.percent
			if l.Algorithm.Bucket() && c.width < secUS {
				least = 12_000 // less uncertain than the time to fill: the whole rate
			}
			if passed < least || passed > 12_300 {
				t.Errorf("%s: width %v: %d passed of 12000", nameOf(l), time.Duration(c.width)*time.Microsecond, passed)
			}
		}
	}
}
