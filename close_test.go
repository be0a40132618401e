package tierlimit

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
)

// leased lets instance 0 hold a lease.
func (d *directed) leased() {
	d.t.Helper()
	until(d.t, "a lease", func() bool { d.spend(0, 1); return d.hs[0].Stats().Leased > 0 })
}

// Flush says that tokens did not return, whatever kept them: nobody answered, nothing was sent, or Redis was given up before.
func TestFlushSaysWhatDidNotReturn(t *testing.T) {
	for name, f := range map[string]fate{"hung": {lose: true}, "lost": {loseReply: true}, "refused": {refuse: true}, "away": {refuse: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, TokenBucket(1000, time.Hour), model.Variant{}, WithLocalShare(0.5), WithLeaseTTL(time.Minute))
				defer d.close()
				d.leased()
				if err := d.hs[0].Flush(t.Context()); err != nil {
					t.Errorf("with a Redis that answers: %v", err)
				}
				if n := d.hs[0].Stats().Leased; n != 0 {
					t.Errorf("%d tokens in hand after a Flush", n)
				}
				d.leased()
				d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate {
					if heartbeat && name != "away" {
						return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond}
					}
					return f
				})
				if name == "away" {
					until(t, "Redis is given up", func() bool { return d.hs[0].Stats().State > StateOnline })
				}
				began := time.Now()
				err := d.hs[0].Flush(t.Context())
				if err == nil || !strings.Contains(err.Error(), "1 of 1 keys") {
					t.Errorf("%v", err)
				}
				if took := time.Since(began); took > 2*simTimeout+5*time.Millisecond {
					t.Errorf("after %v", took)
				}
				d.wires[0].setFate(nil)
				until(t, "online", func() bool { return online(d.hs[0]) })
				d.spend(0, 1)
				if err := d.hs[0].Flush(t.Context()); err != nil {
					t.Errorf("with a Redis that answers again: %v", err)
				}
			})
		})
	}
}

// What is given up because its context ends says so, and not how it waited.
func TestWaitsForRedisEndWithTheirContext(t *testing.T) {
	for _, name := range []string{"Flush", "Reset", "Close"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, TokenBucket(1000, time.Hour), model.Variant{}, WithLocalShare(0.5), WithLeaseTTL(time.Minute))
				defer d.close()
				d.leased()
				d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{lose: true} })
				ctx, cancel := context.WithTimeout(t.Context(), simTimeout/2)
				defer cancel()
				began := time.Now()
				err := map[string]func() error{
					"Flush": func() error { return d.hs[0].Flush(ctx) },
					"Reset": func() error { return d.ls[0].Reset(ctx, "k") },
					"Close": func() error { return d.hs[0].Close(ctx) },
				}[name]()
				if !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "1ms") || !strings.HasPrefix(err.Error(), "tierlimit: ") {
					t.Errorf("%v", err)
				}
				if took := time.Since(began); name != "Close" && took > simTimeout/2+time.Millisecond {
					t.Errorf("after %v", took)
				}
			})
		})
	}
}

// Close says when nobody could be told that the instance leaves: the fleet keeps its share aside then. Who never joined leaves nothing.
func TestCloseSaysWhenNobodyIsTold(t *testing.T) {
	for name, tc := range map[string]struct {
		before func(d *directed)
		want   error
	}{
		"online":     {func(*directed) {}, nil},
		"ForceLocal": {func(d *directed) { d.hs[0].ForceLocal(true) }, errLeaveForced},
		"away": {func(d *directed) {
			d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{refuse: true} })
			until(d.t, "Redis is given up", func() bool { return d.hs[0].Stats().State > StateOnline })
		}, errLeaveDown},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, TokenBucket(100, time.Second), model.Variant{}, WithLocalShare(0))
				tc.before(d)
				if err := d.hs[0].Close(t.Context()); !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
					t.Errorf("%v, want %v", err, tc.want)
				}
				if err := d.hs[0].Close(t.Context()); err != nil {
					t.Errorf("again: %v", err)
				}
				time.Sleep(4 * simBeat)
				if s := d.hs[1].Stats(); (s.Missing == 0) != (tc.want == nil) {
					t.Errorf("to the other %d are missing of %d", s.Missing, s.Instances)
				}
				d.close()
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		x := &wire{w: newWorld(model.Variant{}, time.Hour, 0)}
		x.setFate(func(bool, []tier.Ask) fate { return fate{refuse: true} })
		h, _ := join(t, x, TokenBucket(100, time.Second), 0, WithRemoteTimeout(simTimeout), WithHeartbeat(simBeat), WithSyncInterval(simSync))
		time.Sleep(time.Second)
		if err := h.Close(t.Context()); err != nil {
			t.Errorf("never heard from Redis: %v", err)
		}
	})
}

// Flush has nothing to say where Redis answers, whatever else is done to the keys meanwhile.
func TestFlushAmongOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1000, time.Second), model.Variant{}, WithLocalShare(0.5))
		defer d.close()
		d.wires[0].setFate(steady(4 * time.Millisecond))
		var wg sync.WaitGroup
		stop := make(chan struct{})
		for i := range 8 {
			wg.Go(func() {
				for j := 0; ; j++ {
					select {
					case <-stop:
						return
					default:
					}
					k := strconv.Itoa(j % 5)
					_, _ = d.ls[0].AllowN(t.Context(), k, int64(1+i))
					if j%7 == i%7 {
						_ = d.ls[0].Refund(t.Context(), k, 1)
					}
					time.Sleep(time.Millisecond)
				}
			})
		}
		for range 200 {
			time.Sleep(7 * time.Millisecond)
			if err := d.hs[0].Flush(t.Context()); err != nil {
				t.Error(err)
				break
			}
		}
		close(stop)
		wg.Wait()
	})
}

// A key that moves to another server while Close returns its lease is settled there: Close does not wait for ever.
func TestCloseWhileAKeyMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(model.Variant{}, time.Hour, 0)
		var moved atomic.Bool
		x := &groupedWire{
			wire: &wire{w: w},
			tagOf: func(g uint8) uint8 {
				if moved.Load() && g > 0 {
					return 7
				}
				return 0
			},
			dead: func(uint8) bool { return false },
		}
		h, err := newHybrid([]Option{WithHeartbeat(time.Second), WithRemoteTimeout(time.Second), WithSyncInterval(simSync), WithLocalShare(0.5)})
		if err != nil {
			t.Fatal(err)
		}
		h.begin(x)
		l, err := h.Limiter("l", TokenBucket(1000, time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		until(t, "online", func() bool { return online(h) })
		time.Sleep(2 * time.Second)
		x.setFate(steady(300 * time.Millisecond))
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { _, _ = l.Allow(t.Context(), "k") })
		}
		time.Sleep(50 * time.Millisecond)
		closed := make(chan error, 1)
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		began := time.Now()
		go func() { closed <- h.Close(ctx) }()
		time.Sleep(10 * time.Millisecond)
		moved.Store(true)
		select {
		case h.lost <- struct{}{}: // or the five seconds are over
		default:
		}
		err = <-closed
		if took := time.Since(began); took > time.Minute {
			t.Errorf("Close took %v: %v", took, err)
		}
		wg.Wait()
		w.air.Wait()
	})
}

// Flush says that a lease was lost on its way back, whatever follows it.
func TestFlushTellsOfALostReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(1000, time.Hour), model.Variant{}, WithLocalShare(0.5))
		spent := 0
		for range 20 {
			spent += d.spend(0, 5)
			time.Sleep(2 * time.Millisecond)
		}
		lost := atomic.Int64{}
		d.wires[0].setFate(func(b bool, asks []tier.Ask) fate {
			for _, a := range asks {
				if a.Return > 0 && lost.CompareAndSwap(0, a.Return) {
					return fate{lose: true}
				}
			}
			return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond}
		})
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = d.ls[0].Peek(t.Context(), "k")
					time.Sleep(50 * time.Microsecond)
				}
			}
		})
		err := d.hs[0].Flush(t.Context())
		close(stop)
		wg.Wait()
		r, _ := d.ls[1].Peek(t.Context(), "k")
		if err == nil && lost.Load() > 0 {
			t.Errorf("Flush returned nil, and %d tokens did not return: %d spent, %d remain", lost.Load(), spent, r.Remaining)
		}
		d.close()
	})
}

// An instance that is being closed joins no fleet, also where keys move meanwhile to a server that is new to it.
func TestCloseJoinsNoFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(model.Variant{}, time.Hour, 0)
		var moved atomic.Bool
		var hs []*Hybrid
		var xs []*groupedWire
		for range 2 {
			x := &groupedWire{
				wire: &wire{w: w},
				tagOf: func(g uint8) uint8 {
					if g >= 128 && moved.Load() {
						return 128
					}
					return 0
				},
				dead: func(uint8) bool { return false },
			}
			h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithLocalShare(0)})
			if err != nil {
				t.Fatal(err)
			}
			h.begin(x)
			hs, xs = append(hs, h), append(xs, x)
		}
		for _, h := range hs {
			until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == 2 })
		}
		// The first leaves slowly, while a master is added; it looks at the topology meanwhile.
		xs[0].setFate(func(bool, []tier.Ask) fate { return fate{there: 4 * time.Millisecond, back: 4 * time.Millisecond} })
		time.Sleep(200 * time.Millisecond)
		moved.Store(true)
		go func() {
			time.Sleep(time.Millisecond)
			hs[0].lost <- struct{}{}
		}()
		if err := hs[0].Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(7 * time.Second)
		for _, d := range hs[1].allDomains() {
			if _, v := d.state(hs[1].now()); v.N != 1 || v.Darkness.Missing != 0 {
				t.Errorf("on server %v the other counts %d members, %d of them missing", d.tag, v.N, v.Darkness.Missing)
			}
		}
		closeAll(t, hs[1])
		w.air.Wait()
	})
}

// Close while the first heartbeat is on its way: whoever is joined by it leaves again.
func TestCloseDuringTheFirstBeat(t *testing.T) {
	for _, after := range []time.Duration{1, 4, 8, 10, 12, 14, 18, 22, 26} {
		for _, how := range []fate{{there: 4 * time.Millisecond, back: 4 * time.Millisecond}, {there: 4 * time.Millisecond, back: 40 * time.Millisecond}} {
			t.Run("", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := newDirected(t, 1, TokenBucket(100, time.Second), model.Variant{}, WithLocalShare(0))
					x := &wire{w: d.w}
					x.setFate(func(bool, []tier.Ask) fate { return how })
					h, _ := join(t, x, TokenBucket(100, time.Second), 0, WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync))
					time.Sleep(after*time.Millisecond + 500*time.Microsecond)
					err := h.Close(t.Context())
					time.Sleep(3 * time.Second)
					if s := d.hs[0].Stats(); err == nil && (s.Instances != 1 || s.Missing != 0) {
						t.Errorf("closed after %v, and the other counts %d instances, %d of them missing", after*time.Millisecond, s.Instances, s.Missing)
					}
					d.close()
				})
			})
		}
	}
}

// What a Refund gave back is told to the others also where the instance closes, or is forced, right after it.
func TestARefundIsToldBeforeTheEnd(t *testing.T) {
	for _, how := range []string{"close", "force", "stay"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, FixedWindow(100, time.Hour), model.Variant{}, WithLocalShare(0))
				d.intoWindow(time.Hour, 5*time.Minute)
				if n := d.spend(0, 100); n != 100 {
					t.Fatal(n)
				}
				d.spend(1, 1) // denied, kept to the end of the hour
				if err := d.ls[0].Refund(t.Context(), "k", 50); err != nil {
					t.Fatal(err)
				}
				switch how {
				case "close":
					if err := d.hs[0].Close(t.Context()); err != nil {
						t.Fatal(err)
					}
				case "force":
					d.hs[0].ForceLocal(true)
				}
				time.Sleep(3 * simBeat)
				if how == "force" {
					time.Sleep(time.Minute)
				}
				if r, err := d.ls[1].Allow(t.Context(), "k"); err != nil || !r.Allowed {
					t.Errorf("50 were given back, and others are told %v %v", r, err)
				}
				d.hs[0].ForceLocal(false)
				d.close()
			})
		})
	}
}
