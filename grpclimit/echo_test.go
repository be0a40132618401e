package grpclimit_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is a service without generated code: Say is unary; Chat, Collect and List stream both ways, in and out.
type echo struct {
	say    func(ctx context.Context, text string) (string, error) // nil: the text itself
	chat   func(grpc.ServerStream) error                          // nil: each message back
	called atomic.Int64                                           // handlers that ran
}

const (
	say     = "/test.Echo/Say"
	chat    = "/test.Echo/Chat"
	collect = "/test.Echo/Collect"
	list    = "/test.Echo/List"
)

func (e *echo) desc() *grpc.ServiceDesc {
	stream := func(_ any, ss grpc.ServerStream) error {
		e.called.Add(1)
		if e.chat != nil {
			return e.chat(ss)
		}
		return echoAll(ss)
	}
	return &grpc.ServiceDesc{
		ServiceName: "test.Echo",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{
			MethodName: "Say",
			Handler: func(_ any, ctx context.Context, dec func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
				req := new(wrapperspb.StringValue)
				if err := dec(req); err != nil {
					return nil, err
				}
				handler := func(ctx context.Context, req any) (any, error) {
					e.called.Add(1)
					text := req.(*wrapperspb.StringValue).Value
					if e.say == nil {
						return wrapperspb.String(text), nil
					}
					text, err := e.say(ctx, text)
					if err != nil {
						return nil, err
					}
					return wrapperspb.String(text), nil
				}
				if interceptor == nil {
					return handler(ctx, req)
				}
				return interceptor(ctx, req, &grpc.UnaryServerInfo{Server: e, FullMethod: say}, handler)
			},
		}},
		Streams: []grpc.StreamDesc{
			{StreamName: "Chat", Handler: stream, ClientStreams: true, ServerStreams: true},
			{StreamName: "Collect", Handler: stream, ClientStreams: true},
			{StreamName: "List", Handler: stream, ServerStreams: true},
		},
	}
}

func echoAll(ss grpc.ServerStream) error {
	for {
		m := new(wrapperspb.StringValue)
		if err := ss.RecvMsg(m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := ss.SendMsg(m); err != nil {
			return err
		}
	}
}

// start serves e on a loopback socket and dials it. stop ends both.
func start(e *echo, server []grpc.ServerOption, client ...grpc.DialOption) (conn *grpc.ClientConn, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	return startOn(listener, listener.Addr().String(), e, server, client...)
}

func startOn(listener net.Listener, target string, e *echo, server []grpc.ServerOption, client ...grpc.DialOption) (conn *grpc.ClientConn, stop func(), err error) {
	s := grpc.NewServer(server...)
	s.RegisterService(e.desc(), e)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(listener)
	}()
	conn, err = grpc.NewClient(target, append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, client...)...)
	stop = func() {
		if conn != nil {
			conn.Close()
		}
		s.Stop()
		<-done
	}
	if err != nil {
		stop()
		return nil, nil, err
	}
	return conn, stop, nil
}

func serve(tb testing.TB, e *echo, server []grpc.ServerOption, client ...grpc.DialOption) *grpc.ClientConn {
	tb.Helper()
	conn, stop, err := start(e, server, client...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(stop)
	return conn
}

// limited serves e behind i.
func limited(tb testing.TB, e *echo, i *grpclimit.Interceptor) *grpc.ClientConn {
	tb.Helper()
	return serve(tb, e, serverOptions(i))
}

func serverOptions(i *grpclimit.Interceptor) []grpc.ServerOption {
	return []grpc.ServerOption{grpc.UnaryInterceptor(i.UnaryServerInterceptor()), grpc.StreamInterceptor(i.StreamServerInterceptor())}
}

func dialOptions(i *grpclimit.Interceptor) []grpc.DialOption {
	return []grpc.DialOption{grpc.WithUnaryInterceptor(i.UnaryClientInterceptor()), grpc.WithStreamInterceptor(i.StreamClientInterceptor())}
}

// call says text, with pairs of metadata.
func call(ctx context.Context, conn *grpc.ClientConn, text string, pairs ...string) (string, error) {
	reply := new(wrapperspb.StringValue)
	err := conn.Invoke(metadata.AppendToOutgoingContext(ctx, pairs...), say, wrapperspb.String(text), reply)
	return reply.Value, err
}

// open opens one of the streams.
func open(ctx context.Context, conn *grpc.ClientConn, method string) (grpc.ClientStream, error) {
	return conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: method != list, ServerStreams: method != collect}, method)
}

// exchange sends a message and waits for the one that comes back.
func exchange(stream grpc.ClientStream, text string) error {
	if err := stream.SendMsg(wrapperspb.String(text)); err != nil && !errors.Is(err, io.EOF) { // of which RecvMsg has the status
		return err
	}
	return stream.RecvMsg(new(wrapperspb.StringValue))
}

// limiter is one without Redis.
func limiter(tb testing.TB, name string, limit tierlimit.Limit) *tierlimit.Limiter {
	tb.Helper()
	h, err := tierlimit.NewLocal()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { h.Close(context.Background()) })
	l, err := h.Limiter(name, limit)
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

// hourly is a limiter that gives n tokens and then none for a long while.
func hourly(tb testing.TB, n int64) *tierlimit.Limiter {
	tb.Helper()
	return limiter(tb, "api", tierlimit.TokenBucket(n, time.Hour))
}

func interceptor(tb testing.TB, l *tierlimit.Limiter, key grpclimit.Key, opts ...grpclimit.Option) *grpclimit.Interceptor {
	tb.Helper()
	i, err := grpclimit.New(grpclimit.Limits{"*": l}, key, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	return i
}
