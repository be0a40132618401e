//go:build !race

// The race detector makes each part dearer by a factor of its own; .ci/run runs this without it.

package tierlimit

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier/local"
)

// What a warm check may cost beside the least that any keyed limiter does: hash the key, find it, read the clock, count. The bounds are a
// third above what it is: ratios of times taken in turns, each the least of many, so that neither the machine nor its load is judged.
func TestPriceOfAWarmCheck(t *testing.T) {
	const (
		rounds, each       = 60, 5000
		mostWarm, mostDeny = 3.1, 3.2 // measured 2.3 and 2.4
	)
	ctx := context.Background()
	w := newWorld(model.Variant{}, 0, 0)
	h, l := join(t, &wire{w: w}, TokenBucket(1_000_000_000, 2*time.Second), 0, WithLocalShare(1))
	defer closeAll(t, h)
	until(t, "online", func() bool { return online(h) })
	warm := func(key string) *local.Cell {
		if _, err := l.Allow(ctx, key); err != nil {
			t.Fatal(err)
		}
		c := h.table.Find(l.hash(key), l.id, key)
		c.Mu.Lock()
		c.InFlight = true // the loop leaves it alone
		c.Mu.Unlock()
		return c
	}
	leased, denied := warm("customer-0123456789abcdef"), warm("customer-fedcba9876543210")
	leased.Deposit(1<<40, h.now()+int64(time.Hour), 0)
	denied.Clear()
	denied.Deny(1, h.now()+int64(time.Hour))
	defer func() {
		for _, c := range []*local.Cell{leased, denied} {
			c.Mu.Lock()
			c.InFlight = false
			c.Clear()
			c.Mu.Unlock()
		}
	}()
	var count atomic.Int64
	allow := func(c *local.Cell, want bool) func() {
		return func() {
			if r, err := l.Allow(ctx, c.Key); err != nil || r.Allowed != want || r.Source != Local {
				t.Fatal(r, err)
			}
		}
	}
	parts := []func(){
		func() {
			if c := l.table.Find(l.hash(leased.Key), l.id, leased.Key); c != nil && h.clock.Fast() > 0 {
				count.Add(1)
			}
		},
		allow(leased, true),
		allow(denied, false),
	}
	least := make([]time.Duration, len(parts))
	for range rounds {
		for i, part := range parts {
			start := time.Now()
			for range each {
				part()
			}
			if d := time.Since(start); least[i] == 0 || d < least[i] {
				least[i] = d
			}
		}
	}
	floor := float64(least[0])
	t.Logf("floor %v, admitted %.2f, denied %.2f of it", least[0]/each, float64(least[1])/floor, float64(least[2])/floor)
	if x := float64(least[1]) / floor; x > mostWarm {
		t.Errorf("an admitted check costs %.2f floors, want %.2f at most", x, mostWarm)
	}
	if x := float64(least[2]) / floor; x > mostDeny {
		t.Errorf("a denied check costs %.2f floors, want %.2f at most", x, mostDeny)
	}
}
