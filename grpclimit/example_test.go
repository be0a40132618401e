package grpclimit_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

// api is a limiter without Redis; tierlimit.New(rdb) makes one for a fleet.
func api(limit tierlimit.Limit) *tierlimit.Limiter {
	h, err := tierlimit.NewLocal()
	if err != nil {
		panic(err)
	}
	l, err := h.Limiter("api", limit)
	if err != nil {
		panic(err)
	}
	return l
}

// try runs a unary call through i and says how it ended.
func try(ctx context.Context, i *grpclimit.Interceptor, method string, req any) codes.Code {
	handler := func(context.Context, any) (any, error) { return nil, nil }
	_, err := i.UnaryServerInterceptor()(ctx, req, &grpc.UnaryServerInfo{FullMethod: method}, handler)
	return status.Code(err)
}

func must(i *grpclimit.Interceptor, err error) *grpclimit.Interceptor {
	if err != nil {
		panic(err)
	}
	return i
}

// A server that limits each caller by address, and one method more tightly.
func Example() {
	h, err := tierlimit.NewLocal() // one process; tierlimit.New(rdb) for a fleet
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(context.Background())
	all, err1 := h.Limiter("all", tierlimit.TokenBucket(1000, time.Second))
	login, err2 := h.Limiter("login", tierlimit.SlidingLog(2, time.Hour))
	limits, err3 := grpclimit.New(grpclimit.Limits{
		"/test.Echo/Say": login,
		"*":              all,
	}, grpclimit.ClientIP())
	if err := errors.Join(err1, err2, err3); err != nil {
		fmt.Println(err)
		return
	}
	server := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(limits.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(limits.StreamServerInterceptor()),
	}

	conn, stop, err := start(&echo{}, server) // grpc.NewServer(server...) and a client of it
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	for range 3 {
		err = conn.Invoke(context.Background(), "/test.Echo/Say", wrapperspb.String("hello"), new(wrapperspb.StringValue))
		fmt.Println(status.Code(err))
	}
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.RetryInfo:
			fmt.Println("come again in", d.RetryDelay.AsDuration().Round(time.Minute))
		case *errdetails.QuotaFailure:
			fmt.Println(d.Violations[0].Subject+":", d.Violations[0].Description)
		}
	}
	// Output:
	// OK
	// OK
	// ResourceExhausted
	// come again in 1h0m0s
	// limiter:login: rate limit "login" exceeded
}

func ExampleNew() {
	_, err := grpclimit.New(grpclimit.Limits{"/pkg.Service": nil}, grpclimit.Metadata("x api key"), grpclimit.WithMissingKey(0))
	fmt.Println(errors.Is(err, tierlimit.ErrConfig))
	fmt.Println(err)
	// Output:
	// true
	// tierlimit: invalid configuration: grpclimit: the Limiter of "/pkg.Service" is nil
	// tierlimit: invalid configuration: grpclimit: metadata cannot have the name "x api key"
	// tierlimit: invalid configuration: grpclimit: unknown MissingKey 0
}

func ExampleLimits() {
	h, err := tierlimit.NewLocal()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(context.Background())
	l := func(name string) *tierlimit.Limiter {
		l, err := h.Limiter(name, tierlimit.TokenBucket(0, time.Second)) // denies all, so that the name shows
		if err != nil {
			panic(err)
		}
		return l
	}
	i := must(grpclimit.New(grpclimit.Limits{
		"/shop.Orders/Create": l("create"),
		"/shop.Orders/*":      l("orders"),
		"*":                   l("rest"),
	}, grpclimit.Everyone()))
	for _, method := range []string{"/shop.Orders/Create", "/shop.Orders/List", "/shop.Stock/List"} {
		_, err := i.UnaryServerInterceptor()(context.Background(), nil, &grpc.UnaryServerInfo{FullMethod: method}, nil)
		fmt.Println(err)
	}
	// Output:
	// rpc error: code = ResourceExhausted desc = rate limit "create" exceeded
	// rpc error: code = ResourceExhausted desc = rate limit "orders" exceeded
	// rpc error: code = ResourceExhausted desc = rate limit "rest" exceeded
}

// A client that paces itself instead of being denied by its server.
func ExampleInterceptor_UnaryClientInterceptor() {
	all := api(tierlimit.TokenBucket(50, time.Second).WithBurst(1))
	i, err := grpclimit.New(grpclimit.Limits{"*": all}, grpclimit.Target(), grpclimit.WithWait(grpclimit.Opening))
	if err != nil {
		fmt.Println(err)
		return
	}
	conn, stop, err := start(&echo{}, nil,
		grpc.WithChainUnaryInterceptor(i.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(i.StreamClientInterceptor()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	begin := time.Now()
	for range 6 {
		if _, err := call(context.Background(), conn, "hello"); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println(i.Stats().Allowed, time.Since(begin) >= 100*time.Millisecond)
	// Output: 6 true
}

// A client that may open one stream. The error is of this process, and says so.
func ExampleInterceptor_StreamClientInterceptor() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.Method()))
	conn, stop, err := start(&echo{}, nil, grpc.WithStreamInterceptor(i.StreamClientInterceptor()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	for range 2 {
		_, err := open(context.Background(), conn, "/test.Echo/Chat")
		fmt.Println(status.Code(err), errors.Is(err, grpclimit.ErrDenied))
	}
	// Output:
	// OK false
	// ResourceExhausted true
}

func ExampleInterceptor_UnaryServerInterceptor() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.ClientIP()))
	conn, stop, err := start(&echo{}, []grpc.ServerOption{grpc.ChainUnaryInterceptor(i.UnaryServerInterceptor())})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	for range 2 {
		_, err := call(context.Background(), conn, "hello")
		fmt.Println(err)
	}
	// Output:
	// <nil>
	// rpc error: code = ResourceExhausted desc = rate limit "api" exceeded
}

// A server that counts the messages of a stream, not its opening.
func ExampleInterceptor_StreamServerInterceptor() {
	all := api(tierlimit.TokenBucket(2, time.Hour))
	i, err := grpclimit.New(grpclimit.Limits{"*": all}, grpclimit.ClientIP(), grpclimit.WithStreams(grpclimit.Received))
	if err != nil {
		fmt.Println(err)
		return
	}
	conn, stop, err := start(&echo{}, []grpc.ServerOption{grpc.ChainStreamInterceptor(i.StreamServerInterceptor())})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	stream, err := open(context.Background(), conn, "/test.Echo/Chat")
	for err == nil {
		if err = exchange(stream, "hello"); err == nil {
			fmt.Println("a message came back")
		}
	}
	fmt.Println(status.Code(err))
	// Output:
	// a message came back
	// a message came back
	// ResourceExhausted
}

// A name misspelt is a method not limited.
func ExampleInterceptor_CheckServer() {
	i := must(grpclimit.New(grpclimit.Limits{"/test.Ecko/*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.ClientIP()))
	s := grpc.NewServer()
	e := &echo{}
	s.RegisterService(e.desc(), e)
	if err := i.CheckServer(s); err != nil {
		fmt.Println(err)
	}
	// Output: tierlimit: invalid configuration: grpclimit: the server has no method that "/test.Ecko/*" fits
}

func ExampleInterceptor_Stats() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.Metadata("x-api-key")))
	for _, key := range []string{"a", "a", "b", ""} {
		ctx := metadata.NewIncomingContext(context.Background(), metadata.Pairs("x-api-key", key))
		try(ctx, i, "/test.Echo/Say", nil)
	}
	fmt.Printf("%+v\n", i.Stats())
	// Output: {Allowed:2 Denied:2 Unlimited:0 Errors:0 MissingKeys:1 Refunded:0 RefundsLost:0}
}

// Work that turned out to be none costs nothing.
func ExampleRefund() {
	l := api(tierlimit.TokenBucket(10, time.Hour))
	i := must(grpclimit.New(grpclimit.Limits{"*": l}, grpclimit.Everyone()))
	handler := func(ctx context.Context, _ any) (any, error) { return "from the cache", grpclimit.Refund(ctx) }
	resp, err := i.UnaryServerInterceptor()(context.Background(), nil, &grpc.UnaryServerInfo{FullMethod: "/test.Echo/Say"}, handler)
	fmt.Println(resp, err, i.Stats().Refunded)
	// Output: from the cache <nil> 1
}

func ExampleWithRefundOn() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.Everyone(),
		grpclimit.WithRefundOn(codes.Unavailable, codes.Internal)))
	down := func(context.Context, any) (any, error) {
		return nil, status.Error(codes.Unavailable, "the database is down")
	}
	for range 3 {
		_, err := i.UnaryServerInterceptor()(context.Background(), nil, &grpc.UnaryServerInfo{FullMethod: "/test.Echo/Say"}, down)
		fmt.Println(status.Code(err))
	}
	// Output:
	// Unavailable
	// Unavailable
	// Unavailable
}

func ExampleWithCost() {
	l := api(tierlimit.TokenBucket(100, time.Hour))
	i := must(grpclimit.New(grpclimit.Limits{"*": l}, grpclimit.Everyone(),
		grpclimit.WithCost(func(_ context.Context, c grpclimit.Call) int64 {
			switch m := c.Message.(type) {
			case *wrapperspb.StringValue:
				return 1 + int64(len(m.Value))/10 // a token, and one more for each ten bytes
			default:
				return 1
			}
		})))
	try(context.Background(), i, "/test.Echo/Say", wrapperspb.String("a text of 25 bytes length"))
	fmt.Println(l.Stats().Local, "tokens")
	// Output: 3 tokens
}

// Health checks and reflection are counted unless they are named here.
func ExampleWithSkipMethods() {
	all := api(tierlimit.TokenBucket(1, time.Hour))
	i, err := grpclimit.New(grpclimit.Limits{"*": all}, grpclimit.ClientIP(),
		grpclimit.WithSkipMethods("/grpc.health.v1.Health/*", "/grpc.reflection.v1.ServerReflection/*"))
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := from(tcp("192.0.2.1:4711"), nil)
	for range 2 {
		fmt.Println(try(ctx, i, "/grpc.health.v1.Health/Check", nil), try(ctx, i, "/test.Echo/Say", nil))
	}
	// Output:
	// OK OK
	// OK ResourceExhausted
}

func ExampleWithSkip() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(0, time.Second))}, grpclimit.Everyone(),
		grpclimit.WithSkip(func(ctx context.Context, _ grpclimit.Call) bool { return ctx.Value(staff{}) != nil })))
	fmt.Println(try(context.WithValue(context.Background(), staff{}, true), i, "/test.Echo/Say", nil))
	// Output: OK
}

type staff struct{}

func ExampleWithMissingKey() {
	for _, m := range []grpclimit.MissingKey{grpclimit.MissingDeny, grpclimit.MissingCommon, grpclimit.MissingAllow} {
		i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.Metadata("x-api-key"), grpclimit.WithMissingKey(m)))
		fmt.Println(m, try(context.Background(), i, "/test.Echo/Say", nil), try(context.Background(), i, "/test.Echo/Say", nil))
	}
	// Output:
	// deny ResourceExhausted ResourceExhausted
	// common OK ResourceExhausted
	// allow OK OK
}

// A stream that is read no faster than its limit allows.
func ExampleWithWait() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(50, time.Second).WithBurst(1))}, grpclimit.ClientIP(),
		grpclimit.WithStreams(grpclimit.Received), grpclimit.WithWait(grpclimit.Received)))
	conn, stop, err := start(&echo{}, []grpc.ServerOption{grpc.StreamInterceptor(i.StreamServerInterceptor())})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	stream, err := open(context.Background(), conn, "/test.Echo/Chat")
	begin := time.Now()
	for range 6 {
		if err == nil {
			err = exchange(stream, "hello")
		}
	}
	fmt.Println(err, time.Since(begin) >= 100*time.Millisecond)
	// Output: <nil> true
}

func ExampleWithStreams() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(5, time.Hour))}, grpclimit.ClientIP(),
		grpclimit.WithStreams(grpclimit.Opening|grpclimit.Received|grpclimit.Sent)))
	conn, stop, err := start(&echo{}, []grpc.ServerOption{grpc.StreamInterceptor(i.StreamServerInterceptor())})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	stream, err := open(context.Background(), conn, "/test.Echo/Chat")
	for range 3 { // the opening, and two tokens for each message and its echo
		if err == nil {
			err = exchange(stream, "hello")
		}
		fmt.Println(status.Code(err))
	}
	// Output:
	// OK
	// OK
	// ResourceExhausted
}

func ExampleWithHeaders() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(60, time.Minute))}, grpclimit.ClientIP(), grpclimit.WithHeaders()))
	conn, stop, err := start(&echo{}, []grpc.ServerOption{grpc.UnaryInterceptor(i.UnaryServerInterceptor())})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	var header metadata.MD
	err = conn.Invoke(context.Background(), "/test.Echo/Say", wrapperspb.String("hello"), new(wrapperspb.StringValue), grpc.Header(&header))
	fmt.Println(err, header.Get("ratelimit-policy"), header.Get("ratelimit"))
	// Output: <nil> ["api";q=60;w=60] ["api";r=59;t=1]
}

// A client's own retries wait for as long as the server's limit needs.
func ExampleWithPushback() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(20, time.Second).WithBurst(1))}, grpclimit.ClientIP(), grpclimit.WithPushback()))
	conn, stop, err := start(&echo{}, []grpc.ServerOption{grpc.UnaryInterceptor(i.UnaryServerInterceptor())},
		grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
			"maxAttempts": 3, "initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1,
			"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	for range 2 {
		_, err := call(context.Background(), conn, "hello")
		fmt.Println(err)
	}
	// Output:
	// <nil>
	// <nil>
}

// The account of who has one, else the address; each method apart.
func ExampleJoin() {
	key := grpclimit.Join(grpclimit.Method(), grpclimit.First(grpclimit.Metadata("x-account"), grpclimit.ClientIP()))
	anonymous := from(tcp("192.0.2.1:4711"), nil)
	known := from(tcp("192.0.2.1:4711"), nil, "x-account", "17")
	for _, ctx := range []context.Context{anonymous, known} {
		fmt.Println(key.Of(ctx, grpclimit.Call{FullMethod: "/test.Echo/Say"}))
	}
	// Output:
	// 14:/test.Echo/Say11:1:192.0.2.1 true
	// 14:/test.Echo/Say4:0:17 true
}

func ExampleFirst() {
	key := grpclimit.First(grpclimit.Auth(), grpclimit.ClientIP())
	fmt.Println(key.Of(from(tcp("192.0.2.1:4711"), nil), grpclimit.Call{}))
	// Output: 1:192.0.2.1 true
}

func ExampleEveryone() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.Everyone()))
	fmt.Println(try(context.Background(), i, "/test.Echo/Say", nil), try(context.Background(), i, "/test.Echo/Other", nil))
	// Output: OK ResourceExhausted
}

func ExampleMethod() {
	i := must(grpclimit.New(grpclimit.Limits{"*": api(tierlimit.TokenBucket(1, time.Hour))}, grpclimit.Method()))
	fmt.Println(try(context.Background(), i, "/test.Echo/Say", nil), try(context.Background(), i, "/test.Echo/Other", nil))
	// Output: OK OK
}

func ExampleTarget() {
	fmt.Println(grpclimit.Target().Of(context.Background(), grpclimit.Call{Client: true, Target: "dns:///db:443"}))
	// Output: dns:///db:443 true
}

func ExampleMetadata() {
	ctx := metadata.NewIncomingContext(context.Background(), metadata.Pairs("x-api-key", "17"))
	fmt.Println(grpclimit.Metadata("X-API-Key").Of(ctx, grpclimit.Call{}))
	// Output: 17 true
}

func ExampleClientIP() {
	for _, address := range []string{"192.0.2.1:4711", "[::ffff:192.0.2.1]:4712", "[64:ff9b::192.0.2.1]:4713", "[2001:db8:0:1:2:3:4:5]:4711"} {
		key, ok := grpclimit.ClientIP().Of(from(tcp(address), nil), grpclimit.Call{})
		fmt.Println(key, ok)
	}
	// Output:
	// 192.0.2.1 true
	// 192.0.2.1 true
	// 192.0.2.1 true
	// 2001:db8:0:1::/64 true
}

func ExampleNAT64() {
	key := grpclimit.ClientIP(grpclimit.NAT64("2001:db8:64::/96"))
	fmt.Println(key.Of(from(tcp("[2001:db8:64::192.0.2.1]:4711"), nil), grpclimit.Call{}))
	// Output: 192.0.2.1 true
}

func ExampleIPv6Prefix() {
	key := grpclimit.ClientIP(grpclimit.IPv6Prefix(48))
	for _, address := range []string{"192.0.2.1:4711", "[2001:db8:0:1:2:3:4:5]:4711"} {
		fmt.Println(key.Of(from(tcp(address), nil), grpclimit.Call{}))
	}
	// Output:
	// 192.0.2.1 true
	// 2001:db8::/48 true
}

// Envoy, say, on 10.0.0.7: what it saw stands on the right, what the caller claims on the left.
func ExampleTrustedProxies() {
	key := grpclimit.ClientIP(grpclimit.TrustedProxies("10.0.0.0/8"))
	fmt.Println(key.Of(from(tcp("10.0.0.7:4711"), nil, "x-forwarded-for", "203.0.113.1, 192.0.2.1"), grpclimit.Call{}))
	fmt.Println(key.Of(from(tcp("198.51.100.1:4711"), nil, "x-forwarded-for", "203.0.113.1"), grpclimit.Call{}))
	// Output:
	// 192.0.2.1 true
	// 198.51.100.1 true
}

func ExampleAuth() {
	id := &url.URL{Scheme: "spiffe", Host: "example.org", Path: "/billing"}
	ctx := from(tcp("192.0.2.1:4711"), verified(&x509.Certificate{URIs: []*url.URL{id}})) // as grpc sets it after mutual TLS
	fmt.Println(grpclimit.Auth().Of(ctx, grpclimit.Call{}))
	// Output: spiffe://example.org/billing true
}

// Certificates that TLS itself does not verify, since a VerifyPeerCertificate does.
func ExampleAuthFunc() {
	key := grpclimit.AuthFunc(func(info credentials.AuthInfo) (string, bool) {
		t, ok := info.(credentials.TLSInfo)
		if !ok || len(t.State.PeerCertificates) == 0 {
			return "", false
		}
		return grpclimit.CertificateIdentity(t.State.PeerCertificates[0])
	})
	id := &url.URL{Scheme: "spiffe", Host: "example.org", Path: "/billing"}
	info := credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{{URIs: []*url.URL{id}}}}}
	fmt.Println(key.Of(from(tcp("192.0.2.1:4711"), info), grpclimit.Call{}))
	// Output: spiffe://example.org/billing true
}

func ExampleCertificateIdentity() {
	fmt.Println(grpclimit.CertificateIdentity(&x509.Certificate{DNSNames: []string{"billing.example.org"}}))
	// Output: dns:billing.example.org true
}

// Another key for one method: the account in the request.
func ExampleKeyFunc() {
	address := grpclimit.ClientIP()
	key := grpclimit.KeyFunc(func(ctx context.Context, c grpclimit.Call) (string, bool) {
		if m, ok := c.Message.(*wrapperspb.StringValue); ok && c.FullMethod == "/test.Echo/Say" {
			return m.Value, true
		}
		return address.Of(ctx, c)
	})
	ctx := from(tcp("192.0.2.1:4711"), nil)
	fmt.Println(key.Of(ctx, grpclimit.Call{FullMethod: "/test.Echo/Say", Message: wrapperspb.String("account 17")}))
	fmt.Println(key.Of(ctx, grpclimit.Call{FullMethod: "/test.Echo/Chat"}))
	// Output:
	// account 17 true
	// 192.0.2.1 true
}
