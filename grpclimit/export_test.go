package grpclimit

import "net/netip"

// ParseAddress is parseAddress, for its fuzz target.
func ParseAddress(s string) (netip.Addr, bool) { return parseAddress(s) }

// Find is the pattern that holds for a method.
func Find(patterns []string, method string) (string, bool) {
	var t table[string]
	for _, p := range patterns {
		if wrong := t.add(p, p); wrong != "" {
			return wrong, false
		}
	}
	return t.find(method)
}
