package main

import (
	"cmp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// A ledger counts what became of the lines of each key that were sent. All keys are known before the run, so the workers that write
// need no lock.
type ledger struct {
	keys map[string]*fate
	waits
}

// A fate is what became of the lines of one key.
type fate struct {
	admitted atomic.Int64
	limited  atomic.Int64 // denied by the limit
	away     atomic.Int64 // denied without Redis
	failed   atomic.Int64 // no answer
}

func newLedger(keys map[string]int64, timeout time.Duration) *ledger {
	l := &ledger{keys: make(map[string]*fate, len(keys)), waits: waits{timeout: timeout}}
	for k := range keys {
		l.keys[k] = new(fate)
	}
	return l
}

// record takes down one answer.
func (l *ledger) record(a fleet.Answer) {
	l.waits.record(a)
	f := l.keys[a.Key]
	switch {
	case a.Err != nil:
		f.failed.Add(1)
	case a.Result.Allowed:
		f.admitted.Add(1)
	case a.Result.Source == tierlimit.Fallback:
		f.away.Add(1)
	default:
		f.limited.Add(1)
	}
}

// A limitedKey is a key with what became of its lines.
type limitedKey struct {
	key                           string
	sent, admitted, limited, away int64
}

// A census is what became of the keys.
type census struct {
	most          []limitedKey // with most lines denied by the limit
	limited       int          // keys denied anything by the limit
	awayOnly      int          // keys denied anything without Redis, and nothing by the limit
	byLimit, away int64        // lines denied
}

// census sums up the ledger after a run.
func (l *ledger) census(top int) census {
	var c census
	for key, f := range l.keys {
		k := limitedKey{key: key, admitted: f.admitted.Load(), limited: f.limited.Load(), away: f.away.Load()}
		k.sent = k.admitted + k.limited + k.away + f.failed.Load()
		c.byLimit += k.limited
		c.away += k.away
		switch {
		case k.limited > 0:
			c.most = append(c.most, k)
		case k.away > 0:
			c.awayOnly++
		}
	}
	c.limited = len(c.most)
	slices.SortFunc(c.most, func(a, b limitedKey) int {
		return cmp.Or(cmp.Compare(b.limited, a.limited), strings.Compare(a.key, b.key))
	})
	c.most = c.most[:min(top, len(c.most))]
	return c
}

// waits counts the checks that waited for Redis until their time was up. A Result does not tell them from those that were decided without
// asking: the source of both is Fallback.
type waits struct {
	timeout  time.Duration
	timedOut atomic.Int64
}

func (w *waits) record(a fleet.Answer) {
	// The times are of a clock that may be slewed: a tenth is left for that.
	if a.Err == nil && a.Result.Source == tierlimit.Fallback && a.Returned-a.Called >= int64(w.timeout)*9/10 {
		w.timedOut.Add(1)
	}
}

// unasked is how many checks were decided without asking Redis, of which timedOut are not.
func unasked(c fleet.Counts, timedOut int64) int64 {
	return max(0, c.Checks-c.Errors-c.Remote()-timedOut)
}
