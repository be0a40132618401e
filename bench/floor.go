package bench

import (
	"sync/atomic"

	"github.com/cespare/xxhash/v2"
)

// Table is the floor: the least that takes a token of a key and does not lose count. A hash, one load for each probe, the
// comparison of the key, and an atomic add. It does not grow, refill, expire, evict or look at a clock. Filled once, by one
// goroutine.
type Table struct {
	slots []atomic.Pointer[counter]
}

type counter struct {
	key    string
	tokens atomic.Int64
}

// NewTable returns a table for n keys, at most half full, each with so many tokens.
func NewTable(n int, tokens int64, key func(int) string) *Table {
	size := 2
	for size < 2*n {
		size <<= 1
	}
	t := &Table{slots: make([]atomic.Pointer[counter], size)}
	for i := range n {
		c := &counter{key: key(i)}
		c.tokens.Store(tokens)
		at := xxhash.Sum64String(c.key)
		for t.slots[at&uint64(size-1)].Load() != nil {
			at++
		}
		t.slots[at&uint64(size-1)].Store(c)
	}
	return t
}

// Allow takes a token of key.
func (t *Table) Allow(key string) bool {
	mask := uint64(len(t.slots) - 1)
	for at := xxhash.Sum64String(key); ; at++ {
		c := t.slots[at&mask].Load()
		if c == nil {
			return false
		}
		if c.key == key {
			return c.tokens.Add(-1) >= 0
		}
	}
}
