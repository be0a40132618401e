package local

import (
	"github.com/tierlimit/tierlimit/tier"
)

// tally is n tokens counted under a key: the number of a window, or a time. They leave the count in the order of the keys.
type tally struct{ key, n int64 }

// tallies is a ring of tallies with ascending keys and n > 0, and their sum.
type tallies struct {
	ring   []tally
	head   int
	size   int
	sum    int64
	inline [4]tally // the ring of fixed windows and of plain sliding windows, so that a key is one allocation
}

func (q *tallies) init(capacity int) {
	q.head, q.size, q.sum = 0, 0, 0
	switch {
	case capacity <= len(q.inline):
		q.ring = q.inline[:]
	case len(q.ring) != capacity:
		q.ring = make([]tally, capacity)
	}
}

func (q *tallies) nth(i int) *tally {
	if i += q.head; i >= len(q.ring) {
		i -= len(q.ring)
	}
	return &q.ring[i]
}

func (q *tallies) front() *tally { return q.nth(0) }
func (q *tallies) back() *tally  { return q.nth(q.size - 1) }

func (q *tallies) popFront() {
	q.sum -= q.front().n
	if q.head++; q.head == len(q.ring) {
		q.head = 0
	}
	q.size--
}

// drop forgets the tallies with keys below least.
func (q *tallies) drop(least int64) {
	for q.size > 0 && q.front().key < least {
		q.popFront()
	}
}

// since is the sum of the tallies with keys of least or more.
func (q *tallies) since(least int64) int64 {
	sum := q.sum
	for i := 0; i < q.size && q.nth(i).key < least; i++ {
		sum -= q.nth(i).n
	}
	return sum
}

// add counts n under key, or under a later one: that of the last tally if it is later, and where the ring is full the last
// tally moves up to key. Later is the safe side: what is counted later leaves later.
func (q *tallies) add(key, n int64) {
	q.sum += n
	if q.size > 0 {
		last := q.back()
		if key <= last.key || q.size == len(q.ring) {
			last.key = max(last.key, key)
			last.n += n
			return
		}
	}
	q.size++
	*q.back() = tally{key, n}
}

// take takes up to n back from the latest tallies with keys of least or more.
func (q *tallies) take(least, n int64) {
	for n > 0 && q.size > 0 && q.back().key >= least {
		last := q.back()
		part := min(n, last.n)
		last.n -= part
		q.sum -= part
		n -= part
		if last.n == 0 {
			q.size--
		}
	}
}

// windows counts admissions by aligned windows of length us. A count stays for past windows after its own.
type windows struct {
	tallies
	lo     int64 // latest Lo seen: the clock does not go back behind it
	last   int64 // latest Hi of an admission
	length int64 // µs, 1 or more
	past   int64
}

// mostWindows bounds the memory of a key: with more sub-windows than this, several count as one.
const mostWindows = 1021

func (w *windows) layout(length, past int64) {
	w.length, w.past = length, past
	w.init(int(min(past, mostWindows)) + 3)
}

// relayout carries the counts over to windows of another length: each to the window of the latest moment at which it can
// have been admitted.
func (w *windows) relayout(length, past int64) {
	old := make([]tally, w.size)
	for i := range old {
		old[i] = *w.nth(i)
		end := mulSat(addSat(old[i].key, 1), w.length)
		old[i].key = floorDiv(min(addSat(end, -1), w.last), length)
	}
	w.layout(length, past)
	for _, o := range old {
		w.add(o.key, o.n)
	}
}

// roll moves the clock to t, drops what has left, and returns the number of the window that Lo is in.
func (w *windows) roll(t Time, length, past int64) int64 {
	if length != w.length || past != w.past {
		w.relayout(length, past)
	}
	w.lo = max(w.lo, t.Lo)
	current := floorDiv(w.lo, length)
	w.drop(addSat(current, -past))
	return current
}

// charge counts n in the window of t.Hi. Where there are more windows between the oldest that counts and that one than
// the ring has places, groups of them count in their last.
func (w *windows) charge(t Time, current, n int64) {
	hi := max(t.Hi, w.lo)
	w.last = max(w.last, hi)
	key := floorDiv(hi, w.length)
	span := min(distance(current, key), maxTokens) + uint64(w.past)
	if places := uint64(len(w.ring)); span >= places {
		group := int64(span/(places-2) + 1) // at most half of the greatest int64
		key = addSat(key, group-1-(key-floorDiv(key, group)*group))
	}
	w.add(key, n)
}

// end is the time at which the count under key is gone: the start of the window that is past windows after the next.
func (w *windows) end(key int64) int64 {
	return mulSat(addSat(addSat(key, w.past), 1), w.length)
}

func (w *windows) resetUS(t Time) int64 {
	if w.size == 0 {
		return 0
	}
	return waitUS(t.Lo, w.end(w.back().key))
}

func (w *windows) restart(t Time) {
	w.lo, w.last = t.Lo, t.Lo
	w.init(len(w.ring))
}

func (w *windows) Admitted(t Time) int64 {
	return w.since(addSat(floorDiv(max(w.lo, t.Lo), w.length), -w.past))
}

// fixedWindow admits at most the limit in each window [k*period, (k+1)*period) of the clock: the counter per window of Redis's own
// documentation (INCR, "Pattern: Rate limiter 1"). Two windows' worth can pass around a boundary; that is the algorithm's own
// worst case.
//
// An uncertain clock: a request is counted in the window of Hi and judged by all counts from the window of Lo on. Whatever
// the true window v of an admission, it is counted in v or later, and stays in the count until Lo has left v.
type fixedWindow struct{ windows }

func newFixedWindow(l tier.Limit, t Time) *fixedWindow {
	w := new(fixedWindow)
	w.layout(max(l.PeriodUS(), 1), 0)
	w.restart(t)
	return w
}

// windowLimit is the limit of a window or log, 0 for one that denies everything, and its length.
func windowLimit(l tier.Limit) (limit, length int64) {
	limit, length = clampTokens(l.Rate), l.PeriodUS()
	if length < 1 {
		return 0, 1
	}
	return limit, length
}

func (w *fixedWindow) decide(t Time, l tier.Limit, n int64, spend bool) Decision {
	limit, length := windowLimit(l)
	if limit == 0 {
		return refused()
	}
	current := w.roll(t, length, 0)
	d := Decision{Allowed: n >= 0 && n <= max(0, limit-w.sum)}
	switch {
	case d.Allowed && spend && n > 0:
		w.charge(t, current, n)
	case d.Allowed:
	case n < 0 || n > limit:
		d.RetryUS = Never
	default:
		rest := w.sum
		for i := 0; i < w.size && n > limit-rest; i++ {
			rest -= w.nth(i).n
			d.RetryUS = waitUS(t.Lo, w.end(w.nth(i).key))
		}
	}
	d.Remaining = max(0, limit-w.sum)
	d.ResetUS = w.resetUS(t)
	return d
}

func (w *fixedWindow) Take(t Time, l tier.Limit, n int64) Decision { return w.decide(t, l, n, true) }
func (w *fixedWindow) Peek(t Time, l tier.Limit, n int64) Decision { return w.decide(t, l, n, false) }

func (w *fixedWindow) Refund(t Time, l tier.Limit, n int64) {
	if limit, length := windowLimit(l); limit > 0 {
		w.take(w.roll(t, length, 0), n)
	}
}

func (w *fixedWindow) Reset(t Time, _ tier.Limit) { w.restart(t) }
