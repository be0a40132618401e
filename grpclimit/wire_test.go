package grpclimit_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"strconv"
	"testing"
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

var ratelimit = []string{"ratelimit-limit", "ratelimit-remaining", "ratelimit-reset", "grpc-retry-pushback-ms"}

// said is what header and trailer have of ratelimit, an absent one as "".
func said(header, trailer metadata.MD) (out [4]string) {
	for n, name := range ratelimit {
		if v := metadata.Join(header, trailer).Get(name); len(v) > 0 {
			out[n] = v[0]
		}
	}
	return out
}

func TestHeaders(t *testing.T) {
	l := func() *tierlimit.Limiter { return limiter(t, "api", tierlimit.TokenBucket(2, time.Hour)) }
	for _, tc := range []struct {
		name string
		i    *grpclimit.Interceptor
		want [3][4]string
	}{
		{"off", interceptor(t, l(), grpclimit.Everyone()), [3][4]string{}},
		{"on", interceptor(t, l(), grpclimit.Everyone(), grpclimit.WithHeaders()), [3][4]string{{"2", "1", "1800", ""}, {"2", "0", "3600", ""}, {"2", "0", "3600", ""}}},
		{"unlimited", interceptor(t, limiter(t, "api", tierlimit.Unlimited()), grpclimit.Everyone(), grpclimit.WithHeaders()), [3][4]string{}},
		{"blocked", interceptor(t, hourly(t, 0), grpclimit.Everyone(), grpclimit.WithHeaders()), [3][4]string{{"0", "0", "0", ""}, {"0", "0", "0", ""}, {"0", "0", "0", ""}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, kind := range []string{"unary", "stream"} {
				i := tc.i
				if kind == "stream" && tc.name == "on" {
					i = interceptor(t, l(), grpclimit.Everyone(), grpclimit.WithHeaders())
				}
				conn := limited(t, &echo{}, i)
				for n, want := range tc.want {
					var header, trailer metadata.MD
					if kind == "unary" {
						_ = conn.Invoke(t.Context(), say, wrapperspb.String(""), new(wrapperspb.StringValue), grpc.Header(&header), grpc.Trailer(&trailer))
					} else {
						stream, err := open(t.Context(), conn, chat)
						if err != nil {
							t.Fatal(err)
						}
						_ = exchange(stream, "")
						stream.CloseSend()
						_ = stream.RecvMsg(new(wrapperspb.StringValue))
						header, _ = stream.Header()
						trailer = stream.Trailer()
					}
					got := said(header, trailer)
					// The bucket refills while the test runs.
					if s, err := strconv.Atoi(got[2]); err == nil && s > 0 && s < 3600 && want[2] == "3600" && s > 3590 {
						got[2] = want[2]
					}
					if got != want {
						t.Errorf("%s %d: got %q, want %q", kind, n, got, want)
					}
				}
			}
		})
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
			got := said(nil, md)[3]
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
	if got, want := i.Stats(), (grpclimit.Stats{Allowed: 2, Denied: 3, Missing: 2}); got != want {
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
		{"a1:x", "", codes.OK}, // not what a and x join to
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
