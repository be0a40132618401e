package tierlimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier/local"
)

// A Hybrid without Redis that lets go of idle keys decides as one that remembers all.
func TestSweepForgetsNothing(t *testing.T) {
	for _, limit := range five(10, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, err := NewLocal(WithShards(1))
				if err != nil {
					t.Fatal(err)
				}
				l, err := h.Limiter("l", limit)
				if err != nil {
					t.Fatal(err)
				}
				all := map[string]local.State{}
				r := rand.New(rand.NewPCG(1, uint64(limit.Algorithm)))
				swept := 0
				for i := range 20_000 {
					time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond)
					key, n := fmt.Sprint(r.IntN(40)), 1+r.Int64N(6)
					at := h.wall(h.now())
					s := all[key]
					if s == nil {
						s = local.New(limit.tier(), at, true)
						all[key] = s
					}
					want := s.Take(at, limit.tier(), n)
					got, err := l.AllowN(context.Background(), key, n)
					if err != nil || got.Allowed != want.Allowed || got.Remaining != want.Remaining {
						t.Fatalf("call %d: %v %v, want %+v", i, got, err, want)
					}
					if i%10 == 0 {
						before := h.table.Len()
						h.table.Sweep(100, h.idle)
						swept += before - h.table.Len()
					}
				}
				if swept < 100 {
					t.Errorf("%d cells were let go of: too few to say anything", swept)
				}
			})
		})
	}
}

// Keys that are full and idle leave the cache by themselves, with Redis by the loop, without it as others come.
func TestIdleKeysAreLetGo(t *testing.T) {
	const keys = 5000
	for _, limit := range five(1000, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{})
				defer d.close()
				ctx := t.Context()
				for i := range keys {
					if _, err := d.ls[0].Allow(ctx, fmt.Sprint(i)); err != nil {
						t.Fatal(err)
					}
				}
				table := d.hs[0].table
				if n := table.Len(); n < keys*9/10 {
					t.Fatalf("%d cells of %d keys", n, keys)
				}
				time.Sleep(3 * sweepRound)
				if n := table.Len(); n != 0 {
					t.Errorf("%d cells are left", n)
				}
				if n := d.spend(0, 1); n != 1 {
					t.Error("a key that was let go of is not asked anew")
				}
			})
			synctest.Test(t, func(t *testing.T) {
				h, err := NewLocal()
				if err != nil {
					t.Fatal(err)
				}
				l, err := h.Limiter("l", limit)
				if err != nil {
					t.Fatal(err)
				}
				most := 0
				for i := range 20 * keys {
					if _, err := l.Allow(t.Context(), fmt.Sprint(i)); err != nil {
						t.Fatal(err)
					}
					time.Sleep(10 * time.Millisecond) // a hundred keys are in use at a time
					most = max(most, h.table.Len())
				}
				if most > 1000 {
					t.Errorf("%d cells of a few hundred keys in use", most)
				}
			})
		})
	}
}

// What a cell holds or has to tell keeps it, what it could tell stays as a memo.
func TestWhatKeepsACell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(100, time.Hour), model.Variant{})
		defer d.close()
		d.spend(0, 1)
		h := d.hs[0]
		before := d.cell(0)
		time.Sleep(3 * sweepRound)
		if n, m := h.table.Len(), h.table.Remembered(); n != 0 || m != 1 {
			t.Fatalf("%d cells and %d memos, want only a memo", n, m)
		}
		c := d.ls[0].cell(d.ls[0].hash("k"), "k")
		if c.Born != before.Born || c.Version != before.Version || c.Known != before.Known || c.Own != before.Own || c.Born == 0 || c.Own == (local.Own{}) {
			t.Errorf("restored: %d, %d, until %d, %v; was %d, %d, until %d, %v", c.Born, c.Version, c.Known, c.Own, before.Born, before.Version, before.Known, before.Own)
		}
		if n := h.table.Remembered(); n != 0 {
			t.Errorf("%d memos of keys with cells", n)
		}
		d.spend(0, 1)
		c.Mu.Lock()
		known := c.Known
		c.Known = 0
		c.Mu.Unlock()
		if c.Mu.Lock(); h.idle(c) != local.Keep {
			t.Error("given up while somebody holds it")
		}
		c.Mu.Unlock()
		for name, f := range map[string]func(*local.Cell, bool){
			"queued": func(c *local.Cell, on bool) {
				c.Ticket = 0
				if on {
					c.Ticket = 1
				}
			},
			"waiters": func(c *local.Cell, on bool) { c.Waiters = map[bool][]*local.Waiter{true: {{}}}[on] },
			"lease":   func(c *local.Cell, on bool) { c.Slot, c.Base = one(on), one(on) },
			"known":   func(c *local.Cell, on bool) { c.Known = one(on) * known },
			"denial":  func(c *local.Cell, on bool) { c.Deny(1, one(on)*known) },
			"share": func(c *local.Cell, on bool) {
				c.Share = nil
				if on {
					c.Share = local.New(d.ls[0].Limit().tier(), h.wall(h.now()), true)
					c.Share.Take(h.wall(h.now()), d.ls[0].Limit().tier(), 1)
				}
				c.Outage().ShareAt = neverHeard
			},
			"told":     func(c *local.Cell, on bool) { c.Outage().BackSent = one(on) },
			"refund":   func(c *local.Cell, on bool) { c.Refund = one(on) },
			"charge":   func(c *local.Cell, on bool) { c.ChargeCold = one(on) },
			"returned": func(c *local.Cell, on bool) { c.Retired = one(on) },
		} {
			c.Mu.Lock()
			f(c, true)
			c.Mu.Unlock()
			if h.idle(c) != local.Keep {
				t.Errorf("%s does not keep a cell", name)
			}
			c.Mu.Lock()
			c.Dead = false
			f(c, false)
			c.Mu.Unlock()
		}
		if h.idle(c) != local.Forget {
			t.Error("kept for nothing")
		}
		c.Mu.Lock()
		c.Dead = false
		c.Mu.Unlock()
	})
}

func one(on bool) int64 {
	if on {
		return 1
	}
	return 0
}

// A key that lies idle and is remembered is told to a Redis that has lost it, before anybody asks for it.
func TestAMemoIsToldToARedisThatForgot(t *testing.T) {
	for _, limit := range []Limit{TokenBucket(100, time.Hour), FixedWindow(100, 10*time.Hour), SlidingWindow(100, time.Hour), SlidingLog(100, time.Hour)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{})
				defer d.close()
				if n := d.spend(0, 60); n != 60 {
					t.Fatalf("%d of 60 admitted", n)
				}
				time.Sleep(3 * sweepRound)
				if n, m := d.hs[0].table.Len(), d.hs[0].table.Remembered(); n != 0 || m != 1 {
					t.Fatalf("%d cells and %d memos, want only a memo", n, m)
				}
				d.w.mu.Lock()
				d.w.store.Flush()
				d.w.mu.Unlock()
				time.Sleep(10 * simBeat)
				want := 40
				if limit.tier().Algorithm.Bucket() {
					want = 0 // how much was there nobody knows: it starts empty
				}
				if n := d.spend(1, 100); n > want {
					t.Errorf("%d admitted after 60 of 100, want at most %d", n, want)
				}
			})
		})
	}
}

// With a new period the windows are others: what was counted in the old ones is not told of the new.
func TestANewPeriodReachesMemos(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(100, 10*time.Hour), model.Variant{})
		defer d.close()
		d.spend(0, 60)
		time.Sleep(3 * sweepRound)
		if n := d.hs[0].table.Remembered(); n != 1 {
			t.Fatalf("%d memos, want 1", n)
		}
		if err := d.ls[0].SetLimit(FixedWindow(100, time.Minute)); err != nil {
			t.Fatal(err)
		}
		if c := d.cell(0); c == nil || c.Own != (local.Own{}) {
			t.Errorf("after a new period: %+v", c)
		}
	})
}

// Keys that were asked for in an outage are let go of like others once it is over and they are full.
func TestCellsOfAnOutageAreLetGo(t *testing.T) {
	for _, limit := range five(1000, time.Second) {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/seen before=%t", limit.Algorithm, before), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(0))
					defer d.close()
					all := func() {
						for i := range 500 {
							if _, err := d.ls[0].Allow(t.Context(), fmt.Sprint(i)); err != nil {
								t.Fatal(err)
							}
						}
					}
					if before {
						all()
					}
					d.cutAll()
					time.Sleep(10 * time.Second)
					all()
					d.wires[0].setFate(nil)
					until(t, "it is back", func() bool { return online(d.hs[0]) })
					time.Sleep(6 * sweepRound)
					if n := d.hs[0].table.Len() + d.hs[0].table.Remembered(); n != 0 {
						t.Errorf("%d keys are held that are idle and full for a minute", n)
					}
				})
			})
		}
	}
}

// What was spent of a lease that ended in an outage, and so was never reported, is told by a memo too, should Redis lose its data
// meanwhile.
func TestAMemoTellsWhatWasNotReported(t *testing.T) {
	inParts := SlidingWindow(100, 2*time.Minute)
	inParts.SubWindows = 4
	for _, limit := range []Limit{inParts, SlidingLog(100, 2*time.Minute)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(1), WithBreaker(quick), WithLeaseTTL(5*time.Second))
				d.intoWindow(limit.Period/4, limit.Period/4-10*time.Second) // a sliding window's lease ends with its part
				for i := 0; i < 20 && (i == 0 || d.cell(0).Tokens() < 10); i++ {
					d.spend(0, 1)
					time.Sleep(time.Millisecond)
				}
				d.cutAll()
				if held := int(d.cell(0).Tokens()); held < 10 || d.spend(0, held) != held {
					t.Fatalf("%d tokens were in hand", held)
				}
				until(t, "only a memo is left", func() bool { return d.hs[0].table.Len() == 0 && d.hs[0].table.Remembered() == 1 })
				d.w.mu.Lock()
				d.w.store.Flush()
				d.w.mu.Unlock()
				d.wires[0].setFate(nil)
				until(t, "it is back", func() bool { return online(d.hs[0]) })
				time.Sleep(2 * simBeat)
				for range 200 {
					d.spend(0, 1)
					time.Sleep(time.Millisecond)
				}
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// Also of one that becomes a cell while SetLimit is at work.
func TestANewPeriodReachesAMemoThatIsRestored(t *testing.T) {
	for _, race := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 1, FixedWindow(100, 5*time.Minute), model.Variant{}, WithShards(1), WithLocalShare(0))
			l := d.ls[0]
			if r, err := l.Allow(t.Context(), "other"); err != nil || !r.Allowed {
				t.Fatal(r, err)
			}
			d.spend(0, 60)
			other := d.hs[0].table.Find(l.hash("other"), l.id, "other")
			for d.hs[0].table.Find(l.hash("k"), l.id, "k") != nil {
				other.Mu.Lock()
				other.Settled = d.hs[0].now() // in use
				other.Mu.Unlock()
				time.Sleep(time.Second)
			}
			if d.hs[0].table.Remembered() != 1 {
				t.Fatal("no memo")
			}
			long := FixedWindow(100, time.Hour)
			if race {
				other.Mu.Lock() // SetLimit waits for this cell: any that is busy will do
			}
			done := make(chan error, 1)
			go func() { done <- l.SetLimit(long) }()
			for range 100000 {
				runtime.Gosched()
			}
			if race {
				l.cell(l.hash("k"), "k") // a check of k begins
				other.Mu.Unlock()
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if c := d.cell(0); c == nil || c.Own != (local.Own{}) {
				t.Errorf("race=%t: Own is still of the old period: %+v", race, c.Own)
			}
			d.close()
		})
	}
}

// Denials that were answered in process count, also of a key that is let go.
func TestDenialsOfKeysLetGoAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(10, 10*time.Second), model.Variant{}, WithLocalShare(0))
		defer d.close()
		denied := int64(1000 - d.spend(0, 1000))
		time.Sleep(5 * time.Minute)
		if n := d.ls[0].Stats().Denied; n != denied {
			t.Errorf("%d were denied, %d are counted five minutes later; %d keys", denied, n, d.hs[0].Stats().Keys)
		}
	})
}

// Keys of before Redis was first heard are let go when they are idle.
func TestKeysOfBeforeAreLetGo(t *testing.T) {
	for _, limit := range five(100, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x := &wire{w: newWorld(model.Variant{}, time.Hour, 0)}
				x.setFate(cutOff)
				h, l := join(t, x, limit, 0, WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithInstances(2))
				until(t, "away", func() bool { return h.Stats().State == StateShare })
				for _, k := range []string{"a", "b", "c"} {
					if r, err := l.Allow(t.Context(), k); err != nil || !r.Allowed {
						t.Fatal(r, err)
					}
				}
				x.setFate(nil)
				until(t, "online", func() bool { return online(h) })
				time.Sleep(10 * time.Minute)
				if s := h.Stats(); s.Keys != 0 {
					t.Errorf("ten minutes later: %+v", s)
				}
				closeAll(t, h)
				x.w.air.Wait()
			})
		})
	}
}
