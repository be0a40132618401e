package grpclimit_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/tierlimit/tierlimit/grpclimit"
)

// parts are the fields of s, which commas divide; a backslash makes the byte after it part of a field.
func parts(s string) []string {
	out := []string{""}
	for i := 0; i < len(s); i++ {
		switch last := &out[len(out)-1]; {
		case s[i] == ',':
			out = append(out, "")
		case s[i] == '\\' && i+1 < len(s):
			i++
			*last += s[i : i+1]
		default:
			*last += s[i : i+1]
		}
	}
	return out
}

func joined(values []string) string {
	var keys []grpclimit.Key
	for _, v := range values {
		keys = append(keys, grpclimit.KeyFunc(func(context.Context, grpclimit.Call) (string, bool) { return v, true }))
	}
	key, _ := grpclimit.Join(keys...).Of(context.Background(), grpclimit.Call{})
	return key
}

// Two lists make the same key only if they are the same list, of whatever length each is; one with a part of no bytes makes none.
func FuzzJoin(f *testing.F) {
	f.Add("a,b", "ab")
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := parts(a), parts(b)
		for _, list := range [][]string{x, y} {
			if (joined(list) == "") != slices.Contains(list, "") {
				t.Fatalf("%q makes the key %q", list, joined(list))
			}
		}
		if joined(x) != "" && (joined(x) == joined(y)) != slices.Equal(x, y) {
			t.Errorf("%q and %q make the keys %q and %q", x, y, joined(x), joined(y))
		}
	})
}

// An address is the same with a port, in brackets and mapped into IPv6, never has a zone, and its key reads back to a network that
// holds it.
func FuzzClientIP(f *testing.F) {
	f.Add("192.0.2.1:80")
	f.Fuzz(func(t *testing.T, s string) {
		a, ok := grpclimit.ParseNode(s)
		if !ok {
			if _, err := netip.ParseAddr(s); err == nil {
				t.Fatalf("%q is an address", s)
			}
			return
		}
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() {
			t.Fatalf("%q is read as %v", s, a)
		}
		same := []string{a.String(), netip.AddrPortFrom(a, 65535).String(), "[" + netip.AddrFrom16(a.As16()).String() + "]:0"}
		if a.Is6() {
			same = append(same, "["+a.String()+"]", a.String()+"%zone")
		}
		for _, other := range same {
			if b, ok := grpclimit.ParseNode(other); !ok || a != b {
				t.Errorf("%q is read as %v, %q as %v", s, a, other, b)
			}
		}
		key, ok := grpclimit.ClientIP().Of(from(text(s), nil), grpclimit.Call{})
		if !ok {
			t.Fatalf("%q has no key", s)
		}
		if b := a.As16(); a.Is6() && netip.MustParsePrefix("64:ff9b::/96").Contains(a) {
			a = netip.AddrFrom4([4]byte(b[12:]))
		}
		network, err := netip.ParsePrefix(key)
		if !strings.Contains(key, "/") {
			var alone netip.Addr
			alone, err = netip.ParseAddr(key)
			network = netip.PrefixFrom(alone, alone.BitLen())
		}
		if err != nil || !network.Contains(a) || a.Is4() != (network.Bits() == 32) {
			t.Errorf("%q has the key %q, %v", s, key, err)
		}
	})
}

// What a pattern does not fit it does not limit, and what holds is the most specific that fits.
func FuzzMethod(f *testing.F) {
	f.Add("/a.B/C,/a.B/*,*", "/a.B/C")
	f.Fuzz(func(t *testing.T, list, method string) {
		patterns := parts(list)
		got, ok := grpclimit.Find(patterns, method)
		if !ok && got != "" {
			return // not patterns
		}
		slashed := "/" + strings.TrimPrefix(method, "/")
		service := slashed[:strings.LastIndexByte(slashed, '/')] + "/*"
		want := ""
		for _, p := range []string{"*", service, slashed} {
			if slices.Contains(patterns, p) {
				want = p
			}
		}
		if got != want || ok != (want != "") {
			t.Errorf("%q among %q: got %q, %v, want %q", method, patterns, got, ok, want)
		}
	})
}
