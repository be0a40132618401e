package clock

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// warm calls until the fast path is taken, where there is one.
func warm(t testing.TB, c *Clock) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		c.Fast()
		if c.dead.Load() || c.span.Load() > 0 {
			return
		}
	}
	t.Fatal("the cycles are not counted after 5 s")
}

// check reads Fast between two readings of Now: it must not lie before the first, nor Margin after the second.
func check(t *testing.T, c *Clock) bool {
	before := c.Now()
	fast := c.Fast()
	after := c.Now()
	if fast < before || fast > after+Margin {
		t.Errorf("Fast is %d ns after the reading before it and %d after the one behind it", fast-before, fast-after)
		return false
	}
	return true
}

func TestFastIsNeverBehind(t *testing.T) {
	c := New()
	warm(t, c)
	t.Logf("cycles are counted: %v", !c.dead.Load())
	var wg sync.WaitGroup
	for range 4 * runtime.GOMAXPROCS(0) { // more than get a processor: each is stopped between any two instructions
		wg.Go(func() {
			for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
				for range 1000 {
					if !check(t, c) {
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

// Time in a bubble does not pass with the processor's cycles.
func TestFastInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New()
		for range 100 {
			if c.Fast() != c.Now() {
				t.Fatalf("%d, but it is %d", c.Fast(), c.Now())
			}
			time.Sleep(3 * time.Millisecond)
		}
	})
}

// A counter that jumped is noticed, and not counted from until it goes evenly again.
func TestFalseCyclesAreNoticed(t *testing.T) {
	c := New()
	warm(t, c)
	if c.dead.Load() {
		if steady() {
			t.Fatal("the cycles of this machine go evenly, and are not counted")
		}
		t.Log("no cycles are counted on this machine: its clock is not made of them")
		return
	}
	good := c.anchor()
	for name, a := range map[string]anchor{
		"restarted": {cycles: good.cycles + 1<<40, ns: good.ns, worth: good.worth, span: good.span},
		"far ahead": {cycles: good.cycles - 1<<40, ns: good.ns, worth: good.worth, span: good.span},
	} {
		c.store(a)
		check(t, c)
		time.Sleep(time.Duration(span))
		check(t, c)
		if c.span.Load() != 0 {
			t.Errorf("%s: it is counted from", name)
		}
	}
	for range maxStrikes {
		c.mu.Lock()
		c.strike(anchor{})
		c.mu.Unlock()
	}
	if !c.dead.Load() {
		t.Errorf("still counting after %d strikes", maxStrikes)
	}
	check(t, c)
}

func BenchmarkClock(b *testing.B) {
	c := New()
	warm(b, c)
	b.Run("read=now", func(b *testing.B) {
		for b.Loop() {
			c.Now()
		}
	})
	b.Run("read=fast", func(b *testing.B) {
		for b.Loop() {
			c.Fast()
		}
	})
}
