package local_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier/local"
)

func TestFixedWindowTable(t *testing.T) {
	// C26: hits, passed or denied, do not move the window's end.
	runTable(t, fixed(3, time.Second), true, []timedCall{
		at(10*secUS+900*msUS, "take", 2, ok(1, 100*msUS)),
		at(10*secUS+900*msUS, "take", 2, no(1, 100*msUS, 100*msUS)),
		at(10*secUS+950*msUS, "take", 1, ok(0, 50*msUS)),
		at(10*secUS+999999, "take", 1, no(0, 1, 1)),
		at(11*secUS, "take", 3, ok(0, secUS)),
		at(11*secUS, "take", 3, no(0, secUS, secUS)),
		at(10*secUS+500*msUS, "take", 1, no(0, 1500*msUS, 1500*msUS)), // back in the window before: nothing
		at(11*secUS+500*msUS, "refund", 2, local.Decision{}),
		at(11*secUS+500*msUS, "take", 3, no(2, 500*msUS, 500*msUS)),
		at(12*secUS, "refund", 2, local.Decision{}), // nothing spent in this one
		at(12*secUS, "take", 4, no(3, local.Never, 0)),
		at(12*secUS, "take", 1, ok(2, secUS)),
		at(12*secUS, "reset", 0, local.Decision{}),
		at(12*secUS, "peek", 3, ok(3, 0)),
	})
	// Before the epoch windows align too.
	runTable(t, fixed(3, time.Second), true, []timedCall{
		at(-1500*msUS, "take", 3, ok(0, 500*msUS)),
		at(-secUS, "take", 3, ok(0, secUS)),
		at(-1, "take", 1, no(0, 1, 1)),
		at(0, "take", 1, ok(2, secUS)),
	})
	// Uncertain: what may already be in the next window is counted there, and in the present one.
	runTable(t, fixed(3, time.Second), true, []timedCall{
		at(10*secUS, "take", 1, ok(2, secUS)),
		{lo: 10*secUS + 990*msUS, hi: 11*secUS + 10*msUS, call: "take", n: 1, want: ok(1, 1010*msUS)},
		{lo: 10*secUS + 995*msUS, hi: 11*secUS + 15*msUS, call: "take", n: 2, want: no(1, 5*msUS, 1005*msUS)},
		at(11*secUS, "take", 2, ok(0, secUS)),
	})
}

func TestFixedWindowAgainstHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(1, 12).Draw(t, "limit")
		period := rapid.Int64Range(1, 30).Draw(t, "period")
		l := fixed(limit, time.Duration(period)*time.Microsecond)
		now := rapid.Int64Range(0, 100).Draw(t, "now")
		s := local.New(l, local.At(now), true)
		counts, latest := map[int64]int64{}, now
		for range 80 {
			now += rapid.Int64Range(-2, period/2+3).Draw(t, "elapsed")
			latest = max(latest, now)
			w := latest / period
			n := rapid.Int64Range(0, limit+1).Draw(t, "n")
			if rapid.IntRange(0, 6).Draw(t, "refund") == 0 {
				s.Refund(local.At(now), l, n)
				counts[w] = max(0, counts[w]-n)
				continue
			}
			want := local.Decision{Allowed: counts[w]+n <= limit}
			end := (w+1)*period - now
			switch {
			case want.Allowed:
				counts[w] += n
			case n > limit:
				want.RetryUS = local.Never
			default:
				want.RetryUS = end
			}
			want.Remaining = limit - counts[w]
			if counts[w] > 0 {
				want.ResetUS = end
			}
			if got := s.Take(local.At(now), l, n); got != want {
				t.Fatalf("%s: at %d Take(%d) = %+v, want %+v", nameOf(l), now, n, got, want)
			}
			if got := s.Admitted(local.At(now)); got != counts[w] {
				t.Fatalf("%s: at %d %d admitted, want %d", nameOf(l), now, got, counts[w])
			}
		}
	})
}
