package local_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier/local"
)

func TestSlidingLogTable(t *testing.T) {
	runTable(t, slidingLog(3, time.Second), true, []timedCall{
		at(0, "take", 1, ok(2, secUS+1)),
		at(400*msUS, "take", 2, ok(0, secUS+1)),
		at(500*msUS, "take", 1, no(0, 500*msUS+1, 900*msUS+1)),
		at(500*msUS, "take", 2, no(0, 900*msUS+1, 900*msUS+1)),
		at(secUS, "take", 1, no(0, 1, 400*msUS+1)),
		at(secUS+1, "take", 1, ok(0, secUS+1)),
		at(secUS+1, "take", 1, no(0, 400*msUS, secUS+1)),
		at(secUS-99999, "take", 1, no(0, 500*msUS, 1100*msUS+1)), // back
		at(secUS+1, "refund", 2, local.Decision{}),               // the newest, and half of the one before
		at(secUS+1, "peek", 0, ok(2, 400*msUS)),
		at(secUS+1, "take", 4, no(2, local.Never, 400*msUS)),
		at(1400*msUS, "take", 2, ok(0, secUS+1)),
		at(1400*msUS, "reset", 0, local.Decision{}),
		at(1400*msUS, "take", 3, ok(0, secUS+1)),
	})
	// Uncertain: an entry has the time Hi and leaves by Lo.
	runTable(t, slidingLog(3, time.Second), true, []timedCall{
		{lo: 0, hi: 100 * msUS, call: "take", n: 3, want: ok(0, 1100*msUS+1)},
		{lo: 1100 * msUS, hi: 1200 * msUS, call: "take", n: 1, want: no(0, 1, 1)},
		{lo: 1100*msUS + 1, hi: 1200 * msUS, call: "take", n: 1, want: ok(2, 1100*msUS)},
	})
}

// Few entries: exactly the log that remembers everything.
func TestSlidingLogAgainstHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(1, 40).Draw(t, "limit")
		period := rapid.Int64Range(1, 200).Draw(t, "period")
		l := slidingLog(limit, time.Duration(period)*time.Microsecond)
		now := rapid.Int64Range(0, 100).Draw(t, "now")
		s := local.New(l, local.At(now), true)
		var history []spent
		latest := now
		used := func(at int64) (sum int64) {
			for _, h := range history {
				if h.at >= at-period {
					sum += h.n
				}
			}
			return sum
		}
		for range 80 {
			now += rapid.Int64Range(-2, max(3, period/10)).Draw(t, "elapsed")
			latest = max(latest, now)
			n := rapid.Int64Range(0, min(limit+1, 5)).Draw(t, "n")
			if rapid.IntRange(0, 6).Draw(t, "refund") == 0 {
				s.Refund(local.At(now), l, n)
				for i := len(history) - 1; i >= 0 && history[i].at >= latest-period; i-- {
					part := min(n, history[i].n)
					history[i].n -= part
					n -= part
				}
				continue
			}
			first := func(room int64) int64 {
				at := latest
				for used(at) > room {
					at++
				}
				return at - now
			}
			want := local.Decision{Allowed: used(latest)+n <= limit}
			switch {
			case want.Allowed && n > 0:
				history = append(history, spent{latest, n})
			case want.Allowed:
			case n > limit:
				want.RetryUS = local.Never
			default:
				want.RetryUS = first(limit - n)
			}
			want.Remaining = limit - used(latest)
			if used(latest) > 0 {
				want.ResetUS = first(0)
			}
			if got := s.Take(local.At(now), l, n); got != want {
				t.Fatalf("%s: at %d Take(%d) = %+v, want %+v", nameOf(l), now, n, got, want)
			}
			if got := s.Admitted(local.At(now)); got != used(latest) {
				t.Fatalf("%s: at %d %d admitted, want %d", nameOf(l), now, got, used(latest))
			}
		}
	})
}

// Many entries: never more than the limit in any window, and no request denied that a log with a window longer by one tick
// would have let pass.
func TestSlidingLogTicks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(100, 3000).Draw(t, "limit")
		period := rapid.Int64Range(500, 50_000).Draw(t, "period")
		l := slidingLog(limit, time.Duration(period)*time.Microsecond)
		tick := period/1024 + 1
		s := local.New(l, local.At(0), true)
		most := rapid.Int64Range(1, max(1, 3*period/limit)).Draw(t, "step")
		var history []spent
		var inside, longer int64
		head, headLonger := 0, 0
		now := int64(0)
		steps := rapid.SliceOfN(rapid.Int64Range(0, most), 64, 64).Draw(t, "steps")
		for i := range 4000 {
			now += steps[i%len(steps)] ^ int64(i/len(steps))&1
			for head < len(history) && history[head].at <= now-period {
				inside -= history[head].n
				head++
			}
			for headLonger < len(history) && history[headLonger].at < now-period-tick {
				longer -= history[headLonger].n
				headLonger++
			}
			n := 1 + int64(i)%3
			d := s.Take(local.At(now), l, n)
			if d.Allowed {
				history = append(history, spent{now, n})
				inside += n
				longer += n
			}
			if inside > limit {
				t.Fatalf("%s: %d inside at %d", nameOf(l), inside, now)
			}
			if !d.Allowed && longer+n <= limit {
				t.Fatalf("%s: %d denied at %d with %d within a period and a tick", nameOf(l), n, now, longer)
			}
		}
	})
}

// Memory is bounded at any rate and limit.
func TestSlidingLogIsBounded(t *testing.T) {
	l := slidingLog(1e15, time.Hour)
	s := local.New(l, local.At(0), true)
	now := int64(0)
	for range 190_000 { // fills it
		now += 20 * msUS
		s.Take(local.At(now), l, 1)
	}
	if n := testing.AllocsPerRun(5000, func() {
		now += 20 * msUS
		s.Take(local.Time{Lo: now, Hi: now + now%7*secUS}, l, 1)
	}); n != 0 {
		t.Errorf("%v allocations in a log that is at its bound", n)
	}
	if got := s.Admitted(local.At(now)); got < 180_000 || got > 180_000*102/100 {
		t.Errorf("%d admitted in the last hour, 180000 asked", got)
	}
}
