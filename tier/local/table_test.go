package local_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/tierlimit/tierlimit/tier/local"
)

func yes(*local.Cell) bool { return true }

func add(t *local.Table, key string) *local.Cell {
	return t.FindOrAdd(xxhash.Sum64String(key), 0, key, func(*local.Cell) {})
}

func find(t *local.Table, key string) *local.Cell { return t.Find(xxhash.Sum64String(key), 0, key) }

func TestTableFindsWhatItHolds(t *testing.T) {
	for _, shards := range []int{1, 2, 64, 1 << 16} {
		table := local.NewTable(shards, 1<<20, yes)
		const n = 5000
		cells := map[string]*local.Cell{}
		for i := range n {
			k := fmt.Sprint(i)
			if find(table, k) != nil {
				t.Fatalf("%q is there before it was added", k)
			}
			inits := 0
			cells[k] = table.FindOrAdd(xxhash.Sum64String(k), 0, k, func(c *local.Cell) {
				inits++
				if find(table, k) != nil {
					t.Error("a cell can be found before it is made")
				}
			})
			if inits != 1 {
				t.Fatalf("made %d times", inits)
			}
		}
		for k, c := range cells {
			if find(table, k) != c || add(table, k) != c || c.Key != k {
				t.Fatalf("%d shards: %q is lost", shards, k)
			}
		}
		if table.Len() != n {
			t.Errorf("%d cells, want %d", table.Len(), n)
		}
		seen := map[*local.Cell]int{}
		table.Each(func(c *local.Cell) { seen[c]++ })
		if len(seen) != n {
			t.Errorf("Each sees %d cells", len(seen))
		}
	}
}

// The same hash, another owner or another key is another cell.
func TestTableTellsCellsApart(t *testing.T) {
	table := local.NewTable(4, 100, yes)
	const hash = 42
	none := func(*local.Cell) {}
	a, b, c := table.FindOrAdd(hash, 0, "a", none), table.FindOrAdd(hash, 1, "a", none), table.FindOrAdd(hash, 0, "b", none)
	if a == b || a == c || b == c {
		t.Error("two keys share a cell")
	}
	if table.Find(hash, 0, "a") != a || table.Find(hash, 1, "a") != b || table.Find(hash, 0, "b") != c {
		t.Error("a cell is not found under its own name")
	}
	if table.Find(hash, 2, "a") != nil || table.Find(hash+1, 0, "a") != nil {
		t.Error("a cell is found under another's name")
	}
}

func TestTableEvicts(t *testing.T) {
	for _, tc := range []struct{ shards, most int }{{1, 1}, {1, 10}, {8, 8}, {8, 1000}, {64, 10}, {64, 100}} {
		evicted := map[string]int{}
		table := local.NewTable(tc.shards, tc.most, func(c *local.Cell) bool {
			evicted[c.Key]++
			return true
		})
		const n = 5000
		for i := range n {
			add(table, fmt.Sprint(i))
			if got := table.Len(); got > tc.most {
				t.Fatalf("%+v: %d cells", tc, got)
			}
		}
		if got := len(evicted) + table.Len(); got != n {
			t.Errorf("%+v: %d evicted and held, want %d", tc, got, n)
		}
		for k, times := range evicted {
			if times != 1 || find(table, k) != nil {
				t.Fatalf("%+v: %q evicted %d times, still there: %t", tc, k, times, find(table, k) != nil)
			}
		}
	}
}

// What was used since the hand last passed stays, and a flood of keys seen once evicts itself.
func TestTableKeepsWhatIsUsed(t *testing.T) {
	table := local.NewTable(4, 1000, yes)
	var hot []*local.Cell
	for i := range 100 {
		hot = append(hot, add(table, fmt.Sprint("hot", i)))
	}
	for i := range 100_000 {
		if i%50 == 0 {
			for _, c := range hot {
				c.Touch()
			}
		}
		add(table, fmt.Sprint(i))
	}
	for _, c := range hot {
		if find(table, c.Key) != c {
			t.Errorf("%q was evicted", c.Key)
		}
	}
}

// A cell that may not go stays, and the table grows rather than lose it or wait.
func TestTableRespectsRefusals(t *testing.T) {
	refuse := atomic.Bool{}
	refuse.Store(true)
	table := local.NewTable(1, 10, func(*local.Cell) bool { return !refuse.Load() })
	for i := range 50 {
		add(table, fmt.Sprint(i))
	}
	if table.Len() != 50 {
		t.Errorf("%d cells, want all 50", table.Len())
	}
	// As for crafted collisions.
	for i := range 200 {
		table.FindOrAdd(7, 0, fmt.Sprint("same", i), func(*local.Cell) {})
	}
	for i := range 200 {
		if table.Find(7, 0, fmt.Sprint("same", i)) == nil {
			t.Fatalf("collision %d is lost", i)
		}
	}
	refuse.Store(false)
	before := table.Len()
	for i := range 1000 {
		add(table, fmt.Sprint("later", i))
	}
	if got := table.Len(); got > before {
		t.Errorf("%d cells, then %d, with room for 10", before, got)
	}
}

// After refusals left it above its share, a shard comes back to it.
func TestTableShrinksBack(t *testing.T) {
	refuse := atomic.Bool{}
	refuse.Store(true)
	table := local.NewTable(1, 10, func(*local.Cell) bool { return !refuse.Load() })
	for i := range 100 {
		add(table, fmt.Sprint(i))
	}
	refuse.Store(false)
	for i := range 500 {
		add(table, fmt.Sprint("later", i))
	}
	if got := table.Len(); got > 10 {
		t.Errorf("%d cells with room for 10, long after all may go", got)
	}
}

// Readers take no lock: while shards grow and evict they may miss a cell, but never get another's or loop.
func TestTableUnderConcurrency(t *testing.T) {
	evictions := atomic.Int64{}
	table := local.NewTable(4, 2000, func(*local.Cell) bool { evictions.Add(1); return true })
	var wg sync.WaitGroup
	var added atomic.Int64
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 0))
			for range 20_000 {
				k := fmt.Sprint(r.IntN(6000))
				c := table.FindOrAdd(xxhash.Sum64String(k), 0, k, func(*local.Cell) { added.Add(1) })
				if c.Key != k {
					t.Errorf("asked for %q, got %q", k, c.Key)
					return
				}
			}
		})
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range 50_000 {
				k := fmt.Sprint(r.IntN(6000))
				if c := find(table, k); c != nil {
					if c.Key != k {
						t.Errorf("asked for %q, got %q", k, c.Key)
						return
					}
					c.Touch()
				}
			}
		})
	}
	wg.Go(func() {
		for range 20 {
			table.Each(func(c *local.Cell) { c.Allow() })
			table.Sweep(500, func(c *local.Cell) local.Fate {
				if c.Hash%4 != 0 {
					return local.Keep
				}
				evictions.Add(1)
				return local.Forget
			})
		}
	})
	wg.Wait()
	if got := int64(table.Len()); got != added.Load()-evictions.Load() || got > 2000 {
		t.Errorf("%d cells of %d added and %d evicted", got, added.Load(), evictions.Load())
	}
	var keys []string
	table.Each(func(c *local.Cell) { keys = append(keys, c.Key) })
	slices.Sort(keys)
	if n := len(slices.Compact(slices.Clone(keys))); n != len(keys) {
		t.Errorf("%d cells for %d keys", len(keys), n)
	}
	for _, k := range keys {
		if find(table, k) == nil {
			t.Errorf("%q is held and cannot be found", k)
		}
	}
}

// A sweep looks at each cell once a round, and leaves a table that was large as small as its cells.
func TestSweep(t *testing.T) {
	table := local.NewTable(4, 100_000, yes)
	for i := range 50_000 {
		add(table, fmt.Sprint(i))
	}
	looked := map[string]int{}
	for range 500 {
		table.Sweep(100, func(c *local.Cell) local.Fate {
			looked[c.Key]++
			if len(c.Key) == 5 { // all but 10,000
				return local.Forget
			}
			return local.Keep
		})
	}
	if n := table.Len(); n != 10_000 || len(looked) != 50_000 {
		t.Errorf("%d cells left, %d looked at", n, len(looked))
	}
	for k, n := range looked {
		if len(k) == 5 && n != 1 || n > 2 {
			t.Fatalf("%q was looked at %d times", k, n)
		}
		if c := find(table, k); (c == nil) != (len(k) == 5) {
			t.Fatalf("%q: %v", k, c)
		}
	}
	forget := func(*local.Cell) local.Fate { return local.Forget }
	table.Sweep(1<<20, forget)
	if n := table.Len(); n != 0 {
		t.Errorf("%d cells left", n)
	}
	table.Sweep(10, forget) // of nothing
	add(table, "again")
	if find(table, "again") == nil {
		t.Error("lost")
	}
}

func TestFindAllocatesNothing(t *testing.T) {
	table := local.NewTable(4, 100, yes)
	c := add(table, "k")
	hash := xxhash.Sum64String("k")
	if n := testing.AllocsPerRun(1000, func() {
		if table.Find(hash, 0, "k") != c {
			t.Fatal()
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A key of which a memo is kept is the same cell again when it is asked for; memos give way before cells in use do, and end.
func TestMemos(t *testing.T) {
	const most = 1000
	table := local.NewTable(4, 2*most, yes)
	own := local.Own{}
	own.Add(7, 3)
	for i := range most {
		c := add(table, fmt.Sprint(i))
		c.Born, c.Version, c.Known = int64(i+1), int64(i+2), int64(1000+i%2*1000)
		if i%3 == 0 {
			c.Own = own
		}
	}
	remember := func(*local.Cell) local.Fate { return local.Remember }
	table.Sweep(2*most, remember)
	if n, m := table.Len(), table.Remembered(); n != 0 || m != most {
		t.Fatalf("%d cells and %d memos, want %d memos", n, m, most)
	}
	for i := range 30 {
		k := fmt.Sprint(i)
		if find(table, k) != nil {
			t.Fatalf("%q was swept and is found", k)
		}
		if c := table.FindOrAdd(xxhash.Sum64String(k), 1, k, func(*local.Cell) {}); c.Born != 0 {
			t.Errorf("another limiter's %q is born at %d", k, c.Born)
		}
		c := add(table, k)
		want := local.Own{}
		if i%3 == 0 {
			want = own
		}
		if c.Born != int64(i+1) || c.Version != int64(i+2) || c.Known != int64(1000+i%2*1000) || c.Own != want {
			t.Errorf("%q is restored as %+v", k, c.Settlement)
		}
	}
	seen := map[string]bool{}
	table.EachRemembered(func(owner uint32, key string) { seen[key] = owner == 0 })
	if n := table.Remembered(); n != len(seen) || n != most-30 {
		t.Errorf("%d memos, %d of them seen", n, len(seen))
	}
	for part := range 3 {
		table.Expire(1000, part, 3)
	}
	if n := table.Remembered(); n >= len(seen) || n < len(seen)/3 {
		t.Errorf("%d memos are left of %d, want the half", n, len(seen))
	}
	for i := range most * 7 / 4 { // more than there is room for beside the memos
		add(table, "new"+fmt.Sprint(i))
	}
	for i := range 30 {
		if k := fmt.Sprint(i); find(table, k) == nil {
			t.Errorf("%q gave way to a memo", k)
		}
	}
	if n, m := table.Len(), table.Remembered(); n+m > 2*most || m >= len(seen)/2 {
		t.Errorf("%d cells and %d memos, want %d at most", n, m, 2*most)
	}
	for part := range 3 {
		table.Expire(2000, part, 3)
	}
	if n := table.Remembered(); n != 0 {
		t.Errorf("%d memos are left after their end", n)
	}
}

// Keys may be any bytes, and may collide: then the one remembered last is, and the other is not taken for it.
func TestMemosOfAnyKey(t *testing.T) {
	table := local.NewTable(1, 100, yes)
	keys := []string{"", "\x00", "a", strings.Repeat("long ", 10_000), "\xff\xfe{1}:"}
	for i, k := range keys {
		c := table.FindOrAdd(uint64(i), 3, k, func(*local.Cell) {})
		c.Born, c.Version, c.Known = 1<<62, 1<<62+1, 1<<62+int64(i)
	}
	remember := func(*local.Cell) local.Fate { return local.Remember }
	table.Sweep(100, remember)
	for i, k := range keys {
		if c := table.FindOrAdd(uint64(i), 3, k, func(*local.Cell) {}); c.Born != 1<<62 || c.Version != 1<<62+1 || c.Known != 1<<62+int64(i) {
			t.Errorf("%.9q is restored as %+v", k, c.Settlement)
		}
	}
	for i, k := range []string{"first", "second"} {
		c := table.FindOrAdd(77, 3, k, func(*local.Cell) {})
		c.Born = int64(100 + i)
		table.Sweep(100, func(x *local.Cell) local.Fate {
			if x == c {
				return local.Remember
			}
			return local.Keep
		})
	}
	if c := table.FindOrAdd(77, 3, "first", func(*local.Cell) {}); c.Born != 0 {
		t.Errorf("the first of two is restored as %+v", c.Settlement)
	}
	if c := table.FindOrAdd(77, 3, "second", func(*local.Cell) {}); c.Born != 101 || table.Remembered() != 0 {
		t.Errorf("the second of two is restored as %+v, %d memos are left", c.Settlement, table.Remembered())
	}
}
