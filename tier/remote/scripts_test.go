package remote

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier"
)

// The embedded scripts understand what is encoded here, and the other way round; what they decide is tested in package lua.
func TestEmbeddedScripts(t *testing.T) {
	s := redistest.Start(t)
	c := New(stock(t, s.Addr()), prefix)
	ctx := patience(t, 20*time.Second)
	for alg := tier.TokenBucket; int(alg) <= tier.Algorithms; alg++ {
		limit := tier.Limit{Algorithm: alg, Rate: 1000, Period: time.Minute, Burst: 100}
		if alg == tier.SlidingWindow {
			limit.SubWindows = 10
		}
		var asks []tier.Ask
		for i := range MaxKeys {
			name, _ := KeyName(prefix, fmt.Sprint("limit-", alg), fmt.Sprint("k", i))
			asks = append(asks, tier.Ask{Key: name, Limit: limit, SlotUS: 150_000, Need: []tier.Cost{{N: 1, Count: 3}, {N: 2, Count: 1}}, Want: 20})
		}
		r, err := c.Exchange(ctx, alg, 0, tier.Darkness{}, asks)
		ok(t, err)
		for i, g := range r.Grants {
			if g.Served != 5 || g.Lease != 20 || g.Lost || g.Credited || g.Born != r.Now || g.Version != 1 || g.Slot == 0 || g.LifeUS == 0 || g.Remaining != limit.Capacity()-25 || g.TTLUS <= 0 {
				t.Fatalf("algorithm %d, key %d: first %+v", alg, i, g)
			}
			// Half of it spent, a part kept, the rest handed back.
			asks[i].Need, asks[i].Want, asks[i].Lease, asks[i].Seen = nil, 0, g.Slot, g.Activity
			asks[i].Born, asks[i].Version, asks[i].Own, asks[i].Spent, asks[i].Carry, asks[i].Return = g.Born, g.Version, 15, 10, 4, 6
			if alg == tier.SlidingLog {
				asks[i].Spends = []tier.Spend{{AgeUS: 1000, Count: 7}, {AgeUS: 0, Count: 3}}
			}
		}
		r, err = c.Exchange(ctx, alg, r.Now+60e6, tier.Darkness{}, asks)
		ok(t, err)
		for i, g := range r.Grants {
			if g.Served != 0 || g.Lease != 0 || g.Lost || g.Version != 1 || g.Active != 1 || g.Born != asks[i].Born || g.Credited && g.Out != 4 {
				t.Fatalf("algorithm %d, key %d: second %+v", alg, i, g)
			}
		}
		if !slices.ContainsFunc(r.Grants, func(g tier.Grant) bool { return g.Credited }) {
			t.Errorf("algorithm %d: nothing credited", alg)
		}
		asks[0].Refund = tier.RefundAll
		late, err := c.Exchange(ctx, alg, 1, tier.Darkness{}, asks)
		if err != nil || !late.Late || late.Grants != nil {
			t.Errorf("algorithm %d, behind its fence: %+v, %v", alg, late, err)
		}
		asks[0].Refund = -2
		if _, err := c.Exchange(ctx, alg, 0, tier.Darkness{}, asks); !NotExecuted(err) {
			t.Errorf("algorithm %d, refund of -2: %v", alg, err)
		}
	}
}

func TestEmbeddedMembership(t *testing.T) {
	s := redistest.Start(t)
	c := New(stock(t, s.Addr()), prefix)
	ctx := patience(t, 20*time.Second)
	beat := func(op, id string, fence, remembered int64) View {
		t.Helper()
		v, err := c.Heartbeat(ctx, Domain{}, Beat{Fence: fence, Op: op, ID: id, HeartbeatUS: 1e6, DeadUS: 10e6, HorizonUS: 5e6, Remembered: remembered})
		ok(t, err)
		return v
	}
	v := beat(OpPeek, "a", 0, 0)
	if v.N != 0 || v.Rank != -1 || v.Beats != 0 || v.Now < 1e15 {
		t.Errorf("peek at nothing: %+v", v)
	}
	if v := beat(OpBeat, "a", 0, 0); v.N != 1 || v.Rank != 0 || !v.Ready || v.Beats != 1 || v.LostAt != 0 || v.Darkness.Fleet != 1 {
		t.Errorf("first beat: %+v", v)
	}
	if late := beat(OpBeat, "b", v.Now, 0); !late.Late || late.N != 0 || late.Now <= v.Now {
		t.Errorf("late beat: %+v", late)
	}
	if v := beat(OpBeat, "b", 0, 0); v.N != 2 || v.Rank != 1 || v.Ready || v.Beats != 2 {
		t.Errorf("second member: %+v", v)
	}
	beat(OpBeat, "a", 0, 2)
	if v := beat(OpChange, "b", 0, 0); v.Change != 1 || v.Rank != 1 {
		t.Errorf("change: %+v", v)
	}
	ok(t, s.FlushAll(ctx))
	if v := beat(OpBeat, "b", 0, 3); v.LostAt != v.Now || v.Beats != 4 {
		t.Errorf("after a loss: %+v", v)
	}
	if v := beat(OpLeave, "b", 0, 0); v.N != 0 || v.Rank != -1 {
		t.Errorf("leave: %+v", v)
	}
}
