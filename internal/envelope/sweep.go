package envelope

import (
	"cmp"
	"math"
	"slices"
)

// How the worst interval is found in O(n log n).
//
// Let T(x, y) be what certainly happened in [x, y]: admissions with x <= Called and Returned <= y, less refunds with
// x <= Returned and Called <= y. Every algorithm asks for the maximum over x and y of T(x, y) plus something that depends on x alone
// plus something that depends on y alone; they differ in which x may go with a y.
//
// The line y moves right over the instants at which T changes: an admission joins when y reaches its Returned, a refund when y
// reaches its Called. In x, an admission matters to all x <= its Called, a refund to all x <= its Returned: so each is one
// number at one coordinate, and T(x, y) is the sum of the numbers at x and to the right of it. A tree over the
// coordinates keeps those sums and the best x of any range.
//
// It is enough to look at x in the coordinates (moving x right up to the next one loses nothing and gains refill) and
// at y where an admission joins (moving y left down to the last such instant loses nothing, drops refunds, and gains refill
// or weight).

// node is a range of coordinates: the sum of its numbers, and the greatest value base(x) + (sum of the numbers at x and right of it
// within the range). Values are whole tokens and a fraction in 1/Period.
type node struct {
	sum  wide
	best wide
	frac uint64
	arg  int32 // index of the best x
}

var nothing = node{best: lowest}

func join(l, r node) node {
	sum, best := l.sum.add(r.sum), l.best.add(r.sum)
	if best.less(r.best) || best == r.best && l.frac < r.frac {
		return node{sum, r.best, r.frac, r.arg}
	}
	return node{sum, best, l.frac, l.arg}
}

// change is one number at one coordinate from the instant at.
type change struct {
	at    int64
	coord int64
	cost  int64
}

// sweep judges one key after another and keeps its memory between them.
type sweep struct {
	xs      []int64 // the coordinates, ascending, distinct
	changes []change
	tree    []node // implicit binary tree, leaves at len/2
	refunds bool   // there are any
}

func (s *sweep) add(x, cost int64) {
	i, _ := slices.BinarySearch(s.xs, x)
	i += len(s.tree) / 2
	leaf := &s.tree[i]
	leaf.sum, leaf.best = leaf.sum.add(widen(cost)), leaf.best.add(widen(cost))
	for i /= 2; i > 0; i /= 2 {
		s.tree[i] = join(s.tree[2*i], s.tree[2*i+1])
	}
}

// over joins the coordinates with lo <= index < hi.
func (s *sweep) over(lo, hi int) node {
	left, right := nothing, nothing
	for lo, hi = lo+len(s.tree)/2, hi+len(s.tree)/2; lo < hi; lo, hi = lo/2, hi/2 {
		if lo&1 == 1 {
			left = join(left, s.tree[lo])
			lo++
		}
		if hi&1 == 1 {
			hi--
			right = join(s.tree[hi], right)
		}
	}
	return join(left, right)
}

// from is the index of the first coordinate that is at least x.
func (s *sweep) from(x int64) int {
	i, _ := slices.BinarySearch(s.xs, x)
	return i
}

// load lays out the coordinates, the changes and the tree for one key.
func (s *sweep) load(l Limit, history []Admission) {
	s.xs, s.changes, s.refunds = s.xs[:0], s.changes[:0], false
	for _, a := range history {
		c := change{at: a.Returned, coord: a.Called, cost: a.Cost}
		if a.Cost < 0 {
			c.at, c.coord, s.refunds = a.Called, a.Returned, true
		}
		s.xs = append(s.xs, c.coord)
		s.changes = append(s.changes, c)
	}
	slices.Sort(s.xs)
	s.xs = slices.Compact(s.xs)
	// Refunds sort before admissions of the same instant: they may have come first.
	slices.SortFunc(s.changes, func(a, b change) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.cost, b.cost))
	})

	leaves := 1
	for leaves < len(s.xs) {
		leaves *= 2
	}
	s.tree = slices.Grow(s.tree[:0], 2*leaves)[:2*leaves]
	for i := range leaves {
		leaf := nothing
		if i < len(s.xs) {
			leaf.arg, leaf.best = int32(i), wide{}
			if l.Kind.bucket() {
				leaf.best, leaf.frac = l.refilled(uint64(s.xs[i]) - uint64(s.xs[0]))
			}
		}
		s.tree[leaves+i] = leaf
	}
	for i := leaves - 1; i > 0; i-- {
		s.tree[i] = join(s.tree[2*i], s.tree[2*i+1])
	}
}

// judge finds the worst moment of one key. Overshoot of the verdict is negative by as much as stayed unused there. It reports false when
// nothing but refunds happened.
func (s *sweep) judge(l Limit, history []Admission) (Verdict, bool) {
	worst, found := Verdict{Key: history[0].Key, Overshoot: math.MinInt64}, false
	see := func(over, admitted wide, from, to int64) {
		if o := over.clamp(); !found || o > worst.Overshoot {
			worst.Overshoot, worst.Admitted, worst.From, worst.To, found = o, admitted.clamp(), from, to, true
		}
	}
	s.load(l, history)
	for i, c := range s.changes {
		s.add(c.coord, c.cost)
		if c.cost > 0 && (i+1 == len(s.changes) || s.changes[i+1].at > c.at) {
			s.look(l, c.at, see)
		}
	}
	// An interval that holds the whole call may have refilled more than the capacity; at the instant itself, whichever it
	// was, there was no more than the capacity.
	for _, a := range history {
		if a.Cost > 0 {
			see(widen(a.Cost).sub(widen(l.capacity())), widen(a.Cost), a.Called, a.Returned)
		}
	}
	return worst, found
}

// look reports the worst x for one y.
func (s *sweep) look(l Limit, y int64, see func(over, admitted wide, from, to int64)) {
	hi := s.from(y + 1)
	// Right of y stand the refunds that have begun and not returned: they touch every interval that ends at y.
	var after wide
	if s.refunds {
		after = s.over(hi, len(s.xs)).sum
	}
	limit := widen(l.Rate)
	within := func(lo int) { // the windows: all that counts counts whole
		if lo < hi {
			best := s.over(lo, hi)
			sum := best.best.add(after)
			see(sum.sub(limit), sum, s.xs[best.arg], y)
		}
	}
	switch l.Kind {
	case FixedWindow:
		w := int64(l.Period)
		within(s.from(floorDiv(y, w) * w))
	case SlidingLog:
		within(s.from(y - int64(l.Period) + 1))
	case SlidingWindow:
		length, k := l.sub()
		start := floorDiv(y, length) * length // of the sub-window of y
		whole := s.from(start - (k-1)*length)
		within(whole)
		old := s.from(start - k*length)
		if old >= whole {
			return
		}
		best := s.over(old, whole)
		if n := best.best.clamp(); n > 0 { // else leaving the oldest sub-window out is no better excuse
			part, rest := mulDiv(uint64(n), uint64(length-(y-start)), uint64(length))
			if rest > 0 {
				part = part.add(widen(1))
			}
			sum := s.over(whole, len(s.xs)).sum.add(part)
			see(sum.sub(limit), sum, s.xs[best.arg], y)
		}
	default:
		if hi == 0 {
			return
		}
		best := s.over(0, hi)
		whole, frac := l.refilled(uint64(y) - uint64(s.xs[0]))
		over := best.best.add(after).sub(whole).sub(widen(l.capacity()))
		if best.frac > frac { // both fractions are below one token: the excess rounds up by one or not at all
			over = over.add(widen(1))
		}
		x := s.xs[best.arg]
		allowed, _ := l.refilled(uint64(y) - uint64(x))
		see(over, over.add(allowed).add(widen(l.capacity())), x, y)
	}
}
