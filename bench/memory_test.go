package bench

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
)

// BenchmarkMemory is what a key costs that is not in use: it was checked once and lies idle. ns/op is of that first check, by many
// goroutines at once; gc-ms is a full collection with the keys there, and gc0-ms one without. Of case=kept a limiter has to remember that a
// token is gone, for an hour; of case=full it has not, which only tierlimit makes use of.
func BenchmarkMemory(b *testing.B) {
	kept := Setting{Rate: 1, Period: time.Hour, Burst: 1000} // and no word about how many keys will come
	full := Setting{Rate: 1_000_000, Period: time.Second, Burst: 1_000_000}
	for _, s := range slices.Concat([]Subject{Floors[3], Lease}, Local[2:]) {
		b.Run(fmt.Sprintf("impl=%s/path=%s/case=kept", s.Impl, s.Path), func(b *testing.B) { benchmarkMemory(b, s, kept, 30*time.Second) })
		if s.Impl == Lease.Impl {
			b.Run(fmt.Sprintf("impl=%s/path=%s/case=full", s.Impl, s.Path), func(b *testing.B) { benchmarkMemory(b, s, full, 15*time.Second) })
		}
	}
}

func benchmarkMemory(b *testing.B, s Subject, setting Setting, rest time.Duration) {
	if first(b) {
		return
	}
	n := *manyKeys
	o, _ := open(b, s, setting)
	before, empty := heap()
	b.ResetTimer()
	if s.Impl == "floor" {
		o.Warm(n, Key)
	} else {
		each(n, func(i int) { o.Allow(Key(i)) })
	}
	took := b.Elapsed()
	if s.Impl == Lease.Impl && s.Redis {
		time.Sleep(rest) // until leases have ended and the sweep has been everywhere
	}
	b.StopTimer()
	after, loaded := heap()
	b.ReportMetric(float64(took)/float64(n), "ns/op")
	b.ReportMetric(float64(after-before)/float64(n), "B/key")
	b.ReportMetric(loaded.Seconds()*1000, "gc-ms")
	b.ReportMetric(empty.Seconds()*1000, "gc0-ms")
	runtime.KeepAlive(o)
}

// heap is what the collector cannot free, and the median of how long it takes to find out.
func heap() (int64, time.Duration) {
	var took []time.Duration
	for range 7 {
		started := time.Now()
		runtime.GC()
		took = append(took, time.Since(started))
	}
	slices.Sort(took)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), took[len(took)/2]
}
