package grpclimit_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/test/bufconn"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

func from(addr net.Addr, info credentials.AuthInfo, pairs ...string) context.Context {
	ctx := peer.NewContext(context.Background(), &peer.Peer{Addr: addr, AuthInfo: info})
	return metadata.NewIncomingContext(ctx, metadata.Pairs(pairs...))
}

func tcp(s string) net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }

// text is an address of a type of its own, as listeners of all kinds have.
type text string

func (text) Network() string  { return "tcp" }
func (a text) String() string { return string(a) }

func verified(cert *x509.Certificate) credentials.TLSInfo {
	return credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{cert}}}}
}

type otherAuth struct{ name string }

func (otherAuth) AuthType() string { return "other" }

func uris(raw ...string) (out []*url.URL) {
	for _, s := range raw {
		u, err := url.Parse(s)
		if err != nil {
			panic(err)
		}
		out = append(out, u)
	}
	return out
}

func TestKeys(t *testing.T) {
	var (
		plain    = context.Background()
		server   = grpclimit.Call{FullMethod: say}
		client   = grpclimit.Call{FullMethod: say, Client: true, Target: "dns:///db:443"}
		outgoing = metadata.AppendToOutgoingContext(from(tcp("192.0.2.1:5"), nil, "id", "incoming"), "id", "outgoing")
		spiffe   = &x509.Certificate{URIs: uris("https://example.org/x", "spiffe://example.org/a"), Subject: pkix.Name{CommonName: "n"}}
		named    = &x509.Certificate{Subject: pkix.Name{CommonName: "spiffe://example.org/a"}, DNSNames: []string{"d"}}
		dns      = &x509.Certificate{DNSNames: []string{"d", "e"}}
		proxies  = grpclimit.TrustedProxies("10.0.0.0/8", "::ffff:172.16.0.0/108", "fd00::/8")
		missing  = grpclimit.KeyFunc(func(context.Context, grpclimit.Call) (string, bool) { return "", false })
		constant = func(s string) grpclimit.Key {
			return grpclimit.KeyFunc(func(context.Context, grpclimit.Call) (string, bool) { return s, true })
		}
	)
	const none = "(none)"
	for _, tc := range []struct {
		name string
		key  grpclimit.Key
		ctx  context.Context
		call grpclimit.Call
		want string
	}{
		{"everyone", grpclimit.Everyone(), plain, server, "everyone"},
		{"method", grpclimit.Method(), plain, server, say},
		{"target", grpclimit.Target(), plain, client, "dns:///db:443"},
		{"target on a server", grpclimit.Target(), plain, server, none},

		{"metadata", grpclimit.Metadata("Id"), from(nil, nil, "id", "a"), server, "a"},
		{"metadata absent", grpclimit.Metadata("id"), from(nil, nil), server, none},
		{"no metadata", grpclimit.Metadata("id"), plain, server, none},
		{"metadata empty", grpclimit.Metadata("id"), from(nil, nil, "id", ""), server, none},
		{"metadata twice", grpclimit.Metadata("id"), from(nil, nil, "id", "a", "id", "b"), server, none},
		{"metadata of a client", grpclimit.Metadata("id"), outgoing, client, "outgoing"},
		{"metadata of the server it is in", grpclimit.Metadata("id"), outgoing, server, "incoming"},
		{"authority", grpclimit.Metadata(":authority"), from(nil, nil, ":authority", "a"), server, "a"},

		{"v4", grpclimit.ClientIP(), from(tcp("192.0.2.1:5"), nil), server, "192.0.2.1"},
		{"v4, another port", grpclimit.ClientIP(), from(tcp("192.0.2.1:6"), nil), server, "192.0.2.1"},
		{"v4 in v6", grpclimit.ClientIP(), from(tcp("[::ffff:192.0.2.1]:5"), nil), server, "192.0.2.1"},
		{"v4 in v6 with a zone", grpclimit.ClientIP(), from(text("[::ffff:192.0.2.1%eth0]:5"), nil), server, "192.0.2.1"},
		{"v6", grpclimit.ClientIP(), from(tcp("[2001:db8:0:1:2:3:4:5]:5"), nil), server, "2001:db8:0:1::/64"},
		{"v6, the same network", grpclimit.ClientIP(), from(tcp("[2001:db8:0:1::9]:5"), nil), server, "2001:db8:0:1::/64"},
		{"v6, another network", grpclimit.ClientIP(), from(tcp("[2001:db8:0:2::9]:5"), nil), server, "2001:db8:0:2::/64"},
		{"v6 with a zone", grpclimit.ClientIP(grpclimit.IPv6Prefix(128)), from(tcp("[fe80::1%eth0]:5"), nil), server, "fe80::1"},
		{"v6 by 48", grpclimit.ClientIP(grpclimit.IPv6Prefix(48)), from(tcp("[2001:db8:1:2::9]:5"), nil), server, "2001:db8:1::/48"},
		{"NAT64", grpclimit.ClientIP(), from(tcp("[64:ff9b::192.0.2.1]:5"), nil), server, "192.0.2.1"},
		{"text", grpclimit.ClientIP(), from(text("192.0.2.1:5"), nil), server, "192.0.2.1"},
		{"text without port", grpclimit.ClientIP(), from(text("192.0.2.1"), nil), server, "192.0.2.1"},
		{"v6 in brackets", grpclimit.ClientIP(), from(text("[2001:db8::1]"), nil), server, "2001:db8::/64"},
		{"text that is no address", grpclimit.ClientIP(), from(text("bufconn"), nil), server, none},
		{"unix", grpclimit.ClientIP(), from(&net.UnixAddr{Net: "unix", Name: "@"}, nil), server, none},
		{"unix, named like an address", grpclimit.ClientIP(), from(&net.UnixAddr{Net: "unix", Name: "192.0.2.1:5"}, nil), server, none},
		{"no address", grpclimit.ClientIP(), from(nil, nil), server, none},
		{"an address that is nil", grpclimit.ClientIP(), from((*net.TCPAddr)(nil), nil), server, none},
		{"an address without an IP", grpclimit.ClientIP(), from(&net.TCPAddr{Port: 5}, nil), server, none},
		{"an address of 5 bytes", grpclimit.ClientIP(), from(&net.TCPAddr{IP: net.IP{1, 2, 3, 4, 5}}, nil), server, none},
		{"no peer", grpclimit.ClientIP(), plain, server, none},
		{"the peer of a client is not that of the call it serves", grpclimit.ClientIP(), outgoing, client, none},

		{"forwarded, nobody trusted", grpclimit.ClientIP(), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "192.0.2.1"), server, "10.0.0.1"},
		{"forwarded by an untrusted peer", grpclimit.ClientIP(proxies), from(tcp("192.0.2.9:5"), nil, "x-forwarded-for", "192.0.2.1"), server, "192.0.2.9"},
		{"forwarded", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "192.0.2.1"), server, "192.0.2.1"},
		{"forwarded, a lie to the left", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "203.0.113.1, 192.0.2.1"), server, "192.0.2.1"},
		{"forwarded by two", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "203.0.113.1,192.0.2.1, 172.16.3.4"), server, "192.0.2.1"},
		{"forwarded in several lines", grpclimit.ClientIP(proxies), from(tcp("[fd00::1]:5"), nil, "x-forwarded-for", "203.0.113.1, 192.0.2.1", "x-forwarded-for", "10.9.9.9"), server, "192.0.2.1"},
		{"forwarded, a lie in a line above", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "203.0.113.1", "x-forwarded-for", "192.0.2.1"), server, "192.0.2.1"},
		{"forwarded with a port", grpclimit.ClientIP(proxies), from(tcp("[::ffff:10.0.0.1]:5"), nil, "x-forwarded-for", "[2001:db8::1]:80"), server, "2001:db8::/64"},
		{"forwarded, only proxies", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "10.0.0.3, 10.0.0.2"), server, "10.0.0.3"},
		{"forwarded, garbled", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "192.0.2.1, unknown"), server, "10.0.0.1"},
		{"forwarded, an empty entry", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil, "x-forwarded-for", "192.0.2.1,"), server, "10.0.0.1"},
		{"forwarded, no entry", grpclimit.ClientIP(proxies), from(tcp("10.0.0.1:5"), nil), server, "10.0.0.1"},

		{"spiffe", grpclimit.Auth(), from(nil, verified(spiffe)), server, "spiffe://example.org/a"},
		{"common name like a spiffe id", grpclimit.Auth(), from(nil, verified(named)), server, "cn:spiffe://example.org/a"},
		{"dns name", grpclimit.Auth(), from(nil, verified(dns)), server, "dns:d"},
		{"two spiffe ids", grpclimit.Auth(), from(nil, verified(&x509.Certificate{URIs: uris("spiffe://a/b", "spiffe://a/c"), DNSNames: []string{"d"}})), server, none},
		{"an empty certificate", grpclimit.Auth(), from(nil, verified(&x509.Certificate{})), server, none},
		{"not verified", grpclimit.Auth(), from(nil, credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{spiffe}}}), server, none},
		{"no certificate", grpclimit.Auth(), from(nil, credentials.TLSInfo{}), server, none},
		{"other credentials", grpclimit.Auth(), from(nil, otherAuth{"a"}), server, none},
		{"no credentials", grpclimit.Auth(), from(nil, nil), server, none},
		{"no peer to ask", grpclimit.Auth(), plain, server, none},
		{"on a client", grpclimit.Auth(), from(nil, verified(spiffe)), client, none},
		{"a function", grpclimit.AuthFunc(func(info credentials.AuthInfo) (string, bool) { return info.(otherAuth).name, true }), from(nil, otherAuth{"a"}), server, "a"},
		{"a function, no credentials", grpclimit.AuthFunc(func(credentials.AuthInfo) (string, bool) { return "a", true }), from(nil, nil), server, none},

		{"join", grpclimit.Join(grpclimit.Method(), grpclimit.Metadata("id")), from(nil, nil, "id", "a"), server, "14:/test.Echo/Say1:a"},
		{"join with an empty part", grpclimit.Join(constant(""), constant("a")), plain, server, none},
		{"join with a missing part", grpclimit.Join(grpclimit.Method(), missing), plain, server, none},
		{"join in a join", grpclimit.Join(grpclimit.Join(constant("a")), constant("b")), plain, server, "3:1:a1:b"},
		{"first", grpclimit.First(constant("a"), constant("b")), plain, server, "0:a"},
		{"first but one", grpclimit.First(missing, constant("a")), plain, server, "1:a"},
		{"first but an empty one", grpclimit.First(constant(""), constant("a")), plain, server, "1:a"},
		{"first of none", grpclimit.First(missing, missing), plain, server, none},

		// What New refuses does not panic either.
		{"a nil function", grpclimit.KeyFunc(nil), plain, server, none},
		{"a nil identity", grpclimit.AuthFunc(nil), from(nil, otherAuth{}), server, none},
		{"a join of nil", grpclimit.Join(nil), plain, server, none},
		{"a join of nothing", grpclimit.Join(), plain, server, none},
		{"a first of nil", grpclimit.First(nil, constant("a")), plain, server, "1:a"},
		{"a first of nothing", grpclimit.First(), plain, server, none},
		{"a prefix out of range", grpclimit.ClientIP(grpclimit.IPv6Prefix(129)), from(tcp("[2001:db8::1]:5"), nil), server, none},
	} {
		got, ok := tc.key.Of(tc.ctx, tc.call)
		if !ok {
			got = none
		}
		if got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
	if id, ok := grpclimit.CertificateIdentity(nil); ok {
		t.Errorf("the identity of no certificate is %q", id)
	}
}

// Every fault is listed at once, each wraps ErrConfig, and nothing panics.
func TestNewListsEveryFault(t *testing.T) {
	l := hourly(t, 1)
	for _, tc := range []struct {
		name   string
		limits grpclimit.Limits
		key    grpclimit.Key
		opts   []grpclimit.Option
		want   []string
	}{
		{"nothing", nil, nil, nil, []string{"no limits", "a Key is nil"}},
		{
			"patterns",
			grpclimit.Limits{
				"": l, "/": l, "//": l, "/a": l, "a/b": l, "/a/": l, "//b": l, "/*/b": l, "/*": l, "/*/*": l, "/a/b/c": l, "/a/b*": l, "**": l, "/a b/c": l, "/a/\x00": l,
				"/ä/b": l, "a.*": l,
				"/a.B/C": l, "/a.B/*": l, "*": l,
			},
			grpclimit.Method(), nil,
			[]string{
				`pattern ""`, `pattern "/"`, `pattern "//"`, `pattern "/a"`, `pattern "a/b"`, `pattern "/a/"`, `pattern "//b"`, `pattern "/*/b"`, `pattern "/*"`, `pattern "/*/*"`,
				`pattern "/a/b/c"`, `pattern "/a/b*"`, `pattern "**"`, `pattern "/a b/c"`, `pattern "/a/\x00"`, `pattern "/ä/b"`, `pattern "a.*"`,
			},
		},
		{"nil limiters", grpclimit.Limits{"*": nil, "/a/b": nil}, grpclimit.Method(), nil, []string{`Limiter of "*" is nil`, `Limiter of "/a/b" is nil`}},
		{
			"keys",
			grpclimit.Limits{"*": l},
			grpclimit.Join(
				nil, grpclimit.KeyFunc(nil), grpclimit.Join(), grpclimit.First(), grpclimit.First(grpclimit.Metadata("")), grpclimit.Metadata("a b"), grpclimit.Metadata(":"), grpclimit.Metadata("ä"),
				grpclimit.AuthFunc(nil), grpclimit.ClientIP(nil, grpclimit.IPv6Prefix(129), grpclimit.TrustedProxies("10.0.0.0/33", "ten"), grpclimit.TrustedProxies("0.0.0.0/0", "::/0")),
				grpclimit.ClientIP(grpclimit.TrustedProxies("::ffff:0:0/96", "::ffff:10.0.0.0/95"), grpclimit.NAT64("x", "2001:db8::/33", "10.0.0.0/32", "::ffff:0:0/96")),
				grpclimit.ClientIP(grpclimit.TrustedProxies("10.0.0.1"), grpclimit.NAT64("2001:db8:64::/96")),
				grpclimit.ClientIP(), grpclimit.Method(), grpclimit.Everyone(), grpclimit.Auth(), grpclimit.Target(), grpclimit.Metadata(":authority"),
			),
			nil,
			[]string{
				"a Key is nil", "a KeyFunc is nil", "Join has no keys", "First has no keys", `the name ""`, `the name "a b"`, `the name ":"`, `the name "ä"`,
				"AuthFunc is nil", "a ClientIPOption is nil", "IPv6Prefix is 129, want 1 to 128", `"10.0.0.0/33"`, `"ten"`, "0.0.0.0/0 trusts everybody", "::/0 trusts everybody",
				"::ffff:0:0/96 trusts everybody", "::ffff:10.0.0.0/95 has more in it than IPv4", `"x"`, "33 bits, want 32", "10.0.0.0/32 is no IPv6 prefix", "::ffff:0:0/96 is no IPv6 prefix",
			},
		},
		{
			"options",
			grpclimit.Limits{"*": l}, grpclimit.Method(),
			[]grpclimit.Option{
				nil, grpclimit.WithMissingKey(0), grpclimit.WithCost(nil), grpclimit.WithSkip(nil), grpclimit.WithSkipMethods(), grpclimit.WithSkipMethods("a", "/b/c"), grpclimit.WithStreams(0),
				grpclimit.WithRefundOn(), grpclimit.WithRefundOn(codes.OK, 17), grpclimit.WithWait(8),
			},
			[]string{
				"an Option is nil", "unknown MissingKey 0", "WithCost is nil", "WithSkip is nil", "WithSkipMethods without", `WithSkipMethods: the pattern "a"`, "WithStreams(0)",
				"WithRefundOn without", "WithRefundOn(0)", "WithRefundOn(17)", "WithWait(8)",
			},
		},
		{
			"a wait for what is not counted",
			grpclimit.Limits{"*": l}, grpclimit.Method(),
			[]grpclimit.Option{grpclimit.WithWait(grpclimit.Opening | grpclimit.Sent), grpclimit.WithStreams(grpclimit.Received)},
			[]string{"WithWait names messages"},
		},
	} {
		i, err := grpclimit.New(tc.limits, tc.key, tc.opts...)
		if i != nil || !errors.Is(err, tierlimit.ErrConfig) {
			t.Errorf("%s: got %v, %v", tc.name, i, err)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		if len(lines) != len(tc.want) {
			t.Errorf("%s: %d faults, want %d:\n%v", tc.name, len(lines), len(tc.want), err)
		}
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: no fault has %q:\n%v", tc.name, want, err)
			}
		}
		for _, line := range lines {
			if !strings.HasPrefix(line, tierlimit.ErrConfig.Error()+": grpclimit: ") {
				t.Errorf("%s: %q does not begin as it should", tc.name, line)
			}
		}
	}
	if _, err := grpclimit.New(grpclimit.Limits{"*": l}, grpclimit.Method(), grpclimit.WithWait(grpclimit.Opening), grpclimit.WithStreams(grpclimit.Received)); err != nil {
		t.Errorf("unary calls can wait whatever is counted of streams: %v", err)
	}
}

// One client is one key, whatever port it comes from.
func TestClientIPOverTCP(t *testing.T) {
	i := interceptor(t, hourly(t, 2), grpclimit.ClientIP())
	passed := 0
	for range 3 {
		if _, err := call(t.Context(), limited(t, &echo{}, i), ""); err == nil {
			passed++
		}
	}
	if passed != 2 {
		t.Errorf("%d of 3 connections passed, want 2", passed)
	}
}

// Behind a Unix socket and bufconn nobody has an address.
func TestClientIPWithoutAnAddress(t *testing.T) {
	unix, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	memory := bufconn.Listen(1 << 16)
	dial := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return memory.DialContext(ctx) })
	for _, tc := range []struct {
		listener net.Listener
		target   string
		opts     []grpc.DialOption
	}{
		{unix, "unix:" + unix.Addr().String(), nil},
		{memory, "passthrough:///memory", []grpc.DialOption{dial}},
	} {
		i := interceptor(t, hourly(t, math.MaxInt32), grpclimit.ClientIP())
		conn, stop, err := startOn(tc.listener, tc.target, &echo{}, serverOptions(i), tc.opts...)
		if err != nil {
			t.Fatal(err)
		}
		_, err = call(t.Context(), conn, "")
		stop()
		if got, want := i.Stats(), (grpclimit.Stats{Denied: 1, MissingKeys: 1}); got != want {
			t.Errorf("%s: %v, %+v, want %+v", tc.target, err, got, want)
		}
	}
}

// The cases that httplimit has too: one client has one key in both packages.
func TestSharedAddresses(t *testing.T) {
	table, err := os.ReadFile("../httplimit/testdata/addresses.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Peer, Want          string
		Trusted, Nat64, Forwarded []string
		Bits                      int
	}
	if err := json.Unmarshal(table, &cases); err != nil || len(cases) < 50 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, tc := range cases {
		opts := []grpclimit.ClientIPOption{grpclimit.NAT64(tc.Nat64...)}
		for _, p := range tc.Trusted { // given several times they add up
			opts = append(opts, grpclimit.TrustedProxies(p))
		}
		if tc.Bits != 0 {
			opts = append(opts, grpclimit.IPv6Prefix(tc.Bits))
		}
		var pairs []string
		for _, line := range tc.Forwarded {
			pairs = append(pairs, "x-forwarded-for", line)
		}
		peers := []net.Addr{text(tc.Peer)}
		if a, err := netip.ParseAddrPort(tc.Peer); err == nil {
			peers = append(peers, net.TCPAddrFromAddrPort(a))
		}
		for _, peer := range peers {
			if key, ok := grpclimit.ClientIP(opts...).Of(from(peer, nil, pairs...), grpclimit.Call{}); key != tc.Want || ok != (tc.Want != "") {
				t.Errorf("%s: %T got %q, %v, want %q", tc.Name, peer, key, ok, tc.Want)
			}
		}
	}
}
