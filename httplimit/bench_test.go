package httplimit_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// nowhere is a ResponseWriter that costs nothing; its header is new for each response, as on a server.
type nowhere struct{ header http.Header }

func (w *nowhere) Header() http.Header         { return w.header }
func (w *nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (w *nowhere) WriteHeader(int)             {}

// subjects are a handler without the middleware and with it, in its usual forms.
func subjects(tb testing.TB) map[string]http.Handler {
	plenty, none := tierlimit.TokenBucket(1e15, time.Second), tierlimit.TokenBucket(1, 10*365*24*time.Hour)
	bare := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	of := func(limit tierlimit.Limit, key httplimit.Key, opts ...httplimit.Option) http.Handler {
		_, l := local(tb, limit)
		return middleware(tb, l, key, opts...).Handler(bare)
	}
	ip, proxied := httplimit.ClientIP(), httplimit.ClientIP(httplimit.TrustedProxies("10.0.0.0/8"))
	return map[string]http.Handler{
		"bare":      bare,
		"ip":        of(plenty, ip),
		"proxied":   of(plenty, proxied),
		"noheaders": of(plenty, ip, httplimit.WithoutHeaders()),
		"header":    of(plenty, httplimit.Header("X-Api-Key")),
		"join":      of(plenty, httplimit.Join(httplimit.Header("X-Api-Key"), ip)),
		"pk":        of(plenty, ip, httplimit.WithPartitionKey([]byte("0123456789abcdef"))),
		"denied":    of(none, ip),
	}
}

func benchRequest() *http.Request {
	return request("10.0.0.1:1234", "X-Forwarded-For: 198.51.100.1, 203.0.113.9", "X-Api-Key: k1", "User-Agent: bench", "Accept: */*")
}

func BenchmarkHandler(b *testing.B) {
	for _, name := range []string{"bare", "ip", "proxied", "noheaders", "header", "join", "pk", "denied"} {
		b.Run("impl="+name, func(b *testing.B) {
			h, r := subjects(b)[name], benchRequest()
			h.ServeHTTP(&nowhere{http.Header{}}, r)
			b.ReportAllocs()
			for b.Loop() {
				h.ServeHTTP(&nowhere{http.Header{}}, r)
			}
		})
	}
}

// On a server over the loopback, one request after another on one connection: what the middleware adds to a whole request.
func BenchmarkServer(b *testing.B) {
	for _, name := range []string{"bare", "ip"} {
		b.Run("impl="+name, func(b *testing.B) {
			server := httptest.NewServer(subjects(b)[name])
			defer server.Close()
			client := server.Client()
			b.ReportAllocs()
			for b.Loop() {
				res, err := client.Get(server.URL)
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
		})
	}
}

// The allocations that the middleware adds to a bare handler: the key; the value of RateLimit, a slice for it and RateLimit-Policy, and the map they
// are in; the request and its context with the charge.
func TestAllocations(t *testing.T) {
	most := map[string]float64{"bare": 0, "ip": 6, "proxied": 6, "noheaders": 3, "header": 5, "join": 7, "pk": 7, "denied": 8}
	all := subjects(t)
	r := benchRequest()
	count := func(h http.Handler) float64 {
		h.ServeHTTP(&nowhere{http.Header{}}, r)
		return testing.AllocsPerRun(200, func() { h.ServeHTTP(&nowhere{http.Header{}}, r) })
	}
	bare := count(all["bare"])
	for name, h := range all {
		if name == "pk" && raceEnabled {
			continue // a sync.Pool forgets at random then
		}
		if n := count(h) - bare; n > most[name] {
			t.Errorf("%s: %v allocations more than a bare handler, want at most %v", name, n, most[name])
		}
	}
}
