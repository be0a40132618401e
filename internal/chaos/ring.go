package chaos

import (
	"maps"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Ring is three servers over which the client spreads the keys, one on each; what happens, happens to shard 1.
var Ring = Topology{
	Name: "ring",
	Start: func(w *World, b redistest.Backend, opts ...redistest.Option) {
		for range 3 {
			w.Servers = append(w.Servers, b.Start(w.TB, opts...))
		}
		addrs := w.addrs()
		newRing := func() *redis.Ring {
			o := clientOptions("")
			return redis.NewRing(&redis.RingOptions{
				Addrs: shards(addrs), HeartbeatFrequency: ringHeartbeat,
				DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout, MaxRetries: o.MaxRetries, DialerRetries: o.DialerRetries,
				ContextTimeoutEnabled: true, PoolSize: o.PoolSize, DisableIdentity: true,
			})
		}
		w.Client = func(int) redis.UniversalClient { return newRing() }
		w.place(len(addrs))
		w.Client = func(i int) redis.UniversalClient {
			ring := newRing()
			w.rings = append(w.rings, ring)
			return ring
		}
	},
}

func (w *World) addrs() (all []string) {
	for _, s := range w.Servers {
		all = append(all, s.Addr())
	}
	return all
}

// ringHeartbeat: a shard that misses three is dropped.
const ringHeartbeat = 300 * time.Millisecond

// shards names the servers.
func shards(addrs []string) map[string]string {
	named := map[string]string{}
	for i, addr := range addrs {
		named[string(rune('a'+i))] = addr
	}
	return named
}

// without takes the victim out of a ring.
func without(ring *redis.Ring) {
	some := maps.Clone(ring.Options().Addrs)
	delete(some, string(rune('a'+victim)))
	ring.SetAddrs(some)
}

var ringFaults = []Fault{
	{
		Name: "shard-removed", Topology: Ring, Main: true, Course: Any, For: 1500 * time.Millisecond, Allowed: Losses,
		Begin: func(w *World) error {
			w.Forgets()
			for _, ring := range w.rings {
				without(ring)
			}
			return nil
		},
	},
	{
		// The victim is not there at first.
		Name: "shard-added", Topology: Ring, Course: Any, For: 1500 * time.Millisecond, Allowed: Losses,
		Prepare: func(w *World) error {
			whole := w.Client
			w.Client = func(i int) redis.UniversalClient {
				ring := whole(i)
				without(ring.(*redis.Ring))
				return ring
			}
			return nil
		},
		Begin: func(w *World) error {
			w.Forgets()
			for _, ring := range w.rings {
				ring.SetAddrs(shards(w.addrs()))
			}
			return nil
		},
	},
	{
		// As a configuration is rolled out: until all have it, two Redises have the key.
		Name: "shard-removed-one-by-one", Topology: Ring, Course: Any, For: 1200 * time.Millisecond,
		Allowed: capacities(1),
		Begin: func(w *World) error {
			for i, ring := range w.rings {
				time.AfterFunc(time.Duration(i)*rollout, func() { without(ring) })
			}
			return nil
		},
	},
	{
		// go-redis drops the shard by itself, and takes it back.
		Name: "shard-crashed", Topology: Ring, Course: Away, For: 2500 * time.Millisecond, Server: persist,
		Allowed: capacities(2),
		Begin:   func(w *World) error { return w.Servers[victim].Kill() },
		End:     func(w *World) error { return w.Servers[victim].Restart() },
	},
}

const rollout = 300 * time.Millisecond
