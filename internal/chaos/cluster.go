package chaos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Cluster is a Redis Cluster of three masters with a replica each; Masters has none. Keys are one on each master; what happens, happens to
// master 1, and the keys of the others are spared.
var (
	Cluster = Topology{Name: "cluster", Local: true, Start: func(w *World, _ redistest.Backend, opts ...redistest.Option) { startCluster(w, 1, opts) }}
	Masters = Topology{Name: "masters", Local: true, Start: func(w *World, _ redistest.Backend, opts ...redistest.Option) { startCluster(w, 0, opts) }}
)

// slower is within which a fleet is back in a Cluster: the limiter looks once a second where the keys of a master that is away are now.
const slower = 3 * time.Second

const victim = 1 // the master, or shard, that suffers; 4 is its replica

func startCluster(w *World, replicas int, opts []redistest.Option) {
	c := redistest.StartCluster(w.TB, replicas, opts...)
	w.cluster, w.Group = c, &c.Group
	w.serve()
	w.Client = func(i int) redis.UniversalClient {
		return c.Client(func(o *redis.ClusterOptions) {
			o.PoolSize = clientOptions("").PoolSize
			o.Dialer = redistest.DialFrom(redistest.ClientHost(i), o.DialTimeout)
			o.ClusterStateReloadInterval = time.Minute // go-redis's default: what finds a new master is the limiter
		})
	}
	w.place(3)
}

// place chooses a key on each of the first servers, and spares those that are not the victim's.
func (w *World) place(servers int) {
	on, err := whereKeysLive(w, servers)
	if err != nil {
		w.TB.Fatal(err)
	}
	for i, homes := range on {
		if len(homes) == 0 {
			w.TB.Fatalf("no key on server %d", i)
		}
		w.Keys, w.tags = append(w.Keys, homes[0].key), append(w.tags, homes[0].tag)
		if i != victim {
			w.Spared = append(w.Spared, homes[0].key)
			w.attend(i)
		}
	}
}

// A home says where a key lives: with all that have its tag.
type home struct{ key, tag string }

// whereKeysLive makes some keys and asks the first servers which of them they got.
func whereKeysLive(w *World, servers int) ([][]home, error) {
	prefix := w.Prefix + "scout:"
	rdb := w.Client(0)
	defer rdb.Close()
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix(prefix), tierlimit.WithRemoteTimeout(5*time.Second), tierlimit.WithHeartbeat(5*time.Second))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	defer h.Close(ctx)
	l, err := h.Limiter("fleet", tierlimit.TokenBucket(10, time.Hour))
	if err != nil {
		return nil, err
	}
	first := w.Rand.IntN(1000)
	for i := range 12 * servers {
		key := fmt.Sprint("key", first+i)
		err := eventually("a check that Redis decides", func(ctx context.Context) (bool, error) {
			r, err := l.Allow(ctx, key)
			return r.Source == tierlimit.Remote, err
		})
		if err != nil {
			return nil, err
		}
	}
	on := make([][]home, servers)
	for i := range servers {
		names, err := w.namesOn(i, prefix+"*}fleet:*")
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			tag, key, _ := strings.Cut(strings.TrimPrefix(name, prefix+"1:"), "fleet:")
			on[i] = append(on[i], home{key, tag})
		}
	}
	return on, nil
}

// namesOn are the names of a server's keys that match a pattern, in order.
func (w *World) namesOn(server int, pattern string) (names []string, err error) {
	err = w.Admin(server, func(ctx context.Context, rdb *redis.Client) (err error) {
		names, err = rdb.Keys(ctx, pattern).Result()
		return err
	})
	slices.Sort(names)
	return names, err
}

// replaced returns when the victim's keys belong to its replica.
func replaced(w *World) error {
	return eventually("a replica that takes over", func(ctx context.Context) (bool, error) {
		owner, err := w.cluster.Owner(ctx, 0, w.tags[victim])
		return err == nil && owner == victim+3, err
	})
}

// whileBoth logs for how long two nodes ran the instances' scripts side by side. Neither hears the other's instances, so that each keeps
// their shares aside: what both admit is within the limit, but for what the successor does not know of the last grants (G6).
func whileBoth(old, successor int) func(context.Context, *World) error {
	return func(ctx context.Context, w *World) error {
		var ran [2]int64
		var succeeded, last time.Time
		for {
			for i, node := range []int{old, successor} {
				n, err := scriptsRun(ctx, w, node)
				switch {
				case err != nil: // it may be busy
				case n == ran[i]:
				case i == 0:
					last = time.Now()
				case succeeded.IsZero():
					succeeded = time.Now()
				}
				ran[i] = max(ran[i], n)
			}
			if sleep(ctx, 20*time.Millisecond) != nil {
				break
			}
		}
		if succeeded.IsZero() {
			w.short("nobody has asked the successor yet")
			return nil
		}
		w.TB.Logf("both nodes were used for %v", max(0, last.Sub(succeeded)))
		return nil
	}
}

// scriptsRun is how many scripts a server has run.
func scriptsRun(ctx context.Context, w *World, server int) (n int64, err error) {
	err = w.Admin(server, func(_ context.Context, rdb *redis.Client) error {
		info, err := rdb.Info(ctx, "commandstats").Result()
		for line := range strings.Lines(info) {
			if rest, ok := strings.CutPrefix(line, "cmdstat_evalsha:calls="); ok {
				_, err = fmt.Sscanf(rest, "%d,", &n)
			}
		}
		return err
	})
	return n, err
}

var clusterFaults = []Fault{
	{
		Name: "master-crashed", Topology: Cluster, Main: true, Course: Away, For: 500 * time.Millisecond, Recover: slower, After: 3 * time.Second,
		Begin: func(w *World) error { return w.failNode(victim, victim+3, killNode) },
		End:   replaced,
	},
	{
		Name: "master-hung", Topology: Cluster, Course: Away, For: 500 * time.Millisecond, Recover: slower, After: 3 * time.Second,
		Begin: func(w *World) error { return w.failNode(victim, victim+3, hangNode) },
		End:   func(w *World) error { return errors.Join(replaced(w), w.Group.Nodes[victim].Continue()) },
	},
	{
		// The other nodes lose it; half of the instances still reach it.
		Name: "master-isolated", Topology: Cluster, Course: Away, For: 3500 * time.Millisecond, Recover: slower, After: time.Second, Allowed: capacities(1), During: whileBoth(victim, victim+3),
		Begin: func(w *World) error {
			w.callers(victim, redistest.BlackHole, 2, 3)
			return w.Group.Isolate(victim)
		},
		End: func(w *World) error {
			err := replaced(w)
			w.callers(victim, redistest.Pass)
			return errors.Join(err, w.Group.Heal(victim))
		},
	},
	{
		// So do half of the instances, which reach nothing else.
		Name: "master-isolated-with-instances", Topology: Cluster, Course: Away, For: 5 * time.Second, Recover: slower, After: time.Second, Allowed: capacities(1), During: whileBoth(victim, victim+3),
		Prepare: func(w *World) error { w.Spared = nil; return nil },
		Begin: func(w *World) error {
			for i := range w.Group.Nodes {
				if i == victim {
					w.callers(i, redistest.BlackHole, 2, 3)
				} else {
					w.callers(i, redistest.BlackHole, 0, 1)
				}
			}
			return w.Group.Isolate(victim)
		},
		End: func(w *World) error {
			err := replaced(w)
			for i := range w.Group.Nodes {
				w.callers(i, redistest.Pass)
			}
			return errors.Join(err, w.Group.Heal(victim))
		},
	},
	{
		Name: "dead-master", Topology: Masters, Course: Shares, Silences: 1, For: 1500 * time.Millisecond, Recover: slower, After: 3 * time.Second, Server: persist,
		Begin: func(w *World) error { return w.Group.Nodes[victim].Kill() },
		End:   returned,
	},
	{
		// Until the master is dead, half of the instances ask for keys of the others only: they have no more than their share either.
		Name: "dead-master-latecomers", Topology: Masters, Course: Shares, Silences: 1, For: 1500 * time.Millisecond, Recover: slower, After: 3 * time.Second, Server: persist,
		Load: func(keys []string) fleet.Load {
			even := fleet.Even(keys...)
			return fleet.LoadFunc(func(k int64, rate float64, instances int) (fleet.Check, bool) {
				c, ok := even.Next(k, rate, instances)
				if c.Instance >= instances/2 && c.Key == keys[victim] && c.At < before+500*time.Millisecond {
					c.Key = keys[0]
				}
				return c, ok
			})
		},
		Begin: func(w *World) error { return w.Group.Nodes[victim].Kill() },
		End:   returned,
	},
	{
		Name: "slots-moved", Topology: Masters, Course: Steady, For: 2500 * time.Millisecond,
		During: moveSlots,
	},
}

// returned starts the victim again. A master that was started waits for 2 s before it answers.
func returned(w *World) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return errors.Join(w.Group.Nodes[victim].Restart(), w.cluster.WaitOK(ctx))
}

// moveSlots moves the slot of the victim's key to master 0, a step at a time, and then that of its membership record.
func moveSlots(ctx context.Context, w *World) error {
	records, err := w.namesOn(victim, w.Prefix+"1:*}!fleet")
	if err != nil || len(records) != 1 {
		return errors.Join(fmt.Errorf("%d membership records on one master", len(records)), err)
	}
	for _, name := range []string{w.tags[victim], records[0]} {
		slot, err := w.cluster.Slot(ctx, name)
		if err != nil {
			return err
		}
		m, err := w.cluster.OpenSlot(ctx, slot, victim, 0)
		if err != nil {
			return err
		}
		if err := sleep(ctx, 300*time.Millisecond); err != nil {
			return err
		}
		n, err := m.MoveKeys(ctx)
		if err != nil || n == 0 {
			return errors.Join(fmt.Errorf("%d keys moved", n), err)
		}
		if err := sleep(ctx, 300*time.Millisecond); err != nil {
			return err
		}
		if err := m.Close(ctx); err != nil {
			return err
		}
		if err := sleep(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
