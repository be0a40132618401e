package lua_test

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

// An instance is a client that mostly keeps to the protocol.
type instance struct {
	slot, base          int64
	born, version, seen int64
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

func randomLimit(r *rand.Rand, alg tier.Algorithm) tier.Limit {
	rate := pick[int64](r, 1, 2, 3, 10, 97, 1000, 1000, 100_000)
	period := pick(r, time.Microsecond, 7*time.Microsecond, time.Millisecond, 20*time.Millisecond, 100*time.Millisecond, time.Second, time.Second, time.Minute, time.Hour)
	burst := pick(r, rate, rate, rate*3, max(1, rate/4), 50)
	switch r.IntN(24) {
	case 0:
		rate, burst = 1e15, 1e15
	case 1:
		period = 10 * 365 * 24 * time.Hour
	case 2:
		rate = 0
	case 3:
		burst = 1e15
	case 4:
		rate, burst, period = 1e15-7, 1e15, 315_360_000_000_000*time.Microsecond
	}
	l := tier.Limit{Algorithm: alg, Rate: rate, Period: period, Burst: burst}
	if !alg.Bucket() {
		l.Burst = rate
	}
	if alg == tier.SlidingWindow {
		k := pick(r, 1, 1, 2, 5, 10, 100)
		us := max(int64(k), period.Microseconds()/int64(k)*int64(k))
		l.SubWindows, l.Period = k, time.Duration(us)*time.Microsecond
	}
	return l
}

// amount is a number of tokens that matters for a capacity.
func amount(r *rand.Rand, capacity int64) int64 {
	return max(0, pick(r, 0, 1, 1, 2, 5, capacity/10, capacity/3, capacity-1, capacity, capacity+1, 3*capacity))
}

// TestScriptsAgreeWithModel runs the same random history on the scripts and on the model; every field of every answer is the same.
func TestScriptsAgreeWithModel(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		t.Run(algorithmName(alg), func(t *testing.T) {
			s := seed(t)
			p := openPair(t)
			agree(p, newRand(s+uint64(alg)), alg, *stepsFlag)
		})
	}
}

// TestWithoutStruct is TestScriptsAgreeWithModel where a server has no struct: the scripts then bring their own.
func TestWithoutStruct(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		t.Run(algorithmName(alg), func(t *testing.T) {
			s := seed(t)
			p := openPair(t)
			const has = "local struct = rawget(_G, 'struct')\n"
			if strings.Count(lua.Source(alg), has) != 1 {
				t.Fatal("the prelude looks otherwise than the test knows")
			}
			p.scripts[alg] = p.script(strings.Replace(lua.Source(alg), has, "local struct\n", 1))
			agree(p, newRand(s+uint64(alg)), alg, *stepsFlag/5)
		})
	}
}

func algorithmName(a tier.Algorithm) string {
	return [...]string{"", "token", "leaky", "fixed", "sliding", "log"}[a]
}

func agree(p *pair, r *rand.Rand, alg tier.Algorithm, steps int) {
	const keys, instances = 3, 3
	var fleet [instances][keys]instance
	var limits [keys]tier.Limit
	slots := [keys]int64{}
	var dark tier.Darkness
	var views [instances]tier.Darkness
	newKey := func(k int) {
		limits[k] = randomLimit(r, alg)
		slots[k] = pick[int64](r, 150_000, 150_000, 60_000, 1_000_000, 7)
	}
	for k := range keys {
		newKey(k)
	}
	exact := 0
	for range steps {
		// Time.
		k0 := r.IntN(keys)
		s, per := slots[k0], limits[k0].PeriodUS()
		step := pick(r, 0, 0, 1, 10, 1000, 1000, 20_000, 20_000, s/2, s, s, s+1, 2*s, 2*s+1, 3*s, per/7, per, per/2, 2*per, per+s)
		if step > 1_000_000_000_000 && r.IntN(10) > 0 {
			step = 1000
		}
		switch r.IntN(60) {
		case 0:
			step = -pick[int64](r, 1, 1000, s, 10_000_000)
		case 1:
			// To the edge of a window.
			step = per - p.now%per + pick[int64](r, -1, 0, 0, 1)
		}
		if p.now+step > 4_000_000_000_000_000 {
			step = 1000
		}
		p.at(max(1_000_000_000_000_000, p.now+step))

		// Darkness, as heartbeats tell it.
		switch r.IntN(40) {
		case 0:
			dark.Fleet, dark.Least = pick[int64](r, 1, 2, 3, 3, 8), pick[int64](r, 0, 1, 2, 3, 3, 8)
			dark.Missing = min(dark.Fleet, pick[int64](r, 1, 1, 2, 3))
			if dark.Until == 0 || r.IntN(2) == 0 {
				dark.Episode++
				dark.Most, dark.From, dark.Returned = dark.Missing, p.now-pick[int64](r, 0, 1000, 1_000_000), 0
			}
			dark.Most, dark.Until = max(dark.Most, dark.Missing), p.now
		case 1, 2:
			if dark.Missing > 0 {
				dark.Until = p.now
				dark.Missing--
				dark.Returned++
			}
		case 3:
			if dark.Missing > 0 {
				dark.Until = p.now
			}
		case 4, 5, 6:
			if dark.Missing == 0 {
				dark = tier.Darkness{Fleet: 3, Least: 3, Episode: dark.Episode}
			}
		}
		i := r.IntN(instances)
		if r.IntN(3) > 0 {
			views[i] = dark
		}

		// Faults.
		switch r.IntN(200) {
		case 0:
			p.forget(p.keyName(k0))
		case 1:
			newKey(k0)
		case 2:
			slots[k0] = pick[int64](r, 150_000, 60_000, 1_000_000, 7)
		}

		var asks []tier.Ask
		for k := range keys {
			if k == k0 || r.IntN(6) == 0 {
				asks = append(asks, fleet[i][k].ask(r, p.keyName(k), limits[k], slots[k]))
			}
		}
		fence := pick(r, 0, 0, p.now, p.now+10, p.now-1+int64(r.IntN(2)))
		late, grants := p.exchange(fence, views[i], asks...)
		if late {
			continue
		}
		for j := range asks {
			for k := range keys {
				if asks[j].Key == p.keyName(k) {
					fleet[i][k].landed(r, &grants[j])
				}
			}
			// Waiting exactly retry-after is enough, and a microsecond less is not.
			if g := grants[j]; g.RetryUS > 0 && g.RetryUS < 1<<52 && views[i].Until == 0 {
				exact++
				after := p.m.Snapshot()
				n := unserved(&asks[j], &g)
				lone := tier.Ask{Key: asks[j].Key, Limit: asks[j].Limit, SlotUS: asks[j].SlotUS, Need: []tier.Cost{{N: n, Count: 1}}}
				for _, early := range []int64{1, 0} {
					p.m.Restore(after)
					if at := p.now + g.RetryUS - early; p.m.TTL(at, lone.Key) > 0 || early == 0 {
						_, got := p.m.Exchange(at, alg, 0, tier.Darkness{}, []tier.Ask{lone})
						if (got[0].Served == n) != (early == 0) {
							p.t.Fatalf("at %d: %d tokens should pass in %d µs: served %d when waiting %d less\nask %+v\ngrant %+v\nthen %+v",
								p.now, n, g.RetryUS, got[0].Served, early, asks[j], g, got[0])
						}
					}
				}
				p.m.Restore(after)
			}
		}
	}
	if exact < steps/50 {
		p.t.Errorf("only %d retry times were checked", exact)
	}
}

// unserved is the largest cost in need that a grant left out, or 1.
func unserved(a *tier.Ask, g *tier.Grant) (n int64) {
	left := g.Served
	for _, c := range a.Need {
		k := min(c.Count, left/max(1, c.N))
		left -= k * c.N
		if k < c.Count {
			n = max(n, c.N)
		}
	}
	return max(n, 1)
}

// ask makes a message, now and then one that breaks the protocol.
func (c *instance) ask(r *rand.Rand, key string, l tier.Limit, slot int64) tier.Ask {
	a := tier.Ask{Key: key, Limit: l, SlotUS: slot, Born: c.born, Version: c.version, Seen: c.seen}
	capacity := l.Capacity()
	if r.IntN(3) == 0 {
		a.Born, a.Version = 0, 0
	}
	if r.IntN(4) > 0 {
		a.Lease = c.slot
		a.Spent = r.Int64N(c.base + 1)
		rest := c.base - a.Spent
		switch r.IntN(3) {
		case 0:
			a.Carry = rest
		case 1:
			a.Return = rest
		case 2:
			a.Return = r.Int64N(rest + 1)
			a.Carry = rest - a.Return
		}
	}
	if r.IntN(50) == 0 { // not as the protocol wants
		a.Spent, a.Carry, a.Return = amount(r, min(capacity, 1e6)), amount(r, min(capacity, 1e6)), amount(r, min(capacity, 1e6))
		a.Lease = max(0, c.slot-pick(r, 0, slot, 1, 2))
	}
	if r.IntN(60) == 0 {
		a.Version += int64(r.IntN(3))
	}
	if l.Algorithm == tier.SlidingLog && a.Spent > 0 && r.IntN(4) > 0 {
		left := a.Spent
		for left > 0 {
			n := 1 + r.Int64N(left)
			if len(a.Spends) > 5 {
				n = left
			}
			a.Spends = append(a.Spends, tier.Spend{AgeUS: pick(r, 0, 10, 1000, slot, 2*slot, 3*slot+l.PeriodUS()), Count: n})
			left -= n
		}
	}
	if !l.Algorithm.Bucket() {
		a.Own = r.Int64N(min(capacity, 30) + 1)
		a.Back = r.IntN(15) == 0
	}
	switch r.IntN(40) {
	case 0:
		a.Refund = tier.RefundAll
	case 1, 2:
		a.Refund = amount(r, min(capacity, 1e6))
	}
	for range pick(r, 0, 0, 1, 1, 2, 4) {
		n := pick(r, 1, 1, 2, 5, capacity, capacity+1, capacity/3)
		a.Need = append(a.Need, tier.Cost{N: max(1, n), Count: pick[int64](r, 1, 1, 2, 10)})
	}
	a.Want = pick(r, 0, 1, 5, amount(r, capacity))
	a.Whole = r.IntN(4) == 0
	return a
}

// landed takes in an answer, or loses it.
func (c *instance) landed(r *rand.Rand, g *tier.Grant) {
	if r.IntN(20) == 0 {
		return
	}
	c.slot, c.base = g.Slot, g.Lease
	c.born, c.version, c.seen = g.Born, g.Version, g.Activity
}
