package lua_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
)

func micro(alg tier.Algorithm, rate, period, burst int64) tier.Limit {
	return tier.Limit{Algorithm: alg, Rate: rate, Period: time.Duration(period) * time.Microsecond, Burst: burst}
}

const slot = 150_000

func asker(p *pair, l tier.Limit) func(func(*tier.Ask)) tier.Grant {
	return func(f func(*tier.Ask)) tier.Grant {
		p.t.Helper()
		a := tier.Ask{Key: p.keyName(0), Limit: l, SlotUS: slot}
		f(&a)
		return p.one(a)
	}
}

// variant does the same on a model with a rule switched off, from the beginning of the test.
func variantOf(v model.Variant, l tier.Limit, steps ...func(now *int64, a *tier.Ask, last tier.Grant)) (last tier.Grant) {
	s, now := model.New(v), int64(1_700_000_000_000_000)
	for _, f := range steps {
		a := tier.Ask{Key: "k", Limit: l, SlotUS: slot}
		f(&now, &a, last)
		_, g := s.Exchange(now, l.Algorithm, 0, tier.Darkness{}, []tier.Ask{a})
		last = g[0]
	}
	return last
}

// Lease all of the bucket, no call until both slots have rolled over, ask again: what was refilled while the lease could be
// spent does not count.
func TestRolloverDiscards(t *testing.T) {
	l := micro(tier.TokenBucket, 10_000, 1_000_000, 1000)
	p := openPair(t)
	ask := asker(p, l)
	want := func(a *tier.Ask) { a.Want = 5000 }
	if g := ask(want); g.Lease != 1000 || g.LifeUS != 2*slot-1 {
		t.Fatalf("%+v", g)
	}
	p.at(p.now + 2*slot + 3_500)
	if g := ask(want); g.Lease != 35 {
		t.Errorf("%d tokens, want the 35 of the 3.5 ms since the lease died", g.Lease)
	}
	plain := variantOf(model.Variant{NoRollover: true}, l,
		func(_ *int64, a *tier.Ask, _ tier.Grant) { want(a) },
		func(now *int64, a *tier.Ask, _ tier.Grant) { *now += 2*slot + 3_500; want(a) })
	if plain.Lease != 1000 {
		t.Errorf("without the step: %d", plain.Lease)
	}
}

// The refill is capped with what was outstanding before the report: otherwise the report would bring tokens that could not be
// made while they were out.
func TestReportComesAfterTheCap(t *testing.T) {
	p := openPair(t)
	ask := asker(p, micro(tier.TokenBucket, 10_000, 1_000_000, 1000))
	g := ask(func(a *tier.Ask) { a.Want = 1000 })
	p.at(p.now + 100_000)
	if g = ask(func(a *tier.Ask) { a.Lease, a.Spent = g.Slot, 1000 }); g.Remaining != 0 || g.Out != 0 || !g.Credited {
		t.Errorf("%+v", g)
	}
	p.at(p.now + 1_000)
	if g = ask(func(*tier.Ask) {}); g.Remaining != 10 {
		t.Errorf("%d tokens 1 ms later", g.Remaining)
	}
}

// A return counts while its slot is the current or the previous one, and not a microsecond longer.
func TestLateReturnIsRefused(t *testing.T) {
	for _, alg := range []tier.Algorithm{tier.TokenBucket, tier.LeakyBucket, tier.SlidingLog} {
		for _, late := range []int64{0, 1} {
			t.Run(algorithmName(alg)+"/"+string(rune('0'+late)), func(t *testing.T) {
				p := openPair(t)
				ask := asker(p, micro(alg, 1, 1_000_000_000, 100))
				if alg == tier.SlidingLog {
					ask = asker(p, micro(alg, 100, 1_000_000_000, 100))
				}
				g := ask(func(a *tier.Ask) { a.Want = 100 })
				was, lease := g.Slot, g.Lease
				p.at(g.Slot - 1)
				ask(func(a *tier.Ask) {})
				p.at(was + slot - 1 + late)
				g = ask(func(a *tier.Ask) { a.Lease, a.Return = was, lease })
				if want := lease * (1 - late); g.Credited != (late == 0) || g.Remaining != want {
					t.Errorf("credited %v, %d tokens, want %d", g.Credited, g.Remaining, want)
				}
			})
		}
	}
}

// A return that is run twice takes what others have out; it never makes more than the capacity. That is why it is sent once.
func TestReturnTwice(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		t.Run(algorithmName(alg), func(t *testing.T) {
			p := openPair(t)
			l := micro(alg, 100, 1_000_000_000, 100)
			ask := asker(p, l)
			mine := ask(func(a *tier.Ask) { a.Want = 30 })
			other := ask(func(a *tier.Ask) { a.Want = 60 })
			if mine.Lease != 30 || other.Lease != 35 { // two instances: half of the rest
				t.Fatalf("leases %d, %d", mine.Lease, other.Lease)
			}
			for i := range 4 {
				g := ask(func(a *tier.Ask) { a.Lease, a.Return = mine.Slot, 30 })
				if g.Remaining+g.Out > 100 {
					t.Errorf("%d there and %d out", g.Remaining, g.Out)
				}
				if i == 0 && g.Remaining != 65 {
					t.Errorf("%d tokens", g.Remaining)
				}
				// A negative number would be stored as one far above those that are stored.
				stored := wire(p.rdb.Get(p.ctx, p.keyName(0)).Val())
				for j := range [...]int{0, 13, 13, 14, 13, 18}[alg] {
					if n := stored.number(j); n > maxInteger {
						t.Errorf("number %d of the state is %d", j, n)
					}
				}
			}
		})
	}
}

// Callers that waited were admitted when the script ran: they are not outstanding.
func TestWaitersAreNotLeases(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		p := openPair(t)
		a := tier.Ask{Key: p.keyName(int(alg)), Limit: micro(alg, 10, 1_000_000, 10), SlotUS: slot, Need: []tier.Cost{{N: 4, Count: 1}, {N: 20, Count: 1}, {N: 3, Count: 3}}}
		if g := p.one(a); g.Served != 10 || g.Out != 0 || g.Remaining != 0 {
			t.Errorf("%s: %+v", algorithmName(alg), g)
		}
	}
}

// The log lets reported tokens leave a window after they were spent, to the tick, and unreported ones a window after their
// lease died.
func TestLogTicks(t *testing.T) {
	const period, tick = 1_000_000, 2_000
	for _, reported := range []bool{true, false} {
		p := openPair(t)
		p.at(1_700_000_000_000_000)
		key := 0
		if !reported {
			key = 1
		}
		a := tier.Ask{Key: p.keyName(key), Limit: micro(tier.SlidingLog, 10, period, 10), SlotUS: slot}
		b := a
		b.Want = 10
		g := p.one(b)
		spent := p.now + 30_001
		leaves := g.Slot + slot
		p.at(p.now + 100_000)
		if reported {
			b = a
			b.Lease, b.Spent, b.Spends = g.Slot, 10, []tier.Spend{{AgeUS: p.now - spent, Count: 10}}
			g = p.one(b)
			leaves = spent
		}
		leaves = (leaves/tick+1)*tick + period
		p.at(leaves - 1)
		if g = p.one(a); g.Remaining != 0 || g.RetryUS != 1 {
			t.Errorf("reported %v: %+v", reported, g)
		}
		p.at(leaves)
		if g = p.one(a); g.Remaining != 10 {
			t.Errorf("reported %v: %+v", reported, g)
		}
	}
}

// A key that nobody remembers may be one whose darkness lasted: it has no more than an empty one would have by now.
func TestForgottenKeyInTheDark(t *testing.T) {
	p := openPair(t)
	// 1/s, and one of two may be using its share, which is all of the rate: the store makes nothing.
	a := tier.Ask{Key: p.keyName(0), Limit: micro(tier.TokenBucket, 1, 1_000_000, 20), SlotUS: slot, Need: []tier.Cost{{N: 1, Count: 100}}}
	if g := p.one(a); g.Served != 20 {
		t.Fatalf("%+v", g)
	}
	t0 := p.now
	dark := tier.Darkness{Missing: 1, Most: 1, Fleet: 2, From: t0 + 100_000, Until: t0 + 60_000_000, Episode: 1, Least: 2}
	p.at(dark.Until)
	if len(p.known) != 0 {
		t.Fatal("the key should have expired")
	}
	if _, g := p.exchange(0, dark, a); g[0].Served != 0 {
		t.Errorf("%d tokens of nothing", g[0].Served)
	}
	plain := model.New(model.Variant{FreshFull: true})
	if _, g := plain.Exchange(p.now, tier.TokenBucket, 0, dark, []tier.Ask{a}); g[0].Served != 10 {
		t.Errorf("the plain variant: %d", g[0].Served)
	}
	// A first key, a moment into a darkness, has what the darkness leaves.
	b := a
	b.Key = p.keyName(1)
	if _, g := p.exchange(0, tier.Darkness{Missing: 1, Most: 1, Fleet: 2, From: p.now - 1_000_000, Until: p.now, Episode: 1, Least: 2}, b); g[0].Served != 10 {
		t.Errorf("%d tokens", g[0].Served)
	}
}

// While members are missing, a lease of more than the present may hold is not renewed: it is dead a slot later. What is spent of it and
// what comes back counts all the same, and a lease that fits goes on.
func TestCarryInTheDark(t *testing.T) {
	for _, alg := range []tier.Algorithm{tier.TokenBucket, tier.LeakyBucket, tier.SlidingLog} {
		for _, lease := range []int64{900, 400} {
			t.Run(fmt.Sprintf("%s/%d", algorithmName(alg), lease), func(t *testing.T) {
				l := micro(alg, 1, 10_000_000, 1000)
				if alg == tier.SlidingLog {
					l = micro(alg, 1000, 10_000_000, 0)
				}
				run := func(exchange func(dark tier.Darkness, a tier.Ask) tier.Grant, at func(int64), now int64) (carried, later tier.Grant) {
					ask := tier.Ask{Key: "k", Limit: l, SlotUS: slot, Want: lease}
					g := exchange(tier.Darkness{}, ask)
					dark := tier.Darkness{Missing: 1, Most: 1, Fleet: 2, From: now, Until: now + slot, Episode: 1, Least: 2}
					at(now + slot)
					ask.Want, ask.Lease, ask.Spent, ask.Return, ask.Carry = 0, g.Slot, 10, 20, g.Lease-30
					carried = exchange(dark, ask)
					at(now + 2*slot)
					dark.Until = now + 2*slot
					return carried, exchange(dark, tier.Ask{Key: "k", Limit: l, SlotUS: slot})
				}
				p := openPair(t)
				carried, later := run(func(dark tier.Darkness, a tier.Ask) tier.Grant {
					a.Key = p.keyName(0)
					_, g := p.exchange(0, dark, a)
					return g[0]
				}, p.at, p.now)
				out := lease - 30
				if fits := lease == 400; carried.Out != out || carried.Credited != fits || (later.Out == out) != fits {
					t.Errorf("%+v, a slot later %+v", carried, later)
				}
				m := model.New(model.Variant{KeepsCarry: true})
				clock := p.now
				plain, later := run(func(dark tier.Darkness, a tier.Ask) tier.Grant {
					_, g := m.Exchange(clock, alg, 0, dark, []tier.Ask{a})
					return g[0]
				}, func(t int64) { clock = t }, clock)
				if !plain.Credited || later.Out != out {
					t.Errorf("the plain variant: %+v, a slot later %+v", plain, later)
				}
			})
		}
	}
}

// A limit of 0 denies everything at once, whatever the bucket holds, and what replaces it begins empty.
func TestRateZero(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		p := openPair(t)
		a := tier.Ask{Key: p.keyName(int(alg)), Limit: micro(alg, 10, 1_000_000, 10), SlotUS: slot, Need: []tier.Cost{{N: 1, Count: 1}}}
		p.one(a)
		blocked := a
		blocked.Limit.Rate = 0
		blocked.Want = 5
		if g := p.one(blocked); g.Served+g.Lease != 0 || g.RetryUS != -1 {
			t.Errorf("%s: %+v", algorithmName(alg), g)
		}
		blocked.Key = p.keyName(100 + int(alg))
		if g := p.one(blocked); g.Served+g.Lease != 0 || g.RetryUS != -1 {
			t.Errorf("%s: %+v", algorithmName(alg), g)
		}
	}
}

// What is lost is noticed by everybody who knew, and costs no more than what is known to have been there.
func TestLossIsNoticed(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		t.Run(algorithmName(alg), func(t *testing.T) {
			p := openPair(t)
			p.at(1_700_000_000_000_000) // the beginning of a window
			l := micro(alg, 100, 100_000_000, 100)
			ask := asker(p, l)
			g := ask(func(a *tier.Ask) { a.Need = []tier.Cost{{N: 60, Count: 1}} })
			know := func(a *tier.Ask) { a.Born, a.Version, a.Lease, a.Own = g.Born, g.Version, g.Slot, 60 }
			snapshot := p.rdb.Dump(p.ctx, p.keyName(0)).Val()
			replica := p.m.Snapshot()
			p.at(p.now + 1000)

			// The same key with a grant more, then the replica without it.
			g = ask(func(a *tier.Ask) { know(a); a.Need = []tier.Cost{{N: 10, Count: 1}} })
			if g.Lost {
				t.Fatalf("%+v", g)
			}
			if err := p.rdb.RestoreReplace(p.ctx, p.keyName(0), time.Hour, snapshot).Err(); err != nil {
				t.Fatal(err)
			}
			p.m.Restore(replica)
			before := g
			g2 := p.lenient(func(a *tier.Ask) { know(a); a.Version, a.Own = before.Version, 70 }, l)
			if !g2.Lost || g2.Born == before.Born {
				t.Errorf("rolled back: %+v", g2)
			}
			if alg.Bucket() && g2.Remaining != 0 || !alg.Bucket() && g2.Remaining > 30 {
				t.Errorf("rolled back: %d tokens", g2.Remaining)
			}
			// Gone altogether.
			p.forget(p.keyName(0))
			g3 := ask(func(a *tier.Ask) { know(a); a.Own = 70 })
			if !g3.Lost || alg.Bucket() && g3.Remaining != 0 || !alg.Bucket() && g3.Remaining != 30 {
				t.Errorf("gone: %+v", g3)
			}
			// Another who knew: windows learn from it too, buckets are not emptied twice.
			p.at(p.now + 50_000_000)
			g4 := ask(func(a *tier.Ask) { a.Born, a.Version, a.Lease, a.Own = 1, 1, g.Slot, 5 })
			if !g4.Lost {
				t.Errorf("another: %+v", g4)
			}
			if want := int64(49); alg.Bucket() && g4.Remaining != want {
				t.Errorf("another: %d tokens, want %d", g4.Remaining, want)
			}
			// Now all know the same.
			if g5 := ask(func(a *tier.Ask) { a.Born, a.Version = g4.Born, g4.Version }); g5.Lost {
				t.Errorf("after that: %+v", g5)
			}
		})
	}
}

// lenient is one exchange without a look at the time to live, which a restored key has otherwise.
func (p *pair) lenient(f func(*tier.Ask), l tier.Limit) tier.Grant {
	p.t.Helper()
	a := tier.Ask{Key: p.keyName(0), Limit: l, SlotUS: slot}
	f(&a)
	return p.one(a)
}

// Every operation leaves a time to live, also on a key that had none; what is not ours is replaced.
func TestEveryKeyExpires(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		t.Run(algorithmName(alg), func(t *testing.T) {
			p := openPair(t)
			l := micro(alg, 10, 1_000_000, 10)
			ask := asker(p, l)
			key := p.keyName(0)
			layout := [...]string{"", "\x01", "\x01", "\x02", "\x03", "\x04"}[alg]
			ask(func(a *tier.Ask) { a.Need = []tier.Cost{{N: 1, Count: 3}} })
			// one checks the time to live after each of these.
			for _, f := range []func(*tier.Ask){
				func(*tier.Ask) {},
				func(a *tier.Ask) { a.Want = 3 },
				func(a *tier.Ask) { a.Refund = 2 },
				func(a *tier.Ask) { a.Refund = tier.RefundAll },
				func(a *tier.Ask) { a.Need = []tier.Cost{{N: 50, Count: 1}} },
			} {
				if err := p.rdb.Persist(p.ctx, key).Err(); err != nil {
					t.Fatal(err)
				}
				ask(f)
			}
			for what, put := range map[string]func() error{
				"list":   func() error { return p.rdb.LPush(p.ctx, key, "x").Err() },
				"hash":   func() error { return p.rdb.HSet(p.ctx, key, "h", "x", "3", "7").Err() },
				"zset":   func() error { return p.rdb.Do(p.ctx, "ZADD", key, 1, "x").Err() },
				"text":   func() error { return p.rdb.Set(p.ctx, key, "17 18", 0).Err() },
				"empty":  func() error { return p.rdb.Set(p.ctx, key, "", 0).Err() },
				"short":  func() error { return p.rdb.Set(p.ctx, key, string(rune(alg)), 0).Err() },
				"cut":    func() error { return p.rdb.Set(p.ctx, key, layout+strings.Repeat("\x00", 94), 0).Err() },
				"long":   func() error { return p.rdb.Set(p.ctx, key, layout+strings.Repeat("\x00", 139), 0).Err() },
				"others": func() error { return p.rdb.Set(p.ctx, key, "\x63"+strings.Repeat("\x00", 200), 0).Err() },
			} {
				p.forget(key)
				if err := put(); err != nil {
					t.Fatal(err)
				}
				if g := ask(func(a *tier.Ask) { a.Need = []tier.Cost{{N: 1, Count: 3}} }); g.Served != 3 || g.Lost || g.Remaining != 7 {
					t.Errorf("after a %s: %+v", what, g)
				}
				if g := ask(func(a *tier.Ask) {}); g.Remaining != 7 {
					t.Errorf("after a %s, again: %+v", what, g)
				}
			}
		})
	}
}

// A call that is late, or no call of ours, writes nothing.
func TestRefusedCallsWriteNothing(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		t.Run(algorithmName(alg), func(t *testing.T) {
			p := openPair(t)
			l := micro(alg, 10, 1_000_000, 10)
			asks := []tier.Ask{{Key: p.keyName(0), Limit: l, SlotUS: slot, Want: 1}, {Key: p.keyName(1), Limit: l, SlotUS: slot, Want: 1}}
			if late, _ := p.exchange(p.now-1, tier.Darkness{}, asks...); !late {
				t.Error("not late")
			}
			p.known = map[string]bool{}
			keys, good := arguments(0, tier.Darkness{}, asks)
			refused := func(what string, args ...any) {
				t.Helper()
				if _, err := p.raw(p.scripts[alg], keys, args...); !isFault(err) {
					t.Errorf("%s: %v", what, err)
				}
			}
			refused("no argument")
			refused("two arguments", []byte(good), []byte(good))
			for n := range good {
				refused("cut short", []byte(good[:n]))
			}
			refused("a byte more", append(slices.Clip([]byte(good)), 0))
			// Where each number stands: of the header, of a policy, of an ask without a report and of one with one.
			const header, policy, ask = 64, 35, 32
			type number struct {
				what     string
				at, wide int
				zero     bool // must not be 0
			}
			var all []number
			for i := range 9 {
				all = append(all, number{fmt.Sprint("header ", i), i * 7, 7, false})
			}
			for i := range 5 {
				all = append(all, number{fmt.Sprint("policy ", i), header + i*7, 7, i == 1 || i > 2})
			}
			first := header + policy
			all = append(all, number{"count of policies", header - 1, 1, true}, number{"policy", first, 1, true})
			for i := range 4 {
				all = append(all, number{fmt.Sprint("ask ", i), first + 4 + i*7, 7, false})
			}
			second := first + ask
			all = append(all, number{"report or none", second + 1, 1, false}, number{"back", second + ask + 6*7, 1, false})
			for i := range 6 {
				all = append(all, number{fmt.Sprint("report ", i), second + ask + i*7, 7, false})
			}
			for _, n := range all {
				bad := []int64{maxInteger + 1, 1<<56 - 1}
				if n.wide == 1 {
					bad = []int64{2, 255}
				}
				if n.zero {
					bad = append(bad, 0)
				}
				for _, b := range bad {
					args := slices.Concat(good[:n.at], wire{}.narrow(n.wide, b), good[n.at+n.wide:])
					refused(fmt.Sprintf("%s is %d", n.what, b), []byte(args))
				}
			}
			for what, at := range map[string]int{"needs": first + 2, "spends": second + ask + 6*7 + 1} {
				for _, n := range []int64{1, 2, 1<<16 - 1} {
					args := slices.Concat(good[:at], wire{}.narrow(2, n), good[at+2:])
					refused(what+" that are not there", []byte(args))
				}
			}
			for _, pair := range [][2]int64{{maxInteger + 1, 1}, {1, maxInteger + 1}} {
				at := second + 2
				args := slices.Concat(good[:at], wire{}.narrow(2, 1), good[at+2:], wire{}.add(pair[0], pair[1]))
				refused("a pair out of range", []byte(args))
			}
			if n := p.rdb.Exists(p.ctx, p.keyName(0), p.keyName(1)).Val(); n != 0 {
				t.Errorf("%d keys were written", n)
			}
			if late, _ := p.exchange(p.now, tier.Darkness{}, asks...); late {
				t.Error("late at the fence itself")
			}
		})
	}
}

// A key that comes more than once in a call is as often asked, each time with what the time before left.
func TestKeyTwiceInACall(t *testing.T) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		p := openPair(t)
		a := tier.Ask{Key: p.keyName(int(alg)), Limit: micro(alg, 10, 1_000_000, 10), SlotUS: slot, Need: []tier.Cost{{N: 4, Count: 1}}}
		b := a
		b.Key = p.keyName(100 + int(alg))
		for range 2 {
			// Not by pair.exchange, which holds the key's time to live to each of the answers.
			_, got := p.store.exchange(alg, p.scripts[alg], 0, tier.Darkness{}, a, b, a, a)
			if _, want := p.m.Exchange(p.now, alg, 0, tier.Darkness{}, []tier.Ask{a, b, a, a}); !slices.Equal(got, want) || got[3].Served != 0 {
				t.Errorf("%s:\nscript %+v\nmodel  %+v", algorithmName(alg), got, want)
			}
		}
	}
}
