package grpclimit_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Two servers share a limit through Redis: together they admit what it says, to unary calls and messages of streams alike.
func TestTwoServersShareALimit(t *testing.T) {
	const limit = 200
	redisServer := redistest.Start(t)
	var conns []*grpc.ClientConn
	for range 2 {
		rdb := redis.NewClient(&redis.Options{Addr: redisServer.Addr(), ContextTimeoutEnabled: true, DialerRetries: 1})
		h, err := tierlimit.New(rdb, tierlimit.WithRemoteTimeout(900*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			h.Close(context.Background())
			rdb.Close()
		})
		l, err := h.Limiter("api", tierlimit.TokenBucket(limit, 24*time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, limited(t, &echo{}, interceptor(t, l, grpclimit.ClientIP(), grpclimit.WithStreams(grpclimit.Received))))
	}
	// Each goes on until the limit has been short for a while: what one server holds as a lease the other may have to wait for.
	until := time.Now().Add(5 * time.Second)
	var passed atomic.Int64
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			conn := conns[n%2]
			for time.Now().Before(until) && passed.Load() < limit {
				var err error
				if n < 4 {
					_, err = call(t.Context(), conn, "")
				} else {
					ctx, cancel := context.WithCancel(t.Context())
					var stream grpc.ClientStream
					if stream, err = open(ctx, conn, chat); err == nil {
						err = exchange(stream, "")
					}
					cancel()
				}
				switch status.Code(err) {
				case codes.OK:
					passed.Add(1)
				case codes.ResourceExhausted:
					time.Sleep(5 * time.Millisecond)
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	// And no more.
	for n := range 20 {
		if _, err := call(t.Context(), conns[n%2], ""); err == nil {
			passed.Add(1)
		}
	}
	if n := passed.Load(); n > limit || n < limit*99/100 {
		t.Errorf("%d passed, want %d", n, limit)
	}
}
