package grpclimit

import "net/netip"

// ParseNode is parseNode, for its fuzz target.
func ParseNode(s string) (netip.Addr, bool) { return parseNode(s) }

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
