package lua_test

import (
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/tier"
)

// Buckets by number, on a real Redis whose clock can be told what to do.
func TestBucketsByNumber(t *testing.T) {
	p := openPair(t)
	key := 0
	bucket := func(alg tier.Algorithm, rate int64, period time.Duration, burst int64) func(n int64) tier.Grant {
		key++
		p.forget(p.keyName(key)) // of another run of this test
		a := tier.Ask{Key: p.keyName(key), Limit: tier.Limit{Algorithm: alg, Rate: rate, Period: period, Burst: burst}, SlotUS: 100_000}
		return func(n int64) tier.Grant {
			a.Need = []tier.Cost{{N: 1, Count: n}}
			g := p.one(a)
			a.Born, a.Version, a.Seen = g.Born, g.Version, g.Activity
			return g
		}
	}
	for _, alg := range []tier.Algorithm{tier.TokenBucket, tier.LeakyBucket} {
		// 6000/s: of 6001 at once the last is denied, for a sixth of a millisecond.
		take := bucket(alg, 6000, time.Second, 6000)
		if g := take(6001); g.Served != 6000 || g.Remaining != 0 || g.RetryUS != 167 {
			t.Errorf("algorithm %d: %+v", alg, g)
		}
		p.at(p.now + 166)
		if g := take(1); g.Served != 0 {
			t.Errorf("algorithm %d: a microsecond too early: %+v", alg, g)
		}
		p.at(p.now + 1)
		if g := take(2); g.Served != 1 {
			t.Errorf("algorithm %d: after retry-after: %+v", alg, g)
		}
		// 5 tokens, 3 more per 300 ms: all spent, 3 and a half are there after 350 ms.
		take = bucket(alg, 3, 300*time.Millisecond, 5)
		if g := take(6); g.Served != 5 {
			t.Errorf("algorithm %d: %+v", alg, g)
		}
		p.at(p.now + 350_000)
		if g := take(5); g.Served != 3 || g.RetryUS != 50_000 {
			t.Errorf("algorithm %d: after 350 ms: %+v", alg, g)
		}
		// Never above the burst, though 15 tokens' time passed.
		p.at(p.now + 1_500_000)
		if g := take(10); g.Served != 5 {
			t.Errorf("algorithm %d: after 1.5 s: %+v", alg, g)
		}
		// A capacity of 3: the fourth at once is refused.
		take = bucket(alg, 1, time.Second, 3)
		for i := range int64(4) {
			g := take(1)
			if i < 3 && (g.Served != 1 || g.Remaining != 2-i) || i == 3 && (g.Served != 0 || g.RetryUS != 1_000_000) {
				t.Errorf("algorithm %d: call %d: %+v", alg, i, g)
			}
			if alg == tier.LeakyBucket && i < 3 && g.DelayUS != i*1_000_000 {
				t.Errorf("call %d is to be held for %d µs, want %d s", i, g.DelayUS, i)
			}
		}
		// A steady rate: after many calls the total is within one of the ideal.
		take = bucket(alg, 997, time.Second, 10)
		began, n := p.now, int64(0)
		for range 3000 {
			n += take(1).Served
			p.at(p.now + 333)
		}
		if d := n - 10 - (p.now-333-began)*997/1_000_000; d < -1 || d > 1 {
			t.Errorf("algorithm %d: %d admitted in %d µs, %+d against the ideal", alg, n, p.now-began, d)
		}
	}
}
