package httplimit

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/tierlimit/tierlimit"
)

// A Key says what a request is counted as: who sends it, or what it asks for. ClientIP, Header, Cookie, Route and Join make one, KeyFunc
// turns a function into one. It must be safe for concurrent use.
type Key interface {
	// Of returns the key of r, any bytes. With ok false, or a key of no bytes, r has none: WithMissingKey says what happens then.
	Of(r *http.Request) (key string, ok bool)
}

// A KeyFunc is a function as a Key. It may look at r's context, so at what an authenticating middleware before has put there.
type KeyFunc func(r *http.Request) (key string, ok bool)

// Of calls f.
func (f KeyFunc) Of(r *http.Request) (key string, ok bool) { return f(r) }

// A checked is a Key that may have been given nonsense, which New reports.
type checked interface{ faults() []error }

func configFault(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{tierlimit.ErrConfig}, args...)...)
}

func keyFaults(k Key) []error {
	switch k := k.(type) {
	case nil:
		return []error{configFault("the Key is nil")}
	case KeyFunc:
		if k == nil {
			return []error{configFault("the KeyFunc is nil")}
		}
	case checked:
		return k.faults()
	}
	return nil
}

type header string

// Header is the value of that request header. A request without it, with an empty one, or with several lines of it has no key: where what
// verified the header before read another line than is counted, a client could add one that it is free to choose. "Host" is the host that is asked for. Whoever sends a request chooses its headers, and so may choose a new key each time: use it
// for what has been verified, such as an API key, or Join it with nothing that one client has many of. Any name that HTTP allows; another
// is ErrConfig, reported by New.
func Header(name string) Key { return header(http.CanonicalHeaderKey(name)) }

func (h header) Of(r *http.Request) (string, bool) {
	if h == "Host" { // net/http keeps it out of the headers
		return r.Host, r.Host != ""
	}
	if lines := r.Header[string(h)]; len(lines) == 1 {
		return lines[0], lines[0] != ""
	}
	return "", false
}

func (h header) faults() []error {
	if !isToken(string(h)) {
		return []error{configFault("Header %.80q is no header name", string(h))}
	}
	return nil
}

type cookie string

// Cookie is the value of that cookie. A request without it, with an empty one, or with several of that name has no key. What Header says of
// who chooses the value holds here too. A name that HTTP does not allow is ErrConfig, reported by New.
func Cookie(name string) Key { return cookie(name) }

func (c cookie) Of(r *http.Request) (string, bool) {
	found := r.CookiesNamed(string(c))
	if len(found) != 1 {
		return "", false
	}
	return found[0].Value, found[0].Value != ""
}

func (c cookie) faults() []error {
	if !isToken(string(c)) {
		return []error{configFault("Cookie %.80q is no cookie name", string(c))}
	}
	return nil
}

type route struct{}

// Route is the pattern that matched the request with its method, "GET /items/{id}": Request.Pattern, which ServeMux sets, and chi. So the
// middleware has to stand behind the router, around one handler; before it, and with a router that sets no pattern, a request has no key.
//
// A pattern that names its method is the key as it is. To another the request's method is added: HEAD counts as GET, as ServeMux routes
// it, and a method that RFC 9110 and RFC 5789 do not know counts as "*", so that making methods up makes no new keys.
func Route() Key { return route{} }

func (route) Of(r *http.Request) (string, bool) {
	if r.Pattern == "" {
		return "", false
	}
	// In a pattern of ServeMux a space ends the method; other routers may have one in a path.
	if i := strings.IndexAny(r.Pattern, " \t"); i >= 0 && !strings.Contains(r.Pattern[:i], "/") {
		return r.Pattern, true
	}
	switch r.Method {
	case "", http.MethodHead, http.MethodGet:
		return "GET " + r.Pattern, true
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodConnect, http.MethodOptions, http.MethodTrace:
		return r.Method + " " + r.Pattern, true
	}
	return "* " + r.Pattern, true
}

type join []Key

// Join counts by all of the keys together: each part goes into the key with its length before it ("3:abc"), so that two requests have the
// same key only if they agree in every part. A request that lacks one of them has no key. None at all is ErrConfig, reported by New.
func Join(keys ...Key) Key { return join(append([]Key(nil), keys...)) }

func (j join) Of(r *http.Request) (string, bool) {
	var scratch [128]byte
	joined := scratch[:0]
	for _, k := range j {
		part, ok := k.Of(r)
		if !ok || part == "" {
			return "", false
		}
		joined = appendPart(joined, part)
	}
	return string(joined), true
}

// appendPart adds a netstring: a length in decimal, a colon and the part. Whatever the parts are, their sequence can be read back.
func appendPart(joined []byte, part string) []byte {
	joined = strconv.AppendInt(joined, int64(len(part)), 10)
	joined = append(joined, ':')
	return append(joined, part...)
}

func (j join) faults() []error {
	if len(j) == 0 {
		return []error{configFault("Join joins nothing")}
	}
	var faults []error
	for _, k := range j {
		faults = append(faults, keyFaults(k)...)
	}
	return faults
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
