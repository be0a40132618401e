package httplimit

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/tierlimit/tierlimit"
)

// A Charge is what a Middleware took for one request, for the handler behind it. All its methods are safe for concurrent use, also after
// the handler has returned, and on a nil Charge, which is one of nothing.
type Charge struct {
	m        *Middleware
	key      string
	cost     int64
	result   tierlimit.Result
	outer    *Charge
	refunded atomic.Int64
}

// scope is a request's context with its charge: one allocation for both. That Done is the parent's own lets contexts derived from this one
// hang on the parent without a goroutine.
type scope struct {
	context.Context
	charge Charge
}

type chargeKey struct{}

func (s *scope) Value(key any) any {
	if key == (chargeKey{}) {
		return &s.charge
	}
	return s.Context.Value(key)
}

// FromContext is the charge of the innermost Middleware that charged a request, of the request's context; nil if none did: it passed none, was
// skipped, cost nothing, or was let pass for want of a key. Outer leads to those of the others.
func FromContext(ctx context.Context) *Charge {
	if ctx == nil {
		return nil
	}
	c, _ := ctx.Value(chargeKey{}).(*Charge)
	return c
}

// Limiter is the limiter that was asked; nil for a nil Charge.
func (c *Charge) Limiter() *tierlimit.Limiter {
	if c == nil {
		return nil
	}
	return c.m.limiter
}

// Result is what the limiter answered.
func (c *Charge) Result() tierlimit.Result {
	if c == nil {
		return tierlimit.Result{}
	}
	return c.result
}

// Cost is how many tokens were charged, 0 and up.
func (c *Charge) Cost() int64 {
	if c == nil {
		return 0
	}
	return c.cost
}

// Outer is the charge of the Middleware around this one; nil if there is none.
func (c *Charge) Outer() *Charge {
	if c == nil {
		return nil
	}
	return c.outer
}

// Refund gives n tokens back: for a response from the cache, or a failure of one's own. All refunds of a charge together give back its
// cost at most, what is above is left out; a refund that fails is not tried again. It may wait for Redis as Limiter.Refund does, and is lost
// when ctx ends before that. The headers of the response stay as they are. Errors: tierlimit.ErrCost for n < 0, and those of Limiter.Refund.
func (c *Charge) Refund(ctx context.Context, n int64) error {
	if n < 0 {
		return fmt.Errorf("%w: a refund of %d, want 0 or more", tierlimit.ErrCost, n)
	}
	if c == nil {
		return nil
	}
	// Taken off before it is asked for: two refunds at a time must not give back more than was charged. One that failed may have been
	// credited in part, so what it took off stays off.
	var give int64
	for {
		before := c.refunded.Load()
		if give = min(n, c.cost-before); give <= 0 {
			return nil
		}
		if c.refunded.CompareAndSwap(before, before+give) {
			break
		}
	}
	if err := c.m.limiter.Refund(ctx, c.key, give); err != nil {
		c.m.refundsLost.Add(give)
		return err
	}
	c.m.refunded.Add(give)
	return nil
}

// Refund gives back what the request cost that ctx, the context a handler got, belongs to: what every Middleware on its way charged. Called
// again, and for a request that cost nothing, it does nothing and returns nil. It may wait for Redis as Limiter.Refund does, also when ctx has
// ended because the client has gone. Errors are Limiter.Refund's, joined.
func Refund(ctx context.Context) error {
	c := FromContext(ctx)
	if c == nil {
		return nil
	}
	ctx = context.WithoutCancel(ctx)
	var errs []error
	for ; c != nil; c = c.outer {
		errs = append(errs, c.Refund(ctx, c.cost))
	}
	return errors.Join(errs...)
}
