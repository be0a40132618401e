package breaker

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// ErrOpen is returned by Begin while the breaker is open, and while another probe is under way.
var ErrOpen = errors.New("tierlimit: breaker is open")

// Settings configure a Breaker. A zero field means its default; nothing else is corrected silently.
type Settings struct {
	// Failures is the number of failed exchanges in a row that opens the breaker; default 5. Fewer notice an outage sooner (each costs
	// its callers one time-out), more forgive a shakier network.
	Failures uint32
	// Cooldown is the time from opening to the first probe, at least 1 ms; default 500 ms.
	Cooldown time.Duration
	// MaxCooldown bounds the cool-down, which doubles with each failed probe; default Cooldown: no doubling. It is the longest
	// that a Redis which is back goes unnoticed; a client that remembers that its dials were refused (go-redis: 1 s) comes on top.
	MaxCooldown time.Duration
}

const (
	defaultFailures = 5
	defaultCooldown = 500 * time.Millisecond
	minCooldown     = time.Millisecond
)

// Defaults returns s with its zero fields replaced by their defaults.
func (s Settings) Defaults() Settings {
	if s.Failures == 0 {
		s.Failures = defaultFailures
	}
	if s.Cooldown == 0 {
		s.Cooldown = defaultCooldown
	}
	if s.MaxCooldown == 0 {
		s.MaxCooldown = max(s.Cooldown, minCooldown)
	}
	return s
}

// Validate returns every fault of s, joined, or nil.
func (s Settings) Validate() error {
	d := s.Defaults()
	var faults []error
	if d.Cooldown < minCooldown {
		faults = append(faults, fmt.Errorf("breaker: Cooldown %v is shorter than %v", s.Cooldown, minCooldown))
	}
	if d.MaxCooldown < minCooldown {
		faults = append(faults, fmt.Errorf("breaker: MaxCooldown %v is shorter than %v", s.MaxCooldown, minCooldown))
	}
	if d.MaxCooldown < d.Cooldown {
		faults = append(faults, fmt.Errorf("breaker: MaxCooldown %v is shorter than Cooldown %v", d.MaxCooldown, d.Cooldown))
	}
	return errors.Join(faults...)
}

// State is the state of a Breaker.
type State uint8

// The states of a Breaker.
const (
	Closed   State = iota + 1 // Redis is asked
	HalfOpen                  // one probe is asking; nobody else does
	Open                      // Redis is not asked
)

// String returns the state in words.
func (s State) String() string {
	switch s {
	case Closed:
		return "closed"
	case HalfOpen:
		return "half-open"
	case Open:
		return "open"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// A Breaker opens after failures in a row and closes on the first probe that succeeds. Safe for concurrent use.
type Breaker struct {
	set     Settings
	onState func(from, to State)
	circuit *gobreaker.TwoStepCircuitBreaker[struct{}]
	state   atomic.Uint32

	// mu is taken inside gobreaker's lock, never around it.
	mu        sync.Mutex
	cooldown  time.Duration // the next one
	probeAt   time.Time     // while open: not before
	news      []change      // for onState
	reporting bool          // somebody is calling onState
}

type change struct{ from, to State }

// New returns a closed Breaker. onState, which may be nil, is called after each change of state, one call at a time and in order,
// from the goroutine whose call brought the change or one that reports already. No lock is held: it may call the Breaker.
func New(s Settings, onState func(from, to State)) (*Breaker, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	s = s.Defaults()
	b := &Breaker{set: s, onState: onState, cooldown: s.Cooldown}
	b.state.Store(uint32(Closed))
	b.circuit = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: 1,
		// gobreaker has one cool-down for all openings. The doubling one, which is never shorter, is kept here; gobreaker's ends
		// just before the shortest, because it counts from the same instant and wants its own to be strictly over.
		Timeout:       s.Cooldown - 1,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= s.Failures },
		IsSuccessful:  func(err error) bool { return err == nil },
		IsExcluded:    b.excluded,
		OnStateChange: func(_ string, _, to gobreaker.State) { b.changed(to) },
	})
	return b, nil
}

// Ready reports whether the breaker is closed. It costs one atomic load.
func (b *Breaker) Ready() bool { return b.State() == Closed }

// State returns the state now. An open breaker stays open until a probe begins.
func (b *Breaker) State() State { return State(b.state.Load()) }

// ProbeIn returns how long Begin will still refuse: 0 when closed or when a probe may begin or is under way.
func (b *Breaker) ProbeIn() time.Duration {
	if b.State() != Open {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(0, time.Until(b.probeAt))
}

// Begin asks for leave to call Redis: always given while closed, to one caller at a time after the cool-down (the probe), and
// ErrOpen otherwise. Whoever has leave must call done with the outcome, in any case; only the first call of done counts. An
// outcome that arrives after the state has changed is too old to count.
//
// By Classify, done counts OK as a success and Failure as a failure. It ignores Ignored, and Ours while closed: one key's trouble
// must not stop the others. A probe that ends with Ours failed: an answer that cannot be used is no reason to go back.
func (b *Breaker) Begin() (done func(err error), err error) {
	if b.State() == Open && b.ProbeIn() > 0 {
		return nil, ErrOpen
	}
	finish, err := b.circuit.Allow()
	b.report()
	if err != nil {
		return nil, ErrOpen
	}
	var once atomic.Bool
	return func(err error) {
		if once.Swap(true) {
			return
		}
		finish(err)
		b.report()
	}, nil
}

// excluded is called by gobreaker, under its lock, with the outcome of a call of the present state.
func (b *Breaker) excluded(err error) bool {
	switch Classify(err) {
	case Ignored:
		return true
	case Ours:
		return b.State() == Closed
	}
	return false
}

// changed is called by gobreaker, under its lock.
func (b *Breaker) changed(to gobreaker.State) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := Closed
	switch to {
	case gobreaker.StateClosed:
		b.cooldown = b.set.Cooldown
	case gobreaker.StateHalfOpen:
		next = HalfOpen
	case gobreaker.StateOpen:
		next = Open
		b.probeAt = time.Now().Add(b.cooldown)
		if b.cooldown > b.set.MaxCooldown/2 {
			b.cooldown = b.set.MaxCooldown
		} else {
			b.cooldown *= 2
		}
	}
	from := State(b.state.Swap(uint32(next)))
	if b.onState != nil {
		b.news = append(b.news, change{from, next})
	}
}

// report hands out what has changed, unless somebody is at it already: then that one goes on with it.
func (b *Breaker) report() {
	for reporter := false; ; reporter = true {
		b.mu.Lock()
		if b.reporting && !reporter || len(b.news) == 0 {
			if reporter {
				b.reporting = false
			}
			b.mu.Unlock()
			return
		}
		b.reporting = true
		c := b.news[0]
		b.news = b.news[1:]
		b.mu.Unlock()
		b.onState(c.from, c.to)
	}
}
