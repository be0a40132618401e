package tierlimit

import "github.com/tierlimit/tierlimit/tier/local"

// A wheel holds the cells that the loop will look at again, in slots of time. A cell whose time was moved forward is in
// it twice; only the entry in the slot that Due names is valid. Guarded by domain.mu.
type wheel struct {
	slots [wheelSlots][]*local.Cell
	tick  int64 // the next slot to look at
	n     int   // entries
}

const (
	wheelTick  = 5_000_000 // ns
	wheelSlots = 1024      // five seconds; what lies farther off is looked at early and put back
)

// add puts c where it is found at or soon after due.
func (w *wheel) add(c *local.Cell, due int64) int64 {
	tick := max((due+wheelTick-1)/wheelTick, w.tick)
	tick = min(tick, w.tick+wheelSlots-1)
	w.slots[tick%wheelSlots] = append(w.slots[tick%wheelSlots], c)
	w.n++
	return tick * wheelTick
}

// pop appends the cells of all slots up to now to cells.
func (w *wheel) pop(now int64, cells []*local.Cell) []*local.Cell {
	last := now / wheelTick
	if w.n == 0 || last-w.tick >= wheelSlots {
		w.tick = max(w.tick, min(last, last-wheelSlots+1))
	}
	for ; w.tick <= last; w.tick++ {
		s := &w.slots[w.tick%wheelSlots]
		cells = append(cells, *s...)
		w.n -= len(*s)
		clear(*s)
		*s = (*s)[:0]
	}
	return cells
}

// next is when the next cell is due; ok is false when there is none.
func (w *wheel) next() (int64, bool) {
	if w.n == 0 {
		return 0, false
	}
	for t := w.tick; t < w.tick+wheelSlots; t++ {
		if len(w.slots[t%wheelSlots]) > 0 {
			return t * wheelTick, true
		}
	}
	return 0, false
}
