package bench

import (
	"bytes"
	"context"
	"runtime/pprof"
	"strconv"
	"testing"
	"time"

	"github.com/google/pprof/profile"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// BenchmarkLoop is what the background loop takes of a processor, and with it all that it starts. process-% is the whole process, the
// callers of the benchmark included. ns/op means nothing here.
func BenchmarkLoop(b *testing.B) {
	leased := min(100_000, *manyKeys)
	b.Run("case=idle", func(b *testing.B) {
		if first(b) {
			return
		}
		// Held for a minute, so that the keys stay leased while nobody asks for them.
		_, l := labelled(b, tierlimit.WithLeaseTTL(time.Minute))
		for range 2 {
			each(leased, func(i int) { _, _ = l.Allow(background, Key(i)) })
		}
		time.Sleep(time.Second)
		loopShare(b, func() { time.Sleep(benchTime()) })
	})
	b.Run("case=churn", func(b *testing.B) {
		if first(b) {
			return
		}
		const perTick = 10 // of a millisecond: 10,000 new keys a second
		_, l := labelled(b)
		keys := make(chan int, 10_000)
		defer close(keys)
		for range 256 {
			go func() {
				for i := range keys {
					_, _ = l.Allow(background, "new-"+strconv.Itoa(i))
				}
			}()
		}
		n := 0
		loopShare(b, func() {
			t := time.NewTicker(time.Millisecond)
			defer t.Stop()
			for started := time.Now(); time.Since(started) < benchTime(); {
				<-t.C
				for due := int(time.Since(started).Milliseconds()) * perTick; n < due; n++ {
					keys <- n
				}
			}
		})
		b.ReportMetric(float64(n)/benchTime().Seconds(), "keys/s")
	})
}

// labelled returns a Hybrid whose goroutines bear a label in profiles: goroutines take their labels from whoever starts them.
func labelled(b *testing.B, opts ...tierlimit.Option) (*tierlimit.Hybrid, *tierlimit.Limiter) {
	b.Helper()
	server := redistest.Start(b)
	pprof.SetGoroutineLabels(pprof.WithLabels(background, pprof.Labels("part", "loop")))
	defer pprof.SetGoroutineLabels(context.Background())
	h, l, closeAll, err := Hybrid(server.Addr(), tierlimit.TokenBucket(1000, time.Minute).WithBurst(100_000), opts...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(closeAll)
	return h, l
}

// loopShare profiles f and reports the part of one processor that the labelled goroutines took.
func loopShare(b *testing.B, f func()) {
	b.Helper()
	var raw bytes.Buffer
	if err := pprof.StartCPUProfile(&raw); err != nil {
		b.Fatal(err)
	}
	before, started := processTime(b), time.Now()
	b.ResetTimer()
	f()
	b.StopTimer()
	elapsed, used := time.Since(started), processTime(b)-before
	pprof.StopCPUProfile()
	p, err := profile.ParseData(raw.Bytes())
	if err != nil {
		b.Fatal(err)
	}
	loop := int64(0)
	for _, s := range p.Sample {
		if s.HasLabel("part", "loop") {
			loop += s.Value[1] // nanoseconds
		}
	}
	b.ReportMetric(100*float64(loop)/float64(elapsed), "loop-%")
	b.ReportMetric(100*float64(used)/float64(elapsed), "process-%")
}
