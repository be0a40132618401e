package tierlimit

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// intoWindow waits until a window of that length is at least so old, and at most a tenth of it older.
func (d *directed) intoWindow(length, age time.Duration) {
	for {
		if at := time.Duration(d.w.nowNS()) % length; at >= age && at < age+length/10 {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// evictAll evicts the cells of instance i that may go.
func (d *directed) evictAll(i int) {
	synctest.Wait() // Sweep is the loop's: it has to stand still
	d.hs[i].table.Sweep(1000, func(c *local.Cell) local.Fate {
		if d.hs[i].evict(c) {
			return local.Forget
		}
		return local.Keep
	})
}

func (d *directed) membership(i int) membership {
	d.hs[i].only.mu.Lock()
	defer d.hs[i].only.mu.Unlock()
	return d.hs[i].only.m
}

// docs/spec, RETURNS_FORGOTTEN: a member is missing and back within the life of a view that knows of neither. By that view its
// hand-over would stand for that of another member, whose share would no longer be kept aside.
func TestAHandOverThatAViewDoesNotKnowOf(t *testing.T) {
	for _, limit := range []Limit{FixedWindow(30, 2*time.Second), SlidingWindow(30, 2*time.Second).WithSubWindows(2), SlidingLog(30, 2*time.Second)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 3, limit, model.Variant{}, WithLocalShare(0), WithBreaker(quick))
				d.wires[1].setFate(steady(100 * time.Microsecond)) // another rhythm than the others'
				d.wires[0].setFate(cutOff)
				time.Sleep(6 * time.Second)
				d.intoWindow(2*time.Second, 0)
				if n := d.spend(0, 30); n != 10 {
					t.Errorf("the share of three is %d of 30", n)
				}
				d.wires[0].setFate(nil)
				until(t, "it is back", func() bool { return online(d.hs[0]) })
				last := d.membership(2).alive
				until(t, "a beat", func() bool { return d.membership(2).alive > last })
				last = d.membership(2).alive
				d.hs[2].ForceLocal(true)
				time.Sleep(2*simBeat + ms(2)) // just long enough to have been missing
				d.hs[2].ForceLocal(false)
				until(t, "it is back", func() bool { return d.membership(2).alive > last && online(d.hs[2]) })
				if v := d.membership(1).view; v.Darkness.Returned != 1 {
					t.Errorf("its view knows of %d returns, want only the first", v.Darkness.Returned)
				}
				d.spend(2, 1)
				d.spend(1, 40)
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// docs/spec, READY_KEPT: what was made ready to be handed over after one outage, and could not be sent, is not handed over after the
// next, in place of what its share admitted.
func TestAHandOverOfAnotherOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(30, time.Second), model.Variant{}, WithLocalShare(0), WithBreaker(quick))
		d.intoWindow(time.Second, 900*time.Millisecond)
		d.spend(0, 1)
		d.wires[0].setFate(cutOff)
		time.Sleep(500 * time.Millisecond)
		d.spend(0, 1)
		var away atomic.Bool
		d.wires[0].setFate(func(_ bool, asks []tier.Ask) fate {
			if len(asks) > 0 && asks[0].Back {
				away.Store(true)
			}
			return fate{refuse: away.Load()} // the hand-over is refused, and all after it
		})
		until(t, "it is back", func() bool { return online(d.hs[0]) })
		d.spend(0, 1)
		until(t, "it is away again", func() bool { return !online(d.hs[0]) })
		if !away.Load() {
			t.Fatal("there was no hand-over")
		}
		d.wires[1].setFate(cutOff)
		time.Sleep(4 * time.Second) // longer than a darkness is remembered
		d.intoWindow(time.Second, 0)
		if n := d.spend(0, 30); n != 15 {
			t.Errorf("the share of two is %d of 30", n)
		}
		for i := range 2 {
			d.wires[i].setFate(nil)
		}
		for i := range 2 {
			until(t, "it is back", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(3 * simBeat / 2) // both know of both
		d.spend(0, 1)
		d.spend(1, 40)
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// A beat whose outcome is unknown ends the share, though it may not have run: then no return of it will be told apart, and what the share
// admitted so far in the window still counts.
func TestABeatThatDidNotRunForgetsNoShare(t *testing.T) {
	for _, limit := range []Limit{FixedWindow(30, 10*time.Second), SlidingWindow(30, 10*time.Second), SlidingLog(30, 10*time.Second)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0), WithBreaker(quick))
				d.spend(0, 1) // both have the key
				d.spend(1, 1)
				d.cutAll()
				time.Sleep(40 * time.Second)
				d.intoWindow(10*time.Second, 0)
				for i := range 2 {
					if n := d.spend(i, 30); n != 15 {
						t.Errorf("the share of two is %d of 30", n)
					}
				}
				for _, x := range d.wires {
					beats := 0
					x.setFate(func(beat bool, _ []tier.Ask) fate {
						if beat {
							beats++
						}
						return fate{refuse: beats > 2, lose: beats == 2} // a peek is answered, the beat is lost
					})
				}
				time.Sleep(3 * time.Second) // a silence, and some
				for i := range 2 {
					d.spend(i, 1)
				}
				for i, x := range d.wires {
					x.setFate(nil)
					until(t, "it is back", func() bool { return online(d.hs[i]) })
				}
				time.Sleep(3 * simBeat / 2)
				d.spend(0, 40)
				d.spend(1, 40)
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// What was made ready to be handed over, and could not be sent, is not forgotten with its cell: told again, it would be nothing.
func TestAHandOverThatIsEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(30, 10*time.Second), model.Variant{}, WithLocalShare(0), WithBreaker(quick))
		d.cutAll()
		time.Sleep(15 * time.Second)
		d.intoWindow(10*time.Second, 0)
		for i := range 2 {
			if n := d.spend(i, 30); n != 15 {
				t.Errorf("the share of two is %d of 30", n)
			}
		}
		var refused atomic.Bool
		d.wires[0].setFate(func(_ bool, asks []tier.Ask) fate {
			back := len(asks) > 0 && asks[0].Back
			if back {
				refused.Store(true)
			}
			return fate{refuse: back}
		})
		d.wires[1].setFate(nil)
		for i := range 2 {
			until(t, "it is back", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(3 * simBeat / 2)
		d.spend(0, 1)
		if !refused.Load() {
			t.Fatal("there was no hand-over")
		}
		d.evictAll(0)
		d.wires[0].setFate(nil)
		d.spend(0, 40)
		d.spend(1, 40)
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// An idle key whose cell was swept, while the darkness that it was handed over for is still remembered, is not handed over again: it would
// stand for another member's return.
func TestAHandOverIsNotRepeatedAfterASweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 4, FixedWindow(40, time.Second), model.Variant{}, WithLocalShare(0), WithBreaker(quick))
		d.cutAll()
		time.Sleep(5 * time.Second)
		for i := range 3 {
			d.wires[i].setFate(nil)
			until(t, "it is back", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(3 * simBeat / 2)
		for i := range 3 {
			d.spend(i, 1)
		}
		stays := func(length time.Duration) { // the second alone goes on with the key; the darkness lasts: the fourth is cut off
			for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				d.spend(1, 1)
			}
		}
		stays(14 * time.Second)
		if n := d.hs[0].Stats().Keys; n != 0 {
			t.Fatalf("%d keys are not swept", n)
		}
		d.spend(0, 1)
		d.wires[2].setFate(cutOff)
		stays(2 * time.Second)
		d.intoWindow(time.Second, 0)
		for _, i := range []int{2, 3} {
			if n := d.spend(i, 40); n != 10 {
				t.Errorf("the share of four is %d of 40", n)
			}
		}
		d.wires[2].setFate(nil)
		until(t, "it is back", func() bool { return online(d.hs[2]) })
		time.Sleep(3 * simBeat / 2)
		d.spend(1, 40)
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// A key that Redis lost in an outage is told what the share admitted, whichever window the last lease was of.
func TestAShareOfALostKeyIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(30, 10*time.Second), model.Variant{}, WithLocalShare(1), WithBreaker(quick))
		d.intoWindow(10*time.Second, 8*time.Second)
		for range 5 { // a demand that is worth a lease
			d.spend(0, 1)
			d.spend(1, 1)
			time.Sleep(2 * time.Millisecond)
		}
		if d.hs[0].Stats().Leased == 0 {
			t.Error("no lease is in hand")
		}
		d.cutAll()
		d.intoWindow(10*time.Second, 100*time.Millisecond)
		for i := range 2 {
			if n := d.spend(i, 30); n != 15 {
				t.Errorf("the share of two is %d of 30", n)
			}
		}
		d.w.mu.Lock()
		d.w.store = model.New(model.Variant{})
		d.w.mu.Unlock()
		for i, x := range d.wires {
			x.setFate(nil)
			until(t, "it is back", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(3 * simBeat / 2)
		d.spend(0, 40)
		d.spend(1, 40)
		if v := d.verdict(); v.Overshoot > 0 {
			t.Error(v)
		}
	})
}

// An instance whose share of a key was evicted cannot say what it admitted, so it does not hand over: not after Redis was away once more
// either, too short for it to be missing.
func TestAnEvictedShareIsNotHandedOverAfterAFlap(t *testing.T) {
	for _, limit := range []Limit{FixedWindow(30, 10*time.Second), SlidingWindow(30, 10*time.Second), SlidingLog(30, 10*time.Second)} {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDirected(t, 2, limit, model.Variant{}, WithLocalShare(0), WithBreaker(quick))
				d.cutAll()
				time.Sleep(40 * time.Second)
				d.intoWindow(10*time.Second, 0)
				for i := range 2 {
					if n := d.spend(i, 30); n != 15 {
						t.Errorf("the share of two is %d of 30", n)
					}
				}
				d.evictAll(0)
				for i, x := range d.wires {
					x.setFate(nil)
					until(t, "it is back", func() bool { return online(d.hs[i]) })
				}
				time.Sleep(3 * simBeat / 2)
				back := d.membership(0).back
				d.wires[0].setFate(cutOff)
				d.spend(0, 3) // refusals open the breaker
				until(t, "it is away", func() bool { return !online(d.hs[0]) })
				d.wires[0].setFate(nil)
				until(t, "it is back", func() bool { return online(d.hs[0]) })
				if b := d.membership(0).back; b != back || back == 0 {
					t.Fatalf("return %d was followed by %d: it was missing", back, b)
				}
				d.spend(0, 1)
				d.spend(1, 40)
				d.spend(0, 40)
				if v := d.verdict(); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// A cell that is evicted with an old lease reports that and hands nothing over: the key's next cell does.
func TestAnEvictedCellDoesNotHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDirected(t, 2, FixedWindow(30, 10*time.Second), model.Variant{}, WithLocalShare(1), WithBreaker(quick))
		d.intoWindow(10*time.Second, 9*time.Second)
		for range 5 { // a demand that is worth a lease
			d.spend(0, 1)
			d.spend(1, 1)
			time.Sleep(2 * time.Millisecond)
		}
		if d.hs[0].Stats().Leased == 0 {
			t.Fatal("no lease is in hand")
		}
		d.cutAll()
		time.Sleep(time.Second / 2)
		d.intoWindow(10*time.Second, 50*time.Millisecond)
		if n := d.spend(1, 30); n != 15 {
			t.Errorf("the share of two is %d of 30", n)
		}
		for i, x := range d.wires {
			x.setFate(nil)
			until(t, "it is back", func() bool { return online(d.hs[i]) })
		}
		time.Sleep(3 * simBeat / 2)
		d.evictAll(0)
		time.Sleep(20 * time.Millisecond)
		d.spend(0, 40)
		d.spend(1, 40)
		backs := 0
		for _, e := range d.w.entries() {
			for _, a := range e.asks {
				if a.Back {
					backs++
				}
			}
		}
		if v := d.verdict(); v.Overshoot > 0 || backs > 2 {
			t.Errorf("%d hand-overs of two returns: %v", backs, v)
		}
	})
}
