package httplimit_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
)

// farHybrid has a Redis that does not answer.
func farHybrid(t *testing.T) *tierlimit.Hybrid {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	h, err := tierlimit.New(rdb, tierlimit.WithRemoteTimeout(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close(context.Background())
		rdb.Close()
	})
	return h
}

func TestRefunds(t *testing.T) {
	for _, tc := range []struct {
		name   string
		refund func(r *http.Request, c *httplimit.Charge) error
		left   int64 // of 10, after a cost of 4
		err    error
	}{
		{"none", func(*http.Request, *httplimit.Charge) error { return nil }, 6, nil},
		{"all of it", func(r *http.Request, _ *httplimit.Charge) error { return httplimit.Refund(r.Context()) }, 10, nil},
		{"twice is once", func(r *http.Request, _ *httplimit.Charge) error {
			return errors.Join(httplimit.Refund(r.Context()), httplimit.Refund(r.Context()))
		}, 10, nil},
		{"a part", func(r *http.Request, c *httplimit.Charge) error { return c.Refund(r.Context(), 3) }, 9, nil},
		{"more than was charged", func(r *http.Request, c *httplimit.Charge) error { return c.Refund(r.Context(), 1<<40) }, 10, nil},
		{"parts that are more than the whole", func(r *http.Request, c *httplimit.Charge) error {
			return errors.Join(c.Refund(r.Context(), 3), c.Refund(r.Context(), 3), httplimit.Refund(r.Context()))
		}, 10, nil},
		{"nothing", func(r *http.Request, c *httplimit.Charge) error { return c.Refund(r.Context(), 0) }, 6, nil},
		{"less than nothing", func(r *http.Request, c *httplimit.Charge) error { return c.Refund(r.Context(), -1) }, 6, tierlimit.ErrCost},
		{"for a client that has gone", func(r *http.Request, _ *httplimit.Charge) error {
			ctx, cancel := context.WithCancel(r.Context())
			cancel()
			return httplimit.Refund(ctx)
		}, 10, nil},
	} {
		_, l := local(t, tierlimit.TokenBucket(10, 1000*time.Hour))
		l.AllowN(t.Context(), "k", 0)
		m := middleware(t, l, fixed("k"), httplimit.WithCost(func(*http.Request) int64 { return 4 }))
		var err error
		serve(m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			c := httplimit.FromContext(r.Context())
			if c.Cost() != 4 || !c.Result().Allowed || c.Result().Remaining != 6 || c.Limiter() != l || c.Outer() != nil {
				t.Errorf("%s: %d, %v", tc.name, c.Cost(), c.Result())
			}
			err = tc.refund(r, c)
		})), request(""))
		if !errors.Is(err, tc.err) {
			t.Errorf("%s: got %v, want %v", tc.name, err, tc.err)
		}
		if r, _ := l.Peek(t.Context(), "k"); r.Remaining != tc.left {
			t.Errorf("%s: %d are left, want %d", tc.name, r.Remaining, tc.left)
		}
		if got := m.Stats().Refunded; got != tc.left-6 {
			t.Errorf("%s: %d counted as refunded", tc.name, got)
		}
	}
}

// Refunds at a time give back what was charged and no more.
func TestRefundsAtATime(t *testing.T) {
	_, l := local(t, tierlimit.TokenBucket(1000, 1000*time.Hour))
	l.AllowN(t.Context(), "k", 500)
	h := middleware(t, l, fixed("k"), httplimit.WithCost(func(*http.Request) int64 { return 100 })).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 20 {
					httplimit.FromContext(r.Context()).Refund(r.Context(), 1)
				}
			})
		}
		wg.Wait()
	}))
	serve(h, request(""))
	if r, _ := l.Peek(t.Context(), "k"); r.Remaining != 500 {
		t.Errorf("%d are left, want 500", r.Remaining)
	}
}

// Refund gives back to each limiter of a row its own.
func TestRefundOfARow(t *testing.T) {
	h, l := local(t, tierlimit.TokenBucket(10, 1000*time.Hour))
	inner, err := h.Limiter("inner", tierlimit.FixedWindow(20, 24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	serve(middleware(t, l, fixed("a")).Handler(middleware(t, inner, fixed("b")).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		c := httplimit.FromContext(r.Context())
		if c.Limiter() != inner || c.Outer().Limiter() != l || c.Outer().Outer() != nil {
			t.Error("the charges are not those of the row")
		}
		if err := httplimit.Refund(r.Context()); err != nil {
			t.Error(err)
		}
	}))), request(""))
	a, _ := l.Peek(t.Context(), "a")
	b, _ := inner.Peek(t.Context(), "b")
	if a.Remaining != 10 || b.Remaining != 20 {
		t.Errorf("%v, %v", a, b)
	}
}

// A request that no Middleware checked has a charge of nothing, and the verbs know it.
func TestNoCharge(t *testing.T) {
	c := httplimit.FromContext(t.Context())
	if c != nil || httplimit.FromContext(nil) != nil { //nolint:staticcheck // SA1012: a caller may do so
		t.Fatal("a charge of nothing")
	}
	if c.Cost() != 0 || c.Result() != (tierlimit.Result{}) || c.Limiter() != nil || c.Outer() != nil || c.Refund(t.Context(), 1) != nil || httplimit.Refund(t.Context()) != nil {
		t.Error("a nil Charge is not one of nothing")
	}
	if err := httplimit.Refund(nil); err != nil { //nolint:staticcheck // SA1012: a caller may do so
		t.Error(err)
	}
	if !errors.Is(c.Refund(t.Context(), -1), tierlimit.ErrCost) {
		t.Error("a negative refund is not ErrCost")
	}
}

func TestRefundAfterClose(t *testing.T) {
	hybrid, l := local(t, tierlimit.TokenBucket(10, time.Hour))
	m := middleware(t, l, fixed("k"), httplimit.WithCost(func(*http.Request) int64 { return 3 }))
	serve(m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		hybrid.Close(context.Background())
		if err := httplimit.Refund(r.Context()); !errors.Is(err, tierlimit.ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
	})), request(""))
	if got, want := m.Stats(), (httplimit.Stats{Allowed: 1, RefundsLost: 3}); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
}

// The values, the end and the deadline of a request's context stay what they were.
func TestContextOfTheHandler(t *testing.T) {
	type own struct{}
	_, l := local(t, tierlimit.TokenBucket(10, time.Hour))
	parent, cancel := context.WithTimeout(context.WithValue(t.Context(), own{}, "v"), time.Hour)
	defer cancel()
	serve(middleware(t, l, fixed("k")).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		deadline, has := ctx.Deadline()
		want, _ := parent.Deadline()
		if ctx.Value(own{}) != "v" || !has || !deadline.Equal(want) || ctx.Err() != nil {
			t.Error("the context has changed")
		}
		child, stop := context.WithCancel(ctx)
		defer stop()
		cancel()
		<-child.Done()
	})), request("").WithContext(parent))
}
