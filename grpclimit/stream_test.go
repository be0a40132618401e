package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

const all = grpclimit.Opening | grpclimit.Received | grpclimit.Sent

// A limit of 10 allows so many exchanges on a stream as the moments say, on either side.
func TestStreamMoments(t *testing.T) {
	for _, tc := range []struct {
		at        grpclimit.Moment
		exchanges int // of which each receives and sends one message
		stats     grpclimit.Stats
	}{
		{grpclimit.Opening, 20, grpclimit.Stats{Allowed: 1}},
		{grpclimit.Received, 10, grpclimit.Stats{Allowed: 10, Denied: 1}},
		{grpclimit.Sent, 10, grpclimit.Stats{Allowed: 10, Denied: 1}},
		{grpclimit.Opening | grpclimit.Received, 9, grpclimit.Stats{Allowed: 10, Denied: 1}},
		{grpclimit.Received | grpclimit.Sent, 5, grpclimit.Stats{Allowed: 10, Denied: 1}},
		{all, 4, grpclimit.Stats{Allowed: 10, Denied: 1}}, // the last message is received, and its answer is denied
	} {
		for _, side := range []string{"server", "client"} {
			t.Run(fmt.Sprintf("%s/%d", side, tc.at), func(t *testing.T) {
				i := interceptor(t, hourly(t, 10), grpclimit.Everyone(), grpclimit.WithStreams(tc.at))
				var conn *grpc.ClientConn
				if side == "server" {
					conn = limited(t, &echo{}, i)
				} else {
					conn = serve(t, &echo{}, nil, dialOptions(i)...)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream, err := open(ctx, conn, chat)
				if err != nil {
					t.Fatal(err)
				}
				n := 0
				for n < 20 {
					if err = exchange(stream, "x"); err != nil {
						break
					}
					n++
				}
				if n < 20 {
					wantCode(t, err, codes.ResourceExhausted)
					if retry, quota := details(err); retry == nil || quota == nil {
						t.Errorf("the denial has no details: %v", err)
					}
					if local := errors.Is(err, grpclimit.ErrDenied); local != (side == "client") {
						t.Errorf("ErrDenied: %v", local)
					}
				}
				if got := i.Stats(); n != tc.exchanges || got != tc.stats {
					t.Errorf("%d exchanges, want %d; %+v, want %+v", n, tc.exchanges, got, tc.stats)
				}
			})
		}
	}
}

func TestStreamOpeningDenied(t *testing.T) {
	i := interceptor(t, hourly(t, 1), grpclimit.Everyone())
	e := &echo{}
	conn := limited(t, e, i)
	for n, want := range []codes.Code{codes.OK, codes.ResourceExhausted} {
		stream, err := open(t.Context(), conn, chat)
		if err != nil {
			t.Fatal(err)
		}
		stream.CloseSend()
		if err := stream.RecvMsg(new(wrapperspb.StringValue)); !errors.Is(err, io.EOF) && status.Code(err) != want {
			t.Errorf("stream %d: got %v, want %v", n, err, want)
		}
	}
	client := serve(t, e, nil, dialOptions(interceptor(t, hourly(t, 0), grpclimit.Everyone()))...)
	if _, err := open(t.Context(), client, chat); status.Code(err) != codes.ResourceExhausted || !errors.Is(err, grpclimit.ErrDenied) {
		t.Errorf("got %v, want a denial in this process", err)
	}
	if n := e.called.Load(); n != 1 {
		t.Errorf("%d handlers ran, want 1", n)
	}
}

// The denial of a message is the status of the stream, whatever its handler makes of it, and nothing goes on after it.
func TestStreamDenialStands(t *testing.T) {
	for name, ending := range map[string]func(error) error{
		"returned": func(err error) error { return err },
		"dropped":  func(error) error { return nil },
		"wrapped":  func(err error) error { return status.Errorf(codes.Internal, "receiving: %v", err) },
	} {
		t.Run(name, func(t *testing.T) {
			var after atomic.Int64
			e := &echo{chat: func(ss grpc.ServerStream) error {
				err := echoAll(ss)
				for range 3 {
					if err := ss.SendMsg(wrapperspb.String("more")); !errors.Is(err, grpclimit.ErrDenied) {
						after.Add(1)
					}
					if err := ss.RecvMsg(new(wrapperspb.StringValue)); !errors.Is(err, grpclimit.ErrDenied) {
						after.Add(1)
					}
				}
				return ending(err)
			}}
			i := interceptor(t, hourly(t, 1), grpclimit.Everyone(), grpclimit.WithStreams(grpclimit.Received))
			stream, err := open(t.Context(), limited(t, e, i), chat)
			if err != nil {
				t.Fatal(err)
			}
			if err := exchange(stream, "one"); err != nil {
				t.Fatal(err)
			}
			wantCode(t, exchange(stream, "two"), codes.ResourceExhausted)
			if after.Load() != 0 {
				t.Errorf("%d times the handler could go on", after.Load())
			}
		})
	}
}

// Both directions of many streams at once: what passes is what the limit says, and no stream is left behind.
func TestStreamBothDirectionsAtOnce(t *testing.T) {
	const limit = 200
	for _, side := range []string{"server", "client"} {
		t.Run(side, func(t *testing.T) {
			i := interceptor(t, hourly(t, limit), grpclimit.Everyone(), grpclimit.WithStreams(grpclimit.Received|grpclimit.Sent))
			var conn *grpc.ClientConn
			if side == "server" {
				conn = limited(t, &echo{}, i)
			} else {
				conn = serve(t, &echo{}, nil, dialOptions(i)...)
			}
			ended := make(chan error)
			for range 8 {
				go func() {
					stream, err := open(t.Context(), conn, chat)
					if err != nil {
						ended <- err
						return
					}
					sent := make(chan struct{})
					go func() {
						defer close(sent)
						for stream.SendMsg(wrapperspb.String("x")) == nil {
						}
					}()
					for err == nil {
						err = stream.RecvMsg(new(wrapperspb.StringValue))
					}
					<-sent
					ended <- err
				}()
			}
			for range 8 {
				if err := <-ended; status.Code(err) != codes.ResourceExhausted {
					t.Errorf("a stream ended with %v", err)
				}
			}
			if s := i.Stats(); s.Allowed != limit || s.Denied < 8 || s.Errors != 0 {
				t.Errorf("%+v, want %d allowed, 8 denied or more", s, limit)
			}
		})
	}
}

// A client's denial ends its stream: the server sees it cancelled, though the client does no more.
func TestClientDenialFreesTheStream(t *testing.T) {
	seen := make(chan error, 1)
	e := &echo{chat: func(ss grpc.ServerStream) error {
		for {
			if err := ss.RecvMsg(new(wrapperspb.StringValue)); err != nil {
				seen <- err
				return err
			}
		}
	}}
	i := interceptor(t, hourly(t, 2), grpclimit.Everyone(), grpclimit.WithStreams(grpclimit.Sent))
	stream, err := open(t.Context(), serve(t, e, nil, dialOptions(i)...), chat)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := stream.SendMsg(wrapperspb.String("x")); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // and it stays denied
		if err := stream.SendMsg(wrapperspb.String("x")); !errors.Is(err, grpclimit.ErrDenied) {
			t.Fatalf("got %v, want a denial", err)
		}
		if err := stream.RecvMsg(new(wrapperspb.StringValue)); !errors.Is(err, grpclimit.ErrDenied) {
			t.Fatalf("got %v, want the denial", err)
		}
	}
	select {
	case err := <-seen:
		wantCode(t, err, codes.Canceled)
	case <-time.After(10 * time.Second):
		t.Fatal("the server's side of the stream is still open")
	}
}

// The one answer of a stream that sends only arrives when the stream has ended already, on a cold key, too.
func TestClientCountsTheLastMessage(t *testing.T) {
	e := &echo{chat: func(ss grpc.ServerStream) error {
		for {
			if err := ss.RecvMsg(new(wrapperspb.StringValue)); errors.Is(err, io.EOF) {
				return ss.SendMsg(wrapperspb.String("done"))
			} else if err != nil {
				return err
			}
		}
	}}
	for name, opts := range map[string][]grpclimit.Option{
		"at once": {grpclimit.WithStreams(all)},
		"waiting": {grpclimit.WithStreams(all), grpclimit.WithWait(all)},
	} {
		i := interceptor(t, hourly(t, 10), grpclimit.Everyone(), opts...)
		stream, err := open(t.Context(), serve(t, e, nil, dialOptions(i)...), collect)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg(wrapperspb.String("x")); err != nil {
			t.Fatal(err)
		}
		stream.CloseSend()
		reply := new(wrapperspb.StringValue)
		if err := stream.RecvMsg(reply); err != nil || reply.Value != "done" {
			t.Errorf("%s: got %q, %v", name, reply.Value, err)
		}
		if got, want := i.Stats(), (grpclimit.Stats{Allowed: 3}); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

// Streams whose opening is not counted leave unary calls counted.
func TestUnaryIsCountedWhateverStreamsAre(t *testing.T) {
	i := interceptor(t, hourly(t, 0), grpclimit.Everyone(), grpclimit.WithStreams(grpclimit.Sent))
	_, err := call(t.Context(), limited(t, &echo{}, i), "")
	wantCode(t, err, codes.ResourceExhausted)
}

func TestWait(t *testing.T) {
	quick := func() *tierlimit.Limiter { // a token each 20 ms
		return limiter(t, "api", tierlimit.TokenBucket(50, time.Second).WithBurst(1))
	}
	const calls, least = 6, 5 * 20 * time.Millisecond
	t.Run("unary client", func(t *testing.T) {
		i := interceptor(t, quick(), grpclimit.Everyone(), grpclimit.WithWait(grpclimit.Opening))
		conn := serve(t, &echo{}, nil, dialOptions(i)...)
		begin := time.Now()
		for range calls {
			if _, err := call(t.Context(), conn, ""); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(begin); took < least {
			t.Errorf("%d calls took %v, want %v or more", calls, took, least)
		}
	})
	for _, at := range []grpclimit.Moment{grpclimit.Received, grpclimit.Sent} {
		for _, side := range []string{"server", "client"} {
			t.Run(fmt.Sprintf("stream %s/%d", side, at), func(t *testing.T) {
				i := interceptor(t, quick(), grpclimit.Everyone(), grpclimit.WithStreams(at), grpclimit.WithWait(at))
				var conn *grpc.ClientConn
				if side == "server" {
					conn = limited(t, &echo{}, i)
				} else {
					conn = serve(t, &echo{}, nil, dialOptions(i)...)
				}
				stream, err := open(t.Context(), conn, chat)
				if err != nil {
					t.Fatal(err)
				}
				begin := time.Now()
				for range calls {
					if err := exchange(stream, "x"); err != nil {
						t.Fatal(err)
					}
				}
				stream.CloseSend()
				if took := time.Since(begin); took < least {
					t.Errorf("%d messages took %v, want %v or more", calls, took, least)
				}
			})
		}
	}
}

// A wait that the deadline does not allow fails at once, and one that is cancelled as soon as it is.
func TestWaitHonoursTheContext(t *testing.T) {
	i := interceptor(t, hourly(t, 1), grpclimit.Everyone(), grpclimit.WithWait(grpclimit.Opening))
	e := &echo{}
	conn := serve(t, e, nil, dialOptions(i)...)
	if _, err := call(t.Context(), conn, ""); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	_, err := call(ctx, conn, "")
	wantCode(t, err, codes.DeadlineExceeded)
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	_, err = call(ctx, conn, "")
	wantCode(t, err, codes.Canceled)
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("it took %v", took)
	}
	if n := e.called.Load(); n != 1 {
		t.Errorf("the handler ran %d times, want 1", n)
	}
}

// A sender that waits while the server ends the stream is told io.EOF, as gRPC does: RecvMsg has the status.
func TestWaitOfAnEndedStream(t *testing.T) {
	e := &echo{chat: func(ss grpc.ServerStream) error {
		if err := ss.RecvMsg(new(wrapperspb.StringValue)); err != nil {
			return err
		}
		return status.Error(codes.Aborted, "enough")
	}}
	i := interceptor(t, hourly(t, 1), grpclimit.Everyone(), grpclimit.WithStreams(grpclimit.Sent), grpclimit.WithWait(grpclimit.Sent))
	stream, err := open(t.Context(), serve(t, e, nil, dialOptions(i)...), chat)
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error)
	go func() {
		err := stream.SendMsg(wrapperspb.String("x"))
		if err == nil {
			err = stream.SendMsg(wrapperspb.String("x"))
		}
		sent <- err
	}()
	wantCode(t, stream.RecvMsg(new(wrapperspb.StringValue)), codes.Aborted)
	if err := <-sent; !errors.Is(err, io.EOF) {
		t.Errorf("got %v, want EOF", err)
	}
}
