package local

import (
	"sync/atomic"
	"unsafe"
)

// A cell that several processors take from at once costs each of them the wait for its cache line: 45 ns a take where one alone needs
// 9. So a cell where compare-and-swap fails often spreads its lease over stripes, each on a line of its own, from which a goroutine takes
// what it can. Under Mu a stripe is filled from the cell's own tokens, and those from the other stripes in the end.

// stripeCount is how many there are. Two goroutines that share one are no worse off than before.
const (
	stripeBits  = 4
	stripeCount = 1 << stripeBits
)

// crowded is how many failed swaps make stripes.
const crowded = 64

type stripes [stripeCount]stripe

type stripe struct {
	tokens atomic.Int64
	denied atomic.Int64 // part of Cell.denied
	_      [112]byte    // a pair of cache lines: processors fetch them in pairs
}

// own is the caller's stripe: by where its stack lies, which is the same for all that a goroutine does at one depth, unlike that of
// any other goroutine, and costs nothing to find out.
func (s *stripes) own() *stripe {
	var here byte
	const golden = 0x9e3779b97f4a7c15
	return &s[uint64(uintptr(unsafe.Pointer(&here))>>11)*golden>>(64-stripeBits)]
}

// crowd notes that a swap failed.
func (c *Cell) crowd() {
	if c.crowds.Add(1) >= crowded && c.stripes.Load() == nil && c.Log == nil && c.Flow == nil { // those two are shared anyway
		c.stripes.CompareAndSwap(nil, new(stripes))
	}
}

// takeStriped is Take where there are stripes.
func (c *Cell) takeStriped(s *stripes, n int64) (left int64, ok bool) {
	own := s.own()
	for {
		have := own.tokens.Load()
		if have < n {
			if !c.fill(s, own, n) {
				return c.takeShared(n)
			}
			continue
		}
		if own.tokens.CompareAndSwap(have, have-n) {
			return have - n + c.tokens.Load(), true
		}
	}
}

// fill moves tokens into own so that it has n, and reports whether it has. It does nothing while somebody else holds Mu.
func (c *Cell) fill(s *stripes, own *stripe, n int64) bool {
	if !c.Mu.TryLock() {
		return false
	}
	defer c.Mu.Unlock()
	lack := n - own.tokens.Load()
	if lack <= 0 {
		return true
	}
	if c.tokens.Load() < lack {
		for i := range s {
			if other := &s[i]; other != own {
				c.tokens.Add(other.tokens.Swap(0))
			}
		}
	}
	have := c.tokens.Load()
	if have < lack {
		return false
	}
	// Half of what would be a fair part, so that who comes later finds some too.
	move := min(have, max(lack, have/(2*stripeCount)))
	if !c.tokens.CompareAndSwap(have, have-move) {
		return false // somebody takes directly, though Mu is held
	}
	own.tokens.Add(move)
	return true
}

// Gather moves the tokens of all stripes to where a caller that holds Mu can take them. Caller holds Mu.
func (c *Cell) Gather() {
	if s := c.stripes.Load(); s != nil {
		for i := range s {
			if n := s[i].tokens.Swap(0); n != 0 {
				c.tokens.Add(n)
			}
		}
	}
}
