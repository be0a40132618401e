package httplimit_test

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// local returns a limiter named "api" of one process.
func local(t testing.TB, limit tierlimit.Limit) (*tierlimit.Hybrid, *tierlimit.Limiter) {
	t.Helper()
	h, err := tierlimit.NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter("api", limit)
	if err != nil {
		t.Fatal(err)
	}
	return h, l
}

func middleware(t testing.TB, l *tierlimit.Limiter, key httplimit.Key, opts ...httplimit.Option) *httplimit.Middleware {
	t.Helper()
	m, err := httplimit.New(l, key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func serve(h http.Handler, r *http.Request) *http.Response {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

var ok = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "served") })

func header(r *http.Response, name string) string { return strings.Join(r.Header.Values(name), ", ") }

// A case of limit, what is spent before, and what the next request is told. Time stands still but where a case moves it.
func TestHeaders(t *testing.T) {
	const policy, state = "RateLimit-Policy", "RateLimit"
	for _, tc := range []struct {
		name   string
		limit  tierlimit.Limit
		opts   []httplimit.Option
		before int // requests
		sleep  time.Duration
		want   map[string]string // "" for absent
		status int
	}{
		{name: "a bucket's first request", limit: tierlimit.TokenBucket(10, 10*time.Second), status: 200,
			want: map[string]string{policy: `"api";q=10;w=10`, state: `"api";r=9;t=1`, "Retry-After": "", "X-RateLimit-Limit": ""}},
		{name: "t is rounded up", limit: tierlimit.TokenBucket(10, 15*time.Second), before: 2, status: 200,
			want: map[string]string{policy: `"api";q=10;w=15`, state: `"api";r=7;t=2`}},
		{name: "t is the next token, not the last", limit: tierlimit.TokenBucket(100, time.Minute), before: 99, status: 200,
			want: map[string]string{policy: `"api";q=100;w=60`, state: `"api";r=0;t=1`}},
		{name: "as in the denial behind it", limit: tierlimit.TokenBucket(100, time.Minute), before: 100, status: 429,
			want: map[string]string{state: `"api";r=0;t=1`, "Retry-After": "1"}},
		{name: "a leaky bucket's next token", limit: tierlimit.LeakyBucket(3, 10*time.Second), before: 1, status: 200,
			want: map[string]string{state: `"api";r=1;t=4`}},
		{name: "a fixed window is told to its end", limit: tierlimit.FixedWindow(5, time.Minute), sleep: 10 * time.Second, status: 200,
			want: map[string]string{policy: `"api";q=5;w=60`, state: `"api";r=4;t=50`}},
		{name: "w is the time to fill", limit: tierlimit.TokenBucket(100, time.Second).WithBurst(500), status: 200,
			want: map[string]string{policy: `"api";q=500;w=5`, state: `"api";r=499;t=1`}},
		{name: "w is left out where it is no whole number", limit: tierlimit.TokenBucket(100, time.Second).WithBurst(150), status: 200,
			want: map[string]string{policy: `"api";q=150`}},
		{name: "and where it is below a second", limit: tierlimit.FixedWindow(10, 500*time.Millisecond), status: 200,
			want: map[string]string{policy: `"api";q=10`}},
		{name: "a bucket above what multiplies in 64 bits", limit: tierlimit.TokenBucket(1e15, 24*time.Hour), status: 200,
			want: map[string]string{policy: `"api";q=999999999999999;w=86400`, state: `"api";r=999999999999999;t=1`}},
		{name: "a time to fill beyond any integer", limit: tierlimit.TokenBucket(1, 24*time.Hour).WithBurst(1e15), status: 200,
			want: map[string]string{policy: `"api";q=999999999999999`}},
		{name: "a time to fill a hair above a second", limit: tierlimit.TokenBucket(1e15-1, time.Second).WithBurst(1e15), status: 200,
			want: map[string]string{policy: `"api";q=999999999999999`}},
		{name: "a window", limit: tierlimit.SlidingLog(5, time.Minute), before: 1, sleep: 10 * time.Second, status: 200,
			want: map[string]string{policy: `"api";q=5;w=60`, state: `"api";r=3;t=60`}},
		{name: "denied", limit: tierlimit.TokenBucket(2, 10*time.Second), before: 2, status: 429,
			want: map[string]string{policy: `"api";q=2;w=10`, state: `"api";r=0;t=5`, "Retry-After": "5"}},
		{name: "Retry-After is rounded up", limit: tierlimit.TokenBucket(2, 10*time.Second), before: 2, sleep: 1500 * time.Millisecond, status: 429,
			want: map[string]string{state: `"api";r=0;t=4`, "Retry-After": "4"}},
		{name: "and at least 1", limit: tierlimit.TokenBucket(1000, time.Second).WithBurst(1), before: 1, status: 429,
			want: map[string]string{state: `"api";r=0;t=1`, "Retry-After": "1"}},
		{name: "never: no Retry-After", limit: tierlimit.TokenBucket(2, time.Second), status: 429,
			opts: []httplimit.Option{httplimit.WithCost(func(*http.Request) int64 { return 3 })},
			want: map[string]string{policy: `"api";q=2;w=1`, state: `"api";r=2;t=0`, "Retry-After": ""}},
		{name: "a limit of 0", limit: tierlimit.TokenBucket(0, time.Second), status: 429,
			want: map[string]string{policy: `"api";q=0`, state: `"api";r=0;t=0`, "Retry-After": ""}},
		{name: "unlimited says nothing", limit: tierlimit.Unlimited(), status: 200, opts: []httplimit.Option{httplimit.WithLegacyHeaders()},
			want: map[string]string{policy: "", state: "", "X-RateLimit-Limit": ""}},
		{name: "without headers Retry-After stays", limit: tierlimit.TokenBucket(1, time.Minute), before: 1, status: 429,
			opts: []httplimit.Option{httplimit.WithoutHeaders()}, want: map[string]string{policy: "", state: "", "Retry-After": "60"}},
		{name: "legacy, in seconds since 1970, until it is full", limit: tierlimit.TokenBucket(10, 15*time.Second), before: 3, status: 200,
			opts: []httplimit.Option{httplimit.WithLegacyHeaders()},
			want: map[string]string{state: `"api";r=6;t=2`, "X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "6", "X-RateLimit-Reset": "946684806"}},
		{name: "legacy alone, denied", limit: tierlimit.TokenBucket(1, time.Minute), before: 1, status: 429,
			opts: []httplimit.Option{httplimit.WithLegacyHeaders(), httplimit.WithoutHeaders()},
			want: map[string]string{state: "", "X-RateLimit-Limit": "1", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "946684860", "Retry-After": "60"}},
		{name: "a unit, escaped", limit: tierlimit.TokenBucket(10, time.Second), status: 200,
			opts: []httplimit.Option{httplimit.WithQuotaUnit(`a"b\c`)}, want: map[string]string{policy: `"api";q=10;w=1;qu="a\"b\\c"`, state: `"api";r=9;t=1`}},
		{name: "cost", limit: tierlimit.TokenBucket(10, 10*time.Second), before: 0, status: 200,
			opts: []httplimit.Option{httplimit.WithCost(func(*http.Request) int64 { return 5 })}, want: map[string]string{state: `"api";r=5;t=1`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, l := local(t, tc.limit)
				h := middleware(t, l, fixed("k"), tc.opts...).Handler(ok)
				for range tc.before {
					serve(h, request(""))
				}
				time.Sleep(tc.sleep)
				res := serve(h, request(""))
				if res.StatusCode != tc.status {
					t.Errorf("status %d, want %d", res.StatusCode, tc.status)
				}
				for name, want := range tc.want {
					if got := header(res, name); got != want {
						t.Errorf("%s is %q, want %q", name, got, want)
					}
				}
			})
		})
	}
}

// The cases that grpclimit has too: both say the same of a limit.
func TestSharedHeaders(t *testing.T) {
	text, err := os.ReadFile("testdata/headers.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Limit, Sleep, Policy, State string
		Before                            int
		Cost                              int64
	}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) < 15 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, tc := range cases {
		synctest.Test(t, func(t *testing.T) {
			limit, err1 := tierlimit.ParseLimit(tc.Limit)
			sleep, err2 := time.ParseDuration(tc.Sleep)
			if err := errors.Join(err1, err2); err != nil {
				t.Fatal(err)
			}
			_, l := local(t, limit)
			h := middleware(t, l, fixed("k"), httplimit.WithCost(func(*http.Request) int64 { return tc.Cost })).Handler(ok)
			for range tc.Before {
				serve(h, request(""))
			}
			time.Sleep(sleep)
			res := serve(h, request(""))
			if policy, state := header(res, "RateLimit-Policy"), header(res, "RateLimit"); policy != tc.Policy || state != tc.State {
				t.Errorf("%s: got %s and %s, want %s and %s", tc.Name, policy, state, tc.Policy, tc.State)
			}
		})
	}
}

// D28: whoever waits as long as Retry-After says is admitted, whatever the limit and however the waits fall.
func TestRetryAfterIsEnough(t *testing.T) {
	for _, limit := range []tierlimit.Limit{
		tierlimit.TokenBucket(7, 3*time.Second), tierlimit.LeakyBucket(3, 7*time.Second), tierlimit.FixedWindow(2, 1700*time.Millisecond),
		tierlimit.SlidingWindow(3, 2*time.Second), tierlimit.SlidingLog(3, 2300*time.Millisecond),
	} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, l := local(t, limit)
				h := middleware(t, l, fixed("k")).Handler(ok)
				denied := 0
				for i := range 200 {
					time.Sleep(time.Duration(i*37%100) * time.Millisecond)
					res := serve(h, request(""))
					if res.StatusCode == http.StatusOK {
						continue
					}
					denied++
					seconds, err := strconv.Atoi(res.Header.Get("Retry-After"))
					if err != nil || seconds < 1 {
						t.Fatalf("Retry-After is %q", res.Header.Get("Retry-After"))
					}
					time.Sleep(time.Duration(seconds) * time.Second)
					if res := serve(h, request("")); res.StatusCode != http.StatusOK {
						t.Fatalf("denied after %d s: %v", seconds, res.Header)
					}
				}
				if denied == 0 {
					t.Error("nothing was denied")
				}
			})
		})
	}
}

// A limit that is changed is told as it is.
func TestSetLimitIsTold(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(10, 10*time.Second))
	h := middleware(t, l, fixed("k")).Handler(ok)
	serve(h, request(""))
	if err := l.SetLimit(tierlimit.TokenBucket(20, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	if got := header(serve(h, request("")), "RateLimit-Policy"); got != `"api";q=20;w=5` {
		t.Errorf("got %q", got)
	}
}

func TestPartitionKey(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(100, time.Second))
	secret := []byte("0123456789abcdef")
	pk := func(secret []byte, key string) string {
		res := serve(middleware(t, l, fixed(key), httplimit.WithPartitionKey(secret)).Handler(ok), request(""))
		of := regexp.MustCompile(`;pk=:([A-Za-z0-9+/]{22}==):$`)
		policy, state := of.FindStringSubmatch(header(res, "RateLimit-Policy")), of.FindStringSubmatch(header(res, "RateLimit"))
		if policy == nil || state == nil || policy[1] != state[1] {
			t.Fatalf("%v", res.Header)
		}
		return state[1]
	}
	alice := pk(secret, "alice")
	mac := hmac.New(sha256.New, secret)
	io.WriteString(mac, "3:apialice")
	if want := base64.StdEncoding.EncodeToString(mac.Sum(nil)[:16]); alice != want {
		t.Errorf("got %s, want %s", alice, want)
	}
	if again := pk(secret, "alice"); again != alice {
		t.Errorf("the same key gave %s and %s", alice, again)
	}
	if pk(secret, "bob") == alice || pk([]byte("another secret..."), "alice") == alice || pk(secret, strings.Repeat("long", 5000)) == alice {
		t.Error("another key or secret gave the same pk")
	}
}

// What one request leaves behind does not change the partition key of the next.
func TestPartitionKeysInTurn(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(100, time.Second))
	h := middleware(t, l, httplimit.Header("X-Key"), httplimit.WithPartitionKey([]byte("0123456789abcdef"))).Handler(ok)
	seen := map[string]string{}
	for i := range 30 {
		key := strings.Repeat("k", 1+i%3*3000)
		_, pk, _ := strings.Cut(header(serve(h, request("", "X-Key: "+key)), "RateLimit"), ";pk=")
		if before, again := seen[key]; again && before != pk {
			t.Fatalf("a key had %s and then %s", before, pk)
		}
		seen[key] = pk
	}
}

// Without a handler what is admitted goes to http.DefaultServeMux, which has none of the patterns here.
func TestNilHandler(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1, time.Hour))
	h := middleware(t, l, fixed("k")).Handler(nil)
	for i, want := range []int{404, 429} {
		if res := serve(h, request("")); res.StatusCode != want {
			t.Errorf("request %d got %d, want %d", i, res.StatusCode, want)
		}
	}
}

// Of limiters in a row each is told, and the one that denies denies for all.
func TestInARow(t *testing.T) {
	h, l := local(t, tierlimit.TokenBucket(10, 10*time.Second))
	strict, err := h.Limiter("strict", tierlimit.TokenBucket(1, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	both := middleware(t, l, fixed("k")).Handler(middleware(t, strict, fixed("k")).Handler(ok))
	res := serve(both, request(""))
	if got := header(res, "RateLimit"); got != `"api";r=9;t=1, "strict";r=0;t=60` || res.StatusCode != 200 {
		t.Errorf("got %d, %s", res.StatusCode, got)
	}
	res = serve(both, request(""))
	if got := header(res, "RateLimit-Policy"); got != `"api";q=10;w=10, "strict";q=1;w=60` || res.StatusCode != 429 || res.Header.Get("Retry-After") != "60" {
		t.Errorf("got %d, %v", res.StatusCode, res.Header)
	}
}

type problem struct {
	Type, Title string
	Status      int
	Violated    []string `json:"violated-policies"`
}

// Each reason for a refusal: its status, its body, and that it is counted once.
func TestRefusals(t *testing.T) {
	const types = "https://iana.org/assignments/http-problem-types#"
	done, cancel := context.WithCancel(t.Context())
	cancel()
	leaky := tierlimit.LeakyBucket(1, 10*time.Second).WithBurst(5)
	for _, tc := range []struct {
		name    string
		limit   tierlimit.Limit
		key     string
		opts    []httplimit.Option
		before  int64 // tokens of the key that are spent
		closed  bool
		ctx     context.Context
		reason  string
		status  int
		retry   string
		problem problem
		stats   httplimit.Stats
	}{
		{name: "limit", limit: tierlimit.TokenBucket(1, time.Minute), key: "k", before: 1, reason: "limit", status: 429, retry: "60",
			problem: problem{Type: types + "quota-exceeded", Violated: []string{"api"}}, stats: httplimit.Stats{Denied: 1}},
		{name: "missing", limit: tierlimit.TokenBucket(1, time.Minute), reason: "missing", status: 400,
			problem: problem{Type: "about:blank", Title: "Bad Request"}, stats: httplimit.Stats{MissingKeys: 1}},
		{name: "missing, with another status", limit: tierlimit.TokenBucket(1, time.Minute), opts: []httplimit.Option{httplimit.WithMissingStatus(401)},
			reason: "missing", status: 401, problem: problem{Type: "about:blank", Title: "Unauthorized"}, stats: httplimit.Stats{MissingKeys: 1}},
		{name: "closed", limit: tierlimit.TokenBucket(1, time.Minute), key: "k", closed: true, reason: "error", status: 503,
			problem: problem{Type: "about:blank", Title: "Service Unavailable"}, stats: httplimit.Stats{Errors: 1}},
		{name: "closed, with a status without a name", limit: tierlimit.TokenBucket(1, time.Minute), key: "k", closed: true,
			opts: []httplimit.Option{httplimit.WithErrorStatus(599)}, reason: "error", status: 599,
			problem: problem{Type: "about:blank", Title: "The request is refused"}, stats: httplimit.Stats{Errors: 1}},
		{name: "a negative cost", limit: tierlimit.TokenBucket(1, time.Minute), key: "k", opts: []httplimit.Option{httplimit.WithCost(func(*http.Request) int64 { return -1 })},
			reason: "error", status: 503, problem: problem{Type: "about:blank", Title: "Service Unavailable"}, stats: httplimit.Stats{Errors: 1}},
		{name: "the bucket is full", limit: leaky, key: "k", before: 5, opts: []httplimit.Option{httplimit.WithDelay(9, time.Hour)}, reason: "limit", status: 429, retry: "10",
			problem: problem{Type: types + "quota-exceeded", Violated: []string{"api"}}, stats: httplimit.Stats{Denied: 1}},
		{name: "its turn is too late", limit: leaky, key: "k", before: 3, opts: []httplimit.Option{httplimit.WithDelay(9, 12500*time.Millisecond)}, reason: "turn", status: 429, retry: "18",
			problem: problem{Type: types + "quota-exceeded", Violated: []string{"api"}}, stats: httplimit.Stats{TurnTooLate: 1, Refunded: 1}},
		{name: "its context ends before its turn", limit: leaky, key: "k", before: 3, opts: []httplimit.Option{httplimit.WithDelay(9, time.Hour)}, ctx: done, reason: "gone", status: 503, retry: "30",
			problem: problem{Type: "about:blank", Title: "Service Unavailable"}, stats: httplimit.Stats{GivenUp: 1, Refunded: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for _, own := range []bool{false, true} {
					h, l := local(t, tc.limit)
					if tc.before > 0 {
						l.AllowN(t.Context(), tc.key, tc.before)
					}
					if tc.closed {
						h.Close(t.Context())
					}
					opts := tc.opts
					var denial httplimit.Denial
					if own {
						opts = append(slices.Clip(opts), httplimit.WithDenyHandler(func(w http.ResponseWriter, _ *http.Request, d httplimit.Denial) {
							denial = d
							w.WriteHeader(http.StatusTeapot)
							io.WriteString(w, "mine")
						}))
					}
					m := middleware(t, l, fixed(tc.key), opts...)
					r := request("")
					if tc.ctx != nil {
						r = r.WithContext(tc.ctx)
					}
					res := serve(m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it passed") })), r)
					body, _ := io.ReadAll(res.Body)
					if got := res.Header.Get("Retry-After"); got != tc.retry {
						t.Errorf("Retry-After is %q, want %q", got, tc.retry)
					}
					if got := m.Stats(); got != tc.stats {
						t.Errorf("counted %+v, want %+v", got, tc.stats)
					}
					if own {
						if res.StatusCode != http.StatusTeapot || string(body) != "mine" {
							t.Errorf("the handler's own answer became %d, %q", res.StatusCode, body)
						}
						if denial.Reason.String() != tc.reason || denial.Status != tc.status || denial.Result.Allowed || (denial.Err != nil) != (tc.reason == "error" || tc.reason == "gone") {
							t.Errorf("the handler was given %+v", denial)
						}
						continue
					}
					if res.StatusCode != tc.status || res.Header.Get("Content-Type") != "application/problem+json" || res.ContentLength != int64(len(body)) {
						t.Errorf("got %d, %v", res.StatusCode, res.Header)
					}
					var p problem
					if err := json.Unmarshal(body, &p); err != nil {
						t.Fatalf("%v in %s", err, body)
					}
					if p.Type != tc.problem.Type || p.Status != tc.status || fmt.Sprint(p.Violated) != fmt.Sprint(tc.problem.Violated) || p.Title == "" || tc.problem.Title != "" && p.Title != tc.problem.Title {
						t.Errorf("the body is %s", body)
					}
				}
			})
		})
	}
}

func TestWithoutBody(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(0, time.Second))
	res := serve(middleware(t, l, fixed("k"), httplimit.WithoutBody()).Handler(ok), request(""))
	body, _ := io.ReadAll(res.Body)
	if res.StatusCode != 429 || len(body) != 0 || res.Header.Get("Content-Type") != "" || res.Header.Get("Content-Length") != "0" {
		t.Errorf("got %d, %v, %q", res.StatusCode, res.Header, body)
	}
}

// A context that ends while Redis is asked is an error of the limiter, and no admission.
func TestContextIsNoAdmission(t *testing.T) {
	h := farHybrid(t)
	l, err := h.Limiter("api", tierlimit.TokenBucket(10, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m := middleware(t, l, fixed("cold"))
	res := serve(m.Handler(ok), request("").WithContext(ctx))
	if res.StatusCode != 503 || m.Stats().Errors != 1 {
		t.Errorf("got %d, %+v", res.StatusCode, m.Stats())
	}
}

func TestMissingKeys(t *testing.T) {
	for _, tc := range []struct {
		policy httplimit.MissingKey
		want   []int // of three requests without a key, then one with, under a limit of 2
		stats  httplimit.Stats
	}{
		{httplimit.MissingDeny, []int{400, 400, 400, 200}, httplimit.Stats{MissingKeys: 3, Allowed: 1}},
		{httplimit.MissingCommon, []int{200, 200, 429, 200}, httplimit.Stats{MissingKeys: 3, Allowed: 3, Denied: 1}},
		{httplimit.MissingAllow, []int{200, 200, 200, 200}, httplimit.Stats{MissingKeys: 3, Allowed: 1}},
	} {
		_, l := local(t, tierlimit.TokenBucket(2, time.Hour))
		m := middleware(t, l, httplimit.Header("X-Api-Key"), httplimit.WithMissingKey(tc.policy))
		h := m.Handler(ok)
		for i, want := range tc.want {
			r := request("")
			if i == 3 {
				r.Header.Set("X-Api-Key", "k")
			}
			res := serve(h, r)
			if res.StatusCode != want {
				t.Errorf("%v: request %d got %d, want %d", tc.policy, i, res.StatusCode, want)
			}
			if told, checked := header(res, "RateLimit") != "", i == 3 || tc.policy == httplimit.MissingCommon; told != checked {
				t.Errorf("%v: request %d was told %v", tc.policy, i, res.Header)
			}
		}
		if got := m.Stats(); got != tc.stats {
			t.Errorf("%v: counted %+v, want %+v", tc.policy, got, tc.stats)
		}
	}
}

// A key of no bytes is none, and so shares nothing with the common key.
func TestEmptyKey(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1, time.Hour))
	m := middleware(t, l, httplimit.KeyFunc(func(*http.Request) (string, bool) { return "", true }))
	if res := serve(m.Handler(ok), request("")); res.StatusCode != 400 || m.Stats().MissingKeys != 1 {
		t.Errorf("got %d, %+v", res.StatusCode, m.Stats())
	}
}

func TestSkip(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(0, time.Hour))
	m := middleware(t, l, fixed(""), httplimit.WithSkip(func(r *http.Request) bool { return r.Method == http.MethodOptions }),
		httplimit.WithSkip(func(r *http.Request) bool { return r.URL.Path == "/healthz" }))
	h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if httplimit.FromContext(r.Context()) != nil {
			t.Error("a skipped request has a charge")
		}
	}))
	options, health := request(""), request("")
	options.Method, health.URL.Path = http.MethodOptions, "/healthz"
	for i, r := range []*http.Request{options, health} {
		res := serve(h, r)
		if want := (httplimit.Stats{Skipped: int64(i + 1)}); res.StatusCode != 200 || m.Stats() != want || len(res.Header) != 0 {
			t.Errorf("got %d, %v, %+v", res.StatusCode, res.Header, m.Stats())
		}
	}
	if res := serve(h, request("")); res.StatusCode != 400 {
		t.Errorf("another one got %d", res.StatusCode)
	}
}

// A request that costs nothing passes, and neither the key nor the limiter is asked.
func TestCostOfNothing(t *testing.T) {
	hybrid, l := local(t, tierlimit.TokenBucket(0, time.Hour))
	hybrid.Close(t.Context())
	key := httplimit.KeyFunc(func(*http.Request) (string, bool) { t.Error("the key was asked"); return "", false })
	m := middleware(t, l, key, httplimit.WithCost(func(*http.Request) int64 { return 0 }))
	h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if err := httplimit.Refund(r.Context()); httplimit.FromContext(r.Context()) != nil || err != nil {
			t.Errorf("it has a charge; %v", err)
		}
	}))
	if res := serve(h, request("")); res.StatusCode != 200 || len(res.Header) != 0 {
		t.Errorf("got %d, %v", res.StatusCode, res.Header)
	}
	if got, want := m.Stats(), (httplimit.Stats{Skipped: 1}); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
}

// What WithShadow lets pass was charged nothing, so there is nothing to give back.
func TestShadowedIsNoCharge(t *testing.T) {
	hybrid, err := tierlimit.NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	l, err := hybrid.Limiter("api", tierlimit.FixedWindow(1, 24*time.Hour), tierlimit.WithShadow())
	if err != nil {
		t.Fatal(err)
	}
	m := middleware(t, l, fixed("k"))
	h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		c := httplimit.FromContext(r.Context())
		if !c.Result().Shadowed {
			return
		}
		if err := httplimit.Refund(r.Context()); err != nil || c.Cost() != 0 {
			t.Errorf("%v, a cost of %d", err, c.Cost())
		}
	}))
	for range 3 {
		if res := serve(h, request("")); res.StatusCode != 200 {
			t.Errorf("got %d", res.StatusCode)
		}
	}
	if r, _ := l.Peek(t.Context(), "k"); r.Remaining != 0 || m.Stats().Refunded != 0 || l.Stats().Shadowed != 2 {
		t.Errorf("%v, %+v, %+v", r, m.Stats(), l.Stats())
	}
}

func TestFaults(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1, time.Second))
	_, leaky := local(t, tierlimit.LeakyBucket(1, time.Second))
	deny := httplimit.WithDenyHandler(func(http.ResponseWriter, *http.Request, httplimit.Denial) {})
	for _, tc := range []struct {
		name string
		l    *tierlimit.Limiter
		opts []httplimit.Option
		want []string
	}{
		{"nil", nil, []httplimit.Option{nil, httplimit.WithCost(nil), httplimit.WithSkip(nil), httplimit.WithDenyHandler(nil)},
			[]string{"the Limiter is nil", "a nil Option", "WithCost is nil", "WithSkip is nil", "WithDenyHandler is nil"}},
		{"ranges", l, []httplimit.Option{httplimit.WithMissingKey(4), httplimit.WithErrorStatus(200), httplimit.WithQuotaUnit(""), httplimit.WithPartitionKey([]byte("short"))},
			[]string{"unknown MissingKey 4", "WithErrorStatus is 200", "WithQuotaUnit", "a secret of 5 bytes"}},
		{"no secret", l, []httplimit.Option{httplimit.WithPartitionKey(nil)}, []string{"a secret of 0 bytes"}},
		{"statuses", l, []httplimit.Option{httplimit.WithMissingStatus(0), httplimit.WithErrorStatus(0)}, []string{"WithMissingStatus is 0", "WithErrorStatus is 0"}},
		{"a status of no use", l, []httplimit.Option{httplimit.WithMissingKey(httplimit.MissingCommon), httplimit.WithMissingStatus(403)}, []string{"never sent under the policy common"}},
		{"a unit out of ASCII", l, []httplimit.Option{httplimit.WithQuotaUnit("b\n")}, []string{"WithQuotaUnit"}},
		{"a unit too long", l, []httplimit.Option{httplimit.WithQuotaUnit(strings.Repeat("b", 65))}, []string{"WithQuotaUnit"}},
		{"nobody to write", l, []httplimit.Option{httplimit.WithoutBody(), deny}, []string{"nothing to write"}},
		{"no header to be in", l, []httplimit.Option{httplimit.WithoutHeaders(), httplimit.WithQuotaUnit("b")}, []string{"no header to be in"}},
		{"a delay of another algorithm", l, []httplimit.Option{httplimit.WithDelay(1, time.Second)}, []string{`limiter "api" is a token-bucket`}},
		{"a queue for nobody", leaky, []httplimit.Option{httplimit.WithDelay(0, 0)}, []string{"want at least 1", "want 1ms to 1h"}},
		{"a queue for ever", leaky, []httplimit.Option{httplimit.WithDelay(1, 2*time.Hour)}, []string{"want 1ms to 1h"}},
	} {
		m, err := httplimit.New(tc.l, fixed("k"), tc.opts...)
		if m != nil || err == nil {
			t.Errorf("%s: got %v, %v", tc.name, m, err)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		for _, line := range lines {
			if !strings.HasPrefix(line, tierlimit.ErrConfig.Error()+": ") {
				t.Errorf("%s: %q wraps no ErrConfig", tc.name, line)
			}
		}
		if !errors.Is(err, tierlimit.ErrConfig) || len(lines) != len(tc.want) {
			t.Errorf("%s: %d faults, want %d:\n%v", tc.name, len(lines), len(tc.want), err)
		}
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v lacks %q", tc.name, err, want)
			}
		}
	}
}

func TestNames(t *testing.T) {
	if got := fmt.Sprint(httplimit.MissingDeny, httplimit.MissingCommon, httplimit.MissingAllow, httplimit.MissingKey(9)); got != "deny common allow MissingKey(9)" {
		t.Error(got)
	}
	if got := fmt.Sprint(httplimit.ReasonLimit, httplimit.ReasonTurn, httplimit.ReasonQueue, httplimit.ReasonGone, httplimit.ReasonMissing, httplimit.ReasonError, httplimit.Reason(0)); got != "limit turn queue gone missing error Reason(0)" {
		t.Error(got)
	}
}

// F46: whatever a request says, and whatever becomes of it, no response says it again.
func TestNothingIsEchoed(t *testing.T) {
	const mark = "mArK"
	hybrid, l := local(t, tierlimit.TokenBucket(1, time.Hour))
	leaky, err := hybrid.Limiter("leaky", tierlimit.LeakyBucket(1, time.Hour).WithBurst(9))
	if err != nil {
		t.Fatal(err)
	}
	closed, dead := local(t, tierlimit.TokenBucket(1, time.Hour))
	closed.Close(t.Context())
	key := httplimit.Join(httplimit.Header("X-Key"), httplimit.Cookie("sid"), httplimit.Header("Host"), httplimit.Route())
	all := []httplimit.Option{httplimit.WithLegacyHeaders(), httplimit.WithQuotaUnit("u"), httplimit.WithPartitionKey([]byte("0123456789abcdef"))}
	seen := map[int]bool{}
	for _, m := range []*httplimit.Middleware{
		middleware(t, l, key, all...),
		middleware(t, leaky, key, append(all, httplimit.WithDelay(1, time.Second))...),
		middleware(t, dead, key, all...),
		middleware(t, l, httplimit.Join(key, fixed("")), all...),
		middleware(t, l, httplimit.Join(key, fixed("")), httplimit.WithMissingKey(httplimit.MissingCommon)),
	} {
		h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
		for range 3 {
			r := httptest.NewRequest(http.MethodPost, "/"+mark+"?"+mark+"="+mark, strings.NewReader(mark))
			r.Method, r.Host, r.RemoteAddr, r.Pattern = mark, mark, mark, "/"+mark
			for _, name := range []string{"X-Key", "User-Agent", "Forwarded", "X-Forwarded-For", "Origin", "Accept", "Content-Type", mark} {
				r.Header.Set(name, mark)
			}
			r.Header.Set("Cookie", "sid="+mark)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			seen[w.Code] = true
			var said strings.Builder
			w.Result().Write(&said)
			if strings.Contains(strings.ToLower(said.String()), strings.ToLower(mark)) {
				t.Errorf("a response says what the request said:\n%s", said.String())
			}
		}
	}
	for _, status := range []int{204, 429, 503, 400} {
		if !seen[status] {
			t.Errorf("no response with %d was looked at: %v", status, seen)
		}
	}
}

// On a real server: what a handler writes itself does not lose the headers, and flushing, hijacking and deadlines work as without the middleware.
func TestOnAServer(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(100, 100*time.Second))
	m := middleware(t, l, httplimit.ClientIP(), httplimit.WithLegacyHeaders())
	mux := http.NewServeMux()
	handle := func(pattern string, f http.HandlerFunc) { mux.Handle(pattern, m.Handler(f)) }
	handle("/own", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Own", "1")
		w.Header().Add("Vary", "Origin")
		w.WriteHeader(http.StatusCreated)
	})
	handle("/error", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusInternalServerError) })
	handle("/flush", func(w http.ResponseWriter, _ *http.Request) {
		rc := http.NewResponseController(w)
		if err := rc.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Error(err)
		}
		io.WriteString(w, "first")
		if _, is := w.(http.Flusher); !is {
			t.Error("no Flusher")
		}
		if err := rc.Flush(); err != nil {
			t.Error(err)
		}
		io.WriteString(w, "second")
	})
	handle("/hijack", func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nX-Own: hijacked\r\n\r\n")
		rw.Flush()
	})
	handle("/readfrom", func(w http.ResponseWriter, _ *http.Request) {
		if _, is := w.(io.ReaderFrom); !is {
			t.Error("no ReaderFrom: files would not be sent by the kernel")
		}
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	for path, status := range map[string]int{"/own": 201, "/error": 500, "/flush": 200, "/hijack": 101, "/readfrom": 200} {
		res, err := server.Client().Get(server.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		if path != "/hijack" {
			io.Copy(io.Discard, res.Body)
		}
		res.Body.Close()
		if res.StatusCode != status {
			t.Errorf("%s: got %d, want %d", path, res.StatusCode, status)
		}
		if path == "/hijack" {
			if res.Header.Get("X-Own") != "hijacked" {
				t.Errorf("%s: %v", path, res.Header)
			}
			continue
		}
		if header(res, "RateLimit-Policy") != `"api";q=100;w=100` || header(res, "RateLimit") == "" || header(res, "X-RateLimit-Limit") != "100" {
			t.Errorf("%s: %v", path, res.Header)
		}
	}
}

// A 429 on the wire: what HTTP/1.1 clients get, by GET and by HEAD.
func TestDeniedOnAServer(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1, time.Hour))
	server := httptest.NewServer(middleware(t, l, httplimit.ClientIP()).Handler(ok))
	defer server.Close()
	for i, want := range []int{200, 429, 429} {
		method := http.MethodGet
		if i == 2 {
			method = http.MethodHead
		}
		req, _ := http.NewRequest(method, server.URL, nil)
		res, err := server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(bufio.NewReader(res.Body))
		res.Body.Close()
		if err != nil || res.StatusCode != want {
			t.Errorf("request %d: got %d, %v", i, res.StatusCode, err)
		}
		if want == 429 {
			seconds, err := strconv.Atoi(res.Header.Get("Retry-After"))
			if err != nil || seconds < 3590 || seconds > 3600 {
				t.Errorf("Retry-After is %q", res.Header.Get("Retry-After"))
			}
			if (len(body) > 0) != (method == http.MethodGet) || res.Header.Get("Content-Type") != "application/problem+json" {
				t.Errorf("%s: %v, %q", method, res.Header, body)
			}
		}
	}
}

// F44, end to end: a client that makes up another X-Forwarded-For and Forwarded for each request stays one client, by itself and through a proxy.
func TestSpoofingDoesNotEscape(t *testing.T) {
	const limit = 5
	spoof := func(r *http.Request, i int) {
		said := fmt.Sprintf("198.51.100.%d", i)
		r.Header.Add("X-Forwarded-For", said+", "+fmt.Sprintf("10.0.0.%d", i))
		r.Header.Add("X-Forwarded-For", said)
		r.Header.Add("Forwarded", fmt.Sprintf(`for="%s`, said))
		r.Header.Set("X-Real-Ip", said)
	}
	for name, opts := range map[string][]httplimit.ClientIPOption{
		"direct":                    nil,
		"proxies elsewhere":         {httplimit.TrustedProxies("10.0.0.0/8")},
		"X-Forwarded-For":           {httplimit.TrustedProxies("127.0.0.0/8", "::1")},
		"Forwarded":                 {httplimit.TrustedProxies("127.0.0.0/8", "::1"), httplimit.TrustedHeader("Forwarded")},
		"proxies that say nothing":  {httplimit.TrustedProxies("203.0.113.0/24")},
		"X-Real-Ip that is written": {httplimit.TrustedProxies("127.0.0.0/8", "::1"), httplimit.TrustedHeader("X-Real-Ip")},
	} {
		_, l := local(t, tierlimit.TokenBucket(limit, time.Hour))
		m := middleware(t, l, httplimit.ClientIP(opts...))
		limited := m.Handler(ok)
		// The server is its own proxy: it adds what a proxy would, the address of its peer, which is made to be 192.0.2.77.
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.Header.Add("X-Forwarded-For", "192.0.2.77")
			lines := r.Header.Values("Forwarded")
			r.Header.Set("Forwarded", strings.Join(append(lines, `for="192.0.2.77:4711";proto=http`), ", "))
			r.Header.Set("X-Real-Ip", "192.0.2.77")
			limited.ServeHTTP(w, r)
		}))
		admitted := 0
		for i := range 50 {
			req, _ := http.NewRequest(http.MethodGet, server.URL, nil)
			spoof(req, i)
			res, err := server.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				admitted++
			}
		}
		server.Close()
		if admitted != limit {
			t.Errorf("%s: %d of 50 were admitted, the limit is %d", name, admitted, limit)
		}
	}
}
