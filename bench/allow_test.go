package bench

import (
	"fmt"
	"iter"
	"slices"
	"testing"
	"time"
)

// plenty is a limit that nobody here reaches: what is measured is a check that passes. It refills slowly, as limits do: tierlimit lets
// go of a key that is full again, and a key that always is would be made anew at its next check.
var plenty = Setting{Rate: 1, Period: 10 * time.Second, Burst: 500_000_000}

// BenchmarkAllow is a check that is answered in process, of keys that are known: by one goroutine, and by many. With several goroutines
// ns/op is wall time by checks, so half of one goroutine's would be perfect on two processors.
func BenchmarkAllow(b *testing.B) {
	for name, keys := range patterns() {
		b.Run("keys="+name, func(b *testing.B) {
			k := keys()
			for _, s := range slices.Concat(Floors, Local) {
				if s.Denies && len(k.All) > 10_000 {
					continue // a denial holds no lease: 10,000 keys show all there is to see
				}
				b.Run(fmt.Sprintf("impl=%s/path=%s", s.Impl, s.Path), func(b *testing.B) { benchmarkAllow(b, k, s) })
			}
		})
	}
}

// patterns are made when they are wanted: a filter passes most of them by.
func patterns() iter.Seq2[string, func() *Keys] {
	return func(yield func(string, func() *Keys) bool) {
		_ = yield("hot", Hot) &&
			yield("10k", func() *Keys { return Uniform("10k", 10_000) }) &&
			yield(manyName(), manyZipf)
	}
}

func benchmarkAllow(b *testing.B, k *Keys, s Subject) {
	setting := plenty
	setting.Keys = len(k.All)
	o, _ := open(b, s, setting)
	// Keys of requests are other strings than those kept: a comparison of a string with itself would be free.
	o.Warm(len(k.All), Key)
	settle(k, o)
	b.Run("goroutines=1", func(b *testing.B) {
		if first(b) {
			return
		}
		b.ReportAllocs()
		i, other, before := 0, 0, remoteBefore(o)
		for b.Loop() {
			if !o.Allow(k.At(i)) {
				other++
			}
			i++
		}
		reportRemote(b, o, before, int64(i))
		wanted(b, int64(other), int64(i))
	})
	counts := []int{16, 128, 1024}
	if len(k.All) == 1 {
		counts = append([]int{8}, counts...)
	}
	for _, n := range counts {
		b.Run(fmt.Sprintf("goroutines=%d", n), func(b *testing.B) {
			if first(b) {
				return
			}
			before := remoteBefore(o)
			out := run(b, k, o, Load{Goroutines: n, Every: 64})
			reportRemote(b, o, before, out.Checks)
		})
	}
}

// settle checks until nearly nothing has to be asked of Redis any more: a lease follows the pace of the checks, and that follows the
// leases. It gives up after a while; %remote tells.
func settle(k *Keys, o *Opened) {
	for started := time.Now(); time.Since(started) < 10*time.Second; {
		before := remoteBefore(o)
		out := Drive(k, o.Allow, Load{Goroutines: 1, For: 200 * time.Millisecond, Every: 64})
		if o.Remote == nil || 10_000*(o.Remote()-before) < out.Checks {
			return
		}
	}
}

// BenchmarkFlat is a check of one of a thousand keys while the table holds more and more of others, which were checked once.
func BenchmarkFlat(b *testing.B) {
	const used = 1000
	for _, s := range []Subject{Floors[3], Lease} {
		b.Run(fmt.Sprintf("impl=%s/path=%s", s.Impl, s.Path), func(b *testing.B) {
			setting := plenty
			setting.Keys = *manyKeys
			setting.Period = time.Hour // nobody is full again, and let go of, before the end
			o, _ := open(b, s, setting)
			k := Uniform("1k", used)
			held := 0
			for n := used; n <= *manyKeys; n *= 10 {
				b.Run(fmt.Sprintf("table=%d", n), func(b *testing.B) {
					if held < n {
						b.StopTimer() // else this alone would be time enough for testing
						fill(o, s, n)
						held = n
						b.StartTimer()
					}
					if first(b) {
						return
					}
					i, other := 0, 0
					for b.Loop() {
						if !o.Allow(k.At(i)) {
							other++
						}
						i++
					}
					wanted(b, int64(other), int64(i))
				})
			}
		})
	}
}

// fill lets a subject know n keys.
func fill(o *Opened, s Subject, n int) {
	if s.Impl == "floor" {
		o.Warm(n, Key)
		return
	}
	each(n, func(i int) { o.Allow(Key(i)) })
	o.Warm(1000, Key)
}
