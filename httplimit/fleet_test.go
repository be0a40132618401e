package httplimit_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/httplimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// instance is one of a fleet, with a limiter that decides each check in Redis.
func instance(t *testing.T, server *redistest.Process, limit tierlimit.Limit) *tierlimit.Limiter {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
	h, err := tierlimit.New(rdb, tierlimit.WithLocalShare(0), tierlimit.WithRemoteTimeout(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close(context.Background())
		rdb.Close()
	})
	l, err := h.Limiter("api", limit)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// One client that is balanced over two servers has one limit, and a refund on one of them is a place on the other, even where the client that
// is refunded has gone.
func TestAFleet(t *testing.T) {
	const limit = 10
	redisServer := redistest.Start(t)
	refunds := 0
	handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/free" {
			return
		}
		ctx, cancel := context.WithCancel(r.Context())
		cancel()
		if err := httplimit.Refund(ctx); err != nil {
			t.Errorf("a refund failed: %v", err)
		}
		refunds++
	})
	var servers []*httptest.Server
	for range 2 {
		l := instance(t, redisServer, tierlimit.TokenBucket(limit, 24*time.Hour))
		s := httptest.NewServer(middleware(t, l, httplimit.ClientIP()).Handler(handler))
		defer s.Close()
		servers = append(servers, s)
	}
	admitted := 0
	get := func(i int, path string) int {
		res, err := servers[i%2].Client().Get(servers[i%2].URL + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return res.StatusCode
	}
	for i := range 6 {
		if got := get(i, "/free"); got != http.StatusOK {
			t.Errorf("a free request got %d", got)
		}
	}
	for i := range 3 * limit {
		if get(i, "/") == http.StatusOK {
			admitted++
		}
	}
	if admitted != limit || refunds != 6 {
		t.Errorf("%d were admitted by two servers, the limit is %d; %d refunds", admitted, limit, refunds)
	}
}
