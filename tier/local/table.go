package local

import (
	"slices"
	"sync"
	"sync/atomic"
)

// Table is the sharded token cache: cells by limiter and key. Find takes no lock; adding and evicting lock one
// shard. The high bits of a key's hash pick the shard, the low bits its bucket.
//
// Eviction is CLOCK (second chance): a cell that was used since the hand last passed stays. A new cell starts
// unused, so that a flood of keys seen once evicts itself before it evicts a key in use.
type Table struct {
	shards []shard
	shift  uint
	evict  func(*Cell) bool
	sweep  int // the shard that is being swept

	// Idle, if it is set before the first cell is added, lets each key that is added sweep two of its shard: for whoever has no
	// goroutine to call Sweep.
	Idle func(*Cell) Fate
}

// Fate is what becomes of a cell that a sweep comes by.
type Fate int8

// The fates: it stays, a memo stays of it, nothing does.
const (
	Keep Fate = iota
	Remember
	Forget
)

type shard struct {
	mu      sync.Mutex
	buckets atomic.Pointer[[]atomic.Pointer[Cell]]
	ring    []*Cell
	hand    int // of the eviction
	swept   int // the sweep goes on below this place
	max     int
	memos   memos
	_       [32]byte // keeps neighbouring shards' locks on different cache lines
}

// maxChain bounds how many cells of one bucket a look-up may have to pass: xxhash is not keyed, so whoever chooses
// keys can make them collide. Beyond it the oldest of the chain is evicted that is not in use and may go.
const maxChain = 32

const minBuckets = 16

// NewTable returns a table for at most maxKeys cells over a power of two of shards. evict is asked, under the
// shard's lock, to give a cell up; it returns false if the cell cannot be evicted now.
func NewTable(shards, maxKeys int, evict func(*Cell) bool) *Table {
	for shards > 1 && shards > maxKeys {
		shards >>= 1
	}
	t := &Table{shards: make([]shard, shards), shift: 64, evict: evict}
	for n := shards; n > 1; n >>= 1 {
		t.shift--
	}
	for i := range t.shards {
		s := &t.shards[i]
		s.max = maxKeys / shards
		if i < maxKeys%shards {
			s.max++
		}
		b := make([]atomic.Pointer[Cell], minBuckets)
		s.buckets.Store(&b)
	}
	return t
}

func (t *Table) shard(hash uint64) *shard {
	return &t.shards[hash>>t.shift&uint64(len(t.shards)-1)]
}

// Find returns the cell of owner's key, or nil. A cell that is being moved by a growing shard may be missed: FindOrAdd
// looks again under the lock.
func (t *Table) Find(hash uint64, owner uint32, key string) *Cell {
	b := *t.shard(hash).buckets.Load()
	for c := b[hash&uint64(len(b)-1)].Load(); c != nil; c = c.next.Load() {
		if c.Hash == hash && c.Owner == owner && c.Key == key {
			return c
		}
	}
	return nil
}

// FindOrAdd returns the cell of owner's key, making it if there is none; init runs before the cell can be found.
func (t *Table) FindOrAdd(hash uint64, owner uint32, key string, init func(*Cell)) *Cell {
	s := t.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := *s.buckets.Load()
	head := &b[hash&uint64(len(b)-1)]
	chain := 0
	for c := head.Load(); c != nil; c = c.next.Load() {
		if c.Hash == hash && c.Owner == owner && c.Key == key {
			return c
		}
		chain++
	}
	if chain >= maxChain {
		t.evictFromLocked(s, head)
	}
	if t.Idle != nil {
		s.sweepLocked(2, t.Idle)
	}
	c := newCell(hash, owner, key)
	s.memos.restore(c) // which makes room for it
	// Two, so that a shard that had to grow beyond its share comes back to it.
	for range 2 {
		if len(s.ring)+s.memos.len() >= s.max && !s.memos.drop() {
			t.evictOneLocked(s)
		}
	}
	init(c)
	if b = *s.buckets.Load(); len(s.ring) >= len(b) {
		b = s.resizeLocked(b, 2*len(b))
	}
	head = &b[hash&uint64(len(b)-1)]
	c.ring = int32(len(s.ring))
	s.ring = append(s.ring, c)
	c.next.Store(head.Load())
	head.Store(c)
	return c
}

// evictFromLocked gives up a cell of one chain: the oldest unused one that may go, else the oldest that may.
// Caller holds s.mu.
func (t *Table) evictFromLocked(s *shard, head *atomic.Pointer[Cell]) {
	var chain []*Cell
	for c := head.Load(); c != nil; c = c.next.Load() {
		chain = append(chain, c)
	}
	slices.Reverse(chain)
	for _, sparing := range []bool{true, false} {
		for _, c := range chain {
			if !(sparing && c.used.Load()) && t.evict(c) {
				s.removeLocked(c)
				return
			}
		}
	}
}

// evictOneLocked gives up the first cell at the hand that was not used since it last passed and that may go. If none may
// (all wait for Redis), the shard grows beyond its share by one. Caller holds s.mu.
func (t *Table) evictOneLocked(s *shard) {
	for range 2 * len(s.ring) {
		if s.hand >= len(s.ring) {
			s.hand = 0
		}
		c := s.ring[s.hand]
		if c.used.Load() {
			c.used.Store(false)
		} else if t.evict(c) {
			s.removeLocked(c)
			return
		}
		s.hand++
	}
}

// removeLocked unlinks c. A reader that stands on c still finds its way to the end of the chain, since c keeps its next.
// Caller holds s.mu.
func (s *shard) removeLocked(c *Cell) {
	b := *s.buckets.Load()
	at := &b[c.Hash&uint64(len(b)-1)]
	for n := at.Load(); n != nil; n = at.Load() {
		if n == c {
			at.Store(c.next.Load())
			break
		}
		at = &n.next
	}
	// The last cell of the ring takes c's place.
	last := s.ring[len(s.ring)-1]
	s.ring[c.ring] = last
	last.ring = c.ring
	s.ring[len(s.ring)-1] = nil
	s.ring = s.ring[:len(s.ring)-1]
}

// resizeLocked makes it n buckets. Cells are moved one by one to the head of their new chain; a reader in an old chain may
// be led into a new one and miss its key, never loop: every chain ends at all times. Caller holds s.mu.
func (s *shard) resizeLocked(old []atomic.Pointer[Cell], n int) []atomic.Pointer[Cell] {
	b := make([]atomic.Pointer[Cell], n)
	for i := range old {
		for c := old[i].Load(); c != nil; {
			next := c.next.Load()
			head := &b[c.Hash&uint64(len(b)-1)]
			c.next.Store(head.Load())
			head.Store(c)
			c = next
		}
	}
	s.buckets.Store(&b)
	return b
}

// Sweep looks at n cells, going on where it stopped, and asks idle, under the lock of the cell's shard, what becomes of each. It returns
// early after a whole round. One caller at a time.
func (t *Table) Sweep(n int, idle func(*Cell) Fate) {
	const atOnce = 256 // so that whoever adds a key does not wait for long
	for range len(t.shards) {
		for n > 0 {
			looked, done := t.shards[t.sweep].sweep(min(n, atOnce), idle)
			n -= looked
			if done {
				break
			}
		}
		if n <= 0 {
			return
		}
		t.sweep = (t.sweep + 1) % len(t.shards)
	}
}

// sweep looks at up to n cells from the end of the ring to its begin. done says that it came there.
func (s *shard) sweep(n int, idle func(*Cell) Fate) (looked int, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sweepLocked(n, idle)
}

// sweepLocked is sweep. Caller holds s.mu.
func (s *shard) sweepLocked(n int, idle func(*Cell) Fate) (looked int, done bool) {
	if s.swept == 0 {
		s.swept = len(s.ring)
	}
	for ; looked < n && s.swept > 0; looked++ {
		if s.swept = min(s.swept, len(s.ring)) - 1; s.swept < 0 {
			s.swept = 0
			break
		}
		// Whatever takes the place of a cell that is removed comes from behind and was looked at.
		c := s.ring[s.swept]
		fate := idle(c)
		if fate == Remember {
			c.Mu.Lock()
			s.memos.keepLocked(c)
			c.Mu.Unlock()
		}
		if fate != Keep {
			s.removeLocked(c)
		}
	}
	if s.swept > 0 {
		return looked, false
	}
	if b := *s.buckets.Load(); len(b) > minBuckets && 4*len(s.ring) < len(b) {
		s.resizeLocked(b, max(minBuckets, len(b)/4))
		s.ring = slices.Clip(slices.Clone(s.ring))
	}
	return looked, true
}

// Len is the number of cells.
func (t *Table) Len() int {
	n := 0
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		n += len(s.ring)
		s.mu.Unlock()
	}
	return n
}

// Each calls f for every cell, shard by shard, without holding a lock while f runs. Cells added meanwhile may be
// missed.
func (t *Table) Each(f func(*Cell)) {
	var cells []*Cell
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		cells = append(cells[:0], s.ring...)
		s.mu.Unlock()
		for _, c := range cells {
			f(c)
		}
	}
}
