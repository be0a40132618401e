package breaker

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sony/gobreaker/v2"
)

var errTimeout = context.DeadlineExceeded

func begin(t *testing.T, b *Breaker) func(error) {
	t.Helper()
	done, err := b.Begin()
	if err != nil {
		t.Fatalf("Begin in state %v: %v", b.State(), err)
	}
	return done
}

func refused(t *testing.T, b *Breaker) {
	t.Helper()
	if _, err := b.Begin(); !errors.Is(err, ErrOpen) {
		t.Fatalf("Begin in state %v: %v, want ErrOpen", b.State(), err)
	}
}

func fail(t *testing.T, b *Breaker, n int) {
	t.Helper()
	for range n {
		begin(t, b)(errTimeout)
	}
}

func open(t *testing.T, s Settings, onState func(from, to State)) *Breaker {
	t.Helper()
	b, err := New(s, onState)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOpensAfterFailuresInARow(t *testing.T) {
	b := open(t, Settings{}, nil)
	fail(t, b, 4)
	begin(t, b)(nil)
	fail(t, b, 4)
	begin(t, b)(context.Canceled)
	begin(t, b)(errors.New("WRONGTYPE Operation against a key holding the wrong kind of value"))
	if !b.Ready() || b.State() != Closed {
		t.Fatalf("%v before the fifth failure in a row", b.State())
	}
	fail(t, b, 1)
	if b.Ready() || b.State() != Open {
		t.Fatalf("%v after five failures in a row", b.State())
	}
	refused(t, b)
}

// The first probe may begin exactly when the cool-down ends, each failed one doubles it up to the bound, a good one starts over.
func TestCooldownDoubles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, Settings{Failures: 2, Cooldown: 500 * time.Millisecond, MaxCooldown: 3 * time.Second}, nil)
		for range 2 {
			fail(t, b, 2)
			for i, ms := range []time.Duration{500, 1000, 2000, 3000, 3000, 3000} {
				want := ms * time.Millisecond
				if got := b.ProbeIn(); got != want {
					t.Fatalf("probe %d in %v, want %v", i, got, want)
				}
				time.Sleep(want - 1)
				refused(t, b)
				time.Sleep(time.Nanosecond)
				done := begin(t, b)
				if b.State() != HalfOpen || b.Ready() {
					t.Fatalf("%v during the probe", b.State())
				}
				refused(t, b)
				time.Sleep(50 * time.Millisecond)
				refused(t, b)
				done(errTimeout)
				if b.State() != Open {
					t.Fatalf("%v after a failed probe", b.State())
				}
			}
			time.Sleep(3 * time.Second)
			begin(t, b)(nil)
			if !b.Ready() {
				t.Fatalf("%v after a good probe", b.State())
			}
		}
	})
}

func TestCooldownNeverOverflows(t *testing.T) {
	b := open(t, Settings{MaxCooldown: math.MaxInt64}, nil)
	for range 100 {
		before := b.cooldown
		b.changed(gobreaker.StateOpen)
		if b.cooldown < before {
			t.Fatalf("%v after %v", b.cooldown, before)
		}
	}
	if b.cooldown != math.MaxInt64 {
		t.Fatalf("%v after a hundred failed probes", b.cooldown)
	}
}

// A probe that was cancelled proves nothing: the next may begin at once. One that met an unusable answer failed.
func TestProbeOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, Settings{Failures: 1, MaxCooldown: time.Second}, nil)
		fail(t, b, 1)
		time.Sleep(500 * time.Millisecond)
		begin(t, b)(context.Canceled)
		if b.State() != HalfOpen {
			t.Fatalf("%v after a cancelled probe", b.State())
		}
		begin(t, b)(errors.New("ERR tierlimit: argument"))
		if b.State() != Open || b.ProbeIn() != time.Second {
			t.Fatalf("%v, next in %v after an unusable answer", b.State(), b.ProbeIn())
		}
	})
}

func TestLateOutcomesDoNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, Settings{Failures: 1}, nil)
		good, bad := begin(t, b), begin(t, b)
		fail(t, b, 1)
		good(nil)
		if b.State() != Open {
			t.Fatal("an answer to a question of before closed the breaker")
		}
		time.Sleep(500 * time.Millisecond)
		done := begin(t, b)
		bad(errTimeout)
		if b.State() != HalfOpen {
			t.Fatal("a failure of before ended the probe")
		}
		done(nil)
		done(errTimeout) // the second word does not count
		if !b.Ready() {
			t.Fatalf("%v, want closed", b.State())
		}
	})
}

// onState hears every change once and in order, may call the breaker, and is called with no lock held.
func TestOnState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var heard []string
		var b *Breaker
		b = open(t, Settings{Failures: 1}, func(from, to State) {
			heard = append(heard, from.String()+" > "+to.String())
			b.Ready()
			b.ProbeIn()
			if to == Open {
				refused(t, b)
			}
			if to == Closed && len(heard) < 6 {
				fail(t, b, 1) // a change within the notice of a change
			}
		})
		fail(t, b, 1)
		time.Sleep(500 * time.Millisecond)
		begin(t, b)(nil)
		time.Sleep(500 * time.Millisecond)
		begin(t, b)(errTimeout)
		want := "closed > open, open > half-open, half-open > closed, closed > open, open > half-open, half-open > open"
		if got := strings.Join(heard, ", "); got != want {
			t.Fatalf("heard %s\nwant  %s", got, want)
		}
	})
}

func TestOnStateIsInOrderUnderContention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		last, n := Closed, 0 // not atomic: calls are one at a time
		b := open(t, Settings{Failures: 1, Cooldown: time.Millisecond, MaxCooldown: time.Millisecond}, func(from, to State) {
			if from != last {
				t.Errorf("from %v after %v", from, last)
			}
			last = to
			n++
		})
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 200 {
					done, err := b.Begin()
					if err != nil {
						time.Sleep(100 * time.Microsecond)
						continue
					}
					if i%2 == 0 {
						done(errTimeout)
					} else {
						done(nil)
					}
				}
			})
		}
		wg.Wait()
		if n < 2 || last != b.State() {
			t.Fatalf("%d changes, the last to %v, now %v", n, last, b.State())
		}
	})
}

func TestOneProbeAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, Settings{Failures: 1}, nil)
		fail(t, b, 1)
		time.Sleep(time.Second)
		leave := make(chan func(error), 100)
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if done, err := b.Begin(); err == nil {
					leave <- done
				}
			})
		}
		wg.Wait()
		if len(leave) != 1 {
			t.Fatalf("%d probes at once", len(leave))
		}
	})
}

func TestSettings(t *testing.T) {
	if got, want := (Settings{}).Defaults(), (Settings{5, 500 * time.Millisecond, 500 * time.Millisecond}); got != want {
		t.Errorf("defaults %+v, want %+v", got, want)
	}
	for _, c := range []struct {
		s      Settings
		faults int
	}{
		{Settings{}, 0},
		{Settings{Failures: 1, Cooldown: time.Millisecond, MaxCooldown: time.Millisecond}, 0},
		{Settings{Cooldown: time.Minute}, 0},
		{Settings{Cooldown: -1}, 1},
		{Settings{Cooldown: 1}, 1},
		{Settings{MaxCooldown: 100 * time.Millisecond}, 1},
		{Settings{MaxCooldown: -1}, 2},
		{Settings{Cooldown: -1, MaxCooldown: -2}, 3},
	} {
		err := c.s.Validate()
		n := 0
		if err != nil {
			n = len(strings.Split(err.Error(), "\n"))
		}
		if n != c.faults {
			t.Errorf("%+v: %d faults, want %d: %v", c.s, n, c.faults, err)
		}
		if b, newErr := New(c.s, nil); (newErr == nil) != (err == nil) || (b == nil) != (err != nil) {
			t.Errorf("New(%+v) = %v, %v", c.s, b, newErr)
		}
	}
}

func TestReadyAllocatesNothing(t *testing.T) {
	b := open(t, Settings{}, nil)
	if n := testing.AllocsPerRun(100, func() { b.Ready() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkReady(b *testing.B) {
	br, err := New(Settings{}, nil)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		br.Ready()
	}
}
