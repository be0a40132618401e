package chaos

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// asides are the checks of the keys that the fault must not touch.
type asides struct {
	mu      sync.Mutex
	all     []aside
	slowest time.Duration // the longest that one of their servers took for a PING: then it is the machine that is slow, or its disk
}

type aside struct {
	called   int64
	took     time.Duration
	fallback bool
}

// answered takes every check of the fleet.
func (w *World) answered(a fleet.Answer) {
	if !slices.Contains(w.Spared, a.Key) {
		return
	}
	w.asides.mu.Lock()
	defer w.asides.mu.Unlock()
	w.asides.all = append(w.asides.all, aside{a.Called, time.Duration(a.Returned - a.Called), a.Result.Source == tierlimit.Fallback})
}

// attend looks at a server to which nothing is done, until the test ends.
func (w *World) attend(server int) {
	var beside sync.WaitGroup
	w.TB.Cleanup(beside.Wait)
	beside.Go(func() {
		_ = w.Admin(server, func(_ context.Context, rdb *redis.Client) error {
			for sleep(w.TB.Context(), 20*time.Millisecond) == nil {
				start := time.Now()
				if rdb.Ping(w.TB.Context()).Err() != nil {
					continue
				}
				took := time.Since(start)
				w.asides.mu.Lock()
				w.asides.slowest = max(w.asides.slowest, took)
				w.asides.mu.Unlock()
			}
			return nil
		})
	})
}

// measureSpared completes a row by what became of the keys that are spared, from the fault's begin to the end of the load.
func (w *World) measureSpared(row *Row, r *fleet.Result) {
	if len(w.Spared) == 0 {
		return
	}
	part := only(r, w.Spared)
	row.SparedKeys, row.SparedSeries = len(w.Spared), series(part)
	row.Spared = part.Utilisation(w.Limit, w.Begun, r.Ended)
	row.SparedOvershoot = part.Verdict(w.Limit).Overshoot
	var latency fleet.Histogram
	w.asides.mu.Lock()
	defer w.asides.mu.Unlock()
	for _, a := range w.asides.all {
		if a.called < w.Begun {
			continue
		}
		latency.Record(a.took)
		if a.fallback {
			row.SparedFallback++
		}
	}
	row.SparedP999 = latency.Percentile(99.9)
	if slowest := w.asides.slowest; row.NotJudged == "" && slowest > 20*time.Millisecond {
		row.NotJudged = fmt.Sprintf("a server to which nothing was done took %v for a PING", slowest)
	}
}
