package tierlimit

import (
	"encoding/json"
	"errors"
	"flag"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier"
)

const tenYears = 10 * 365 * 24 * time.Hour

func TestLimitConstructors(t *testing.T) {
	for _, tc := range []struct {
		got  Limit
		want Limit
		text string
	}{
		{TokenBucket(100, time.Second), Limit{AlgorithmTokenBucket, 100, time.Second, 100, 0}, "100/s"},
		{TokenBucket(100, time.Second).WithBurst(200), Limit{AlgorithmTokenBucket, 100, time.Second, 200, 0}, "100/s burst 200"},
		{LeakyBucket(7, 1500*time.Millisecond).WithBurst(3), Limit{AlgorithmLeakyBucket, 7, 1500 * time.Millisecond, 3, 0}, "7/1500ms leaky-bucket burst 3"},
		{FixedWindow(10, time.Minute), Limit{AlgorithmFixedWindow, 10, time.Minute, 10, 0}, "10/min fixed-window"},
		{SlidingWindow(3, time.Minute), Limit{AlgorithmSlidingWindow, 3, time.Minute, 3, 1}, "3/min sliding-window"},
		{SlidingWindow(3, time.Minute).WithSubWindows(6), Limit{AlgorithmSlidingWindow, 3, time.Minute, 3, 6}, "3/min sliding-window sub-windows 6"},
		{SlidingLog(5000, time.Hour), Limit{AlgorithmSlidingLog, 5000, time.Hour, 5000, 0}, "5000/h sliding-log"},
		{TokenBucket(0, time.Second), Limit{AlgorithmTokenBucket, 0, time.Second, 0, 0}, "0/s"},
		{SlidingWindow(0, time.Hour), Limit{AlgorithmSlidingWindow, 0, time.Hour, 0, 1}, "0/h sliding-window"},
		{TokenBucket(maxTokens, tenYears), Limit{AlgorithmTokenBucket, 1e15, tenYears, 1e15, 0}, "1000000000000000/3650d"},
		{TokenBucket(1, time.Microsecond), Limit{AlgorithmTokenBucket, 1, time.Microsecond, 1, 0}, "1/us"},
		{FixedWindow(1, 500*time.Millisecond), Limit{AlgorithmFixedWindow, 1, 500 * time.Millisecond, 1, 0}, "1/500ms fixed-window"},
		{FixedWindow(1, 90*time.Minute), Limit{AlgorithmFixedWindow, 1, 90 * time.Minute, 1, 0}, "1/90min fixed-window"},
		{Unlimited(), Limit{AlgorithmTokenBucket, 1e15, time.Microsecond, 1e15, 0}, "unlimited"},
		{Unlimited().WithBurst(5), Limit{AlgorithmTokenBucket, 1e15, time.Microsecond, 5, 0}, "1000000000000000/us burst 5"},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: got %+v, want %+v", tc.text, tc.got, tc.want)
		}
		if err := tc.got.Validate(); err != nil {
			t.Errorf("%s: Validate: %v", tc.text, err)
		}
		if got := tc.got.String(); got != tc.text {
			t.Errorf("String of %+v: got %q, want %q", tc.got, got, tc.text)
		}
		if got, err := ParseLimit(tc.text); err != nil || got != tc.got {
			t.Errorf("ParseLimit(%q): got %+v, %v, want %+v", tc.text, got, err, tc.got)
		}
	}
}

// Every fault is named, none is corrected, and a limit with several faults says all of them.
func TestLimitValidateFaults(t *testing.T) {
	for _, tc := range []struct {
		name  string
		limit Limit
		want  []string
	}{
		{"zero", Limit{}, []string{"zero Limit"}},
		{"unknown algorithm", Limit{9, 1, time.Second, 1, 0}, []string{"algorithm 9 is unknown"}},
		{"no algorithm", Limit{0, 1, time.Second, 1, 0}, []string{"algorithm 0 is unknown"}},
		{"negative rate", TokenBucket(-1, time.Second), []string{"rate -1 is negative", "burst -1 is negative"}},
		{"rate above", TokenBucket(maxTokens+1, time.Second), []string{"rate 1000000000000001 is above", "burst 1000000000000001 is above"}},
		{"rate overflow", FixedWindow(math.MaxInt64, time.Second), []string{"rate 9223372036854775807 is above", "burst"}},
		{"burst above", TokenBucket(1, time.Second).WithBurst(maxTokens + 1), []string{"burst 1000000000000001 is above"}},
		{"negative burst", TokenBucket(1, time.Second).WithBurst(-7), []string{"burst -7 is negative"}},
		{"explicit burst 0", TokenBucket(1, time.Second).WithBurst(0), []string{"burst 0 with rate 1"}},
		{"explicit burst 0, leaky", LeakyBucket(1, time.Second).WithBurst(0), []string{"burst 0 with rate 1"}},
		{"burst without rate", TokenBucket(0, time.Second).WithBurst(5), []string{"burst 5 with rate 0"}},
		{"burst on a window", FixedWindow(10, time.Second).WithBurst(20), []string{"burst 20 on a fixed-window"}},
		{"burst 0 on a window", SlidingLog(10, time.Second).WithBurst(0), []string{"burst 0 on a sliding-log"}},
		{"no period", TokenBucket(1, 0), []string{"period 0s is not positive"}},
		{"negative period", FixedWindow(1, -time.Second), []string{"period -1s is not positive"}},
		{"1 ns", SlidingLog(1, time.Nanosecond), []string{"period 1ns is not whole microseconds"}},
		{"1.5 us", SlidingLog(1, 1500*time.Nanosecond), []string{"period 1.5µs is not whole microseconds"}},
		{"too long", SlidingLog(1, tenYears+time.Microsecond), []string{"longer than ten years"}},
		{"longest Duration", SlidingLog(1, math.MaxInt64/1000*1000), []string{"longer than ten years"}},
		{"sub-windows on a bucket", TokenBucket(1, time.Second).WithSubWindows(1), []string{"1 sub-windows on a token-bucket"}},
		{"sub-windows on a log", SlidingLog(1, time.Second).WithSubWindows(2), []string{"2 sub-windows on a sliding-log"}},
		{"0 sub-windows", SlidingWindow(1, time.Second).WithSubWindows(0), []string{"0 sub-windows"}},
		{"-1 sub-windows", SlidingWindow(1, time.Second).WithSubWindows(-1), []string{"-1 sub-windows"}},
		{"101 sub-windows", SlidingWindow(1, 101*time.Second).WithSubWindows(101), []string{"101 sub-windows"}},
		{"uneven", SlidingWindow(1, time.Second).WithSubWindows(3), []string{"3 sub-windows do not divide the window of 1s"}},
		{"several", SlidingWindow(-1, 1).WithBurst(-3).WithSubWindows(1000), []string{"rate -1", "period 1ns", "burst -3", "1000 sub-windows"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.limit.Validate()
			if !errors.Is(err, ErrLimit) {
				t.Fatalf("got %v, want an ErrLimit", err)
			}
			faults := strings.Split(err.Error(), "\n")
			if len(faults) != len(tc.want) {
				t.Errorf("got %d faults, want %d:\n%v", len(faults), len(tc.want), err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in:\n%v", want, err)
				}
			}
			for _, joined := range err.(interface{ Unwrap() []error }).Unwrap() {
				if !errors.Is(joined, ErrLimit) {
					t.Errorf("%v does not wrap ErrLimit", joined)
				}
			}
			if text, err := tc.limit.MarshalText(); err == nil {
				t.Errorf("MarshalText: got %q, want an error", text)
			}
			if got, err := ParseLimit(tc.limit.String()); err == nil {
				t.Errorf("String of an invalid limit parsed, to %+v", got)
			}
		})
	}
}

func TestParseLimit(t *testing.T) {
	for _, tc := range []struct {
		text string
		want Limit
	}{
		{"100/s burst 200", TokenBucket(100, time.Second).WithBurst(200)},
		{"5000/1h sliding-log", SlidingLog(5000, time.Hour)},
		{"10/min fixed-window", FixedWindow(10, time.Minute)},
		{"3/60s sliding-window sub-windows 6", SlidingWindow(3, time.Minute).WithSubWindows(6)},
		{"3/60s sub-windows 6 sliding-window", SlidingWindow(3, time.Minute).WithSubWindows(6)},
		{"7/1500ms leaky-bucket burst 3", LeakyBucket(7, 1500*time.Millisecond).WithBurst(3)},
		{"7/1500ms burst 3 leaky-bucket", LeakyBucket(7, 1500*time.Millisecond).WithBurst(3)},
		{"7/1.5s token-bucket", TokenBucket(7, 1500*time.Millisecond)},
		{" \t100 / s\r\n", TokenBucket(100, time.Second)},
		{"1_000/sec", TokenBucket(1000, time.Second)},
		{"10k/second burst 2M", TokenBucket(10_000, time.Second).WithBurst(2_000_000)},
		{"1G/day", TokenBucket(1_000_000_000, 24*time.Hour)},
		{"1/minute", TokenBucket(1, time.Minute)},
		{"1/m", TokenBucket(1, time.Minute)},
		{"1/hour", TokenBucket(1, time.Hour)},
		{"1/30days", TokenBucket(1, 30*24*time.Hour)},
		{"1/1d12h", TokenBucket(1, 36*time.Hour)},
		{"1/1h30m", TokenBucket(1, 90*time.Minute)},
		{"1/0.25d", TokenBucket(1, 6*time.Hour)},
		{"1/2us", TokenBucket(1, 2*time.Microsecond)},
		{"1/2µs", TokenBucket(1, 2*time.Microsecond)},
		{"1/2μs", TokenBucket(1, 2*time.Microsecond)},
		{"1/1000ns", TokenBucket(1, time.Microsecond)},
		{"1/3650d", TokenBucket(1, tenYears)},
		{"00010/01s", TokenBucket(10, time.Second)},
		{"0/s burst 0", TokenBucket(0, time.Second)},
		{"0/s fixed-window", FixedWindow(0, time.Second)},
		{"10/s fixed-window burst 10", FixedWindow(10, time.Second)},
		{"1_000_000_000_000_000/us", Unlimited()},
		{" unlimited ", Unlimited()},
	} {
		got, err := ParseLimit(tc.text)
		if err != nil || got != tc.want {
			t.Errorf("ParseLimit(%q): got %+v, %v, want %+v", tc.text, got, err, tc.want)
		}
	}
}

func TestParseLimitFaults(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"", "at 1: it is empty"},
		{"  ", "at 3: it is empty"},
		{"100", `at 1: "100" is not a limit`},
		{"unlimited burst 3", "at 11: unlimited stands alone"},
		{"infinite", `at 1: "infinite" is not a limit`},
		{"/s", "at 1: the rate is missing"},
		{"-5/s", "is negative"},
		{"+5/s", "at 1: the rate"},
		{"1.5/s", "at 2: the rate"},
		{"1e3/s", "at 2: the rate"},
		{"_1/s", "at 1: the rate"},
		{"1_/s", "at 2: the rate"},
		{"1__0/s", "at 3: the rate"},
		{"k/s", "at 1: the rate"},
		{"1kk/s", "at 2: the rate"},
		{"1_k/s", "at 2: the rate"},
		{"1 000/s", "at 2: the rate"},
		{"1000000000000001/s", "at 1: the rate"},
		{"99999999999999999999999999/s", "at 1: the rate"},
		{"1000000G/s", ""},
		{"1000001G/s", "at 1: the rate"},
		{"100/", "at 5: the period is missing"},
		{"100/  ", "at 7: the period is missing"},
		{"100/-1s", "at 5: the period"},
		{"100/0s", "period 0s is not positive"},
		{"100/5", "at 6: the end is not a unit"},
		{"100/fortnight", "at 5: the period"},
		{"100/1y", `at 6: "y" is not a unit`},
		{"100/s5", "at 5: the period"},
		{"100/ms1s", "at 5: the period"},
		{"100/1.s", "at 5: the period"},
		{"100/.5s", "at 5: the period"},
		{"100/1h.5m", "at 7: the period"},
		{"100/1ns", "period 1ns is not whole microseconds"},
		{"100/0.5ns", "not whole nanoseconds"},
		{"100/1.00000000000000000001s", "not whole nanoseconds"},
		{"100/3651d", "longer than ten years"},
		{"100/3650d1us", "longer than ten years"},
		{"100/99999999999999999999d99999999999999999999d", "longer than ten years"},
		{"100/s burst", "at 12: the burst is missing"},
		{"100/s burst 0", "burst 0 with rate 100"},
		{"0/s burst 5", "burst 5 with rate 0"},
		{"100/s burst x", "at 13: the burst"},
		{"100/s burst 1 burst 1", "at 15: "},
		{"100/s fixed-window sliding-log", "at 20: "},
		{"100/s fixed-window burst 5", "burst 5 on a fixed-window"},
		{"100/s sub-windows 3", "3 sub-windows on a token-bucket"},
		{"100/s sub-windows 0", "at 19: 0 sub-windows"},
		{"100/s sliding-window sub-windows 101", "at 34: 101 sub-windows"},
		{"100/s sliding-window sub-windows 3", "do not divide"},
		{"100/s sliding-window sub-windows 2 sub-windows 2", "at 36: "},
		{"100/s Fixed-Window", "at 7: "},
		{"100/s/s", `"s/s"`},
		{"100/s " + strings.Repeat("x", 1000), `xxx..."`},
		{"1\x00/s", "at 2: "},
	} {
		got, err := ParseLimit(tc.text)
		if tc.want == "" {
			if err != nil {
				t.Errorf("ParseLimit(%q): %v", tc.text, err)
			}
			continue
		}
		if !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("ParseLimit(%q): got %v, want ErrLimit with %q", tc.text, err, tc.want)
		}
		if got != (Limit{}) {
			t.Errorf("ParseLimit(%q): got %+v beside an error", tc.text, got)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("ParseLimit(%.20q): an error of %d bytes", tc.text, len(err.Error()))
		}
	}
}

func TestLimitText(t *testing.T) {
	type config struct {
		API Limit `json:"api"`
	}
	in := config{SlidingLog(5000, time.Hour)}
	text, err := json.Marshal(in)
	if err != nil || string(text) != `{"api":"5000/h sliding-log"}` {
		t.Fatalf("got %s, %v", text, err)
	}
	var out config
	if err := json.Unmarshal(text, &out); err != nil || out != in {
		t.Fatalf("got %+v, %v, want %+v", out, err, in)
	}
	if err := json.Unmarshal([]byte(`{"api":"5000/h sliding-lag"}`), &out); !errors.Is(err, ErrLimit) || out != in {
		t.Fatalf("got %+v, %v, want ErrLimit and nothing changed", out, err)
	}
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	var limit Limit
	flags.TextVar(&limit, "limit", Unlimited(), "")
	if err := flags.Parse([]string{"-limit", "10/min fixed-window"}); err != nil || limit != FixedWindow(10, time.Minute) {
		t.Fatalf("got %v, %v", limit, err)
	}
}

func TestLimitTier(t *testing.T) {
	for a := AlgorithmTokenBucket; a <= AlgorithmSlidingLog; a++ {
		l := Limit{a, 3, time.Second, 3, 0}
		got := l.tier()
		if want := (tier.Limit{Algorithm: tier.Algorithm(a), Rate: 3, Period: time.Second, Burst: 3}); got != want {
			t.Errorf("%v: got %+v, want %+v", a, got, want)
		}
		if got.Algorithm.Bucket() != a.bucket() {
			t.Errorf("%v: the tiers number the algorithms otherwise", a)
		}
	}
	if tier.Algorithms != len(algorithmNames)-1 {
		t.Errorf("the tiers have %d algorithms, the root %d", tier.Algorithms, len(algorithmNames)-1)
	}
	if got := SlidingWindow(5, time.Minute).WithSubWindows(6).tier(); got.SubWindows != 6 || got.Capacity() != 5 {
		t.Errorf("got %+v", got)
	}
}

func TestLimitStrings(t *testing.T) {
	for _, tc := range []struct{ got, want string }{
		{AlgorithmLeakyBucket.String(), "leaky-bucket"},
		{Algorithm(0).String(), "Algorithm(0)"},
		{Algorithm(200).String(), "Algorithm(200)"},
		{Local.String() + Remote.String() + Fallback.String(), "localremotefallback"},
		{Source(0).String(), "Source(0)"},
		{Result{Allowed: true, Limit: 10, Remaining: 9, Source: Local}.String(), "allowed 9/10 (local)"},
		{Result{Limit: 10, RetryAfter: 6 * time.Second, Source: Remote}.String(), "denied 0/10, retry after 6s (remote)"},
		{Result{Limit: 10, Remaining: 10, RetryAfter: Never, Source: Fallback}.String(), "denied 10/10, never (fallback)"},
		{Result{Allowed: true, Shadowed: true, Limit: 3, Debt: 2, Delay: time.Second, Source: Remote}.String(), "shadowed 0/3, debt 2, delay 1s (remote)"},
		{Bound{Outage: 3, Silence: time.Second, Leased: true}.String(), "overshoot 0, outage 3, memory loss 0, stranded 0, silence 1s, leased true"},
	} {
		if tc.got != tc.want {
			t.Errorf("got %q, want %q", tc.got, tc.want)
		}
	}
}

// anyLimit draws valid limits, the corners of every range included.
func anyLimit(t *rapid.T) Limit {
	tokens := rapid.OneOf(rapid.Int64Range(0, 20), rapid.Int64Range(0, maxTokens), rapid.SampledFrom([]int64{1, 999_999_999_999_999, maxTokens}))
	units := rapid.SampledFrom([]int64{1, 1000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000})
	unit := units.Draw(t, "unit")
	us := rapid.OneOf(rapid.Int64Range(1, min(100, tenYears.Microseconds()/unit)), rapid.Int64Range(1, tenYears.Microseconds()/unit)).Draw(t, "units") * unit
	period := time.Duration(us) * time.Microsecond
	rate := tokens.Draw(t, "rate")
	switch a := Algorithm(rapid.IntRange(1, 5).Draw(t, "algorithm")); a {
	case AlgorithmTokenBucket, AlgorithmLeakyBucket:
		l := Limit{Algorithm: a, Rate: rate, Period: period, Burst: rate}
		if rate > 0 && rapid.Bool().Draw(t, "with burst") {
			l = l.WithBurst(max(1, tokens.Draw(t, "burst")))
		}
		return l
	case AlgorithmFixedWindow:
		return FixedWindow(rate, period)
	case AlgorithmSlidingLog:
		return SlidingLog(rate, period)
	}
	var divisors []int
	for k := 1; k <= maxSubWindows; k++ {
		if us%int64(k) == 0 {
			divisors = append(divisors, k)
		}
	}
	return SlidingWindow(rate, period).WithSubWindows(rapid.SampledFrom(divisors).Draw(t, "sub-windows"))
}

func TestLimitRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLimit(t)
		if err := l.Validate(); err != nil {
			t.Fatalf("%#v: %v", l, err)
		}
		got, err := ParseLimit(l.String())
		if err != nil || got != l {
			t.Fatalf("%q: got %#v, %v, want %#v", l.String(), got, err, l)
		}
	})
}

// A limit with one field spoilt is refused or is another valid limit; it never panics, and never passes as what it is not.
func TestLimitAnyFields(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limit{
			Algorithm:  Algorithm(rapid.IntRange(0, 7).Draw(t, "algorithm")),
			Rate:       rapid.Int64().Draw(t, "rate"),
			Period:     time.Duration(rapid.Int64().Draw(t, "period")),
			Burst:      rapid.Int64().Draw(t, "burst"),
			SubWindows: rapid.Int().Draw(t, "sub-windows"),
		}
		got, err := ParseLimit(l.String())
		if invalid := l.Validate(); invalid == nil && (err != nil || got != l) || invalid != nil && err == nil {
			t.Fatalf("%#v: Validate %v, String %q, ParseLimit %#v, %v", l, invalid, l.String(), got, err)
		}
	})
}

// FuzzParseLimit: whatever is accepted is valid and round-trips, whatever is refused is an ErrLimit of bounded length.
func FuzzParseLimit(f *testing.F) {
	for _, text := range []string{"100/s burst 200", "5000/1h sliding-log", "10/min fixed-window", "3/60s sliding-window sub-windows 6",
		"7/1500ms leaky-bucket burst 3", "unlimited", "1_000k/1.5d", "0/µs", "1/1h30m0.5s", "-1/s", "1/", "/"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		l, err := ParseLimit(text)
		if err != nil {
			if !errors.Is(err, ErrLimit) || l != (Limit{}) || len(err.Error()) > 1000 {
				t.Fatalf("%q: got %#v, %v", text, l, err)
			}
			return
		}
		if err := l.Validate(); err != nil {
			t.Fatalf("%q: accepted %#v: %v", text, l, err)
		}
		if again, err := ParseLimit(l.String()); err != nil || again != l {
			t.Fatalf("%q: %#v shows as %q, which reads as %#v, %v", text, l, l.String(), again, err)
		}
		if slices.Contains(strings.Fields(text), "burst") && !l.Algorithm.bucket() && l.Burst != l.Rate {
			t.Fatalf("%q: a window with a burst of its own: %#v", text, l)
		}
	})
}
