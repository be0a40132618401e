package grpclimit

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/peer"
)

// A ClientIPOption configures ClientIP.
type ClientIPOption interface{ applyIP(*clientIP) }

type clientIPOption func(*clientIP)

func (f clientIPOption) applyIP(c *clientIP) { f(c) }

const (
	xForwardedFor = "x-forwarded-for"
	defaultIPv6   = 64
)

// clientIP is the Key that ClientIP makes. What it does with addresses is what httplimit does, whose module this one does not import; the cases
// of httplimit/testdata/addresses.json hold for both.
type clientIP struct {
	trusted []netip.Prefix
	bits    int // of IPv6
	nat64   []netip.Prefix
	wrong   []string
}

// ClientIP is the address a call comes from: an IPv4 address ("203.0.113.9"), or the /64 of an IPv6 address ("2001:db8:1:2::/64"), since a
// host has a whole /64 to choose from. Ports and zones are stripped; an IPv4 address that is written as IPv6, v4-mapped or by NAT64
// (64:ff9b::/96), is the IPv4 address. A client has the same key as by ClientIP of httplimit.
//
// It is the peer of the connection, unless that is one of TrustedProxies. Then x-forwarded-for is read from the right, all its lines as one
// list: each address was written by the hop behind it, so the client is the first that is not trusted itself, and what stands to the left of
// it is hearsay. Where the list ends, or holds something else than an address, the client is the last hop that is known. From a peer that is
// not trusted no metadata is looked at.
//
// The key is missing where the peer has no IP address, as on a Unix socket, whose clients cannot be told apart, and on bufconn; and on a
// client, whose peer is not known before the call. Faults of the options are listed by New.
func ClientIP(opts ...ClientIPOption) Key {
	c := &clientIP{bits: defaultIPv6, nat64: []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96")}}
	for _, o := range opts {
		if o == nil {
			c.fault("a ClientIPOption is nil")
			continue
		}
		o.applyIP(c)
	}
	if c.bits < 1 || c.bits > 128 {
		c.fault("IPv6Prefix is %d, want 1 to 128", c.bits)
	}
	return c
}

// TrustedProxies names the proxies whose word is taken for who their client is, as CIDRs or single addresses: all of them that can be
// between the client and this process, and nothing else. Whoever sends from one of these addresses can pretend to be anybody. Default none;
// given several times they add up. A prefix of length 0 is a fault that New lists.
func TrustedProxies(cidrs ...string) ClientIPOption {
	return clientIPOption(func(c *clientIP) {
		for _, s := range cidrs {
			p, err := parsePrefix(s)
			switch {
			case err != nil:
				c.fault("TrustedProxies: %v", err)
			case p.Bits() == 0:
				c.fault("TrustedProxies: %s trusts everybody", s)
			default:
				c.trusted = append(c.trusted, p)
			}
		}
	})
}

// IPv6Prefix sets how many bits of an IPv6 address count, 1 to 128; default 64, and with 128 the key is the address. Providers hand out /56
// and /48 too: the shorter, the fewer keys one client has, and the more clients may share one. Link-local addresses, of which a /64 holds
// all, need 128.
func IPv6Prefix(bits int) ClientIPOption {
	return clientIPOption(func(c *clientIP) { c.bits = bits })
}

// NAT64 names prefixes of one's own network behind which IPv4 addresses stand (RFC 6052), besides 64:ff9b::/96; of 32, 40, 48, 56, 64 or
// 96 bits. Given several times they add up.
func NAT64(prefixes ...string) ClientIPOption {
	return clientIPOption(func(c *clientIP) {
		for _, s := range prefixes {
			p, err := netip.ParsePrefix(s)
			if err != nil {
				c.fault("NAT64: %v", err)
				continue
			}
			switch p.Bits() {
			case 32, 40, 48, 56, 64, 96:
			default:
				c.fault("NAT64: %s has %d bits, want 32, 40, 48, 56, 64 or 96", s, p.Bits())
				continue
			}
			if p.Addr().Is4() || p.Addr().Is4In6() {
				c.fault("NAT64: %s is no IPv6 prefix", s)
				continue
			}
			c.nat64 = append(c.nat64, p.Masked())
		}
	})
}

func (c *clientIP) fault(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

func (c *clientIP) faults() []string { return c.wrong }

func (c *clientIP) Of(ctx context.Context, call Call) (string, bool) {
	// A client's context may be that of the call it serves, whose peer is somebody else.
	if call.Client {
		return "", false
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", false
	}
	a, ok := addressOf(p.Addr)
	if !ok {
		return "", false
	}
	if c.trusts(a) {
		a = c.forwarded(a, metadataValues(ctx, call, xForwardedFor))
	}
	if a = c.unfold(a); a.Is4() || c.bits == 128 {
		return a.String(), true
	}
	network, err := a.Prefix(c.bits)
	return network.String(), err == nil
}

// forwarded walks from the peer towards the client for as long as those who speak are trusted.
func (c *clientIP) forwarded(at netip.Addr, lines []string) netip.Addr {
	for _, line := range slices.Backward(lines) {
		for more := true; more; {
			element := line
			comma := strings.LastIndexByte(line, ',')
			if more = comma >= 0; more {
				line, element = line[:comma], line[comma+1:]
			}
			hop, ok := parseNode(strings.Trim(element, " \t"))
			if !ok {
				return at
			}
			if at = hop; !c.trusts(at) {
				return at
			}
		}
	}
	return at
}

// trusts compares as the address was written: one that a NAT64 prefix leads to is not the proxy of the same IPv4 address.
func (c *clientIP) trusts(a netip.Addr) bool {
	for _, p := range c.trusted {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// unfold is the IPv4 address within a NAT64 address, and any other as it is.
func (c *clientIP) unfold(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	for _, p := range c.nat64 {
		if !p.Contains(a) {
			continue
		}
		b := a.As16()
		var v4 [4]byte
		at := p.Bits() / 8
		for i := range v4 {
			if at == 8 { // RFC 6052 keeps this octet out
				at++
			}
			v4[i] = b[at]
			at++
		}
		return netip.AddrFrom4(v4)
	}
	return a
}

// addressOf is the IP address of a peer, without zone and not mapped.
func addressOf(addr net.Addr) (netip.Addr, bool) {
	switch a := addr.(type) {
	case nil:
		return netip.Addr{}, false
	case *net.TCPAddr:
		if a == nil {
			return netip.Addr{}, false
		}
		ip := a.AddrPort().Addr()
		return ip.WithZone("").Unmap(), ip.IsValid()
	case *net.UnixAddr:
		return netip.Addr{}, false // even if the path looks like an address
	}
	// A server within net/http has the address as text, and listeners of all kinds have types of their own.
	return parseNode(addr.String())
}

// parsePrefix reads a CIDR or a single address; v4-mapped ones are the IPv4 ones, as addresses are.
func parsePrefix(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return netip.Prefix{}, err
		}
		a = a.Unmap().WithZone("")
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, err
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return p, fmt.Errorf("%s has more in it than IPv4 addresses in IPv6 form", s)
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), nil
}

// parseNode reads an address as proxies and net write it, without its port and zone: 192.0.2.1, 192.0.2.1:80, 2001:db8::1,
// [2001:db8::1], [2001:db8::1%eth0]:80. A v4-mapped one is the IPv4 address.
func parseNode(s string) (netip.Addr, bool) {
	v6 := false
	if strings.HasPrefix(s, "[") {
		end := strings.IndexByte(s, ']')
		if end < 0 || end+1 < len(s) && !isPort(s[end+1:]) {
			return netip.Addr{}, false
		}
		s, v6 = s[1:end], true
	} else if i := strings.IndexByte(s, ':'); i >= 0 && i == strings.LastIndexByte(s, ':') {
		if !isPort(s[i:]) {
			return netip.Addr{}, false
		}
		s = s[:i]
	}
	if i := strings.IndexByte(s, '%'); i >= 0 {
		if i == len(s)-1 {
			return netip.Addr{}, false
		}
		s, v6 = s[:i], true // before it is parsed: netip keeps a table of zones
	}
	a, err := netip.ParseAddr(s)
	if err != nil || v6 && !a.Is6() {
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// isPort says whether s is a colon and a port: up to five digits, or an obfuscated one as RFC 7239 has it.
func isPort(s string) bool {
	s, ok := strings.CutPrefix(s, ":")
	if !ok || s == "" {
		return false
	}
	if s[0] == '_' {
		return isToken(s[1:])
	}
	return len(s) <= 5 && strings.Trim(s, "0123456789") == ""
}

// isToken says whether s is a token of HTTP (RFC 9110, 5.6.2).
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := 'a' <= c|0x20 && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}
