package grpclimit

import (
	"context"
	"errors"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/tierlimit/tierlimit"
)

// UnaryServerInterceptor counts each unary call before its handler runs. Place it after what authenticates, if the key comes from
// there, and before what is costly. A call that passes costs one allocation besides the key's.
func (i *Interceptor) UnaryServerInterceptor() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		c := named(Call{FullMethod: info.FullMethod, Message: req})
		r := i.ruleFor(ctx, c)
		ch, res, err := i.ask(ctx, r, c, Opening)
		i.tell(ctx, r, ch.key, res, err)
		switch {
		case err != nil:
			return nil, err
		case ch.n == 0:
			return handler(ctx, req)
		}
		charged := &chargedContext{Context: ctx, i: i, charge: ch}
		resp, err := handler(charged, req)
		charged.settle(err)
		return resp, err
	}
}

// StreamServerInterceptor counts the opening of each stream before its handler runs, and its messages if WithStreams says so.
func (i *Interceptor) StreamServerInterceptor() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := ss.Context()
		c := named(Call{FullMethod: info.FullMethod})
		r := i.ruleFor(ctx, c)
		var ch charge
		if r == nil || i.cfg.streams&Opening != 0 {
			var res tierlimit.Result
			var err error
			ch, res, err = i.ask(ctx, r, c, Opening)
			i.tell(ctx, r, ch.key, res, err)
			if err != nil {
				return err
			}
		}
		if r == nil {
			return handler(srv, ss)
		}
		s := &serverStream{ServerStream: ss, ctx: ctx, i: i, rule: r, call: c}
		if ch.n == 0 {
			return s.end(handler(srv, s))
		}
		charged := &chargedContext{Context: ctx, i: i, charge: ch}
		s.ctx = charged
		err := s.end(handler(srv, s))
		charged.settle(err)
		return err
	}
}

type serverStream struct {
	grpc.ServerStream
	ctx     context.Context
	i       *Interceptor
	rule    *rule
	call    Call
	refused atomic.Pointer[refusal] // receiving and sending may go on side by side
}

func (s *serverStream) Context() context.Context { return s.ctx }

// RecvMsg counts a message once it is there.
func (s *serverStream) RecvMsg(m any) error {
	if r := s.refused.Load(); r != nil {
		return r
	}
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return s.count(m, Received)
}

// SendMsg counts a message before it goes.
func (s *serverStream) SendMsg(m any) error {
	if err := s.count(m, Sent); err != nil {
		return err
	}
	return s.ServerStream.SendMsg(m)
}

// count decides a message. The first refusal is the one that stays.
func (s *serverStream) count(m any, at Moment) error {
	if r := s.refused.Load(); r != nil {
		return r
	}
	if s.i.cfg.streams&at == 0 {
		return nil
	}
	c := s.call
	c.Message = m
	_, _, err := s.i.ask(s.ctx, s.rule, c, at)
	if err == nil {
		return nil
	}
	return keep(&s.refused, err)
}

// keep makes err the refusal of a stream, unless there is one.
func keep(at *atomic.Pointer[refusal], err error) error {
	if r, ok := errors.AsType[*refusal](err); ok && !at.CompareAndSwap(nil, r) {
		return at.Load()
	}
	return err
}

// end is the status of a stream whose handler returned err: a handler that wraps a denial, or drops it, does not turn it into success.
func (s *serverStream) end(err error) error {
	r := s.refused.Load()
	if r == nil {
		return err
	}
	s.i.pushBack(s.ctx, r)
	return r
}

// tell puts what the options ask for into the header and the trailer.
func (i *Interceptor) tell(ctx context.Context, r *rule, key string, res tierlimit.Result, err error) {
	if i.cfg.headers && res.Source != 0 {
		r.setHeaders(ctx, key, &res)
	}
	i.pushBack(ctx, err)
}

// pushBack tells the retries of a client whose call was denied with err when to come again.
func (i *Interceptor) pushBack(ctx context.Context, err error) {
	if !i.cfg.pushback || err == nil {
		return
	}
	r, ok := errors.AsType[*refusal](err)
	if !ok || !errors.Is(r, ErrDenied) {
		return
	}
	ms := int64(-1)
	if r.retryAfter != tierlimit.Never {
		// grpc-go waits this many milliseconds as a Duration: more than it holds would be no wait at all.
		ms = min(roundUp(r.retryAfter, time.Millisecond), math.MaxInt64/int64(time.Millisecond))
	}
	_ = grpc.SetTrailer(ctx, metadata.MD{pushbackTrailer: {strconv.FormatInt(ms, 10)}}) // fails as SetHeader does
}

// A chargedContext is the context of a call that was charged, for Refund.
type chargedContext struct {
	context.Context
	i      *Interceptor
	charge charge
	given  atomic.Bool
}

type chargedKey struct{}

func (c *chargedContext) Value(key any) any {
	if key == (chargedKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// settle refunds a call that failed, if WithRefundOn says so.
func (c *chargedContext) settle(err error) {
	if c.i.refundable(err) && c.given.CompareAndSwap(false, true) {
		// The call is over, perhaps because the caller left: its context would lose the refund. Stats counts one that is lost all the same.
		_ = c.i.giveBack(context.WithoutCancel(c), c.charge)
	}
}

// Refund gives back what the call cost that ctx, a server handler's context, belongs to: what every Interceptor on its way charged, of a
// stream for its opening. It does so once: called again, and for a call that cost nothing, it does nothing and returns nil.
//
// It may wait for Redis as Limiter.Refund does, also when ctx has ended because the caller has left. Errors are Limiter.Refund's, joined.
func Refund(ctx context.Context) error {
	if ctx == nil {
		return nil
	}
	free := context.WithoutCancel(ctx)
	var errs []error
	for at := ctx; at != nil; {
		c, ok := at.Value(chargedKey{}).(*chargedContext)
		if !ok {
			break
		}
		if c.given.CompareAndSwap(false, true) {
			errs = append(errs, c.i.giveBack(free, c.charge))
		}
		at = c.Context
	}
	return errors.Join(errs...)
}

const pushbackTrailer = "grpc-retry-pushback-ms"
