package bench

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// A Load says how checks are made: back to back by so many goroutines.
type Load struct {
	Goroutines int
	For        time.Duration
	Every      int // one check in so many is timed
}

// An Outcome is what a Load came to.
type Outcome struct {
	Checks  int64
	Other   int64 // whose answer was not the wanted one
	Elapsed time.Duration
	Latency *hdrhistogram.Histogram // nanoseconds; of the checks that were timed
}

// PerCheck is wall time by checks: the inverse of the throughput.
func (o Outcome) PerCheck() time.Duration { return o.Elapsed / time.Duration(max(1, o.Checks)) }

// NewHistogram holds 1 ns to 100 s with two digits.
func NewHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(100*time.Second), 2) }

// Drive checks keys in their order, each goroutine from another place on.
func Drive(k *Keys, allow func(key string) bool, load Load) Outcome {
	var (
		stop  atomic.Bool
		ready sync.WaitGroup
		done  sync.WaitGroup
		begin = make(chan struct{})
		parts = make([]Outcome, load.Goroutines)
	)
	for g := range parts {
		ready.Add(1)
		done.Go(func() {
			// What a goroutine counts stays on its own stack until the end: neighbours in parts share cache lines.
			o := Outcome{Latency: NewHistogram()}
			i := g * (len(k.order)/len(parts) + 1)
			ready.Done()
			<-begin
			for !stop.Load() {
				started := time.Now()
				ok := allow(k.At(i))
				_ = o.Latency.RecordValue(int64(time.Since(started))) // out of range is impossible: a check that takes 100 s
				if !ok {
					o.Other++
				}
				i++
				for range load.Every - 1 {
					if !allow(k.At(i)) {
						o.Other++
					}
					i++
				}
				o.Checks += int64(load.Every)
				if load.Every > 1 && load.Goroutines > 1 {
					// As a request's goroutine would, and the sooner everybody's turn comes: a thousand that go on until they are
					// preempted would keep whoever waits for Redis, or works for all, waiting for ten seconds.
					runtime.Gosched()
				}
			}
			parts[g] = o
		})
	}
	ready.Wait()
	started := time.Now()
	t := time.AfterFunc(load.For, func() { stop.Store(true) })
	defer t.Stop()
	close(begin)
	done.Wait()
	all := Outcome{Elapsed: time.Since(started), Latency: NewHistogram()}
	for _, o := range parts {
		all.Checks += o.Checks
		all.Other += o.Other
		all.Latency.Merge(o.Latency)
	}
	return all
}

// each calls f for 0 to n-1, by many goroutines at once.
func each(n int, f func(i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, 512) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				f(int(i))
			}
		})
	}
	wg.Wait()
}
