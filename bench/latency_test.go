package bench

import (
	"sync"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// BenchmarkLatency offers a million checks a second for -benchtime, zipf over 10,000 keys under a limit that the hottest dozen exceed:
// leases are renewed, denials kept and cold keys waited for all the while. The empty loop is the same harness with nothing to call: what it
// shows is the machine's. Times are of single calls, cold ones included; local-* are of those that were answered in process.
func BenchmarkLatency(b *testing.B) {
	k := Zipf("zipf10k", 10_000, 1.1)
	b.Run("impl=empty", func(b *testing.B) {
		if first(b) {
			return
		}
		offer(b, k, func(string) tierlimit.Source { return tierlimit.Local })
	})
	b.Run("impl=tierlimit", func(b *testing.B) {
		if first(b) {
			return
		}
		server := redistest.Start(b)
		h, l, closeAll, err := Hybrid(server.Addr(), tierlimit.TokenBucket(10_000, time.Second))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(closeAll)
		check := func(key string) tierlimit.Source {
			r, err := l.Allow(background, key)
			if err != nil {
				return 0
			}
			return r.Source
		}
		each(len(k.All), func(i int) { check(k.All[i]) })
		before := h.Stats().Exchanges
		seconds := offer(b, k, check)
		b.ReportMetric(float64(h.Stats().Exchanges-before)/seconds, "exchanges/s")
	})
}

// offer makes the checks, each of many goroutines its part in bursts of a few milliseconds, and returns for how many seconds. Whoever has
// waited for Redis makes up for it afterwards.
func offer(b *testing.B, k *Keys, check func(string) tierlimit.Source) float64 {
	b.Helper()
	const perSecond, workers = 1_000_000, 64
	type part struct {
		all, local *hdrhistogram.Histogram
		calls      int64
		fallback   int64
	}
	parts := make([]part, workers)
	b.ResetTimer()
	started := time.Now()
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			p := part{all: NewHistogram(), local: NewHistogram()}
			i := w * len(k.order) / workers
			t := time.NewTicker(4 * time.Millisecond)
			defer t.Stop()
			for time.Since(started) < benchTime() {
				<-t.C
				due := int64(min(time.Since(started), benchTime()).Seconds() * perSecond / workers)
				for ; p.calls < due; p.calls++ {
					key := k.At(i)
					i++
					began := time.Now()
					source := check(key)
					took := int64(time.Since(began))
					_ = p.all.RecordValue(took)
					switch source {
					case tierlimit.Local:
						_ = p.local.RecordValue(took)
					case tierlimit.Remote:
					default:
						p.fallback++
					}
				}
			}
			parts[w] = p
		})
	}
	wg.Wait()
	elapsed := b.Elapsed()
	b.StopTimer()
	all, local := NewHistogram(), NewHistogram()
	calls, fallback := int64(0), int64(0)
	for _, p := range parts {
		all.Merge(p.all)
		local.Merge(p.local)
		calls += p.calls
		fallback += p.fallback
	}
	b.ReportMetric(float64(elapsed)/float64(max(1, calls)), "ns/op")
	for _, q := range []struct {
		name string
		h    *hdrhistogram.Histogram
	}{{"", all}, {"local-", local}} {
		b.ReportMetric(float64(q.h.ValueAtQuantile(50)), q.name+"p50-ns")
		b.ReportMetric(float64(q.h.ValueAtQuantile(99)), q.name+"p99-ns")
		b.ReportMetric(float64(q.h.ValueAtQuantile(99.9)), q.name+"p99.9-ns")
		b.ReportMetric(float64(q.h.Max()), q.name+"max-ns")
	}
	b.ReportMetric(100*float64(local.TotalCount())/float64(max(1, calls)), "%local")
	b.ReportMetric(float64(calls)/elapsed.Seconds(), "checks/s")
	wanted(b, fallback, calls)
	return elapsed.Seconds()
}
