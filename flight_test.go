package tierlimit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// A key that always has callers waiting must not keep those of other algorithms (or slot groups) from Redis.
func TestABusyBatchLeavesRoomForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1_000_000, time.Second), model.Variant{}, WithLocalShare(0))
		defer d.close()
		d.wires[0].setFate(steady(100 * time.Microsecond)) // one flight at once
		other, err := d.hs[0].Limiter("w", FixedWindow(1_000_000, time.Second))
		if err != nil {
			t.Fatal(err)
		}
		d.spend(0, 1)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 13 * time.Microsecond)
				for ctx.Err() == nil {
					_, _ = d.ls[0].Allow(t.Context(), "k")
					time.Sleep(7 * time.Microsecond)
				}
			})
		}
		denied := 0
		var longest time.Duration
		for range 100 {
			began := time.Now()
			r, err := other.Allow(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			longest = max(longest, time.Since(began))
			if !r.Allowed {
				denied++
			}
			time.Sleep(time.Millisecond)
		}
		cancel()
		wg.Wait()
		t.Logf("longest %v, %d denied", longest, denied)
		if denied > 0 || longest > 5*time.Millisecond {
			t.Errorf("%d of 100 were denied, the longest waited %v for Redis that answers in 100µs", denied, longest)
		}
	})
}

// One cell is in one flight at a time: also where a landing has queued it already and callers wait for it, here while the landing
// is held up at another cell.
func TestACellFliesOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys, rtt = 64, 2 * time.Millisecond // so far away that several flights are on their way at once
		d := newDirected(t, 2, FixedWindow(1000, 10*time.Second), model.Variant{}, WithLocalShare(0), WithBreaker(quick))
		defer d.close()
		var mu sync.Mutex
		began := map[string]time.Time{}
		returned, held := false, (*local.Cell)(nil)
		twice, settled := 0, 0
		watch := func(heartbeat bool, asks []tier.Ask) fate {
			mu.Lock()
			defer mu.Unlock()
			for _, a := range asks {
				if at, ok := began[a.Key]; ok && time.Since(at) < rtt {
					twice++
				}
				began[a.Key] = time.Now()
			}
			switch n := len(asks); {
			case n > 0 && asks[0].Back && held != nil:
				held.Mu.Unlock()
				held = nil
			case n > 1 && returned && settled == 0 && !asks[0].Back:
				settled = n
				key := asks[n-1].Key[strings.Index(asks[n-1].Key, "}l:")+3:]
				held = d.hs[0].table.Find(d.ls[0].hash(key), d.ls[0].id, key)
				held.Mu.Lock()
			}
			return fate{there: rtt / 2, back: rtt / 2}
		}
		d.wires[0].setFate(watch)
		all := func() {
			var wg sync.WaitGroup
			for k := range keys {
				wg.Go(func() {
					if r, err := d.ls[0].Allow(t.Context(), fmt.Sprint(k)); err != nil || !r.Allowed {
						t.Error(r, err)
					}
				})
			}
			wg.Wait()
		}
		d.intoWindow(10*time.Second, time.Second)
		all()
		d.wires[0].setFate(cutOff)
		time.Sleep(time.Second) // missing
		d.wires[0].setFate(watch)
		until(t, "it is back", func() bool { return online(d.hs[0]) })
		returned = true
		all()
		if settled == 0 {
			t.Error("no flight had two cells: this shows nothing")
		}
		if twice > 0 {
			t.Errorf("%d asks for a key that is on its way already", twice)
		}
	})
}

// A refund is credited before Refund returns, or not at all: also where it is given up while another exchange of the key is on its way.
func TestARefundGivenUpIsNotCredited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(10, time.Hour), model.Variant{}, WithLocalShare(0))
		defer d.close()
		d.wires[0].setFate(steady(10 * time.Millisecond))
		d.spend(0, 5)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = d.ls[0].Allow(t.Context(), "k") }) // on its way
		time.Sleep(time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
		defer cancel()
		err := d.ls[0].Refund(ctx, "k", 5)
		wg.Wait()
		time.Sleep(time.Second)
		r, perr := d.ls[0].Peek(t.Context(), "k")
		if err == nil || perr != nil || r.Remaining != 4 {
			t.Errorf("the refund: %v; then %v, %v, want 4 left", err, r, perr)
		}
		for _, e := range d.w.entries() {
			if e.asks[0].Refund != 0 {
				t.Errorf("credited after it returned: %+v", e.asks[0])
			}
		}
	})
}

// A stall is a wire whose next exchange is answered, but taken in only much later: the process was stopped meanwhile.
type stall struct {
	*wire
	next atomic.Int64
}

func (s *stall) ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(remote.Reply, error)) {
	then(s.Exchange(ctx, alg, fence, dark, asks))
}

func (s *stall) Exchange(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) (remote.Reply, error) {
	r, err := s.wire.Exchange(ctx, alg, fence, dark, asks)
	time.Sleep(time.Duration(s.next.Swap(0)))
	return r, err
}

// An instance that was stopped while an answer was on its way asks Redis again once it goes on.
func TestAStoppedProcessAsksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := &stall{wire: &wire{w: newWorld(model.Variant{}, time.Hour, 0)}}
		h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithLocalShare(0)})
		if err != nil {
			t.Fatal(err)
		}
		h.begin(x)
		l, err := h.Limiter("l", TokenBucket(1000, time.Second))
		if err != nil {
			t.Fatal(err)
		}
		until(t, "online", func() bool { return online(h) })
		for range 10 {
			if r, err := l.Allow(t.Context(), "k"); err != nil || !r.Allowed {
				t.Fatal(r, err)
			}
		}
		x.next.Store(int64(5 * time.Second))
		_, _ = l.Allow(t.Context(), "k")
		time.Sleep(10 * time.Second)
		denied := 0
		for range 100 {
			if r, err := l.Allow(t.Context(), "k"); err != nil || !r.Allowed {
				denied++
			}
			time.Sleep(100 * time.Millisecond)
		}
		if denied > 0 {
			t.Errorf("%d of 100 denied, of a bucket that is full, after 5 s", denied)
		}
		closeAll(t, h)
		x.w.air.Wait()
	})
}

// Close returns unspent tokens: also of a lease that is on its way, or would be asked for by callers who have been waiting.
func TestCloseKeepsNoLease(t *testing.T) {
	for _, at := range []time.Duration{0, 1, 5, 6} {
		for _, fresh := range []bool{false, true} {
			t.Run(fmt.Sprint(at, fresh), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := newDirected(t, 2, TokenBucket(1000, time.Hour), model.Variant{}, WithLocalShare(0.5), WithLeaseTTL(time.Minute))
					d.wires[0].setFate(steady(4 * time.Millisecond))
					if !fresh {
						d.spend(0, 20)
						_ = d.hs[0].Flush(t.Context())
					}
					var admitted atomic.Int64
					var wg sync.WaitGroup
					for i := range 40 {
						wg.Go(func() {
							time.Sleep(time.Duration(i/10) * time.Millisecond)
							if r, err := d.ls[0].Allow(t.Context(), "k"); err == nil && r.Allowed {
								admitted.Add(1)
							}
						})
					}
					time.Sleep(at*time.Millisecond + 500*time.Microsecond)
					if err := d.hs[0].Close(t.Context()); err != nil {
						t.Error(err)
					}
					wg.Wait()
					used := admitted.Load()
					if !fresh {
						used += 20
					}
					r, err := d.ls[1].Peek(t.Context(), "k")
					if err != nil || r.Remaining != 1000-used {
						t.Errorf("%v, %v, want %d", r, err, 1000-used)
					}
					d.close()
				})
			})
		}
	}
}

// What lost its exchange is let go when it is idle.
func TestALostExchangeLeavesNoCell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1000, time.Second), model.Variant{}, WithLocalShare(0.5))
		defer d.close()
		d.wires[0].setFate(steady(time.Millisecond))
		for range 100 {
			d.spend(0, 1)
			time.Sleep(time.Millisecond)
		}
		d.wires[0].setFate(func(hb bool, _ []tier.Ask) fate {
			return fate{lose: !hb, there: 100 * time.Microsecond, back: 100 * time.Microsecond}
		})
		time.Sleep(3 * time.Second)
		d.wires[0].setFate(nil)
		time.Sleep(10 * time.Minute)
		if s := d.hs[0].Stats(); s.Keys != 0 || s.Leased != 0 {
			t.Errorf("%+v, want no key after 10 minutes", s)
		}
	})
}

// A broken is a wire on which Redis answers each exchange with an error of which nobody knows what the script did before it.
type broken struct{ *wire }

type scriptError string

func (e scriptError) Error() string { return string(e) }
func (scriptError) RedisError()     {}

func (broken) Exchange(context.Context, tier.Algorithm, int64, tier.Darkness, []tier.Ask) (remote.Reply, error) {
	time.Sleep(200 * time.Microsecond)
	return remote.Reply{}, scriptError("ERR user_script:1: something is wrong")
}

// What is to be charged is not sent again at once where Redis answers with errors, at the pace of the answers for ever.
func TestAChargeIsNotSentInABusyLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := broken{&wire{w: newWorld(model.Variant{}, time.Hour, 0)}}
		h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync)})
		if err != nil {
			t.Fatal(err)
		}
		h.begin(x)
		l, err := h.Limiter("l", TokenBucket(1000, time.Second), WithColdStart(ColdAdmit(3)))
		if err != nil {
			t.Fatal(err)
		}
		until(t, "online", func() bool { return online(h) })
		if r, err := l.Allow(t.Context(), "k"); err != nil || !r.Allowed {
			t.Fatal(r, err)
		}
		time.Sleep(time.Second)
		if s := h.Stats(); s.Exchanges > 2*int64(time.Second/simSync) {
			t.Errorf("%d exchanges within a second, for one charge: %+v", s.Exchanges, s)
		}
		closeAll(t, h)
		x.w.air.Wait()
	})
}

// A refund that is given up while it is on its way is credited before Refund returns: one credited later would be in the next window.
func TestARefundOnItsWayIsWaitedFor(t *testing.T) {
	for _, limit := range []Limit{FixedWindow(100, time.Second), TokenBucket(2000, time.Second).WithBurst(100)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0), WithRemoteTimeout(50*time.Millisecond))
				for at := time.Duration(0); at < 994*time.Millisecond || at > 996*time.Millisecond; at = time.Duration(d.w.nowNS()) % time.Second {
					time.Sleep(100 * time.Microsecond)
				}
				if n := d.spendN(0, 1, 50); n != 1 {
					t.Fatal("not full")
				}
				d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{there: 30 * time.Millisecond} })
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				a := envelope.Admission{Called: d.w.nowNS(), Cost: -50, Key: 1}
				_ = d.ls[0].Refund(ctx, "k", 50) // it is given up, or it is credited
				a.Returned = d.w.nowNS()
				_ = d.mem.Record(a)
				time.Sleep(24 * time.Millisecond)
				if n := d.spendN(1, 2, 50); n == 0 {
					t.Error("nothing is left")
				}
				time.Sleep(10 * time.Millisecond)
				d.spend(1, 60)
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// A place in a leaky bucket's queue that the caller's time does not allow for is given up at once, also where Redis has stopped answering.
func TestAWaitThatIsTooLongEndsSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, LeakyBucket(1, time.Second).WithBurst(100), model.Variant{}, WithLocalShare(0))
		if n := d.spend(0, 50); n != 50 {
			t.Fatalf("%d of 50 admitted", n)
		}
		exchanges := 0
		d.wires[0].setFate(func(heartbeat bool, _ []tier.Ask) fate {
			if !heartbeat {
				exchanges++
			}
			return fate{lose: exchanges > 1, there: 100 * time.Microsecond, back: 100 * time.Microsecond}
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		err := d.ls[0].Wait(ctx, "k")
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 2*simTimeout+5*time.Millisecond || exchanges < 2 {
			t.Errorf("after %v and %d exchanges: %v", took, exchanges, err)
		}
		d.wires[0].setFate(nil)
		d.close()
	})
}

// A flight that takes a refund along answers whoever gave it, also where more costs wait than fit into it.
func TestARefundBehindManyCosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(1000, time.Second), model.Variant{}, WithLocalShare(0), WithRemoteTimeout(50*time.Millisecond))
		for at := time.Duration(0); at < 950*time.Millisecond || at > 952*time.Millisecond; at = time.Duration(d.w.nowNS()) % time.Second {
			time.Sleep(100 * time.Microsecond)
		}
		if n := d.spendN(0, 1, 400); n != 1 {
			t.Fatal("not full")
		}
		d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{there: 30 * time.Millisecond} })
		time.Sleep(8 * time.Millisecond)
		var wg sync.WaitGroup
		call := func(n int64) {
			wg.Go(func() {
				a := envelope.Admission{Called: d.w.nowNS(), Cost: n, Key: 1}
				if r, err := d.ls[0].AllowN(t.Context(), "k", n); err == nil && r.Allowed {
					a.Returned = d.w.nowNS()
					_ = d.mem.Record(a)
				}
			})
		}
		call(1) // on its way, 960 to 990
		time.Sleep(time.Millisecond)
		for i := range 70 {
			call(int64(1 + i%2))
			time.Sleep(time.Microsecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 31*time.Millisecond)
		defer cancel()
		a := envelope.Admission{Called: d.w.nowNS(), Cost: -400, Key: 1}
		err := d.ls[0].Refund(ctx, "k", 400)
		a.Returned = d.w.nowNS()
		_ = d.mem.Record(a)
		at := d.w.nowNS()
		time.Sleep(13 * time.Millisecond)
		d.spendN(1, 1, 400)
		time.Sleep(30 * time.Millisecond)
		d.spend(1, 1000)
		wg.Wait()
		for _, e := range d.w.entries() {
			for _, k := range e.asks {
				if k.Refund != 0 && e.at*1000 > at {
					t.Errorf("Refund returned %v; %v later %d was credited", err, time.Duration(e.at*1000-at), k.Refund)
				}
			}
		}
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// A refund does not run once Refund has timed out, however little is known of the clock of a Redis that is far away.
func TestARefundRunsInTimeOrNotAtAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(100, time.Second), model.Variant{}, WithLocalShare(0), WithRemoteTimeout(50*time.Millisecond), WithHeartbeat(time.Second))
		d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{there: 40 * time.Millisecond} })
		time.Sleep(30 * time.Second)
		for at := time.Duration(0); at < 890*time.Millisecond || at > 892*time.Millisecond; at = time.Duration(d.w.nowNS()) % time.Second {
			time.Sleep(100 * time.Microsecond)
		}
		if n := d.spendN(0, 1, 50); n != 1 {
			t.Fatal("not full")
		}
		time.Sleep(10 * time.Millisecond)
		d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{there: 80 * time.Millisecond} })
		a := envelope.Admission{Called: d.w.nowNS(), Cost: -50, Key: 1}
		err := d.ls[0].Refund(t.Context(), "k", 50)
		a.Returned = d.w.nowNS()
		_ = d.mem.Record(a)
		for time.Duration(d.w.nowNS())%time.Second > 900*time.Millisecond {
			time.Sleep(100 * time.Microsecond)
		}
		time.Sleep(time.Millisecond)
		d.spendN(1, 1, 50)
		time.Sleep(40 * time.Millisecond)
		d.spend(1, 110)
		for _, e := range d.w.entries() {
			for _, k := range e.asks {
				if k.Refund != 0 && !e.late && e.at*1000 > a.Returned {
					t.Errorf("Refund returned %v; %v later %d was credited", err, time.Duration(e.at*1000-a.Returned), k.Refund)
				}
			}
		}
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// G6: after a loss of memory Redis is told all keys that are remembered. Callers of other keys do not wait behind them.
func TestCallersComeBeforeWhatIsToldAnew(t *testing.T) {
	const keys, callers = 20_000, 100
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(100, time.Hour), model.Variant{})
		defer d.close()
		d.wires[0].setFate(steady(5 * time.Millisecond))
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				for k := i; k < keys; k += callers {
					if _, err := d.ls[0].Allow(t.Context(), fmt.Sprint(k)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		d.w.mu.Lock()
		d.w.store.Flush()
		ran := len(d.w.log)
		d.w.mu.Unlock()
		for i, end := 0, time.Now().Add(3*simBeat); time.Now().Before(end); i++ {
			if r, err := d.ls[0].Allow(t.Context(), fmt.Sprint("cold", i)); err != nil || !r.Allowed || r.Source != Remote {
				t.Fatalf("the caller of cold key %d: %v %v", i, r, err)
			}
		}
		told := 0
		d.w.mu.Lock()
		for _, l := range d.w.log[ran:] {
			for _, a := range l.asks {
				if !strings.Contains(a.Key, "cold") {
					told++
				}
			}
		}
		d.w.mu.Unlock()
		if told < keys {
			t.Errorf("%d keys were exchanged, want all %d told", told, keys)
		}
	})
}

// A second flight leaves once it would be full, so that Redis does not wait while the answers of the first are taken in; not before.
func TestASecondFlightLeavesFull(t *testing.T) {
	for keys, want := range map[int]int{remote.MaxKeys / 2: 1, remote.MaxKeys * 3 / 2: 1, 4 * remote.MaxKeys: 2} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 1, TokenBucket(1_000_000, time.Minute), model.Variant{}, WithLocalShare(0))
			defer d.close()
			x, notFull := d.wires[0], 0
			x.setFate(func(heartbeat bool, asks []tier.Ask) fate { // called with x.mu held
				if !heartbeat && x.out > 0 && len(asks) < remote.MaxKeys {
					notFull++
				}
				return steady(100*time.Microsecond)(heartbeat, asks)
			})
			_, _ = d.ls[0].Allow(t.Context(), "k") // the first flight of all tells how far away Redis is
			var wg sync.WaitGroup
			for i := range keys {
				wg.Go(func() {
					for range 10 {
						if r, err := d.ls[0].Allow(t.Context(), fmt.Sprint(i)); err != nil || r.Source != Remote {
							t.Errorf("key %d: %v, %v", i, r, err)
						}
					}
				})
			}
			wg.Wait()
			if x.most > 2 || want == 2 && x.most != 2 {
				t.Errorf("%d callers: %d calls at once, want %d", keys, x.most, want)
			}
			if notFull > 0 {
				t.Errorf("%d callers: %d calls left beside another and were not full", keys, notFull)
			}
		})
	}
}

// Cells that are queued to be reported and then asked for, again and again while more is asked for than there is room for, leave no places behind.
func TestPlacesDoNotPileUp(t *testing.T) {
	const keys = 100
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1000, time.Second), model.Variant{})
		defer d.close()
		dom := d.hs[0].allDomains()[0]
		dom.mu.Lock()
		dom.flights += maxFlights // none leaves but by hand
		dom.mu.Unlock()
		for range 50 {
			for i := range keys {
				c, err := d.ls[0].lockedCell(d.ls[0].hash(fmt.Sprint(i)), fmt.Sprint(i))
				if err != nil {
					t.Fatal(err)
				}
				dom.enqueueLocked(c)
				c.Waiters = []*local.Waiter{{N: 1, Done: make(chan local.Outcome, 1)}}
				dom.enqueueLocked(c)
				c.Waiters = nil
				c.Mu.Unlock()
			}
			dom.mu.Lock()
			var taken []place
			places, counted := 0, dom.queued
			for _, q := range dom.ready {
				places += len(q.waited) + len(q.rest)
				taken = q.take(min(keys, q.len()))
				dom.queued -= len(taken)
			}
			dom.mu.Unlock()
			if places > 2*keys || counted != keys || len(taken) != keys {
				t.Errorf("%d places for %d keys, %d are counted, %d were taken", places, keys, counted, len(taken))
			}
			for _, p := range taken {
				p.c.Mu.Lock()
				if !p.leaveLocked() {
					t.Error("a place that is nobody's")
				}
				p.c.Mu.Unlock()
			}
		}
		dom.mu.Lock()
		dom.flights -= maxFlights
		dom.mu.Unlock()
	})
}

// As many goroutines as there is room for flights wait for the next one; those that a far Redis kept busy leave when it is near again.
func TestPilotsStayAsFewAsThereIsRoomFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(1000, time.Minute), model.Variant{}, WithLocalShare(0))
		dom := d.hs[0].allDomains()[0]
		idle := func() (n, room int) {
			dom.mu.Lock()
			defer dom.mu.Unlock()
			return dom.idle, dom.roomLocked()
		}
		far := func() {
			var wg sync.WaitGroup
			for i := range 20 * maxFlights {
				wg.Go(func() {
					time.Sleep(time.Duration(i) * 100 * time.Microsecond)
					_, _ = d.ls[0].Allow(t.Context(), fmt.Sprint(i))
				})
			}
			wg.Wait()
		}
		d.wires[0].setFate(steady(10 * time.Millisecond))
		dom.mu.Lock()
		dom.rttBest = float64(10 * time.Millisecond) // it was never nearer
		dom.mu.Unlock()
		far()
		synctest.Wait()
		if n, room := idle(); n < maxFlights/2 || n > room {
			t.Errorf("Redis is 10 ms away: %d wait, room for %d flights", n, room)
		}
		d.wires[0].setFate(steady(100 * time.Microsecond))
		for i := range 4 * maxFlights {
			_, _ = d.ls[0].Allow(t.Context(), fmt.Sprint(i))
		}
		synctest.Wait()
		if n, room := idle(); n != 1 || room != 1 {
			t.Errorf("Redis is near: %d wait, room for %d flights, want 1 and 1", n, room)
		}
		d.close() // the bubble ends when none is left
	})
}

// A refund is not credited after Refund has returned, as slow as the clock of Redis may be.
func TestARefundsFenceAllowsForDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const window, timeout = 20 * time.Second, 5 * time.Second
		w := newWorld(model.Variant{}, time.Hour, -900) // Redis's clock is slow: 4.5 ms in 5 s
		d := &directed{t: t, w: w}
		for i := range 2 {
			x := &wire{w: w}
			h, l := join(t, x, FixedWindow(100, window), ms(i*700), WithHeartbeat(timeout), WithRemoteTimeout(timeout), WithSyncInterval(simSync), WithLocalShare(0))
			d.hs, d.ls, d.wires = append(d.hs, h), append(d.ls, l), append(d.wires, x)
		}
		for _, h := range d.hs {
			until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == 2 })
		}
		toEnd := func(left time.Duration) { // of the window, on Redis's clock
			for window-time.Duration(w.nowNS())%window > left {
				time.Sleep(100 * time.Microsecond)
			}
		}
		time.Sleep(window)
		toEnd(window - time.Second)
		if n := d.spendN(0, 1, 50); n != 1 {
			t.Fatal("50")
		}
		toEnd(4998 * time.Millisecond)
		_, _ = d.ls[0].Peek(t.Context(), "k") // what is known of Redis's clock is fresh
		toEnd(4996700 * time.Microsecond)
		d.wires[0].setFate(func(b bool, _ []tier.Ask) fate {
			if b {
				return fate{there: 100 * time.Microsecond}
			}
			return fate{there: timeout + 3*time.Millisecond} // it arrives 3 ms after Refund has returned
		})
		a := envelope.Admission{Called: w.nowNS(), Cost: -50, Key: 1}
		err := d.ls[0].Refund(t.Context(), "k", 50)
		a.Returned = w.nowNS()
		_ = d.mem.Record(a)
		for time.Duration(w.nowNS())%window > window/2 {
			time.Sleep(50 * time.Microsecond)
		}
		d.spendN(1, 1, 50)
		time.Sleep(100 * time.Millisecond)
		d.spend(1, 150)
		for _, e := range d.w.entries() {
			for _, k := range e.asks {
				if k.Refund != 0 && !e.late && e.at*1000 > a.Returned {
					t.Errorf("Refund returned %v; %v later %d was credited", err, time.Duration(e.at*1000-a.Returned), k.Refund)
				}
			}
		}
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// A cell that gets another place in the queue, since somebody begins to wait for it, leaves none behind.
func TestPlacesLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(1000, time.Hour), model.Variant{}, WithLocalShare(0))
		defer d.close()
		dom := d.hs[0].allDomains()[0]
		d.wires[0].setFate(steady(4 * time.Millisecond))
		d.spend(0, 1)
		dom.mu.Lock()
		dom.rttBest = float64(100 * time.Microsecond) // room for one flight
		dom.mu.Unlock()
		settle := func(key string) *local.Cell {
			c, err := d.ls[0].lockedCell(d.ls[0].hash(key), key)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Mu.Unlock()
			dom.enqueueLocked(c)
			return c
		}
		settle("in the air")
		time.Sleep(time.Millisecond)
		exchanges := d.hs[0].Stats().Exchanges
		dom.mu.Lock()
		dom.flights += maxFlights // none leaves before all are queued
		dom.mu.Unlock()
		var wg sync.WaitGroup
		for i := range remote.MaxKeys + 1 {
			key := fmt.Sprint(i)
			settle(key)
			wg.Go(func() {
				if r, err := d.ls[0].Allow(t.Context(), key); err != nil || r.Source != Remote {
					t.Errorf("%v, %v", r, err)
				}
			})
		}
		synctest.Wait()
		dom.mu.Lock()
		dom.flights -= maxFlights
		dom.mu.Unlock()
		dom.wakeUp()
		wg.Wait()
		time.Sleep(20 * time.Millisecond)
		dom.mu.Lock()
		queued, flights := dom.queued, dom.flights
		dom.mu.Unlock()
		if queued != 0 || flights != 0 {
			t.Errorf("%d places are queued, %d flights are on their way", queued, flights)
		}
		if n := d.hs[0].Stats().Exchanges - exchanges; n > 3 {
			t.Errorf("%d calls for %d keys", n, remote.MaxKeys+1)
		}
		now := d.w.nowNS() / 1000
		if at := dom.serverClock().at(d.hs[0].now()); at.Lo > now || at.Hi < now || at.Hi-at.Lo > 20_000 {
			t.Errorf("Redis's clock is taken to be %v, it is %d", at, now)
		}
	})
}

// A noPerm is a wire to a Redis that refuses exchanges while heartbeats pass.
type noPerm struct {
	*wire
	on    atomic.Bool
	calls atomic.Int64
}

func (x *noPerm) ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(remote.Reply, error)) {
	if x.on.Load() {
		x.calls.Add(1)
		time.Sleep(200 * time.Microsecond)
		then(remote.Reply{}, scriptError("NOPERM this user has no permissions to run the 'evalsha' command"))
		return
	}
	x.wire.ExchangeThen(ctx, alg, fence, dark, asks, then)
}

// An evicted cell whose lease is over is not sent for ever where Redis refuses exchanges.
func TestDeadCellsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := &noPerm{wire: &wire{w: newWorld(model.Variant{}, time.Hour, 0)}}
		h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithMaxKeys(4), WithShards(1), WithLocalShare(0.5)})
		if err != nil {
			t.Fatal(err)
		}
		h.begin(x)
		l, err := h.Limiter("l", TokenBucket(1000, time.Second))
		if err != nil {
			t.Fatal(err)
		}
		until(t, "online", func() bool { return online(h) })
		for range 100 {
			_, _ = l.Allow(t.Context(), "k")
			time.Sleep(time.Millisecond)
		}
		x.on.Store(true)
		for _, k := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"} {
			_, _ = l.Allow(t.Context(), k)
		}
		if c := h.table.Find(l.hash("k"), l.id, "k"); c != nil {
			t.Fatal("not evicted")
		}
		time.Sleep(time.Minute)
		before := x.calls.Load()
		time.Sleep(time.Minute)
		if n := x.calls.Load() - before; n > 0 {
			t.Errorf("%d exchanges within a minute, of keys that nobody asks for, whose leases of a second have long ended; %+v", n, h.Stats())
		}
		closeAll(t, h)
		x.w.air.Wait()
	})
}
