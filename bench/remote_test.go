package bench

import (
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// asked is a limit for checks that Redis decides, which nobody here reaches either. It refills faster than plenty, so that Redis can
// forget.
var asked = Setting{Rate: 1000, Period: time.Second, Burst: 100_000_000}

// BenchmarkRedis is a check by way of Redis, and for comparison one from a lease, by 1 to 1024 callers. No key is known at the start.
// ns/op is wall time by checks; p50 and p99 are of single calls.
func BenchmarkRedis(b *testing.B) {
	subjects := slices.Concat(RemoteFloors, []Subject{Lease}, Remote)
	for _, keys := range []func() *Keys{
		Hot,
		func() *Keys { return Uniform("10k", 10_000) },
		func() *Keys { return Zipf("zipf10k", 10_000, 1.1) },
		manyZipf,
	} {
		k := keys()
		b.Run("keys="+k.Name, func(b *testing.B) {
			for _, s := range subjects {
				b.Run(fmt.Sprintf("impl=%s/path=%s", s.Impl, s.Path), func(b *testing.B) {
					benchmarkRemote(b, k, s, "", 1, 16, 128, 1024)
				})
			}
		})
	}
}

// BenchmarkRTT is the same with a millisecond more on the way to Redis and back.
func BenchmarkRTT(b *testing.B) {
	for _, k := range []*Keys{Hot(), Zipf("zipf10k", 10_000, 1.1)} {
		b.Run("keys="+k.Name, func(b *testing.B) {
			for _, s := range slices.Concat(RemoteFloors[:1], Remote) {
				b.Run(fmt.Sprintf("impl=%s/path=%s", s.Impl, s.Path), func(b *testing.B) {
					server := redistest.Start(b)
					p := redistest.StartProxy(b, server.Addr())
					// In one direction: a timer fires in whole milliseconds, so that two halves would come to two.
					p.SetDelay(redistest.Delay{Latency: time.Millisecond}, redistest.Delay{})
					benchmarkRemote(b, k, s, p.Addr(), 1, 16, 128, 1024)
				})
			}
		})
	}
}

func benchmarkRemote(b *testing.B, k *Keys, s Subject, addr string, counts ...int) {
	setting, every := asked, 1
	setting.Addr = addr
	if s.Path == Lease.Path {
		setting, every = plenty, 32 // timing each check would cost as much as the check
	}
	o, rdb := open(b, s, setting)
	for _, n := range counts {
		b.Run(fmt.Sprintf("goroutines=%d", n), func(b *testing.B) {
			if first(b) {
				return
			}
			Drive(k, o.Allow, Load{Goroutines: n, For: benchTime() / 4, Every: every}) // connections, scripts, estimates
			var before Usage
			if rdb != nil { // else it is behind a proxy, and all that passes is copied here
				before = usage(b, rdb)
			}
			mine, decided := processTime(b), remoteBefore(o)
			out := run(b, k, o, Load{Goroutines: n, Every: every})
			mine = processTime(b) - mine
			checks := float64(max(1, out.Checks))
			b.ReportMetric(float64(out.Latency.ValueAtQuantile(50)), "p50-ns")
			b.ReportMetric(float64(out.Latency.ValueAtQuantile(99)), "p99-ns")
			b.ReportMetric(float64(mine)/checks, "client-cpu-ns/op")
			if rdb != nil {
				used := usage(b, rdb).Sub(before)
				b.ReportMetric(float64(used.CPU)/checks, "redis-cpu-ns/op")
				b.ReportMetric(float64(used.Calls)/checks, "calls/op")
				if used.Calls > 0 {
					b.ReportMetric(float64(used.InCall.Microseconds())/float64(used.Calls), "us/call")
				}
				b.ReportMetric(float64(used.Slow), "slow-calls")
			}
			reportRemote(b, o, decided, out.Checks)
		})
	}
}

func usage(b *testing.B, rdb *redis.Client) Usage {
	b.Helper()
	u, err := UsageOf(background, rdb)
	if err != nil {
		b.Fatal(err)
	}
	return u
}

// processTime is what this process has used of the processors.
func processTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkCold is a check of a key that nobody has seen before.
func BenchmarkCold(b *testing.B) {
	var serial atomic.Int64
	for _, s := range slices.Concat([]Subject{Lease}, Remote, Local[2:]) {
		b.Run(fmt.Sprintf("impl=%s/path=%s", s.Impl, s.Path), func(b *testing.B) {
			setting := asked
			o, _ := open(b, s, setting)
			for _, n := range []int{1, 128} {
				b.Run(fmt.Sprintf("goroutines=%d", n), func(b *testing.B) {
					if first(b) {
						return
					}
					fresh := func(string) bool { return o.Allow("cold-" + strconv.FormatInt(serial.Add(1), 10)) }
					o.Allow(Key(0))
					out := run(b, Hot(), &Opened{Allow: fresh}, Load{Goroutines: n, Every: 1})
					b.ReportMetric(float64(out.Latency.ValueAtQuantile(50)), "p50-ns")
					b.ReportMetric(float64(out.Latency.ValueAtQuantile(99)), "p99-ns")
				})
			}
		})
	}
}
