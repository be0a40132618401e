package tierlimit

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/model"
)

// A warm Allow allocates nothing, be it admitted or denied, with Redis or without.
func TestWarmAllowAllocatesNothing(t *testing.T) {
	ctx := context.Background()
	for _, limit := range five(1_000_000_000, 2*time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			w := newWorld(model.Variant{}, 0, 0)
			h, l := join(t, &wire{w: w}, limit, 0, WithLocalShare(1))
			defer closeAll(t, h)
			until(t, "online", func() bool { return online(h) })
			for range 3 {
				if _, err := l.Allow(ctx, "k"); err != nil {
					t.Fatal(err)
				}
			}
			// A lease that the loop leaves alone meanwhile.
			c := h.table.Find(l.hash("k"), l.id, "k")
			c.Mu.Lock()
			c.Deposit(1_000_000, h.now()+int64(time.Minute), 0)
			c.InFlight = true
			c.Mu.Unlock()
			defer func() {
				c.Mu.Lock()
				c.InFlight = false
				c.Clear()
				c.Mu.Unlock()
			}()
			if n := testing.AllocsPerRun(1000, func() {
				if r, err := l.Allow(ctx, "k"); err != nil || !r.Allowed || r.Source != Local {
					t.Fatal(r, err)
				}
			}); n != 0 {
				t.Errorf("an admitted Allow makes %v allocations", n)
			}
			if n := testing.AllocsPerRun(1000, func() {
				if r, err := l.AllowN(ctx, "k", 3); err != nil || !r.Allowed || r.Source != Local {
					t.Fatal(r, err)
				}
			}); n != 0 {
				t.Errorf("an admitted AllowN makes %v allocations", n)
			}
			c.Clear()
			c.Deny(1, h.now()+int64(time.Minute))
			if n := testing.AllocsPerRun(1000, func() {
				if r, err := l.Allow(ctx, "k"); err != nil || r.Allowed || r.Source != Local {
					t.Fatal(r, err)
				}
			}); n != 0 {
				t.Errorf("a denied Allow makes %v allocations", n)
			}
			c.Allow()
		})
	}
}

func TestAllowAloneAllocatesNothing(t *testing.T) {
	ctx := context.Background()
	h, err := NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	for _, rate := range []int64{1, 1_000_000_000} {
		for _, limit := range five(rate, time.Hour) {
			l, err := h.Limiter(fmt.Sprintf("%v-%d", limit.Algorithm, rate), limit)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := l.Allow(ctx, "k"); err != nil {
				t.Fatal(err)
			}
			// A log of its own admissions grows with them, but not with every one.
			if n := testing.AllocsPerRun(1000, func() { _, _ = l.Allow(ctx, "k") }); n != 0 {
				t.Errorf("%v: %v allocations", limit, n)
			}
			if n := testing.AllocsPerRun(1000, func() { _, _ = l.Peek(ctx, "k") }); n != 0 {
				t.Errorf("%v: Peek: %v allocations", limit, n)
			}
		}
	}
	l, err := h.Limiter("unlimited", Unlimited())
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() { _, _ = l.Allow(ctx, "k") }); n != 0 {
		t.Errorf("unlimited: %v allocations", n)
	}
}
