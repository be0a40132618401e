package tierlimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
)

// B19: what one limit denies the others are not charged for.
func TestAllowAllChargesAllOrNone(t *testing.T) {
	check := func(t *testing.T, h *Hybrid, share float64) {
		for _, limits := range [][2]Limit{
			{FixedWindow(3, time.Hour), FixedWindow(10, time.Hour)}, {TokenBucket(3, time.Hour), SlidingLog(10, time.Hour)},
			{SlidingWindow(3, time.Hour), LeakyBucket(10, time.Hour)}, {SlidingLog(3, time.Hour), TokenBucket(10, time.Hour)},
		} {
			a, err := h.Limiter(fmt.Sprintf("a%d%v", limits[0].Algorithm, share), limits[0])
			if err != nil {
				t.Fatal(err)
			}
			b, err := h.Limiter(fmt.Sprintf("b%d%v", limits[1].Algorithm, share), limits[1])
			if err != nil {
				t.Fatal(err)
			}
			for i := range 5 {
				v, err := h.AllowAll(t.Context(), Check{b, "k", 1}, Check{a, "k", 1})
				if err != nil || v.Allowed != (i < 3) || len(v.Results) != 2 {
					t.Fatalf("%v: call %d: %+v %v", limits, i, v, err)
				}
				if v.Allowed && (v.Denied != -1 || v.RetryAfter != 0 || !v.Results[0].Allowed || !v.Results[1].Allowed) {
					t.Errorf("%v: call %d: %+v", limits, i, v)
				}
				if !v.Allowed && (v.Denied != 1 || v.RetryAfter <= 0 || v.Results[1].Allowed || v.Results[1].RetryAfter != v.RetryAfter || !v.Results[0].Allowed) {
					t.Errorf("%v: call %d: %+v", limits, i, v)
				}
			}
			if err := h.Flush(t.Context()); err != nil {
				t.Error(err)
			}
			for _, x := range []struct {
				l    *Limiter
				want int64
			}{{a, 0}, {b, 7}} {
				if r, err := x.l.Peek(t.Context(), "k"); err != nil || r.Remaining != x.want {
					t.Errorf("%v: %v: %v %v, want %d remaining", limits, x.l.Limit(), r, err, x.want)
				}
			}
		}
	}
	for _, share := range []float64{0, 0.1, 1} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 1, TokenBucket(1, time.Hour), model.Variant{}, WithLocalShare(share))
			defer d.close()
			check(t, d.hs[0], share)
		})
	}
	synctest.Test(t, func(t *testing.T) {
		h, err := NewLocal()
		if err != nil {
			t.Fatal(err)
		}
		check(t, h, 0)
		closeAll(t, h)
	})
}

// The tokens of a fleet: several instances take random sets of keys at once, beside callers of single ones. No key admits more than its limit, nothing
// is lost: what was not admitted is there in the end, to the last token.
func TestAllowAllInAFleet(t *testing.T) {
	for seed := range uint64(12) {
		for _, share := range []float64{0, 0.2} {
			synctest.Test(t, func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, 7))
				d := newDirected(t, 3, TokenBucket(1, time.Hour), model.Variant{}, WithLocalShare(share))
				defer d.close()
				for _, x := range d.wires {
					x.setFate(steady(time.Duration(200+r.IntN(4000)) * time.Microsecond))
				}
				limits := five(40, 10*time.Hour)
				ls := make([][]*Limiter, len(d.hs))
				for i, h := range d.hs {
					for _, limit := range limits {
						l, err := h.Limiter(fmt.Sprintf("l%d", limit.Algorithm), limit)
						if err != nil {
							t.Fatal(err)
						}
						ls[i] = append(ls[i], l)
					}
				}
				var mu sync.Mutex
				admitted := make([]int64, len(limits))
				var wg sync.WaitGroup
				for i := range d.hs {
					for caller := range 4 {
						r := rand.New(rand.NewPCG(seed, uint64(100*i+caller)))
						wg.Go(func() {
							for range 60 {
								var checks []Check
								var of []int
								for k := range limits {
									if r.IntN(3) == 0 {
										checks, of = append(checks, Check{ls[i][k], "k", int64(1 + r.IntN(2))}), append(of, k)
									}
								}
								v, err := d.hs[i].AllowAll(context.Background(), checks...)
								if err != nil {
									t.Error(err)
								}
								mu.Lock()
								for j, k := range of {
									if v.Allowed {
										admitted[k] += checks[j].N
									}
								}
								mu.Unlock()
								if k := r.IntN(3 * len(limits)); k < len(limits) {
									if r, _ := ls[i][k].Allow(context.Background(), "k"); r.Allowed {
										mu.Lock()
										admitted[k]++
										mu.Unlock()
									}
								}
								time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
							}
						})
					}
				}
				wg.Wait()
				for k, limit := range limits { // single ones, in the end: each token that was not admitted is there
					for range 200 {
						for i := range d.hs {
							if r, _ := ls[i][k].Allow(context.Background(), "k"); r.Allowed {
								admitted[k]++
							}
						}
						time.Sleep(25 * time.Millisecond)
					}
					if admitted[k] != 40 {
						t.Errorf("seed %d, local share %v: %v admitted %d of 40", seed, share, limit, admitted[k])
					}
				}
			})
		}
	}
}

// The last tokens are admitted, however many instances use the key.
func TestAllowAllGivesTheLastToken(t *testing.T) {
	for _, share := range []float64{0, 0.5} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirected(t, 4, FixedWindow(7, time.Hour), model.Variant{}, WithLocalShare(share))
			n := 0
			for range 10 {
				for i, h := range d.hs {
					other, err := h.Limiter("other", FixedWindow(1000, time.Hour))
					if err != nil {
						t.Fatal(err)
					}
					a := envelope.Admission{Called: d.w.nowNS(), Cost: 1, Key: 1, Instance: int32(i)}
					v, err := h.AllowAll(t.Context(), Check{d.ls[i], "k", 1}, Check{other, "k", 1})
					if err != nil {
						t.Fatal(err)
					}
					if a.Returned = d.w.nowNS(); v.Allowed {
						n++
						_ = d.mem.Record(a)
					}
					time.Sleep(50 * time.Millisecond)
				}
			}
			if n != 7 {
				t.Errorf("local share %v: %d admitted, want 7", share, n)
			}
			if v := d.verdict(); v.Overshoot > 0 {
				t.Error(v)
			}
		})
	}
}

// All keys are asked for at once: one round trip, whatever their algorithms.
func TestAllowAllTakesOneRoundTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rtt = 10 * time.Millisecond
		d := newDirected(t, 1, TokenBucket(1000, time.Second), model.Variant{})
		defer d.close()
		d.wires[0].setFate(steady(rtt))
		dom := d.hs[0].allDomains()[0]
		dom.mu.Lock()
		dom.rttBest = float64(rtt) // it was never nearer: there is room for a flight for each algorithm
		dom.mu.Unlock()
		var checks []Check
		for _, limit := range five(1000, time.Second) {
			l, err := d.hs[0].Limiter(fmt.Sprintf("l%d", limit.Algorithm), limit)
			if err != nil {
				t.Fatal(err)
			}
			checks = append(checks, Check{l, "a", 1}, Check{l, "b", 2})
		}
		began := time.Now()
		v, err := d.hs[0].AllowAll(t.Context(), checks...)
		if took := time.Since(began); err != nil || !v.Allowed || took != rtt {
			t.Errorf("%+v %v after %v, want %v", v, err, took, rtt)
		}
		for i, r := range v.Results {
			if !r.Allowed || r.Source != Remote || r.Limit != 1000 || r.Remaining < 990 {
				t.Errorf("check %d: %+v", i, r)
			}
		}
		// What is leased is there for the next.
		for range 5 {
			if v, err = d.hs[0].AllowAll(t.Context(), checks...); err != nil || !v.Allowed {
				t.Fatalf("%+v %v", v, err)
			}
			time.Sleep(time.Millisecond)
		}
		began = time.Now()
		v, err = d.hs[0].AllowAll(t.Context(), checks...)
		if took := time.Since(began); err != nil || !v.Allowed || took != 0 || v.Results[0].Source != Local {
			t.Errorf("warm: %+v %v after %v", v, err, took)
		}
	})
}

// In an outage the shares decide, all of them or none.
func TestAllowAllInAnOutage(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}} { // in which they are locked and taken
		synctest.Test(t, func(t *testing.T) { allowAllInAnOutage(t, order) })
	}
}

func allowAllInAnOutage(t *testing.T, order []int) {
	d := newDirected(t, 2, TokenBucket(1, time.Hour), model.Variant{}, WithBreaker(quick), WithLocalShare(0))
	h := d.hs[0]
	ls := make([]*Limiter, 2)
	for _, i := range order {
		n := []int64{20, 200}[i]
		l, err := h.Limiter(fmt.Sprint("l", i), TokenBucket(n, 10*time.Second).WithBurst(n))
		if err != nil {
			t.Fatal(err)
		}
		ls[i] = l
	}
	d.cutAll()
	until(t, "away", func() bool { return !online(h) })
	time.Sleep(time.Minute) // the shares have filled: 10 and 100
	n := 0
	for range 30 {
		began := time.Now()
		v, err := h.AllowAll(t.Context(), Check{ls[1], "k", 2}, Check{ls[0], "k", 1})
		if err != nil || time.Since(began) > 0 {
			t.Fatalf("%+v %v", v, err)
		}
		if v.Allowed {
			n++
			if v.Results[0].Source != Fallback {
				t.Errorf("%+v", v)
			}
		} else if v.Denied != 1 || v.RetryAfter <= 0 {
			t.Errorf("%+v", v)
		}
	}
	if n != 10 {
		t.Errorf("%d admitted, want the share of 10", n)
	}
	if r, err := ls[1].AllowN(t.Context(), "k", 80); err != nil || !r.Allowed {
		t.Errorf("80 of 100 are left: %v %v", r, err)
	}
	if r, err := ls[1].AllowN(t.Context(), "k", 1); err != nil || r.Allowed {
		t.Errorf("100 are spent: %v %v", r, err)
	}
	if s := ls[1].Stats(); s.Fallback != 100 {
		t.Errorf("%+v", s)
	}
	d.close()
}

// Redis that does not answer costs one timeout, and decides nothing.
func TestAllowAllWithAHungRedis(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 1, TokenBucket(10, time.Hour), model.Variant{})
		defer d.close()
		d.wires[0].setFate(func(bool, []tier.Ask) fate { return fate{lose: true} })
		began := time.Now()
		v, err := d.hs[0].AllowAll(t.Context(), Check{d.ls[0], "a", 1}, Check{d.ls[0], "b", 1})
		if took := time.Since(began); err != nil || v.Allowed || took > simTimeout || v.Results[0].Source != Fallback {
			t.Errorf("%+v %v after %v", v, err, took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), simTimeout/4)
		defer cancel()
		began = time.Now()
		_, err = d.hs[0].AllowAll(ctx, Check{d.ls[0], "c", 1}, Check{d.ls[0], "d", 1})
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > simTimeout/4 {
			t.Errorf("%v after %v", err, took)
		}
	})
}

func TestAllowAllArguments(t *testing.T) {
	h, err := NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Limiter("l", FixedWindow(10, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	free, err := h.Limiter("free", Unlimited())
	if err != nil {
		t.Fatal(err)
	}
	shadow, err := h.Limiter("shadow", FixedWindow(1, time.Hour), WithShadow())
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := other.Limiter("l", FixedWindow(10, time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		checks []Check
		want   error
	}{
		"nil":      {[]Check{{l, "k", 1}, {nil, "k", 1}}, ErrConfig},
		"foreign":  {[]Check{{l, "k", 1}, {foreign, "k", 1}}, ErrConfig},
		"negative": {[]Check{{l, "k", 1}, {l, "k", -1}}, ErrCost},
	} {
		if _, err := h.AllowAll(t.Context(), x.checks...); !errors.Is(err, x.want) {
			t.Errorf("%s: %v, want %v", name, err, x.want)
		}
	}
	for name, x := range map[string]struct {
		checks  []Check
		allowed bool
		denied  int
	}{
		"none":                  {nil, true, -1},
		"the same key twice":    {[]Check{{l, "a", 6}, {free, "a", 1}, {l, "a", 4}}, true, -1},
		"the same key too much": {[]Check{{free, "b", 1}, {l, "b", 6}, {l, "b", 5}}, false, 1},
		"beyond all numbers":    {[]Check{{l, "c", math.MaxInt64}, {l, "c", math.MaxInt64}}, false, 0},
		"no limit":              {[]Check{{free, "d", math.MaxInt64}}, true, -1},
		"a look":                {[]Check{{l, "e", 10}, {l, "e", 0}}, true, -1},
		"a shadow":              {[]Check{{shadow, "f", 2}, {l, "f", 10}}, true, -1},
	} {
		v, err := h.AllowAll(t.Context(), x.checks...)
		if err != nil || v.Allowed != x.allowed || v.Denied != x.denied || len(v.Results) != len(x.checks) {
			t.Errorf("%s: %+v %v", name, v, err)
		}
		if name == "the same key too much" && v.RetryAfter != Never {
			t.Errorf("%s: %+v", name, v)
		}
		if name == "a look" && (v.Results[1].Allowed || v.Results[1].Remaining != 0) {
			t.Errorf("%s: %+v", name, v)
		}
		if name == "a shadow" && !v.Results[0].Shadowed {
			t.Errorf("%s: %+v", name, v)
		}
	}
	if r, err := l.AllowN(t.Context(), "b", 10); err != nil || !r.Allowed {
		t.Errorf("a denied check was charged: %v %v", r, err)
	}
	closeAll(t, h, other)
	if _, err := h.AllowAll(t.Context(), Check{l, "k", 1}); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// Callers of one key take tokens without a lock while others take of two: what was taken of the other key in vain is there again.
func TestAllowAllBesideCallersOfOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, cost = 100_000, 40
		d := newDirected(t, 1, FixedWindow(limit, 10*time.Hour), model.Variant{}, WithLocalShare(0.001)) // leases of 100
		defer d.close()
		other, err := d.hs[0].Limiter("other", FixedWindow(limit, 10*time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		var one, both atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 4000 {
					if r, _ := other.Allow(t.Context(), "k"); r.Allowed {
						one.Add(1)
					}
				}
			})
			wg.Go(func() {
				for range 300 {
					v, err := d.hs[0].AllowAll(t.Context(), Check{d.ls[0], "k", 1}, Check{other, "k", cost})
					if err != nil {
						t.Error(err)
					}
					if v.Allowed {
						both.Add(1)
					}
				}
			})
		}
		wg.Wait()
		if err := d.hs[0].Flush(t.Context()); err != nil {
			t.Error(err)
		}
		mine, err1 := d.ls[0].Peek(t.Context(), "k")
		theirs, err2 := other.Peek(t.Context(), "k")
		if err := errors.Join(err1, err2); err != nil || mine.Remaining != limit-both.Load() || theirs.Remaining != limit-one.Load()-cost*both.Load() {
			t.Errorf("%d of both and %d of one were admitted, %d and %d remain: %v", both.Load(), one.Load(), mine.Remaining, theirs.Remaining, err)
		}
	})
}
