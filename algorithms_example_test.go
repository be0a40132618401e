package tierlimit_test

import (
	"fmt"
	"time"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// One same traffic through all five algorithms at 10 per second: bursts of 12 at given moments, each request of cost 1. How
// many of each burst pass is the table of docs/algorithms.md. The time is given, not read, so the figures are exact.
func Example_algorithms() {
	at := []int64{900, 1050, 1500, 2000, 2700} // ms
	kinds := []struct {
		name string
		tier.Limit
	}{
		{"token bucket", tier.Limit{Algorithm: tier.TokenBucket}},
		{"leaky bucket", tier.Limit{Algorithm: tier.LeakyBucket}},
		{"fixed window", tier.Limit{Algorithm: tier.FixedWindow}},
		{"sliding window", tier.Limit{Algorithm: tier.SlidingWindow, SubWindows: 1}},
		{"sliding window, 10 parts", tier.Limit{Algorithm: tier.SlidingWindow, SubWindows: 10}},
		{"sliding log", tier.Limit{Algorithm: tier.SlidingLog}},
	}
	fmt.Print("| 12 requests at |")
	for _, ms := range at {
		fmt.Printf(" %.2f s |", float64(ms)/1000)
	}
	fmt.Println(" most in 1 s | last one held |")
	fmt.Println("|---|---|---|---|---|---|---|---|")
	for _, k := range kinds {
		k.Rate, k.Burst, k.Period = 10, 10, time.Second
		state := local.New(k.Limit, local.At(0), true)
		fmt.Printf("| %s |", k.name)
		passed := make([]int, len(at))
		most, held := 0, int64(0)
		for i, ms := range at {
			for range 12 {
				if d := state.Take(local.At(ms*1000), k.Limit, 1); d.Allowed {
					passed[i]++
					held = max(held, d.DelayUS/1000)
				}
			}
			fmt.Printf(" %d |", passed[i])
			sum := 0
			for j := i; j >= 0 && ms-at[j] < 1000; j-- {
				sum += passed[j]
			}
			most = max(most, sum)
		}
		fmt.Printf(" %d | %d ms |\n", most, held)
	}
	// Output:
	// | 12 requests at | 0.90 s | 1.05 s | 1.50 s | 2.00 s | 2.70 s | most in 1 s | last one held |
	// |---|---|---|---|---|---|---|---|
	// | token bucket | 10 | 1 | 5 | 5 | 7 | 16 | 0 ms |
	// | leaky bucket | 10 | 1 | 5 | 5 | 7 | 16 | 900 ms |
	// | fixed window | 10 | 10 | 0 | 10 | 0 | 20 | 0 ms |
	// | sliding window | 10 | 0 | 5 | 5 | 3 | 15 | 0 ms |
	// | sliding window, 10 parts | 10 | 0 | 0 | 10 | 0 | 10 | 0 ms |
	// | sliding log | 10 | 0 | 0 | 10 | 0 | 10 | 0 ms |
}
