package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// limiter is one without Redis; tierlimit.New makes one for a fleet.
func limiter(limit tierlimit.Limit) *tierlimit.Limiter {
	h, err := tierlimit.NewLocal()
	if err != nil {
		panic(err)
	}
	l, err := h.Limiter("api", limit)
	if err != nil {
		panic(err)
	}
	return l
}

func build(l *tierlimit.Limiter, key httplimit.Key, opts ...httplimit.Option) *httplimit.Middleware {
	m, err := httplimit.New(l, key, opts...)
	if err != nil {
		panic(err)
	}
	return m
}

// get is one request from an address, with header lines.
func get(h http.Handler, path, from string, lines ...string) *httptest.ResponseRecorder {
	r := request(from, lines...)
	r.URL.Path = path
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })

func Example() {
	hybrid, err := tierlimit.NewLocal() // one process; tierlimit.New(rdb) for a fleet
	if err != nil {
		fmt.Println(err)
		return
	}
	defer hybrid.Close(context.Background())
	api, err := hybrid.Limiter("api", tierlimit.TokenBucket(2, time.Minute))
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := httplimit.New(api, httplimit.ClientIP(httplimit.TrustedProxies("10.0.0.0/8")))
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("GET /items/{id}", m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "item", r.PathValue("id"))
	})))

	for range 3 {
		w := get(mux, "/items/7", "10.0.0.1:5000", "X-Forwarded-For: 203.0.113.9")
		fmt.Println(w.Code, w.Header().Get("RateLimit"))
	}
	// Output:
	// 200 "api";r=1;t=30
	// 200 "api";r=0;t=30
	// 429 "api";r=0;t=30
}

func ExampleNew() {
	// All faults at once, those of the key too.
	_, err := httplimit.New(nil, httplimit.ClientIP(httplimit.TrustedProxies("0.0.0.0/0")), httplimit.WithMissingStatus(200))
	fmt.Println(errors.Is(err, tierlimit.ErrConfig))
	fmt.Println(err)
	// Output:
	// true
	// tierlimit: invalid configuration: the Limiter is nil
	// tierlimit: invalid configuration: TrustedProxies: 0.0.0.0/0 trusts everybody
	// tierlimit: invalid configuration: WithMissingStatus is 200, want 400 to 599
}

func ExampleMiddleware_Handler() {
	m := build(limiter(tierlimit.TokenBucket(1, time.Minute)), httplimit.ClientIP())
	limited := m.Handler(hello) // m.Handler is what routers take as a middleware
	w := get(limited, "/", "203.0.113.9:80")
	fmt.Println(w.Code, w.Body)
	w = get(limited, "/", "203.0.113.9:81")
	fmt.Println(w.Code, w.Header().Get("Content-Type"))
	fmt.Print(w.Body)
	// Output:
	// 200 hello
	// 429 application/problem+json
	// {"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"The rate limit is exceeded","status":429,"violated-policies":["api"]}
}

func ExampleMiddleware_Stats() {
	m := build(limiter(tierlimit.TokenBucket(1, time.Minute)), httplimit.Header("X-Api-Key"))
	h := m.Handler(hello)
	get(h, "/", "", "X-Api-Key: k1")
	get(h, "/", "", "X-Api-Key: k1")
	get(h, "/", "")
	s := m.Stats()
	fmt.Println(s.Allowed, s.Denied, s.MissingKeys)
	// Output: 1 1 1
}

func ExampleClientIP() {
	key := httplimit.ClientIP()
	fmt.Println(key.Of(request("203.0.113.9:5000")))
	fmt.Println(key.Of(request("[2001:db8:1:2:aaaa::1]:5000")))
	fmt.Println(key.Of(request("[::ffff:203.0.113.9]:5000")))
	fmt.Println(key.Of(request("203.0.113.9:5000", "X-Forwarded-For: 198.51.100.1"))) // not believed
	// Output:
	// 203.0.113.9 true
	// 2001:db8:1:2::/64 true
	// 203.0.113.9 true
	// 203.0.113.9 true
}

func ExampleTrustedProxies() {
	key := httplimit.ClientIP(httplimit.TrustedProxies("10.0.0.0/8"))
	// What stands left of the client's address it has written itself.
	fmt.Println(key.Of(request("10.0.0.1:5000", "X-Forwarded-For: 198.51.100.1, 203.0.113.9, 10.2.2.2")))
	// Output: 203.0.113.9 true
}

func ExampleTrustedHeader() {
	key := httplimit.ClientIP(httplimit.TrustedProxies("10.0.0.0/8"), httplimit.TrustedHeader("Forwarded"))
	fmt.Println(key.Of(request("10.0.0.1:5000", `Forwarded: for="[2001:db8:1:2::9]:4711";proto=https`)))
	// Output: 2001:db8:1:2::/64 true
}

func ExampleIPv6Prefix() {
	key := httplimit.ClientIP(httplimit.IPv6Prefix(56))
	fmt.Println(key.Of(request("[2001:db8:1:2ff::1]:5000")))
	// Output: 2001:db8:1:200::/56 true
}

func ExampleNAT64() {
	key := httplimit.ClientIP(httplimit.NAT64("2001:db8:64::/96"))
	fmt.Println(key.Of(request("[2001:db8:64::203.0.113.9]:5000")))
	fmt.Println(key.Of(request("[64:ff9b::203.0.113.9]:5000"))) // always known
	// Output:
	// 203.0.113.9 true
	// 203.0.113.9 true
}

func ExampleHeader() {
	fmt.Println(httplimit.Header("X-Api-Key").Of(request("", "X-Api-Key: k1")))
	// Output: k1 true
}

func ExampleCookie() {
	fmt.Println(httplimit.Cookie("session").Of(request("", "Cookie: session=s1")))
	// Output: s1 true
}

func ExampleRoute() {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /items/{id}", func(_ http.ResponseWriter, r *http.Request) { fmt.Println(httplimit.Route().Of(r)) })
	get(mux, "/items/7", "")
	// Output: GET /items/{id} true
}

func ExampleJoin() {
	key := httplimit.Join(httplimit.Header("X-Api-Key"), httplimit.ClientIP())
	fmt.Println(key.Of(request("203.0.113.9:80", "X-Api-Key: k1")))
	// Output: 2:k111:203.0.113.9 true
}

func ExampleKeyFunc() {
	type user struct{} // what an authenticating middleware has put into the context
	key := httplimit.KeyFunc(func(r *http.Request) (string, bool) {
		name, ok := r.Context().Value(user{}).(string)
		return name, ok
	})
	r := request("")
	fmt.Println(key.Of(r.WithContext(context.WithValue(r.Context(), user{}, "alice"))))
	// Output: alice true
}

func ExampleFromContext() {
	m := build(limiter(tierlimit.TokenBucket(10, time.Minute)), httplimit.ClientIP())
	h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		charge := httplimit.FromContext(r.Context())
		fmt.Println(charge.Limiter().Name(), charge.Cost(), charge.Result())
	}))
	get(h, "/", "203.0.113.9:80")
	// Output: api 1 allowed 9/10 (local)
}

func ExampleRefund() {
	m := build(limiter(tierlimit.TokenBucket(10, time.Hour)), httplimit.ClientIP())
	h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("If-None-Match") == `"v1"` {
			if err := httplimit.Refund(r.Context()); err != nil { // an answer that costs nothing is not counted
				fmt.Println(err)
			}
			w.WriteHeader(http.StatusNotModified)
		}
	}))
	for range 20 {
		get(h, "/", "203.0.113.9:80", `If-None-Match: "v1"`)
	}
	w := get(h, "/", "203.0.113.9:80")
	fmt.Println(w.Code, w.Header().Get("RateLimit"))
	// Output: 200 "api";r=9;t=360
}

func ExampleCharge_Refund() {
	m := build(limiter(tierlimit.TokenBucket(100, time.Hour)), httplimit.ClientIP(),
		httplimit.WithCost(func(*http.Request) int64 { return 50 })) // the most a request can take
	h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		taken := int64(20)
		charge := httplimit.FromContext(r.Context())
		if err := charge.Refund(r.Context(), charge.Cost()-taken); err != nil {
			fmt.Println(err)
		}
	}))
	get(h, "/", "203.0.113.9:80")
	fmt.Println(get(h, "/", "203.0.113.9:80").Header().Get("RateLimit"))
	// Output: "api";r=30;t=36
}

func ExampleCharge_Outer() {
	hybrid, _ := tierlimit.NewLocal()
	defer hybrid.Close(context.Background())
	everyone, _ := hybrid.Limiter("everyone", tierlimit.TokenBucket(1000, time.Second))
	each, _ := hybrid.Limiter("each", tierlimit.TokenBucket(10, 10*time.Second))
	all := httplimit.KeyFunc(func(*http.Request) (string, bool) { return "all", true })
	h := build(each, httplimit.ClientIP()).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		for c := httplimit.FromContext(r.Context()); c != nil; c = c.Outer() {
			fmt.Println(c.Limiter().Name(), c.Result().Remaining)
		}
	}))
	w := get(build(everyone, all).Handler(h), "/", "203.0.113.9:80")
	fmt.Println(w.Header().Values("RateLimit"))
	// Output:
	// each 9
	// everyone 999
	// ["everyone";r=999;t=1 "each";r=9;t=1]
}

func ExampleWithMissingKey() {
	l := limiter(tierlimit.TokenBucket(1, time.Minute))
	for _, policy := range []httplimit.MissingKey{httplimit.MissingDeny, httplimit.MissingCommon, httplimit.MissingAllow} {
		h := build(l, httplimit.Header("X-Api-Key"), httplimit.WithMissingKey(policy)).Handler(hello)
		fmt.Println(policy, get(h, "/", "").Code, get(h, "/", "").Code)
	}
	// Output:
	// deny 400 400
	// common 200 429
	// allow 200 200
}

func ExampleWithMissingStatus() {
	h := build(limiter(tierlimit.TokenBucket(1, time.Minute)), httplimit.Header("Authorization"), httplimit.WithMissingStatus(http.StatusUnauthorized)).Handler(hello)
	fmt.Println(get(h, "/", "").Code)
	// Output: 401
}

func ExampleWithErrorStatus() {
	hybrid, _ := tierlimit.NewLocal()
	l, _ := hybrid.Limiter("api", tierlimit.TokenBucket(1, time.Minute))
	h := build(l, httplimit.ClientIP(), httplimit.WithErrorStatus(http.StatusInternalServerError)).Handler(hello)
	hybrid.Close(context.Background())
	fmt.Println(get(h, "/", "203.0.113.9:80").Code)
	// Output: 500
}

func ExampleWithCost() {
	m := build(limiter(tierlimit.TokenBucket(10, 10*time.Minute)), httplimit.ClientIP(), httplimit.WithCost(func(r *http.Request) int64 {
		if r.URL.Path == "/search" {
			return 5
		}
		return 1
	}))
	h := m.Handler(hello)
	fmt.Println(get(h, "/search", "203.0.113.9:80").Header().Get("RateLimit"))
	fmt.Println(get(h, "/", "203.0.113.9:80").Header().Get("RateLimit"))
	// Output:
	// "api";r=5;t=60
	// "api";r=4;t=60
}

func ExampleWithSkip() {
	h := build(limiter(tierlimit.TokenBucket(0, time.Minute)), httplimit.ClientIP(),
		httplimit.WithSkip(func(r *http.Request) bool { return r.URL.Path == "/healthz" })).Handler(hello)
	fmt.Println(get(h, "/healthz", "203.0.113.9:80").Code, get(h, "/", "203.0.113.9:80").Code)
	// Output: 200 429
}

func ExampleWithDenyHandler() {
	h := build(limiter(tierlimit.TokenBucket(0, time.Minute)), httplimit.ClientIP(),
		httplimit.WithDenyHandler(func(w http.ResponseWriter, _ *http.Request, d httplimit.Denial) {
			w.WriteHeader(d.Status)
			fmt.Fprintf(w, "refused: %v", d.Reason)
		})).Handler(hello)
	w := get(h, "/", "203.0.113.9:80")
	fmt.Println(w.Code, w.Body)
	// Output: 429 refused: limit
}

func ExampleWithoutBody() {
	h := build(limiter(tierlimit.TokenBucket(0, time.Minute)), httplimit.ClientIP(), httplimit.WithoutBody()).Handler(hello)
	w := get(h, "/", "203.0.113.9:80")
	fmt.Println(w.Code, w.Body.Len())
	// Output: 429 0
}

func ExampleWithoutHeaders() {
	h := build(limiter(tierlimit.TokenBucket(1, time.Minute)), httplimit.ClientIP(), httplimit.WithoutHeaders()).Handler(hello)
	fmt.Println(get(h, "/", "203.0.113.9:80").Header().Values("RateLimit"), get(h, "/", "203.0.113.9:80").Header().Get("Retry-After"))
	// Output: [] 60
}

func ExampleWithLegacyHeaders() {
	h := build(limiter(tierlimit.TokenBucket(10, time.Minute)), httplimit.ClientIP(), httplimit.WithLegacyHeaders()).Handler(hello)
	w := get(h, "/", "203.0.113.9:80")
	fmt.Println(w.Header().Get("X-RateLimit-Limit"), w.Header().Get("X-RateLimit-Remaining"))
	// Output: 10 9
}

func ExampleWithQuotaUnit() {
	h := build(limiter(tierlimit.TokenBucket(1<<20, time.Minute)), httplimit.ClientIP(), httplimit.WithQuotaUnit("content-bytes"),
		httplimit.WithCost(func(r *http.Request) int64 { return max(1, r.ContentLength) })).Handler(hello)
	fmt.Println(get(h, "/", "203.0.113.9:80").Header().Get("RateLimit-Policy"))
	// Output: "api";q=1048576;w=60;qu="content-bytes"
}

func ExampleWithPartitionKey() {
	h := build(limiter(tierlimit.TokenBucket(10, time.Minute)), httplimit.ClientIP(),
		httplimit.WithPartitionKey([]byte("16 random bytes, or more"))).Handler(hello)
	fmt.Println(get(h, "/", "203.0.113.9:80").Header().Get("RateLimit"))
	// Output: "api";r=9;t=6;pk=:PPGzj2/tz5YQ8q6x9JxLxg==:
}

func ExampleWithDelay() {
	hybrid, err := tierlimit.NewLocal()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer hybrid.Close(context.Background())
	even, err1 := hybrid.Limiter("even", tierlimit.LeakyBucket(100, time.Second))
	m, err2 := httplimit.New(even, httplimit.ClientIP(), httplimit.WithDelay(1000, time.Second))
	if err := errors.Join(err1, err2); err != nil {
		fmt.Println(err)
		return
	}
	h := m.Handler(hello)
	began := time.Now()
	for range 4 { // 10 ms apart
		get(h, "/", "203.0.113.9:80")
	}
	fmt.Println(time.Since(began) >= 29*time.Millisecond)
	// Output: true
}
