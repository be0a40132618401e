package httplimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// A ClientIPOption configures ClientIP.
type ClientIPOption interface{ applyIP(*clientIP) }

type clientIPOption func(*clientIP)

func (f clientIPOption) applyIP(c *clientIP) { f(c) }

const (
	xForwardedFor = "X-Forwarded-For"
	forwarded     = "Forwarded"
	defaultIPv6   = 64
)

// clientIP is the Key that ClientIP makes.
type clientIP struct {
	trusted []netip.Prefix
	header  string // canonical
	named   bool   // by TrustedHeader
	bits    int    // of IPv6
	nat64   []netip.Prefix
	wrong   []error
}

// ClientIP is the address a request comes from: an IPv4 address ("203.0.113.9"), or the /64 of an IPv6 address ("2001:db8:1:2::/64"),
// since a host has a whole /64 to choose from. A client has the same key as by ClientIP of grpclimit. Ports and zones are stripped; an IPv4 address that is written as IPv6, v4-mapped or by
// NAT64 (64:ff9b::/96), is the IPv4 address.
//
// It is the peer of the connection, Request.RemoteAddr, unless that is one of TrustedProxies. Then the header of TrustedHeader is read
// from the right, all its lines as one list: each address was written by the hop behind it, so the client is the first that is not
// trusted itself, and what stands to the left of it is hearsay. Where the list ends, or holds something else than an address, the client
// is the last hop that is known. From a peer that is not trusted no header is looked at.
//
// A request whose peer has no address, as over a Unix socket, has no key. Faults of the options are ErrConfig, reported by New. Costs one
// allocation.
func ClientIP(opts ...ClientIPOption) Key {
	c := &clientIP{header: xForwardedFor, bits: defaultIPv6, nat64: []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96")}}
	for _, o := range opts {
		if o == nil {
			c.wrong = append(c.wrong, configFault("a nil ClientIPOption"))
			continue
		}
		o.applyIP(c)
	}
	if c.bits < 1 || c.bits > 128 {
		c.wrong = append(c.wrong, configFault("IPv6Prefix is %d, want 1 to 128", c.bits))
	}
	if c.named && !isToken(c.header) {
		c.wrong = append(c.wrong, configFault("TrustedHeader %.80q is no header name", c.header))
	}
	if c.named && len(c.trusted) == 0 {
		c.wrong = append(c.wrong, configFault("TrustedHeader is never read without TrustedProxies"))
	}
	return c
}

// TrustedProxies names the proxies whose word is taken for who their client is, as CIDRs or single addresses: all of them that can be
// between the client and this process, and nothing else. Whoever sends from one of these addresses can pretend to be anybody. Default none;
// given several times they add up. A prefix of length 0 is ErrConfig.
func TrustedProxies(cidrs ...string) ClientIPOption {
	return clientIPOption(func(c *clientIP) {
		for _, s := range cidrs {
			p, err := parsePrefix(s)
			switch {
			case err != nil:
				c.wrong = append(c.wrong, configFault("TrustedProxies: %v", err))
			case p.Bits() == 0:
				c.wrong = append(c.wrong, configFault("TrustedProxies: %s trusts everybody", s))
			default:
				c.trusted = append(c.trusted, p)
			}
		}
	})
}

// TrustedHeader names the header that the trusted proxies write: "X-Forwarded-For" (the default), "Forwarded" (RFC 7239), or another that
// holds an address or a list of them, such as "X-Real-Ip". One only: a proxy passes on what it does not write, so a second header is the
// client's own word.
func TrustedHeader(name string) ClientIPOption {
	return clientIPOption(func(c *clientIP) { c.header, c.named = http.CanonicalHeaderKey(name), true })
}

// IPv6Prefix sets how many bits of an IPv6 address count, 1 to 128; default 64, and with 128 the key is the address. Providers hand out /56 and /48 too: the shorter, the fewer
// keys one client has, and the more clients may share one.
func IPv6Prefix(bits int) ClientIPOption {
	return clientIPOption(func(c *clientIP) { c.bits = bits })
}

// NAT64 names prefixes of one's own network behind which IPv4 addresses stand (RFC 6052), besides 64:ff9b::/96; of 32, 40, 48, 56, 64 or
// 96 bits.
func NAT64(prefixes ...string) ClientIPOption {
	return clientIPOption(func(c *clientIP) {
		for _, s := range prefixes {
			p, err := netip.ParsePrefix(s)
			if err != nil {
				c.wrong = append(c.wrong, configFault("NAT64: %v", err))
				continue
			}
			switch p.Bits() {
			case 32, 40, 48, 56, 64, 96:
			default:
				c.wrong = append(c.wrong, configFault("NAT64: %s has %d bits, want 32, 40, 48, 56, 64 or 96", s, p.Bits()))
				continue
			}
			if p.Addr().Is4() || p.Addr().Is4In6() {
				c.wrong = append(c.wrong, configFault("NAT64: %s is no IPv6 prefix", s))
				continue
			}
			c.nat64 = append(c.nat64, p.Masked())
		}
	})
}

func (c *clientIP) faults() []error { return c.wrong }

func (c *clientIP) Of(r *http.Request) (string, bool) {
	a, ok := c.client(r)
	if !ok {
		return "", false
	}
	if a = c.unfold(a); a.Is4() {
		return a.String(), true
	}
	if c.bits == 128 {
		return a.String(), true
	}
	p, err := a.Prefix(c.bits)
	return p.String(), err == nil
}

// client walks from the peer towards the client for as long as those who speak are trusted.
func (c *clientIP) client(r *http.Request) (netip.Addr, bool) {
	at, ok := parseNode(r.RemoteAddr)
	if !ok || !c.trusts(at) {
		return at, ok
	}
	for _, line := range slices.Backward(r.Header[c.header]) {
		for rest, more := line, true; more; {
			var a netip.Addr
			a, rest, more, ok = c.last(rest)
			if !ok {
				return at, true
			}
			if at = a; !c.trusts(at) {
				return at, true
			}
		}
	}
	return at, true
}

// last takes the last address off a list; ok is false if what stands there is none.
func (c *clientIP) last(list string) (a netip.Addr, rest string, more, ok bool) {
	var element string
	if c.header == forwarded {
		element, rest, more = lastElement(list)
		if element, ok = forNode(element); !ok {
			return a, rest, more, false
		}
	} else if i := strings.LastIndexByte(list, ','); i >= 0 {
		element, rest, more = list[i+1:], list[:i], true
	} else {
		element = list
	}
	a, ok = parseNode(strings.Trim(element, " \t"))
	return a, rest, more, ok
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

// parseNode reads an address as proxies and net/http write it, without its port and zone: 192.0.2.1, 192.0.2.1:80, 2001:db8::1,
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
