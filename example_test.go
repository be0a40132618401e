package tierlimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
)

// inProcess returns a limiter without Redis; with one, New takes the place of NewLocal and everything else stays.
func inProcess(limit tierlimit.Limit) (*tierlimit.Hybrid, *tierlimit.Limiter) {
	h, err := tierlimit.NewLocal()
	if err != nil {
		panic(err)
	}
	l, err := h.Limiter("api", limit)
	if err != nil {
		panic(err)
	}
	return h, l
}

func Example() {
	h, err := tierlimit.NewLocal() // one process; tierlimit.New(rdb) for a fleet
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(context.Background())
	api, err := h.Limiter("api", tierlimit.TokenBucket(2, time.Hour))
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		r, err := api.Allow(context.Background(), "alice")
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(r.Allowed, r.Remaining, r.Limit)
	}
	// Output:
	// true 1 2
	// true 0 2
	// false 0 2
}

func ExampleNew() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // nobody listens there
	defer rdb.Close()
	h, err := tierlimit.New(rdb, tierlimit.WithInstances(1), tierlimit.WithRemoteTimeout(100*time.Millisecond))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(context.Background())
	api, err := h.Limiter("api", tierlimit.TokenBucket(100, time.Second), tierlimit.WithFallback(tierlimit.FallbackOpen))
	if err != nil {
		fmt.Println(err)
		return
	}
	// A Redis that is down is a source, not an error.
	r, err := api.Allow(context.Background(), "alice")
	fmt.Println(r.Allowed, r.Source, err)
	// Output: true fallback <nil>
}

func ExampleNewLocal() {
	h, err := tierlimit.NewLocal(tierlimit.WithShards(0), tierlimit.WithMaxKeys(0))
	fmt.Println(h == nil, errors.Is(err, tierlimit.ErrConfig))
	fmt.Println(err)
	// Output:
	// true true
	// tierlimit: invalid configuration: WithShards is 0, want 1 to 65536
	// tierlimit: invalid configuration: WithMaxKeys is 0, want at least 1
}

func ExampleHybrid_Limiter() {
	h, _ := inProcess(tierlimit.TokenBucket(100, time.Second))
	defer h.Close(context.Background())
	_, err := h.Limiter("api", tierlimit.TokenBucket(200, time.Second))
	fmt.Println(err)
	// Output: tierlimit: invalid configuration: limiter "api" has the limit 100/s already, not 200/s; SetLimit changes it
}

func ExampleHybrid_AllowAll() {
	h, perUser := inProcess(tierlimit.TokenBucket(3, time.Hour))
	defer h.Close(context.Background())
	perTenant, _ := h.Limiter("tenant", tierlimit.FixedWindow(10, time.Hour))
	for range 4 {
		v, err := h.AllowAll(context.Background(),
			tierlimit.Check{Limiter: perTenant, Key: "acme", N: 1},
			tierlimit.Check{Limiter: perUser, Key: "alice", N: 1})
		fmt.Println(v.Allowed, v.Denied, err)
	}
	r, _ := perTenant.Peek(context.Background(), "acme")
	fmt.Println(r.Remaining, "left of acme's: what alice was denied was not charged")
	// Output:
	// true -1 <nil>
	// true -1 <nil>
	// true -1 <nil>
	// false 1 <nil>
	// 7 left of acme's: what alice was denied was not charged
}

func ExampleWithShadow() {
	h, err := tierlimit.NewLocal()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(context.Background())
	tried, _ := h.Limiter("tried", tierlimit.FixedWindow(1, 24*time.Hour), tierlimit.WithShadow())
	for range 2 {
		r, _ := tried.Allow(context.Background(), "alice")
		fmt.Println(r.Allowed, r.Shadowed)
	}
	fmt.Println(tried.Stats().Shadowed, "would have been denied")
	// Output:
	// true false
	// true true
	// 1 would have been denied
}

func ExampleHybrid_Limiters() {
	h, _ := inProcess(tierlimit.TokenBucket(100, time.Second))
	defer h.Close(context.Background())
	if _, err := h.Limiter("login", tierlimit.SlidingLog(5, time.Hour)); err != nil {
		fmt.Println(err)
	}
	for l := range h.Limiters() {
		fmt.Println(l.Name(), l.Limit())
	}
	// Output:
	// api 100/s
	// login 5/h sliding-log
}

func ExampleHybrid_Stats() {
	h, api := inProcess(tierlimit.TokenBucket(100, time.Second))
	defer h.Close(context.Background())
	_, _ = api.Allow(context.Background(), "alice")
	_, _ = api.Allow(context.Background(), "bob")
	s := h.Stats()
	fmt.Println(s.Keys, s.State, s.Breaker, s.Instances)
	// Output: 2 online closed 1
}

func ExampleHybrid_Flush() {
	h, _ := inProcess(tierlimit.TokenBucket(100, time.Second))
	defer h.Close(context.Background())
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	fmt.Println(h.Flush(ctx)) // all unspent tokens are back in Redis
	// Output: <nil>
}

func ExampleHybrid_ForceLocal() {
	h, _ := inProcess(tierlimit.TokenBucket(100, time.Second))
	defer h.Close(context.Background())
	h.ForceLocal(true) // Redis is about to be restarted
	h.ForceLocal(false)
	fmt.Println(h.Stats().State)
	// Output: online
}

func ExampleHybrid_Close() {
	h, api := inProcess(tierlimit.TokenBucket(100, time.Second))
	fmt.Println(h.Close(context.Background()))
	_, err := api.Allow(context.Background(), "alice")
	fmt.Println(errors.Is(err, tierlimit.ErrClosed))
	// Output:
	// <nil>
	// true
}

func ExampleLimiter_Allow() {
	h, api := inProcess(tierlimit.FixedWindow(1, 365*24*time.Hour))
	defer h.Close(context.Background())
	for range 2 {
		r, err := api.Allow(context.Background(), "alice")
		switch {
		case err != nil: // the caller's mistake, a done context, or closed
			fmt.Println(err)
		case !r.Allowed:
			fmt.Println("come back later:", r.RetryAfter > 0)
		default:
			fmt.Println("welcome")
		}
	}
	// Output:
	// welcome
	// come back later: true
}

func ExampleLimiter_AllowN() {
	h, api := inProcess(tierlimit.TokenBucket(10, time.Hour))
	defer h.Close(context.Background())
	for _, n := range []int64{8, 8, 2, 11} { // all or none
		r, _ := api.AllowN(context.Background(), "alice", n)
		fmt.Println(n, r.Allowed, r.Remaining, r.RetryAfter == tierlimit.Never)
	}
	// Output:
	// 8 true 2 false
	// 8 false 2 false
	// 2 true 0 false
	// 11 false 0 true
}

func ExampleLimiter_Wait() {
	h, api := inProcess(tierlimit.TokenBucket(100, time.Second).WithBurst(1))
	defer h.Close(context.Background())
	began := time.Now()
	for range 4 {
		if err := api.Wait(context.Background(), "alice"); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println(time.Since(began) >= 29*time.Millisecond)
	// Output: true
}

func ExampleLimiter_WaitN() {
	h, api := inProcess(tierlimit.TokenBucket(10, time.Hour))
	defer h.Close(context.Background())
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	fmt.Println(api.WaitN(ctx, "alice", 10))
	fmt.Println(errors.Is(api.WaitN(ctx, "alice", 10), context.DeadlineExceeded)) // at once: it takes an hour
	fmt.Println(api.WaitN(ctx, "alice", 11))
	// Output:
	// <nil>
	// true
	// tierlimit: the cost can never pass: cost 11, capacity 10
}

func ExampleLimiter_Peek() {
	h, api := inProcess(tierlimit.SlidingWindow(10, time.Hour))
	defer h.Close(context.Background())
	_, _ = api.AllowN(context.Background(), "alice", 4)
	for range 2 {
		r, _ := api.Peek(context.Background(), "alice")
		fmt.Println(r)
	}
	// Output:
	// allowed 6/10 (local)
	// allowed 6/10 (local)
}

func ExampleLimiter_Refund() {
	h, api := inProcess(tierlimit.SlidingLog(10, time.Hour))
	defer h.Close(context.Background())
	_, _ = api.AllowN(context.Background(), "alice", 10)
	fmt.Println(api.Refund(context.Background(), "alice", 3)) // three turned out not to be needed
	r, _ := api.Allow(context.Background(), "alice")
	fmt.Println(r)
	// Output:
	// <nil>
	// allowed 2/10 (local)
}

func ExampleLimiter_Reset() {
	h, api := inProcess(tierlimit.SlidingLog(10, time.Hour))
	defer h.Close(context.Background())
	_, _ = api.AllowN(context.Background(), "alice", 10)
	fmt.Println(api.Reset(context.Background(), "alice"))
	r, _ := api.Allow(context.Background(), "alice")
	fmt.Println(r)
	// Output:
	// <nil>
	// allowed 9/10 (local)
}

func ExampleLimiter_SetLimit() {
	h, api := inProcess(tierlimit.SlidingLog(10, time.Hour))
	defer h.Close(context.Background())
	_, _ = api.AllowN(context.Background(), "alice", 10)
	fmt.Println(api.SetLimit(tierlimit.SlidingLog(12, time.Hour)))
	r, _ := api.Allow(context.Background(), "alice")
	fmt.Println(r)
	fmt.Println(api.SetLimit(tierlimit.TokenBucket(12, time.Hour)))
	// Output:
	// <nil>
	// allowed 1/12 (local)
	// tierlimit: invalid limit: the algorithm of limiter "api" is sliding-log and cannot become token-bucket
}

func ExampleLimiter_LimitFor() {
	h, api := inProcess(tierlimit.TokenBucket(10, time.Minute).WithBurst(20))
	defer h.Close(context.Background())
	fmt.Println(api.LimitFor("alice"))
	// Output: 10/min burst 20
}

func ExampleLimiter_Stats() {
	h, api := inProcess(tierlimit.TokenBucket(2, time.Hour))
	defer h.Close(context.Background())
	for range 5 {
		_, _ = api.Allow(context.Background(), "alice")
	}
	s := api.Stats()
	fmt.Println(s.Local, s.Denied)
	// Output: 2 3
}

func ExampleLimiter_Bound() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	h, err := tierlimit.New(rdb)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Close(context.Background())
	api, err := h.Limiter("api", tierlimit.TokenBucket(1000, time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	b := api.Bound()
	fmt.Println(b.Overshoot, b.Outage, b.Leased)
	// Output: 0 0 true
}

func ExampleParseLimit() {
	for _, s := range []string{"100/s burst 200", "5000/1h sliding-log", "10/0s"} {
		l, err := tierlimit.ParseLimit(s)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(l, l.Algorithm, l.Period)
	}
	// Output:
	// 100/s burst 200 token-bucket 1s
	// 5000/h sliding-log sliding-log 1h0m0s
	// tierlimit: invalid limit: period 0s is not positive
}

func ExampleLimit_Validate() {
	fmt.Println(tierlimit.TokenBucket(10, time.Second).Validate())
	fmt.Println(tierlimit.FixedWindow(10, 0).WithBurst(20).Validate())
	// Output:
	// <nil>
	// tierlimit: invalid limit: period 0s is not positive
	// tierlimit: invalid limit: burst 20 on a fixed-window: only buckets have a burst, a window admits its limit of 10
}

func ExampleLimit_MarshalText() {
	b, err := json.Marshal(map[string]tierlimit.Limit{"login": tierlimit.SlidingLog(5, time.Hour)})
	fmt.Println(string(b), err)
	// Output: {"login":"5/h sliding-log"} <nil>
}

func ExampleLimit_UnmarshalText() {
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	limit := tierlimit.TokenBucket(100, time.Second)
	flags.TextVar(&limit, "limit", limit, "what each client may do")
	if err := flags.Parse([]string{"-limit", "3/10s leaky-bucket"}); err != nil {
		fmt.Println(err)
	}
	fmt.Println(limit)
	// Output: 3/10s leaky-bucket
}

func ExampleLeakyBucket() {
	h, api := inProcess(tierlimit.LeakyBucket(1, time.Hour).WithBurst(3))
	defer h.Close(context.Background())
	for range 4 {
		r, _ := api.Allow(context.Background(), "alice")
		fmt.Println(r.Allowed, r.Delay.Round(time.Hour)) // Wait holds the caller that long
	}
	// Output:
	// true 0s
	// true 1h0m0s
	// true 2h0m0s
	// false 0s
}

func ExampleUnlimited() {
	h, api := inProcess(tierlimit.Unlimited())
	defer h.Close(context.Background())
	r, _ := api.AllowN(context.Background(), "alice", 1_000_000_000)
	fmt.Println(r.Allowed)
	// Output: true
}
