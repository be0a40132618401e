package httplimit_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// fixed is a Key that is always the same; "" is none.
func fixed(key string) httplimit.Key {
	return httplimit.KeyFunc(func(*http.Request) (string, bool) { return key, key != "" })
}

func TestKeys(t *testing.T) {
	matched := func(method, pattern string) *http.Request {
		r := httptest.NewRequest(method, "/items/7?q=1", nil)
		r.Pattern = pattern
		return r
	}
	odd := matched("GET", "/x")
	odd.Method = "BREW"
	for _, tc := range []struct {
		name string
		key  httplimit.Key
		r    *http.Request
		want string // "": no key
	}{
		{"header", httplimit.Header("x-api-key"), request("", "X-Api-Key: k1"), "k1"},
		{"several header lines", httplimit.Header("X-Api-Key"), request("", "X-Api-Key: k1", "X-Api-Key: k2"), ""},
		{"the same line twice", httplimit.Header("X-Api-Key"), request("", "X-Api-Key: k1", "X-Api-Key: k1"), ""},
		{"no header", httplimit.Header("X-Api-Key"), request(""), ""},
		{"an empty header", httplimit.Header("X-Api-Key"), request("", "X-Api-Key: "), ""},
		{"an empty header before another", httplimit.Header("X-Api-Key"), request("", "X-Api-Key: ", "X-Api-Key: k2"), ""},
		{"host", httplimit.Header("host"), request(""), "example.com"},
		{"cookie", httplimit.Cookie("sid"), request("", "Cookie: a=b; sid=s1"), "s1"},
		{"a cookie twice", httplimit.Cookie("sid"), request("", "Cookie: sid=s1; a=b; sid=s2"), ""},
		{"a cookie in two lines", httplimit.Cookie("sid"), request("", "Cookie: sid=s1", "Cookie: sid=s1"), ""},
		{"cookies in two lines", httplimit.Cookie("sid"), request("", "Cookie: a=b", "Cookie: sid=s1"), "s1"},
		{"no cookie", httplimit.Cookie("sid"), request("", "Cookie: a=b"), ""},
		{"an empty cookie", httplimit.Cookie("sid"), request("", "Cookie: sid="), ""},
		{"a pattern with its method", httplimit.Route(), matched("GET", "GET /items/{id}"), "GET /items/{id}"},
		{"HEAD of it is the same route", httplimit.Route(), matched("HEAD", "GET /items/{id}"), "GET /items/{id}"},
		{"a tab behind the method", httplimit.Route(), matched("GET", "GET\t/x"), "GET\t/x"},
		{"a pattern without a method", httplimit.Route(), matched("POST", "/items/{id}"), "POST /items/{id}"},
		{"HEAD is GET", httplimit.Route(), matched("HEAD", "/items/{id}"), "GET /items/{id}"},
		{"a method made up", httplimit.Route(), odd, "* /x"},
		{"a space in a path", httplimit.Route(), matched("GET", "/a b"), "GET /a b"},
		{"a host", httplimit.Route(), matched("GET", "example.com/x"), "GET example.com/x"},
		{"no pattern", httplimit.Route(), matched("GET", ""), ""},
		{"join", httplimit.Join(fixed("ab"), fixed("c:")), request(""), "2:ab2:c:"},
		{"join within a join", httplimit.Join(httplimit.Join(fixed("a")), fixed("b")), request(""), "3:1:a1:b"},
		{"a join that lacks a part", httplimit.Join(fixed("a"), fixed("")), request(""), ""},
		{"a part of no bytes", httplimit.Join(fixed("a"), httplimit.KeyFunc(func(*http.Request) (string, bool) { return "", true })), request(""), ""},
	} {
		if key, ok := tc.key.Of(tc.r); key != tc.want || ok != (tc.want != "") {
			t.Errorf("%s: got %q, %v, want %q", tc.name, key, ok, tc.want)
		}
	}
}

func TestKeyFaults(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1, time.Second))
	keys := []httplimit.Key{nil, httplimit.KeyFunc(nil), httplimit.Header(""), httplimit.Header("a:b"), httplimit.Cookie("ü"), httplimit.Join()}
	for _, k := range keys {
		if _, err := httplimit.New(l, k); !errors.Is(err, tierlimit.ErrConfig) {
			t.Errorf("%#v: got %v, want ErrConfig", k, err)
		}
	}
	if _, err := httplimit.New(l, httplimit.Join(keys...)); err == nil || strings.Count(err.Error(), "\n")+1 != len(keys) {
		t.Errorf("joined they have these faults, want %d:\n%v", len(keys), err)
	}
}

// What is changed in the caller's slice afterwards does not change the key.
func TestJoinKeepsItsOwn(t *testing.T) {
	parts := []httplimit.Key{fixed("a"), fixed("b")}
	k := httplimit.Join(parts...)
	parts[0] = fixed("x")
	if key, _ := k.Of(request("")); key != "1:a1:b" {
		t.Errorf("got %q", key)
	}
}

// Two joins give the same key only for the same parts, cut at the same places.
func FuzzJoin(f *testing.F) {
	f.Add("a", "bc", "ab", "c")
	f.Add("1:a", "b", "1", ":a1:b")
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		of := func(parts ...string) string {
			keys := make([]httplimit.Key, len(parts))
			for i, p := range parts {
				keys[i] = fixed(p)
			}
			key, ok := httplimit.Join(keys...).Of(nil)
			if ok == slices.Contains(parts, "") || ok == (key == "") {
				t.Fatalf("%q has the key %q, %v", parts, key, ok)
			}
			return key
		}
		lists := [][]string{{a, b}, {c, d}, {a}, {c}, {a, b, c}, {b, a}, {a + b}, {a, b + c}, {a + b, c}}
		for i, x := range lists {
			for _, y := range lists[i+1:] {
				if kx, ky := of(x...), of(y...); kx != "" && (kx == ky) != slices.Equal(x, y) {
					t.Fatalf("%q and %q: %q and %q", x, y, kx, ky)
				}
			}
		}
	})
}
