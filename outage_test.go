package tierlimit

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// What a strict reading of outages found once, held to the right values.

func cutOff(bool, []tier.Ask) fate { return fate{refuse: true} }

func (d *directed) cutAll() {
	for _, x := range d.wires {
		x.setFate(cutOff)
	}
}

// spendFor makes a call at each instance every 500 µs.
func (d *directed) spendFor(length time.Duration) (admitted int) {
	d.t.Helper()
	for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(500 * time.Microsecond) {
		for i := range d.ls {
			admitted += d.spend(i, 1)
		}
	}
	return admitted
}

// G6: Redis restarts without its data while it is out of reach of all, and they come back one by one: those that are still away go on
// with their shares, which the others recall though the record of them is gone.
func TestMemoryLossInAnOutage(t *testing.T) {
	for _, limit := range []Limit{
		TokenBucket(1000, time.Second).WithBurst(10), LeakyBucket(1000, time.Second).WithBurst(10), FixedWindow(1000, time.Second), FixedWindow(3000, 3*time.Second),
		SlidingWindow(1000, time.Second), SlidingLog(1000, time.Second),
	} {
		t.Run(limit.String(), func(t *testing.T) {
			t.Parallel()
			caught(t, model.Variant{NoRecall: true}, func(t *testing.T, v model.Variant) envelope.Verdict {
				d := newDirected(t, 3, limit, v, WithLocalShare(0))
				time.Sleep(2 * time.Second)
				d.cutAll()
				d.spendFor(8 * time.Second)
				d.w.mu.Lock()
				d.w.store = model.New(v)
				d.w.mu.Unlock()
				d.mem = envelope.Memory{}
				for i, h := range d.hs {
					d.wires[i].setFate(nil)
					until(t, "it is back", func() bool { d.spendFor(10 * time.Millisecond); return online(h) })
					n := d.spendFor(4 * time.Second)
					whole := int(4*time.Second/limit.Period) * int(limit.Rate) // of whole windows
					if last := i == len(d.hs)-1; v == (model.Variant{}) && last && n < whole*85/100 {
						t.Errorf("all are back: %d admitted of %d", n, whole)
					}
				}
				return d.verdict()
			})
		})
	}
}

// A share that is evicted in an outage does not start anew within its window.
func TestAnEvictedShareIsRemembered(t *testing.T) {
	for _, limit := range five(100, 20*time.Second) {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 1, limit, model.Variant{}, WithMaxKeys(4), WithShards(1), WithLocalShare(0))
			d.spend(0, 1)
			d.cutAll()
			until(t, "its share", func() bool { d.spend(0, 1); return d.hs[0].Stats().State == StateShare })
			time.Sleep(3 * limit.Period)
			d.mem = envelope.Memory{}
			n := 0
			for round := range 5 {
				n += d.spend(0, 300)
				for i := range 20 {
					if _, err := d.ls[0].Allow(t.Context(), fmt.Sprint("x", round, i)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(10 * time.Millisecond)
			}
			if n > 100 {
				t.Errorf("%v: %d admitted within 50ms", limit, n)
			}
			if !limit.Algorithm.bucket() && n == 0 { // a bucket that is evicted starts empty
				t.Errorf("%v: nothing admitted", limit)
			}
			if v := d.verdict(); v.Overshoot > 0 {
				t.Errorf("%v: %v", limit, v)
			}
		})
	}
}

// What was admitted in an outage is told Redis once, however often the cell is evicted and made again after the return.
func TestAnOutageIsHandedOverOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour - time.Minute)))
		d := newDirected(t, 2, FixedWindow(100, time.Hour), model.Variant{}, WithMaxKeys(4), WithShards(1))
		time.Sleep(time.Second)
		d.cutAll()
		for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) { // into the next hour
			if _, err := d.ls[1].Allow(t.Context(), "other"); err != nil {
				t.Fatal(err)
			}
			d.spend(1, 1)
		}
		for i, x := range d.wires {
			x.setFate(nil)
			until(t, "it is back", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(time.Second)
		own := 0
		for round := range 4 {
			for range 200 {
				own += d.spend(0, 1)
				time.Sleep(time.Millisecond)
			}
			for i := range 20 {
				for _, l := range d.ls {
					if _, err := l.Allow(t.Context(), fmt.Sprint("x", round, i)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(time.Millisecond)
			}
		}
		if own < 49 || own > 50 { // the other has had its half of the hour
			t.Errorf("%d admitted after the return, want 50", own)
		}
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// One that is cut off is counted as missing for as long as it may use its share, however long a heartbeat is.
func TestLongHeartbeat(t *testing.T) {
	for _, beat := range []time.Duration{time.Second, 8 * time.Second, 20 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 2, TokenBucket(100, time.Second), model.Variant{}, WithHeartbeat(beat), WithLocalShare(0))
			time.Sleep(5 * beat)
			d.wires[0].setFate(cutOff)
			each := func(length time.Duration) (n [2]int) {
				for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
					for i := range n {
						n[i] += d.spend(i, 1)
					}
				}
				return n
			}
			each(3*beat + 10*time.Second)
			if s := d.hs[0].Stats().State; s != StateShare {
				t.Errorf("a heartbeat of %v: %v", beat, s)
			}
			if n := each(10 * time.Second); n[0] < 490 || n[0] > 511 || n[1] < 490 || n[1] > 511 {
				t.Errorf("a heartbeat of %v: in 10s of 1000 the one cut off admitted %d, the other %d, want a half each", beat, n[0], n[1])
			}
			if v := d.verdict(); v.Overshoot > 0 {
				t.Errorf("a heartbeat of %v: %v", beat, v)
			}
		})
	}
}

// FallbackShareNow overshoots, by no more than Bound says.
func TestShareNowStaysWithinItsBound(t *testing.T) {
	for _, limit := range []Limit{
		TokenBucket(1000, time.Second).WithBurst(10), LeakyBucket(1000, time.Second), FixedWindow(1000, time.Second), SlidingWindow(1000, time.Second), SlidingLog(1000, time.Second),
	} {
		for _, all := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithFallback(FallbackShareNow), WithLocalShare(0), WithHeartbeat(time.Second), WithRemoteTimeout(50*time.Millisecond))
				d.spendFor(2 * time.Second)
				bound := d.ls[0].Bound().Outage
				d.wires[0].setFate(cutOff)
				if all {
					d.cutAll()
				}
				d.spendFor(5 * time.Second)
				for _, x := range d.wires {
					x.setFate(nil)
				}
				d.spendFor(3 * time.Second)
				v := d.verdict()
				t.Logf("%v, all cut off: %t: overshoot %d, Bound says %d", limit, all, v.Overshoot, bound)
				if v.Overshoot > bound {
					t.Errorf("%v, all cut off: %t: %v, Bound says %d", limit, all, v, bound)
				}
				if !all && v.Overshoot == 0 {
					t.Errorf("%v: no overshoot: the test shows nothing", limit)
				}
			})
		}
	}
}

// A call that is refused across the end of a window claims nothing below 0.
func TestOwnIsNeverNegative(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, SlidingWindow(1000, time.Second), model.Variant{})
		defer d.close()
		to := time.Now().Truncate(time.Second).Add(2 * time.Second)
		for time.Until(to) > 8*time.Millisecond {
			d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
		var off atomic.Bool
		off.Store(true)
		d.wires[0].setFate(func(beat bool, asks []tier.Ask) fate {
			if slices.ContainsFunc(asks, func(a tier.Ask) bool { return a.Own < 0 }) {
				t.Errorf("%+v", asks)
			}
			return fate{refuse: off.Load() && !beat, there: 15 * time.Millisecond}
		})
		for range 30 {
			d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(1100 * time.Millisecond)
		off.Store(false)
		for range 1000 {
			d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
	})
}

// While the shares of others take all there is, a key will be there again: a look says when to ask, not never.
func TestPeekInDarkness(t *testing.T) {
	for _, limit := range five(1, time.Second) {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0))
			defer d.close()
			d.wires[0].setFate(cutOff)
			time.Sleep(5 * time.Second)
			d.spend(1, 2)
			r, err := d.ls[1].Peek(t.Context(), "other")
			if err != nil || !r.Allowed && (r.RetryAfter <= 0 || r.RetryAfter == Never) {
				t.Errorf("%v: %v, %v", limit, r, err)
			}
		})
	}
}

// docs/operations.md, "Deploys and crashes": what ends without Close takes its share along until it is forgotten, the only instance all
// there is; and the log says so.
func TestCrashOfTheOnlyInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(100, time.Second), model.Variant{}, WithLocalShare(0))
		d.spend(0, 1)
		d.cutAll() // for ever
		time.Sleep(time.Second)
		core, logs := observer.New(zap.WarnLevel)
		x := &wire{w: d.w}
		h, l := join(t, x, TokenBucket(100, time.Second), 0, WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithLogger(zap.New(core)))
		d.hs = append(d.hs, h)
		defer d.close()
		until(t, "online", func() bool { return online(h) })
		began := time.Now()
		allowed := func() bool {
			r, err := l.Allow(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			return r.Allowed
		}
		if allowed() || h.Stats().Missing != 1 || logs.FilterMessageSnippet("not heard").Len() != 1 {
			t.Errorf("beside a share of all there is: %+v, %v", h.Stats(), logs.All())
		}
		until(t, "it is forgotten", allowed)
		if took := time.Since(began); took < deadAfter-2*time.Second || took > deadAfter+2*time.Second {
			t.Errorf("forgotten after %v, want %v", took, deadAfter)
		}
	})
}

// A heartbeat that is lost holds nobody up, however far apart heartbeats are: whoever waits has the next one sent.
func TestOneLostHeartbeat(t *testing.T) {
	for _, beat := range []time.Duration{time.Second, 20 * time.Second, time.Minute} {
		t.Run(beat.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, TokenBucket(1000, time.Second), model.Variant{}, WithHeartbeat(beat), WithRemoteTimeout(50*time.Millisecond), WithLocalShare(0))
				defer d.close()
				var beats atomic.Int64
				d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate {
					return fate{lose: heartbeat && beats.Add(1) == 1, there: 100 * time.Microsecond, back: 100 * time.Microsecond}
				})
				for end := time.Now().Add(10 * time.Minute); beats.Load() == 0; time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatal("no heartbeat was sent")
					}
				}
				time.Sleep(60 * time.Millisecond) // it has timed out
				began := time.Now()
				if err := d.ls[0].Refund(t.Context(), "other", 1); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took > 100*time.Millisecond {
					t.Errorf("a refund took %v", took)
				}
				for d.spend(0, 1) == 0 && time.Since(began) < time.Minute {
				}
				if took := time.Since(began); took > 100*time.Millisecond {
					t.Errorf("nothing was admitted for %v", took)
				}
			})
		})
	}
}

// Close while a heartbeat is being lost: none that is sent after it joins the fleet again.
func TestCloseWhileAHeartbeatIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, TokenBucket(100, time.Second), model.Variant{}, WithRemoteTimeout(100*time.Millisecond), WithLocalShare(0))
		var beats atomic.Int64
		d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate {
			return fate{lose: heartbeat && beats.Add(1) == 1, there: 20 * time.Millisecond, back: 20 * time.Millisecond}
		})
		until(t, "a beat is on its way", func() bool { return beats.Load() >= 1 })
		if err := d.hs[0].Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		if s := d.hs[1].Stats(); s.Instances != 1 || s.Missing != 0 {
			t.Errorf("after the other's Close: %d instances, %d missing", s.Instances, s.Missing)
		}
		d.close()
	})
}

// A groupedWire leads to several servers, by the group of a key.
type groupedWire struct {
	*wire
	tagOf func(group uint8) uint8
	dead  func(tag uint8) bool
}

func (x *groupedWire) Grouped() bool { return true }

func (x *groupedWire) Domain(g uint8) remote.Domain { return remote.Domain{Tag: x.tagOf(g)} }

func (x *groupedWire) tagOfKey(key string) uint8 {
	_, rest, _ := strings.Cut(key, "{")
	group, _, _ := strings.Cut(rest, "}")
	n, _ := strconv.Atoi(group)
	return x.tagOf(uint8(n))
}

func (x *groupedWire) ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(remote.Reply, error)) {
	f := x.fateOf(false, asks)
	f.refuse = f.refuse || x.dead(x.tagOfKey(asks[0].Key))
	then(carry(ctx, &x.w.air, f, func() remote.Reply { return x.w.exchange(alg, fence, dark, asks) }))
}

func (x *groupedWire) Heartbeat(ctx context.Context, d remote.Domain, b remote.Beat) (remote.View, error) {
	f := x.fateOf(true, nil)
	f.refuse = f.refuse || x.dead(d.Tag)
	return carry(ctx, &x.w.air, f, func() remote.View {
		x.w.mu.Lock()
		defer x.w.mu.Unlock()
		return remote.View(x.w.store.Heartbeat(x.w.nowNS()/1000, fmt.Sprint(d.Tag), model.Beat(b)))
	})
}

// A fleet knows its size also where its keys move to a server that does not answer: the shares begin after the silence and sum to the
// limit.
func TestKeysMoveToAServerOutOfReach(t *testing.T) {
	const moving = 128 // groups from here on do
	for _, limit := range five(100, time.Minute) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(model.Variant{}, time.Hour, 0)
				var moved atomic.Bool
				var hs []*Hybrid
				var ls []*Limiter
				for range 4 {
					x := &groupedWire{
						wire: &wire{w: w},
						tagOf: func(g uint8) uint8 {
							if moved.Load() && g >= moving {
								return moving
							}
							return 0
						},
						dead: func(tag uint8) bool { return tag == moving },
					}
					h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithLocalShare(0)})
					if err != nil {
						t.Fatal(err)
					}
					h.begin(x)
					l, err := h.Limiter("l", limit)
					if err != nil {
						t.Fatal(err)
					}
					hs, ls = append(hs, h), append(ls, l)
				}
				for _, h := range hs {
					until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == 4 })
				}
				time.Sleep(time.Second)
				key := ""
				for i := 0; key == ""; i++ {
					if _, g := remote.KeyName("tierlimit:", "l", fmt.Sprint(i)); g >= moving {
						key = fmt.Sprint(i)
					}
				}
				var mem envelope.Memory
				check := func(i int) {
					a := envelope.Admission{Called: w.nowNS(), Cost: 1, Key: 1, Instance: int32(i)}
					r, err := ls[i].Allow(t.Context(), key)
					if err != nil {
						t.Fatal(err)
					}
					if a.Returned = w.nowNS(); r.Allowed {
						_ = mem.Record(a)
					}
				}
				for range 60 {
					for i := range ls {
						check(i)
					}
				}
				if n := len(mem.History()); n != 100 {
					t.Fatalf("%d of 100 admitted", n)
				}
				moved.Store(true)
				for range 250 {
					time.Sleep(time.Second)
					for i := range ls {
						check(i)
					}
				}
				if l := ls[0]; l.Bound().Outage != 0 {
					t.Errorf("Bound: %v", l.Bound())
				}
				if n := len(mem.History()); n < 200 {
					t.Errorf("%d admitted in all, want the shares of some minutes after the move", n)
				}
				closeAll(t, hs...)
				w.air.Wait()
				if v := envelope.Check(envelopeOf(limit), mem.History()); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// The share of a bucket that is asked for late in an outage is credited with the time that passed by this instance's clock taken as slow,
// as one that is asked for at once is.
func TestALateShareOfABucket(t *testing.T) {
	for _, early := range []bool{true, false} {
		t.Run(fmt.Sprintf("early=%t", early), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limit := TokenBucket(1_000_000, 24*time.Hour)
				slow := breaker.Settings{Failures: 2, Cooldown: 10 * time.Minute}
				d := &directed{t: t, w: newWorld(model.Variant{}, time.Hour, -999)} // the instances' clocks are fast
				for i := range 2 {
					x := &wire{w: d.w}
					h, l := join(t, x, limit, ms(i*700), WithHeartbeat(time.Second), WithRemoteTimeout(50*time.Millisecond), WithLocalShare(0), WithBreaker(slow))
					d.hs, d.ls, d.wires = append(d.hs, h), append(d.ls, l), append(d.wires, x)
				}
				for _, h := range d.hs {
					until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == 2 })
				}
				time.Sleep(10 * time.Second)
				if d.spendN(0, 1, 1_000_000) != 1 {
					t.Fatal("not full")
				}
				d.cutAll()
				time.Sleep(time.Minute)
				if early {
					d.spend(0, 3)
					d.spend(1, 3)
				}
				time.Sleep(20 * time.Hour)
				for i := range 2 {
					d.spend(i, 3)
					for n := int64(1 << 19); n > 0; n /= 2 {
						d.spendN(i, 1, n)
					}
				}
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// What the log calls is called without a lock: it may ask for anything, and take its time.
func TestALogMayAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Pointer[Hybrid]
		var stuck atomic.Int64
		core, _ := observer.New(zap.InfoLevel)
		log := zap.New(core, zap.Hooks(func(zapcore.Entry) error {
			h := asked.Load()
			if h == nil {
				return nil
			}
			done := make(chan struct{})
			go func() { h.Stats(); close(done) }()
			select {
			case <-done:
			case <-time.After(2 * time.Second):
				stuck.Add(1)
			}
			return nil
		}))
		w := newWorld(model.Variant{}, time.Hour, 0)
		opts := []Option{WithHeartbeat(200 * time.Millisecond), WithRemoteTimeout(100 * time.Millisecond), WithSyncInterval(simSync)}
		gone := &wire{w: w}
		h, _ := join(t, &wire{w: w}, TokenBucket(100, time.Second), 0, append(opts, WithLogger(log))...)
		asked.Store(h)
		other, _ := join(t, gone, TokenBucket(100, time.Second), 0, opts...)
		until(t, "the fleet is one", func() bool { return h.Stats().Instances == 2 })
		gone.setFate(cutOff)
		until(t, "it is missed", func() bool { return h.Stats().Missing == 1 })
		w.mu.Lock()
		w.store.Flush()
		w.mu.Unlock()
		time.Sleep(2 * time.Second)
		closeAll(t, h, other)
		if n := stuck.Load(); n != 0 {
			t.Errorf("%d entries were logged with a lock held", n)
		}
	})
}

// Callers that waited in vain decide by the share of the key as it is now: their cell may have been swept since.
func TestAShareIsNotMadeOfADeadCell(t *testing.T) {
	for _, limit := range five(100, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(0))
				defer d.close()
				h, l := d.hs[0], d.ls[0]
				h.ForceLocal(true)
				time.Sleep(20 * time.Second)
				// What cold does where the domain is away and not down (ForceLocal(false) until the beat, or a breaker that took longer
				// than the silence): it joins, is told Down, and lets go of the lock.
				c, err := l.lockedCell(l.hash("k"), "k")
				if err != nil {
					t.Fatal(err)
				}
				c.Mu.Unlock()
				synctest.Wait() // Sweep is the loop's: it has to stand still
				h.table.Sweep(500, h.idle)
				if !c.Dead {
					t.Fatal("kept")
				}
				dead, alive := 0, 0
				p := l.policy.Load()
				for range 300 { // those who waited
					r, err := l.outcome(h.domainOf(c), c, p, 1, local.Outcome{Down: true})
					if err != nil {
						t.Fatal(err)
					}
					if r.Allowed {
						dead++
					}
				}
				for range 300 {
					r, err := l.Allow(t.Context(), "k")
					if err != nil {
						t.Fatal(err)
					}
					if r.Allowed {
						alive++
					}
				}
				if dead+alive > 100 {
					t.Errorf("at one instant %d by the dead cell and %d by the live one, of 100", dead, alive)
				}
			})
		})
	}
}

// A refund is credited before Refund returns or not at all, also where the key is to be settled before it is handed over.
func TestASettlementCreditsNoRefund(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(100, 2*time.Second), model.Variant{}, WithLocalShare(0), WithBreaker(quick), WithRemoteTimeout(50*time.Millisecond))
		d.intoWindow(2*time.Second, 0)
		d.spend(0, 1)
		d.wires[0].setFate(cutOff)
		time.Sleep(time.Second) // missing for a while, no share yet: all in one window
		d.wires[0].setFate(nil)
		until(t, "it is back", func() bool { return online(d.hs[0]) })
		if d.membership(0).back == 0 {
			t.Fatal("was not missing")
		}
		d.wires[0].setFate(nil)
		if n := d.spendN(1, 1, 60); n != 1 {
			t.Fatal("60")
		}
		// at the end of the window: the flight takes 40 ms to get there
		d.wires[0].setFate(func(b bool, _ []tier.Ask) fate {
			if b {
				return fate{there: 100 * time.Microsecond}
			}
			return fate{there: 40 * time.Millisecond}
		})
		for at := time.Duration(0); at < 1980*time.Millisecond || at > 1982*time.Millisecond; at = time.Duration(d.w.nowNS()) % (2 * time.Second) {
			time.Sleep(100 * time.Microsecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		a := envelope.Admission{Called: d.w.nowNS(), Cost: -60, Key: 1}
		err := d.ls[0].Refund(ctx, "k", 60)
		a.Returned = d.w.nowNS()
		_ = d.mem.Record(a)
		// the new window begins: the other spends 60 of it before the refund comes
		for time.Duration(d.w.nowNS())%(2*time.Second) > time.Second {
			time.Sleep(100 * time.Microsecond)
		}
		time.Sleep(2 * time.Millisecond)
		d.spendN(1, 1, 60)
		time.Sleep(100 * time.Millisecond)
		d.spend(1, 150)
		for _, e := range d.w.entries() {
			for _, k := range e.asks {
				if k.Refund != 0 && !e.late && e.at*1000 > a.Returned {
					t.Errorf("Refund returned %v; %v later %d was credited (back %v)", err, time.Duration(e.at*1000-a.Returned), k.Refund, k.Back)
				}
			}
		}
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// The share of an instance that never heard from Redis does not begin full again when its cell was evicted.
func TestAnEvictedShareOfBeforeIsNotRefilled(t *testing.T) {
	for _, limit := range five(100, time.Minute) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(model.Variant{}, time.Hour, 0)
				x := &wire{w: w, fate: cutOff}
				h, l := join(t, x, limit, 0, WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithInstances(2), WithMaxKeys(4), WithShards(1))
				defer closeAll(t, h)
				time.Sleep(time.Second)
				n := 0
				for range 10 {
					for range 100 {
						if r, _ := l.Allow(t.Context(), "k"); r.Allowed {
							n++
						}
					}
					for i := range 20 {
						_, _ = l.Allow(t.Context(), string(rune('a'+i)))
					}
				}
				if n > 100 {
					t.Errorf("%d admitted of a share of 50; the whole limit is 100; %v", n, l.Bound())
				}
			})
		})
	}
}

// A lease that lies idle when Redis goes away goes back once it is there again, its cell evicted meanwhile or not.
func TestAnIdleLeaseReturnsAfterAnOutage(t *testing.T) {
	for _, how := range []string{"outage", "evicted in the outage", "evicted, refused"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, FixedWindow(1000, 24*time.Hour), model.Variant{}, WithLocalShare(0.5), WithBreaker(quick))
				spent := 0
				for range 20 {
					spent += d.spend(0, 5)
					time.Sleep(2 * time.Millisecond)
				}
				held := d.cell(0).Tokens()
				if held == 0 {
					t.Fatal("no lease")
				}
				if how == "evicted, refused" {
					d.wires[0].setFate(func(b bool, _ []tier.Ask) fate { return fate{refuse: !b} })
					d.evictAll(0)
					time.Sleep(time.Millisecond)
					d.wires[0].setFate(nil)
				} else {
					d.wires[0].setFate(cutOff)
					time.Sleep(2 * time.Second)
					if how != "outage" {
						d.evictAll(0)
					}
					d.wires[0].setFate(nil)
				}
				until(t, "back", func() bool { return online(d.hs[0]) })
				time.Sleep(time.Minute)
				for range 10 {
					spent += d.spend(1, 200)
					time.Sleep(time.Second)
				}
				if spent < 1000-5 {
					t.Errorf("a minute after: %d of 1000 admitted, the other held %d; it holds %d", spent, held, d.hs[0].Stats().Leased)
				}
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// A beat of unknown outcome begins another silence, and a share that begins at once begins empty then.
func TestAShareThatBeginsAtOnceIsNotRefilled(t *testing.T) {
	for _, limit := range []Limit{TokenBucket(10, time.Second).WithBurst(100), LeakyBucket(10, time.Second).WithBurst(100)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithFallback(FallbackShareNow), WithLocalShare(0), WithBreaker(quick))
				bound := d.ls[0].Bound().Outage
				d.spend(0, 1)
				d.cutAll()
				for i := range 2 {
					until(t, "away", func() bool { return !online(d.hs[i]) })
				}
				time.Sleep(15 * time.Second)
				for i := range 2 {
					d.spend(i, 100)
				}
				for range 4 {
					for i, x := range d.wires {
						beats := 0
						done := make(chan struct{})
						x.setFate(func(beat bool, _ []tier.Ask) fate {
							if beat {
								beats++
								if beats == 2 {
									close(done)
								}
							}
							return fate{refuse: beats > 2, lose: beats == 2} // a peek is answered, the beat is lost
						})
						<-done
						time.Sleep(2 * simTimeout)
						d.spend(i, 100)
					}
				}
				if v := d.verdict(); v.Overshoot > bound {
					t.Errorf("Bound().Outage is %d: %v", bound, v)
				}
			})
		})
	}
}

// A denial that was told while shares were kept aside does not stand when they are free again.
func TestADenialEndsWithTheDarkness(t *testing.T) {
	const window = 4 * time.Minute
	for _, limit := range five(30, window) {
		for _, back := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v/back=%t", limit.Algorithm, back), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0), WithBreaker(quick))
					for at := time.Duration(0); at < window-time.Second; at = time.Duration(d.w.nowNS()) % window {
						time.Sleep(500 * time.Millisecond)
					}
					d.wires[0].setFate(cutOff)
					time.Sleep(2 * time.Second)
					n := d.spend(1, 40)
					r, _ := d.ls[1].Allow(t.Context(), "k")
					if back {
						d.wires[0].setFate(nil)
						until(t, "back", func() bool { return online(d.hs[0]) })
						time.Sleep(2 * simBeat)
						d.spend(0, 1)
					}
					for range 59 {
						time.Sleep(2 * time.Second)
						n += d.spend(1, 1)
					}
					peek, _ := d.ls[1].Peek(t.Context(), "k")
					truth, _ := d.ls[0].Peek(t.Context(), "k")
					if n < 28 {
						t.Errorf("%d of 30 admitted; the denial was %v; now %v; the other sees %v", n, r, peek, truth)
					}
					if v := d.verdict(); v.Overshoot > 0 {
						t.Error(v)
					}
				})
			})
		}
	}
}

// What was admitted before Redis was first heard is charged at the next chance, should Redis go away again before the key is asked for.
func TestWhatWasAdmittedBeforeIsNotForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := FixedWindow(100, time.Hour)
		w := newWorld(model.Variant{}, time.Hour, 0)
		d := &directed{t: t, w: w}
		for i := range 2 {
			x := &wire{w: w, fate: cutOff}
			h, l := join(t, x, limit, ms(i*700), WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithInstances(2), WithBreaker(quick), WithLocalShare(0))
			d.hs, d.ls, d.wires = append(d.hs, h), append(d.ls, l), append(d.wires, x)
		}
		d.intoWindow(time.Hour, 5*time.Minute)
		for i := range 2 {
			if n := d.spend(i, 100); n != 50 {
				t.Errorf("share of two: %d", n)
			}
		}
		for i, x := range d.wires {
			x.setFate(nil)
			until(t, "online", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(5 * simBeat)
		d.cutAll()
		for i := range 2 {
			until(t, "away", func() bool { return !online(d.hs[i]) })
		}
		time.Sleep(5 * time.Second)
		for i := range 2 {
			d.spend(i, 1)
		}
		for i, x := range d.wires {
			x.setFate(nil)
			until(t, "online", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(5 * simBeat)
		for _, l := range d.ls { // each makes contact and is charged, before anybody spends
			_, _ = l.Peek(t.Context(), "k")
		}
		n := 100
		for i := range 2 {
			n += d.spend(i, 100)
		}
		if v := d.verdict(); v.Overshoot > 0 {
			t.Errorf("%d admitted in one window: %v", n, v)
		}
	})
}

// What ColdAdmit let through while Redis went away is charged when it is back.
func TestAChargeOutlastsAnOutage(t *testing.T) {
	for _, limit := range five(100, time.Hour) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithBreaker(quick), WithLocalShare(0))
				d.intoWindow(time.Hour, 5*time.Minute)
				l, err := d.hs[0].Limiter("cold", limit, WithColdStart(ColdAdmit(10)))
				if err != nil {
					t.Fatal(err)
				}
				other, err := d.hs[1].Limiter("cold", limit)
				if err != nil {
					t.Fatal(err)
				}
				d.wires[0].setFate(func(bool, []tier.Ask) fate { return cutOff(false, nil) })
				for range 10 {
					if r, err := l.Allow(context.Background(), "k"); err != nil || !r.Allowed {
						t.Fatal(r, err)
					}
				}
				until(t, "away", func() bool { return !online(d.hs[0]) })
				time.Sleep(time.Second)
				d.wires[0].setFate(nil)
				until(t, "back", func() bool { return online(d.hs[0]) })
				time.Sleep(5 * time.Second)
				if r, err := other.Peek(t.Context(), "k"); err != nil || r.Remaining > 91 {
					t.Errorf("10 were admitted without asking, and 5 s after Redis is back %v %v", r, err)
				}
				c := d.hs[0].table.Find(l.hash("k"), l.id, "k")
				c.Mu.Lock()
				if c.ChargeCold != 0 {
					t.Errorf("%d tokens are still to be charged", c.ChargeCold)
				}
				c.Mu.Unlock()
				d.close()
			})
		})
	}
}
