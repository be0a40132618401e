package tierlimit

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
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

// docs/operations.md, "Deploys and crashes": what ends without Close takes its share along until it is forgotten, the only instance all there
// is; and the log says so.
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
