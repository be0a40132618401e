package grpclimit

import (
	"fmt"
	"strings"
)

// A table finds what belongs to a method. The most specific pattern wins: the method, then its service, then everything.
type table[T any] struct {
	methods  map[string]T // "pkg.Service/Method", without the leading slash
	services map[string]T // "pkg.Service"
	rest     T
	hasRest  bool
}

// find takes a full method with or without its leading slash: old servers of grpc-go ran a call that lacked it, and a rule that does not
// know it would have been walked around. It does not allocate.
func (t *table[T]) find(fullMethod string) (T, bool) {
	method := strings.TrimPrefix(fullMethod, "/")
	if v, ok := t.methods[method]; ok {
		return v, true
	}
	// At the last slash, as grpc-go divides them.
	if slash := strings.LastIndexByte(method, '/'); slash >= 0 {
		if v, ok := t.services[method[:slash]]; ok {
			return v, true
		}
	}
	return t.rest, t.hasRest
}

// add puts v under a pattern: "/pkg.Service/Method", "/pkg.Service/*" or "*". It returns what is wrong with the pattern, or "".
func (t *table[T]) add(pattern string, v T) string {
	if pattern == "*" {
		t.rest, t.hasRest = v, true
		return ""
	}
	path, found := strings.CutPrefix(pattern, "/")
	service, method, divided := strings.Cut(path, "/")
	if !found || !divided || !validName(service) || method != "*" && !validName(method) {
		return fmt.Sprintf("the pattern %q is none of /pkg.Service/Method, /pkg.Service/* and *", pattern)
	}
	if t.methods == nil {
		t.methods, t.services = map[string]T{}, map[string]T{}
	}
	if method == "*" {
		t.services[service] = v
	} else {
		t.methods[path] = v
	}
	return ""
}

// validName says whether s can be the name of a service or a method: printable ASCII without blanks, "/" and "*". gRPC allows more
// than protobuf names have, so no more is asked.
func validName(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f || c == '/' || c == '*' {
			return false
		}
	}
	return s != ""
}
