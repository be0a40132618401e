package tierlimit_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// What a Redis may be besides one server, when nothing happens to it: internal/chaos has the rest.

const (
	topoInstances = 4
	topoOnline    = 30 * time.Second
)

// patience bounds what a test waits for.
func patience(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// admin is a client for set-up commands, which must not fail because the machine is busy.
func admin(p *redistest.Process) *redis.Client {
	return p.Client(func(o *redis.Options) {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 5*time.Second, 5*time.Second, 5*time.Second
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// infoOf is what a server says of itself.
func infoOf(ctx context.Context, t *testing.T, rdb redis.Cmdable) map[string]string {
	t.Helper()
	text, err := rdb.Info(ctx, "everything").Result()
	must(t, err)
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

// refusals counts what a server refused with a code.
func refusals(ctx context.Context, t *testing.T, rdb redis.Cmdable, code string) string {
	t.Helper()
	return strings.TrimPrefix(infoOf(ctx, t, rdb)["errorstat_"+code], "count=")
}

// only is the part of a result that concerns some keys.
func only(r *fleet.Result, keys ...string) *fleet.Result {
	part := *r
	part.History = nil
	for _, a := range r.History {
		if slices.ContainsFunc(keys, func(k string) bool { return envelope.KeyID(k) == a.Key }) {
			part.History = append(part.History, a)
		}
	}
	return &part
}

// A Cluster under many keys: per key exact, keys and fleet records on every master, scripts forgotten on the way.
func TestClusterManyKeys(t *testing.T) {
	cluster := redistest.StartCluster(t, 0)
	ctx := patience(t)
	limit := tierlimit.TokenBucket(100, time.Second)
	prefix := ownPrefix(t)
	var stats []tierlimit.Stats
	r := run(t, fleet.Config{
		Instances: topoInstances, Limit: limit, Load: fleet.Zipf(300, 1.1), Rate: 2500, Duration: 4 * time.Second, Workers: 16, AwaitOnline: topoOnline,
		Client:  func(int) redis.UniversalClient { return cluster.Client() },
		Options: []tierlimit.Option{tierlimit.WithPrefix(prefix), tierlimit.WithRemoteTimeout(500 * time.Millisecond)},
		Events: []fleet.Event{{At: 1500 * time.Millisecond, Do: func() {
			for _, n := range cluster.Nodes {
				must(t, admin(n.Process).ScriptFlush(ctx).Err())
				must(t, admin(n.Process).ClientPause(ctx, 100*time.Millisecond).Err()) // for callers to gather
			}
		}}},
		Every: time.Second, Observe: func(tick fleet.Tick) { stats = tick.Stats },
	})
	exact(t, limit, r)
	t.Log(r)
	hot := only(r, "k0")
	u := hot.Utilisation(limit, r.Started+int64(time.Second), r.Ended)
	t.Logf("the hot key: %.4f of the limit; %d keys in %d exchanges", u, r.Asked, r.Exchanges)
	j := newJury(t)
	j.run(t, r, func(short func(string, ...any)) {
		if u < 0.98 {
			short("the hot key got %.4f of its limit", u)
		}
	})
	j.run(t, r, func(short func(string, ...any)) {
		if r.Fallback() > 0 {
			short("%d checks were decided without Redis", r.Fallback())
		}
	})
	j.run(t, r, func(short func(string, ...any)) {
		if r.Asked == r.Exchanges {
			short("no call settled two keys")
		}
	})
	j.run(t, r, func(short func(string, ...any)) {
		if len(stats) != topoInstances {
			short("statistics of %d instances", len(stats))
		}
		for i, s := range stats {
			if s.Instances != topoInstances || s.State != tierlimit.StateOnline || s.Rank < 0 || s.Rank >= topoInstances {
				short("instance %d: %+v", i, s)
			}
		}
	})
	records, total := 0, 0
	for i, n := range cluster.Nodes {
		rdb := admin(n.Process)
		keys := rdb.Keys(ctx, prefix+"*").Val()
		for _, k := range keys {
			if strings.HasSuffix(k, "!fleet") {
				records++
			}
		}
		total += len(keys)
		t.Logf("node %d: %d keys", i, len(keys))
		j.run(t, r, func(short func(string, ...any)) {
			if len(keys) < 20 {
				short("node %d has %d keys of 300", i, len(keys))
			}
		})
		if n := refusals(ctx, t, rdb, "CROSSSLOT"); n != "" {
			t.Errorf("node %d: CROSSSLOT %s times", i, n)
		}
		if refusals(ctx, t, rdb, "NOSCRIPT") == "" {
			t.Errorf("node %d never forgot a script", i)
		}
	}
	if records != 3 {
		t.Errorf("%d membership records, want one on each master", records)
	}
	rdb := cluster.Client()
	defer rdb.Close()
	must(t, redistest.CheckTTLs(ctx, rdb, prefix))
}

// A Ring of two shards: per key exact, keys on both, a domain each.
func TestRing(t *testing.T) {
	wholeMatrix(t)
	shards := []*redistest.Process{redistest.Start(t), redistest.Start(t)}
	ctx := patience(t)
	j := newJury(t)
	var all cases
	for _, limit := range fiveOf(40, 500*time.Millisecond) {
		if !long && (limit.Algorithm == tierlimit.AlgorithmLeakyBucket || limit.Algorithm == tierlimit.AlgorithmSlidingLog) {
			continue
		}
		all.add(limit.Algorithm.String(), func(t *testing.T) {
			prefix := ownPrefix(t)
			var stats []tierlimit.Stats
			r := run(t, fleet.Config{
				Instances: topoInstances, Limit: limit, Load: fleet.Zipf(60, 1.1), Rate: 700, Duration: 3 * time.Second, Workers: 8, AwaitOnline: topoOnline,
				Client: func(int) redis.UniversalClient {
					return redis.NewRing(&redis.RingOptions{
						Addrs:              map[string]string{"a": shards[0].Addr(), "b": shards[1].Addr()},
						HeartbeatFrequency: 10 * time.Second, // a machine that is busy must not look like a shard that is gone
					})
				},
				Options: []tierlimit.Option{tierlimit.WithPrefix(prefix), tierlimit.WithRemoteTimeout(500 * time.Millisecond)},
				Every:   time.Second, Observe: func(tick fleet.Tick) { stats = tick.Stats },
			})
			exact(t, limit, r)
			u := only(r, "k0").Utilisation(limit, r.Started+int64(time.Second), r.Ended)
			t.Logf("the hot key: %.3f; %v", u, r)
			j.run(t, r, func(short func(string, ...any)) {
				if u < 0.97 {
					short("the hot key got %.3f of its limit", u)
				}
			})
			j.run(t, r, func(short func(string, ...any)) {
				if len(stats) != topoInstances {
					short("statistics of %d instances", len(stats))
				}
				for i, s := range stats {
					if s.Instances != topoInstances || s.State != tierlimit.StateOnline {
						short("instance %d: %+v", i, s)
					}
				}
			})
			for i, s := range shards {
				rdb := admin(s)
				if n, records := len(rdb.Keys(ctx, prefix+"*").Val()), len(rdb.Keys(ctx, prefix+"*!fleet").Val()); n < 5 || records != 1 {
					t.Errorf("shard %d has %d keys and %d membership records", i, n, records)
				}
				must(t, redistest.CheckTTLs(ctx, rdb, prefix))
			}
		})
	}
	all.run(t, len(all.names))
}

// A Cluster that cannot be reached is a state: every check is answered locally, by the part of the limit that WithInstances says,
// and nothing spins.
func TestClusterUnreachableFromTheStart(t *testing.T) {
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, DialerRetries: 1})
	t.Cleanup(func() { _ = rdb.Close() })
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithInstances(4))
	if err != nil {
		t.Fatal(err)
	}
	if s := h.Stats(); s.State != tierlimit.StateConnecting {
		t.Errorf("before anything was heard: %+v", s)
	}
	l, err := h.Limiter("l", tierlimit.FixedWindow(10, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	admitted := 0
	var longest time.Duration
	for range 100 {
		start := time.Now()
		r, err := l.Allow(t.Context(), "k")
		must(t, err)
		longest = max(longest, time.Since(start))
		if r.Allowed {
			admitted++
		}
		if r.Source != tierlimit.Fallback {
			t.Fatalf("decided by %v", r.Source)
		}
	}
	if admitted != 2 {
		t.Errorf("%d admitted, want 10/4", admitted)
	}
	if longest > time.Second {
		t.Errorf("a check took %v", longest)
	}
	if s := h.Stats(); s.State == tierlimit.StateOnline {
		t.Errorf("%+v", s)
	}
	must(t, h.Close(t.Context()))
}

// ForceLocal before the shards of a Ring are known holds for each of them, and ends for each.
func TestRingForcedFromTheStart(t *testing.T) {
	var forced atomic.Bool
	rdb := redis.NewRing(&redis.RingOptions{
		Addrs:      map[string]string{"a": redistest.Start(t).Addr(), "b": redistest.Start(t).Addr()},
		MaxRetries: -1, DialerRetries: 1,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) { // else the instance may have joined before it is forced
			if !forced.Load() {
				return nil, errors.New("not yet")
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	})
	t.Cleanup(func() { _ = rdb.Close() })
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithInstances(4), tierlimit.WithRemoteTimeout(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	h.ForceLocal(true)
	forced.Store(true)
	l, err := h.Limiter("l", tierlimit.FixedWindow(10, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // most likely the shards are known by now, which nothing tells: it is to hold before and after
	for i := range 20 {
		admitted := 0
		for range 10 {
			r, err := l.Allow(t.Context(), fmt.Sprint(i))
			must(t, err)
			if r.Source != tierlimit.Fallback {
				t.Fatalf("decided by %v", r.Source)
			}
			if r.Allowed {
				admitted++
			}
		}
		if admitted != 2 {
			t.Errorf("key %d: %d admitted, want 10/4", i, admitted)
		}
	}
	h.ForceLocal(false)
	eventually(t, "online", isOnline(h))
	// What was admitted alone counts.
	for i := range 20 {
		admitted := 0
		for range 20 {
			r, err := l.Allow(t.Context(), fmt.Sprint(i))
			must(t, err)
			if r.Allowed {
				admitted++
			}
		}
		if admitted != 8 {
			t.Errorf("key %d: %d more admitted, want 8", i, admitted)
		}
	}
	must(t, h.Close(t.Context()))
}
