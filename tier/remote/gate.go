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

// through runs fn in a goroutine of its own and returns its answer, or an abandonedError as soon as ctx is done. fn's own context lasts
// longer by linger.
func through[T any](ctx context.Context, g *gate, fn func(context.Context) (T, error)) (answer T, err error) {
	if err := g.enter(ctx); err != nil {
		return answer, err
	}
	type flight struct {
		state  atomic.Int32
		done   chan struct{}
		answer T
		err    error
	}
	f := &flight{done: make(chan struct{})}
	go func() {
		defer func() { <-g.places }()
		lasting, end := lastingContext(ctx)
		defer end()
		f.answer, f.err = fn(lasting)
		if f.state.CompareAndSwap(flying, landed) {
			close(f.done)
		} else {
			g.abandoned.Add(-1)
		}
	}()
	select {
	case <-f.done:
		return f.answer, f.err
	case <-ctx.Done():
	}
	// The place is given back after the state is read, so a call counted here as abandoned still holds its own.
	g.abandoned.Add(1)
	if f.state.CompareAndSwap(flying, abandoned) {
		return answer, &abandonedError{cause: ctx.Err()}
	}
	// It landed in the same moment: an answer in hand is worth more than a deadline.
	g.abandoned.Add(-1)
	<-f.done
	return f.answer, f.err
}

// lastingContext is ctx with a deadline that is later by linger. It is cancelled with ctx all the same.
func lastingContext(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	lasting, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(linger))
	context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})
	return lasting, cancel
}
