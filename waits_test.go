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
)

// How long callers are told to wait, and that nobody waits longer than there is a reason for.

// Callers that share an exchange are held one after the other by a leaky bucket, and by no other limit.
func TestOnlyALeakyBucketDelays(t *testing.T) {
	for _, limit := range five(100, time.Hour) {
		if limit.Algorithm == AlgorithmLeakyBucket {
			continue
		}
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}) // all defaults but the times
				defer d.close()
				d.intoWindow(time.Hour, 5*time.Minute)
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						began := time.Now()
						err := d.ls[0].Wait(context.Background(), "k")
						if took := time.Since(began); err != nil || took > time.Second {
							t.Errorf("100 tokens are there, and Wait took %v: %v", took, err)
						}
					})
					wg.Go(func() {
						if r, err := d.ls[0].Allow(context.Background(), "k"); err != nil || !r.Allowed || r.Delay != 0 {
							t.Errorf("%v %v", r, err)
						}
					})
				}
				wg.Wait()
			})
		})
	}
}

// Who waits in a short outage is served when Redis is back, however long the silence would have been.
func TestWaitEndsWithTheOutage(t *testing.T) {
	for _, limit := range five(100, time.Hour) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(0), WithBreaker(quick))
				defer d.close()
				d.intoWindow(time.Hour, 5*time.Minute)
				d.wires[0].setFate(cutOff)
				until(t, "away", func() bool { return !online(d.hs[0]) })
				began := time.Now()
				done, shortly := make(chan error, 1), make(chan error, 1)
				go func() { done <- d.ls[0].Wait(context.Background(), "k") }()
				go func() {
					if limit.Algorithm == AlgorithmLeakyBucket { // a second caller is held, rightly
						shortly <- nil
						return
					}
					ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
					defer cancel()
					shortly <- d.ls[0].Wait(ctx, "k")
				}()
				time.Sleep(10 * time.Millisecond)
				d.wires[0].setFate(nil)
				until(t, "back", func() bool { return online(d.hs[0]) })
				back := time.Since(began)
				if short := <-shortly; short != nil {
					t.Errorf("Wait with five minutes: %v at once", short)
				}
				err := <-done
				if took := time.Since(began); took > back+2*simBeat {
					t.Errorf("Redis was back after %v, all 100 tokens are there, and Wait took %v: %v", back, took, err)
				}
			})
		})
	}
}

// What others give back to an exhausted window is found, also when a poll was lost or an outage came between.
func TestAnExhaustedWindowIsPolled(t *testing.T) {
	for _, limit := range []Limit{FixedWindow(100, time.Hour), SlidingWindow(100, time.Hour), SlidingLog(100, time.Hour)} {
		for _, how := range []string{"none", "lost", "outage"} {
			t.Run(limit.Algorithm.String()+"/"+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0.5), WithBreaker(quick))
					d.intoWindow(time.Hour, 0)
					n := 0
					for range 10 { // a demand that is worth a lease
						n += d.spend(1, 1)
						time.Sleep(5 * time.Millisecond)
					}
					held := d.cell(1).Tokens()
					for range 100 {
						n += d.spend(0, 1)
					}
					for i := range 20 { // the other goes on with its lease, slowly
						if i == 5 {
							switch how {
							case "lost":
								var once atomic.Bool
								d.wires[0].setFate(func(beat bool, _ []tier.Ask) fate {
									return fate{loseReply: !beat && !once.Swap(true), there: 100 * time.Microsecond, back: 100 * time.Microsecond}
								})
							case "outage":
								d.wires[0].setFate(cutOff)
							}
						}
						n += d.spend(1, 1)
						for range 5 {
							time.Sleep(3 * time.Millisecond)
							n += d.spend(0, 1)
						}
					}
					d.wires[0].setFate(nil)
					for range 100 {
						time.Sleep(2 * time.Second)
						n += d.spend(0, 1)
					}
					r, _ := d.ls[0].Peek(t.Context(), "k")
					truth, _ := d.ls[1].Peek(t.Context(), "k")
					if n < 98 {
						t.Errorf("%d of 100 admitted in three minutes, the other held %d: %v; the other sees %v", n, held, r, truth)
					}
					if v := d.verdict(); v.Overshoot > 0 {
						t.Error(v)
					}
				})
			})
		}
	}
}

// Who waits for one token beside a caller that wants many is not told to wait for as long as that one.
func TestASmallCostBesideAGreatOne(t *testing.T) {
	for _, limit := range five(60, time.Minute) {
		if limit.Algorithm == AlgorithmFixedWindow || limit.Algorithm == AlgorithmLeakyBucket {
			continue
		}
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, limit, model.Variant{}, WithLocalShare(0))
				defer d.close()
				d.intoWindow(time.Minute, 0)
				for range 60 { // so that one leaves each second
					d.spend(0, 1)
					time.Sleep(time.Second)
				}
				d.spend(0, 60)
				d.cell(0).Allow()
				d.wires[0].setFate(steady(4 * time.Millisecond))
				go func() { _, _ = d.ls[0].Peek(context.Background(), "k") }()
				time.Sleep(time.Millisecond) // both join the next flight
				var wg sync.WaitGroup
				wg.Go(func() {
					_, _ = d.ls[0].AllowN(context.Background(), "k", 50)
				})
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
					defer cancel()
					if err := d.ls[0].Wait(ctx, "k"); err != nil {
						t.Errorf("one token is there each second, and Wait with 20 s gave up at once: %v", err)
					}
				})
				wg.Wait()
			})
		})
	}
}

// Several costs are denied in one exchange: each is told its own time, also who asks during the pause.
func TestRetryAfterOfSeveralCosts(t *testing.T) {
	for _, cost := range []int64{20, 30} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 1, TokenBucket(100, 10*time.Second), model.Variant{}, WithLocalShare(0.5))
			defer d.close()
			d.spend(0, 1)
			time.Sleep(time.Second)
			for n := int64(64); n > 0; n /= 2 {
				for range 4 {
					d.spendN(0, 1, n)
					time.Sleep(20 * time.Millisecond)
				}
			}
			time.Sleep(200 * time.Millisecond)
			d.cell(0).Allow()
			d.wires[0].setFate(steady(4 * time.Millisecond))
			go func() { _, _ = d.ls[0].AllowN(context.Background(), "k", 99) }()
			time.Sleep(time.Millisecond)
			var wg sync.WaitGroup
			for _, n := range []int64{20, 50} { // both join the next flight
				wg.Go(func() {
					if r, err := d.ls[0].AllowN(t.Context(), "k", n); err != nil || r.Allowed {
						t.Errorf("cost %d: %v %v", n, r, err)
					}
				})
			}
			wg.Wait()
			d.wires[0].setFate(nil)
			r, err := d.ls[0].AllowN(t.Context(), "k", cost)
			if err != nil || r.Allowed {
				t.Fatal(r, err)
			}
			time.Sleep(r.RetryAfter)
			again, err := d.ls[0].AllowN(t.Context(), "k", cost)
			if err != nil || !again.Allowed {
				t.Errorf("cost %d: first %v, and after that wait %v %v", cost, r, again, err)
			}
		})
	}
}

// Times that are too long to be told in nanoseconds are told as long ones.
func TestTimesBeyondNanoseconds(t *testing.T) {
	for _, share := range []float64{0, 0.5} {
		synctest.Test(t, func(t *testing.T) {
			const year = 365 * 24 * time.Hour
			d := newDirected(t, 1, TokenBucket(1, 10*year).WithBurst(1000), model.Variant{}, WithLocalShare(share))
			defer d.close()
			if n := d.spendN(0, 1, 1000); n != 1 {
				t.Error("not full")
			}
			for _, n := range []int64{1000, 500, 1000, 300, 1} {
				r, err := d.ls[0].AllowN(t.Context(), "k", n)
				if err != nil || r.Allowed || r.RetryAfter < year || r.ResetAfter < year {
					t.Errorf("share %v: cost %d: %v %v, reset after %v", share, n, r, err, r.ResetAfter)
				}
			}
			time.Sleep(time.Millisecond)
			c := d.cell(0)
			c.Allow()
			for _, n := range []int64{500, 1000} {
				r, err := d.ls[0].AllowN(t.Context(), "k", n)
				if err != nil || r.Allowed || r.RetryAfter < year || r.ResetAfter < year {
					t.Errorf("share %v: cost %d: %v %v, reset after %v", share, n, r, err, r.ResetAfter)
				}
			}
		})
	}
}

// The place of a token in the queue of a leaky bucket is given back with it.
func TestARefundGivesThePlaceBack(t *testing.T) {
	for _, share := range []float64{0, 0.5} {
		t.Run(fmt.Sprint(share), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, LeakyBucket(100, time.Second).WithBurst(100), model.Variant{}, WithLocalShare(share))
				defer d.close()
				for range 40 { // a demand that is worth a lease
					d.spend(0, 1)
					time.Sleep(8 * time.Millisecond)
				}
				var first, last Result
				for i := range 10 {
					r, err := d.ls[0].Allow(t.Context(), "k")
					if err != nil || !r.Allowed {
						t.Fatal(r, err)
					}
					if i == 0 {
						first = r
					}
					last = r
					if err := d.ls[0].Refund(t.Context(), "k", 1); err != nil {
						t.Fatal(err)
					}
				}
				if last.Delay > first.Delay+10*time.Millisecond {
					t.Errorf("nine checks, each refunded at once: the delay grew from %v to %v (%v)", first.Delay, last.Delay, last.Source)
				}
			})
		})
	}
}

// Waits on a leaky bucket that are given up leave their places to others, also those of a lease.
func TestPlacesOfWhoGaveUpAreGivenBack(t *testing.T) {
	got := map[float64]int64{}
	for _, share := range []float64{0, 0.1, 0.5} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 1, LeakyBucket(100, time.Second).WithBurst(100), model.Variant{}, WithLocalShare(share))
			defer d.close()
			var passed atomic.Int64
			end := time.Now().Add(20 * time.Second)
			var wg sync.WaitGroup
			for i := range 20 {
				wg.Go(func() {
					time.Sleep(time.Duration(i) * 7 * time.Millisecond)
					for time.Now().Before(end) {
						ctx, cancel := context.WithTimeout(context.Background(), 45*time.Millisecond)
						if d.ls[0].Wait(ctx, "k") == nil {
							passed.Add(1)
						}
						cancel()
						time.Sleep(100 * time.Millisecond)
					}
				})
			}
			wg.Wait()
			got[share] = passed.Load()
		})
	}
	// A bucket that is nearly full makes no tokens while some of it are leased and not reported: short queues are what leases cost most.
	if got[0] < 1900 || got[0.5] < got[0]*6/10 || got[0.1] < got[0]*6/10 {
		t.Errorf("passed in 20 s of 100/s, by local share: %v", got)
	}
}

// What one instance gives back another does not deny until the window ends.
func TestARefundEndsDenialsElsewhere(t *testing.T) {
	for _, limit := range five(30, time.Hour) {
		for _, share := range []float64{0, 0.2} {
			t.Run(fmt.Sprintf("%v/%v", limit.Algorithm, share), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(share))
					d.intoWindow(time.Hour, 0)
					n := d.spend(0, 20)
					n += d.spend(1, 20)
					a := envelope.Admission{Called: d.w.nowNS(), Cost: -20, Key: 1}
					if err := d.ls[0].Refund(t.Context(), "k", 20); err != nil {
						t.Error(err)
					}
					a.Returned = d.w.nowNS()
					_ = d.mem.Record(a)
					time.Sleep(5 * time.Second)
					m := d.spend(1, 20)
					truth, _ := d.ls[0].Peek(t.Context(), "k")
					r, _ := d.ls[1].Allow(t.Context(), "k")
					if m < 15 {
						t.Errorf("%d admitted, 20 refunded, then %d admitted: %v; the other sees %v", n, m, r, truth)
					}
					if v := d.verdict(); v.Overshoot > 0 {
						t.Error(v)
					}
				})
			})
		}
	}
}

// A denial on its way while the key is reset does not stand, nor one that the fleet was not told of in time.
func TestResetOvertakesADenial(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("lost=", lost), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, FixedWindow(100, time.Hour), model.Variant{}, WithLocalShare(0))
				d.intoWindow(time.Hour, 0)
				d.spend(0, 100)
				d.spend(1, 1)
				d.cell(1).Allow()
				if lost { // what Reset tells the fleet is lost
					var reset atomic.Bool
					d.wires[0].setFate(func(beat bool, asks []tier.Ask) fate {
						for _, a := range asks {
							if a.Refund != 0 {
								reset.Store(true)
							}
						}
						return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond, lose: beat && reset.Load()}
					})
					d.spend(1, 1)
				} else {
					// its next beat is due in a moment
					last := d.membership(1).alive
					until(t, "a beat", func() bool { return d.membership(1).alive > last })
					time.Sleep(simBeat*3/4 - 6*time.Millisecond)
					d.wires[1].setFate(func(beat bool, _ []tier.Ask) fate {
						if beat {
							return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond}
						}
						return fate{there: 100 * time.Microsecond, back: 15 * time.Millisecond}
					})
					go func() { _, _ = d.ls[1].Allow(t.Context(), "k") }()
					time.Sleep(2 * time.Millisecond)
				}
				if err := d.ls[0].Reset(t.Context(), "k"); err != nil {
					t.Error(err)
				}
				time.Sleep(5 * simBeat)
				d.wires[1].setFate(nil)
				d.wires[0].setFate(nil)
				until(t, "back", func() bool { return online(d.hs[0]) })
				time.Sleep(5 * simBeat)
				r, err := d.ls[1].Allow(t.Context(), "k")
				truth, _ := d.ls[0].Peek(t.Context(), "k")
				if !r.Allowed {
					t.Errorf("five heartbeats after Reset: %v %v; the other sees %v", r, err, truth)
				}
				d.close()
			})
		})
	}
}

// Reset whose exchange is lost says so, whatever exchange of the key follows.
func TestALostResetIsNotTakenForDone(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		t.Run(fmt.Sprint("refuse=", refuse), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 1, FixedWindow(100, time.Hour), model.Variant{}, WithLocalShare(0))
				defer d.close()
				d.spend(0, 100)
				var resets atomic.Int64
				d.wires[0].setFate(func(b bool, asks []tier.Ask) fate {
					for _, a := range asks {
						if a.Refund == tier.RefundAll {
							if n := resets.Add(1); !refuse {
								return fate{lose: true}
							} else if n == 1 {
								return fate{refuse: true}
							}
							return fate{lose: true}
						}
					}
					return fate{there: 100 * time.Microsecond, back: 100 * time.Microsecond}
				})
				stop := make(chan struct{})
				var wg sync.WaitGroup
				for range 4 {
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
				}
				time.Sleep(5 * time.Millisecond)
				wrong := 0
				for range 20 {
					resets.Store(0)
					err := d.ls[0].Reset(t.Context(), "k")
					if err == nil {
						wrong++
					}
					time.Sleep(10 * time.Millisecond)
				}
				close(stop)
				wg.Wait()
				if wrong > 0 {
					r, _ := d.ls[0].Peek(t.Context(), "k")
					t.Errorf("refuse=%t: %d of 20 Resets returned nil, none of which was done: %v", refuse, wrong, r)
				}
			})
		})
	}
}

// A refund of a key that is not exhausted has nothing to tell others, whose denials of other keys stand.
func TestARefundElsewhereEndsNoDenial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(10, 10*time.Hour), model.Variant{}, WithLocalShare(0))
		defer d.close()
		other, err := d.hs[0].Limiter("other", TokenBucket(1000, time.Second))
		if err != nil {
			t.Fatal(err)
		}
		const keys = 50
		asked := func() int {
			d.w.mu.Lock()
			defer d.w.mu.Unlock()
			n := 0
			for _, e := range d.w.log {
				for _, a := range e.asks {
					if !strings.Contains(a.Key, "other") {
						n++
					}
				}
			}
			return n
		}
		use := func() {
			for i := range keys {
				_, _ = d.ls[1].AllowN(t.Context(), fmt.Sprint(i), 6)
			}
		}
		use()
		use() // 4 are left of each
		before := asked()
		for range 60 {
			if r, err := other.Allow(t.Context(), "k"); err != nil || !r.Allowed {
				t.Fatal(r, err)
			}
			if err := other.Refund(t.Context(), "k", 1); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			use()
		}
		if n := asked() - before; n > 0 {
			t.Errorf("%d exchanges of keys whose denials stand", n)
		}
	})
}

// Of two resets at once the one that was lost is not taken for the one that was done.
func TestTwoResets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, FixedWindow(100, time.Hour), model.Variant{}, WithLocalShare(0))
		defer d.close()
		d.spend(0, 100)
		resets := 0
		d.wires[0].setFate(func(_ bool, asks []tier.Ask) fate {
			for _, a := range asks {
				if a.Refund == tier.RefundAll {
					resets++
				}
			}
			return fate{there: 2 * time.Millisecond, back: 2 * time.Millisecond, lose: resets == 2}
		})
		first, second := make(chan error, 1), make(chan error, 1)
		go func() { first <- d.ls[0].Reset(t.Context(), "k") }()
		time.Sleep(time.Millisecond)
		go func() { second <- d.ls[0].Reset(t.Context(), "k") }()
		if err := <-first; err != nil {
			t.Errorf("the one that was done: %v", err)
		}
		if err := <-second; !errors.Is(err, errResetUnknown) {
			t.Errorf("the one that was lost: %v", err)
		}
	})
}

// Redis has refused a small cost beside a great one, in time: it is refused, whatever the fallback is and however long a second look takes.
func TestRefusedIsRefused(t *testing.T) {
	for _, limit := range []Limit{SlidingWindow(60, time.Minute), SlidingLog(60, time.Minute)} {
		for _, policy := range []FallbackPolicy{FallbackOpen, FallbackShare} {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0), WithFallback(policy))
				d.intoWindow(time.Minute, 0)
				if n := d.spend(1, 61); n != 60 {
					t.Fatal(n)
				}
				d.wires[0].setFate(steady(12 * time.Millisecond)) // of a time-out of 20
				for range 10 {
					_, _ = d.ls[0].Peek(t.Context(), "other")
				}
				go func() { _, _ = d.ls[0].Peek(context.Background(), "k") }()
				time.Sleep(11500 * time.Microsecond) // both join the next flight
				var wg sync.WaitGroup
				for _, n := range []int64{50, 1} {
					wg.Go(func() {
						r, err := d.ls[0].AllowN(context.Background(), "k", n)
						if err != nil || r.Allowed || r.Source == Fallback {
							t.Errorf("%v: Redis answers, and has refused a cost of %d: %v %v", limit, n, r, err)
						}
					})
				}
				wg.Wait()
				d.close()
			})
		}
	}
}

// A check that was refused is counted once.
func TestADenialCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(10, time.Hour), model.Variant{}, WithLocalShare(0))
		d.intoWindow(time.Hour, 5*time.Minute)
		d.spend(1, 10)
		for _, k := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"} { // Redis answers quickly so far
			_, _ = d.ls[0].Allow(t.Context(), k)
		}
		d.wires[0].setFate(func(beat bool, _ []tier.Ask) fate {
			if beat {
				return fate{}
			}
			return fate{there: 7 * time.Millisecond, back: 7 * time.Millisecond}
		})
		before := d.ls[0].Stats().Denied
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 1030 * time.Microsecond)
				_, _ = d.ls[0].Allow(t.Context(), "k")
			})
		}
		wg.Wait()
		time.Sleep(time.Second)
		if n := d.ls[0].Stats().Denied - before; n != 10 {
			t.Errorf("10 checks were refused, %d are counted", n)
		}
		d.close()
	})
}
