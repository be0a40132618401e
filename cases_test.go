package tierlimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// What other limiters got wrong, by public reports, held to the right values.

// ---- A. Redis slow, down, wrong ----

// A peer accepts and never answers: the callers of the breaker's five exchanges wait one timeout each, nobody after them.
func TestCaseSilentPeer(t *testing.T) {
	j := newJury(t)
	for range 6 {
		px := redistest.StartProxy(t, sharedServer(t).Addr())
		if err := px.SetMode(redistest.BlackHole); err != nil {
			t.Fatal(err)
		}
		h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t), tierlimit.WithRemoteTimeout(50*time.Millisecond))
		l := limiterOf(t, h, tierlimit.TokenBucket(1000, time.Second))
		late := watchMachine(t)
		slow, fast := []time.Duration{}, []time.Duration{}
		for i := range 200 {
			began := time.Now()
			allowN(t, l, fmt.Sprint(i), 1)
			if took := time.Since(began); took > 25*time.Millisecond {
				slow = append(slow, took)
			} else {
				fast = append(fast, took)
			}
		}
		j.judge(t, busy(late()), func(short func(string, ...any)) {
			if len(slow) > 5 {
				short("%d of 200 calls were slow, want the breaker's 5", len(slow))
			}
			if len(slow) > 0 && slices.Max(slow) > 60*time.Millisecond+late() {
				short("a call took %v with a timeout of 50ms", slices.Max(slow))
			}
			slices.Sort(fast)
			if len(fast) == 0 || fast[len(fast)*95/100] > time.Millisecond {
				short("of %d calls that did not wait 5%% took more than a millisecond: %v", len(fast), fast[len(fast)*95/100:])
			}
		})
	}
}

// Goroutines and memory stay flat while Redis is stopped, and no call takes longer than the timeout.
func TestCaseStoppedRedis(t *testing.T) {
	j := newJury(t)
	for range 3 {
		srv := redistest.Start(t)
		h := hybridOn(t, clientOf(t, srv.Options()), ownPrefix(t), tierlimit.WithRemoteTimeout(50*time.Millisecond))
		l := limiterOf(t, h, tierlimit.TokenBucket(1000, time.Second))
		eventually(t, "online", isOnline(h))
		for i := range 100 { // their cells
			allowN(t, l, fmt.Sprint(i), 1)
		}
		base, heap := runtime.NumGoroutine(), heapInUse()
		if err := srv.Hang(); err != nil {
			t.Fatal(err)
		}
		late := watchMachine(t)
		var wg sync.WaitGroup
		var slowest atomic.Int64
		peak, last := 0, 0
		for i := range 1000 {
			wg.Go(func() {
				began := time.Now()
				if _, err := l.Allow(context.Background(), fmt.Sprint(i%100)); err != nil {
					t.Error(err)
				}
				for {
					took, old := int64(time.Since(began)), slowest.Load()
					if took <= old || slowest.CompareAndSwap(old, took) {
						return
					}
				}
			})
			last = runtime.NumGoroutine()
			peak = max(peak, last)
			time.Sleep(time.Millisecond)
		}
		wg.Wait()
		grown := heapInUse() - heap
		t.Logf("%d goroutines before, at most %d, %d at the end; the slowest call took %v; %d bytes more in use", base, peak, last, time.Duration(slowest.Load()), grown)
		if grown > 512<<10 && !tierlimit.RaceEnabled {
			t.Errorf("%d bytes are kept of 1000 calls", grown)
		}
		j.judge(t, busy(late()), func(short func(string, ...any)) {
			// 1000 callers a second, of which those of a timeout wait, and the calls themselves.
			if peak > base+100 || last > base+20 {
				short("%d goroutines before, at most %d, %d at the end", base, peak, last)
			}
			if d := time.Duration(slowest.Load()); d > 60*time.Millisecond+late() {
				short("a call took %v with a timeout of 50ms", d)
			}
		})
		if err := srv.Continue(); err != nil {
			t.Fatal(err)
		}
	}
}

// heapInUse is what the collector cannot free.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A caller's context ends its wait, and without one the built-in timeout does.
func TestCaseContextAgainstHungRedis(t *testing.T) {
	j := newJury(t)
	for range 6 {
		px := redistest.StartProxy(t, sharedServer(t).Addr())
		if err := px.SetMode(redistest.BlackHole); err != nil {
			t.Fatal(err)
		}
		rdb := clientOf(t, px.Options(), func(o *redis.Options) { o.MaxRetries = 3; o.ContextTimeoutEnabled = false }) // as a user would have it
		l := limiterOf(t, hybridOn(t, rdb, ownPrefix(t), tierlimit.WithRemoteTimeout(500*time.Millisecond)), tierlimit.TokenBucket(10, time.Second))
		late := watchMachine(t)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := l.Allow(ctx, "k")
		own := time.Since(began)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v after %v", err, own)
		}
		gone, stop := context.WithCancel(t.Context())
		stop()
		if _, err := l.Allow(gone, "k"); !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that is over: %v", err)
		}
		l = limiterOf(t, hybridOn(t, rdb, ownPrefix(t), tierlimit.WithRemoteTimeout(50*time.Millisecond)), tierlimit.TokenBucket(10, time.Second))
		began = time.Now()
		r, err := l.Allow(context.Background(), "k")
		built := time.Since(began)
		if err != nil || r.Source != tierlimit.Fallback || built < 40*time.Millisecond {
			t.Errorf("%v, %v after %v", r, err, built)
		}
		j.judge(t, busy(late()), func(short func(string, ...any)) {
			if own > 60*time.Millisecond+late() || built > 60*time.Millisecond+late() {
				short("%v with a context of 50ms, %v with a timeout of 50ms", own, built)
			}
		})
	}
}

// A closed port is a state, and Redis is used within a probe interval once it is there.
func TestCaseRedisComesUpLater(t *testing.T) {
	px := redistest.StartProxy(t, sharedServer(t).Addr())
	if err := px.SetMode(redistest.Refuse); err != nil {
		t.Fatal(err)
	}
	h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t), tierlimit.WithLocalShare(0),
		tierlimit.WithBreaker(breaker.Settings{Cooldown: 100 * time.Millisecond, MaxCooldown: 200 * time.Millisecond}))
	l := limiterOf(t, h, tierlimit.TokenBucket(1000, time.Second))
	eventually(t, "decided locally", func() bool {
		r := allowN(t, l, "k", 1)
		return r.Allowed && r.Source == tierlimit.Fallback
	})
	if s := h.Stats(); s.State != tierlimit.StateShare || s.Breaker == "closed" || s.Failures == 0 {
		t.Errorf("%+v", s)
	}
	if err := px.SetMode(redistest.Pass); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	eventually(t, "Redis decides", func() bool { return allowN(t, l, "k", 1).Source == tierlimit.Remote })
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("used after %v, with a probe every 200ms", took)
	}
}

// A server from which a connection takes longer than WithRemoteTimeout (two or three round trips) is reached all the same.
func TestFarRedisIsReached(t *testing.T) {
	proxy := redistest.StartProxy(t, sharedServer(t).Addr())
	proxy.SetDelay(redistest.Delay{Latency: 35 * time.Millisecond}, redistest.Delay{Latency: 35 * time.Millisecond})
	options := proxy.Options()
	options.DialTimeout, options.ReadTimeout, options.WriteTimeout = 5*time.Second, 3*time.Second, 3*time.Second // as go-redis has them
	rdb := redis.NewClient(options)                                                                              // which honours contexts
	t.Cleanup(func() { _ = rdb.Close() })
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithRemoteTimeout(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close(context.Background()) })
	eventually(t, "online", func() bool { return h.Stats().State == tierlimit.StateOnline })
}

// The policies, with a Redis that was never up.
func TestCaseFallbackPolicies(t *testing.T) {
	farFromWindowEnd(time.Minute, 4*time.Second)
	for policy, want := range map[tierlimit.FallbackPolicy]int{
		tierlimit.FallbackOpen: 100, tierlimit.FallbackClosed: 0, tierlimit.FallbackShare: 10, tierlimit.FallbackShareNow: 10,
	} {
		rdb := clientOf(t, &redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
		h := hybridOn(t, rdb, ownPrefix(t), tierlimit.WithInstances(1), tierlimit.WithFallback(policy), tierlimit.WithRemoteTimeout(200*time.Millisecond))
		l := limiterOf(t, h, tierlimit.FixedWindow(10, time.Minute))
		n := 0
		for range 100 {
			r := allowN(t, l, "k", 1)
			if r.Source != tierlimit.Fallback {
				t.Errorf("%v: %v", policy, r)
			}
			if r.Allowed {
				n++
			}
			if h.Stats().State != tierlimit.StateShare {
				time.Sleep(5 * time.Millisecond) // so that the breaker opens within these 100 calls, which are counted
			}
		}
		if n != want {
			t.Errorf("%v: %d admitted, want %d", policy, n, want)
		}
		if s := l.Stats(); s.Fallback != int64(want) || s.Denied != int64(100-want) {
			t.Errorf("%v: %+v", policy, s)
		}
		if policy.String() == "" || strings.HasPrefix(policy.String(), "FallbackPolicy") {
			t.Errorf("policy %d has no name", policy)
		}
	}
	// A fleet of a stated size takes its least part each.
	rdb := clientOf(t, &redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	h := hybridOn(t, rdb, ownPrefix(t), tierlimit.WithInstances(4), tierlimit.WithRemoteTimeout(200*time.Millisecond))
	l := limiterOf(t, h, tierlimit.FixedWindow(10, time.Minute))
	eventually(t, "the breaker opens", func() bool { return h.Stats().State == tierlimit.StateShare })
	if n := admitted(t, l, "k", 50); n != 2 {
		t.Errorf("%d admitted by one of four, want floor(10/4)", n)
	}
}

// An exhausted key is a denial and no failure.
func TestCaseExhaustedKeyIsNoFailure(t *testing.T) {
	h := onShared(t, tierlimit.WithLocalShare(0))
	l := limiterOf(t, h, tierlimit.TokenBucket(3, time.Hour))
	for i := range 50 {
		if r := allowN(t, l, "k", 1); r.Allowed != (i < 3) || r.Source == tierlimit.Fallback {
			t.Errorf("call %d: %v", i, r)
		}
	}
	if s := h.Stats(); s.Failures != 0 || s.Breaker != "closed" || s.State != tierlimit.StateOnline {
		t.Errorf("%+v", s)
	}
}

// ---- B. Local tier and exchange ----

// What is spent is charged once, however often it is settled.
func TestCaseNothingIsChargedTwice(t *testing.T) {
	for _, limit := range fiveOf(20, time.Hour) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			farFromWindowEnd(time.Hour, 10*time.Second)
			rdb, prefix := clientOf(t, sharedServer(t).Options()), ownPrefix(t)
			h := hybridOn(t, rdb, prefix, tierlimit.WithLocalShare(1))
			l := limiterOf(t, h, limit)
			for i := range 10 {
				if !allowN(t, l, "k", 1).Allowed {
					t.Errorf("call %d denied", i)
				}
				if i%3 == 2 {
					if err := h.Flush(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}
			if err := h.Flush(t.Context()); err != nil {
				t.Error(err)
			}
			eventually(t, "all is returned", func() bool { return h.Stats().Leased == 0 })
			other := limiterOf(t, hybridOn(t, rdb, prefix), limit)
			if r, err := other.Peek(t.Context(), "k"); err != nil || r.Remaining != 10 || !r.Allowed {
				t.Errorf("%v, %v, want 10 of 20 left", r, err)
			}
		})
	}
}

// Two Hybrids do not meet, be it by database or by prefix.
func TestCaseTwoHybridsOfOneProcess(t *testing.T) {
	srv, prefix := sharedServer(t), ownPrefix(t)
	one := hybridOn(t, clientOf(t, srv.Options()), prefix)
	two := hybridOn(t, clientOf(t, srv.Options(), func(o *redis.Options) { o.DB = 1 }), prefix, tierlimit.WithSyncInterval(10*time.Millisecond))
	three := hybridOn(t, clientOf(t, srv.Options()), prefix+"other:")
	for i, h := range []*tierlimit.Hybrid{one, two, three} {
		if n := admitted(t, limiterOf(t, h, tierlimit.TokenBucket(5, time.Hour)), "k", 20); n != 5 {
			t.Errorf("%d: %d admitted, want 5 of its own", i, n)
		}
		if s := h.Stats(); s.Instances != 1 {
			t.Errorf("%d: %d instances", i, s.Instances)
		}
	}
}

// No token is lost or made while limits change under load.
func TestCaseLimitChangesUnderLoad(t *testing.T) {
	for _, remote := range []bool{false, true} {
		for _, limit := range fiveOf(3000, time.Hour) {
			t.Run(fmt.Sprintf("remote=%t/%v", remote, limit.Algorithm), func(t *testing.T) {
				farFromWindowEnd(time.Hour, 10*time.Second)
				var h *tierlimit.Hybrid
				if remote {
					h = onShared(t)
				} else {
					h = alone(t)
				}
				l := limiterOf(t, h, limit)
				other := limit.WithBurst(2900)
				if !strings.HasSuffix(limit.Algorithm.String(), "bucket") {
					other.Rate = 2900
				}
				var n atomic.Int64
				var wg sync.WaitGroup
				stop := make(chan struct{})
				for i := range 8 {
					wg.Go(func() {
						for j := i; ; j++ {
							select {
							case <-stop:
								return
							case <-time.After(2 * time.Millisecond):
							}
							if err := l.SetLimit([]tierlimit.Limit{limit, other}[j%2]); err != nil {
								t.Error(err)
							}
						}
					})
				}
				var spenders sync.WaitGroup
				for range 64 {
					spenders.Go(func() {
						for range 40 {
							if r, err := l.Allow(t.Context(), "k"); err != nil {
								t.Error(err)
							} else if r.Allowed {
								n.Add(1)
							}
						}
					})
				}
				spenders.Wait()
				close(stop)
				wg.Wait()
				if err := l.SetLimit(limit); err != nil {
					t.Fatal(err)
				}
				if err := h.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				total := n.Load() + drained(t, l, "k")
				low, high := int64(3000), int64(3000)
				if strings.HasSuffix(limit.Algorithm.String(), "bucket") { // clipped to the lower burst while it is in force, and refilled
					low, high = 2900, 3003
				}
				if total < low || total > high {
					t.Errorf("%d admitted, want %d to %d", total, low, high)
				}
			})
		}
	}
}

// The key is deleted under a warm cache.
func TestCaseKeyDeleted(t *testing.T) {
	for _, limit := range fiveOf(100, time.Hour) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			farFromWindowEnd(time.Hour, 10*time.Second)
			rdb, prefix := clientOf(t, sharedServer(t).Options()), ownPrefix(t)
			l := limiterOf(t, hybridOn(t, rdb, prefix), limit)
			n := admitted(t, l, "k", 60)
			if n != 60 {
				t.Errorf("%d of 60 admitted", n)
			}
			keys, err := rdb.Keys(t.Context(), prefix+"1:*l:k").Result()
			if err != nil || len(keys) != 1 {
				t.Fatalf("keys %q, %v", keys, err)
			}
			if err := rdb.Del(t.Context(), keys...).Err(); err != nil {
				t.Fatal(err)
			}
			for range 200 {
				if allowN(t, l, "k", 1).Allowed {
					n++
				}
				time.Sleep(time.Millisecond)
			}
			if n > 100 {
				t.Errorf("%d admitted of 100: a free burst", n)
			}
			// A bucket refills from empty, in an hour; windows and logs are told again what was spent, and have the rest, less what was
			// leased when the key was lost: a local share at most.
			if !strings.HasSuffix(limit.Algorithm.String(), "bucket") {
				if n += int(drained(t, l, "k")); n < 90 || n > 100 {
					t.Errorf("%d admitted, want 90 to 100", n)
				}
			}
			if exist, err := rdb.Exists(t.Context(), keys[0]).Result(); err != nil || exist != 1 {
				t.Errorf("the key was not made again: %d, %v", exist, err)
			}
		})
	}
}

// Limit 1, two instances, 30 hits.
func TestCaseLimitOne(t *testing.T) {
	for _, limit := range fiveOf(1, time.Hour) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		rdb, prefix := clientOf(t, sharedServer(t).Options()), ownPrefix(t)
		one := limiterOf(t, hybridOn(t, rdb, prefix), limit)
		two := limiterOf(t, hybridOn(t, rdb, prefix), limit)
		if n := admitted(t, one, "k", 15) + admitted(t, two, "k", 15); n != 1 {
			t.Errorf("%v: %d admitted", limit, n)
		}
	}
}

// Many goroutines on one key.
func TestCaseManyGoroutinesOneKey(t *testing.T) {
	for _, share := range []float64{0, 0.1, 1} {
		l := limiterOf(t, onShared(t, tierlimit.WithLocalShare(share)), tierlimit.TokenBucket(100, time.Hour))
		var n atomic.Int64
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				if r, err := l.Allow(context.Background(), "k"); err != nil {
					t.Error(err)
				} else if r.Allowed {
					n.Add(1)
				}
			})
		}
		wg.Wait()
		if total := n.Load() + drained(t, l, "k"); total != 100 {
			t.Errorf("share %v: %d admitted, want 100", share, total)
		}
		if share == 0 && n.Load() != 100 {
			t.Errorf("%d of 1000 admitted at once, want 100", n.Load())
		}
	}
}

// No lock is held over the round trip.
func TestCaseKeysInParallel(t *testing.T) {
	px := redistest.StartProxy(t, sharedServer(t).Addr())
	h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t))
	l := limiterOf(t, h, tierlimit.TokenBucket(10, time.Hour))
	eventually(t, "online", isOnline(h))
	px.SetDelay(redistest.Delay{Latency: 2500 * time.Microsecond}, redistest.Delay{Latency: 2500 * time.Microsecond})
	best := time.Hour
	for round := range 5 { // a busy machine may delay one of them, a lock delays all
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() { allowN(t, l, fmt.Sprintf("%d/%d", round, i), 1) })
		}
		wg.Wait()
		best = min(best, time.Since(began))
	}
	if best > 30*time.Millisecond {
		t.Errorf("50 keys in %v with a Redis 5ms away", best)
	}
}

// The last token passes on the cold path and on the warm one.
func TestCaseLastToken(t *testing.T) {
	for _, limit := range fiveOf(10, time.Hour) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		for _, share := range []float64{0, 0.1, 0.5, 1} {
			l := limiterOf(t, onShared(t, tierlimit.WithLocalShare(share)), limit)
			if n := drained(t, l, "k"); n != 10 {
				t.Errorf("%v, share %v: %d admitted", limit, share, n)
			}
		}
		if n := admitted(t, limiterOf(t, alone(t), limit), "k", 50); n != 10 {
			t.Errorf("%v, alone: %d admitted", limit, n)
		}
	}
}

// ---- C. Time to live ----

// Every key has a time to live after every operation, and idle keys go.
func TestCaseTimeToLive(t *testing.T) {
	for _, limit := range fiveOf(20, 500*time.Millisecond) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			rdb, prefix := clientOf(t, sharedServer(t).Options()), ownPrefix(t)
			h := hybridOn(t, rdb, prefix, tierlimit.WithLeaseTTL(100*time.Millisecond))
			l := limiterOf(t, h, limit)
			const grace = 2 * time.Second // two slots and a second
			check := func(op string) {
				t.Helper()
				if err := redistest.CheckTTLs(ctx, rdb, prefix); err != nil {
					t.Errorf("after %s: %v", op, err)
				}
				keys, err := rdb.Keys(ctx, prefix+"1:*l:k").Result()
				if err != nil || len(keys) != 1 {
					t.Errorf("after %s: keys %q, %v", op, keys, err)
				}
				for _, k := range keys {
					if ttl, err := rdb.PTTL(ctx, k).Result(); err != nil || ttl > 2*limit.Period+grace {
						t.Errorf("after %s: %v, %v", op, ttl, err)
					}
				}
			}
			steps := []struct {
				name string
				do   func() error
			}{
				{"Allow", func() error { _, err := l.Allow(ctx, "k"); return err }},
				{"a denial", func() error { _, err := l.AllowN(ctx, "k", 20); return err }},
				{"Peek", func() error { _, err := l.Peek(ctx, "k"); return err }},
				{"Refund", func() error { return l.Refund(ctx, "k", 1) }},
				{"Reset", func() error { return l.Reset(ctx, "k") }},
				{"SetLimit", func() error {
					other := limit
					other.Rate, other.Burst = 30, 30
					return l.SetLimit(other)
				}},
				{"Flush", func() error { return h.Flush(ctx) }},
			}
			for _, s := range steps {
				if err := s.do(); err != nil {
					t.Errorf("%s: %v", s.name, err)
				}
				check(s.name)
			}
			// A key found without one gets one.
			keys, err := rdb.Keys(ctx, prefix+"1:*l:k").Result()
			if err != nil || len(keys) != 1 {
				t.Fatalf("%q, %v", keys, err)
			}
			if err := rdb.Persist(ctx, keys[0]).Err(); err != nil {
				t.Fatal(err)
			}
			if err := l.Refund(ctx, "k", 1); err != nil {
				t.Fatal(err)
			}
			if err := h.Flush(ctx); err != nil {
				t.Fatal(err)
			}
			check("an exchange of a key without a time to live")
			eventually(t, "an idle key goes", func() bool { return rdb.Exists(ctx, keys[0]).Val() == 0 })
		})
	}
}

// Short windows work.
func TestCaseShortWindows(t *testing.T) {
	for _, window := range []time.Duration{500 * time.Millisecond, 250 * time.Millisecond, time.Millisecond} {
		for _, limit := range fiveOf(5, window) {
			t.Run(limit.String(), func(t *testing.T) {
				t.Parallel()
				l := limiterOf(t, onShared(t, tierlimit.WithLeaseTTL(50*time.Millisecond)), limit)
				var mem envelope.Memory
				n := spendRecorded(t, l, "k", 40, &mem)
				for end := time.Now().Add(max(20*time.Millisecond, window*5/2)); time.Now().Before(end); time.Sleep(window / 100) {
					n += spendRecorded(t, l, "k", 3, &mem)
				}
				if v := envelope.Check(fleet.Envelope(limit), mem.History()); v.Overshoot > 0 {
					t.Error(v)
				}
				if n <= 5 {
					t.Errorf("%d admitted in two windows and a half", n)
				}
			})
		}
	}
}

// spendRecorded makes calls of cost 1 and records which were admitted when.
func spendRecorded(t *testing.T, l *tierlimit.Limiter, key string, calls int, mem *envelope.Memory) (n int) {
	t.Helper()
	for range calls {
		a := envelope.Admission{Called: envelope.Now(), Cost: 1, Key: envelope.KeyID(key)}
		r := allowN(t, l, key, 1)
		if a.Returned = envelope.Now(); r.Allowed {
			n++
			if err := mem.Record(a); err != nil {
				t.Error(err)
			}
		}
	}
	return n
}

// Hits never extend a fixed window.
func TestCaseHitsDoNotExtendAWindow(t *testing.T) {
	const window = 500 * time.Millisecond
	l := limiterOf(t, onShared(t), tierlimit.FixedWindow(3, window))
	n, began, late := 0, time.Now(), watchMachine(t)
	for ; time.Since(began) < 2100*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		if allowN(t, l, "k", 1).Allowed {
			n++
		}
	}
	took := time.Since(began)
	if most := 3 * int(took/window+2); n > most {
		t.Errorf("%d admitted in %v under 3 per 500ms, at most %d fit in", n, took, most)
	}
	newJury(t).judge(t, busy(late()), func(short func(string, ...any)) {
		if n < 12 {
			short("%d admitted in %v under 3 per 500ms", n, took)
		}
	})
}

// ---- D. Numbers ----

// Waiting exactly RetryAfter is enough for a single caller.
func TestCaseRetryAfterIsEnough(t *testing.T) {
	for _, limit := range fiveOf(4, 200*time.Millisecond) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			for _, cost := range []int64{1, 3} {
				l := limiterOf(t, onShared(t, tierlimit.WithLocalShare(0)), limit)
				for range 5 {
					var r tierlimit.Result
					for r = allowN(t, l, "k", cost); r.Allowed; r = allowN(t, l, "k", cost) {
					}
					time.Sleep(r.RetryAfter)
					if again := allowN(t, l, "k", cost); !again.Allowed {
						t.Errorf("cost %d: after %v: %v", cost, r.RetryAfter, again)
					}
				}
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		for _, limit := range fiveOf(7, time.Second) {
			h, err := tierlimit.NewLocal()
			if err != nil {
				t.Fatal(err)
			}
			l := limiterOf(t, h, limit)
			for i := range 50 {
				cost := int64(1 + i%7)
				r := allowN(t, l, "k", cost)
				if r.Allowed {
					continue
				}
				time.Sleep(r.RetryAfter - time.Microsecond)
				if early := allowN(t, l, "k", cost); early.Allowed {
					t.Errorf("%v: a microsecond before %v the cost passes", limit, r.RetryAfter)
				}
				time.Sleep(time.Microsecond)
				if again := allowN(t, l, "k", cost); !again.Allowed {
					t.Errorf("%v: after exactly %v: %v", limit, r.RetryAfter, again)
				}
			}
		}
	})
}

// One call of a burst of 1000 leaves 999 at every rate.
func TestCaseRemainingAtEveryRate(t *testing.T) {
	h, alone := onShared(t), alone(t)
	for _, rate := range []int64{1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000} {
		for _, h := range []*tierlimit.Hybrid{h, alone} {
			l, err := h.Limiter(fmt.Sprint("r", rate), tierlimit.TokenBucket(rate, time.Second).WithBurst(1000))
			if err != nil {
				t.Fatal(err)
			}
			if r := allowN(t, l, "k", 1); !r.Allowed || r.Remaining != 999 {
				t.Errorf("%d/s: %v, want 999 left", rate, r)
			}
		}
	}
}

// A capacity of 1e15 goes down by one per call.
func TestCaseGreatCapacity(t *testing.T) {
	for _, limit := range []tierlimit.Limit{
		tierlimit.TokenBucket(1, time.Hour).WithBurst(1e15), tierlimit.LeakyBucket(1, time.Hour).WithBurst(1e15),
		tierlimit.FixedWindow(1e15, 24*time.Hour), tierlimit.SlidingWindow(1e15, 24*time.Hour), tierlimit.SlidingLog(1e15, 24*time.Hour),
	} {
		for _, h := range []*tierlimit.Hybrid{onShared(t, tierlimit.WithLocalShare(0)), alone(t)} {
			l := limiterOf(t, h, limit)
			for i := range int64(5) {
				if r := allowN(t, l, "k", 1); !r.Allowed || r.Remaining != 1e15-1-i {
					t.Errorf("%v, call %d: %v", limit.Algorithm, i, r)
				}
			}
			if r := allowN(t, l, "k", 1e15-5); !r.Allowed || r.Remaining != 0 {
				t.Errorf("%v: the rest at once: %v", limit.Algorithm, r)
			}
			if r := allowN(t, l, "k", 2); r.Allowed {
				t.Errorf("%v: more than all: %v", limit.Algorithm, r)
			}
		}
	}
}

// A lowered capacity is in force at once.
func TestCaseCapacityLowered(t *testing.T) {
	for _, limit := range fiveOf(100, time.Hour) {
		for _, h := range []*tierlimit.Hybrid{onShared(t, tierlimit.WithLocalShare(1)), alone(t)} {
			farFromWindowEnd(time.Hour, 10*time.Second)
			l := limiterOf(t, h, limit)
			for range 50 {
				allowN(t, l, "k", 1)
				if h.Stats().Leased > 1 && h.Stats().Exchanges > 0 {
					break
				}
				time.Sleep(5 * time.Millisecond) // 50 calls at most: a rate that is known leases
			}
			if h.Stats().Exchanges > 0 && h.Stats().Leased == 0 {
				t.Errorf("%v: no lease is in hand", limit.Algorithm)
			}
			low := limit
			low.Rate, low.Burst = 2, 2
			if err := l.SetLimit(low); err != nil {
				t.Fatal(err)
			}
			if n := admitted(t, l, "k", 50); n > 2 {
				t.Errorf("%v: %d pass at once under a capacity of 2", limit.Algorithm, n)
			}
			if r := allowN(t, l, "k", 3); r.Allowed || r.RetryAfter != tierlimit.Never || r.Limit != 2 {
				t.Errorf("%v: %v", limit.Algorithm, r)
			}
			if l.Limit() != low || l.LimitFor("k") != low {
				t.Errorf("%v is said to be in force", l.Limit())
			}
		}
	}
}

// Buckets by a clock that can be told what to do.
func TestCaseBucketArithmetic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := tierlimit.NewLocal()
		if err != nil {
			t.Fatal(err)
		}
		get := func(name string, limit tierlimit.Limit) *tierlimit.Limiter {
			l, err := h.Limiter(name, limit)
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
		l := get("30", tierlimit.TokenBucket(6000, time.Second))
		if n := admitted(t, l, "k", 6001); n != 6000 {
			t.Errorf("30: %d of 6001 at once", n)
		}
		l = get("33", tierlimit.TokenBucket(3, 300*time.Millisecond).WithBurst(5))
		if n := admitted(t, l, "k", 10); n != 5 {
			t.Errorf("33: %d", n)
		}
		time.Sleep(350 * time.Millisecond)
		if n := admitted(t, l, "k", 10); n != 3 {
			t.Errorf("33: %d after 350ms, want 3", n)
		}
		l = get("37", tierlimit.LeakyBucket(1, time.Second).WithBurst(3))
		for i := range 4 {
			r := allowN(t, l, "k", 1)
			if r.Allowed != (i < 3) {
				t.Errorf("37: call %d: %v", i, r)
			}
			if want := time.Duration(i) * time.Second; r.Allowed && r.Delay != want {
				t.Errorf("37: call %d is to be held for %v, want %v", i, r.Delay, want)
			}
		}
		for _, limit := range []tierlimit.Limit{tierlimit.TokenBucket(997, time.Second).WithBurst(10), tierlimit.LeakyBucket(997, time.Second).WithBurst(10)} {
			l = get("40-"+limit.Algorithm.String(), limit)
			const calls = 1_000_000
			n, gap := int64(0), 333*time.Microsecond
			began := time.Now()
			for range calls {
				r, _ := l.Allow(t.Context(), "k")
				if r.Allowed {
					n++
				}
				time.Sleep(gap)
			}
			ideal := 10 + int64(time.Since(began)-gap)*997/int64(time.Second)
			if d := n - ideal; d < -1 || d > 1 {
				t.Errorf("40: %v: %d admitted in %v, ideal %d", limit, n, time.Since(began), ideal)
			}
		}
	})
}

// Costs and limits that are none.
func TestCaseOddCosts(t *testing.T) {
	for _, limit := range append(fiveOf(5, time.Hour), tierlimit.TokenBucket(1, 86400*time.Second)) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		for _, h := range []*tierlimit.Hybrid{onShared(t, tierlimit.WithLocalShare(0)), onShared(t, tierlimit.WithLocalShare(1)), alone(t)} {
			l := limiterOf(t, h, limit)
			for _, n := range []int64{limit.Burst + 1, 2e8, math.MaxInt64} {
				if r := allowN(t, l, "k", n); r.Allowed || r.RetryAfter != tierlimit.Never || r.Remaining != limit.Burst {
					t.Errorf("34: %v: %d: %v", limit, n, r)
				}
				if err := l.WaitN(t.Context(), "k", n); !errors.Is(err, tierlimit.ErrNever) {
					t.Errorf("34: %v: WaitN(%d): %v", limit, n, err)
				}
			}
			for _, n := range []int64{-1, math.MinInt64} {
				if r, err := l.AllowN(t.Context(), "k", n); !errors.Is(err, tierlimit.ErrCost) || r != (tierlimit.Result{}) {
					t.Errorf("35: %v: AllowN(%d): %v, %v", limit, n, r, err)
				}
				if err := l.WaitN(t.Context(), "k", n); !errors.Is(err, tierlimit.ErrCost) {
					t.Errorf("35: %v: WaitN(%d): %v", limit, n, err)
				}
				if err := l.Refund(t.Context(), "k", n); !errors.Is(err, tierlimit.ErrCost) {
					t.Errorf("35: %v: Refund(%d): %v", limit, n, err)
				}
			}
			if r := allowN(t, l, "k", 0); !r.Allowed || r.Remaining != limit.Burst {
				t.Errorf("a cost of 0: %v", r)
			}
			if limit.Burst == 5 {
				if r := allowN(t, l, "k", 3); !r.Allowed || r.Remaining > 2 {
					t.Errorf("%v", r)
				}
				if r := allowN(t, l, "k", 4); r.Allowed {
					t.Errorf("35: 4 of 2: %v", r)
				}
			}
			left := limit.Burst
			if left == 5 {
				left = 2
			}
			if n := drained(t, l, "k"); n != left {
				t.Errorf("35: %v: %d left after what was denied, want %d", limit, n, left)
			}
		}
	}
	// 36
	h, alone := onShared(t), alone(t)
	for _, limit := range fiveOf(0, time.Second) {
		for _, h := range []*tierlimit.Hybrid{h, alone} {
			l, err := h.Limiter("zero-"+limit.Algorithm.String(), limit)
			if err != nil {
				t.Fatal(err)
			}
			if n := admitted(t, l, "k", 20); n != 0 {
				t.Errorf("%v: %d admitted", limit, n)
			}
			if r := allowN(t, l, "k", 1); r.RetryAfter != tierlimit.Never {
				t.Errorf("%v: %v", limit, r)
			}
			if err := l.Wait(t.Context(), "k"); !errors.Is(err, tierlimit.ErrNever) {
				t.Errorf("%v: Wait: %v", limit, err)
			}
		}
	}
	l, err := alone.Limiter("unlimited", tierlimit.Unlimited())
	if err != nil {
		t.Fatal(err)
	}
	if r := allowN(t, l, "k", 1e15); !r.Allowed {
		t.Errorf("%v", r)
	}
	if r, err := l.Peek(t.Context(), "k"); err != nil || !r.Allowed {
		t.Errorf("%v, %v", r, err)
	}
	if err := errors.Join(l.Refund(t.Context(), "k", 1), l.Reset(t.Context(), "k"), l.WaitN(t.Context(), "k", 1e9)); err != nil {
		t.Error(err)
	}
}

// Waits.
func TestCaseWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, limit := range fiveOf(1, time.Second) {
			h, err := tierlimit.NewLocal()
			if err != nil {
				t.Fatal(err)
			}
			waits(t, limiterOf(t, h, limit), time.Microsecond)
		}
	})
	for _, limit := range fiveOf(1, 600*time.Millisecond) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			waits(t, limiterOf(t, onShared(t), limit), 2*time.Second)
		})
	}
}

// waits judges a limiter of 1 per period. slack is what a machine may add.
func waits(t *testing.T, l *tierlimit.Limiter, slack time.Duration) {
	t.Helper()
	period := l.Limit().Period
	farFromWindowEnd(period, period*9/10)
	first := time.Now()
	if err := l.Wait(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	// Nothing more can pass before the window ends. A machine that is so slow that it has, shows nothing.
	early := func(err error) bool { return err == nil && time.Since(first) < period*8/10 }
	other := func(err, want error) bool { return err != nil && !errors.Is(err, want) }
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range 20 {
		wg.Go(func() {
			if err := l.Wait(ctx, "k"); early(err) || other(err, context.Canceled) {
				t.Errorf("%v: a cancelled wait: %v", l.Limit(), err)
			}
		})
	}
	time.Sleep(period / 10)
	cancel()
	wg.Wait()
	short, stop := context.WithTimeout(t.Context(), period/10)
	defer stop()
	began := time.Now()
	if err := l.Wait(short, "k"); early(err) || other(err, context.DeadlineExceeded) {
		t.Errorf("%v: a wait that cannot end in time: %v", l.Limit(), err)
	}
	if took := time.Since(began); took > slack && took > period/20 {
		t.Errorf("%v: a wait that cannot end in time took %v to say so", l.Limit(), took)
	}
	began = time.Now()
	if err := l.Wait(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 2*period+slack {
		t.Errorf("%v: the 21st waited %v", l.Limit(), took)
	}
	if err := l.Wait(ctx, "other"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v: with a context that is over: %v", l.Limit(), err)
	}
	if !allowN(t, l, "other", 1).Allowed {
		t.Errorf("%v: a wait that was over before it began spent something", l.Limit())
	}
}

// 38, leaky: callers leave evenly spaced.
func TestCaseLeakyQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := tierlimit.NewLocal()
		if err != nil {
			t.Fatal(err)
		}
		l := limiterOf(t, h, tierlimit.LeakyBucket(10, time.Second).WithBurst(5))
		began := time.Now()
		var mu sync.Mutex
		var left []time.Duration
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				if err := l.Wait(t.Context(), "k"); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				left = append(left, time.Since(began))
			})
		}
		wg.Wait()
		for i, d := range left {
			if want := time.Duration(i) * 100 * time.Millisecond; d != want {
				t.Errorf("caller %d left after %v, want %v", i, d, want)
			}
		}
	})
}

// 38, leaky: one that is given a place and gives up while it is held makes room.
func TestCaseLeakyQueueGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := tierlimit.NewLocal()
		if err != nil {
			t.Fatal(err)
		}
		l := limiterOf(t, h, tierlimit.LeakyBucket(10, time.Second).WithBurst(5))
		began := time.Now()
		for range 4 {
			allowN(t, l, "k", 1)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		if err := l.Wait(ctx, "k"); !errors.Is(err, context.Canceled) || time.Since(began) != 50*time.Millisecond {
			t.Errorf("held for 400ms and given up after 50ms: %v after %v", err, time.Since(began))
		}
		// Four came at once, half a place has drained: the next leaves when they have gone.
		if err := l.Wait(t.Context(), "k"); err != nil || time.Since(began) != 400*time.Millisecond {
			t.Errorf("the next: %v after %v, want 400ms", err, time.Since(began))
		}
	})
	for _, share := range []float64{0, 1} {
		l := limiterOf(t, onShared(t, tierlimit.WithLocalShare(share)), tierlimit.LeakyBucket(1, time.Hour).WithBurst(5))
		allowN(t, l, "k", 2)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		if err := l.WaitN(ctx, "k", 2); !errors.Is(err, context.Canceled) {
			t.Errorf("share %v: a wait of two hours that is given up: %v", share, err)
		}
		if n := drained(t, l, "k"); n != 3 {
			t.Errorf("share %v: %d admitted after it, want 3", share, n)
		}
	}
}

// ---- E. Clocks ----

// Microseconds below 100000 have leading zeros on the wire. The window's end is the same whenever it is asked for.
func TestCaseServerTime(t *testing.T) {
	farFromWindowEnd(24*time.Hour, 10*time.Second)
	l := limiterOf(t, onShared(t, tierlimit.WithLocalShare(0)), tierlimit.FixedWindow(1e9, 24*time.Hour))
	allowN(t, l, "k", 1)
	for began := time.Now(); time.Since(began) < 1100*time.Millisecond; time.Sleep(5 * time.Millisecond) {
		before := time.Now()
		r := allowN(t, l, "k", 1)
		after := time.Now()
		end := before.Truncate(24 * time.Hour).Add(24 * time.Hour)
		if low, high := end.Sub(after)-10*time.Millisecond, end.Sub(before)+10*time.Millisecond; r.ResetAfter < low || r.ResetAfter > high {
			t.Fatalf("the day ends in %v, want %v to %v", r.ResetAfter, low, high)
		}
	}
}

// ---- F. Keys ----

// Any bytes are a key, and no two share a count.
func TestCaseKeys(t *testing.T) {
	keys := []string{
		"", "a", "{", "}", "{}", "{a}", "a:b", ":", "::", "a:", ":a", " ", "\x00", "\x00\x00", "a\x00b", "\n", "%d", "*", "?", "[a]", `\`, "!beats",
		"ä", "\xff\xfe", "🙂", "#", "#00000000000000000000000000000000", strings.Repeat("x", 128), strings.Repeat("x", 129), strings.Repeat("x", 10_000),
		strings.Repeat("x", 9_999) + "y", "1:{0}l:a",
	}
	cluster := redistest.StartCluster(t, 0)
	rdb := cluster.Client()
	t.Cleanup(func() { _ = rdb.Close() })
	clustered := hybridOn(t, rdb, ownPrefix(t))
	eventually(t, "the masters are known", isOnline(clustered))
	for i, h := range []*tierlimit.Hybrid{onShared(t), alone(t), clustered} {
		var ls []*tierlimit.Limiter
		for _, name := range []string{"l", "l.a", "l-a", "0", strings.Repeat("n", 64)} {
			l, err := h.Limiter(name, tierlimit.TokenBucket(1, time.Hour))
			if err != nil {
				t.Fatal(err)
			}
			ls = append(ls, l)
		}
		for _, want := range []bool{true, false} {
			for _, l := range ls {
				for _, k := range keys {
					if r := allowN(t, l, k, 1); r.Allowed != want || r.Source == tierlimit.Fallback {
						t.Errorf("hybrid %d, limiter %q, key %.20q: %v", i, l.Name(), k, r)
					}
				}
			}
		}
	}
	if s := clustered.Stats(); s.Failures != 0 {
		t.Errorf("in a cluster: %+v", s)
	}
	for i, n := range cluster.Nodes {
		rdb := admin(n.Process)
		if n := refusals(t.Context(), t, rdb, "CROSSSLOT"); n != "" {
			t.Errorf("node %d: CROSSSLOT %s times", i, n)
		}
		if n := rdb.DBSize(t.Context()).Val(); n < int64(len(keys)) {
			t.Errorf("node %d has %d of 5 times %d keys", i, n, len(keys))
		}
	}
}

// ---- L. Life cycle ----

// Close.
func TestCaseClose(t *testing.T) {
	server := sharedServer(t)
	for _, remote := range []bool{true, false} {
		leak := goleak.IgnoreCurrent()
		var h *tierlimit.Hybrid
		var rdb *redis.Client
		if remote {
			rdb = redis.NewClient(server.Options())
			var err error
			if h, err = tierlimit.New(rdb, tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithRemoteTimeout(time.Second)); err != nil {
				t.Fatal(err)
			}
		} else {
			h = alone(t)
		}
		l := limiterOf(t, h, tierlimit.TokenBucket(1_000_000, time.Second))
		var wg sync.WaitGroup
		var begun atomic.Int64
		for i := range 16 {
			wg.Go(func() {
				for j := 0; ; j++ {
					_, err := l.Allow(context.Background(), fmt.Sprint(i, j%50))
					begun.Add(1)
					if err != nil {
						if !errors.Is(err, tierlimit.ErrClosed) {
							t.Error(err)
						}
						return
					}
				}
			})
		}
		eventually(t, "calls are under way", func() bool { return begun.Load() > 100 })
		for range 4 {
			wg.Go(func() {
				if err := h.Close(context.Background()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if err := h.Close(context.Background()); err != nil {
			t.Errorf("again: %v", err)
		}
		ctx := t.Context()
		_, errAllow := l.Allow(ctx, "k")
		_, errZero := l.AllowN(ctx, "k", 0)
		_, errPeek := l.Peek(ctx, "k")
		_, errLimiter := h.Limiter("new", tierlimit.TokenBucket(1, time.Second))
		for name, err := range map[string]error{
			"Allow": errAllow, "AllowN(0)": errZero, "Peek": errPeek, "Wait": l.Wait(ctx, "k"), "Refund": l.Refund(ctx, "k", 1),
			"Reset": l.Reset(ctx, "k"), "SetLimit": l.SetLimit(tierlimit.TokenBucket(2, time.Second)), "Flush": h.Flush(ctx), "Limiter": errLimiter,
		} {
			if !errors.Is(err, tierlimit.ErrClosed) {
				t.Errorf("%s after Close: %v", name, err)
			}
		}
		h.ForceLocal(true)
		_ = h.Stats()
		_ = l.Bound()
		if rdb != nil {
			if err := rdb.Ping(ctx).Err(); err != nil {
				t.Errorf("the client was closed too: %v", err)
			}
			_ = rdb.Close()
		}
		goleak.VerifyNone(t, leak, goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
	}
}

// Close with a Redis that hangs: it says so as soon as its calls have timed out, and what those left behind in the client is gone within
// the linger of tier/remote.
func TestCaseCloseHung(t *testing.T) {
	const timeout = 200 * time.Millisecond
	server := redistest.Start(t)
	leak := goleak.IgnoreCurrent()
	rdb := redis.NewClient(server.Options())
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix(ownPrefix(t)), tierlimit.WithRemoteTimeout(timeout))
	if err != nil {
		t.Fatal(err)
	}
	l := limiterOf(t, h, tierlimit.TokenBucket(1_000_000, time.Second))
	eventually(t, "online", isOnline(h))
	var wg sync.WaitGroup
	var begun atomic.Int64
	for i := range 16 {
		wg.Go(func() {
			for j := 0; ; j++ {
				_, err := l.Allow(context.Background(), fmt.Sprint(i, j%50))
				begun.Add(1)
				if err != nil {
					if !errors.Is(err, tierlimit.ErrClosed) {
						t.Error(err)
					}
					return
				}
			}
		})
	}
	eventually(t, "calls are under way", func() bool { return begun.Load() > 100 })
	if err := server.Hang(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	err = h.Close(context.Background())
	wg.Wait()
	if took := time.Since(began); err == nil || took > 20*time.Second {
		t.Errorf("after %v: %v", took, err)
	} else {
		t.Logf("after %v: %v", took, err)
	}
	_ = rdb.Close()
	for { // Find looks for some time
		err = goleak.Find(leak, goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
		if err == nil || time.Since(began) > 20*time.Second {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
	t.Logf("nothing is left %v after Close began", time.Since(began))
}

// Close and Flush give unspent tokens back.
func TestCaseUnspentTokensReturn(t *testing.T) {
	for _, limit := range fiveOf(1000, time.Hour) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			farFromWindowEnd(time.Hour, 10*time.Second)
			rdb, prefix := clientOf(t, sharedServer(t).Options()), ownPrefix(t)
			h := hybridOn(t, rdb, prefix, tierlimit.WithLocalShare(0.5), tierlimit.WithLeaseTTL(30*time.Second))
			l := limiterOf(t, h, limit)
			n := int64(0)
			for range 100 {
				if allowN(t, l, "k", 1).Allowed {
					n++
				}
				time.Sleep(time.Millisecond) // the rate at which it is checked, by which it is leased
			}
			if h.Stats().Leased == 0 {
				t.Error("nothing is leased to a key with 1000 checks a second")
			}
			if err := h.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			other := limiterOf(t, hybridOn(t, rdb, prefix), limit)
			if r, err := other.Peek(t.Context(), "k"); err != nil || r.Remaining < 1000-n || r.Remaining > 1001-n {
				t.Errorf("%v, %v after %d were spent", r, err, n)
			}
		})
	}
}

// A reset beats a denial, with a real Redis.
func TestCaseReset(t *testing.T) {
	for _, limit := range fiveOf(3, time.Hour) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		for _, h := range []*tierlimit.Hybrid{onShared(t), alone(t)} {
			l := limiterOf(t, h, limit)
			if n := drained(t, l, "k"); n != 3 {
				t.Errorf("%v: %d", limit, n)
			}
			if err := l.Reset(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			if n := drained(t, l, "k"); n != 3 {
				t.Errorf("%v: %d after a reset", limit, n)
			}
			raised := limit
			raised.Rate, raised.Burst = 10, 10
			if err := l.SetLimit(raised); err != nil {
				t.Fatal(err)
			}
			// Windows count what was spent against the new limit; buckets are filled by time alone.
			n, want := drained(t, l, "k"), int64(7)
			if strings.HasSuffix(limit.Algorithm.String(), "bucket") {
				want = 0
			}
			if n != want {
				t.Errorf("%v: %d after a raise to 10, want %d", limit, n, want)
			}
		}
	}
}

// ---- verbs ----

func TestPeekSpendsNothing(t *testing.T) {
	for _, limit := range fiveOf(5, time.Hour) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		for _, h := range []*tierlimit.Hybrid{onShared(t), alone(t)} {
			l := limiterOf(t, h, limit)
			for range 20 {
				if r, err := l.Peek(t.Context(), "k"); err != nil || !r.Allowed || r.Remaining != 5 || r.Limit != 5 {
					t.Fatalf("%v: %v, %v", limit, r, err)
				}
			}
			if n := drained(t, l, "k"); n != 5 {
				t.Errorf("%v: %d admitted after peeks", limit, n)
			}
			if r, err := l.Peek(t.Context(), "k"); err != nil || r.Allowed || r.Remaining != 0 {
				t.Errorf("%v: when exhausted: %v, %v", limit, r, err)
			}
		}
	}
}

// A denial of more than there is says what there is, and does not stand in the way of a smaller cost.
func TestDenialOfAGreatCost(t *testing.T) {
	for _, limit := range fiveOf(10, time.Hour) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		for _, h := range []*tierlimit.Hybrid{onShared(t), onShared(t, tierlimit.WithLocalShare(0)), alone(t)} {
			l := limiterOf(t, h, limit)
			allowN(t, l, "k", 7)
			for range 3 { // the second and third are answered by a kept denial
				if r := allowN(t, l, "k", 5); r.Allowed || r.Remaining != 3 {
					t.Errorf("%v: %v, want 3 left", limit, r)
				}
			}
			if r, err := l.Peek(t.Context(), "k"); err != nil || !r.Allowed || r.Remaining != 3 {
				t.Errorf("%v: Peek: %v, %v, want 3 left", limit, r, err)
			}
			if r := allowN(t, l, "k", 11); r.RetryAfter != tierlimit.Never || r.Remaining != 3 {
				t.Errorf("%v: %v, want 3 left", limit, r)
			}
			if r := allowN(t, l, "k", 3); !r.Allowed {
				t.Errorf("%v: %v", limit, r)
			}
		}
	}
}

func TestRefund(t *testing.T) {
	for _, limit := range fiveOf(10, time.Hour) {
		farFromWindowEnd(time.Hour, 10*time.Second)
		for _, share := range []float64{0, 1} {
			for _, h := range []*tierlimit.Hybrid{onShared(t, tierlimit.WithLocalShare(share)), alone(t)} {
				l := limiterOf(t, h, limit)
				if n := drained(t, l, "k"); n != 10 {
					t.Errorf("%v: %d", limit, n)
				}
				if err := l.Refund(t.Context(), "k", 4); err != nil {
					t.Fatal(err)
				}
				if err := h.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				if n := drained(t, l, "k"); n != 4 {
					t.Errorf("%v, share %v: %d after a refund of 4", limit, share, n)
				}
				// Never above full.
				if err := errors.Join(l.Refund(t.Context(), "k", math.MaxInt64), l.Refund(t.Context(), "k", math.MaxInt64), l.Refund(t.Context(), "k", 0)); err != nil {
					t.Fatal(err)
				}
				if err := h.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				if n := drained(t, l, "k"); n != 10 {
					t.Errorf("%v, share %v: %d after more refunds than there were spends", limit, share, n)
				}
			}
		}
	}
}

func TestLimiters(t *testing.T) {
	h := alone(t)
	a, err := h.Limiter("a", tierlimit.TokenBucket(1, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	again, err := h.Limiter("a", tierlimit.TokenBucket(1, time.Second), tierlimit.WithLocalShare(1))
	if err != nil || again != a {
		t.Errorf("%p, %v: the same name and limit are the same limiter %p", again, err, a)
	}
	if _, err := h.Limiter("a", tierlimit.TokenBucket(2, time.Second)); !errors.Is(err, tierlimit.ErrConfig) {
		t.Errorf("another limit under a name in use: %v", err)
	}
	b, err := h.Limiter("b", tierlimit.FixedWindow(1, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Collect(h.Limiters()); !slices.Equal(got, []*tierlimit.Limiter{a, b}) {
		t.Errorf("%v", got)
	}
	for range h.Limiters() {
		break // an iterator may be left
	}
	if a.Name() != "a" || a.Limit() != tierlimit.TokenBucket(1, time.Second) {
		t.Errorf("%s %v", a.Name(), a.Limit())
	}
	// After SetLimit the name stands for the new limit.
	if err := a.SetLimit(tierlimit.TokenBucket(2, time.Second)); err != nil {
		t.Fatal(err)
	}
	if again, err := h.Limiter("a", tierlimit.TokenBucket(2, time.Second)); err != nil || again != a {
		t.Errorf("%v", err)
	}
	if err := a.SetLimit(tierlimit.LeakyBucket(2, time.Second)); !errors.Is(err, tierlimit.ErrLimit) {
		t.Errorf("another algorithm: %v", err)
	}
	if err := a.SetLimit(tierlimit.Limit{}); !errors.Is(err, tierlimit.ErrLimit) || a.Limit() != tierlimit.TokenBucket(2, time.Second) {
		t.Errorf("no limit: %v, in force %v", err, a.Limit())
	}
}

// Bad input gets an error that lists every fault, and changes nothing.
func TestBadInput(t *testing.T) {
	faults := func(err error) int {
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			n := 0
			for _, e := range joined.Unwrap() {
				if e, ok := e.(interface{ Unwrap() []error }); ok && len(e.Unwrap()) > 1 {
					n += len(e.Unwrap())
				} else {
					n++
				}
			}
			return n
		}
		return 1
	}
	for name, o := range map[string]tierlimit.Option{
		"nil":                  nil,
		"timeout 0":            tierlimit.WithRemoteTimeout(0),
		"timeout negative":     tierlimit.WithRemoteTimeout(-time.Second),
		"timeout great":        tierlimit.WithRemoteTimeout(time.Hour),
		"sync 0":               tierlimit.WithSyncInterval(0),
		"sync above heartbeat": tierlimit.WithSyncInterval(2 * time.Second),
		"heartbeat 0":          tierlimit.WithHeartbeat(0),
		"heartbeat short":      tierlimit.WithHeartbeat(10 * time.Millisecond),
		"logger nil":           tierlimit.WithLogger(nil),
		"prefix brace":         tierlimit.WithPrefix("a{b}"),
		"prefix long":          tierlimit.WithPrefix(strings.Repeat("p", 257)),
		"shards 0":             tierlimit.WithShards(0),
		"shards many":          tierlimit.WithShards(1 << 20),
		"keys 0":               tierlimit.WithMaxKeys(0),
		"instances 0":          tierlimit.WithInstances(0),
		"instances negative":   tierlimit.WithInstances(-1),
		"instances many":       tierlimit.WithInstances(1 << 30),
		"breaker":              tierlimit.WithBreaker(breaker.Settings{Cooldown: -time.Second}),
		"share above 1":        tierlimit.WithLocalShare(1.01),
		"share negative":       tierlimit.WithLocalShare(-0.1),
		"share NaN":            tierlimit.WithLocalShare(math.NaN()),
		"share infinite":       tierlimit.WithLocalShare(math.Inf(1)),
		"lease 0":              tierlimit.WithLeaseTTL(0),
		"lease below sync":     tierlimit.WithLeaseTTL(20 * time.Millisecond),
		"lease long":           tierlimit.WithLeaseTTL(time.Hour),
		"cold start 0":         tierlimit.WithColdStart(tierlimit.ColdAdmit(0)),
		"cold start negative":  tierlimit.WithColdStart(tierlimit.ColdAdmit(-3)),
		"no policy":            tierlimit.WithFallback(0),
		"unknown policy":       tierlimit.WithFallback(99),
	} {
		if h, err := tierlimit.NewLocal(o); !errors.Is(err, tierlimit.ErrConfig) || h != nil {
			t.Errorf("%s: %v", name, err)
		}
		if h, err := tierlimit.New(nil, o); !errors.Is(err, tierlimit.ErrConfig) || h != nil {
			t.Errorf("New, %s: %v", name, err)
		}
	}
	if _, err := tierlimit.New((*redis.Client)(nil)); !errors.Is(err, tierlimit.ErrConfig) {
		t.Errorf("a nil client: %v", err)
	}
	_, err := tierlimit.New(nil, tierlimit.WithRemoteTimeout(0), tierlimit.WithShards(0), tierlimit.WithLocalShare(2), tierlimit.WithFallback(9))
	if n := faults(err); n != 5 {
		t.Errorf("%d faults listed, want 5:\n%v", n, err)
	}

	h := alone(t)
	for _, name := range []string{"", "A", "a b", "a:b", "ä", strings.Repeat("n", 65), "a/b", "{a}"} {
		if l, err := h.Limiter(name, tierlimit.TokenBucket(1, time.Second)); !errors.Is(err, tierlimit.ErrConfig) || l != nil {
			t.Errorf("name %q: %v", name, err)
		}
	}
	// 25, 27, 36: nothing is ever silently unlimited.
	for _, limit := range []tierlimit.Limit{
		{}, tierlimit.FixedWindow(1, 0), tierlimit.FixedWindow(1, -time.Second), tierlimit.SlidingLog(1, time.Nanosecond),
		tierlimit.SlidingWindow(1, 1500*time.Nanosecond), tierlimit.TokenBucket(-1, time.Second), tierlimit.TokenBucket(math.MaxInt64, time.Second),
		tierlimit.TokenBucket(1, time.Second).WithBurst(0), tierlimit.FixedWindow(5, time.Second).WithBurst(6),
		tierlimit.SlidingWindow(1, time.Second).WithSubWindows(7), tierlimit.TokenBucket(1, 200*365*24*time.Hour),
	} {
		if l, err := h.Limiter("bad", limit); !errors.Is(err, tierlimit.ErrLimit) || l != nil {
			t.Errorf("limit %+v: %v", limit, err)
		}
	}
	_, err = h.Limiter("Bad", tierlimit.Limit{}, tierlimit.WithLocalShare(2), nil)
	if !errors.Is(err, tierlimit.ErrConfig) || !errors.Is(err, tierlimit.ErrLimit) || faults(err) != 4 {
		t.Errorf("%d faults listed, want 4:\n%v", faults(err), err)
	}
	if got := slices.Collect(h.Limiters()); len(got) != 0 {
		t.Errorf("faulty limiters exist: %v", got)
	}
	l, err := h.Limiter("bad", tierlimit.TokenBucket(1, time.Second))
	if err != nil || !allowN(t, l, "k", 1).Allowed {
		t.Errorf("a name that was refused cannot be used: %v", err)
	}
}

// ColdAdmit does not wait, and Bound says what it costs.
func TestColdAdmit(t *testing.T) {
	px := redistest.StartProxy(t, sharedServer(t).Addr())
	h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t), tierlimit.WithColdStart(tierlimit.ColdAdmit(3)))
	l := limiterOf(t, h, tierlimit.TokenBucket(10, time.Hour))
	eventually(t, "online", isOnline(h))
	if b := l.Bound(); b.Overshoot != 3 {
		t.Errorf("%v", b)
	}
	px.SetDelay(redistest.Delay{Latency: time.Second}, redistest.Delay{})
	began := time.Now()
	for range 3 {
		if r := allowN(t, l, "k", 1); !r.Allowed || r.Source != tierlimit.Local {
			t.Errorf("%v", r)
		}
	}
	if took := time.Since(began); took > 900*time.Millisecond {
		t.Errorf("a cold key waited %v", took)
	}
	px.SetDelay(redistest.Delay{}, redistest.Delay{})
	if n := drained(t, l, "k"); n != 7 {
		t.Errorf("%d more admitted, want 7: the 3 are charged", n)
	}
}

// Each time that a key becomes cold it may be admitted as much as Bound says above its limit.
func TestColdAdmitUnderRotation(t *testing.T) {
	farFromWindowEnd(time.Hour, 20*time.Second)
	h := onShared(t, tierlimit.WithColdStart(tierlimit.ColdAdmit(3)), tierlimit.WithMaxKeys(8), tierlimit.WithShards(1))
	for _, limit := range fiveOf(10, time.Hour) {
		l, err := h.Limiter("cold-"+limit.Algorithm.String(), limit)
		if err != nil {
			t.Fatal(err)
		}
		var mem envelope.Memory
		const rounds = 20
		for round := range rounds {
			spendRecorded(t, l, "k", 20, &mem)
			for i := range 40 { // others, so that it is evicted
				allowN(t, l, fmt.Sprint("x", round, ".", i), 1)
			}
		}
		v := envelope.Check(fleet.Envelope(limit), mem.History())
		t.Logf("%v: %v", limit, v)
		if most := rounds * l.Bound().Overshoot; v.Overshoot > most {
			t.Errorf("%v: %v, cold %d times Bound says %d", limit, v, rounds, most)
		}
		if v.Overshoot == 0 {
			t.Errorf("%v: no overshoot: the test shows nothing", limit)
		}
	}
}

// After ForceLocal a share follows the silence, from empty.
func TestForceLocalShare(t *testing.T) {
	limit := tierlimit.TokenBucket(500, time.Second)
	prefix, rdb := ownPrefix(t), clientOf(t, sharedServer(t).Options())
	get := func() (*tierlimit.Hybrid, *tierlimit.Limiter) {
		h := hybridOn(t, rdb, prefix, tierlimit.WithLocalShare(0), tierlimit.WithHeartbeat(200*time.Millisecond), tierlimit.WithRemoteTimeout(200*time.Millisecond))
		return h, limiterOf(t, h, limit)
	}
	h, l := get()
	other, theirs := get()
	eventually(t, "a fleet of two", fleetOf(2, h, other))
	time.Sleep(time.Second) // each has acknowledged the other, which nothing tells: before, it has no share
	var mem envelope.Memory
	spendRecorded(t, l, "k", 10, &mem)
	h.ForceLocal(true)
	began, first := time.Now(), time.Duration(0)
	n := [2]int{}
	use := func() {
		for i, l := range []*tierlimit.Limiter{l, theirs} {
			n[i] += spendRecorded(t, l, "k", 2, &mem)
		}
		time.Sleep(time.Millisecond)
	}
	for first == 0 && time.Since(began) < 10*time.Second {
		if use(); n[0] > 0 {
			first = time.Since(began)
		}
	}
	// The silence counts from the last sign of life, which may be the announcement or the beat before.
	if silence := l.Bound().Silence; first < silence-400*time.Millisecond || first == 0 {
		t.Errorf("the first was admitted after %v of %v", first, silence)
	}
	eventually(t, "it says so", func() bool { use(); return h.Stats().State == tierlimit.StateShare })
	n = [2]int{}
	from, late := time.Now(), watchMachine(t)
	for time.Since(from) < 2*time.Second {
		use()
	}
	half := 250 * time.Since(from).Seconds()
	t.Logf("first after %v of %v; then %v of %.0f each", first, l.Bound().Silence, n, half)
	newJury(t).judge(t, busy(late()), func(short func(string, ...any)) {
		if least := float64(min(n[0], n[1])); least < 0.9*half {
			short("%v admitted of %.0f each", n, half)
		}
	})
	h.ForceLocal(false)
	eventually(t, "back", func() bool { use(); return h.Stats().State == tierlimit.StateOnline })
	for range 200 {
		use()
	}
	if v := envelope.Check(fleet.Envelope(limit), mem.History()); v.Overshoot > 0 {
		t.Error(v)
	}
}

// ForceLocal leaves the fleet and comes back.
func TestForceLocal(t *testing.T) {
	h := onShared(t, tierlimit.WithFallback(tierlimit.FallbackClosed), tierlimit.WithLocalShare(0))
	l := limiterOf(t, h, tierlimit.TokenBucket(1000, time.Second))
	if r := allowN(t, l, "k", 1); r.Source != tierlimit.Remote {
		t.Errorf("%v", r)
	}
	h.ForceLocal(true)
	h.ForceLocal(true)
	if s := h.Stats().State; s != tierlimit.StateSilent {
		t.Errorf("%v", s)
	}
	calls := h.Stats().Exchanges
	for range 10 {
		if r := allowN(t, l, "k", 1); r.Allowed || r.Source != tierlimit.Fallback {
			t.Errorf("%v", r)
		}
	}
	if n := h.Stats().Exchanges; n != calls {
		t.Errorf("%d exchanges while told not to", n-calls)
	}
	h.ForceLocal(false)
	eventually(t, "back", func() bool { return allowN(t, l, "k", 1).Source == tierlimit.Remote })
}

type watcher struct {
	mu        sync.Mutex
	exchanges []tierlimit.ExchangeEvent
	states    []tierlimit.StateEvent
}

func (w *watcher) Exchange(e tierlimit.ExchangeEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.exchanges = append(w.exchanges, e)
}

func (w *watcher) State(e tierlimit.StateEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.states = append(w.states, e)
}

func TestObserverAndStats(t *testing.T) {
	w := &watcher{}
	px := redistest.StartProxy(t, sharedServer(t).Addr())
	h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t), tierlimit.WithObserver(w), tierlimit.WithLogger(zap.NewNop()), tierlimit.WithInstanceID("one"),
		tierlimit.WithRemoteTimeout(200*time.Millisecond), tierlimit.WithHeartbeat(200*time.Millisecond),
		tierlimit.WithBreaker(breaker.Settings{Failures: 2, Cooldown: 50 * time.Millisecond, MaxCooldown: 50 * time.Millisecond}))
	l := limiterOf(t, h, tierlimit.SlidingLog(5, time.Hour))
	eventually(t, "online", isOnline(h))
	if n := drained(t, l, "k"); n != 5 {
		t.Errorf("%d", n)
	}
	eventually(t, "an exchange is told", func() bool { w.mu.Lock(); defer w.mu.Unlock(); return len(w.exchanges) > 0 })
	w.mu.Lock()
	e := w.exchanges[0]
	w.mu.Unlock()
	if e.Algorithm != tierlimit.AlgorithmSlidingLog || e.Keys != 1 || e.Err != nil || e.Duration <= 0 || e.Waiters != 1 {
		t.Errorf("%+v", e)
	}
	eventually(t, "what was spent is counted", func() bool {
		s := l.Stats()
		return s.Local+s.Remote == 5 && s.Fallback == 0
	})
	s := h.Stats()
	if s.Keys != 1 || s.Exchanges == 0 || s.Asked < s.Exchanges || s.Heartbeats == 0 || s.Instances != 1 || s.Rank != 0 || s.Breaker != "closed" {
		t.Errorf("%+v", s)
	}
	if err := px.SetMode(redistest.Refuse); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the outage is told", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.ContainsFunc(w.states, func(e tierlimit.StateEvent) bool {
			return e.From == tierlimit.StateOnline && e.To == tierlimit.StateSilent
		})
	})
	if err := px.SetMode(redistest.Pass); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the return is told", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		last := w.states[len(w.states)-1]
		return last.To == tierlimit.StateOnline && len(w.states) > 2
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if first := w.states[0]; first.From != tierlimit.StateConnecting || first.To != tierlimit.StateOnline || first.Instances != 1 || first.Rank != 0 {
		t.Errorf("%+v", first)
	}
	for i, e := range w.states {
		if strings.Contains(e.From.String()+e.To.String(), "State(") || i > 0 && e.From != w.states[i-1].To {
			t.Errorf("%d: %+v", i, e)
		}
	}
}

// Bound's figures hang together.
func TestBound(t *testing.T) {
	h := onShared(t)
	get := func(name string, limit tierlimit.Limit, opts ...tierlimit.LimiterOption) tierlimit.Bound {
		t.Helper()
		l, err := h.Limiter(name, limit, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return l.Bound()
	}
	for i, limit := range fiveOf(1000, time.Second) {
		b := get(fmt.Sprint("five", i), limit)
		if b.Overshoot != 0 || b.Outage != 0 || b.MemoryLoss > 1000 || !b.Leased || b.Stranded < 1 || b.Stranded > 1000 || b.Silence < 3*2*time.Second {
			t.Errorf("%v: %v", limit, b)
		}
	}
	for i, corner := range []tierlimit.Limit{
		tierlimit.TokenBucket(1e15, 2*time.Microsecond), tierlimit.TokenBucket(0, time.Second), tierlimit.FixedWindow(1e15, time.Second),
		tierlimit.TokenBucket(1, 10*365*24*time.Hour), tierlimit.LeakyBucket(1e15, 10*365*24*time.Hour), tierlimit.Unlimited(),
	} {
		for j, policy := range []tierlimit.FallbackPolicy{tierlimit.FallbackShare, tierlimit.FallbackShareNow, tierlimit.FallbackClosed} {
			b := get(fmt.Sprintf("corner%d-%d", i, j), corner, tierlimit.WithFallback(policy), tierlimit.WithLocalShare(1))
			if least := min(b.Overshoot, b.Outage, b.MemoryLoss, b.Stranded, int64(b.Silence)); least < 0 || b.Stranded > corner.Burst && corner.Burst > 0 {
				t.Errorf("%v: %v", corner, b)
			}
		}
	}
	if b := get("tiny", tierlimit.TokenBucket(5, time.Second)); b.Leased || b.Stranded != 0 {
		t.Errorf("a limit that cannot be split: %v", b)
	}
	if b := get("remote", tierlimit.TokenBucket(1000, time.Second), tierlimit.WithLocalShare(0)); b.Leased || b.Stranded != 0 {
		t.Errorf("without a local share: %v", b)
	}
	// A silence's worth of the rate.
	if b := get("now", tierlimit.TokenBucket(1000, time.Second), tierlimit.WithFallback(tierlimit.FallbackShareNow)); b.Outage < 3*2*1000 || b.Silence != 0 {
		t.Errorf("share now: %v", b)
	}
	if b := get("open", tierlimit.TokenBucket(1000, time.Second), tierlimit.WithFallback(tierlimit.FallbackOpen)); b.Outage != math.MaxInt64 {
		t.Errorf("open: %v", b)
	}
	if b := get("closed", tierlimit.TokenBucket(1000, time.Second), tierlimit.WithFallback(tierlimit.FallbackClosed)); b.Outage != 0 || b.Silence != 0 {
		t.Errorf("closed: %v", b)
	}
	if b := get("unlimited", tierlimit.Unlimited()); b != (tierlimit.Bound{Leased: b.Leased}) {
		t.Errorf("unlimited: %v", b)
	}
	if b := limiterOf(t, alone(t), tierlimit.TokenBucket(1000, time.Second)).Bound(); b != (tierlimit.Bound{}) {
		t.Errorf("alone: %v", b)
	}
}

// A nil Context is none that ends: a caller who passes one on a warm key is not to find out on a cold one, with the key locked.
func TestNilContext(t *testing.T) {
	var none context.Context
	for name, h := range map[string]*tierlimit.Hybrid{"Redis": hybridOn(t, clientOf(t, sharedServer(t).Options()), ownPrefix(t)), "alone": alone(t)} {
		l := limiterOf(t, h, tierlimit.TokenBucket(10, time.Hour))
		r, err := l.Allow(none, "k")
		if err != nil || !r.Allowed {
			t.Errorf("%s: %v, %v", name, r, err)
		}
		_, peek := l.Peek(none, "other")
		if err := errors.Join(l.Wait(none, "k"), l.Refund(none, "k", 1), l.Reset(none, "k"), peek, h.Flush(none), h.Close(none)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Close ends waits that sleep until there are tokens.
func TestCloseEndsWaits(t *testing.T) {
	for name, h := range map[string]*tierlimit.Hybrid{"Redis": hybridOn(t, clientOf(t, sharedServer(t).Options()), ownPrefix(t)), "alone": alone(t)} {
		l := limiterOf(t, h, tierlimit.TokenBucket(1, time.Hour))
		if err := l.Wait(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- l.Wait(context.Background(), "k") }()
		eventually(t, "a denial", func() bool { return l.Stats().Denied > 0 })
		if err := h.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			if !errors.Is(err, tierlimit.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: still waiting", name)
		}
	}
}
