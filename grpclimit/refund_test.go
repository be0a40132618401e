package grpclimit_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// left is how many tokens everyone has left.
func left(t *testing.T, l *tierlimit.Limiter) int64 {
	t.Helper()
	r, err := l.Peek(t.Context(), "everyone")
	if err != nil {
		t.Fatal(err)
	}
	return r.Remaining
}

func TestRefundByTheHandler(t *testing.T) {
	l := hourly(t, 10)
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithCost(func(context.Context, grpclimit.Call) int64 { return 4 }))
	e := &echo{say: func(ctx context.Context, text string) (string, error) {
		if text == "refund" {
			for range 3 { // once is enough
				if err := grpclimit.Refund(ctx); err != nil {
					return "", err
				}
			}
		}
		return text, nil
	}}
	conn := limited(t, e, i)
	for _, tc := range []struct {
		text string
		left int64
	}{{"refund", 10}, {"keep", 6}, {"refund", 6}, {"keep", 2}} {
		if _, err := call(t.Context(), conn, tc.text); err != nil {
			t.Fatal(err)
		}
		if got := left(t, l); got != tc.left {
			t.Fatalf("after %q %d are left, want %d", tc.text, got, tc.left)
		}
	}
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 4, Refunded: 8}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A stream gives its opening back, not its messages, and does so after its handler has returned, too.
func TestRefundOfAStream(t *testing.T) {
	l := hourly(t, 10)
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithStreams(all))
	contexts := make(chan context.Context, 1)
	e := &echo{chat: func(ss grpc.ServerStream) error {
		contexts <- ss.Context()
		return echoAll(ss)
	}}
	stream, err := open(t.Context(), limited(t, e, i), chat)
	if err == nil {
		err = exchange(stream, "x")
	}
	if err != nil {
		t.Fatal(err)
	}
	stream.CloseSend()
	if err := stream.RecvMsg(new(wrapperspb.StringValue)); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	ctx := <-contexts
	for range 2 { // once is enough
		if err := grpclimit.Refund(ctx); err != nil || left(t, l) != 8 {
			t.Fatalf("%v, %d are left, want 8", err, left(t, l))
		}
	}
}

// Every interceptor on the way gives back what it charged, each to its own limiter; a context of no call is none of their business.
func TestRefundThroughSeveralInterceptors(t *testing.T) {
	outer, inner := hourly(t, 10), hourly(t, 10)
	a, b := interceptor(t, outer, grpclimit.Everyone()), interceptor(t, inner, grpclimit.Everyone())
	skipping := interceptor(t, inner, grpclimit.Everyone(), grpclimit.WithSkipMethods("*"))
	e := &echo{say: func(ctx context.Context, text string) (string, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return text, grpclimit.Refund(ctx)
	}}
	conn := serve(t, e, []grpc.ServerOption{grpc.ChainUnaryInterceptor(a.UnaryServerInterceptor(), skipping.UnaryServerInterceptor(), b.UnaryServerInterceptor())})
	if _, err := call(t.Context(), conn, ""); err != nil {
		t.Fatal(err)
	}
	if left(t, outer) != 10 || left(t, inner) != 10 || a.Stats().Refunded != 1 || b.Stats().Refunded != 1 {
		t.Errorf("%d and %d are left, want 10 and 10; %+v, %+v", left(t, outer), left(t, inner), a.Stats(), b.Stats())
	}
	if err := errors.Join(grpclimit.Refund(t.Context()), grpclimit.Refund(nil)); err != nil { //nolint:staticcheck // SA1012: a caller may do so
		t.Error(err)
	}
}

// What WithShadow lets pass was charged nothing, so there is nothing to give back.
func TestRefundOfWhatIsShadowed(t *testing.T) {
	h, err := tierlimit.NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter("api", tierlimit.FixedWindow(1, 24*time.Hour), tierlimit.WithShadow())
	if err != nil {
		t.Fatal(err)
	}
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithRefundOn(codes.Internal))
	for n := range 4 {
		_, _ = i.UnaryServerInterceptor()(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: say}, func(ctx context.Context, _ any) (any, error) {
			switch n {
			case 0:
				return nil, nil
			case 1:
				return nil, grpclimit.Refund(ctx)
			}
			return nil, status.Error(codes.Internal, "x")
		})
	}
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 4}); got != want || left(t, l) != 0 {
		t.Errorf("got %+v, want %+v; %d are left, want 0", got, want, left(t, l))
	}
}

func TestRefundThatFails(t *testing.T) {
	h, err := tierlimit.NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter("api", tierlimit.FixedWindow(5, 1e12))
	if err != nil {
		t.Fatal(err)
	}
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithCost(func(context.Context, grpclimit.Call) int64 { return 3 }))
	_, err = i.UnaryServerInterceptor()(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: say}, func(ctx context.Context, _ any) (any, error) {
		h.Close(ctx)
		return nil, grpclimit.Refund(ctx)
	})
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 1, RefundsLost: 3}); !errors.Is(err, tierlimit.ErrClosed) || got != want {
		t.Errorf("got %v, %+v, want %+v", err, got, want)
	}
}

// failing ends its calls with the code that their text names.
func failing() *echo {
	ends := map[string]error{
		"ok":        nil,
		"internal":  status.Error(codes.Internal, "x"),
		"not found": status.Error(codes.NotFound, "x"),
		"deadline":  context.DeadlineExceeded, // of which the server makes a status
		"plain":     errors.New("x"),          // Unknown
	}
	return &echo{
		say: func(_ context.Context, text string) (string, error) { return text, ends[text] },
		chat: func(ss grpc.ServerStream) error {
			m := new(wrapperspb.StringValue)
			if err := ss.RecvMsg(m); err != nil {
				return err
			}
			if err := ss.SendMsg(m); err != nil {
				return err
			}
			return ends[m.Value]
		},
	}
}

func TestRefundOnCodes(t *testing.T) {
	for _, side := range []string{"server", "client"} {
		for _, kind := range []string{"unary", "stream", "stream with messages"} {
			t.Run(side+"/"+kind, func(t *testing.T) {
				l := hourly(t, 100)
				opts := []grpclimit.Option{grpclimit.WithRefundOn(codes.Internal, codes.DeadlineExceeded)}
				perCall := int64(1)
				if kind == "stream with messages" {
					opts = append(opts, grpclimit.WithStreams(all))
					perCall = 3
				}
				i := interceptor(t, l, grpclimit.Everyone(), opts...)
				var conn *grpc.ClientConn
				if side == "server" {
					conn = limited(t, failing(), i)
				} else {
					conn = serve(t, failing(), nil, dialOptions(i)...)
				}
				spent := int64(0)
				for _, tc := range []struct {
					text string
					back int64
				}{{"ok", 0}, {"internal", 1}, {"not found", 0}, {"deadline", 1}, {"plain", 0}} {
					if kind == "unary" {
						_, _ = call(t.Context(), conn, tc.text)
					} else {
						stream, err := open(t.Context(), conn, chat)
						if err != nil {
							t.Fatal(err)
						}
						if err := exchange(stream, tc.text); err != nil {
							t.Fatal(err)
						}
						if err := stream.RecvMsg(new(wrapperspb.StringValue)); errors.Is(err, io.EOF) != (tc.text == "ok") {
							t.Fatal(err)
						}
					}
					spent += perCall - tc.back
					if got := 100 - left(t, l); got != spent {
						t.Fatalf("after %q %d are spent, want %d", tc.text, got, spent)
					}
				}
				if s := i.Stats(); s.Refunded != 2 || s.RefundsLost != 0 {
					t.Errorf("%+v, want 2 refunds", s)
				}
			})
		}
	}
}

// A client's stream that could not be opened is given back, whoever refused it.
func TestRefundOfAStreamThatNeverOpened(t *testing.T) {
	l := hourly(t, 10)
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithRefundOn(codes.Unavailable))
	refuse := func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, grpc.Streamer, ...grpc.CallOption) (grpc.ClientStream, error) {
		return nil, status.Error(codes.Unavailable, "x")
	}
	conn := serve(t, &echo{}, nil, grpc.WithChainStreamInterceptor(i.StreamClientInterceptor(), refuse))
	if _, err := open(t.Context(), conn, chat); status.Code(err) != codes.Unavailable {
		t.Fatal(err)
	}
	if got := left(t, l); got != 10 {
		t.Errorf("%d are left, want 10", got)
	}
}

// A client's stream that its own limit ended gives its opening back, if denials do.
func TestRefundOfAStreamDeniedHere(t *testing.T) {
	l := hourly(t, 2)
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithStreams(grpclimit.Opening|grpclimit.Sent), grpclimit.WithRefundOn(codes.ResourceExhausted))
	stream, err := open(t.Context(), serve(t, &echo{}, nil, dialOptions(i)...), chat)
	if err == nil {
		err = stream.SendMsg(wrapperspb.String("x"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(wrapperspb.String("x")); !errors.Is(err, grpclimit.ErrDenied) || left(t, l) != 1 {
		t.Errorf("%v, %d are left, want 1", err, left(t, l))
	}
}

// A call that its caller gave up is refunded all the same, even if that takes an exchange with Redis.
func TestRefundOfACallThatWasGivenUp(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: redistest.Start(t).Addr(), ContextTimeoutEnabled: true, DialerRetries: 1})
	h, err := tierlimit.New(rdb, tierlimit.WithRemoteTimeout(900*time.Millisecond), tierlimit.WithLocalShare(0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close(context.Background())
		rdb.Close()
	})
	l, err := h.Limiter("api", tierlimit.TokenBucket(10, 24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for _, side := range []string{"server", "client", "handler"} {
		i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithRefundOn(codes.Canceled))
		ctx, cancel := context.WithCancel(t.Context())
		if side == "server" {
			_, err = i.UnaryServerInterceptor()(ctx, nil, &grpc.UnaryServerInfo{FullMethod: say}, func(ctx context.Context, _ any) (any, error) {
				cancel()
				return nil, ctx.Err()
			})
		} else if side == "handler" {
			_, err = i.UnaryServerInterceptor()(ctx, nil, &grpc.UnaryServerInfo{FullMethod: say}, func(ctx context.Context, _ any) (any, error) {
				cancel()
				if err := grpclimit.Refund(ctx); err != nil {
					t.Error(err)
				}
				return nil, ctx.Err()
			})
		} else {
			err = i.UnaryClientInterceptor()(ctx, say, nil, nil, nil, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				cancel()
				return status.FromContextError(ctx.Err()).Err()
			})
		}
		if got := left(t, l); err == nil || got != 10 || i.Stats().Refunded != 1 {
			t.Errorf("%s: %v, %d are left, want 10; %+v", side, err, got, i.Stats())
		}
		cancel()
	}
}
