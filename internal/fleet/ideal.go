package fleet

import (
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
)

// An ideal limiter for one key decides every check at once, with nothing leased and nothing on its way.
type ideal struct {
	l     envelope.Limit
	level float64 // buckets: tokens there are
	at    int64   // buckets: when level was that; windows: index of the (sub-)window of the last check
	count []int64 // windows: admitted in the (sub-)window at and those before, newest first
	log   []entry // sliding log, oldest first
	sum   int64   // of log
}

type entry struct{ at, cost int64 }

func newIdeal(l envelope.Limit, now int64) *ideal {
	i := &ideal{l: l, level: float64(l.Burst), at: now}
	switch l.Kind {
	case envelope.FixedWindow:
		i.l.SubWindows, i.count = 1, make([]int64, 1)
	case envelope.SlidingWindow:
		i.l.SubWindows = max(1, l.SubWindows)
		i.count = make([]int64, i.l.SubWindows+1)
	}
	return i
}

func (i *ideal) take(now, cost int64) bool {
	switch i.l.Kind {
	case envelope.FixedWindow, envelope.SlidingWindow:
		sub := int64(i.l.Period) / int64(i.l.SubWindows)
		for w := now / sub; i.at != w; { // shifts as many as there are at most
			steps := min(w-i.at, int64(len(i.count)))
			if steps < 0 || steps == int64(len(i.count)) {
				clear(i.count)
				i.at = w
				break
			}
			copy(i.count[1:], i.count)
			i.count[0] = 0
			i.at++
		}
		sum := 0.0
		for k, n := range i.count {
			if k == len(i.count)-1 && k > 0 {
				sum += float64(n) * float64(sub-now%sub) / float64(sub)
			} else {
				sum += float64(n)
			}
		}
		if sum+float64(cost) > float64(i.l.Rate) {
			return false
		}
		i.count[0] += cost
	case envelope.SlidingLog:
		for len(i.log) > 0 && i.log[0].at <= now-int64(i.l.Period) {
			i.sum -= i.log[0].cost
			i.log = i.log[1:]
		}
		if i.sum+cost > i.l.Rate {
			return false
		}
		i.sum += cost
		i.log = append(i.log, entry{now, cost})
	default:
		i.level = min(float64(i.l.Burst), i.level+float64(i.l.Rate)*float64(now-i.at)/float64(i.l.Period))
		i.at = now
		if i.level+1e-9 < float64(cost) { // a sum of many small refills is off by as much
			return false
		}
		i.level -= float64(cost)
	}
	return true
}

// An offer is what a run offered, so that it can be offered to an ideal limiter too.
type offer struct {
	load      Load
	rate      float64
	instances int
	duration  time.Duration
}

// Ideal is the tokens that an ideal limiter, full at the start, would have admitted of the same checks had each come when it was
// due: one central counter per key that decides at once. O(checks).
func (r *Result) Ideal(l tierlimit.Limit) int64 {
	e := Envelope(l)
	keys := map[string]*ideal{}
	var sum int64
	for k := int64(0); ; k++ {
		c, ok := r.offer.load.Next(k, r.offer.rate, r.offer.instances)
		if !ok || c.At >= r.offer.duration {
			return sum
		}
		i := keys[c.Key]
		if i == nil {
			i = newIdeal(e, r.Started)
			keys[c.Key] = i
		}
		if i.take(r.Started+int64(c.At), c.Cost) {
			sum += c.Cost
		}
	}
}

// Use is what was admitted as a part of Ideal: the utilisation of a whole run under the load it was given, which may be less than the
// limit at times. It may exceed 1 by what lateness moves, and on sliding windows, where to refuse early can let more pass later.
func (r *Result) Use(l tierlimit.Limit) float64 {
	return float64(r.Admitted) / float64(max(1, r.Ideal(l)))
}
