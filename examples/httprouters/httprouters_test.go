package httprouters_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/go-chi/chi/v5"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/examples/httprouters"
	"github.com/tierlimit/tierlimit/httplimit"
)

var routers = map[string]struct {
	build func(*httplimit.Middleware, httprouters.Handlers) http.Handler
	item  string // the route key of GET /items/7
	find  string // of GET /search
}{
	"ServeMux": {httprouters.ServeMux, "GET /items/{id}", "GET /search"},
	"chi":      {httprouters.Chi, "GET /items/{id}", "GET /search"},
	"gin":      {httprouters.GinEngine, "GET /items/:id", "GET /search"},
	"echo":     {httprouters.Echo, "GET /items/:id", "GET /search"},
	"echo v4":  {httprouters.EchoV4Router, "GET /items/:id", "GET /search"},
}

func limiter(t *testing.T, name string, limit tierlimit.Limit) *tierlimit.Limiter {
	t.Helper()
	h, err := tierlimit.NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter(name, limit)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func middleware(t *testing.T, l *tierlimit.Limiter, key httplimit.Key, opts ...httplimit.Option) *httplimit.Middleware {
	t.Helper()
	m, err := httplimit.New(l, key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func do(t *testing.T, s *httptest.Server, method, path string, headers ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	res, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(body)
}

// field parses a header as a list of strings with parameters, which each of the two is, and returns the parameters of one of them.
func field(t *testing.T, res *http.Response, name, of string) *httpsfv.Params {
	t.Helper()
	list, err := httpsfv.UnmarshalList(res.Header.Values(name))
	if err != nil {
		t.Fatalf("%s %q: %v", name, res.Header.Values(name), err)
	}
	for _, member := range list {
		if item, ok := member.(httpsfv.Item); ok && item.Value == of {
			return item.Params
		}
	}
	t.Fatalf("%s %q has no string %q", name, res.Header.Values(name), of)
	return nil
}

func has(t *testing.T, p *httpsfv.Params, name string, want any) {
	t.Helper()
	if got, ok := p.Get(name); got != want || ok != (want != nil) {
		t.Errorf("%s is %v, want %v", name, got, want)
	}
}

// In every router: statuses, headers as a parser of structured fields reads them, keys by route, the charge in the handler, and a flush.
func TestRouters(t *testing.T) {
	for name, router := range routers {
		t.Run(name, func(t *testing.T) {
			l := limiter(t, "api", tierlimit.TokenBucket(3, 3*time.Hour))
			m := middleware(t, l, httplimit.Join(httplimit.Route(), httplimit.ClientIP()),
				httplimit.WithPartitionKey([]byte("0123456789abcdef")), httplimit.WithQuotaUnit(`a "unit"\`))
			answer := func(w http.ResponseWriter, r *http.Request) {
				if c := httplimit.FromContext(r.Context()); c.Limiter() != l || c.Cost() != 1 {
					t.Errorf("%s: no charge", r.URL.Path)
				}
				w.Header().Set("X-Own", "1")
				w.WriteHeader(http.StatusCreated)
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Errorf("flush: %v", err)
				}
				io.WriteString(w, "served")
			}
			s := httptest.NewServer(router.build(m, httprouters.Handlers{Item: answer, Search: answer}))
			defer s.Close()

			var pks []any
			for i, path := range []string{"/items/1", "/items/2", "/items/3"} { // one route
				res, body := do(t, s, http.MethodGet, path)
				if res.StatusCode != http.StatusCreated || body != "served" || res.Header.Get("X-Own") != "1" || res.Header.Get("Retry-After") != "" {
					t.Errorf("%s: got %d, %q, %v", path, res.StatusCode, body, res.Header)
				}
				policy, state := field(t, res, "RateLimit-Policy", "api"), field(t, res, "RateLimit", "api")
				has(t, policy, "q", int64(3))
				has(t, policy, "w", int64(3*3600))
				has(t, policy, "qu", `a "unit"\`)
				has(t, state, "r", int64(2-i))
				has(t, state, "t", int64(3600))
				pk, _ := state.Get("pk")
				if b, ok := pk.([]byte); !ok || len(b) != 16 {
					t.Errorf("pk is %v", pk)
				} else {
					pks = append(pks, string(b))
				}
			}
			if pks[0] != pks[1] || pks[1] != pks[2] {
				t.Error("one route has several partition keys")
			}
			res, body := do(t, s, http.MethodGet, "/items/4")
			if res.StatusCode != http.StatusTooManyRequests || res.Header.Get("Content-Type") != "application/problem+json" || res.Header.Get("X-Own") != "" || body == "served" {
				t.Errorf("the fourth got %d, %q, %v", res.StatusCode, body, res.Header)
			}
			state := field(t, res, "RateLimit", "api")
			has(t, state, "r", int64(0))
			seconds, err := strconv.ParseInt(res.Header.Get("Retry-After"), 10, 64)
			if err != nil || seconds < 3590 || seconds > 3600 {
				t.Errorf("Retry-After is %q", res.Header.Get("Retry-After"))
			}
			has(t, state, "t", seconds)

			// Another route, and another method of it, are other keys.
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				if res, _ := do(t, s, method, "/search"); res.StatusCode != http.StatusCreated {
					t.Errorf("%s /search got %d", method, res.StatusCode)
				} else if r, _ := field(t, res, "RateLimit", "api").Get("r"); r != int64(2) {
					t.Errorf("%s /search has %v left, want 2", method, r)
				}
			}
			// What no route serves is the router's to answer.
			if res, _ := do(t, s, http.MethodGet, "/nothing"); res.StatusCode != http.StatusNotFound {
				t.Errorf("a path without a route got %d", res.StatusCode)
			}
			if s := m.Stats(); s.Allowed != 5 || s.Denied != 1 || s.MissingKeys != 0 {
				t.Errorf("counted %+v", s)
			}
		})
	}
}

// The keys by route are what the router matched.
func TestRouteKeys(t *testing.T) {
	for name, router := range routers {
		var keys []string
		spy := httplimit.KeyFunc(func(r *http.Request) (string, bool) {
			key, ok := httplimit.Route().Of(r)
			keys = append(keys, key)
			return key, ok
		})
		h := router.build(middleware(t, limiter(t, "api", tierlimit.Unlimited()), spy), httprouters.Handlers{
			Item: func(http.ResponseWriter, *http.Request) {}, Search: func(http.ResponseWriter, *http.Request) {}})
		for _, path := range []string{"/items/7", "/search?q=1"} {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path, nil))
		}
		if len(keys) != 2 || keys[0] != router.item || keys[1] != router.find {
			t.Errorf("%s: the keys are %q, want %q and %q", name, keys, router.item, router.find)
		}
	}
}

// Nothing of a request that a router passes on reaches what is behind a denial, and a spoofed header does not help, in every router.
func TestSpoofingDoesNotEscape(t *testing.T) {
	for name, router := range routers {
		m := middleware(t, limiter(t, "api", tierlimit.TokenBucket(2, time.Hour)), httplimit.ClientIP())
		served := 0
		h := router.build(m, httprouters.Handlers{Item: func(http.ResponseWriter, *http.Request) { served++ }})
		s := httptest.NewServer(h)
		for i := range 6 {
			said := "198.51.100." + strconv.Itoa(i)
			do(t, s, http.MethodGet, "/items/1", "X-Forwarded-For", said, "Forwarded", "for="+said, "X-Real-Ip", said)
		}
		s.Close()
		if served != 2 {
			t.Errorf("%s: %d were served, want 2", name, served)
		}
	}
}

// In sub-routers of chi the key is the whole pattern, so that equal patterns in two of them are two routes.
func TestChiSubRouters(t *testing.T) {
	m := middleware(t, limiter(t, "api", tierlimit.TokenBucket(1, time.Hour)), httplimit.Route())
	r := chi.NewRouter()
	for _, at := range []string{"/a", "/b"} {
		r.Route(at, func(sub chi.Router) { sub.With(m.Handler).Get("/{id}", func(http.ResponseWriter, *http.Request) {}) })
	}
	for _, tc := range []struct {
		path string
		want int
	}{{"/a/1", 200}, {"/b/1", 200}, {"/a/2", 429}, {"/b/2", 429}} {
		w := httptest.NewRecorder()
		r.ServeHTTP(w, httptest.NewRequest(http.MethodGet, tc.path, nil))
		if w.Code != tc.want {
			t.Errorf("%s got %d, want %d", tc.path, w.Code, tc.want)
		}
	}
}

// Before the router there is no pattern, and that shows at the first request.
func TestRouteBeforeTheRouter(t *testing.T) {
	m := middleware(t, limiter(t, "api", tierlimit.TokenBucket(1, time.Hour)), httplimit.Route())
	r := chi.NewRouter()
	r.Use(m.Handler)
	r.Get("/", func(http.ResponseWriter, *http.Request) { t.Error("served") })
	w := httptest.NewRecorder()
	r.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusBadRequest || m.Stats().MissingKeys != 1 {
		t.Errorf("got %d, %+v", w.Code, m.Stats())
	}
}

// Two limiters in a row are two members of each list.
func TestListsOfTwo(t *testing.T) {
	ip := httplimit.ClientIP()
	second := middleware(t, limiter(t, "second", tierlimit.FixedWindow(5, 500*time.Millisecond)), ip)
	day := middleware(t, limiter(t, "day", tierlimit.SlidingLog(1000, 24*time.Hour)), ip)
	s := httptest.NewServer(day.Handler(second.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))))
	defer s.Close()
	res, _ := do(t, s, http.MethodGet, "/")
	has(t, field(t, res, "RateLimit-Policy", "day"), "w", int64(86400))
	has(t, field(t, res, "RateLimit-Policy", "second"), "w", nil) // below a second there is no w
	has(t, field(t, res, "RateLimit-Policy", "second"), "q", int64(5))
	has(t, field(t, res, "RateLimit", "day"), "r", int64(999))
	has(t, field(t, res, "RateLimit", "second"), "pk", nil)
}
