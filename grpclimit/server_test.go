package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

// details are what a denial carries.
func details(err error) (retry *errdetails.RetryInfo, quota *errdetails.QuotaFailure) {
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.RetryInfo:
			retry = d
		case *errdetails.QuotaFailure:
			quota = d
		}
	}
	return retry, quota
}

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Fatalf("got %v, want %v", err, want)
	}
}

func TestUnaryServer(t *testing.T) {
	e := &echo{}
	i := interceptor(t, hourly(t, 2), grpclimit.Everyone())
	conn := limited(t, e, i)
	for range 2 {
		if reply, err := call(t.Context(), conn, "hello"); err != nil || reply != "hello" {
			t.Fatalf("got %q, %v", reply, err)
		}
	}
	_, err := call(t.Context(), conn, "hello")
	wantCode(t, err, codes.ResourceExhausted)
	retry, quota := details(err)
	if d := retry.GetRetryDelay().AsDuration(); d <= 29*time.Minute || d > 30*time.Minute {
		t.Errorf("RetryInfo says %v, want half an hour", d)
	}
	want := &errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{Subject: "limiter:api", Description: `rate limit "api" exceeded`}}}
	if !proto.Equal(quota, want) {
		t.Errorf("QuotaFailure %v, want %v", quota, want)
	}
	if errors.Is(err, grpclimit.ErrDenied) {
		t.Error("ErrDenied is for denials in this process; this one came from the server")
	}
	if n := e.called.Load(); n != 2 {
		t.Errorf("the handler ran %d times, want 2", n)
	}
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 2, Denied: 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// RetryInfo is as long as the limiter says, and waiting that long is enough.
func TestRetryInfoIsEnough(t *testing.T) {
	conn := limited(t, &echo{}, interceptor(t, limiter(t, "api", tierlimit.TokenBucket(10, time.Second).WithBurst(1)), grpclimit.Everyone()))
	for range 3 {
		if _, err := call(t.Context(), conn, ""); err != nil {
			t.Fatal(err)
		}
		_, err := call(t.Context(), conn, "")
		wantCode(t, err, codes.ResourceExhausted)
		retry, _ := details(err)
		if d := retry.GetRetryDelay().AsDuration(); d <= 0 || d > 100*time.Millisecond {
			t.Fatalf("RetryInfo says %v, want up to 100ms", d)
		}
		time.Sleep(retry.GetRetryDelay().AsDuration())
	}
}

func TestDeniedForGoodHasNoRetryInfo(t *testing.T) {
	dear := func(context.Context, grpclimit.Call) int64 { return 6 }
	for name, i := range map[string]*grpclimit.Interceptor{
		"cost above the capacity": interceptor(t, hourly(t, 5), grpclimit.Everyone(), grpclimit.WithCost(dear)),
		"the same, waiting":       interceptor(t, hourly(t, 5), grpclimit.Everyone(), grpclimit.WithCost(dear), grpclimit.WithWait(grpclimit.Opening)),
		"a limit of 0":            interceptor(t, hourly(t, 0), grpclimit.Everyone()),
		"no key":                  interceptor(t, hourly(t, 5), grpclimit.Metadata("absent")),
	} {
		t.Run(name, func(t *testing.T) {
			e := &echo{}
			_, err := call(t.Context(), limited(t, e, i), "hello")
			wantCode(t, err, codes.ResourceExhausted)
			retry, quota := details(err)
			if retry != nil || len(quota.GetViolations()) != 1 {
				t.Errorf("got %v and %v, want a QuotaFailure alone", retry, quota)
			}
			if s := i.Stats(); e.called.Load() != 0 || s.Denied != 1 || s.Allowed != 0 {
				t.Errorf("the handler ran %d times, %+v", e.called.Load(), s)
			}
		})
	}
}

// Nothing that a caller sends comes back, in status, header or trailer.
func TestDenialEchoesNothing(t *testing.T) {
	const secret = "s3cr3t"
	key := grpclimit.Join(grpclimit.Metadata("x-api-key"), grpclimit.KeyFunc(func(_ context.Context, c grpclimit.Call) (string, bool) {
		return c.Message.(*wrapperspb.StringValue).Value, true
	}))
	for name, i := range map[string]*grpclimit.Interceptor{
		"denied":  interceptor(t, hourly(t, 0), key, grpclimit.WithHeaders(), grpclimit.WithPushback()),
		"missing": interceptor(t, hourly(t, 0), grpclimit.Metadata("absent"), grpclimit.WithHeaders(), grpclimit.WithPushback()),
		"failed":  interceptor(t, hourly(t, 1), key, grpclimit.WithCost(func(context.Context, grpclimit.Call) int64 { return -1 })),
	} {
		var header, trailer metadata.MD
		ctx := metadata.AppendToOutgoingContext(t.Context(), "x-api-key", secret)
		err := limited(t, &echo{}, i).Invoke(ctx, say, wrapperspb.String(secret), new(wrapperspb.StringValue), grpc.Header(&header), grpc.Trailer(&trailer))
		if err == nil {
			t.Fatalf("%s: it passed", name)
		}
		if told := fmt.Sprint(status.Convert(err).Proto(), err, header, trailer); strings.Contains(told, secret) {
			t.Errorf("%s: the answer has what the caller sent: %s", name, told)
		}
	}
}

// hung is a limiter whose Redis accepts connections and never answers; a check waits for it.
func hung(tb testing.TB) *tierlimit.Limiter {
	tb.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
	}()
	rdb := redis.NewClient(&redis.Options{Addr: listener.Addr().String(), ContextTimeoutEnabled: true, DialerRetries: 1})
	h, err := tierlimit.New(rdb, tierlimit.WithRemoteTimeout(time.Second))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		listener.Close()
		<-done
		for _, c := range conns {
			c.Close()
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		h.Close(ctx)
		rdb.Close()
	})
	l, err := h.Limiter("hung", tierlimit.TokenBucket(1, time.Hour))
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

// An error of the limiter ends the call with a code of its own: it never lets it pass.
func TestLimiterErrors(t *testing.T) {
	h, err := tierlimit.NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	closed, err := h.Limiter("closed", tierlimit.TokenBucket(1, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	h.Close(t.Context())
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	slow := hung(t)
	negative := grpclimit.WithCost(func(context.Context, grpclimit.Call) int64 { return -1 })
	for _, tc := range []struct {
		name  string
		ctx   context.Context
		l     *tierlimit.Limiter
		opts  []grpclimit.Option
		code  codes.Code
		cause error
	}{
		{"closed", t.Context(), closed, nil, codes.Unavailable, tierlimit.ErrClosed},
		{"closed, waiting", t.Context(), closed, []grpclimit.Option{grpclimit.WithWait(grpclimit.Opening)}, codes.Unavailable, tierlimit.ErrClosed},
		{"cancelled", canceled, slow, nil, codes.Canceled, context.Canceled},
		{"deadline", late, slow, nil, codes.DeadlineExceeded, context.DeadlineExceeded},
		{"negative cost", t.Context(), hourly(t, 1), []grpclimit.Option{negative}, codes.Internal, tierlimit.ErrCost},
	} {
		t.Run(tc.name, func(t *testing.T) {
			i := interceptor(t, tc.l, grpclimit.Everyone(), tc.opts...)
			ran := 0
			_, unary := i.UnaryServerInterceptor()(tc.ctx, nil, &grpc.UnaryServerInfo{FullMethod: say}, func(context.Context, any) (any, error) {
				ran++
				return nil, nil
			})
			stream := i.StreamServerInterceptor()(nil, fakeStream{ctx: tc.ctx}, &grpc.StreamServerInfo{FullMethod: chat}, func(any, grpc.ServerStream) error {
				ran++
				return nil
			})
			client := i.UnaryClientInterceptor()(tc.ctx, say, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				ran++
				return nil
			})
			_, clientStream := i.StreamClientInterceptor()(tc.ctx, &grpc.StreamDesc{}, nil, chat, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
				ran++
				return nil, nil
			})
			for kind, err := range map[string]error{"unary": unary, "stream": stream, "client": client, "client stream": clientStream} {
				if status.Code(err) != tc.code || !errors.Is(err, tc.cause) {
					t.Errorf("%s: got %v, want %v that wraps %v", kind, err, tc.code, tc.cause)
				}
				if errors.Is(err, grpclimit.ErrDenied) {
					t.Errorf("%s: an error is no denial", kind)
				}
			}
			if got, want := i.Stats(), (grpclimit.Stats{Errors: 4}); ran != 0 || got != want {
				t.Errorf("handlers ran %d times, %+v, want %+v", ran, got, want)
			}
		})
	}
}

type fakeStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s fakeStream) Context() context.Context { return s.ctx }

func TestMostSpecificLimitWins(t *testing.T) {
	one, two, three := hourly(t, 1), hourly(t, 2), hourly(t, 3)
	i, err := grpclimit.New(grpclimit.Limits{say: one, "/test.Echo/*": two, "*": three}, grpclimit.Everyone())
	if err != nil {
		t.Fatal(err)
	}
	passed := func(method string) (n int) {
		for range 5 {
			if _, err := i.UnaryServerInterceptor()(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method}, nothing); err == nil {
				n++
			}
		}
		return n
	}
	for _, tc := range []struct {
		method string
		want   int
		why    string
	}{
		{say, 1, "its own limit"},
		{"test.Echo/Say", 0, "the same method, of which nothing is left"},
		{chat, 2, "the service's limit"},
		{list, 0, "the same limiter and key"},
		{"/test.Other/Say", 3, "the limit of everything else"},
		{"/test.Echo.More/Say", 0, "the same"},
		{"", 0, "the same"},
	} {
		if got := passed(tc.method); got != tc.want {
			t.Errorf("%q: %d calls passed, want %d: %s", tc.method, got, tc.want, tc.why)
		}
	}
}

func nothing(context.Context, any) (any, error) { return nil, nil }

func TestMethodsWithoutALimitPass(t *testing.T) {
	i, err := grpclimit.New(grpclimit.Limits{"/test.Other/*": hourly(t, 0)}, grpclimit.Everyone())
	if err != nil {
		t.Fatal(err)
	}
	conn := limited(t, &echo{}, i)
	if _, err := call(t.Context(), conn, ""); err != nil {
		t.Error(err)
	}
	stream, err := open(t.Context(), conn, chat)
	if err == nil {
		err = exchange(stream, "")
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if got, want := i.Stats(), (grpclimit.Stats{Unlimited: 2}); err != nil || got != want {
		t.Errorf("%v, %+v, want %+v", err, got, want)
	}
}

func TestSkip(t *testing.T) {
	i := interceptor(t, hourly(t, 0), grpclimit.Everyone(),
		grpclimit.WithSkipMethods("/test.Echo/Chat", "/grpc.health.v1.Health/*"),
		grpclimit.WithSkip(func(_ context.Context, c grpclimit.Call) bool { return strings.HasSuffix(c.FullMethod, "/List") }),
		grpclimit.WithSkip(func(context.Context, grpclimit.Call) bool { return false }),
		grpclimit.WithStreams(grpclimit.Opening|grpclimit.Received|grpclimit.Sent))
	conn := limited(t, &echo{}, i)
	_, err := call(t.Context(), conn, "")
	wantCode(t, err, codes.ResourceExhausted)
	for _, method := range []string{chat, list} {
		stream, err := open(t.Context(), conn, method)
		if err == nil {
			err = exchange(stream, "")
		}
		if err != nil {
			t.Errorf("%s: %v", method, err)
		}
		stream.CloseSend()
	}
	stream, err := open(t.Context(), conn, collect)
	if err == nil {
		err = exchange(stream, "")
	}
	wantCode(t, err, codes.ResourceExhausted)
	if got, want := i.Stats(), (grpclimit.Stats{Unlimited: 2, Denied: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A pattern that no method of the server fits is named.
func TestCheckServer(t *testing.T) {
	l := hourly(t, 1)
	s := grpc.NewServer()
	e := &echo{}
	s.RegisterService(e.desc(), e)
	for _, tc := range []struct {
		limits grpclimit.Limits
		skip   string
		want   []string
	}{
		{grpclimit.Limits{"*": l, "/test.Echo/*": l, say: l, chat: l}, list, nil},
		{grpclimit.Limits{"/test.Echo/say": l, "/test.Ech/*": l, "/Echo/Say": l, say: l}, "/grpc.health.v1.Health/*", []string{`"/Echo/Say"`, `"/grpc.health.v1.Health/*"`, `"/test.Ech/*"`, `"/test.Echo/say"`}},
	} {
		i, err := grpclimit.New(tc.limits, grpclimit.Everyone(), grpclimit.WithSkipMethods(tc.skip))
		if err != nil {
			t.Fatal(err)
		}
		err = i.CheckServer(s)
		if len(tc.want) == 0 {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		lines := strings.Split(fmt.Sprint(err), "\n")
		if len(lines) != len(tc.want) || !errors.Is(err, tierlimit.ErrConfig) {
			t.Fatalf("got %v, want %q", err, tc.want)
		}
		for n, want := range tc.want {
			if !strings.Contains(lines[n], want) {
				t.Errorf("fault %d is %q, want %s", n, lines[n], want)
			}
		}
	}
	i := interceptor(t, l, grpclimit.Everyone(), grpclimit.WithSkipMethods(say))
	for _, err := range []error{i.CheckServer(nil), i.CheckServer((*grpc.Server)(nil))} {
		if !errors.Is(err, tierlimit.ErrConfig) {
			t.Errorf("a nil server: %v", err)
		}
	}
}

func TestMissingKeys(t *testing.T) {
	for _, tc := range []struct {
		policy grpclimit.MissingKey
		passed int
		stats  grpclimit.Stats
	}{
		{grpclimit.MissingDeny, 0, grpclimit.Stats{Allowed: 2, Denied: 3, MissingKeys: 3}},
		{grpclimit.MissingCommon, 1, grpclimit.Stats{Allowed: 3, Denied: 2, MissingKeys: 3}},
		{grpclimit.MissingAllow, 3, grpclimit.Stats{Allowed: 2, Unlimited: 3, MissingKeys: 3}},
	} {
		i := interceptor(t, hourly(t, 1), grpclimit.Metadata("X-Api-Key"), grpclimit.WithMissingKey(tc.policy))
		conn := limited(t, &echo{}, i)
		for _, key := range []string{"a", "b"} {
			if _, err := call(t.Context(), conn, "", "x-api-key", key); err != nil {
				t.Errorf("policy %v: %v", tc.policy, err)
			}
		}
		passed := 0
		for _, pairs := range [][]string{nil, {"x-api-key", ""}, {"x-api-key", "a", "x-api-key", "c"}} {
			_, err := call(t.Context(), conn, "", pairs...)
			switch {
			case err == nil:
				passed++
			case status.Code(err) != codes.ResourceExhausted:
				t.Errorf("policy %v: %v", tc.policy, err)
			}
		}
		if got := i.Stats(); passed != tc.passed || got != tc.stats {
			t.Errorf("policy %v: %d without a key passed, want %d; %+v, want %+v", tc.policy, passed, tc.passed, got, tc.stats)
		}
	}
}

func TestCost(t *testing.T) {
	i := interceptor(t, hourly(t, 10), grpclimit.Everyone(), grpclimit.WithCost(func(_ context.Context, c grpclimit.Call) int64 {
		return int64(len(c.Message.(*wrapperspb.StringValue).Value))
	}))
	conn := limited(t, &echo{}, i)
	for _, tc := range []struct {
		text string
		want codes.Code
	}{
		{"1234567", codes.OK},
		{"1234", codes.ResourceExhausted}, // 3 are left, and stay
		{"123", codes.OK},
		{"1", codes.ResourceExhausted},
		{"", codes.OK}, // costs nothing, and passes though nothing is left
	} {
		_, err := call(t.Context(), conn, tc.text)
		if status.Code(err) != tc.want {
			t.Errorf("cost %d: got %v, want %v", len(tc.text), err, tc.want)
		}
	}
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 2, Denied: 2, Unlimited: 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// However many call at once over however many connections, as many pass as the limit says.
func TestManyAtOnce(t *testing.T) {
	i := interceptor(t, hourly(t, 100), grpclimit.ClientIP())
	e := &echo{}
	var passed, denied atomic.Int64
	conns := []*grpc.ClientConn{limited(t, e, i), limited(t, e, i), limited(t, e, i)}
	var wg sync.WaitGroup
	for n := range 48 {
		wg.Go(func() {
			for range 10 {
				switch _, err := call(t.Context(), conns[n%len(conns)], ""); status.Code(err) {
				case codes.OK:
					passed.Add(1)
				case codes.ResourceExhausted:
					denied.Add(1)
				default:
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if passed.Load() != 100 || denied.Load() != 380 || e.called.Load() != 100 {
		t.Errorf("%d passed, %d were denied, %d handlers ran; want 100, 380, 100", passed.Load(), denied.Load(), e.called.Load())
	}
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 100, Denied: 380}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A key of no bytes is none, and so shares nothing with the common key.
func TestEmptyKey(t *testing.T) {
	i := interceptor(t, hourly(t, 1), grpclimit.KeyFunc(func(context.Context, grpclimit.Call) (string, bool) { return "", true }))
	_, err := call(t.Context(), limited(t, &echo{}, i), "")
	wantCode(t, err, codes.ResourceExhausted)
	if got, want := i.Stats(), (grpclimit.Stats{Denied: 1, MissingKeys: 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := fmt.Sprint(grpclimit.MissingDeny, grpclimit.MissingCommon, grpclimit.MissingAllow, grpclimit.MissingKey(9)); got != "deny common allow MissingKey(9)" {
		t.Error(got)
	}
}
