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

// A PeerOption changes what Peer takes for one address.
type PeerOption interface{ applyPeer(*peerKey) }

type peerOption func(*peerKey)

func (f peerOption) applyPeer(k *peerKey) { f(k) }

// WithIPv4Prefix counts IPv4 addresses that share their first bits as one. From 1 to 32; default 32, each address apart.
func WithIPv4Prefix(bits int) PeerOption { return peerOption(func(k *peerKey) { k.bits4 = bits }) }

// WithIPv6Prefix counts IPv6 addresses that share their first bits as one. From 1 to 128; default 64, since one subscriber
// usually has at least that many. Link-local addresses, of which a /64 holds all, need 128.
func WithIPv6Prefix(bits int) PeerOption { return peerOption(func(k *peerKey) { k.bits6 = bits }) }

// WithTrustedProxies names the addresses of proxies of your own in front of the server. A call from one of them counts for the address
// that it forwards: x-forwarded-for is read from the right, all its lines as one list, up to the first address that is no such proxy.
// From anybody else the entry is ignored. A call without it counts for the proxy itself; an entry that is no address makes the key
// missing. Default: none. No prefixes, and one that is not valid, are faults that New lists.
func WithTrustedProxies(prefixes ...netip.Prefix) PeerOption {
	return peerOption(func(k *peerKey) {
		k.proxies = make([]netip.Prefix, 0, len(prefixes))
		for _, p := range prefixes {
			// Addresses are compared unmapped, so 10.0.0.0/8 has to be found under ::ffff:10.0.0.0/104, too.
			if p.Addr().Is4In6() && p.Bits() >= 96 {
				p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
			}
			k.proxies = append(k.proxies, p)
		}
	})
}

type peerKey struct {
	bits4, bits6 int
	proxies      []netip.Prefix // nil: not asked for
	nilOption    bool
}

// Peer is the IP address that the call comes from, without port and zone: "203.0.113.9", or the /64 of an IPv6 address,
// "2001:db8::/64". An IPv4 address inside an IPv6 one (::ffff:203.0.113.9) is the IPv4 address.
//
// The key is missing where the peer has no IP address, as on a Unix socket, whose clients cannot be told apart, and on bufconn; and on a
// client, whose peer is not known before the call. Behind a proxy all calls come from the proxy: see WithTrustedProxies. An option out
// of range is a fault that New lists.
func Peer(opts ...PeerOption) Key {
	k := peerKey{bits4: 32, bits6: 64}
	for _, o := range opts {
		if o == nil {
			k.nilOption = true
			continue
		}
		o.applyPeer(&k)
	}
	return k
}

func (k peerKey) faults() []string {
	var out []string
	if k.nilOption {
		out = append(out, "a PeerOption is nil")
	}
	if k.bits4 < 1 || k.bits4 > 32 {
		out = append(out, fmt.Sprintf("WithIPv4Prefix(%d), want 1 to 32", k.bits4))
	}
	if k.bits6 < 1 || k.bits6 > 128 {
		out = append(out, fmt.Sprintf("WithIPv6Prefix(%d), want 1 to 128", k.bits6))
	}
	if k.proxies != nil && len(k.proxies) == 0 {
		out = append(out, "WithTrustedProxies without a prefix")
	}
	for _, p := range k.proxies {
		if !p.IsValid() {
			out = append(out, "WithTrustedProxies: a prefix is not valid")
		}
	}
	return out
}

func (k peerKey) Key(ctx context.Context, c Call) (string, bool) {
	// A client's context may be that of the call it serves, whose peer is somebody else.
	if c.Client {
		return "", false
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", false
	}
	ip, ok := addressOf(p.Addr)
	if !ok {
		return "", false
	}
	if k.trusts(ip) {
		if ip, ok = k.forwarded(ip, metadataValues(ctx, c, "x-forwarded-for")); !ok {
			return "", false
		}
	}
	return k.text(ip)
}

func (k peerKey) trusts(ip netip.Addr) bool {
	return slices.ContainsFunc(k.proxies, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// forwarded is the rightmost address of the lines that is not a proxy's, else the leftmost, else ip.
func (k peerKey) forwarded(ip netip.Addr, lines []string) (netip.Addr, bool) {
	for _, line := range slices.Backward(lines) {
		for more := true; more; {
			entry := line
			comma := strings.LastIndexByte(line, ',')
			if more = comma >= 0; more {
				line, entry = line[:comma], line[comma+1:]
			}
			hop, ok := parseAddress(strings.Trim(entry, " \t"))
			if !ok {
				// Left of what a proxy garbled stands what the caller chose.
				return netip.Addr{}, false
			}
			if ip = hop; !k.trusts(ip) {
				return ip, true
			}
		}
	}
	return ip, true
}

// text is the key of an address, or of the network that it is counted in.
func (k peerKey) text(ip netip.Addr) (string, bool) {
	bits := k.bits6
	if ip.Is4() {
		bits = k.bits4
	}
	if bits == ip.BitLen() {
		return ip.String(), true
	}
	network, err := ip.Prefix(bits)
	if err != nil {
		return "", false
	}
	return network.String(), true
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
		return plain(a.AddrPort().Addr())
	case *net.UnixAddr:
		return netip.Addr{}, false // even if the path looks like an address
	}
	// A server within net/http has the address as text, and listeners of all kinds have types of their own.
	return parseAddress(addr.String())
}

// parseAddress reads an address with or without a port: "192.0.2.1", "192.0.2.1:80", "2001:db8::1", "[2001:db8::1]:80", "[2001:db8::1]".
func parseAddress(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddrPort(s); err == nil {
		return plain(a.Addr())
	}
	if inner, ok := strings.CutPrefix(s, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(inner, ":") {
			return netip.Addr{}, false
		}
		s = inner
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}, false
	}
	return plain(a)
}

// plain is a without its zone, an IPv4 address as such.
func plain(a netip.Addr) (netip.Addr, bool) { return a.WithZone("").Unmap(), a.IsValid() }
