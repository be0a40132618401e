package chaos

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// touches says of a fault that it may be drawn at random, and what it touches: two that touch the same are not drawn together.
type touches uint8

const (
	nothing touches = iota
	onServer
	onNetwork
	onMemory // loses data: not where nothing may be lost
)

// Random is all faults of a single server, as they are drawn by the world's seed: one after another, a network's beside a server's
// at times, for so long. With losses Redis forgets as well.
func Random(name string, length time.Duration, losses bool) Fault {
	f := Fault{Name: name, Topology: Single, Main: !losses, For: length, Server: persist}
	if losses {
		f.Allowed = Losses
	}
	f.During = func(ctx context.Context, w *World) error {
		next := draws(w.Seed, losses)
		for ctx.Err() == nil {
			d := next()
			for _, f := range d.faults {
				w.TB.Logf("%v after the start: %s for %v", time.Since(w.started).Round(time.Millisecond), f.Name, d.last)
			}
			if err := spell(ctx, w, d.faults, d.last); err != nil {
				return err
			}
			_ = sleep(ctx, d.rest)
		}
		return nil
	}
	return f
}

// A drawn spell is faults that happen at once, how long they last, and how long nothing happens afterwards.
type drawn struct {
	faults     []Fault
	last, rest time.Duration
}

// draws is the sequence that belongs to a seed, whatever the timing.
func draws(seed uint64, losses bool) (next func() drawn) {
	var server, network []Fault
	for _, f := range singleFaults() {
		switch {
		case f.random == onNetwork:
			network = append(network, f)
		case f.random == onServer || losses && f.random == onMemory:
			server = append(server, f)
		}
	}
	// Not the world's Rand, of which the faults draw too.
	rnd := rand.New(rand.NewPCG(seed, 1))
	return func() (d drawn) {
		for _, of := range [][]Fault{server, network} {
			if rnd.IntN(3) > 0 {
				d.faults = append(d.faults, of[rnd.IntN(len(of))])
			}
		}
		d.last, d.rest = between(rnd, 20*time.Millisecond, 3*time.Second), between(rnd, 10*time.Millisecond, 2*time.Second)
		return d
	}
}

// between is a duration the logarithm of which is uniform: what outlasts a time-out, a heartbeat or a silence is as likely as what does
// not.
func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return time.Duration(float64(least) * math.Pow(float64(most)/float64(least), r.Float64()))
}

// spell lets some faults happen at once. Whatever began is ended.
func spell(ctx context.Context, w *World, drawn []Fault, lasts time.Duration) error {
	var faults errorList
	within, cancel := context.WithTimeout(ctx, lasts)
	defer cancel()
	for _, f := range drawn {
		if f.Begin != nil {
			if err := f.Begin(w); err != nil {
				faults.add(fmt.Errorf("%s: begin: %w", f.Name, err))
			}
		}
	}
	beside := make(chan struct{}, len(drawn))
	for _, f := range drawn {
		go func() {
			defer func() { beside <- struct{}{} }()
			if f.During == nil {
				return
			}
			if err := f.During(within, w); err != nil && within.Err() == nil {
				faults.add(fmt.Errorf("%s: %w", f.Name, err))
			}
		}()
	}
	<-within.Done()
	for range drawn {
		<-beside
	}
	for _, f := range drawn {
		if f.End != nil {
			if err := f.End(w); err != nil {
				faults.add(fmt.Errorf("%s: end: %w", f.Name, err))
			}
		}
	}
	return faults.all()
}

var randomFaults = []Fault{
	Random("random", choose(time.Minute, 3*time.Minute), false),
	Random("random-with-losses", choose(time.Minute, 3*time.Minute), true),
}
