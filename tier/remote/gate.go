package remote

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// maxAbandoned is the most calls of one domain that may be under way at a time, waited for or not.
const maxAbandoned = 64

// A gate lets a bounded number of calls through. A call that nobody waits for any more holds its place until it ends: that is
// what keeps the number of goroutines bounded when a server answers nothing and the client does not honour its context.
type gate struct {
	places    chan struct{}
	abandoned atomic.Int64
}

func newGate(n int) *gate { return &gate{places: make(chan struct{}, n)} }

// enter takes a place, or says why there is none: ErrBusyClient at once when abandoned calls hold them all.
func (g *gate) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return unsent(err)
	}
	select {
	case g.places <- struct{}{}:
		return nil
	default:
	}
	if g.abandoned.Load() >= int64(cap(g.places)) {
		return ErrBusyClient
	}
	select {
	case g.places <- struct{}{}:
		return nil
	case <-ctx.Done():
		return unsent(ctx.Err())
	}
}

// Who was first, the answer or the end of the caller's patience.
const (
	flying int32 = iota
	landed
	abandoned
)

// linger is how long a call may go on that nobody waits for any more. It may be setting up a connection: were it cut short with its
// caller's patience, a server from which a connection takes longer than that (dial, TLS, HELLO, AUTH) would never be reached.
const linger = 2 * time.Second

// then runs fn here and gives its answer to done, or an abandonedError as soon as ctx is done, from a goroutine of its own: either way done
// is called once, and then returns when fn has. fn's own context lasts longer by linger.
func then[T any](ctx context.Context, g *gate, fn func(context.Context) (T, error), done func(T, error)) {
	var none T
	if err := g.enter(ctx); err != nil {
		done(none, err)
		return
	}
	var state atomic.Int32
	impatient := context.AfterFunc(ctx, func() {
		// The place is given back after the state is read, so a call counted here as abandoned still holds its own.
		g.abandoned.Add(1)
		if state.CompareAndSwap(flying, abandoned) {
			done(none, &abandonedError{cause: ctx.Err()})
			return
		}
		g.abandoned.Add(-1)
	})
	lasting, end := lastingContext(ctx)
	answer, err := fn(lasting)
	end()
	waited := state.CompareAndSwap(flying, landed)
	if !waited {
		g.abandoned.Add(-1)
	}
	<-g.places
	if waited {
		impatient()
		done(answer, err)
	}
}

// through is then for a caller that waits for the answer.
func through[T any](ctx context.Context, g *gate, fn func(context.Context) (T, error)) (T, error) {
	return await(func(done func(T, error)) { then(ctx, g, fn, done) })
}

// await waits for what call, which runs in a goroutine of its own, hands to done.
func await[T any](call func(done func(T, error))) (T, error) {
	type result struct {
		answer T
		err    error
	}
	c := make(chan result, 1)
	go call(func(answer T, err error) { c <- result{answer, err} })
	r := <-c
	return r.answer, r.err
}

// lastingContext is ctx with a deadline that is later by linger. It is cancelled with ctx all the same.
func lastingContext(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	lasting, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(linger))
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})
	return lasting, func() { stop(); cancel() }
}
