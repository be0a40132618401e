package remote

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// byGroup sorts the names of n keys by their groups.
func byGroup(n int) map[uint8][]string {
	groups := map[uint8][]string{}
	for i := range n {
		name, group := KeyName(prefix, "api", fmt.Sprint("k", i))
		groups[group] = append(groups[group], name)
	}
	return groups
}

// checkDomains exchanges keys of every group and beats in every domain; where says on which server a key is.
func checkDomains(t *testing.T, c *Client, servers int, where func(key string) string) {
	t.Helper()
	ctx := patience(t, 20*time.Second)
	if !c.Grouped() {
		t.Error("not grouped")
	}
	home := map[Domain]string{}
	for _, d := range c.domains() {
		if _, err := c.Heartbeat(ctx, d, Beat{Op: OpBeat}); err != nil {
			t.Fatalf("heartbeat in %v: %v", d, err)
		}
		home[d] = where(d.Keys(prefix)[0])
		if c.Domain(d.Tag) != d {
			t.Errorf("domain %v is not that of its own tag", d)
		}
	}
	if len(home) != servers {
		t.Errorf("domains %v, want %d", home, servers)
	}
	groups := byGroup(2000)
	if len(groups) != Groups {
		t.Fatalf("keys of %d groups", len(groups))
	}
	for group, names := range groups {
		if runs, err := exchange(ctx, c, names...); err != nil || slices.Min(runs) < 1 {
			t.Fatalf("group %d: %v, %v", group, runs, err)
		}
		d := c.Domain(group)
		if d.Tag > group || c.domainOf(names[0]) != d {
			t.Errorf("group %d is of %v", group, d)
		}
		for _, name := range names[:1] {
			if got := where(name); got != home[d] {
				t.Errorf("group %d: %q lives on %s, its domain on %s", group, name, got, home[d])
			}
		}
	}
	_, err := exchange(ctx, c, groups[1][0], groups[2][0])
	if p, ok := errors.AsType[*ProtocolError](err); !ok || !NotExecuted(p) {
		t.Errorf("keys of two groups: %v", err)
	}
	for _, key := range awkwardKeys() {
		if runs, err := exchange(ctx, c, keyNamed(key)); err != nil || runs[0] != 1 {
			t.Errorf("key %.20q: %v, %v", key, runs, err)
		}
	}
}

func TestRing(t *testing.T) {
	servers := map[string]*redistest.Process{}
	addrs := map[string]string{}
	clients := map[string]*redis.Client{}
	for _, name := range []string{"one", "two", "three"} {
		servers[name] = redistest.Start(t)
		addrs[name] = servers[name].Addr()
		clients[name] = servers[name].Client()
	}
	newRing := func(addrs map[string]string) *redis.Ring {
		rdb := redis.NewRing(&redis.RingOptions{Addrs: addrs, HeartbeatFrequency: 20 * time.Millisecond, DialTimeout: time.Second, DialerRetries: 1})
		t.Cleanup(func() { _ = rdb.Close() })
		return rdb
	}
	rdb := newRing(addrs)
	c := newClient(rdb, prefix, counting())
	checkDomains(t, c, 3, func(key string) string {
		for name, rdb := range clients {
			if rdb.Exists(t.Context(), key).Val() == 1 {
				return name
			}
		}
		return "nowhere"
	})
	// Another instance names the domains alike.
	other := newClient(newRing(addrs), prefix, counting())
	if !slices.Equal(c.domains(), other.domains()) {
		t.Errorf("domains %v and %v", c.domains(), other.domains())
	}

	// The client drops a dead shard; its groups move to the living.
	ok(t, servers["two"].Kill())
	for ctx := patience(t, 10*time.Second); rdb.Len() > 2; time.Sleep(time.Millisecond) {
		ok(t, ctx.Err())
	}
	before := c.domains()
	if len(before) != 3 {
		t.Errorf("the topology changed by itself: %v", before)
	}
	ok(t, c.Refresh(t.Context()))
	if len(c.domains()) != 2 {
		t.Errorf("domains %v after %v", c.domains(), before)
	}
	ok(t, rdb.Close())
	if err := c.Refresh(t.Context()); err == nil || len(c.domains()) != 2 {
		t.Errorf("a closed ring: %v, domains %v", err, c.domains())
	}
}

func TestKindsOfClients(t *testing.T) {
	plain := stock(t, "127.0.0.1:1")
	failover := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{"127.0.0.1:1"}})
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, DialerRetries: 1})
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}, HeartbeatFrequency: time.Hour})
	pipelined, err := plain.AutoPipeline()
	ok(t, err)
	for name, c := range map[string]struct {
		rdb     redis.UniversalClient
		grouped bool
	}{
		"plain":    {plain, false},
		"embedded": {struct{ *redis.Client }{plain}, false},
		"failover": {failover, false},
		"cluster":  {cluster, true},
		"ring":     {ring, true},
		"unknown":  {struct{ redis.UniversalClient }{plain}, true},
		"pipeline": {pipelined, true},
	} {
		client := New(c.rdb, prefix)
		if client.Grouped() != c.grouped || len(client.domains()) != 1 {
			t.Errorf("%s: grouped %v, domains %v", name, client.Grouped(), client.domains())
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		err := client.Refresh(ctx)
		cancel()
		if (err != nil) != (name == "cluster") {
			t.Errorf("%s: Refresh: %v", name, err)
		}
	}
	for _, c := range []interface{ Close() error }{failover, cluster, ring} {
		_ = c.Close()
	}
}

func TestSurvey(t *testing.T) {
	servers := []*redis.Client{stock(t, "127.0.0.1:1"), stock(t, "127.0.0.1:2"), stock(t, "127.0.0.1:3")}
	i := -1
	c := newClient(servers[0], prefix, counting())
	topo, err := survey(prefix, func(string) (*redis.Client, error) { i++; return servers[i*3/Groups], nil })
	ok(t, err)
	c.topology.Store(topo)
	if got, want := c.domains(), []Domain{{0}, {86}, {171}}; !slices.Equal(got, want) {
		t.Errorf("domains %v, want %v", got, want)
	}
	for group, want := range map[uint8]uint8{0: 0, 85: 0, 86: 86, 170: 86, 171: 171, 255: 171} {
		if got := c.Domain(group); got.Tag != want {
			t.Errorf("group %d: %v", group, got)
		}
		if got := c.domainOf(fmt.Sprintf("tl:1:{%d}api:{9}", group)); got.Tag != want {
			t.Errorf("key of group %d: %v", group, got)
		}
	}
	for _, key := range []string{"", "a", "{}", "{a}", "{256}", "{99999999999999999999}", "{-1}"} {
		if got := c.domainOf(key); got != (Domain{}) {
			t.Errorf("key %q: %v", key, got)
		}
	}
	if _, err := survey(prefix, func(string) (*redis.Client, error) { return nil, nil }); err == nil {
		t.Error("no server")
	}
}

// domains returns the distinct domains in the order of their tags.
func (c *Client) domains() []Domain {
	t := c.topology.Load()
	var all []Domain
	for g, tag := range t.tags {
		// A tag is the lowest group of its domain, which comes first here.
		if int(tag) == g {
			all = append(all, Domain{Tag: tag})
		}
	}
	return all
}
