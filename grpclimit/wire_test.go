package grpclimit_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"math/big"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

// said is what header and trailer have under a name, "" for nothing.
func said(name string, of ...metadata.MD) string {
	return strings.Join(metadata.Join(of...).Get(name), ", ")
}

// transport is where SetHeader leaves what it is given.
type transport struct {
	grpc.ServerTransportStream
	header metadata.MD
}

func (s *transport) SetHeader(md metadata.MD) error {
	s.header = metadata.Join(s.header, md)
	return nil
}

// The cases that httplimit has too: both say the same of a limit.
func TestSharedHeaders(t *testing.T) {
	table, err := os.ReadFile("../httplimit/testdata/headers.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Limit, Sleep, Policy, State string
		Before                            int
		Cost                              int64
	}
	if err := json.Unmarshal(table, &cases); err != nil || len(cases) < 15 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, tc := range cases {
		synctest.Test(t, func(t *testing.T) {
			limit, err1 := tierlimit.ParseLimit(tc.Limit)
			sleep, err2 := time.ParseDuration(tc.Sleep)
			if err := errors.Join(err1, err2); err != nil {
				t.Fatal(err)
			}
			i := interceptor(t, limiter(t, "api", limit), grpclimit.Everyone(), grpclimit.WithHeaders(),
				grpclimit.WithCost(func(context.Context, grpclimit.Call) int64 { return tc.Cost }))
			ask := func() metadata.MD {
				s := new(transport)
				ctx := grpc.NewContextWithServerTransportStream(t.Context(), s)
				_, _ = i.UnaryServerInterceptor()(ctx, nil, &grpc.UnaryServerInfo{FullMethod: say}, nothing)
				return s.header
			}
			for range tc.Before {
				ask()
			}
			time.Sleep(sleep)
			if header := ask(); said("ratelimit-policy", header) != tc.Policy || said("ratelimit", header) != tc.State {
				t.Errorf("%s: got %v, want %s and %s", tc.Name, header, tc.Policy, tc.State)
			}
		})
	}
}

// On the wire, for unary calls and streams, allowed and denied; of two interceptors each tells its own.
func TestHeaders(t *testing.T) {
	strict := func(t *testing.T, opts ...grpclimit.Option) *grpclimit.Interceptor {
		return interceptor(t, limiter(t, "strict", tierlimit.FixedWindow(1, 24*365*time.Hour)), grpclimit.Everyone(), opts...)
	}
	const policy = `"api";q=2;w=7200, "strict";q=1;w=31536000`
	for _, kind := range []string{"unary", "stream", "off"} {
		a := interceptor(t, limiter(t, "api", tierlimit.TokenBucket(1, time.Hour).WithBurst(2)), grpclimit.Everyone(), grpclimit.WithHeaders())
		b := strict(t, grpclimit.WithHeaders())
		want := []string{`"api";r=1;t=3600, "strict";r=0;t=`, `"api";r=0;t=3600, "strict";r=0;t=`, `"api";r=0;t=3`}
		if kind == "off" {
			a, b = interceptor(t, hourly(t, 2), grpclimit.Everyone()), strict(t)
			want = []string{"", "", ""}
		}
		conn := serve(t, &echo{}, []grpc.ServerOption{
			grpc.ChainUnaryInterceptor(a.UnaryServerInterceptor(), b.UnaryServerInterceptor()),
			grpc.ChainStreamInterceptor(a.StreamServerInterceptor(), b.StreamServerInterceptor()),
		})
		for n, state := range want {
			var header metadata.MD
			if kind == "stream" {
				stream, err := open(t.Context(), conn, chat)
				if err != nil {
					t.Fatal(err)
				}
				_ = exchange(stream, "")
				stream.CloseSend()
				_ = stream.RecvMsg(new(wrapperspb.StringValue))
				header, _ = stream.Header()
			} else {
				_ = conn.Invoke(t.Context(), say, wrapperspb.String(""), new(wrapperspb.StringValue), grpc.Header(&header))
			}
			of := policy
			if n == 2 {
				of = `"api";q=2;w=7200`
			}
			if kind == "off" {
				of = ""
			}
			if got := said("ratelimit", header); said("ratelimit-policy", header) != of || !strings.HasPrefix(got, state) || kind == "off" && got != "" {
				t.Errorf("%s %d: got %v, want %s and %s", kind, n, header, of, state)
			}
		}
	}
}

func TestPushback(t *testing.T) {
	for _, tc := range []struct {
		name string
		l    *tierlimit.Limiter
		ok   func(ms int) bool
	}{
		{"half an hour", hourly(t, 2), func(ms int) bool { return ms > 1_790_000 && ms <= 1_800_000 }},
		{"for good", hourly(t, 0), func(ms int) bool { return ms == -1 }},
	} {
		i := interceptor(t, tc.l, grpclimit.Everyone(), grpclimit.WithPushback(), grpclimit.WithStreams(grpclimit.Received))
		conn := limited(t, &echo{}, i)
		for range 2 {
			_, _ = call(t.Context(), conn, "")
		}
		var trailer metadata.MD
		err := conn.Invoke(t.Context(), say, wrapperspb.String(""), new(wrapperspb.StringValue), grpc.Trailer(&trailer))
		wantCode(t, err, codes.ResourceExhausted)
		stream, err := open(t.Context(), conn, chat)
		if err != nil {
			t.Fatal(err)
		}
		wantCode(t, exchange(stream, ""), codes.ResourceExhausted)
		for kind, md := range map[string]metadata.MD{"unary": trailer, "message": stream.Trailer()} {
			got := said("grpc-retry-pushback-ms", md)
			if ms, err := strconv.Atoi(got); err != nil || !tc.ok(ms) {
				t.Errorf("%s, %s: the pushback is %q", tc.name, kind, got)
			}
		}
	}
}

// The retries that are built into gRPC wait as long as they are told, and give up when they are told that.
func TestPushbackSteersRetries(t *testing.T) {
	const retry = `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":3,"initialBackoff":"0.001s","maxBackoff":"0.001s","backoffMultiplier":1,"retryableStatusCodes":["RESOURCE_EXHAUSTED"]}}]}`
	i := interceptor(t, limiter(t, "api", tierlimit.TokenBucket(10, time.Second).WithBurst(1)), grpclimit.Everyone(), grpclimit.WithPushback())
	conn := serve(t, &echo{}, serverOptions(i), grpc.WithDefaultServiceConfig(retry))
	for range 3 {
		if _, err := call(t.Context(), conn, ""); err != nil {
			t.Errorf("a retry that waited as it was told failed: %v", err)
		}
	}
	never := interceptor(t, hourly(t, 0), grpclimit.Everyone(), grpclimit.WithPushback())
	conn = serve(t, &echo{}, serverOptions(never), grpc.WithDefaultServiceConfig(retry))
	_, err := call(t.Context(), conn, "")
	wantCode(t, err, codes.ResourceExhausted)
	if n := never.Stats().Denied; n != 1 {
		t.Errorf("a call that can never pass was tried %d times, want 1", n)
	}
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{key: newKey(t)}
	a.cert = sign(t, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, a.key, a.key)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t *testing.T, template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func (a *authority) issue(t *testing.T, template x509.Certificate) tls.Certificate {
	t.Helper()
	key := newKey(t)
	return tls.Certificate{Certificate: [][]byte{sign(t, &template, a.cert, key, a.key).Raw}, PrivateKey: key}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// Over real TLS: each identity has its count, whatever connection it comes over; one that nobody verified has none.
func TestAuthOverTLS(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	client := func(a *authority, id string) tls.Certificate {
		return a.issue(t, x509.Certificate{URIs: uris(id), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	}
	server := ours.issue(t, x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	ask := func(i *grpclimit.Interceptor, auth tls.ClientAuthType, certs ...tls.Certificate) codes.Code {
		opts := append(serverOptions(i), grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: ours.pool(), ClientAuth: auth, MinVersion: tls.VersionTLS13})))
		creds := credentials.NewTLS(&tls.Config{Certificates: certs, RootCAs: ours.pool(), MinVersion: tls.VersionTLS13})
		conn, stop, err := start(&echo{}, opts, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		_, err = call(t.Context(), conn, "")
		return status.Code(err)
	}
	i := interceptor(t, hourly(t, 1), grpclimit.Auth())
	a, b := client(ours, "spiffe://example.org/a"), client(ours, "spiffe://example.org/b")
	for n, step := range []struct {
		auth  tls.ClientAuthType
		certs []tls.Certificate
		want  codes.Code
	}{
		{tls.RequireAndVerifyClientCert, []tls.Certificate{a}, codes.OK},
		{tls.RequireAndVerifyClientCert, []tls.Certificate{client(ours, "spiffe://example.org/a")}, codes.ResourceExhausted},
		{tls.RequireAndVerifyClientCert, []tls.Certificate{b}, codes.OK},
		{tls.VerifyClientCertIfGiven, nil, codes.ResourceExhausted},
		{tls.RequireAnyClientCert, []tls.Certificate{client(theirs, "spiffe://example.org/c")}, codes.ResourceExhausted},
	} {
		if got := ask(i, step.auth, step.certs...); got != step.want {
			t.Errorf("step %d: %v, want %v", n, got, step.want)
		}
	}
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 2, Denied: 3, MissingKeys: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A client counts by where it calls.
func TestTargetOverTCP(t *testing.T) {
	i := interceptor(t, hourly(t, 1), grpclimit.Target())
	for range 2 {
		conn := serve(t, &echo{}, nil, dialOptions(i)...)
		for _, want := range []codes.Code{codes.OK, codes.ResourceExhausted} {
			if _, err := call(t.Context(), conn, ""); status.Code(err) != want {
				t.Errorf("got %v, want %v", err, want)
			}
		}
	}
}

// What an earlier interceptor knows of the caller is a key, and the request is, too.
func TestKeyFromTheContextAndTheRequest(t *testing.T) {
	type user struct{}
	authenticate := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		return handler(context.WithValue(ctx, user{}, md.Get("token")[0]), req)
	}
	byUser := grpclimit.KeyFunc(func(ctx context.Context, _ grpclimit.Call) (string, bool) {
		id, ok := ctx.Value(user{}).(string)
		return id, ok
	})
	byText := grpclimit.KeyFunc(func(_ context.Context, c grpclimit.Call) (string, bool) {
		m, ok := c.Message.(*wrapperspb.StringValue)
		return m.GetValue(), ok
	})
	i := interceptor(t, hourly(t, 1), grpclimit.Join(byUser, byText))
	conn := serve(t, &echo{}, []grpc.ServerOption{grpc.ChainUnaryInterceptor(authenticate, i.UnaryServerInterceptor())})
	for n, step := range []struct {
		token, text string
		want        codes.Code
	}{
		{"a", "x", codes.OK},
		{"a", "x", codes.ResourceExhausted},
		{"b", "x", codes.OK},
		{"a", "y", codes.OK},
		{"a1:x", "z", codes.OK}, // not what a and x join to
	} {
		if _, err := call(t.Context(), conn, step.text, "token", step.token); status.Code(err) != step.want {
			t.Errorf("step %d: got %v, want %v", n, err, step.want)
		}
	}
	messages := interceptor(t, hourly(t, 1), byText, grpclimit.WithStreams(grpclimit.Received))
	stream, err := open(t.Context(), limited(t, &echo{}, messages), chat)
	if err != nil {
		t.Fatal(err)
	}
	for n, step := range []struct {
		text string
		want codes.Code
	}{{"x", codes.OK}, {"y", codes.OK}, {"x", codes.ResourceExhausted}} {
		if err := exchange(stream, step.text); status.Code(err) != step.want {
			t.Errorf("message %d: got %v, want %v", n, err, step.want)
		}
	}
}
