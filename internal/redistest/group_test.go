//go:build unix

package redistest

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// apart reports whether nodes can be isolated on this system.
func apart(t *testing.T, g *Group) bool {
	if runtime.GOOS == "linux" {
		return true
	}
	if g.Nodes[0].host == g.Nodes[1].host {
		if err := g.Isolate(0); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("Isolate: %v", err)
		}
		return false
	}
	return true
}

func TestClusterDeadMasterFailsOnlyItsKeys(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 0, Persist())
	ctx := within(t)
	cl := c.Client()
	defer cl.Close()
	var keys [masters]string
	for i := range keys {
		var err error
		keys[i], err = c.Key(ctx, i, "k")
		ok(t, err)
		ok(t, cl.Set(ctx, keys[i], i, 0).Err())
		owner, err := c.Owner(ctx, (i+1)%masters, keys[i])
		ok(t, err)
		if owner != i {
			t.Errorf("%s is on node %d, want %d", keys[i], owner, i)
		}
		// Clients come through the proxies only.
		if c.Nodes[i].Proxy.Conns() == 0 {
			t.Errorf("node %d: nobody came through its proxy", i)
		}
	}
	if err := CheckTTLs(ctx, cl, "k"); err == nil || !strings.Contains(err.Error(), "3 keys") {
		t.Errorf("CheckTTLs sees not all masters: %v", err)
	}

	ok(t, c.Nodes[1].Kill())
	eventually(t, func() error { // until the others call it failed
		f, err := clusterInfo(ctx, c.Nodes[0])
		if err == nil && f["cluster_slots_fail"] == "0" {
			err = errors.New("not yet failed")
		}
		return err
	})
	if err := cl.Incr(ctx, keys[1]).Err(); err == nil {
		t.Error("a dead master's key is served")
	}
	for _, i := range []int{0, 2} {
		ok(t, cl.Incr(ctx, keys[i]).Err())
	}
	ok(t, c.Nodes[1].Restart())
	ok(t, c.Nodes[2].RestartEmpty()) // the same node, without its keys
	ok(t, c.WaitOK(ctx))
	for i, want := range []string{"1", "1", ""} {
		if v := get(t, fresh(t, c.Nodes[i].Addr()), keys[i]); v != want {
			t.Errorf("node %d has %q, want %q", i, v, want)
		}
	}
}

// Cut off from the other nodes a master loses its slots to its replica, but
// clients still reach it: its writes from then on are lost.
func TestClusterIsolatedMasterIsReplaced(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 1)
	ctx := within(t)
	key, err := c.Key(ctx, 0, "k")
	ok(t, err)
	if !apart(t, &c.Group) {
		return
	}
	old := fresh(t, c.Nodes[0].Proxy.Addr())
	ok(t, old.Set(ctx, key, "before", 0).Err())
	ok(t, WaitReplica(ctx, c.Nodes[3].Addr()))
	ok(t, c.Isolate(0))
	ok(t, old.Set(ctx, key, "lost", 0).Err())
	eventually(t, func() error {
		owner, err := c.Owner(ctx, 1, key)
		if err == nil && owner != 3 {
			err = fmt.Errorf("the owner is node %d", owner)
		}
		return err
	})
	if v := get(t, fresh(t, c.Nodes[3].Addr()), key); v != "before" {
		t.Errorf("the new master has %q", v)
	}
	ok(t, c.Heal(0))
	ok(t, c.WaitOK(ctx))
	eventually(t, func() error {
		owner, err := c.Owner(ctx, 0, key)
		if err == nil && owner != 3 {
			err = fmt.Errorf("the old master still thinks the owner is node %d", owner)
		}
		return err
	})
}

func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	s := StartSentinel(t, 1, Persist())
	ctx := within(t)
	cl := s.Client()
	defer cl.Close()
	ok(t, cl.Set(ctx, "k", "1", 0).Err())
	if i, err := s.Primary(ctx); err != nil || i != 0 {
		t.Fatalf("primary is node %d, %v", i, err)
	}
	ok(t, WaitReplica(ctx, s.Nodes[1].Addr()))
	ok(t, s.Nodes[0].Kill())
	eventually(t, func() error { return cl.Set(ctx, "k", "2", 0).Err() })
	if i, err := s.Primary(ctx); err != nil || i != 1 {
		t.Fatalf("primary is node %d, %v", i, err)
	}
	if s.Doors[0].Conns() == 0 {
		t.Error("nobody came through the sentinel's door")
	}
	if v := get(t, fresh(t, s.Nodes[1].Addr()), "k"); v != "2" {
		t.Errorf("the promoted replica has %q", v)
	}
	// What the sentinel made of it, it stays, with its data. The sentinel wrote
	// that down with the promotion.
	ok(t, s.Nodes[1].Restart())
	role, err := fresh(t, s.Nodes[1].Addr()).Do(ctx, "ROLE").Slice()
	if err != nil || role[0] != "master" {
		t.Errorf("after a restart its role is %v, %v", role, err)
	}
	if v := get(t, fresh(t, s.Nodes[1].Addr()), "k"); v != "2" {
		t.Errorf("after a restart it has %q", v)
	}
}

func TestSentinelBadCount(t *testing.T) {
	for _, n := range []int{-1, 0, 4} {
		if _, err := OpenSentinel(n); err == nil {
			t.Errorf("%d sentinels: no error", n)
		}
	}
}

func TestSentinelIsolatedPrimary(t *testing.T) {
	t.Parallel()
	s := StartSentinel(t, 3)
	if !apart(t, &s.Group) {
		return
	}
	ctx := within(t)
	old := redis.NewClient(s.Nodes[0].Proxy.Options())
	defer old.Close()
	ok(t, s.Isolate(0))
	eventually(t, func() error {
		i, err := s.Primary(ctx)
		if err == nil && i != 1 {
			err = fmt.Errorf("primary is node %d", i)
		}
		return err
	})
	ok(t, old.Set(ctx, "k", "lost", 0).Err()) // it does not know
	ok(t, s.Heal(0))
}

// A slot that moves is served all the while, and its keys arrive.
func TestClusterMovesASlot(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 0)
	ctx := within(t)
	cl := c.Client()
	defer cl.Close()
	key, err := c.Key(ctx, 0, "k")
	ok(t, err)
	slot, err := c.Slot(ctx, key)
	ok(t, err)
	tag := "{" + key + "}"
	owner := func(want int) {
		t.Helper()
		for i := range c.Nodes {
			if got, err := c.Owner(ctx, i, key); err != nil || got != want {
				t.Errorf("node %d says that node %d has the slot, %v; want %d", i, got, err, want)
			}
		}
	}
	ok(t, cl.Set(ctx, key, "v", time.Hour).Err())
	m, err := c.OpenSlot(ctx, slot, 0, 2)
	ok(t, err)
	owner(0)
	ok(t, cl.Incr(ctx, tag+"new").Err()) // by ASK
	if n, err := fresh(t, c.Nodes[2].Addr()).ClusterCountKeysInSlot(ctx, slot).Result(); err != nil || n != 1 {
		t.Errorf("%d keys are there already, %v, want the new one", n, err)
	}
	if err := cl.MGet(ctx, key, tag+"new").Err(); err == nil || !strings.HasPrefix(err.Error(), "TRYAGAIN") {
		t.Errorf("keys on both sides: %v", err)
	}
	if n, err := m.MoveKeys(ctx); err != nil || n != 1 {
		t.Errorf("%d keys moved, %v", n, err)
	}
	ok(t, cl.MGet(ctx, key, tag+"new").Err()) // by ASK
	ok(t, m.Close(ctx))
	owner(2)
	if v, err := cl.Get(ctx, key).Result(); err != nil || v != "v" {
		t.Errorf("%q, %v", v, err)
	}
	if ttl := cl.PTTL(ctx, key).Val(); ttl <= 0 {
		t.Errorf("its time to live is %v", ttl)
	}
}
