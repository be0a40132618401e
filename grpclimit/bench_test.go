package grpclimit_test

import (
	"context"
	"math"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/grpclimit"
)

// plenty is more than a benchmark spends.
func plenty() tierlimit.Limit { return tierlimit.TokenBucket(1_000_000_000_000, time.Second) }

// BenchmarkUnaryServer times what the interceptor adds to a call, beside a handler that does nothing.
func BenchmarkUnaryServer(b *testing.B) {
	ctx := from(tcp("192.0.2.1:4711"), nil, "x-api-key", "customer-17")
	info := &grpc.UnaryServerInfo{FullMethod: say}
	handler := func(context.Context, any) (any, error) { return nil, nil }
	b.Run("impl=bare", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := handler(ctx, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, bench := range []struct {
		name  string
		limit tierlimit.Limit
		key   grpclimit.Key
		want  codes.Code
	}{
		{"key=everyone/path=allow", plenty(), grpclimit.Everyone(), codes.OK},
		{"key=ip/path=allow", plenty(), grpclimit.ClientIP(), codes.OK},
		{"key=metadata/path=allow", plenty(), grpclimit.Metadata("x-api-key"), codes.OK},
		{"key=method+ip/path=allow", plenty(), grpclimit.Join(grpclimit.Method(), grpclimit.ClientIP()), codes.OK},
		{"key=everyone/path=deny", tierlimit.TokenBucket(0, time.Second), grpclimit.Everyone(), codes.ResourceExhausted},
		{"key=everyone/path=unlimited", plenty(), grpclimit.Everyone(), codes.OK},
	} {
		var opts []grpclimit.Option
		if bench.name == "key=everyone/path=unlimited" {
			opts = append(opts, grpclimit.WithSkipMethods("*"))
		}
		intercept := interceptor(b, limiter(b, "api", bench.limit), bench.key, opts...).UnaryServerInterceptor()
		b.Run("impl=grpclimit/"+bench.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := intercept(ctx, nil, info, handler); status.Code(err) != bench.want {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkUnaryCall times a whole call over a loopback socket, with and without the interceptor.
func BenchmarkUnaryCall(b *testing.B) {
	for _, bench := range []struct {
		name string
		opts []grpc.ServerOption
		want codes.Code
	}{
		{"impl=bare", nil, codes.OK},
		{"impl=grpclimit/path=allow", serverOptions(interceptor(b, limiter(b, "api", plenty()), grpclimit.ClientIP())), codes.OK},
		{"impl=grpclimit/path=deny", serverOptions(interceptor(b, hourly(b, 0), grpclimit.ClientIP())), codes.ResourceExhausted},
	} {
		b.Run(bench.name, func(b *testing.B) {
			conn := serve(b, &echo{}, bench.opts)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := call(b.Context(), conn, "hello"); status.Code(err) != bench.want {
					b.Fatal(err)
				}
			}
		})
	}
}

// A call that passes makes one allocation, for Refund; one that no limit is for makes none.
func TestAllocations(t *testing.T) {
	ctx := from(tcp("192.0.2.1:4711"), nil)
	info := &grpc.UnaryServerInfo{FullMethod: say}
	for _, tc := range []struct {
		name string
		i    *grpclimit.Interceptor
		want float64
	}{
		{"allowed", interceptor(t, hourly(t, math.MaxInt32), grpclimit.Everyone()), 1},
		{"allowed, by address", interceptor(t, hourly(t, math.MaxInt32), grpclimit.ClientIP()), 2},
		{"skipped", interceptor(t, hourly(t, 0), grpclimit.Everyone(), grpclimit.WithSkipMethods("/test.Echo/*")), 0},
	} {
		intercept := tc.i.UnaryServerInterceptor()
		if n := testing.AllocsPerRun(1000, func() {
			if _, err := intercept(ctx, nil, info, nothing); err != nil {
				t.Fatal(err)
			}
		}); n != tc.want {
			t.Errorf("%s: %v allocations, want %v", tc.name, n, tc.want)
		}
	}
}
