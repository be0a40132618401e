package httplimit_test

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// Requests that come at once leave at the pace of the bucket, in a queue that has an end.
func TestDelayMakesAnEvenFlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := local(t, tierlimit.LeakyBucket(10, time.Second).WithBurst(8))
		m := middleware(t, l, fixed("k"), httplimit.WithDelay(100, time.Minute))
		start := time.Now()
		var mu sync.Mutex
		var left []time.Duration
		denied := 0
		h := m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			left = append(left, time.Since(start))
		}))
		var wg sync.WaitGroup
		for range 12 {
			wg.Go(func() {
				if serve(h, request("")).StatusCode == 429 {
					mu.Lock()
					defer mu.Unlock()
					denied++
				}
			})
		}
		synctest.Wait()
		if got := m.Stats().Waiting; got != 7 {
			t.Errorf("%d wait, want 7", got)
		}
		wg.Wait()
		var want []time.Duration
		for i := range 8 {
			want = append(want, time.Duration(i)*100*time.Millisecond)
		}
		if !slices.Equal(left, want) || denied != 4 {
			t.Errorf("they left at %v, %d were denied", left, denied)
		}
		if got, want := m.Stats(), (httplimit.Stats{Allowed: 8, Held: 7, Denied: 4}); got != want {
			t.Errorf("counted %+v, want %+v", got, want)
		}
	})
}

// A request that was held is told what is so when it leaves.
func TestDelayAndHeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := local(t, tierlimit.LeakyBucket(1, 10*time.Second).WithBurst(3))
		h := middleware(t, l, fixed("k"), httplimit.WithDelay(1, time.Minute)).Handler(ok)
		serve(h, request(""))
		start := time.Now()
		res := serve(h, request(""))
		if d := time.Since(start); d != 10*time.Second {
			t.Errorf("held for %v", d)
		}
		if got := header(res, "RateLimit"); got != `"api";r=1;t=10` {
			t.Errorf("told %s", got)
		}
	})
}

// The queue of the Middleware is bounded over all keys; who finds it full spends nothing, and a place that comes free is taken.
func TestDelayQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := local(t, tierlimit.LeakyBucket(1, time.Second).WithBurst(100))
		m := middleware(t, l, httplimit.Header("X-Key"), httplimit.WithDelay(3, time.Hour))
		h := m.Handler(ok)
		keyed := func(k string) *http.Request { return request("", "X-Key: "+k) }
		var wg sync.WaitGroup
		for _, k := range []string{"a", "b"} {
			serve(h, keyed(k)) // leaves at once
		}
		for _, k := range []string{"a", "a", "b"} {
			wg.Go(func() { serve(h, keyed(k)) })
		}
		synctest.Wait()
		before, _ := l.Peek(t.Context(), "b")
		res := serve(h, keyed("b"))
		after, _ := l.Peek(t.Context(), "b")
		if res.StatusCode != 503 || res.Header.Get("Retry-After") != "2" || header(res, "RateLimit") != `"api";r=0;t=2` || before.Remaining != after.Remaining {
			t.Errorf("got %d, %v; %d were left before, %d after", res.StatusCode, res.Header, before.Remaining, after.Remaining)
		}
		time.Sleep(1100 * time.Millisecond) // one of a and the one of b leave
		wg.Go(func() { serve(h, keyed("b")) })
		synctest.Wait()
		if got := m.Stats(); got.Waiting != 2 || got.QueueFull != 1 {
			t.Errorf("counted %+v", got)
		}
		wg.Wait()
		if got, want := m.Stats(), (httplimit.Stats{Allowed: 6, Held: 4, QueueFull: 1, Refunded: 1}); got != want {
			t.Errorf("counted %+v, want %+v", got, want)
		}
	})
}

// D38 for HTTP: who gives up while it waits gives its place back at once, be it that the client went or that the server's time ran out.
func TestDelayGivesThePlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := local(t, tierlimit.LeakyBucket(1, 10*time.Second).WithBurst(30))
		m := middleware(t, l, fixed("k"), httplimit.WithDelay(100, time.Hour))
		h := m.Handler(ok)
		serve(h, request(""))
		var wg sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for range 20 {
			wg.Go(func() {
				if res := serve(h, request("").WithContext(ctx)); res.StatusCode != 503 {
					t.Errorf("got %d", res.StatusCode)
				}
			})
		}
		synctest.Wait()
		cancel()
		start := time.Now()
		wg.Wait()
		short, stop := context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		if res := serve(h, request("").WithContext(short)); res.StatusCode != 503 {
			t.Errorf("one with too short a deadline got %d", res.StatusCode)
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("giving up took %v", d)
		}
		serve(h, request(""))
		if d := time.Since(start); d != 10*time.Second {
			t.Errorf("the 22nd was held for %v, want 10s", d)
		}
		if got, want := m.Stats(), (httplimit.Stats{Allowed: 2, Held: 1, GivenUp: 21, Refunded: 21}); got != want {
			t.Errorf("counted %+v, want %+v", got, want)
		}
	})
}

// Without WithDelay a leaky bucket is a meter.
func TestLeakyBucketWithoutDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := local(t, tierlimit.LeakyBucket(1, time.Second).WithBurst(3))
		h := middleware(t, l, fixed("k")).Handler(ok)
		start := time.Now()
		for i, want := range []int{200, 200, 200, 429} {
			if res := serve(h, request("")); res.StatusCode != want {
				t.Errorf("request %d got %d", i, res.StatusCode)
			}
		}
		if time.Since(start) != 0 {
			t.Error("a request was held")
		}
	})
}
