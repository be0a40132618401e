package chaos

import (
	"context"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// sound is a row with which nothing is wrong.
func sound() Row {
	return Row{Before: 0.95, During: 0.95, After: 0.95, Notice: time.Millisecond, Recovery: time.Second, P999: time.Microsecond, Slowest: timeout}
}

// Every figure that is promised can fail a row, and by itself.
func TestFindings(t *testing.T) {
	shares, steady := Fault{Course: Shares}, Fault{Course: Steady}
	for _, tc := range []struct {
		name          string
		f             Fault
		spoil         func(*Row)
		broken, short int
	}{
		{"nothing", shares, func(*Row) {}, 0, 0},
		{"nothing", steady, func(*Row) {}, 0, 0},
		{"one token beyond", shares, func(r *Row) { r.Overshoot = 1 }, 1, 0},
		{"what a loss allows", shares, func(r *Row) { r.Overshoot, r.Allowed = 5, 5 }, 0, 0},
		{"beyond what a loss allows", shares, func(r *Row) { r.Overshoot, r.Allowed = 6, 5 }, 1, 0},
		{"an error", shares, func(r *Row) { r.Errors = 1 }, 1, 0},
		{"too few before", shares, func(r *Row) { r.Before = 0.79 }, 0, 1},
		{"too few by shares", shares, func(r *Row) { r.During = 0.79 }, 0, 1},
		{"too few though nothing should be seen", steady, func(r *Row) { r.During = 0.79 }, 0, 1},
		{"few while it is away", Fault{Course: Away}, func(r *Row) { r.During = 0 }, 0, 0},
		{"too few after", shares, func(r *Row) { r.After = 0.79 }, 0, 1},
		{"the dead one's share is gone", Fault{Dead: 1}, func(r *Row) { r.After = 0.7 }, 0, 0},
		{"more than the dead one's share is gone", Fault{Dead: 1}, func(r *Row) { r.After = 0.55 }, 0, 1},
		{"nobody noticed", shares, func(r *Row) { r.Notice = 0 }, 0, 1},
		{"not back in time", shares, func(r *Row) { r.Recovery = 2001 * time.Millisecond }, 0, 1},
		{"never back", shares, func(r *Row) { r.Recovery = -1 }, 0, 1},
		{"a warm key waits", shares, func(r *Row) { r.P999 = 2 * time.Millisecond }, 0, 1},
		{"a check outlasts its timeout", shares, func(r *Row) { r.Slowest = time.Second }, 0, 1},
		{"one token beyond of a key that is spared", shares, func(r *Row) { r.SparedOvershoot = 1 }, 1, 0},
		{"a key that is spared falls back", shares, func(r *Row) { r.SparedFallback = 1 }, 0, 1},
		{"a key that is spared waits", shares, func(r *Row) { r.SparedP999 = timeout }, 0, 1},
		{"goroutines stay", shares, func(r *Row) { r.Goroutines = 16 }, 0, 1},
		{"goroutines pile up", shares, func(r *Row) { r.Peak = 1000 }, 0, 1},
		{"heap stays", shares, func(r *Row) { r.HeapBytes = 5 << 20 }, 0, 1},
	} {
		row := sound()
		tc.spoil(&row)
		broken, short := row.findings(tc.f, newWorld(t, tc.f, limits()[0]))
		if len(broken) != tc.broken || len(short) != tc.short {
			t.Errorf("%s: broken %q, short %q, want %d and %d", tc.name, broken, short, tc.broken, tc.short)
		}
	}
}

// The suite finds what it is there to find: fleets that break the promise on purpose are caught, by a run like any other's. Were the
// load too weak, or the fault too short, these would pass.
func TestPlainVariantsAreCaught(t *testing.T) {
	outage := Fault{Name: "kill", Topology: Single, Server: persist, For: 2 * time.Second, Begin: kill, End: restart}
	open, now, closed := outage, outage, outage
	open.Options = []tierlimit.Option{tierlimit.WithFallback(tierlimit.FallbackOpen)}
	now.Options = []tierlimit.Option{tierlimit.WithFallback(tierlimit.FallbackShareNow)}
	closed.Course, closed.For = Shares, 4*time.Second
	closed.Options = []tierlimit.Option{tierlimit.WithFallback(tierlimit.FallbackClosed)}
	leak := Fault{Name: "leak", Topology: Single, For: time.Second, Begin: func(w *World) error {
		pprof.Do(context.Background(), pprof.Labels(label, w.Prefix), func(context.Context) {
			for range 3 * goroutinesMore {
				go func() { <-w.TB.Context().Done() }()
			}
		})
		return nil
	}}
	// A bucketful admitted at once, besides what is.
	double := Fault{Name: "double", Topology: Single, For: time.Second, Begin: func(w *World) error {
		for range w.Limit.Burst {
			now := envelope.Now()
			_ = w.extra.memory.Record(envelope.Admission{Called: now, Returned: now, Cost: 1, Key: envelope.KeyID("hot")})
		}
		return nil
	}}
	for _, tc := range []struct {
		name string
		f    Fault
		l    tierlimit.Limit
		want string
	}{
		{"admits everything", open, limits()[0], "overshoot"},
		{"shares at once", now, limits()[2], "overshoot"},
		{"denies everything", closed, limits()[0], "of the limit admitted during"},
		{"leaks goroutines", leak, limits()[1], "goroutines more"},
		{"admits twice", double, limits()[3], "overshoot"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			const tries = 4 // where in a window a fault begins is chance
			for range tries {
				w := newWorld(t, tc.f, tc.l)
				w.start(redistest.ProcessBackend{}, tc.f)
				row := w.endure(tc.f)
				broken, short := row.findings(tc.f, w)
				t.Log(row, broken, short)
				if slices.ContainsFunc(append(broken, short...), func(s string) bool { return strings.Contains(s, tc.want) }) {
					return
				}
			}
			t.Errorf("not caught in %d runs", tries)
		})
	}
}

// A seed draws the same faults for the same lengths again, another draws others, and none that loses anything if nothing may be lost.
func TestDraws(t *testing.T) {
	some := func(seed uint64, losses bool) (names []string) {
		next := draws(seed, losses)
		for range 200 {
			d := next()
			names = append(names, fmt.Sprint(d.last, d.rest))
			for _, f := range d.faults {
				names = append(names, f.Name)
				if !losses && f.Allowed != nil {
					t.Errorf("%s was drawn", f.Name)
				}
			}
			if d.last < 20*time.Millisecond || d.last > 3*time.Second || d.rest < 10*time.Millisecond || d.rest > 2*time.Second {
				t.Errorf("lasts %v, rests %v", d.last, d.rest)
			}
		}
		return names
	}
	for _, losses := range []bool{false, true} {
		if a, b := some(1, losses), some(1, losses); !slices.Equal(a, b) {
			t.Errorf("a seed drew two sequences: %q and %q", a[:4], b[:4])
		}
		if slices.Equal(some(1, losses), some(2, losses)) {
			t.Error("two seeds drew the same sequence")
		}
		names := some(1, losses)
		for _, f := range singleFaults() {
			if may := f.random == onServer || f.random == onNetwork || losses && f.random == onMemory; may != slices.Contains(names, f.Name) {
				t.Errorf("%s, with losses %t: drawn within 200 is %t", f.Name, losses, !may)
			}
		}
	}
}

// Each run has a name of its own, without spaces, and each algorithm has its turn.
func TestRuns(t *testing.T) {
	t.Setenv("TIERLIMIT_CONTAINERS", "") // which take some of the runs under the race detector
	seen, turns := map[string]bool{}, map[tierlimit.Algorithm]int{}
	for _, r := range runs(redistest.ProcessBackend{}) {
		if seen[r.name()] {
			t.Errorf("two runs are called %s", r.name())
		}
		seen[r.name()] = true
		turns[r.limit.Algorithm]++
		if strings.ContainsAny(r.name(), " _") {
			t.Errorf("%q: want words with dashes between", r.name())
		}
	}
	for _, l := range limits() {
		if turns[l.Algorithm] < 5 {
			t.Errorf("%v: %d runs", l.Algorithm, turns[l.Algorithm])
		}
	}
}
