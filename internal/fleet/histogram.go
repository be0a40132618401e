package fleet

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// subBits is how many bits of a duration below its highest one are kept: 5 bits are steps of 3 %.
const (
	subBits = 5
	subs    = 1 << subBits
	octaves = 40 - subBits // up to 2^40 ns, 18 minutes; what is longer counts as that
)

// A Histogram counts durations in steps of about 3 %. The zero value is empty and ready; do not copy it. Safe for
// concurrent use; each figure is then of some instant during the call.
type Histogram struct {
	counts [subs * (octaves + 1)]atomic.Int64
	most   atomic.Int64 // ns
}

// bucket is where d belongs: below subs one bucket per nanosecond, from there on subs per octave.
func bucket(ns int64) int {
	if ns < subs {
		return int(max(0, ns))
	}
	shift := bits.Len64(uint64(ns)) - 1 - subBits
	if shift >= octaves {
		return subs*(octaves+1) - 1
	}
	return shift<<subBits + int(ns>>shift)
}

// upper is the greatest duration of a bucket.
func upper(i int) int64 {
	if i < subs {
		return int64(i)
	}
	shift := i>>subBits - 1
	return (int64(i)-int64(shift)<<subBits+1)<<shift - 1
}

// Record counts d; below 0 is 0. A few nanoseconds, no allocation.
func (h *Histogram) Record(d time.Duration) {
	ns := max(0, int64(d))
	h.counts[bucket(ns)].Add(1)
	for {
		most := h.most.Load()
		if ns <= most || h.most.CompareAndSwap(most, ns) {
			return
		}
	}
}

// Add adds the counts of o.
func (h *Histogram) Add(o *Histogram) {
	for i := range o.counts {
		if n := o.counts[i].Load(); n != 0 {
			h.counts[i].Add(n)
		}
	}
	h.most.Store(max(h.most.Load(), o.most.Load()))
}

// since is what h has that o, an earlier state of it, has not. The greatest is h's.
func (h *Histogram) since(o *Histogram) *Histogram {
	d := new(Histogram)
	for i := range h.counts {
		d.counts[i].Store(h.counts[i].Load() - o.counts[i].Load())
	}
	d.most.Store(h.most.Load())
	return d
}

// Count is how many durations were recorded.
func (h *Histogram) Count() int64 {
	var n int64
	for i := range h.counts {
		n += h.counts[i].Load()
	}
	return n
}

// Max is the longest duration recorded, exactly.
func (h *Histogram) Max() time.Duration { return time.Duration(h.most.Load()) }

// Percentile is the duration that p percent (0 to 100) of those recorded do not exceed, up to 3 % too long; 0 if there are none.
func (h *Histogram) Percentile(p float64) time.Duration {
	total := h.Count()
	if total == 0 {
		return 0
	}
	rank := max(1, int64(p/100*float64(total)+0.999999))
	for i := range h.counts {
		if rank -= h.counts[i].Load(); rank <= 0 {
			return time.Duration(min(upper(i), h.most.Load()))
		}
	}
	return h.Max()
}

// dense is what a child hands to its parent.
func (h *Histogram) dense() (counts map[int]int64, most int64) {
	counts = map[int]int64{}
	for i := range h.counts {
		if n := h.counts[i].Load(); n != 0 {
			counts[i] = n
		}
	}
	return counts, h.most.Load()
}

func (h *Histogram) addDense(counts map[int]int64, most int64) {
	for i, n := range counts {
		if i >= 0 && i < len(h.counts) {
			h.counts[i].Add(n)
		}
	}
	h.most.Store(max(h.most.Load(), most))
}
