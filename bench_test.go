package tierlimit_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// BenchmarkAllow times one check of a key that is warm, beside what no keyed limiter can do without: hashing the key, and
// reading the clock.
func BenchmarkAllow(b *testing.B) {
	ctx := context.Background()
	const key = "customer-0123456789abcdef"
	b.Run("impl=floor/path=hash", func(b *testing.B) {
		var sum uint64
		for b.Loop() {
			sum += xxhash.Sum64String(key)
		}
		sink.Store(sum)
	})
	b.Run("impl=floor/path=clock", func(b *testing.B) {
		start := time.Now()
		for b.Loop() {
			sink.Store(uint64(time.Since(start)))
		}
	})
	local, err := tierlimit.NewLocal()
	if err != nil {
		b.Fatal(err)
	}
	defer local.Close(ctx)
	for _, limit := range []tierlimit.Limit{tierlimit.TokenBucket(1_000_000_000_000, time.Second), tierlimit.FixedWindow(1_000_000_000_000, time.Second)} {
		l, err := local.Limiter(limit.Algorithm.String(), limit)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("impl=tierlimit/path=local/algorithm=%v", limit.Algorithm), func(b *testing.B) { allow(b, l, key, true) })
	}
	server := redistest.Start(b)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	h, err := tierlimit.New(rdb)
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close(ctx)
	for _, limit := range []tierlimit.Limit{tierlimit.TokenBucket(1_000_000_000_000, time.Second), tierlimit.SlidingLog(1_000_000_000_000, time.Second)} {
		l, err := h.Limiter(limit.Algorithm.String(), limit)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("impl=tierlimit/path=lease/algorithm=%v", limit.Algorithm), func(b *testing.B) { allow(b, l, key, true) })
	}
	exhausted, err := h.Limiter("exhausted", tierlimit.FixedWindow(1, time.Hour))
	if err != nil {
		b.Fatal(err)
	}
	b.Run("impl=tierlimit/path=denied", func(b *testing.B) { allow(b, exhausted, key, false) })
}

var sink atomic.Uint64

// allow asks until the answer is as wanted, so that the key is warm, and then times it.
func allow(b *testing.B, l *tierlimit.Limiter, key string, want bool) {
	ctx := context.Background()
	for deadline := time.Now().Add(5 * time.Second); ; {
		if r, err := l.Allow(ctx, key); err != nil {
			b.Fatal(err)
		} else if r.Allowed == want {
			break
		}
		if time.Now().After(deadline) {
			b.Fatal("the key does not get warm")
		}
	}
	for range 100_000 {
		if _, err := l.Allow(ctx, key); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	other := 0
	for b.Loop() {
		if r, _ := l.Allow(ctx, key); r.Allowed != want || r.Source != tierlimit.Local {
			other++
		}
	}
	b.ReportMetric(100*float64(other)/float64(b.N), "%other")
}
