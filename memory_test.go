package tierlimit

import (
	"context"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

const (
	floodMaxKeys = 100_000
	hotKeys      = 100
	heapAllowed  = 64 << 20
)

// heap is what the collector cannot free.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// floodKeys is how many keys a flood has: all of them with TIERLIMIT_LONG=1, as in .ci/run; else a fifth, which is still 20 times as
// many as may stay; still fewer under the race detector, which makes it 10 times slower.
func floodKeys(t *testing.T, n int) int {
	all := n
	switch {
	case raceEnabled:
		n /= 20
	case os.Getenv("TIERLIMIT_LONG") == "":
		n /= 5
	}
	if n < all {
		t.Logf("%d keys; TIERLIMIT_LONG=1 without the race detector makes it %d", n, all)
	}
	return n
}

// lateness sleeps for a millisecond again and again until it is asked how much longer that took, of a hundred times all but the worst one.
func lateness() (late func() time.Duration) {
	stop, done := make(chan struct{}), make(chan []time.Duration, 1)
	go func() {
		var all []time.Duration
		for {
			began := time.Now()
			select {
			case <-stop:
				done <- append(all, 0)
				return
			case <-time.After(time.Millisecond):
				all = append(all, time.Since(began)-time.Millisecond)
			}
		}
	}()
	return func() time.Duration {
		close(stop)
		all := <-done
		slices.Sort(all)
		return all[len(all)*99/100]
	}
}

func hotNames() []string {
	names := make([]string, hotKeys)
	for i := range names {
		names[i] = "hot" + strconv.Itoa(i)
	}
	return names
}

// G7: a rotation of 10 million keys (with TIERLIMIT_LONG=1) costs bounded memory and no key in use its count; and a sweep stalls nobody.
func TestKeyRotationAlone(t *testing.T) {
	before := heap()
	h, err := NewLocal(WithMaxKeys(floodMaxKeys))
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter("l", TokenBucket(10, 24*time.Hour)) // no key is full again meanwhile, and let go of
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	hot := hotNames()
	n := floodKeys(t, 10_000_000)
	late := lateness()
	r := rand.New(rand.NewPCG(1, 2))
	kept, asked := 0, 0
	var slow []time.Duration
	buf := make([]byte, 0, 32)
	for i := range n {
		buf = strconv.AppendUint(buf[:0], r.Uint64(), 36)
		if i%1000 == 0 { // in use: a hundred hot keys, a thousand times seldomer than the flood as a whole
			for _, k := range hot {
				if h.table.Find(l.hash(k), l.id, k) != nil {
					kept++
				}
				asked++
				if _, err := l.Allow(ctx, k); err != nil {
					t.Fatal(err)
				}
			}
		}
		if i%100 == 0 {
			began := time.Now()
			_, _ = l.Allow(ctx, string(buf))
			slow = append(slow, time.Since(began))
			continue
		}
		if _, err := l.Allow(ctx, string(buf)); err != nil {
			t.Fatal(err)
		}
	}
	used := heap() - before
	slices.Sort(slow)
	p99 := slow[len(slow)*99/100]
	t.Logf("%d keys: heap %.1f MB, %d cells, hot keys found %.2f %%, p99 %v", n, float64(used)/(1<<20), h.table.Len(), 100*float64(kept)/float64(asked), p99)
	if used > heapAllowed {
		t.Errorf("heap %d bytes", used)
	}
	if got := h.table.Len(); got > floodMaxKeys {
		t.Errorf("%d cells, at most %d were asked for", got, floodMaxKeys)
	}
	if kept < asked*95/100 {
		t.Errorf("a hot key was found %d times of %d", kept, asked)
	}
	// One in a hundred sleeps of a millisecond took longer by that, too: then it is the machine.
	if late := late(); p99 > time.Millisecond+late && !raceEnabled {
		t.Errorf("p99 of a call that evicts: %v; the machine was %v late", p99, late)
	}
	runtime.KeepAlive(h)
}

// The same with leases: hot keys go on being answered locally while cold keys come once each, and what the evicted held
// goes back.
func TestKeyRotationLeased(t *testing.T) {
	w := newWorld(model.Variant{}, 0, 0)
	w.forget = true
	x := &wire{w: w}
	h, l := join(t, x, TokenBucket(1_000_000, time.Second), 0, WithMaxKeys(floodMaxKeys), WithRemoteTimeout(time.Second))
	defer closeAll(t, h)
	until(t, "online", func() bool { return online(h) })
	x.setFate(func(bool, []tier.Ask) fate { return fate{} })
	ctx := context.Background()
	hot := hotNames()
	n := floodKeys(t, 1_500_000)
	before := heap()

	const callers = 64
	keys := make(chan string, callers)
	done := make(chan struct{})
	for range callers {
		go func() {
			for k := range keys {
				if _, err := l.Allow(ctx, k); err != nil {
					t.Error(err)
				}
			}
			done <- struct{}{}
		}()
	}
	local, asked := 0, 0
	r := rand.New(rand.NewPCG(3, 4))
	for i := range n {
		keys <- strconv.FormatUint(r.Uint64(), 36)
		if i%200 == 0 {
			for _, k := range hot {
				res, err := l.Allow(ctx, k)
				if err != nil {
					t.Fatal(err)
				}
				if i < n/10 {
					continue // until they are known to be hot
				}
				asked++
				if res.Source == Local {
					local++
				}
			}
		}
	}
	close(keys)
	for range callers {
		<-done
	}
	// The memory of the Redis of this test is not the limiter's. While it is locked no heartbeat finds that it lost its data, upon
	// which it would be told all of it again.
	w.mu.Lock()
	w.store = model.New(model.Variant{})
	used := heap() - before
	w.mu.Unlock()
	t.Logf("%d keys: heap %.1f MB, %d cells, hot keys answered locally %.2f %%", n, float64(used)/(1<<20), h.table.Len(), 100*float64(local)/float64(asked))
	if used > heapAllowed {
		t.Errorf("heap %d bytes", used)
	}
	if got := h.table.Len(); got > floodMaxKeys+callers {
		t.Errorf("%d cells, at most %d were asked for", got, floodMaxKeys)
	}
	if local < asked*95/100 {
		t.Errorf("hot keys: %d of %d answered locally", local, asked)
	}
}

// Keys crafted to collide cost a bounded chain and never a wrong answer.
func TestCollidingKeys(t *testing.T) {
	table := local.NewTable(8, floodMaxKeys, func(*local.Cell) bool { return true })
	const same = 0xfeedfacecafebeef
	for i := range 100_000 {
		k := strconv.Itoa(i)
		c := table.FindOrAdd(same, 0, k, func(*local.Cell) {})
		if c.Key != k {
			t.Fatalf("asked for %q, got %q", k, c.Key)
		}
		if table.Find(same, 0, k) != c {
			t.Fatalf("%q is not found again", k)
		}
	}
	if n := table.Len(); n > 32 {
		t.Errorf("%d cells in one chain, docs/guarantees.md says at most 32", n)
	}
}

// Keys that collide do not push out one that is in use, nor one that is being settled.
func TestCollidingKeysSpareWhatIsInUse(t *testing.T) {
	const same = 0xfeedfacecafebeef
	var settled *local.Cell
	table := local.NewTable(8, floodMaxKeys, func(c *local.Cell) bool { return c != settled })
	settled = table.FindOrAdd(same, 0, "settled", func(*local.Cell) {})
	hot := table.FindOrAdd(same, 0, "hot", func(*local.Cell) {})
	for i := range 10_000 {
		if i%3 == 0 {
			hot.Touch()
		}
		table.FindOrAdd(same, 0, strconv.Itoa(i), func(*local.Cell) {})
	}
	if table.Find(same, 0, "hot") != hot || table.Find(same, 0, "settled") != settled || table.Len() > 32 {
		t.Errorf("the hot one is there: %t, the one being settled: %t, %d cells",
			table.Find(same, 0, "hot") == hot, table.Find(same, 0, "settled") == settled, table.Len())
	}
}

// xxhash has no seed, so keys can be chosen by it. Those that share its low bits with a key in use share neither its bucket nor its fate.
func TestChosenKeysResetNoLimit(t *testing.T) {
	h, err := NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(t, h)
	l, err := h.Limiter("login", TokenBucket(5, 24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	admitted := 0
	try := func() {
		for range 10 {
			if r, err := l.Allow(t.Context(), "k"); err != nil {
				t.Fatal(err)
			} else if r.Allowed {
				admitted++
			}
		}
	}
	try()
	const low = 1<<12 - 1
	for i, n := 0, 0; n < 3000; i++ {
		k := strconv.Itoa(i)
		if xxhash.Sum64String(k)&low != xxhash.Sum64String("k")&low {
			continue
		}
		if _, err := l.Allow(t.Context(), k); err != nil {
			t.Fatal(err)
		}
		if n++; n%300 == 0 {
			try()
		}
	}
	if admitted > 5 {
		t.Errorf("%d of 5 a day admitted, beside 3000 other keys and with room for a million", admitted)
	}
	if n := h.Stats().Keys; n < 3000 {
		t.Errorf("%d keys are held of 3001", n)
	}
}
