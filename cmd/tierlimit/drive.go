package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

const (
	maxBenchKeys = 1_000_000 // an instance keeps 1<<20 by default
	zipfExponent = 1.1

	// checksPerTurn is how many checks a goroutine makes before others run, as a request's goroutine would let them. A hundred that go
	// on until they are preempted would keep whoever waits for Redis waiting for a second.
	checksPerTurn = 16
)

// A keySet is a set of keys and an order in which checks come for them, the same in every run.
type keySet struct {
	names []string
	order []uint32 // indices of names; its length is a power of two
}

// parseKeys reads the -keys flag. The keys are not made yet.
func parseKeys(text string) (form string, n int, err error) {
	if text == "hot" {
		return text, 1, nil
	}
	form, count, _ := strings.Cut(text, ":")
	if form != "zipf" && form != "uniform" {
		return "", 0, badInput("-keys: %q, want zipf:N, uniform:N or hot, as in zipf:100k", text)
	}
	digits, unit := count, 1
	switch {
	case strings.HasSuffix(count, "k"):
		digits, unit = count[:len(count)-1], 1000
	case strings.HasSuffix(count, "m"):
		digits, unit = count[:len(count)-1], 1_000_000
	}
	n, err = strconv.Atoi(digits)
	if err != nil || n < 1 || n > maxBenchKeys/unit {
		return "", 0, badInput("-keys: %q, want 1 to %dk keys after %s:", text, maxBenchKeys/1000, form)
	}
	return form, n * unit, nil
}

// newKeySet makes n keys, and lays out in which order they are checked. Which of them are the hot ones is random, so that these do
// not lie side by side in memory.
func newKeySet(form string, n int) *keySet {
	k := &keySet{names: make([]string, n)}
	for i := range k.names {
		k.names[i] = fmt.Sprintf("customer-%09d", i)
	}
	size := 1 << 16
	for size < 4*n {
		size <<= 1
	}
	k.order = make([]uint32, size)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	next := func() uint32 { return uint32(r.IntN(n)) }
	if form == "zipf" {
		z, place := rand.NewZipf(r, zipfExponent, 1, uint64(n-1)), r.Perm(n)
		next = func() uint32 { return uint32(place[z.Uint64()]) }
	}
	for i := range k.order {
		k.order[i] = next()
	}
	return k
}

// at is the key of check number i.
func (k *keySet) at(i int) string { return k.names[k.order[i&(len(k.order)-1)]] }

// A checkFunc is one check. What has nothing to decide returns the zero Result.
type checkFunc func(ctx context.Context, key string) (tierlimit.Result, error)

// An outcome is what a closed loop came to.
type outcome struct {
	checks   int64    // answered
	allowed  int64    // of them
	bySource [4]int64 // of them, by tierlimit.Source
	errors   int64    // checks that were not answered
	err      error    // one of theirs
	latency  fleet.Histogram
	elapsed  time.Duration
}

// run makes checks, each after the answer of the one before, until stop.
func (o *outcome) run(ctx context.Context, stop *atomic.Bool, check checkFunc, k *keySet, from int) {
	for i := from; !stop.Load(); i++ {
		key := k.at(i)
		began := time.Now()
		r, err := check(ctx, key)
		took := time.Since(began)
		switch {
		case err == nil:
			o.checks++
			o.bySource[r.Source]++
			if r.Allowed {
				o.allowed++
			}
			o.latency.Record(took)
		case ctx.Err() != nil: // it was interrupted, which says nothing of what is measured
			return
		default:
			o.errors++
			o.err = err
		}
		if i%checksPerTurn == 0 {
			runtime.Gosched()
		}
	}
}

func (o *outcome) add(p *outcome) {
	o.checks += p.checks
	o.allowed += p.allowed
	for i, n := range p.bySource {
		o.bySource[i] += n
	}
	o.errors += p.errors
	if p.err != nil {
		o.err = p.err
	}
	o.latency.Add(&p.latency)
}

// drive lets so many goroutines check for d or until ctx ends; goroutine g uses checks[g%len(checks)]. Meanwhile it calls watch ten times a
// second. It ends when the last check is answered, so that the slowest are not left out.
func drive(ctx context.Context, checks []checkFunc, k *keySet, goroutines int, d time.Duration, watch func(time.Duration)) *outcome {
	var (
		stop  atomic.Bool
		done  sync.WaitGroup
		begin = make(chan struct{})
		ended = make(chan struct{})
		parts = make([]*outcome, goroutines)
	)
	for g := range parts {
		parts[g] = new(outcome)
		done.Go(func() {
			<-begin
			parts[g].run(ctx, &stop, checks[g%len(checks)], k, g*(len(k.order)/goroutines))
		})
	}
	go func() {
		done.Wait()
		close(ended)
	}()
	defer context.AfterFunc(ctx, func() { stop.Store(true) })()
	started := time.Now()
	close(begin)
	defer time.AfterFunc(d, func() { stop.Store(true) }).Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			watch(time.Since(started))
			continue
		case <-ended:
		}
		all := &outcome{elapsed: time.Since(started)}
		for _, p := range parts {
			all.add(p)
		}
		return all
	}
}
