package chaos

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Replica is a primary, Servers[0], and its replica, Servers[1], which somebody promotes by hand. Each instance reaches the primary
// through a proxy of its own, and the replica does through the link.
var Replica = Topology{
	Name: "replica",
	Start: func(w *World, b redistest.Backend, opts ...redistest.Option) {
		primary, replica := b.Start(w.TB, opts...), b.Start(w.TB, opts...)
		w.Servers = []redistest.Server{primary, replica}
		w.link = redistest.StartProxy(w.TB, primary.Addr())
		if err := errors.Join(replica.Follow(w.link.Addr()), w.caughtUp()); err != nil {
			w.TB.Fatal(err)
		}
		for range w.Instances {
			w.Proxies = append(w.Proxies, redistest.StartProxy(w.TB, primary.Addr()))
		}
		w.Client = func(i int) redis.UniversalClient { return redis.NewClient(clientOptions(w.Proxies[i].Addr())) }
	},
}

// parts are what the topologies of several servers have besides.
type parts struct {
	link     *redistest.Proxy // replica: its way to the primary
	sentinel *redistest.Sentinel
	cluster  *redistest.Cluster
	rings    []*redis.Ring // by instance
	tags     []string      // by key: the hash tag of its name
}

const patience = 20 * time.Second // bounds what a fault waits for

// eventually asks until it is so.
func eventually(what string, so func(ctx context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		ok, err := so(ctx)
		switch {
		case ok:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("%s: not within %v: %w", what, patience, errors.Join(err, ctx.Err()))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// caughtUp returns when the replica has all that the primary has.
func (w *World) caughtUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return redistest.WaitReplica(ctx, w.Servers[1].Addr())
}

// quiesce holds what the instances send while the replica catches up, so that it has every write that was answered.
func (w *World) quiesce() error {
	return errors.Join(w.Mode(redistest.HoldRequests), w.caughtUp())
}

// takeOver leads the instances to the replica. Connections there are end.
func (w *World) takeOver() error {
	for _, p := range w.Proxies {
		p.SetTarget(w.Servers[1].Addr())
		p.ResetConns()
	}
	return w.Mode(redistest.Pass)
}

func (w *World) promote() error { return errors.Join(w.Servers[1].Promote(), w.takeOver()) }

// promoteLoser promotes a replica that does not have every write.
func promoteLoser(w *World) error {
	w.Forgets()
	return w.promote()
}

// unknownScripts is that who took over did not know the scripts.
func unknownScripts(w *World) error {
	if err := w.refused("NOSCRIPT"); err != nil {
		w.short("%v", err)
	}
	return nil
}

// forgetful cuts the replica off, lets the primary grant for longer than a lease lives, and kills it.
func forgetful(w *World) error {
	if err := w.link.SetMode(redistest.BlackHole); err != nil {
		return err
	}
	time.Sleep(700 * time.Millisecond)
	return w.Servers[0].Kill()
}

// capacities is G6 at its worst: a capacity for each loss of a key.
func capacities(losses int64) func(*World, *fleet.Result) int64 {
	return func(w *World, _ *fleet.Result) int64 { return losses * w.Limit.Burst }
}

var replicaFaults = []Fault{
	{
		// The replica has everything: as a restart with data.
		Name: "failover", Topology: Replica, Main: true, Course: Shares, Silences: 1, For: 1500 * time.Millisecond,
		Begin: func(w *World) error { return errors.Join(w.quiesce(), w.Servers[0].Kill()) },
		End:   (*World).promote,
		Back:  unknownScripts,
	},
	{
		Name: "failover-at-once", Topology: Replica, Course: Any, For: 100 * time.Millisecond, Allowed: Losses,
		Begin: func(w *World) error { return w.Servers[0].Kill() },
		End:   promoteLoser,
	},
	{
		Name: "last-writes-lost", Topology: Replica, Main: true, Course: Away, For: time.Second, Allowed: Losses,
		Begin: forgetful,
		End:   promoteLoser,
	},
	{
		// The instances are sent to the replica before it is promoted.
		Name: "readonly", Topology: Replica, Main: true, Course: Shares, Silences: 1, For: 1500 * time.Millisecond,
		Begin:   func(w *World) error { return errors.Join(w.quiesce(), w.Servers[0].Kill(), w.takeOver()) },
		End:     func(w *World) error { return w.Servers[1].Promote() },
		Refusal: "READONLY",
	},
}
