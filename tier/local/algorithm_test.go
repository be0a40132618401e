package local_test

import (
	"fmt"
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

const (
	msUS  = int64(1000)
	secUS = 1000 * msUS
	maxI  = math.MaxInt64
)

func tokenBucket(rate int64, period time.Duration, burst int64) tier.Limit {
	return tier.Limit{Algorithm: tier.TokenBucket, Rate: rate, Period: period, Burst: burst}
}

func leakyBucket(rate int64, period time.Duration, burst int64) tier.Limit {
	return tier.Limit{Algorithm: tier.LeakyBucket, Rate: rate, Period: period, Burst: burst}
}

func fixed(limit int64, window time.Duration) tier.Limit {
	return tier.Limit{Algorithm: tier.FixedWindow, Rate: limit, Period: window, Burst: limit}
}

func sliding(limit int64, window time.Duration, k int) tier.Limit {
	return tier.Limit{Algorithm: tier.SlidingWindow, Rate: limit, Period: window, Burst: limit, SubWindows: k}
}

func slidingLog(limit int64, window time.Duration) tier.Limit {
	return tier.Limit{Algorithm: tier.SlidingLog, Rate: limit, Period: window, Burst: limit}
}

// limitsOf is one limit of each algorithm, with a capacity of limit.
func limitsOf(limit int64, period time.Duration) []tier.Limit {
	return []tier.Limit{
		tokenBucket(limit, period, limit), leakyBucket(limit, period, limit), fixed(limit, period),
		sliding(limit, period, 1), sliding(limit, period, 4), slidingLog(limit, period),
	}
}

func nameOf(l tier.Limit) string {
	return fmt.Sprintf("alg=%d/%d per %v burst %d k=%d", l.Algorithm, l.Rate, l.Period, l.Burst, l.SubWindows)
}

// timedCall is a row of the {now, call, want} tables.
type timedCall struct {
	lo, hi int64
	call   string // take, peek, refund, reset
	limit  *tier.Limit
	n      int64
	want   local.Decision
}

func at(now int64, call string, n int64, want local.Decision) timedCall {
	return timedCall{lo: now, hi: now, call: call, n: n, want: want}
}

func ok(remaining, resetUS int64) local.Decision {
	return local.Decision{Allowed: true, Remaining: remaining, ResetUS: resetUS}
}

func no(remaining, retryUS, resetUS int64) local.Decision {
	return local.Decision{Remaining: remaining, RetryUS: retryUS, ResetUS: resetUS}
}

func runTable(t *testing.T, l tier.Limit, full bool, rows []timedCall) {
	t.Helper()
	s := local.New(l, local.At(rows[0].lo), full)
	for i, r := range rows {
		now, lim := local.Time{Lo: r.lo, Hi: r.hi}, l
		if r.limit != nil {
			lim = *r.limit
			l = lim
		}
		var got local.Decision
		switch r.call {
		case "take":
			got = s.Take(now, lim, r.n)
		case "peek":
			got = s.Peek(now, lim, r.n)
		case "refund":
			s.Refund(now, lim, r.n)
			continue
		case "reset":
			s.Reset(now, lim)
			continue
		default:
			t.Fatalf("row %d: no call %q", i, r.call)
		}
		if got != r.want {
			t.Fatalf("row %d: at %d..%d %s(%d) = %+v, want %+v", i, r.lo, r.hi, r.call, r.n, got, r.want)
		}
	}
}

func TestMulDiv(t *testing.T) {
	for _, c := range []struct{ a, b, c, q, r, ceil int64 }{
		{0, 5, 7, 0, 0, 0},
		{2, 3, 4, 1, 2, 2},
		{6, 2, 4, 3, 0, 3},
		{maxI, maxI, maxI, maxI, 0, maxI},
		{maxI, 2, 1, maxI, 0, maxI},    // saturates
		{maxI, maxI, 1, maxI, 0, maxI}, // saturates in 128 bits
		{maxI, 3, 2, maxI, 0, maxI},    // quotient over the greatest int64, under the greatest uint64
		{1e15, 315360000e6, 1e15, 315360000e6, 0, 315360000e6},
		{-1, 5, 2, 0, 0, 0},
		{5, -1, 2, 0, 0, 0},
		{5, 5, 0, maxI, 0, maxI},
		{5, 5, -3, maxI, 0, maxI},
		{0, 5, 0, 0, 0, 0},
	} {
		q, r := local.MulDiv(c.a, c.b, c.c)
		if ceil := local.MulDivCeil(c.a, c.b, c.c); q != c.q || r != c.r || ceil != c.ceil {
			t.Errorf("MulDiv(%d, %d, %d) = %d, %d, ceil %d; want %d, %d, %d", c.a, c.b, c.c, q, r, ceil, c.q, c.r, c.ceil)
		}
	}
}

func TestMulDivAgainstBig(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := rapid.Int64Min(0).Draw(t, "a"), rapid.Int64Min(0).Draw(t, "b"), rapid.Int64Min(1).Draw(t, "c")
		q, r := new(big.Int).DivMod(new(big.Int).Mul(big.NewInt(a), big.NewInt(b)), big.NewInt(c), new(big.Int))
		ceil := new(big.Int).Set(q)
		if r.Sign() > 0 {
			ceil.Add(ceil, big.NewInt(1))
		}
		if !q.IsInt64() {
			q.SetInt64(maxI)
			r.SetInt64(0)
		}
		if !ceil.IsInt64() {
			ceil.SetInt64(maxI)
		}
		gq, gr := local.MulDiv(a, b, c)
		if gq != q.Int64() || gr != r.Int64() || local.MulDivCeil(a, b, c) != ceil.Int64() {
			t.Fatalf("MulDiv(%d, %d, %d) = %d, %d, ceil %d; want %v, %v, %v", a, b, c, gq, gr, local.MulDivCeil(a, b, c), q, r, ceil)
		}
	})
}

// D28: a lone caller that waits exactly RetryUS passes, a microsecond less does not.
func TestRetryIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(1, 50).Draw(t, "limit")
		period := time.Duration(rapid.SampledFrom([]int64{4, 12, 100, 1000, 999_996, 86400e6}).Draw(t, "period")) * time.Microsecond
		for _, l := range limitsOf(limit, period) {
			now := rapid.Int64Range(0, 1<<50).Draw(t, "now")
			s := local.New(l, local.At(now), rapid.Bool().Draw(t, "full"))
			for range 30 {
				n := rapid.Int64Range(1, limit).Draw(t, "n")
				d := s.Take(local.At(now), l, n)
				switch {
				case d.Allowed && d.RetryUS != 0, !d.Allowed && d.RetryUS < 1:
					t.Fatalf("%s: %+v", nameOf(l), d)
				case d.Allowed:
					now += rapid.Int64Range(0, l.PeriodUS()/4).Draw(t, "step")
				default:
					if e := s.Peek(local.At(now+d.RetryUS-1), l, n); e.Allowed || e.RetryUS != 1 {
						t.Fatalf("%s: %d passes before its retry %d: %+v", nameOf(l), n, d.RetryUS, e)
					}
					now += d.RetryUS
					if e := s.Take(local.At(now), l, n); !e.Allowed {
						t.Fatalf("%s: %d does not pass after its retry %d: %+v", nameOf(l), n, d.RetryUS, e)
					}
				}
				// The same for ResetUS: full then, not full before.
				if d := s.Peek(local.At(now), l, 0); d.ResetUS > 0 && rapid.IntRange(0, 5).Draw(t, "idle") == 0 {
					if e := s.Peek(local.At(now+d.ResetUS-1), l, 0); e.Remaining == limit {
						t.Fatalf("%s: full before %d", nameOf(l), d.ResetUS)
					}
					now += d.ResetUS
					if e := s.Peek(local.At(now), l, 0); e.Remaining != limit || e.ResetUS != 0 {
						t.Fatalf("%s: not full after %d: %+v", nameOf(l), d.ResetUS, e)
					}
				}
			}
		}
	})
}

// D29, D30, D31, B23: the first call leaves capacity-1, the last token is admitted and the next call is not.
func TestCapacityIsExact(t *testing.T) {
	for rate := int64(1); rate <= 1e9; rate *= 10 {
		l := tokenBucket(rate, time.Second, 1000)
		if d := local.New(l, local.At(0), true).Take(local.At(0), l, 1); d.Remaining != 999 {
			t.Errorf("%s: %+v", nameOf(l), d)
		}
	}
	for _, limit := range []int64{1, 10, 6000} {
		for _, l := range limitsOf(limit, time.Second) {
			s := local.New(l, local.At(5*secUS), true)
			for i := range limit {
				if d := s.Take(local.At(5*secUS), l, 1); !d.Allowed || d.Remaining != limit-1-i {
					t.Fatalf("%s: call %d: %+v", nameOf(l), i, d)
				}
			}
			if d := s.Take(local.At(5*secUS), l, 1); d.Allowed || d.Remaining != 0 {
				t.Errorf("%s: call %d: %+v", nameOf(l), limit+1, d)
			}
		}
	}
	for _, l := range limitsOf(1e15, 24*time.Hour) {
		s := local.New(l, local.At(0), true)
		for i := int64(1); i <= 1000; i++ {
			if d := s.Take(local.At(0), l, 1); d.Remaining != 1e15-i {
				t.Fatalf("%s: call %d: %+v", nameOf(l), i, d)
			}
		}
	}
}

// D32: lowered from 100 to 2, at most 2 pass at once from then on; raised, no free refill.
func TestLimitChanges(t *testing.T) {
	for i, high := range limitsOf(100, time.Second) {
		low := limitsOf(2, time.Second)[i]
		s := local.New(high, local.At(0), true)
		s.Take(local.At(0), high, 1)
		for now := int64(0); now < 30*secUS; now += 10 * secUS {
			passed := 0
			for range 10 {
				if s.Take(local.At(now), low, 1).Allowed {
					passed++
				}
			}
			if passed > 2 || now > 0 && passed != 2 {
				t.Errorf("%s: %d passed at once at %d", nameOf(low), passed, now)
			}
		}
		s.Reset(local.At(30*secUS), low)
		s.Take(local.At(30*secUS), low, 2)
		if d := s.Take(local.At(30*secUS), high, 100); d.Allowed {
			t.Errorf("%s: a raise was a refill: %+v", nameOf(high), d)
		}
		want := int64(98) // a window's spent tokens stay spent
		if high.Algorithm.Bucket() {
			want = 0
		}
		if d := s.Peek(local.At(30*secUS), high, 0); d.Remaining != want {
			t.Errorf("%s: %d left after a raise, want %d", nameOf(high), d.Remaining, want)
		}
	}
}

// A changed window is no fresh one, and a change there and back at one instant changes nothing that matters.
func TestPeriodChanges(t *testing.T) {
	now := 7*secUS + 300*msUS
	for i, l := range limitsOf(10, time.Second) {
		s := local.New(l, local.At(now), true)
		s.Take(local.At(now), l, 7)
		for _, p := range []time.Duration{time.Minute, 10 * time.Millisecond, time.Hour, 24 * time.Microsecond, time.Second} {
			m := limitsOf(10, p)[i]
			if d := s.Take(local.At(now), m, 4); d.Allowed || d.Remaining != 3 {
				t.Errorf("%s: after a change to %v: %+v", nameOf(l), p, d)
			}
		}
		if d := s.Take(local.At(now), l, 3); !d.Allowed {
			t.Errorf("%s: %+v", nameOf(l), d)
		}
	}
	// A short window after a long one: what was spent longer ago than that is gone at once, not at the long one's end.
	for _, short := range []tier.Limit{fixed(10, time.Second), slidingLog(10, time.Second)} {
		long := short
		long.Period = time.Hour
		s := local.New(long, local.At(now), true)
		s.Take(local.At(now), long, 10)
		if d := s.Take(local.At(now+5*secUS), short, 10); !d.Allowed {
			t.Errorf("%s: %+v", nameOf(short), d)
		}
	}
	// More and fewer sub-windows.
	s := local.New(sliding(10, time.Second, 1), local.At(now), true)
	s.Take(local.At(now), sliding(10, time.Second, 1), 7)
	for _, k := range []int{4, 1000, 5000, 2, 1} {
		if d := s.Take(local.At(now), sliding(10, time.Second, k), 4); d.Allowed || d.Remaining != 3 {
			t.Errorf("k=%d: %+v", k, d)
		}
	}
}

// D34, D35, D36: what can never pass is denied for ever and changes nothing; a rate of 0 denies everything; what is out of
// range is not unlimited.
func TestNever(t *testing.T) {
	for _, l := range limitsOf(10, time.Second) {
		s := local.New(l, local.At(0), true)
		s.Take(local.At(0), l, 3)
		for _, n := range []int64{11, 2e8, maxI, -1, math.MinInt64} {
			for _, d := range []local.Decision{s.Take(local.At(0), l, n), s.Peek(local.At(0), l, n)} {
				if d.Allowed || d.RetryUS != local.Never || d.Remaining != 7 {
					t.Errorf("%s: n=%d: %+v", nameOf(l), n, d)
				}
			}
		}
		s.Refund(local.At(0), l, -5)
		s.Refund(local.At(0), l, math.MinInt64)
		if d := s.Take(local.At(0), l, 7); !d.Allowed || d.Remaining != 0 {
			t.Errorf("%s: %+v", nameOf(l), d)
		}
	}
	slow := tokenBucket(1, 86400*time.Second, 1)
	if d := local.New(slow, local.At(0), true).Take(local.At(0), slow, 2e8); d.Allowed || d.RetryUS != local.Never {
		t.Errorf("%+v", d)
	}
	for _, l := range append(limitsOf(0, time.Second), append(limitsOf(10, 0), append(limitsOf(10, time.Nanosecond),
		append(limitsOf(-3, -time.Second), tier.Limit{}, tokenBucket(5, time.Second, 0), tokenBucket(0, time.Second, 5),
			tier.Limit{Algorithm: 99, Rate: 5, Period: time.Second, Burst: 5})...)...)...) {
		for _, full := range []bool{true, false} {
			s := local.New(l, local.At(0), full)
			for now := int64(0); now < 100*secUS; now += 7 * secUS {
				for _, n := range []int64{0, 1, 3} {
					if d := s.Take(local.At(now), l, n); d.Allowed || d.RetryUS != local.Never || d.Remaining != 0 {
						t.Errorf("%s: n=%d: %+v", nameOf(l), n, d)
					}
				}
				s.Refund(local.At(now), l, 3)
				s.Reset(local.At(now), l)
				if s.Admitted(local.At(now)) != 0 {
					t.Errorf("%s: admitted something", nameOf(l))
				}
			}
		}
	}
	// A blocked tenant that is unblocked has what it had.
	for _, l := range limitsOf(10, time.Hour) {
		s := local.New(l, local.At(0), true)
		s.Take(local.At(0), l, 4)
		blocked := l
		blocked.Rate = 0
		if d := s.Take(local.At(1), blocked, 1); d.Allowed {
			t.Errorf("%s: %+v", nameOf(l), d)
		}
		if d := s.Take(local.At(2), l, 0); d.Remaining != 6 {
			t.Errorf("%s: %+v", nameOf(l), d)
		}
	}
}

// D40: a million calls at a steady rate are within one token of the ideal, and time steps that do not divide anything.
func TestNoDrift(t *testing.T) {
	for i, l := range []tier.Limit{
		tokenBucket(7, 30*time.Microsecond, 2), tokenBucket(999_983, time.Second, 3), leakyBucket(3, 7*time.Microsecond, 2),
		tokenBucket(1_000_003, time.Second, 5),
	} {
		s := local.New(l, local.At(0), false)
		var now, passed int64
		for range 1_000_000 / (1 + 4*min(i, 1)) {
			now++ // one caller a microsecond, at most one token
			if s.Take(local.At(now), l, 1).Allowed {
				passed++
			}
		}
		ideal, _ := local.MulDiv(l.Rate, now, l.PeriodUS())
		if passed < ideal-1 && passed < now-1 || passed > ideal {
			t.Errorf("%s: %d passed in %d µs, ideal %d", nameOf(l), passed, now, ideal)
		}
	}
	// A caller that waits RetryUS each time gets the rate too.
	for _, l := range []tier.Limit{tokenBucket(333_333, time.Second, 1), tokenBucket(10, 3*time.Second, 1)} {
		s := local.New(l, local.At(0), false)
		var now, passed int64
		for range 30_000 {
			d := s.Take(local.At(now), l, 1)
			if d.Allowed {
				passed++
			}
			now += d.RetryUS
		}
		// Whole microseconds: the caller comes up to 1 µs late, and with a burst of 1 that is lost.
		ideal, _ := local.MulDiv(l.Rate, now, l.PeriodUS())
		if slack := local.MulDivCeil(passed, l.Rate, l.PeriodUS()); passed < ideal-1-slack || passed > ideal+1 {
			t.Errorf("%s: %d passed in %d µs, ideal %d", nameOf(l), passed, now, ideal)
		}
	}
}

// Utilisation of the other algorithms at a steady threefold demand.
func TestSteadyDemandIsServed(t *testing.T) {
	for _, l := range limitsOf(300, time.Second) {
		s := local.New(l, local.At(0), true)
		var passed int64
		for now := int64(0); now < 100*secUS; now += 1111 {
			if s.Take(local.At(now), l, 1).Allowed {
				passed++
			}
		}
		if most := int64(30_000 + 300); passed < 29_700 || passed > most {
			t.Errorf("%s: %d passed in 100 s", nameOf(l), passed)
		}
	}
}

// C25: short windows work.
func TestShortPeriods(t *testing.T) {
	for _, p := range []time.Duration{500 * time.Millisecond, 250 * time.Millisecond, time.Millisecond, 4 * time.Microsecond} {
		for _, l := range limitsOf(5, p) {
			s := local.New(l, local.At(0), true)
			for round := range int64(5) {
				now := round * 2 * l.PeriodUS()
				if round > 0 && l.Algorithm == tier.SlidingLog {
					now += round
				}
				d := s.Take(local.At(now), l, 5)
				e := s.Take(local.At(now), l, 1)
				if !d.Allowed || e.Allowed {
					t.Errorf("%s: round %d: %+v %+v", nameOf(l), round, d, e)
				}
			}
		}
	}
}

// Refund and reset, for all: never above full, a reset is full, and both work after a step back.
func TestRefundReset(t *testing.T) {
	for _, l := range limitsOf(10, time.Second) {
		now := local.At(20 * secUS)
		s := local.New(l, now, true)
		steps := []struct {
			call string
			n    int64
			want int64
		}{
			{"refund", 5, 10}, {"take", 10, 0}, {"refund", 3, 3}, {"take", 2, 1}, {"refund", 100, 10}, {"take", 4, 6},
			{"refund", 0, 6}, {"reset", 0, 10}, {"take", 10, 0}, {"take", 1, 0}, {"reset", 0, 10}, {"refund", maxI, 10}, {"take", 10, 0},
		}
		for i, st := range steps {
			switch st.call {
			case "take":
				s.Take(now, l, st.n)
			case "refund":
				s.Refund(now, l, st.n)
			case "reset":
				s.Reset(now, l)
			}
			if d := s.Peek(now, l, 0); d.Remaining != st.want || !d.Allowed {
				t.Errorf("%s: step %d: %+v, want %d", nameOf(l), i, d, st.want)
			}
		}
		back := local.At(now.Lo - 3600*secUS)
		if d := s.Take(back, l, 1); d.Allowed || d.RetryUS < 3600*secUS || d.RetryUS > 3602*secUS {
			t.Errorf("%s: an hour back: %+v", nameOf(l), d)
		}
		s.Reset(back, l) // and the clock that was ahead is forgotten
		if d := s.Take(back, l, 10); !d.Allowed {
			t.Errorf("%s: after a reset: %+v", nameOf(l), d)
		}
		if d := s.Take(local.At(back.Lo+3*secUS), l, 10); !d.Allowed {
			t.Errorf("%s: 3 s after a reset: %+v", nameOf(l), d)
		}
	}
}

func TestAdmitted(t *testing.T) {
	now := 20 * secUS
	for _, l := range limitsOf(10, time.Second) {
		s := local.New(l, local.At(now), true)
		s.Take(local.At(now), l, 4)
		s.Take(local.At(now+100*msUS), l, 3)
		s.Refund(local.At(now+100*msUS), l, 1)
		want := int64(6)
		if l.Algorithm.Bucket() {
			want = 0
		}
		if got := s.Admitted(local.At(now + 100*msUS)); got != want {
			t.Errorf("%s: %d admitted, want %d", nameOf(l), got, want)
		}
		if got := s.Admitted(local.At(now + 3*secUS)); got != 0 {
			t.Errorf("%s: %d admitted long after", nameOf(l), got)
		}
		if got := s.Admitted(local.At(now + 100*msUS)); got != want { // it changes nothing
			t.Errorf("%s: %d admitted, want %d", nameOf(l), got, want)
		}
	}
}

// No input panics, and whatever it is, a decision is in range.
func TestAnyInput(t *testing.T) {
	corner := rapid.OneOf(rapid.Int64(), rapid.Int64Range(-3, 20), rapid.Int64Range(0, 1<<51),
		rapid.SampledFrom([]int64{math.MinInt64, math.MinInt64 + 1, maxI, maxI - 1, 1e15, 1 << 60, 1<<60 + 1, 315360000e9, -1000, 1000}))
	rapid.Check(t, func(t *rapid.T) {
		draw := func() tier.Limit {
			return tier.Limit{
				Algorithm: tier.Algorithm(rapid.IntRange(0, 6).Draw(t, "algorithm")), Rate: corner.Draw(t, "rate"),
				Period: time.Duration(corner.Draw(t, "period")), Burst: corner.Draw(t, "burst"), SubWindows: int(corner.Draw(t, "k")),
			}
		}
		moment := func() local.Time { return local.Time{Lo: corner.Draw(t, "lo"), Hi: corner.Draw(t, "hi")} }
		l, now := draw(), moment()
		algorithm := l.Algorithm
		s := local.New(l, now, rapid.Bool().Draw(t, "full"))
		for range 40 {
			if rapid.IntRange(0, 4).Draw(t, "relimit") == 0 {
				l = draw()
			}
			if rapid.Bool().Draw(t, "move") {
				now = moment()
			}
			n := corner.Draw(t, "n")
			capacity := max(0, l.Rate)
			if algorithm.Bucket() {
				capacity = max(0, l.Burst)
			}
			switch rapid.IntRange(0, 4).Draw(t, "call") {
			case 0, 1:
				d := s.Take(now, l, n)
				if d.Remaining < 0 || d.Remaining > capacity || d.RetryUS < local.Never || d.ResetUS < local.Never || d.DelayUS < 0 ||
					d.Allowed && (n < 0 || n > capacity || d.RetryUS != 0) || !d.Allowed && d.RetryUS == 0 ||
					!d.Allowed && n > 0 && n <= d.Remaining {
					t.Fatalf("%s: Take(%v, %d) = %+v", nameOf(l), now, n, d)
				}
				if p := s.Peek(now, l, 0); p.Remaining > d.Remaining {
					t.Fatalf("%s: Take(%v, %d) = %+v, then %+v", nameOf(l), now, n, d, p)
				}
			case 2:
				p := s.Peek(now, l, n)
				if d := s.Take(now, l, n); d.Allowed != p.Allowed || d.RetryUS != p.RetryUS || d.DelayUS != p.DelayUS {
					t.Fatalf("%s: Peek(%v, %d) = %+v, Take %+v", nameOf(l), now, n, p, d)
				}
			case 3:
				s.Refund(now, l, n)
			case 4:
				if s.Admitted(now) < 0 {
					t.Fatalf("%s: Admitted(%v) = %d", nameOf(l), now, s.Admitted(now))
				}
				if rapid.IntRange(0, 3).Draw(t, "reset") == 0 {
					s.Reset(now, l)
				}
			}
		}
	})
}

func TestNoAllocation(t *testing.T) {
	for _, l := range append(limitsOf(100, time.Second), sliding(100, time.Second, 60)) {
		if l.Algorithm == tier.SlidingLog {
			continue // grows to its bound, then no more
		}
		now := int64(0)
		s := local.New(l, local.At(now), true)
		if n := testing.AllocsPerRun(2000, func() {
			now += 3 * msUS
			s.Take(local.Time{Lo: now, Hi: now + 50*msUS}, l, 1)
			s.Peek(local.At(now), l, 200)
			s.Refund(local.At(now), l, 1)
			s.Take(local.At(now), l, 1)
			s.Take(local.At(now), l, 90)
		}); n != 0 {
			t.Errorf("%s: %v allocations", nameOf(l), n)
		}
	}
}

func BenchmarkTake(b *testing.B) {
	for _, l := range append(limitsOf(1000, time.Second), sliding(1000, time.Second, 60)) {
		b.Run(nameOf(l), func(b *testing.B) {
			b.ReportAllocs()
			now := int64(0)
			s := local.New(l, local.At(now), true)
			for b.Loop() {
				now += 700
				s.Take(local.At(now), l, 1)
			}
		})
	}
}
