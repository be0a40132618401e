package local_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier/local"
)

func TestSlidingWindowTable(t *testing.T) {
	// One sub-window: current plus the previous one's part.
	runTable(t, sliding(10, time.Second, 1), true, []timedCall{
		at(20*secUS+900*msUS, "take", 10, ok(0, 1100*msUS)),
		at(20*secUS+900*msUS, "take", 1, no(0, 200*msUS, 1100*msUS)), // 10 * 0.9 = 9 at 21.1 s
		at(21*secUS, "take", 1, no(0, 100*msUS, secUS)),
		at(21*secUS+99999, "take", 1, no(0, 1, 900001)),
		at(21*secUS+100*msUS, "take", 1, ok(0, 1900*msUS)),
		at(21*secUS+100*msUS, "take", 10, no(0, 1900*msUS, 1900*msUS)), // until the 1 has left; 9 only needs the 10 gone
		at(21*secUS+100*msUS, "take", 9, no(0, 900*msUS, 1900*msUS)),
		at(21*secUS+100*msUS, "take", 5, no(0, 500*msUS, 1900*msUS)),
		at(21*secUS, "take", 1, no(0, 200*msUS, 2*secUS)), // back
		at(21*secUS+500*msUS, "peek", 0, ok(4, 1500*msUS)),
		at(21*secUS+500*msUS, "refund", 5, local.Decision{}), // only the current one's 1
		at(21*secUS+500*msUS, "peek", 0, ok(5, 500*msUS)),
		at(21*secUS+500*msUS, "take", 11, no(5, local.Never, 500*msUS)),
		at(21*secUS+500*msUS, "reset", 0, local.Decision{}),
		at(21*secUS+500*msUS, "peek", 10, ok(10, 0)),
	})
	// Four of 250 ms.
	runTable(t, sliding(8, time.Second, 4), true, []timedCall{
		at(20*secUS, "take", 4, ok(4, 1250*msUS)),
		at(20*secUS+250*msUS, "take", 4, ok(0, 1250*msUS)),
		at(20*secUS+999*msUS, "take", 1, no(0, 63500, 501*msUS)), // 4 * 3/4 at 21.0625 s
		at(21*secUS+62499, "take", 1, no(0, 1, 437501)),
		at(21*secUS+62500, "take", 1, ok(0, 1187500)),
		at(21*secUS+250*msUS, "peek", 0, ok(3, 1000*msUS)),
	})
	// Uncertain: counted ahead in full, weighted as of Lo.
	runTable(t, sliding(10, time.Second, 1), true, []timedCall{
		{lo: 20*secUS + 990*msUS, hi: 21*secUS + 10*msUS, call: "take", n: 10, want: ok(0, 2010*msUS)},
		{lo: 21*secUS + 990*msUS, hi: 22*secUS + 10*msUS, call: "take", n: 1, want: no(0, 110*msUS, 1010*msUS)},
	})
}

// spent is n tokens at a time.
type spent struct{ at, n int64 }

// estimateOf is the weighted count at now, from the full history.
func estimateOf(history []spent, now, sub, k int64) int64 {
	current := now / sub
	var full, oldest int64
	for _, s := range history {
		switch w := s.at / sub; {
		case w > current-k:
			full += s.n
		case w == current-k:
			oldest += s.n
		}
	}
	inside := sub - now%sub
	return full + (oldest*inside+sub-1)/sub
}

func TestSlidingWindowAgainstHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(1, 12).Draw(t, "limit")
		k := rapid.SampledFrom([]int64{1, 1, 2, 3, 7}).Draw(t, "k")
		sub := rapid.Int64Range(1, 20).Draw(t, "sub")
		l := sliding(limit, time.Duration(sub*k)*time.Microsecond, int(k))
		now := rapid.Int64Range(500, 600).Draw(t, "now")
		s := local.New(l, local.At(now), true)
		var history []spent
		latest := now
		for range 60 {
			now += rapid.Int64Range(-2, max(3, sub*k/3)).Draw(t, "elapsed")
			latest = max(latest, now)
			n := rapid.Int64Range(0, limit+1).Draw(t, "n")
			if rapid.IntRange(0, 6).Draw(t, "refund") == 0 {
				s.Refund(local.At(now), l, n)
				for i := len(history) - 1; i >= 0 && history[i].at/sub == latest/sub; i-- {
					part := min(n, history[i].n)
					history[i].n -= part
					n -= part
				}
				continue
			}
			estimate := estimateOf(history, latest, sub, k)
			want := local.Decision{Allowed: estimate+n <= limit}
			// first is the first time from which on at most room is used.
			first := func(room int64) int64 {
				at := latest
				for estimateOf(history, at, sub, k) > room {
					at++
				}
				return at - now
			}
			switch {
			case want.Allowed && n > 0:
				history = append(history, spent{latest, n})
			case want.Allowed:
			case n > limit:
				want.RetryUS = local.Never
			default:
				want.RetryUS = first(limit - n)
			}
			used := estimateOf(history, latest, sub, k)
			want.Remaining = max(0, limit-used)
			if used > 0 {
				want.ResetUS = first(0)
			}
			if got := s.Take(local.At(now), l, n); got != want {
				t.Fatalf("%s: at %d Take(%d) = %+v, want %+v", nameOf(l), now, n, got, want)
			}
		}
	})
}

// With more sub-windows than a key has places for, several count as one: never too many, and not many too few.
func TestManySubWindows(t *testing.T) {
	const k, sub, limit = 5000, 10, 100_000
	l := sliding(limit, k*sub*time.Microsecond, k)
	s := local.New(l, local.At(0), true)
	var passed int64
	counts := make(map[int64]int64)
	for now := int64(0); now < 20*k*sub; now += 7 {
		if s.Take(local.At(now), l, 50).Allowed {
			passed += 50
			counts[now/sub] += 50
		}
	}
	var inside int64
	for w := range int64(20 * k) {
		inside += counts[w] - counts[w-k]
		if inside > limit {
			t.Fatalf("%d inside at sub-window %d", inside, w)
		}
	}
	if passed < 20*limit*99/100 {
		t.Errorf("%d of %d passed", passed, 20*limit)
	}
}
