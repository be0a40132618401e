package remote

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

func TestCluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 0)
	ctx := patience(t, 60*time.Second)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs(), DialerRetries: 1})
	t.Cleanup(func() { _ = rdb.Close() })
	var clients []*redis.Client
	for _, n := range cluster.Nodes {
		clients = append(clients, n.Process.Client())
	}
	c := newClient(rdb, prefix, counting())
	if !slices.Equal(c.domains(), []Domain{{}}) {
		t.Errorf("before Refresh: %v", c.domains())
	}
	ok(t, c.Refresh(ctx))
	where := func(key string) string {
		for i, s := range clients {
			if s.Exists(ctx, key).Val() == 1 {
				return fmt.Sprint(i)
			}
		}
		return "nowhere"
	}
	checkDomains(t, c, 3, where)
	other := newClient(rdb, prefix, counting())
	ok(t, other.Refresh(ctx))
	if !slices.Equal(c.domains(), other.domains()) {
		t.Errorf("domains %v and %v", c.domains(), other.domains())
	}
	for _, key := range awkwardKeys() {
		name, group := KeyName(prefix, "api", key)
		want := clients[0].ClusterKeySlot(ctx, fmt.Sprintf("{%d}", group)).Val()
		if got := clients[0].ClusterKeySlot(ctx, name).Val(); got != want || int(got) != slot(name) {
			t.Errorf("key %.20q: slot %d, its group's is %d", key, got, want)
		}
	}
	for i, s := range clients {
		if calls, _ := served(t, s, "command"); calls > 0 {
			t.Errorf("node %d was asked for its commands", i)
		}
	}

	// A slot without keys moves, first half way (ASK), then wholly (MOVED), to a node that does not know the scripts.
	from, to := clients[0], clients[1]
	ok(t, to.ScriptFlush(ctx).Err())
	var name string
	var group uint8
	for i := 0; name == "" || where(name) != "nowhere" || slot(name) >= 16384/3; i++ {
		name, group = KeyName(prefix, "moving", fmt.Sprint(i))
	}
	moving := slot(name)
	fromID, toID := from.ClusterMyID(ctx).Val(), to.ClusterMyID(ctx).Val()
	keys := from.ClusterGetKeysInSlot(ctx, moving, 10000).Val()
	ok(t, from.Del(ctx, keys...).Err())
	ok(t, to.Do(ctx, "CLUSTER", "SETSLOT", moving, "IMPORTING", fromID).Err())
	ok(t, from.Do(ctx, "CLUSTER", "SETSLOT", moving, "MIGRATING", toID).Err())
	for want := int64(1); want <= 2; want++ {
		if runs, err := exchange(ctx, c, name); err != nil || runs[0] != want {
			t.Fatalf("half moved: %v, %v", runs, err)
		}
		if there := to.ClusterGetKeysInSlot(ctx, moving, 10).Val(); !slices.Equal(there, []string{name}) {
			t.Fatalf("half moved: %q at the new place", there)
		}
		ok(t, to.ScriptFlush(ctx).Err())
	}
	ok(t, to.Do(ctx, "CLUSTER", "SETSLOT", moving, "NODE", toID).Err())
	ok(t, from.Do(ctx, "CLUSTER", "SETSLOT", moving, "NODE", toID).Err())
	for want := int64(3); want <= 5; want++ {
		if runs, err := exchange(ctx, c, name); err != nil || runs[0] != want {
			t.Fatalf("moved: %v, %v", runs, err)
		}
		ok(t, to.ScriptFlush(ctx).Err())
	}
	var target Domain
	for _, d := range c.domains() {
		if d.Tag != group && where(d.Keys(prefix)[0]) == "1" {
			target = d
		}
	}
	for c.Domain(group).Tag != min(target.Tag, group) { // the news spread by gossip
		ok(t, ctx.Err())
		ok(t, c.Refresh(ctx))
		time.Sleep(20 * time.Millisecond)
	}

	// A plain client that talks to a cluster learns that it must keep to one group.
	plain := newClient(clients[2], prefix, counting())
	var names []string
	for i := 0; len(names) < 2; i++ {
		if n, g := KeyName(prefix, "plain", fmt.Sprint(i)); where(Domain{c.Domain(g).Tag}.Keys(prefix)[0]) == "2" && (len(names) == 0 || slot(n) != slot(names[0])) {
			names = append(names, n)
		}
	}
	if _, err := exchange(ctx, plain, names...); !NotExecuted(err) || !plain.Grouped() {
		t.Errorf("keys of two slots: %v", err)
	}
	if runs, err := exchange(ctx, plain, names[0]); err != nil || runs[0] != 1 {
		t.Errorf("keys of one slot: %v, %v", runs, err)
	}

	// One master hangs: its own keys wait for their deadline, and nobody else's.
	ok(t, cluster.Nodes[0].Hang())
	unknown := 0
	for g := range Groups {
		n, g := keyOfGroup(g)
		if onOneOf(t, clients[1:], c.Domain(g).Keys(prefix)[0]) {
			if _, err := exchange(ctx, c, n); err != nil {
				t.Errorf("group %d beside a hung master: %v", g, err)
			}
			continue
		}
		if unknown < 5 {
			unknown++
			ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			if _, err := exchange(ctx, c, n); err == nil || NotExecuted(err) {
				t.Errorf("group %d on a hung master: %v", g, err)
			}
			cancel()
		}
	}
	ok(t, cluster.Nodes[0].Continue())

	// One master dies: its own keys fail, and nobody else's.
	ok(t, cluster.Nodes[2].Kill())
	for g := range Groups {
		n, g := keyOfGroup(g)
		dead := where(c.Domain(g).Keys(prefix)[0]) == "nowhere"
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		if _, err := exchange(ctx, c, n); (err != nil) != dead {
			t.Errorf("group %d: dead %v, %v", g, dead, err)
		}
		cancel()
	}
}

// keyOfGroup returns a key of a group.
func keyOfGroup(group int) (string, uint8) {
	for i := 0; ; i++ {
		if name, g := KeyName(prefix, "one", fmt.Sprint(i)); int(g) == group {
			return name, g
		}
	}
}

// onOneOf reports whether one of servers has key.
func onOneOf(t *testing.T, servers []*redis.Client, key string) bool {
	return slices.ContainsFunc(servers, func(s *redis.Client) bool { return s.Exists(t.Context(), key).Val() == 1 })
}
