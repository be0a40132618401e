package local_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

func TestCellTakesAllOrNothing(t *testing.T) {
	c := &local.Cell{}
	c.Deposit(10, 1000, 4)
	if c.Deadline() != 1000 || c.Tokens() != 10 {
		t.Fatalf("%d tokens until %d", c.Tokens(), c.Deadline())
	}
	for _, tc := range []struct {
		n        int64
		left     int64
		note, ok bool
	}{
		{11, 10, false, false},
		{6, 4, false, true},
		{1, 3, true, true}, // below the mark: the loop is told, once
		{1, 2, false, true},
		{3, 2, false, false},
		{2, 0, false, true},
		{1, 0, false, false},
	} {
		left, ok := c.Take(tc.n)
		note := ok && left < c.Mark() && c.Note()
		if left != tc.left || note != tc.note || ok != tc.ok {
			t.Errorf("Take(%d): %d %t %t, want %+v", tc.n, left, note, ok, tc)
		}
	}
	c.Renote()
	c.Deposit(2, 2000, 4)
	c.Take(1)
	if !c.Note() {
		t.Error("no note after a deposit")
	}
	if c.Take(1); c.Note() {
		t.Error("a note twice")
	}
	if n := c.Clear(); n != 0 {
		t.Errorf("%d cleared from nothing", n)
	}
	c.Deposit(3, 3000, 0)
	if n := c.Clear(); n != 3 || c.Tokens() != 0 {
		t.Errorf("%d cleared, %d left", n, c.Tokens())
	}
}

// P9: goroutines that share a lease spend each token once, be it in one place or in stripes.
func TestCellIsSpentOnce(t *testing.T) {
	for _, striped := range []bool{false, true} {
		t.Run(fmt.Sprintf("striped=%t", striped), func(t *testing.T) {
			c := &local.Cell{}
			if striped {
				c.Crowd()
			}
			const deposits, each = 200, 50
			var spent, notes, back atomic.Int64
			var wg sync.WaitGroup
			stop := make(chan struct{})
			for range 8 {
				wg.Go(func() {
					for {
						left, ok := c.Take(3)
						note := ok && left < c.Mark() && c.Note()
						if ok {
							spent.Add(3)
						}
						if note {
							notes.Add(1)
						}
						if !ok {
							select {
							case <-stop:
								return
							default:
							}
						}
					}
				})
			}
			for i := range deposits {
				c.Mu.Lock()
				c.Base += each
				c.Deposit(each, 1, 10)
				c.Mu.Unlock()
				c.Mu.Lock()
				back.Add(c.Unspend(1))
				if have := c.Tokens(); have < 0 || have > c.Base {
					t.Errorf("%d tokens of %d", have, c.Base)
				}
				if i%10 == 0 {
					c.Gather()
				}
				c.Mu.Unlock()
			}
			close(stop)
			wg.Wait()
			if got := spent.Load() - back.Load() + c.Tokens(); got != deposits*each {
				t.Errorf("%d spent, %d taken back, %d left, of %d", spent.Load(), back.Load(), c.Tokens(), deposits*each)
			}
			if notes.Load() > deposits {
				t.Errorf("%d notes for %d deposits", notes.Load(), deposits)
			}
			c.Mu.Lock()
			defer c.Mu.Unlock()
			left := c.Tokens()
			if n := c.Clear(); n != left || c.Tokens() != 0 {
				t.Errorf("%d cleared of %d, %d left", n, left, c.Tokens())
			}
		})
	}
}

// A token that was cleared is not spent by whoever looked at the deadline after that.
func TestCellClearsBeforeTheDeadlineMoves(t *testing.T) {
	for _, striped := range []bool{false, true} {
		t.Run(fmt.Sprintf("striped=%t", striped), func(t *testing.T) {
			c := &local.Cell{}
			if striped {
				c.Crowd()
			}
			const epochs, each = int64(20_000), int64(20)
			var taken [epochs + 1]atomic.Int64 // or cleared, by the deadline that its taker saw
			var wg sync.WaitGroup
			var stop atomic.Bool
			for range 8 {
				wg.Go(func() {
					for !stop.Load() {
						deadline := c.Deadline()
						if _, ok := c.Take(1); ok {
							taken[deadline].Add(1)
						} else {
							runtime.Gosched()
						}
					}
				})
			}
			for e := range epochs {
				c.Mu.Lock()
				taken[e].Add(c.Clear())
				c.Deposit(each, e+1, 0)
				c.Mu.Unlock()
				if e%2 == 0 {
					runtime.Gosched()
				}
			}
			stop.Store(true)
			wg.Wait()
			taken[epochs].Add(c.Tokens())
			// Whoever saw a deadline may spend a token that came later, never one from before.
			sum := int64(0)
			for e := epochs; e >= 0; e-- {
				given := min(epochs, epochs-e+1) * each
				if sum += taken[e].Load(); sum > given {
					t.Fatalf("%d tokens spent or cleared under deadlines from %d on, %d were given", sum, e, given)
				}
			}
			if sum != epochs*each {
				t.Errorf("%d tokens in all, of %d", sum, epochs*each)
			}
		})
	}
}

// A cell that many take from at once gets stripes by itself; one that tells when its tokens were spent does not.
func TestCellGetsStripes(t *testing.T) {
	if runtime.GOMAXPROCS(0) < 2 {
		t.Log("one processor: nobody is ever in another's way")
		return
	}
	c, log := &local.Cell{}, &local.Cell{Log: local.NewSpendLog(1)}
	c.Deposit(1<<40, 1, 0)
	log.Deposit(1<<40, 1, 0)
	for tries := 0; !c.Striped() && tries < 1000; tries++ {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 100_000 {
					c.Take(1)
					log.Take(1)
				}
			})
		}
		wg.Wait()
	}
	if !c.Striped() || log.Striped() {
		t.Errorf("stripes: %t, of a log %t", c.Striped(), log.Striped())
	}
}

// What is taken back was taken from the lease in hand, never more.
func TestCellUnspend(t *testing.T) {
	c := &local.Cell{}
	if n := c.Unspend(5); n != 0 {
		t.Errorf("%d taken back of nothing", n)
	}
	c.Base = 10
	c.Deposit(10, 1, 0)
	if n := c.Unspend(5); n != 0 {
		t.Errorf("%d taken back of an unspent lease", n)
	}
	c.Take(4)
	for _, want := range []int64{3, 1, 0} {
		if n := c.Unspend(3); n != want {
			t.Errorf("%d taken back, want %d", n, want)
		}
	}
	if c.Tokens() != 10 {
		t.Errorf("%d tokens", c.Tokens())
	}
}

func TestCellKeepsADenial(t *testing.T) {
	c := &local.Cell{}
	if _, ok := c.Denied(0, 1); ok {
		t.Error("a new cell denies")
	}
	c.Deny(3, 100)
	for _, tc := range []struct {
		now, n int64
		ok     bool
	}{
		{50, 3, true}, {50, 4, true}, {50, 2, false}, {99, 3, true}, {100, 3, false}, {101, 9, false}, {-5, 3, true},
	} {
		if until, ok := c.Denied(tc.now, tc.n); ok != tc.ok || ok && until != 100 {
			t.Errorf("%+v: %t until %d", tc, ok, until)
		}
	}
	if c.DeniedUntil() != 100 || c.DeniedCost() != 3 {
		t.Errorf("until %d, from %d", c.DeniedUntil(), c.DeniedCost())
	}
	if n := c.DeniedDemand(); n != 3+4+3+3 {
		t.Errorf("demand %d", n)
	}
	if n := c.TakeDeniedDemand(); n != 13 || c.DeniedDemand() != 0 {
		t.Errorf("demand %d, then %d", n, c.DeniedDemand())
	}
	c.Allow()
	if _, ok := c.Denied(50, 3); ok || c.DeniedUntil() != 0 {
		t.Error("a denial that was dropped")
	}
}

func TestOwn(t *testing.T) {
	var o local.Own
	for i, tc := range []struct {
		at, n     int64
		cur, both int64
	}{
		{10, 3, 3, 3},
		{10, 2, 5, 5},
		{11, 4, 4, 9},   // the next window
		{11, -1, 3, 8},  // what did not happen
		{13, 7, 7, 7},   // one was left out
		{12, 1, 8, 8},   // a late report counts now, which errs to too few
		{1000, 0, 0, 0}, // long after
	} {
		o.Add(tc.at, tc.n)
		at := max(tc.at, 13)
		if tc.at < 12 {
			at = tc.at
		}
		if tc.at == 1000 {
			at = 1000
		}
		if got := o.Sum(at, false); got != tc.cur {
			t.Errorf("%d: %d, want %d", i, got, tc.cur)
		}
		if got := o.Sum(at, true); got != tc.both {
			t.Errorf("%d: %d with the window before, want %d", i, got, tc.both)
		}
	}
}

func TestSpendLog(t *testing.T) {
	const tick = 1_000_000
	s := local.NewSpendLog(tick)
	s.Record(0, 2)
	s.Record(tick/2, 1)
	s.Record(5*tick, 4)
	spends, sum := s.Drain(10*tick, 100, nil)
	if sum != 7 || len(spends) != 2 {
		t.Fatalf("%v, %d", spends, sum)
	}
	for _, sp := range spends {
		// Spent in [tick i, tick i+1): never older than it is, and at most two ticks and the drift younger.
		youngest := map[int64]int64{3: 9 * tick, 4: 4 * tick}[sp.Count]
		if sp.AgeUS*1000 > youngest || sp.AgeUS*1000 < youngest-2*tick-youngest/500 {
			t.Errorf("%+v: age at most %d ns", sp, youngest)
		}
	}
	if spends, sum = s.Drain(10*tick, 100, nil); sum != 0 || len(spends) != 0 {
		t.Errorf("drained twice: %v, %d", spends, sum)
	}
	// No more than asked for; the rest stays.
	s.Record(20*tick, 10)
	if _, sum = s.Drain(21*tick, 4, nil); sum != 4 {
		t.Errorf("%d, want 4", sum)
	}
	if _, sum = s.Drain(21*tick, 0, nil); sum != 0 {
		t.Errorf("%d, want 0", sum)
	}
	if _, sum = s.Drain(21*tick, 100, nil); sum != 6 {
		t.Errorf("%d, want the other 6", sum)
	}
	// A reading later than the drain is not a great age.
	s.Record(31*tick, 1)
	if spends, _ = s.Drain(30*tick, 1, nil); len(spends) != 1 || spends[0].AgeUS != 0 {
		t.Errorf("%v", spends)
	}
}

// Whatever is recorded is drained once, never as older than it is.
func TestSpendLogProperty(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		tick := rapid.Int64Range(0, 1_000_000).Draw(r, "tick")
		s := local.NewSpendLog(tick)
		now := rapid.Int64Range(0, 1e15).Draw(r, "now")
		type record struct{ at, n int64 }
		var open []record
		for range rapid.IntRange(1, 60).Draw(r, "steps") {
			now += rapid.Int64Range(0, 40*max(1, tick)).Draw(r, "step")
			if rapid.Bool().Draw(r, "record") {
				n := rapid.Int64Range(1, 1000).Draw(r, "n")
				s.Record(now, n)
				open = append(open, record{now, n})
				continue
			}
			want := int64(0)
			for _, o := range open {
				want += o.n
			}
			spends, sum := s.Drain(now, want, nil)
			if sum != want {
				r.Fatalf("%d drained of %d", sum, want)
			}
			// Sorted from the oldest: what is said to be at least so old must be.
			slices.SortFunc(spends, func(a, b tier.Spend) int { return int(b.AgeUS - a.AgeUS) })
			said := int64(0)
			for _, sp := range spends {
				said += sp.Count
				old := int64(0)
				for _, o := range open {
					if now-o.at >= sp.AgeUS*1000 {
						old += o.n
					}
				}
				if said > old {
					r.Fatalf("%d are said to be %d µs old, %d are", said, sp.AgeUS, old)
				}
			}
			open = nil
		}
	})
}

func TestSpendLogUnderConcurrency(t *testing.T) {
	s := local.NewSpendLog(10)
	var wg sync.WaitGroup
	const each = 20_000
	for g := range 4 {
		wg.Go(func() {
			for i := range int64(each) {
				s.Record(i+int64(g), 1)
			}
		})
	}
	drained := int64(0)
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		_, n := s.Drain(each, 1<<40, nil)
		drained += n
	}
	if drained != 4*each {
		t.Errorf("%d drained of %d", drained, 4*each)
	}
}

// A caller that was preempted between its reading of the clock and its record must not make others' fresh spends old.
func TestSpendLogKeepsTheNewerLabel(t *testing.T) {
	const tick = 2_000_000
	s := local.NewSpendLog(tick)
	s.Record(100*tick, 50)
	s.Record((100-32)*tick, 1)
	spends, sum := s.Drain(101*tick, 1000, nil)
	if sum != 51 {
		t.Errorf("%d tokens drained, want 51", sum)
	}
	for _, sp := range spends {
		if sp.AgeUS > 2*tick/1000 {
			t.Errorf("%d tokens spent a tick ago are reported as %d µs old", sp.Count, sp.AgeUS)
		}
	}
	// Oldest first, so that what is left over is the newest.
	for i := range int64(10) {
		s.Record((110+i)*tick, 1)
	}
	if spends, sum = s.Drain(130*tick, 3, nil); sum != 3 || spends[0].AgeUS < spends[2].AgeUS || spends[2].AgeUS < 15*tick/1000 {
		t.Errorf("drained %v, want the oldest three", spends)
	}
}
