package chaos

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// What happens to the instances.

var fleetFaults = []Fault{
	{
		// Two of six are killed while they hold leases, and one comes back as another: whoever was killed counts as missing for half
		// a minute, and its share is kept aside.
		Name: "instances-killed", Main: true, For: 2 * time.Second, Instances: 6, Dead: 2,
		Children: []fleet.ProcEvent{
			{At: 0, Do: func(p *fleet.Processes) error { return p.Kill(0) }},
			{At: 700 * time.Millisecond, Do: func(p *fleet.Processes) error { return p.Kill(1) }},
			{At: 1500 * time.Millisecond, Do: func(p *fleet.Processes) error { return p.Start(0) }},
		},
	},
	{
		// It goes on by leases that are over, and as a member that the others have missed.
		Name: "instance-hung", For: 2 * time.Second, Loose: true,
		Children: []fleet.ProcEvent{
			{At: 0, Do: func(p *fleet.Processes) error { return p.Hang(2) }},
			{At: 2 * time.Second, Do: func(p *fleet.Processes) error { return p.Continue(2) }},
		},
	},
	{
		Name: "50-join-and-leave", Main: true, Course: Steady, For: 5 * time.Second,
		During: func(ctx context.Context, w *World) error { return w.visitors(ctx, 50, 5*time.Second) },
	},
}

// visitors lets n more instances join in so long a time, each for a second at most, and returns when all have left.
func (w *World) visitors(ctx context.Context, n int, within time.Duration) error {
	var all sync.WaitGroup
	var faults errorList
	defer all.Wait()
	for i := range n {
		stay := time.Duration(200+w.Rand.IntN(800)) * time.Millisecond
		all.Go(func() {
			if err := w.visit(ctx, w.Instances+i, stay); err != nil {
				faults.add(fmt.Errorf("instance %d: %w", w.Instances+i, err))
			}
		})
		if sleep(ctx, (within-time.Second)/time.Duration(n)) != nil {
			break
		}
	}
	all.Wait()
	return faults.all()
}

// visit is one more instance, which stays for a while once it has heard from Redis, and closes.
func (w *World) visit(ctx context.Context, id int, stay time.Duration) error {
	rdb := w.Client(id % w.Instances)
	defer rdb.Close()
	h, err := tierlimit.New(rdb, w.options...)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = h.Close(ctx) // a Redis that is away cannot be told
	}()
	l, err := h.Limiter("fleet", w.Limit)
	if err != nil {
		return err
	}
	for h.Stats().State != tierlimit.StateOnline {
		if sleep(ctx, time.Millisecond) != nil {
			return nil
		}
	}
	for end := time.Now().Add(stay); time.Now().Before(end); {
		for _, key := range w.Keys {
			a := envelope.Admission{Called: envelope.Now(), Cost: 1, Key: envelope.KeyID(key), Instance: int32(id)}
			res, err := l.Allow(context.Background(), key)
			a.Returned = envelope.Now()
			switch {
			case err != nil:
				w.extra.errors.Add(1)
			case res.Allowed:
				_ = w.extra.memory.Record(a) // never fails
			}
		}
		if sleep(ctx, 5*time.Millisecond) != nil {
			return nil
		}
	}
	return nil
}
