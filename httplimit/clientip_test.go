package httplimit_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// request is one from peer with header lines "Name: value".
func request(peer string, lines ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = peer
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Add(name, value)
	}
	return r
}

func TestClientIP(t *testing.T) {
	proxied := []httplimit.ClientIPOption{httplimit.TrustedProxies("10.0.0.0/8", "192.168.7.7", "2001:db8:f::/48")}
	rfc7239 := append(proxied[:1:1], httplimit.TrustedHeader("forwarded"))
	const peer, xff, fwd = "10.0.0.1:1234", "X-Forwarded-For: ", "Forwarded: "
	for _, tc := range []struct {
		name string
		opts []httplimit.ClientIPOption
		r    *http.Request
		want string // "": no key
	}{
		// F43: the peer, its /64, ports and zones.
		{"IPv4 with a port", nil, request("203.0.113.9:4711"), "203.0.113.9"},
		{"IPv4 without a port", nil, request("203.0.113.9"), "203.0.113.9"},
		{"IPv6 is its /64", nil, request("[2001:db8:1:2:3:4:5:6]:4711"), "2001:db8:1:2::/64"},
		{"IPv6 of the same /64", nil, request("[2001:db8:1:2:ffff::]:1"), "2001:db8:1:2::/64"},
		{"IPv6 without brackets", nil, request("2001:db8:1:2::9"), "2001:db8:1:2::/64"},
		{"IPv6 zone", nil, request("[fe80::1%eth0]:80"), "fe80::/64"},
		{"a /56", []httplimit.ClientIPOption{httplimit.IPv6Prefix(56)}, request("[2001:db8:1:2ff::6]:1"), "2001:db8:1:200::/56"},
		{"a whole address", []httplimit.ClientIPOption{httplimit.IPv6Prefix(128)}, request("[2001:db8::6]:1"), "2001:db8::6"},
		{"v4-mapped", nil, request("[::ffff:203.0.113.9]:80"), "203.0.113.9"},
		{"v4-mapped in hexadecimal, with a zone", nil, request("[::ffff:cb00:7109%lo]:80"), "203.0.113.9"},
		{"NAT64", nil, request("[64:ff9b::cb00:7109]:80"), "203.0.113.9"},
		{"NAT64 of 96 bits of one's own", []httplimit.ClientIPOption{httplimit.NAT64("2001:db8:64::/96")}, request("[2001:db8:64::cb00:7109]:80"), "203.0.113.9"},
		{"a Unix socket", nil, request("@"), ""},
		{"no peer", nil, request(""), ""},

		// F44: who is believed.
		{"an untrusted peer is not believed", nil, request("203.0.113.9:1", xff+"198.51.100.1"), "203.0.113.9"},
		{"nor with proxies elsewhere", proxied, request("203.0.113.9:1", xff+"198.51.100.1", fwd+"for=198.51.100.1"), "203.0.113.9"},
		{"a proxy is", proxied, request(peer, xff+"198.51.100.1"), "198.51.100.1"},
		{"a proxy given as an address", proxied, request("192.168.7.7:1", xff+"198.51.100.1"), "198.51.100.1"},
		{"a neighbour of it is not", proxied, request("192.168.7.8:1", xff+"198.51.100.1"), "192.168.7.8"},
		{"a proxy over IPv6", proxied, request("[2001:db8:f::1]:1", xff+"198.51.100.1"), "198.51.100.1"},
		{"a proxy with a zone", []httplimit.ClientIPOption{httplimit.TrustedProxies("fe80::/10")}, request("[fe80::1%eth0]:1", xff+"198.51.100.1"), "198.51.100.1"},
		{"a v4-mapped proxy", proxied, request("[::ffff:10.0.0.1]:1", xff+"198.51.100.1"), "198.51.100.1"},
		{"a v4-mapped CIDR", []httplimit.ClientIPOption{httplimit.TrustedProxies("::ffff:10.0.0.0/104")}, request(peer, xff+"198.51.100.1"), "198.51.100.1"},
		{"NAT64 makes no proxy", proxied, request("[64:ff9b::a00:1]:1", xff+"198.51.100.1"), "10.0.0.1"},
		{"the client's own words stand on the left", proxied, request(peer, xff+"1.1.1.1, 198.51.100.1"), "198.51.100.1"},
		{"through two proxies", proxied, request(peer, xff+"1.1.1.1, 198.51.100.1, 10.9.9.9"), "198.51.100.1"},
		{"an untrusted hop ends the walk", proxied, request(peer, xff+"198.51.100.1, 203.0.113.5, 10.9.9.9"), "203.0.113.5"},
		{"several lines are one list", proxied, request(peer, xff+"1.1.1.1", xff+"198.51.100.1", xff+"10.9.9.9"), "198.51.100.1"},
		{"several lines with lists", proxied, request(peer, xff+"1.1.1.1, 198.51.100.1", xff+"10.8.8.8,10.9.9.9"), "198.51.100.1"},
		{"all are trusted: the furthest", proxied, request(peer, xff+"10.7.7.7, 10.8.8.8"), "10.7.7.7"},
		{"a trusted proxy of itself", proxied, request(peer), "10.0.0.1"},
		{"IPv6 in the list", proxied, request(peer, xff+"2001:db8:1:2::1"), "2001:db8:1:2::/64"},
		{"IPv6 with a port and a zone", proxied, request(peer, xff+"[2001:db8:1:2::1%en0]:99"), "2001:db8:1:2::/64"},
		{"IPv4 with a port", proxied, request(peer, xff+"198.51.100.1:99"), "198.51.100.1"},
		{"tabs and spaces", proxied, request(peer, xff+"1.1.1.1,\t 198.51.100.1 \t"), "198.51.100.1"},
		{"NAT64 in the list", proxied, request(peer, xff+"64:ff9b::198.51.100.1"), "198.51.100.1"},
		{"no address: the last hop known", proxied, request(peer, xff+"1.1.1.1, unknown"), "10.0.0.1"},
		{"behind a second proxy", proxied, request(peer, xff+"1.1.1.1, junk, 10.9.9.9"), "10.9.9.9"},
		{"an empty element is no address", proxied, request(peer, xff+"1.1.1.1,"), "10.0.0.1"},
		{"an empty line is none either", proxied, request(peer, xff+"1.1.1.1", xff), "10.0.0.1"},
		{"a port that is none", proxied, request(peer, xff+"198.51.100.1:x"), "10.0.0.1"},
		{"a port of no digits", proxied, request(peer, xff+"198.51.100.1:"), "10.0.0.1"},
		{"a port too long", proxied, request(peer, xff+"198.51.100.1:123456"), "10.0.0.1"},
		{"an octet above 255", proxied, request(peer, xff+"198.51.100.256"), "10.0.0.1"},
		{"leading zeros", proxied, request(peer, xff+"198.051.100.1"), "10.0.0.1"},
		{"IPv4 in brackets", proxied, request(peer, xff+"[198.51.100.1]"), "10.0.0.1"},
		{"IPv4 with a zone", proxied, request(peer, xff+"198.51.100.1%eth0"), "10.0.0.1"},
		{"a zone without a name", proxied, request(peer, xff+"2001:db8::1%"), "10.0.0.1"},
		{"a bracket left open", proxied, request(peer, xff+"[2001:db8::1"), "10.0.0.1"},
		{"the other header is not read", proxied, request(peer, fwd+"for=1.1.1.1", xff+"198.51.100.1"), "198.51.100.1"},
		{"a header of one address", append(proxied[:1:1], httplimit.TrustedHeader("x-real-ip")), request(peer, "X-Real-Ip: 198.51.100.1", xff+"1.1.1.1"), "198.51.100.1"},

		// RFC 7239.
		{"Forwarded", rfc7239, request(peer, fwd+"for=198.51.100.1"), "198.51.100.1"},
		{"X-Forwarded-For is not read then", rfc7239, request(peer, fwd+"for=198.51.100.1", xff+"1.1.1.1"), "198.51.100.1"},
		{"with other parameters", rfc7239, request(peer, fwd+`by=10.0.0.1;FOR="198.51.100.1:99";proto=https;host="a,b;c"`), "198.51.100.1"},
		{"IPv6 quoted", rfc7239, request(peer, fwd+`for="[2001:db8:1:2::1]:4711"`), "2001:db8:1:2::/64"},
		{"IPv6 unquoted", rfc7239, request(peer, fwd+`for=[2001:db8:1:2::1]`), "2001:db8:1:2::/64"},
		{"an obfuscated port", rfc7239, request(peer, fwd+`for="198.51.100.1:_p"`), "198.51.100.1"},
		{"from the right", rfc7239, request(peer, fwd+"for=1.1.1.1, for=198.51.100.1;by=x,for=10.9.9.9"), "198.51.100.1"},
		{"lines", rfc7239, request(peer, fwd+"for=1.1.1.1, for=198.51.100.1", fwd+"for=10.9.9.9"), "198.51.100.1"},
		{"a quote that a client left open", rfc7239, request(peer, fwd+`for="1.1.1.1, for=198.51.100.1`), "198.51.100.1"},
		{"a quote behind a backslash", rfc7239, request(peer, fwd+`for="\", for=198.51.100.1`), "198.51.100.1"},
		{"escapes", rfc7239, request(peer, fwd+`for=1.1.1.1, host="a\",\\";for="198.51\.100.1"`), "198.51.100.1"},
		{"unknown", rfc7239, request(peer, fwd+"for=1.1.1.1, for=unknown"), "10.0.0.1"},
		{"obfuscated", rfc7239, request(peer, fwd+"for=1.1.1.1, for=_hidden"), "10.0.0.1"},
		{"without for", rfc7239, request(peer, fwd+"for=1.1.1.1, proto=https"), "10.0.0.1"},
		{"for twice", rfc7239, request(peer, fwd+"for=1.1.1.1;for=2.2.2.2"), "10.0.0.1"},
		{"pairs left out", rfc7239, request(peer, fwd+";for=198.51.100.1; ;"), "198.51.100.1"},
		{"junk behind a value", rfc7239, request(peer, fwd+`for="198.51.100.1"x`), "10.0.0.1"},
		{"no pair", rfc7239, request(peer, fwd+"198.51.100.1"), "10.0.0.1"},
		{"a quote that is not closed", rfc7239, request(peer, fwd+`for="198.51.100.1`), "10.0.0.1"},
		{"a value left out", rfc7239, request(peer, fwd+"for="), "10.0.0.1"},
		{"a name left out", rfc7239, request(peer, fwd+"=198.51.100.1"), "10.0.0.1"},
	} {
		key, ok := httplimit.ClientIP(tc.opts...).Of(tc.r)
		if key != tc.want || ok != (tc.want != "") {
			t.Errorf("%s: got %q, %v, want %q", tc.name, key, ok, tc.want)
		}
	}
}

// The layouts of RFC 6052, 2.4: the same IPv4 address behind prefixes of each length.
func TestClientIPNAT64Layouts(t *testing.T) {
	for prefix, addr := range map[string]string{
		"2001:db8::/32":            "2001:db8:c000:221::",
		"2001:db8:100::/40":        "2001:db8:1c0:2:21::",
		"2001:db8:122::/48":        "2001:db8:122:c000:2:2100::",
		"2001:db8:122:300::/56":    "2001:db8:122:3c0:0:221::",
		"2001:db8:122:344::/64":    "2001:db8:122:344:c0:2:2100::",
		"2001:db8:122:344::/96":    "2001:db8:122:344::192.0.2.33",
		"2001:db8:122:344:0::9/96": "2001:db8:122:344::c000:221",
	} {
		key, ok := httplimit.ClientIP(httplimit.NAT64(prefix)).Of(request("[" + addr + "]:1"))
		if key != "192.0.2.33" || !ok {
			t.Errorf("%s: %s is %q, %v", prefix, addr, key, ok)
		}
	}
}

func TestClientIPFaults(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1, 1e9))
	for _, tc := range []struct {
		name string
		opts []httplimit.ClientIPOption
		want []string
	}{
		{"all at once", []httplimit.ClientIPOption{nil, httplimit.IPv6Prefix(0), httplimit.TrustedProxies("10.0.0.0/33", "ten", "0.0.0.0/0"), httplimit.TrustedHeader("X Y")},
			[]string{"a nil ClientIPOption", "IPv6Prefix is 0", `"10.0.0.0/33"`, `"ten"`, "0.0.0.0/0 trusts everybody", `"X Y" is no header name`, "never read without TrustedProxies"}},
		{"everybody by IPv6", []httplimit.ClientIPOption{httplimit.TrustedProxies("::/0")}, []string{"trusts everybody"}},
		{"more than IPv4, mapped", []httplimit.ClientIPOption{httplimit.TrustedProxies("::ffff:10.0.0.0/95")}, []string{"::ffff:10.0.0.0/95 has more in it than IPv4"}},
		{"NAT64 of what is mapped", []httplimit.ClientIPOption{httplimit.NAT64("::ffff:0:0/96")}, []string{"is no IPv6 prefix"}},
		{"all of IPv4, mapped", []httplimit.ClientIPOption{httplimit.TrustedProxies("::ffff:0:0/96")}, []string{"trusts everybody"}},
		{"too many bits", []httplimit.ClientIPOption{httplimit.IPv6Prefix(129)}, []string{"IPv6Prefix is 129, want 1 to 128"}},
		{"a header without proxies", []httplimit.ClientIPOption{httplimit.TrustedHeader("Forwarded")}, []string{"never read without TrustedProxies"}},
		{"NAT64", []httplimit.ClientIPOption{httplimit.NAT64("x", "2001:db8::/33", "10.0.0.0/32")}, []string{`"x"`, "33 bits, want 32", "10.0.0.0/32 is no IPv6 prefix"}},
	} {
		_, err := httplimit.New(l, httplimit.Join(httplimit.ClientIP(tc.opts...)))
		if !errors.Is(err, tierlimit.ErrConfig) {
			t.Errorf("%s: got %v, want ErrConfig", tc.name, err)
			continue
		}
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v lacks %q", tc.name, err, want)
			}
		}
		if n := strings.Count(err.Error(), "\n") + 1; n != len(tc.want) {
			t.Errorf("%s: %d faults, want %d:\n%v", tc.name, n, len(tc.want), err)
		}
	}
}

// Whatever the parts of a request are, a key is an address in its one form, and a peer that is not trusted is the key whatever it says.
func FuzzClientIP(f *testing.F) {
	f.Add("203.0.113.9:80", "198.51.100.1", "for=198.51.100.1")
	f.Add("[64:ff9b::cb00:7109%1]:80", "1.1.1.1, [2001:db8::1%z]:9", `for="[::ffff:1.2.3.4]:_x";by=a`)
	proxies := httplimit.TrustedProxies("10.0.0.0/8", "fd00::/8")
	alone := httplimit.ClientIP()
	keys := []httplimit.Key{httplimit.ClientIP(proxies), httplimit.ClientIP(proxies, httplimit.TrustedHeader("Forwarded"))}
	f.Fuzz(func(t *testing.T, peer, xff, fwd string) {
		r := request(peer)
		bare, known := alone.Of(r)
		r.Header["X-Forwarded-For"], r.Header["Forwarded"] = []string{xff}, []string{fwd}
		if key, ok := alone.Of(r); key != bare || ok != known {
			t.Fatalf("without proxies %q became %q by a header", bare, key)
		}
		for _, k := range keys {
			key, ok := k.Of(r)
			if ok != known {
				t.Fatalf("peer %q: a header made the key %q, %v", peer, key, ok)
			}
			if !ok {
				continue
			}
			switch a, err := netip.ParseAddr(key); {
			case err != nil:
				p, err := netip.ParsePrefix(key)
				if err != nil || p.Bits() != 64 || p.Masked().String() != key || p.Addr().Is4() || p.Addr().Is4In6() {
					t.Fatalf("%q is no key", key)
				}
			case !a.Is4() || a.String() != key:
				t.Fatalf("%q is no key", key)
			}
			if !strings.HasPrefix(bare, "10.") && !strings.HasPrefix(bare, "fd") && key != bare {
				t.Fatalf("the untrusted peer %q became %q", bare, key)
			}
		}
	})
}

// Whatever a client puts into a header, the address that the proxy adds behind it is the key: on the same line or on one of its own.
func FuzzForwardedLists(f *testing.F) {
	f.Add("1.1.1.1")
	f.Add(`for="1.1.1.1`)
	f.Add(`for="\`)
	f.Add(`for=a;host="x\\", "`)
	proxies := httplimit.TrustedProxies("10.0.0.0/8")
	byHeader := map[string]httplimit.Key{
		"X-Forwarded-For": httplimit.ClientIP(proxies),
		"Forwarded":       httplimit.ClientIP(proxies, httplimit.TrustedHeader("Forwarded")),
	}
	added := map[string][][2]string{
		"X-Forwarded-For": {{"198.51.100.1", "198.51.100.1"}, {"2001:db8:1:2::3", "2001:db8:1:2::/64"}, {"198.51.100.1, 10.3.3.3", "198.51.100.1"}},
		"Forwarded": {{"for=198.51.100.1", "198.51.100.1"}, {`for="[2001:db8:1:2::3]:80";host="a\",b\\"`, "2001:db8:1:2::/64"},
			{`by="\\";for=198.51.100.1, For="10.3.3.3"`, "198.51.100.1"}},
	}
	f.Fuzz(func(t *testing.T, said string) {
		for name, key := range byHeader {
			for _, a := range added[name] {
				for _, lines := range [][]string{{said + "," + a[0]}, {said + ", " + a[0]}, {said, a[0]}, {a[0]}} {
					r := request("10.0.0.1:1")
					r.Header[name] = lines
					if got, ok := key.Of(r); got != a[1] || !ok {
						t.Fatalf("%s: %q gave %q, %v, want %q", name, lines, got, ok, a[1])
					}
				}
			}
		}
	})
}

// The cases that grpclimit has too: one client has one key in both packages.
func TestSharedAddresses(t *testing.T) {
	text, err := os.ReadFile("testdata/addresses.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Peer, Want          string
		Trusted, Nat64, Forwarded []string
		Bits                      int
	}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) < 50 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, tc := range cases {
		opts := []httplimit.ClientIPOption{httplimit.NAT64(tc.Nat64...)}
		for _, p := range tc.Trusted { // given several times they add up
			opts = append(opts, httplimit.TrustedProxies(p))
		}
		if tc.Bits != 0 {
			opts = append(opts, httplimit.IPv6Prefix(tc.Bits))
		}
		r := request(tc.Peer)
		r.Header["X-Forwarded-For"] = tc.Forwarded
		if key, ok := httplimit.ClientIP(opts...).Of(r); key != tc.Want || ok != (tc.Want != "") {
			t.Errorf("%s: got %q, %v, want %q", tc.Name, key, ok, tc.Want)
		}
	}
}
