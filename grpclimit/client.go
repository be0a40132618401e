package grpclimit

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"

	"google.golang.org/grpc"
)

// UnaryClientInterceptor counts each unary call before it leaves. A call that gRPC itself retries counts once.
func (i *Interceptor) UnaryClientInterceptor() grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		c := named(Call{FullMethod: method, Message: req, Client: true, Target: target(cc)})
		ch, _, err := i.ask(ctx, i.ruleFor(ctx, c), c, Opening)
		if err != nil {
			return err
		}
		err = invoker(ctx, method, req, reply, cc, opts...)
		if ch.n > 0 && i.refundable(err) {
			// The context may be what ended the call. Stats counts a refund that is lost all the same.
			_ = i.giveBack(context.WithoutCancel(ctx), ch)
		}
		return err
	}
}

// StreamClientInterceptor counts the opening of each stream, and its messages if WithStreams says so. A message that is denied ends the
// stream: the server sees it cancelled.
//
// It learns by a grpc.OnFinish among the CallOptions that a stream has ended. An interceptor further in has to pass them on: one that drops
// them loses the refunds of WithRefundOn, and what the stream's context holds is freed only when the caller's context ends.
func (i *Interceptor) StreamClientInterceptor() grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		c := named(Call{FullMethod: method, Client: true, Target: target(cc)})
		r := i.ruleFor(ctx, c)
		var ch charge
		if r == nil || i.cfg.streams&Opening != 0 {
			var err error
			if ch, _, err = i.ask(ctx, r, c, Opening); err != nil {
				return nil, err
			}
		}
		if r == nil {
			return streamer(ctx, desc, cc, method, opts...)
		}
		s := &clientStream{outer: ctx, i: i, rule: r, call: c, charge: ch}
		if i.cfg.streams&^Opening == 0 {
			if ch.n == 0 || i.cfg.refundOn == nil {
				return streamer(ctx, desc, cc, method, opts...)
			}
		}
		// Who is told by SendMsg that a stream has ended need not do more to free it, so a denial has to.
		s.ctx, s.cancel = context.WithCancel(ctx)
		// Clipped: the slice is the caller's.
		stream, err := streamer(s.ctx, desc, cc, method, append(slices.Clip(opts), grpc.OnFinish(s.finish))...)
		if err != nil {
			s.finish(err) // an interceptor further in may have ended the call before gRPC knew of it
			return nil, err
		}
		s.ClientStream = stream
		if i.cfg.streams&^Opening == 0 {
			return stream, nil
		}
		return s, nil
	}
}

func target(cc *grpc.ClientConn) string {
	if cc == nil {
		return ""
	}
	return cc.Target()
}

type clientStream struct {
	grpc.ClientStream
	outer   context.Context // the caller's
	ctx     context.Context // the stream's: done when it has ended
	cancel  context.CancelFunc
	i       *Interceptor
	rule    *rule
	call    Call
	charge  charge
	over    atomic.Bool
	refused atomic.Pointer[refusal] // receiving and sending may go on side by side
}

// finish runs when the stream has ended, at least once.
func (s *clientStream) finish(err error) {
	if !s.over.CompareAndSwap(false, true) {
		return
	}
	if s.charge.n > 0 && s.i.refundable(err) {
		_ = s.i.giveBack(context.WithoutCancel(s.outer), s.charge) // Stats counts one that is lost
	}
	s.cancel()
}

// RecvMsg counts a message once it is there.
func (s *clientStream) RecvMsg(m any) error {
	if r := s.refused.Load(); r != nil {
		return r
	}
	if err := s.ClientStream.RecvMsg(m); err != nil {
		if r := s.refused.Load(); r != nil {
			return r // the other direction was denied meanwhile, and that is why
		}
		return err
	}
	return s.count(m, Received)
}

// SendMsg counts a message before it goes.
func (s *clientStream) SendMsg(m any) error {
	if err := s.count(m, Sent); err != nil {
		return err
	}
	return s.ClientStream.SendMsg(m)
}

func (s *clientStream) count(m any, at Moment) error {
	if r := s.refused.Load(); r != nil {
		return r
	}
	if s.i.cfg.streams&at == 0 {
		return nil
	}
	c := s.call
	c.Message = m
	ctx := s.outer // the last message of a stream is received when the stream has ended
	if at == Sent {
		ctx = s.ctx
	}
	_, _, err := s.i.ask(ctx, s.rule, c, at)
	switch {
	case err == nil:
		return nil
	case at == Sent && s.over.Load() && s.refused.Load() == nil && s.outer.Err() == nil && errors.Is(err, context.Canceled):
		return io.EOF // the stream ended during the wait; its status is RecvMsg's to tell
	}
	err = keep(&s.refused, err)
	s.finish(err) // before gRPC does, to which the stream is one that was cancelled
	return err
}
