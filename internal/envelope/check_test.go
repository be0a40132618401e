package envelope

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const second = int64(time.Second)

func at(t, cost int64) Admission { return Admission{Called: t, Returned: t, Cost: cost} }

func during(from, to, cost int64) Admission { return Admission{Called: from, Returned: to, Cost: cost} }

func TestCheckTable(t *testing.T) {
	bucket := Limit{Kind: TokenBucket, Rate: 2, Period: 10, Burst: 5} // a token every 5 ticks
	fixed := Limit{Kind: FixedWindow, Rate: 5, Period: 10}
	log := Limit{Kind: SlidingLog, Rate: 5, Period: 10}
	weighted := Limit{Kind: SlidingWindow, Rate: 5, Period: 10}
	quarters := Limit{Kind: SlidingWindow, Rate: 5, Period: 40, SubWindows: 4}
	tests := []struct {
		name    string
		limit   Limit
		history []Admission
		want    int64
	}{
		{"nothing happened", bucket, nil, 0},
		{"only a refund", bucket, []Admission{at(3, -9)}, 0},
		{"cost 0", fixed, []Admission{at(3, 0)}, 0},

		{"bucket: the burst at once", bucket, []Admission{at(0, 5)}, 0},
		{"bucket: one more", bucket, []Admission{at(0, 5), at(0, 1)}, 1},
		{"bucket: refilled to the tick", bucket, []Admission{at(0, 5), at(5, 1)}, 0},
		{"bucket: a fifth of a token early", bucket, []Admission{at(0, 5), at(4, 1)}, 1},
		{"bucket: idle time is not saved up", bucket, []Admission{at(0, 1), at(1000, 5), at(1000, 1)}, 1},
		{"bucket: the interval explains it", bucket, []Admission{at(0, 5), during(3, 5, 1)}, 0},
		{"bucket: the interval is too short", bucket, []Admission{at(0, 5), during(3, 4, 1)}, 1},
		{"bucket: long calls nested in one another", bucket, []Admission{during(0, 100, 5), during(10, 90, 5), during(20, 80, 5), during(30, 70, 5)}, 0},
		{"bucket: too much even for all of it", bucket, []Admission{during(0, 10, 3), during(0, 10, 3), during(0, 10, 3)}, 2},
		{"bucket: a cost above the burst in a long call", bucket, []Admission{during(0, 1000, 6)}, 1},
		{"bucket: refunded before", bucket, []Admission{at(0, 5), at(1, -2), at(2, 2)}, 0},
		{"bucket: refunded after", bucket, []Admission{at(0, 5), at(1, 2), at(2, -2)}, 2},
		{"bucket: refunded perhaps before", bucket, []Admission{at(0, 5), at(1, 2), during(1, 9, -2)}, 0},
		{"bucket: a refund does not lift it above full", bucket, []Admission{at(0, 1), at(50, -5), at(51, 6)}, 1},
		{"leaky bucket alike", Limit{Kind: LeakyBucket, Rate: 2, Period: 10, Burst: 5}, []Admission{at(0, 5), at(4, 1)}, 1},
		{"rate 0 allows nothing", Limit{Kind: TokenBucket, Period: 10, Burst: 5}, []Admission{at(0, 1)}, 1},

		{"fixed: full on both sides of a boundary", fixed, []Admission{at(9, 5), at(10, 5)}, 0},
		{"fixed: one too many", fixed, []Admission{at(0, 5), at(9, 1)}, 1},
		{"fixed: before the epoch", fixed, []Admission{at(-10, 5), at(-1, 1), at(0, 5)}, 1},
		{"fixed: a call over the boundary", fixed, []Admission{at(0, 5), during(9, 10, 1), at(11, 5)}, 0},
		{"fixed: refunded in the next window", fixed, []Admission{at(0, 6), at(10, -1)}, 1},
		{"fixed: refunded too late in the window", fixed, []Admission{at(0, 6), at(9, -1)}, 1},
		{"fixed: refunded in time", fixed, []Admission{at(0, 5), at(3, -1), at(9, 1)}, 0},

		{"log: half open", log, []Admission{at(0, 5), at(10, 5)}, 0},
		{"log: a tick early", log, []Admission{at(0, 5), at(9, 5)}, 5},
		{"log: may have been a tick later", log, []Admission{at(0, 5), during(9, 10, 5)}, 0},
		{"log: may have been a tick sooner", log, []Admission{during(-1, 0, 5), at(9, 5)}, 0},
		{"log: a refund at the same instant explains only itself", log, []Admission{at(3, 4), at(3, 4), at(3, -1)}, 2},
		{"log: the refund has nothing to undo", log, []Admission{at(1, -5), at(2, 6)}, 1},

		{"weighted: the window before counts in part", weighted, []Admission{at(0, 5), at(16, 3)}, 0},
		{"weighted: a tenth too early", weighted, []Admission{at(0, 5), at(15, 3)}, 1},
		{"weighted: long past", weighted, []Admission{at(0, 5), at(20, 5)}, 0},
		{"weighted: the call may have been in the window before", weighted, []Admission{during(9, 12, 5), at(18, 4)}, 0},
		{"weighted: in either window it counts", weighted, []Admission{during(9, 12, 5), at(18, 5)}, 1},
		{"weighted: refund of the window before counts in part", weighted, []Admission{at(0, 5), at(1, -5), at(2, 5), at(16, 4)}, 1},
		{"weighted: a refund in flight", weighted, []Admission{at(0, 5), at(16, 4), during(15, 30, -2)}, 0},
		{"quarters: whole ones count whole", quarters, []Admission{at(0, 5), at(39, 1)}, 1},
		{"quarters: the oldest in part", quarters, []Admission{at(0, 5), at(48, 4)}, 0},
		{"quarters: the oldest in part, one too many", quarters, []Admission{at(0, 5), at(48, 5)}, 1},
		{"quarters: a call over two whole ones counts whole", quarters, []Admission{during(8, 12, 3), at(35, 3)}, 1},

		{"a tick blurs", Limit{Kind: SlidingLog, Rate: 1, Period: 2000, Tick: 1000}, []Admission{at(1900, 1), at(3100, 1)}, 0},
		{"without it", Limit{Kind: SlidingLog, Rate: 1, Period: 2000}, []Admission{at(1900, 1), at(3100, 1)}, 1},
		{"returned before called", log, []Admission{during(5, 3, 6)}, 1},
		{"no limit at all", Limit{}, []Admission{at(0, 7)}, 7},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			v := Check(test.limit, test.history)
			if v.Overshoot != test.want {
				t.Errorf("overshoot %d, want %d: %v", v.Overshoot, test.want, v)
			}
			if test.limit.Validate() != nil {
				return
			}
			if brute := max(0, bruteOvershoot(test.limit, test.history)); brute != test.want {
				t.Errorf("the definition says %d, want %d", brute, test.want)
			}
		})
	}
}

func TestCheckNamesTheWorstKeyAndMoment(t *testing.T) {
	l := Limit{Kind: TokenBucket, Rate: 1, Period: time.Second, Burst: 10}
	history := []Admission{
		{Called: 0, Returned: 1, Cost: 10, Key: 1},
		{Called: 5, Returned: 6, Cost: 10, Key: 2},
		{Called: 7 * second, Returned: 7*second + 5, Cost: 9, Key: 2},
		{Called: 0, Returned: 1, Cost: 11, Key: 3},
		{Called: 20 * second, Returned: 20 * second, Cost: 1, Key: 3},
	}
	v := Check(l, history)
	if want := (Verdict{Overshoot: 2, Key: 2, From: 5, To: 7*second + 5, Admitted: 19}); v != want {
		t.Errorf("got %+v, want %+v", v, want)
	}
	if s := v.String(); !strings.HasPrefix(s, "overshoot 2: key 0x2, 19 admitted in 7s [5, 7000000005]") {
		t.Error(s)
	}
	v = Check(l, history[:1])
	if want := (Verdict{Key: 1, From: 0, To: 1, Admitted: 10}); v != want {
		t.Errorf("within the limit: got %+v, want %+v", v, want)
	}
	if s := v.String(); !strings.HasPrefix(s, "within the limit") {
		t.Error(s)
	}
}

//go:embed testdata/model.json
var modelJSON []byte

// The sweeps of testdata/model.py were written apart from this package and know nothing of intervals: on points both must agree, slack
// included.
func TestPointHistoriesEqualTheModel(t *testing.T) {
	var cases []struct {
		Kind                       Kind
		Rate, Period, Burst, Worst int64
		History                    [][2]int64
	}
	if err := json.Unmarshal(modelJSON, &cases); err != nil {
		t.Fatal(err)
	}
	over := map[Kind]int{}
	for i, c := range cases {
		l := Limit{Kind: c.Kind, Rate: c.Rate, Period: time.Duration(c.Period), Burst: c.Burst}
		var history []Admission
		for _, h := range c.History {
			history = append(history, at(h[0], h[1]))
		}
		var s sweep
		v, _ := s.judge(l, history)
		if v.Overshoot != c.Worst {
			t.Errorf("case %d, %v: %d, the model says %d", i, l, v.Overshoot, c.Worst)
		}
		if c.Worst > 0 {
			over[c.Kind]++
		}
	}
	for _, k := range []Kind{TokenBucket, FixedWindow, SlidingWindow, SlidingLog} {
		if over[k] < 10 {
			t.Errorf("only %d cases overshoot a %v: the cases are too tame", over[k], k)
		}
	}
}

// bruteOvershoot is the definition in doc.go word by word: every x, every y, every instant inside every interval. Negative when
// there was room; the least int64 when nothing was admitted.
func bruteOvershoot(l Limit, history []Admission) int64 {
	if len(history) == 0 {
		return math.MinInt64
	}
	hist := make([]Admission, 0, len(history))
	first, last := int64(math.MaxInt64), int64(math.MinInt64)
	for _, a := range history {
		a.Called, a.Returned = min(a.Called, a.Returned), max(a.Called, a.Returned)
		if l.Tick > 1 {
			a.Called -= ((a.Called % int64(l.Tick)) + int64(l.Tick)) % int64(l.Tick)
		}
		first, last = min(first, a.Called), max(last, a.Returned)
		hist = append(hist, a)
	}
	p, k := int64(l.Period), max(1, int64(l.SubWindows))
	div := func(a, b int64) int64 { return int64(math.Floor(float64(a) / float64(b))) } // small numbers only
	// weight, in 1/s of a token, of what happens at t in the estimate at y
	s := p / k
	weight := func(t, y int64) int64 {
		switch j, i := div(y, s), div(t, s); {
		case t > y || i < j-k:
			return 0
		case i == j-k:
			return s - (y - j*s)
		}
		return s
	}
	worst := int64(math.MinInt64)
	for _, a := range hist {
		if a.Cost > 0 {
			capacity := l.Rate
			if l.Kind <= LeakyBucket && l.Rate > 0 {
				capacity = l.Burst
			}
			worst = max(worst, a.Cost-capacity)
		}
	}
	if worst == math.MinInt64 {
		return worst
	}
	ys := map[int64]bool{}
	xs := map[int64]bool{}
	for _, a := range hist { // every instant of short histories, the neighbourhood of every end of long ones
		for d := int64(-1); d <= 1; d++ {
			ys[a.Called+d], ys[a.Returned+d], xs[a.Called+d], xs[a.Returned+d] = true, true, true, true
		}
	}
	if last-first < 100 {
		for i := first - 1; i <= last+1; i++ {
			xs[i], ys[i] = true, true
		}
	}
	for y := range ys {
		for x := range xs {
			if x > y || l.Kind == FixedWindow && div(x, p) != div(y, p) || l.Kind == SlidingLog && y-x >= p {
				continue
			}
			num, den := int64(0), int64(1) // what was admitted
			something := false
			for _, a := range hist {
				certain, possible := a.Called >= x && a.Returned <= y, a.Returned >= x && a.Called <= y
				if a.Cost > 0 && certain {
					something = true
				}
				switch {
				case l.Kind == SlidingWindow:
					den = s
					least, most := int64(math.MaxInt64), int64(0)
					for t := a.Called; t <= a.Returned; t++ {
						least, most = min(least, weight(t, y)), max(most, weight(t, y))
					}
					if a.Cost > 0 && certain {
						num += a.Cost * least
					} else if a.Cost < 0 && possible {
						num += a.Cost * most
					}
				case a.Cost > 0 && certain, a.Cost < 0 && possible:
					num += a.Cost
				}
			}
			if !something {
				continue
			}
			allowed := big.NewRat(l.Rate, 1)
			if l.Kind <= LeakyBucket {
				allowed = big.NewRat(l.Rate*(y-x), p)
				if l.Rate > 0 {
					allowed.Add(allowed, big.NewRat(l.Burst, 1))
				}
			}
			excess := new(big.Rat).Sub(big.NewRat(num, den), allowed)
			up := new(big.Int).Add(excess.Num(), excess.Denom())
			up.Sub(up, big.NewInt(1))
			worst = max(worst, new(big.Int).Div(up, excess.Denom()).Int64())
		}
	}
	return worst
}

func drawLimit(t *rapid.T) Limit {
	l := Limit{
		Kind: Kind(rapid.IntRange(1, 5).Draw(t, "kind")),
		Rate: rapid.Int64Range(0, 8).Draw(t, "rate"),
	}
	switch {
	case l.Kind.bucket():
		l.Period = time.Duration(rapid.IntRange(1, 12).Draw(t, "period"))
		l.Burst = rapid.Int64Range(0, 9).Draw(t, "burst")
	case l.Kind == SlidingWindow:
		l.SubWindows = rapid.IntRange(1, 4).Draw(t, "sub-windows")
		l.Period = time.Duration(l.SubWindows * rapid.IntRange(1, 8).Draw(t, "sub-window"))
	default:
		l.Period = time.Duration(rapid.IntRange(1, 15).Draw(t, "period"))
	}
	return l
}

func TestCheckEqualsTheDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLimit(t)
		l.Tick = time.Duration(rapid.SampledFrom([]int{0, 0, 0, 3}).Draw(t, "tick"))
		lowest := rapid.SampledFrom([]int64{1, 1, -4}).Draw(t, "lowest cost")
		latest := rapid.SampledFrom([]int64{-15, 30}).Draw(t, "latest") // crowded or spread out
		history := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Admission {
			called := rapid.Int64Range(-20, latest).Draw(t, "called")
			return during(called, called+rapid.SampledFrom([]int64{0, 0, 1, 3, 8, 20}).Draw(t, "lasted"), rapid.Int64Range(lowest, 6).Draw(t, "cost"))
		}), 0, 9).Draw(t, "history")
		v := Check(l, history)
		if want := max(0, bruteOvershoot(l, history)); v.Overshoot != want {
			t.Fatalf("%+v: the definition says %d", v, want)
		}
		if v.Overshoot > 0 && (v.From > v.To || v.Admitted < v.Overshoot) {
			t.Fatalf("%+v makes no sense", v)
		}
	})
}

// No choice of instants may do better than the verdict: all of them are tried, as points.
func TestNoChoiceOfInstantsExplainsAnOvershoot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLimit(t)
		history := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Admission {
			called := rapid.Int64Range(-5, 20).Draw(t, "called")
			return during(called, called+rapid.Int64Range(0, 4).Draw(t, "lasted"), rapid.Int64Range(1, 6).Draw(t, "cost"))
		}), 1, 5).Draw(t, "history")
		verdict := Check(l, history).Overshoot
		least := int64(math.MaxInt64)
		points := make([]Admission, len(history))
		var choose func(i int)
		choose = func(i int) {
			if i == len(history) {
				var s sweep
				v, _ := s.judge(l, points) // on points this is the model's sweep: see the tests above
				least = min(least, max(0, v.Overshoot))
				return
			}
			for p := history[i].Called; p <= history[i].Returned; p++ {
				points[i] = at(p, history[i].Cost)
				choose(i + 1)
			}
		}
		choose(0)
		if verdict > least {
			t.Fatalf("overshoot %d, but some choice has only %d", verdict, least)
		}
	})
}

// ideal is the plainest limiter for each algorithm, at known instants. It takes refunds as the design says: never above full, windows the
// current one and never below 0 spent.
type ideal struct {
	l           Limit
	level, last int64           // buckets, in 1/Period of a token
	counts      map[int64]int64 // windows
	log         [][2]int64      // instant, tokens
	oldestFirst bool            // which entry of the log a refund lowers
}

func newIdeal(l Limit) *ideal {
	return &ideal{l: l, level: l.Burst * int64(l.Period), last: -1 << 30, counts: map[int64]int64{}}
}

func (i *ideal) refill(now int64) {
	i.level = min(i.l.Burst*int64(i.l.Period), i.level+i.l.Rate*(now-i.last))
	i.last = now
}

func (i *ideal) allow(now, n int64) bool {
	l := i.l
	if l.Rate == 0 {
		return false
	}
	p := int64(l.Period)
	switch l.Kind {
	case FixedWindow:
		w := floorDiv(now, p)
		if i.counts[w]+n > l.Rate {
			return false
		}
		i.counts[w] += n
	case SlidingWindow:
		s, k := l.sub()
		j := floorDiv(now, s)
		estimate := i.counts[j-k] * (s - (now - j*s))
		for m := j - k + 1; m <= j; m++ {
			estimate += i.counts[m] * s
		}
		if estimate+n*s > l.Rate*s {
			return false
		}
		i.counts[j] += n
	case SlidingLog:
		for len(i.log) > 0 && i.log[0][0] <= now-p {
			i.log = i.log[1:]
		}
		sum := n
		for _, e := range i.log {
			sum += e[1]
		}
		if sum > l.Rate {
			return false
		}
		i.log = append(i.log, [2]int64{now, n})
	default:
		i.refill(now)
		if n*p > i.level {
			return false
		}
		i.level -= n * p
	}
	return true
}

func (i *ideal) refund(now, n int64) {
	switch i.l.Kind {
	case FixedWindow, SlidingWindow:
		s, _ := i.l.sub()
		w := floorDiv(now, s)
		i.counts[w] = max(0, i.counts[w]-n)
	case SlidingLog:
		for m := range i.log {
			e := &i.log[m]
			if !i.oldestFirst {
				e = &i.log[len(i.log)-1-m]
			}
			if e[0] > now-int64(i.l.Period) {
				back := min(n, e[1])
				e[1] -= back
				n -= back
			}
		}
	default:
		i.refill(now)
		i.level = min(i.l.Burst*int64(i.l.Period), i.level+n*int64(i.l.Period))
	}
}

// A limiter that keeps its promise is never blamed, however vague the record of what it did.
func TestIdealLimiterIsNeverBlamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLimit(t)
		judge := newIdeal(l)
		judge.oldestFirst = rapid.Bool().Draw(t, "oldest first")
		vague := rapid.SampledFrom([]int64{0, 2, 20}).Draw(t, "vague")
		now := rapid.Int64Range(-40, 0).Draw(t, "start")
		var history []Admission
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.SampledFrom([]int64{0, 0, 1, 1, 2, 7, 40}).Draw(t, "later")
			n := rapid.Int64Range(-3, 6).Draw(t, "cost")
			switch {
			case n < 0:
				judge.refund(now, -n)
			case n == 0 || !judge.allow(now, n):
				continue
			}
			history = append(history, during(now-rapid.Int64Range(0, vague).Draw(t, "before"), now+rapid.Int64Range(0, vague).Draw(t, "after"), n))
		}
		if v := Check(l, history); v.Overshoot != 0 {
			t.Fatalf("%v: %v", l, v)
		}
	})
}

// On a record of instants the checker blames exactly what the ideal limiter refuses: one token too many is found, at any moment of a
// history that is otherwise the fullest the limit allows.
func TestPlantedOvershootOfOneIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLimit(t)
		judge := newIdeal(l)
		now := rapid.Int64Range(-40, 0).Draw(t, "start")
		var history []Admission
		refused := 0
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now += rapid.SampledFrom([]int64{0, 1, 1, 2, 7}).Draw(t, "later")
			for judge.allow(now, 1) {
				history = append(history, at(now, 1))
			}
			refused++
			if v := Check(l, append(slices.Clip(history), at(now, 1))); v.Overshoot != 1 {
				t.Fatalf("%v at %d: %v", l, now, v)
			}
		}
		if v := Check(l, history); v.Overshoot != 0 {
			t.Fatalf("%v: %v", l, v)
		}
	})
}

// The same in the units of a fleet run: wall-clock nanoseconds, many keys, calls that take a millisecond, one token too many in a hundred
// thousand.
func TestPlantedOvershootOfOneInAFleetRun(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	start := int64(1_700_000_000) * second
	for _, l := range []Limit{
		{Kind: TokenBucket, Rate: 1000, Period: time.Second, Burst: 1000},
		{Kind: LeakyBucket, Rate: 7000, Period: 3 * time.Second, Burst: 10},
		{Kind: FixedWindow, Rate: 1000, Period: time.Second},
		{Kind: SlidingWindow, Rate: 1000, Period: time.Second, SubWindows: 10},
		{Kind: SlidingLog, Rate: 1000, Period: time.Second},
	} {
		t.Run(l.Kind.String(), func(t *testing.T) {
			var history []Admission
			for key := range uint64(4) {
				judge := newIdeal(l)
				judge.last = start - second
				for now := start; now < start+3*second; now += 2 * int64(time.Millisecond) {
					for n := int64(1); n < 4 && judge.allow(now, n); n++ {
						history = append(history, Admission{Called: now - rng.Int64N(1e6), Returned: now + rng.Int64N(1e6), Cost: n, Key: key, Instance: int32(now % 7)})
					}
				}
			}
			rng.Shuffle(len(history), func(i, j int) { history[i], history[j] = history[j], history[i] })
			if v := Check(l, history); v.Overshoot != 0 {
				t.Fatal(v)
			}
			// Within 50 ms in the midst of a second, so that no call straddles anything. How much room is left there varies: the first
			// one too many is found by halving, and must be an overshoot of 1.
			extra := make([]Admission, 1<<12)
			for i := range extra {
				from := start + second + 500*int64(time.Millisecond) + rng.Int64N(49e6)
				extra[i] = Admission{Called: from, Returned: from + rng.Int64N(1e6), Cost: 1, Key: 3}
			}
			planted := func(n int) Verdict { return Check(l, slices.Concat(history, extra[:n])) }
			n := sort.Search(len(extra), func(n int) bool { return planted(n).Overshoot > 0 })
			if v := planted(n); v.Overshoot != 1 || v.Key != 3 {
				t.Fatalf("%v after planting %d", v, n)
			}
			t.Logf("%d records, the planted token number %d was one too many", len(history), n)
		})
	}
}

func TestCheckAtTheEndsOfTheRange(t *testing.T) {
	const e15 = int64(1e15)
	year := 365 * 24 * time.Hour
	tests := []struct {
		name    string
		limit   Limit
		history []Admission
		want    int64
	}{
		{"a third of a token short after ten years", Limit{Kind: TokenBucket, Rate: e15, Period: 10 * year, Burst: e15},
			[]Admission{at(-int64(5*year), e15), at(int64(5*year), e15)}, 0},
		{"and a nanosecond sooner", Limit{Kind: TokenBucket, Rate: e15, Period: 10 * year, Burst: e15},
			[]Admission{at(-int64(5*year), e15), at(int64(5*year)-1, e15)}, 1},
		{"1e15 a microsecond for 60 years", Limit{Kind: TokenBucket, Rate: e15, Period: time.Microsecond, Burst: e15},
			[]Admission{at(0, e15), at(1999, e15), at(int64(60*year), e15), at(int64(60*year), 1)}, 1},
		{"sums beyond 64 bits", Limit{Kind: FixedWindow, Rate: math.MaxInt64, Period: year},
			[]Admission{at(0, math.MaxInt64), at(1, math.MaxInt64), at(2, math.MaxInt64)}, math.MaxInt64},
		{"weights beyond 64 bits", Limit{Kind: SlidingWindow, Rate: e15, Period: 10 * year},
			[]Admission{at(0, e15), at(int64(15*year), e15/2), at(int64(15*year), 1)}, 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if v := Check(test.limit, test.history); v.Overshoot != test.want {
				t.Errorf("overshoot %d, want %d: %v", v.Overshoot, test.want, v)
			}
		})
	}
}

func TestAdmitted(t *testing.T) {
	history := []Admission{during(0, 5, 2), during(5, 11, 4), {Called: 6, Returned: 7, Cost: 8, Key: 1}, at(8, -1), during(12, 10, 16)}
	for _, test := range []struct{ from, to, want int64 }{
		{0, 10, 9}, {1, 10, 7}, {0, 11, 13}, {0, 12, 29}, {6, 6, 0}, {9, 3, 0},
	} {
		if got := Admitted(history, test.from, test.to); got != test.want {
			t.Errorf("Admitted(%d, %d) = %d, want %d", test.from, test.to, got, test.want)
		}
	}
}

func TestDemandable(t *testing.T) {
	tests := []struct {
		limit    Limit
		from, to int64
		want     int64
	}{
		{Limit{Kind: TokenBucket, Rate: 100, Period: time.Second, Burst: 50}, 0, 10 * second, 1050},
		{Limit{Kind: LeakyBucket, Rate: 3, Period: 2 * time.Second, Burst: 1}, 5, second + 5, 2},
		{Limit{Kind: TokenBucket, Rate: 3, Period: time.Second}, 0, second, 0},
		{Limit{Kind: TokenBucket, Period: time.Second, Burst: 5}, 0, second, 0},
		{Limit{Kind: FixedWindow, Rate: 10, Period: time.Second}, 0, 3 * second, 30},
		{Limit{Kind: FixedWindow, Rate: 10, Period: time.Second}, second / 2, 3*second + 1, 40},
		{Limit{Kind: FixedWindow, Rate: 10, Period: time.Second}, -1, 1, 20},
		{Limit{Kind: SlidingLog, Rate: 10, Period: time.Second}, 7, 3*second + 7, 30},
		{Limit{Kind: SlidingLog, Rate: 10, Period: time.Second}, 7, 3*second + 8, 40},
		{Limit{Kind: SlidingWindow, Rate: 10, Period: time.Second}, 0, 3 * second, 10 + 9 + 9},
		{Limit{Kind: SlidingWindow, Rate: 10, Period: time.Second}, 0, second + second/2, 10 + 4},
		{Limit{Kind: SlidingWindow, Rate: 1, Period: time.Second}, 0, 10 * second, 5},
		{Limit{Kind: SlidingWindow, Rate: 10, Period: time.Second, SubWindows: 2}, 0, 2 * second, 10 + 0 + 9 + 1},
		{Limit{Kind: FixedWindow, Rate: 10, Period: time.Second}, 5, 5, 0},
		{Limit{Kind: FixedWindow, Rate: math.MaxInt64, Period: 1}, 0, 1 << 60, math.MaxInt64},
		{Limit{}, 0, second, 0},
	}
	for _, test := range tests {
		if got := Demandable(test.limit, test.from, test.to); got != test.want {
			t.Errorf("Demandable(%+v, %d, %d) = %d, want %d", test.limit, test.from, test.to, got, test.want)
		}
	}
}

// Demandable is what the ideal limiter admits when somebody asks at every tick, and that history is within the limit.
func TestDemandableIsWhatTheIdealAdmits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLimit(t)
		from := rapid.Int64Range(-30, 30).Draw(t, "from")
		to := from + rapid.Int64Range(1, 60).Draw(t, "lasts")
		end := to - 1
		if l.Kind.bucket() {
			end = to // closed: what is refilled at to itself counts
		}
		judge := newIdeal(l)
		var history []Admission
		for now := from; now <= end; now++ {
			for judge.allow(now, 1) {
				history = append(history, at(now, 1))
			}
		}
		want := Admitted(history, from, end)
		got := Demandable(l, from, to)
		// Asked at every tick only, a bucket may overflow between two ticks; asked at every instant, as Demandable's is, it never does.
		overflows := l.Kind.bucket() && int64(l.Period)-1+l.Rate > l.Burst*int64(l.Period)
		if got < want || got > want && !overflows {
			t.Fatalf("Demandable %d, the ideal limiter admitted %d", got, want)
		}
		if v := Check(l, history); v.Overshoot != 0 {
			t.Fatal(v)
		}
	})
}

func TestWideAgainstBig(t *testing.T) {
	toBig := func(w wide) *big.Int {
		n := new(big.Int).Lsh(big.NewInt(w.hi), 64)
		return n.Add(n, new(big.Int).SetUint64(w.lo))
	}
	corner := rapid.OneOf(rapid.Int64(), rapid.SampledFrom([]int64{0, 1, -1, math.MaxInt64, math.MinInt64}))
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := corner.Draw(t, "a"), corner.Draw(t, "b"), corner.Draw(t, "c")
		A, B, C := big.NewInt(a), big.NewInt(b), big.NewInt(c)
		sum := widen(a).add(widen(b))
		if want := new(big.Int).Add(A, B); toBig(sum).Cmp(want) != 0 {
			t.Fatalf("%d + %d = %v", a, b, toBig(sum))
		} else if got := sum.clamp(); want.IsInt64() && got != want.Int64() || !want.IsInt64() && got != map[int]int64{1: math.MaxInt64, -1: math.MinInt64}[want.Sign()] {
			t.Fatalf("clamp(%v) = %d", want, got)
		}
		diff := sum.sub(widen(c))
		if want := new(big.Int).Sub(toBig(sum), C); toBig(diff).Cmp(want) != 0 {
			t.Fatalf("difference %v, want %v", toBig(diff), want)
		}
		if got, want := diff.less(sum), toBig(diff).Cmp(toBig(sum)) < 0; got != want {
			t.Fatalf("less = %v", got)
		}
		if c > 0 {
			if got, want := big.NewInt(floorDiv(a, c)), new(big.Int).Div(A, C); got.Cmp(want) != 0 { // Euclidean is floor for c > 0
				t.Fatalf("floorDiv(%d, %d) = %v", a, c, got)
			}
		}
		ub, uc := uint64(b), max(1, uint64(c))
		q, r := mulDiv(uint64(a)>>1, ub, uc)
		wq, wr := new(big.Int).QuoRem(new(big.Int).Mul(new(big.Int).SetUint64(uint64(a)>>1), new(big.Int).SetUint64(ub)), new(big.Int).SetUint64(uc), new(big.Int))
		if toBig(q).Cmp(wq) != 0 || new(big.Int).SetUint64(r).Cmp(wr) != 0 {
			t.Fatalf("mulDiv: %v rest %d, want %v rest %v", toBig(q), r, wq, wr)
		}
	})
}

func TestKeyID(t *testing.T) {
	if got := KeyID("foobar"); got != 0x85944171f73967e8 { // published FNV-1a vector
		t.Errorf("%#x", got)
	}
}

func BenchmarkCheck(b *testing.B) {
	for _, kind := range []Kind{TokenBucket, SlidingWindow, SlidingLog} {
		for _, n := range []int{10_000, 1_000_000} {
			b.Run(fmt.Sprintf("kind=%v/n=%d", kind, n), func(b *testing.B) {
				rng := rand.New(rand.NewPCG(1, 2))
				history := make([]Admission, n)
				for i := range history {
					called := rng.Int64N(100 * second)
					history[i] = during(called, called+rng.Int64N(1e6), 1)
				}
				l := Limit{Kind: kind, Rate: int64(n) / 100, Period: time.Second, Burst: int64(n) / 100}
				b.ReportAllocs()
				for b.Loop() {
					Check(l, history)
				}
			})
		}
	}
}
