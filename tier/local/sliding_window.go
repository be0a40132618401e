package local

import (
	"github.com/tierlimit/tierlimit/tier"
)

// slidingWindow is the weighted counter, known from Cloudflare's "How we built rate limiting capable of scaling to millions
// of domains" (2017), with k sub-windows instead of one: the estimate is the count of the sub-windows that are wholly
// inside the last window, the current one included, and of the oldest, cut through by the window's edge, the part that is
// still inside, rounded up. A request passes if the estimate with it is at most the limit. With k = 1 that is the current
// window and the previous one. Counts inside the oldest sub-window are taken as spread evenly: up to twice the limit can
// pass in a true window for k = 1, less for more sub-windows; that is the algorithm's own worst case.
//
// An uncertain clock: weights as of Lo, a request counts in the sub-window of Hi, and sub-windows ahead of Lo count in
// full. A weight never rises with time and never falls with the sub-window's number, so the estimate is at least that of
// the true times.
type slidingWindow struct{ windows }

func newSlidingWindow(l tier.Limit, t Time) *slidingWindow {
	w := new(slidingWindow)
	_, length, past := slidingLimit(l)
	w.layout(length, past)
	w.restart(t)
	return w
}

func slidingLimit(l tier.Limit) (limit, length, past int64) {
	limit, period := windowLimit(l)
	past = max(1, int64(l.SubWindows))
	return limit, max(1, period/past), past
}

// weigh is the part of n that is still inside at now, of a sub-window that the edge cuts through, rounded up.
func (w *slidingWindow) weigh(n, current, now int64) int64 {
	elapsed := now - current*w.length // 0..length-1
	return MulDivCeil(n, w.length-elapsed, w.length)
}

// estimate is the count as of w.lo, which lies in sub-window current.
func (w *slidingWindow) estimate(current int64) int64 {
	if w.size == 0 {
		return 0
	}
	oldest := w.front()
	if oldest.key > addSat(current, -w.past) {
		return w.sum
	}
	return w.sum - oldest.n + w.weigh(oldest.n, current, w.lo)
}

// passes is the first time at which the estimate is at most room, which it is not now.
func (w *slidingWindow) passes(room int64) int64 {
	rest := w.sum // of the tallies from i on
	var at int64
	for i := 0; i < w.size && rest > room; i++ {
		// While the edge cuts through i's sub-window, the earlier are gone and the later are in full.
		c := w.nth(i)
		rest -= c.n
		at = w.end(c.key)
		if part := room - rest; part > 0 {
			inside, _ := MulDiv(part, w.length, c.n) // at most this much of it may still be inside
			at = addSat(at, -inside)
			break
		}
	}
	return at
}

func (w *slidingWindow) decide(t Time, l tier.Limit, n int64, spend bool) Decision {
	limit, length, past := slidingLimit(l)
	if limit == 0 {
		return refused()
	}
	current := w.roll(t, length, past)
	used := w.estimate(current)
	d := Decision{Allowed: n >= 0 && n <= max(0, limit-used)}
	switch {
	case d.Allowed && spend && n > 0:
		w.charge(t, current, n)
		used += n
	case d.Allowed:
	case n < 0 || n > limit:
		d.RetryUS = Never
	default:
		d.RetryUS = waitUS(t.Lo, w.passes(limit-n))
	}
	d.Remaining = max(0, limit-used)
	d.ResetUS = w.resetUS(t)
	return d
}

func (w *slidingWindow) Take(t Time, l tier.Limit, n int64) Decision { return w.decide(t, l, n, true) }
func (w *slidingWindow) Peek(t Time, l tier.Limit, n int64) Decision { return w.decide(t, l, n, false) }

func (w *slidingWindow) Refund(t Time, l tier.Limit, n int64) {
	if limit, length, past := slidingLimit(l); limit > 0 {
		w.take(w.roll(t, length, past), n)
	}
}

func (w *slidingWindow) Reset(t Time, _ tier.Limit) { w.restart(t) }
