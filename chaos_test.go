package tierlimit_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/chaos"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// quiet drops what go-redis logs of refused connections, which these tests cause by the thousand.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func init() { redis.SetLogger(quiet{}) }

// Every fault of internal/chaos, on child processes: G1, G4, G5 and G6 on a real Redis.
func TestChaos(t *testing.T) { chaos.Run(t, redistest.ProcessBackend{}) }

// G3: with a Redis that hangs, warm keys do not notice, callers of cold keys wait one time-out each until the breaker opens
// and not at all after that, and goroutines stay flat.
func TestChaosHangLeavesWarmKeysFast(t *testing.T) {
	server := redistest.Start(t)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()}) // the user's own client, with its defaults
	t.Cleanup(func() { rdb.Close() })
	const timeout = 50 * time.Millisecond
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithLeaseTTL(20*time.Second), tierlimit.WithRemoteTimeout(timeout))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close(context.Background()) })
	l, err := h.Limiter("api", tierlimit.TokenBucket(10_000_000, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	// Demand makes the key warm.
	eventually(t, "a lease", func() bool {
		for range 2000 {
			if _, err := l.Allow(ctx, "warm"); err != nil {
				t.Fatal(err)
			}
		}
		return h.Stats().Leased > 50_000
	})
	base := runtime.NumGoroutine()
	if err := server.Hang(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Continue() })

	late := watchMachine(t)
	var warm fleet.Histogram
	peak := 0
	local := 0
	for i := range 20_000 {
		start := time.Now()
		r, err := l.Allow(ctx, "warm")
		warm.Record(time.Since(start))
		if err != nil {
			t.Fatal(err)
		}
		if r.Source == tierlimit.Local && r.Allowed {
			local++
		}
		if i%1000 == 0 {
			peak = max(peak, runtime.NumGoroutine())
		}
	}
	// Callers that come before the breaker opens wait one time-out each, those after not at all.
	counted, opened := new(fleet.Histogram), new(fleet.Histogram)
	for i := range 200 {
		cold := counted
		if h.Stats().Breaker != "closed" {
			cold = opened
		}
		start := time.Now()
		r, err := l.Allow(ctx, fmt.Sprint("cold", i))
		cold.Record(time.Since(start))
		if err != nil {
			t.Fatal(err)
		}
		if r.Source != tierlimit.Fallback {
			t.Fatalf("a cold key was decided by %v with a hung Redis", r.Source)
		}
		peak = max(peak, runtime.NumGoroutine())
	}
	t.Logf("warm: p99.9 %v, %d of 20000 from the lease; cold: %d before the breaker opened, median %v, at most %v; %d after, p95 %v, at most %v; goroutines %d, at most %d",
		warm.Percentile(99.9), local, counted.Count(), counted.Percentile(50), counted.Max(), opened.Count(), opened.Percentile(95), opened.Max(), base, peak)
	if local < 20_000 {
		t.Errorf("%d of 20000 checks of a warm key were not answered from its lease", 20_000-local)
	}
	if n := counted.Count(); n > 10 {
		t.Errorf("%d cold keys waited for a hung Redis, want about the breaker's 5", n)
	}
	newJury(t).judge(t, busy(late()), func(short func(string, ...any)) {
		if p := warm.Percentile(99.9); p >= time.Millisecond {
			short("a warm key took %v at p99.9, want less than 1ms", p)
		}
		if p := opened.Percentile(95); p >= time.Millisecond {
			short("a cold key took %v at p95 once the breaker was open, want less than 1ms", p)
		}
		if most := counted.Max(); most > timeout+100*time.Millisecond {
			short("a cold key waited %v, want about the remote timeout of %v", most, timeout)
		}
	})
	if peak > base+20 {
		t.Errorf("%d goroutines, %d before the hang", peak, base)
	}
}
