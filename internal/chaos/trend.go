package chaos

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// A Sample is what was in use between two rounds of a soak.
type Sample struct {
	At         time.Duration // from the start
	Heap       int64         // bytes, after a collection
	Goroutines int64         // of the instances and their load
	Keys       int64         // in Redis
	TTL        time.Duration // the longest of a limiter's key
}

// A Trend is a line through the samples but for the first fifth, in which pools and tables fill. Its slope is the median of those between
// all pairs of samples, which a few that stand out do not move (Theil and Sen).
type Trend struct {
	Samples     int
	First, Last float64 // where the line begins and ends
	Sigmas      float64 // by how many standard deviations more pairs rise than chance makes rise (Mann and Kendall)
}

func (t Trend) grown() float64 { return t.Last - t.First }

// draw lays a line through samples.
func draw(samples []Sample, of func(Sample) float64) Trend {
	s := samples[len(samples)/5:]
	t := Trend{Samples: len(s)}
	if len(s) < 2 {
		return t
	}
	n := float64(len(s))
	slopes := make([]float64, 0, len(s)*(len(s)-1)/2)
	for i := range s {
		for j := range i {
			slopes = append(slopes, (of(s[i])-of(s[j]))/float64(s[i].At-s[j].At))
			t.Sigmas += float64(cmp.Compare(of(s[i]), of(s[j])))
		}
	}
	t.Sigmas /= math.Sqrt(n * (n - 1) * (2*n + 5) / 18)
	slope := median(slopes)
	rest := make([]float64, len(s))
	for i := range s {
		rest[i] = of(s[i]) - slope*float64(s[i].At-s[0].At)
	}
	t.First = median(rest)
	t.Last = t.First + slope*float64(s[len(s)-1].At-s[0].At)
	return t
}

func median(v []float64) float64 {
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// By how much a trend may rise in a soak, whatever its length: less than what would come of one thing that stays behind in each of the
// hundreds of rounds of half an hour. What rises more must do so beyond chance.
const (
	heapRises      = 2 << 20 // bytes
	goroutinesRise = 4
	keysRise       = 20
	ttlRises       = 5 // seconds
	chance         = 3 // sigmas
)

// trends draws the lines through the samples, and says which of them rise.
func (r *SoakResult) trends() (findings []string) {
	r.Heap = draw(r.Samples, func(s Sample) float64 { return float64(s.Heap) })
	r.Goroutines = draw(r.Samples, func(s Sample) float64 { return float64(s.Goroutines) })
	r.Keys = draw(r.Samples, func(s Sample) float64 { return float64(s.Keys) })
	r.TTL = draw(r.Samples, func(s Sample) float64 { return s.TTL.Seconds() })
	for _, t := range []struct {
		Trend
		most float64
		what string
	}{
		{r.Heap, heapRises, "heap, bytes"}, {r.Goroutines, goroutinesRise, "goroutines"}, {r.Keys, keysRise, "keys in Redis"},
		{r.TTL, ttlRises, "longest time to live of a limiter's key, seconds"},
	} {
		if t.grown() > t.most && t.Sigmas > chance {
			findings = append(findings, fmt.Sprintf("%s: rises from %.0f to %.0f", t.what, t.First, t.Last))
		}
	}
	return findings
}
