package chaos

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Sentinel is a primary and a replica that three sentinels watch.
var Sentinel = Topology{
	Name: "sentinel", Local: true,
	Start: func(w *World, _ redistest.Backend, opts ...redistest.Option) {
		s := redistest.StartSentinel(w.TB, 3, opts...)
		w.sentinel, w.Group = s, &s.Group
		w.serve()
		w.Client = func(i int) redis.UniversalClient {
			return s.Client(func(o *redis.FailoverOptions) {
				o.PoolSize = clientOptions("").PoolSize
				o.DialTimeout = 2 * time.Second // in which it also asks the sentinels
				o.Dialer = redistest.DialFrom(redistest.ClientHost(i), o.DialTimeout)
			})
		}
	},
}

// serve makes the group's nodes the world's servers.
func (w *World) serve() {
	for _, n := range w.Group.Nodes {
		w.Servers = append(w.Servers, n)
	}
}

// callers lets the instances reach a node, or not.
func (w *World) callers(node int, m redistest.Mode, instances ...int) {
	for i := range w.Instances {
		if len(instances) == 0 {
			w.Group.Nodes[node].Proxy.SetModeFrom(redistest.ClientHost(i), m)
		}
	}
	for _, i := range instances {
		w.Group.Nodes[node].Proxy.SetModeFrom(redistest.ClientHost(i), m)
	}
}

// failNode does something to a node when its replica has every write that was answered.
func (w *World) failNode(node, replica int, fail func(*redistest.Node) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	w.callers(node, redistest.HoldRequests)
	defer w.callers(node, redistest.Pass)
	return errors.Join(redistest.WaitReplica(ctx, w.Group.Nodes[replica].Addr()), fail(w.Group.Nodes[node]))
}

func killNode(n *redistest.Node) error { return n.Kill() }
func hangNode(n *redistest.Node) error { return n.Hang() }

// failedOver returns when the sentinels send clients to the replica.
func failedOver(w *World) error {
	return eventually("a failover", func(ctx context.Context) (bool, error) {
		i, err := w.sentinel.Primary(ctx)
		return err == nil && i == 1, err
	})
}

var sentinelFaults = []Fault{
	{
		Name: "primary-crashed", Topology: Sentinel, Course: Away, For: 500 * time.Millisecond, After: 2 * time.Second,
		Begin: func(w *World) error { return w.failNode(0, 1, killNode) },
		End:   failedOver,
	},
	{
		Name: "primary-hung", Topology: Sentinel, Course: Away, For: 500 * time.Millisecond, After: 2 * time.Second,
		Begin: func(w *World) error { return w.failNode(0, 1, hangNode) },
		End:   func(w *World) error { return errors.Join(failedOver(w), w.Group.Nodes[0].Continue()) },
	},
	{
		Name: "last-writes-lost", Topology: Sentinel, Course: Away, For: time.Second, After: 2 * time.Second, Allowed: Losses,
		Begin: func(w *World) error {
			n := w.Group.Nodes
			n[0].Proxy.SetModeFrom(n[1].Host(), redistest.BlackHole)
			time.Sleep(700 * time.Millisecond)
			w.Forgets()
			return n[0].Kill()
		},
		End: failedOver, Back: unknownScripts,
	},
	{
		// Sentinels and the replica lose the primary; half of the instances still reach it.
		Name: "primary-isolated", Topology: Sentinel, Course: Away, For: 3500 * time.Millisecond, Allowed: capacities(1), During: whileBoth(0, 1),
		Begin: func(w *World) error {
			w.callers(0, redistest.BlackHole, 2, 3)
			return w.Group.Isolate(0)
		},
		End: func(w *World) error {
			err := failedOver(w)
			w.callers(0, redistest.Pass)
			return errors.Join(err, w.Group.Heal(0))
		},
	},
	{
		// So do half of the instances, which reach nothing else: nobody tells them. When all is healed they stay there until a sentinel makes a
		// replica of it, which takes 10 s.
		Name: "primary-isolated-with-instances", Topology: Sentinel, Course: Away, Loose: true, For: 5 * time.Second, Allowed: capacities(1), During: whileBoth(0, 1),
		Begin: func(w *World) error {
			w.split(redistest.BlackHole)
			return w.Group.Isolate(0)
		},
		End: func(w *World) error {
			err := failedOver(w)
			w.split(redistest.Pass)
			return errors.Join(err, w.Group.Heal(0))
		},
	},
}

// split cuts instances 0 and 1 off from all but the primary, and the others from the primary; or heals that.
func (w *World) split(m redistest.Mode) {
	w.callers(0, m, 2, 3)
	w.callers(1, m, 0, 1)
	for _, door := range w.sentinel.Doors {
		for _, i := range []int{0, 1} {
			door.SetModeFrom(redistest.ClientHost(i), m)
		}
	}
}
