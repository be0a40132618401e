package chaos

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

const (
	// 90 % of the limit is what is to be expected and what Row.Recovery waits for. A run fails below this: seconds of load with some dozens of
	// other processes on a few processors scatter.
	leastUsed = 0.8

	warmCheck = time.Millisecond
	// What go-redis and the loops keep may differ by a few.
	goroutinesMore = 15
	heapMore       = 4 << 20
	// An instance may have 64 abandoned calls of a domain linger, and 16 flights in the air.
	goroutinesPeak = 2 * (64 + 16) * instances
)

// findings are what is wrong with a row: broken says what no machine excuses, short what a machine that did not let the load run does.
func (r *Row) findings(f Fault, w *World) (broken, short []string) {
	find := func(to *[]string, bad bool, format string, args ...any) {
		if bad {
			*to = append(*to, fmt.Sprintf(format, args...))
		}
	}
	find(&broken, r.Overshoot > r.Allowed, "overshoot %d, allowed %d", r.Overshoot, r.Allowed)
	find(&broken, r.Errors > 0, "%d checks returned an error", r.Errors)
	find(&broken, r.SparedOvershoot > 0, "overshoot %d of keys that were spared", r.SparedOvershoot)

	short = append(short, w.shorts...)
	if !f.Loose {
		full := f.Course == Steady || f.Course == Shares
		find(&short, r.Before < leastUsed, "%.3f of the limit admitted before the fault", r.Before)
		find(&short, full && r.During < leastUsed, "%.3f of the limit admitted during the fault", r.During)
		find(&short, r.After < leastUsed*f.present(w), "%.3f of the limit admitted after the fault", r.After)
		find(&short, r.Recovery < 0 || r.Recovery > f.recover(), "back after %v, want %v", r.Recovery, f.recover())
	}
	find(&short, (f.Course == Away || f.Course == Shares) && r.Notice == 0, "nobody noticed")
	find(&short, len(w.Spared) > 0 && r.Spared < leastUsed, "%.3f of the limit admitted of the keys that were spared", r.Spared)
	find(&short, r.SparedFallback > 0, "%d checks of keys that were spared were decided without Redis", r.SparedFallback)
	find(&short, r.SparedP999 >= w.Timeout, "a check of a key that was spared took %v at p99.9", r.SparedP999)
	find(&short, r.P999 > warmCheck, "a warm key took %v at p99.9", r.P999)
	find(&short, r.Slowest > w.Timeout+250*time.Millisecond, "a check took %v with a timeout of %v", r.Slowest, w.Timeout)
	find(&short, r.HeapBytes > heapMore, "%d bytes of heap more than before", r.HeapBytes)
	find(&short, r.Goroutines > goroutinesMore, "%d goroutines more than before", r.Goroutines)
	find(&short, r.Peak > goroutinesPeak, "%d goroutines more than before during the fault", r.Peak)
	return broken, short
}

// A jury judges rows. Figures of rows whose load the machine did not let run are not judged, nor are those under the race detector, which
// makes everything ten times slower.
type jury struct{ rows, dismissed atomic.Int64 }

// newJury fails the test in the end if more than a third of the rows fell short and could not be judged.
func newJury(t *testing.T) *jury {
	j := new(jury)
	t.Cleanup(func() {
		if all, out := j.rows.Load(), j.dismissed.Load(); !raceEnabled && 3*out > all {
			t.Errorf("the figures of %d of %d runs could not be judged: this machine is too busy for the suite", out, all)
		}
	})
	return j
}

func (j *jury) judge(t *testing.T, f Fault, w *World, r *Row) {
	t.Helper()
	if raceEnabled {
		r.NotJudged = "the race detector slows everything down"
	}
	broken, short := r.findings(f, w)
	r.Findings = broken
	if r.NotJudged == "" {
		r.Findings = slices.Concat(broken, short)
	}
	t.Log(r)
	for _, fault := range broken {
		t.Error(fault)
	}
	j.rows.Add(1)
	if len(short) > 0 && r.NotJudged != "" {
		j.dismissed.Add(1)
		t.Logf("not judged: %s", r.NotJudged)
	}
	for _, fault := range short {
		if r.NotJudged != "" {
			t.Log(fault)
		} else {
			t.Error(fault)
		}
	}
	if t.Failed() {
		t.Logf("seed %d", r.Seed)
	}
}

// String is one line for logs.
func (r *Row) String() string {
	return fmt.Sprintf("overshoot %d of %d allowed; used %.3f before, %.3f during, %.3f after; noticed after %v, back after %v; warm p99.9 %v, slowest check %v; goroutines %+d, at most %+d, heap %+d kB; failures %d",
		r.Overshoot, r.Allowed, r.Before, r.During, r.After, r.Notice.Round(time.Millisecond), r.Recovery.Round(time.Millisecond), r.P999, r.Slowest.Round(100*time.Microsecond),
		r.Goroutines, r.Peak, r.HeapBytes/1024, r.Failures)
}
