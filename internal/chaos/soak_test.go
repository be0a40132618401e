package chaos

import (
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// TIERLIMIT_SOAK says for how long; "make soak" asks for half an hour.
func TestSoak(t *testing.T) {
	length := 12 * time.Second
	if v := os.Getenv("TIERLIMIT_SOAK"); v != "" {
		var err error
		if length, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	} else {
		t.Logf("%v; TIERLIMIT_SOAK=30m makes it that", length)
	}
	r := Soak(t, redistest.ProcessBackend{}, length)
	if r.Rounds == 0 || r.Checks == 0 || len(r.Samples) == 0 {
		t.Errorf("nothing was done: %+v", r)
	}
}

// A soak finds a fleet that breaks the promise on purpose.
func TestSoakCatchesAPlainVariant(t *testing.T) {
	t.Parallel()
	s := newSoak(t, redistest.ProcessBackend{})
	s.options = append(s.options, tierlimit.WithFallback(tierlimit.FallbackOpen))
	s.begin()
	s.round(drawn{faults: []Fault{{Name: "kill", Begin: kill, End: restart}}, last: 2 * time.Second})
	s.end()
	for _, l := range s.limits {
		if !slices.ContainsFunc(s.result.Findings, func(f string) bool { return strings.Contains(f, l.String()+": overshoot") }) {
			t.Errorf("%v: not caught: %q", l, s.result.Findings)
		}
	}
}

// What a ledger finds round by round is what the checker finds in the whole history.
func TestLedgerOverlooksNothing(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	over := map[tierlimit.Algorithm]int{}
	for range 100 {
		for _, l := range limits() {
			l.Rate, l.Burst = 20, 20
			const rounds = 6
			end := int64(rounds * 2 * time.Second)
			// About as much as is allowed, now and then more: some histories keep the limit, some do not.
			var whole []envelope.Admission
			mean := float64(l.Period) / float64(2*l.Rate) * (1 + 1.5*rnd.Float64())
			for at := int64(0); at < end; at += int64(mean * 2 * rnd.Float64()) {
				took := int64(rnd.IntN(1000))
				if rnd.IntN(20) == 0 {
					took = rnd.Int64N(int64(150 * time.Millisecond))
				}
				whole = append(whole, envelope.Admission{Called: at, Returned: at + took, Cost: 1 + int64(rnd.IntN(12)/11), Key: rnd.Uint64N(2)})
			}
			want := envelope.Check(fleet.Envelope(l), whole).Overshoot
			led, got, sum := ledger{limit: l}, int64(0), int64(0)
			for i := range int64(rounds) {
				from, to := end/rounds*i, end/rounds*(i+1)
				if i == rounds-1 {
					to = end * 2
				}
				var part []envelope.Admission
				for _, a := range whole {
					if a.Returned >= from && a.Returned < to || i == 0 && a.Returned < from {
						part = append(part, a)
					}
				}
				byKey := led.add(part)
				over := led.judge(byKey, func(*fleet.Result) int64 { return 0 }).overshoot
				got, sum = max(got, over), sum+over
				led.close(byKey, to)
			}
			if want > 0 {
				over[l.Algorithm]++
			}
			// What went beyond a bucket in one round is not told again in the next.
			if got > want || !isBucket(l) && got < want || sum < want-rounds || want > rounds && got == 0 {
				t.Fatalf("%v: %d in rounds, %d in all of them, %d as a whole", l, got, sum, want)
			}
		}
	}
	for _, l := range limits() {
		if n := over[l.Algorithm]; n < 3 || n > 97 {
			t.Errorf("%v: %d of 100 histories break the limit: too tame, or too wild", l, n)
		}
	}
}

// A slow leak shows in the trend, noise and what fills at the beginning do not.
func TestTrends(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	samples := func(spoil func(i int, s *Sample)) *SoakResult {
		r := new(SoakResult)
		for i := range 100 {
			s := Sample{
				At: time.Duration(i) * 20 * time.Second, Heap: 10<<20 + rnd.Int64N(4<<20), Goroutines: 80 + rnd.Int64N(6),
				Keys: 60 + rnd.Int64N(30), TTL: 30*time.Second + time.Duration(rnd.Int64N(int64(10*time.Second))),
			}
			if i < 15 {
				s.Heap -= 8 << 20
			}
			if i%17 == 0 {
				s.Goroutines += 100
			}
			spoil(i, &s)
			r.Samples = append(r.Samples, s)
		}
		return r
	}
	for _, tc := range []struct {
		want  string
		spoil func(i int, s *Sample)
	}{
		{"", func(int, *Sample) {}},
		{"heap", func(i int, s *Sample) { s.Heap += int64(i) * 40 << 10 }},
		{"goroutines", func(i int, s *Sample) { s.Goroutines += int64(i) / 10 }},
		{"keys", func(i int, s *Sample) { s.Keys += int64(i) / 2 }},
		{"longest", func(i int, s *Sample) { s.TTL += time.Duration(i) * 100 * time.Millisecond }},
	} {
		found := samples(tc.spoil).trends()
		if tc.want == "" && len(found) > 0 || tc.want != "" && (len(found) != 1 || !strings.HasPrefix(found[0], tc.want)) {
			t.Errorf("want %q: %q", tc.want, found)
		}
	}
}
