package tierlimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
)

// Everything at once and at random: servers that refuse, swallow, answer late or not at all, outages of all or one, flaps, ForceLocal,
// instances that come and go, keys that push each other out of the cache, limits that change, refunds.
func TestStorm(t *testing.T) {
	seeds := uint64(25)
	switch {
	case os.Getenv("TIERLIMIT_LONG") != "":
		seeds = 1000
	case raceEnabled:
		seeds = 8
	}
	t.Logf("%d seeds; TIERLIMIT_LONG=1 makes it 1000", seeds)
	for _, limit := range five(40, time.Second) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			for seed := range seeds {
				synctest.Test(t, func(t *testing.T) {
					if v := newStorm(t, seed, limit).play(); v.Overshoot > 0 {
						t.Errorf("seed %d: %v", seed, v)
					}
				})
			}
		})
	}
}

// A storm is one run, all of which follows from its seed.
type storm struct {
	t       *testing.T
	seed    uint64
	limit   Limit
	w       *world
	opts    []Option
	refunds bool
	keys    int
	end     time.Time
	dark    [2]time.Time // all of Redis is out of reach
	mem     envelope.Memory
	wg      sync.WaitGroup
	mu      sync.Mutex
	hs      []*Hybrid
	ls      []*Limiter
	wires   []*wire
}

func newStorm(t *testing.T, seed uint64, limit Limit) *storm {
	s := &storm{t: t, seed: seed, limit: limit}
	r := s.rand(0)
	s.limit.Period = time.Duration(1+r.IntN(4)) * time.Second
	if limit.Algorithm == AlgorithmSlidingWindow {
		s.limit.SubWindows = 1 + r.IntN(2)
	}
	s.w = newWorld(model.Variant{}, time.Hour, int64(r.IntN(1800)-900))
	s.refunds = r.IntN(3) == 0
	s.keys = 1 + r.IntN(3)
	s.opts = []Option{
		WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithBreaker(quick), WithShards(1),
		WithLocalShare(oneOf(r, 0, 0.2, 1)), WithLeaseTTL(ms(20 + r.IntN(200))), WithMaxKeys(1 + r.IntN(8)),
	}
	for i := range 2 + r.IntN(3) {
		x := &wire{w: s.w}
		h, l := join(t, x, s.limit, ms(i*700), s.opts...)
		s.hs, s.ls, s.wires = append(s.hs, h), append(s.ls, l), append(s.wires, x)
	}
	for _, h := range s.hs {
		until(t, "the fleet is one", func() bool { v := h.Stats(); return v.State == StateOnline && v.Instances == len(s.hs) })
	}
	s.end = time.Now().Add(time.Duration(10+r.IntN(15)) * time.Second)
	if r.IntN(2) == 0 {
		s.dark[0] = time.Now().Add(ms(r.IntN(3000)))
		s.dark[1] = s.dark[0].Add(ms(2000 + r.IntN(6000)))
	}
	return s
}

func (s *storm) rand(stream uint64) *rand.Rand {
	return rand.New(rand.NewPCG(s.seed, uint64(s.limit.Algorithm)<<32|stream))
}

func oneOf[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

func (s *storm) play() envelope.Verdict {
	changes := s.rand(1).IntN(3) == 0
	for i := range s.hs {
		part := func(kind uint64) *rand.Rand { return s.rand(uint64(i+1)<<16 | kind) }
		s.network(i, part(1))
		if r := part(2); r.IntN(4) == 0 {
			s.often(func() { s.force(i, r) })
		}
		if r := part(3); r.IntN(2) == 0 {
			s.often(func() { s.replace(i, r) })
		}
		if r := part(4); changes {
			s.often(func() { s.change(i, r) })
		}
		for c := range 2 {
			r := part(5 + uint64(c))
			s.often(func() { s.load(i, r) })
		}
	}
	s.wg.Wait()
	closeAll(s.t, s.hs...)
	s.w.air.Wait()
	return envelope.Check(envelopeOf(s.limit), s.mem.History())
}

// often repeats f until the end.
func (s *storm) often(f func()) {
	s.wg.Go(func() {
		for time.Now().Before(s.end) {
			f()
		}
	})
}

func (s *storm) at(i int) (*Hybrid, *Limiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hs[i], s.ls[i]
}

// network lets what instance i sends fare well and badly by turns.
func (s *storm) network(i int, r *rand.Rand) {
	var mu sync.Mutex
	var how fate
	onlyExchanges, slow := false, false
	faulty := oneOf(r, 0, 0, 30, 8)
	calls := s.rand(uint64(i+1)<<16 | 99)
	s.wires[i].setFate(func(heartbeat bool, _ []tier.Ask) fate {
		mu.Lock()
		defer mu.Unlock()
		f := how
		f.refuse = f.refuse && !(onlyExchanges && heartbeat)
		f.there, f.back = time.Duration(50+calls.IntN(300))*time.Microsecond, time.Duration(50+calls.IntN(300))*time.Microsecond
		if slow {
			f.there = ms(calls.IntN(60))
		}
		if now := time.Now(); now.After(s.dark[0]) && now.Before(s.dark[1]) {
			f.refuse, f.lose = i%2 == 0, i%2 == 1
		}
		if faulty > 0 && calls.IntN(faulty) == 0 {
			switch calls.IntN(4) {
			case 0:
				f.lose = true
			case 1:
				f.loseReply = true
			case 2:
				f.refuse = true
			case 3:
				f.there += ms(calls.IntN(100))
			}
		}
		return f
	})
	set := func(f fate, only, late bool) {
		mu.Lock()
		defer mu.Unlock()
		how, onlyExchanges, slow = f, only, late
	}
	s.wg.Go(func() {
		for time.Now().Before(s.end) {
			time.Sleep(ms(oneOf(r, 30, 300, 1500, 4000) + r.IntN(200)))
			set(oneOf(r, fate{refuse: true}, fate{refuse: true}, fate{lose: true}, fate{lose: true}, fate{loseReply: true}, fate{}), r.IntN(4) == 0, r.IntN(6) == 0)
			time.Sleep(ms(oneOf(r, 10, 60, 400, 1200, 5000) + r.IntN(100)))
			set(fate{}, false, false)
		}
	})
}

func (s *storm) force(i int, r *rand.Rand) {
	time.Sleep(ms(500 + r.IntN(4000)))
	h, _ := s.at(i)
	h.ForceLocal(true)
	time.Sleep(ms(oneOf(r, 1, 20, 150, 600, 2000)))
	h.ForceLocal(false)
}

// replace closes an instance, in time or not, and starts another.
func (s *storm) replace(i int, r *rand.Rand) {
	time.Sleep(ms(300 + r.IntN(6000)))
	h, _ := s.at(i)
	ctx, cancel := context.WithTimeout(context.Background(), ms(r.IntN(200)))
	_ = h.Close(ctx) // it may not be in time
	cancel()
	time.Sleep(ms(oneOf(r, 0, 10, 100, 2000)))
	h, l := join(s.t, s.wires[i], s.limit, ms(r.IntN(5000)), s.opts...)
	for h.Stats().State != StateOnline && time.Now().Before(s.end) {
		time.Sleep(time.Millisecond) // one that never heard from Redis admits by itself: see Bound
	}
	s.mu.Lock()
	s.hs[i], s.ls[i] = h, l
	s.mu.Unlock()
}

func (s *storm) change(i int, r *rand.Rand) {
	time.Sleep(ms(5 + r.IntN(2000)))
	_, l := s.at(i)
	half := s.limit
	half.Rate, half.Burst = half.Rate/2, half.Burst/2
	_ = l.SetLimit(oneOf(r, s.limit, half)) // it may be closed
}

func (s *storm) load(i int, r *rand.Rand) {
	cost := oneOf[int64](r, 1, 1, 1, 7)
	for range oneOf(r, 1, 3, 10, 60) {
		_, l := s.at(i)
		if r.IntN(20) == 0 { // one that pushes others out
			_, _ = l.Allow(context.Background(), fmt.Sprint("passing", r.IntN(1000)))
		}
		k := r.IntN(s.keys)
		key := fmt.Sprint("k", k)
		a := envelope.Admission{Called: s.w.nowNS(), Cost: cost, Key: uint64(k), Instance: int32(i)}
		res, err := l.AllowN(context.Background(), key, cost)
		if err != nil {
			continue // closed
		}
		a.Returned = s.w.nowNS()
		switch took := time.Duration(a.Returned - a.Called); {
		case took > simTimeout+time.Millisecond:
			s.t.Errorf("seed %d: a check took %v: %v", s.seed, took, res)
		case res.Remaining < 0 || res.Remaining > res.Limit || res.Allowed != (res.RetryAfter == 0) || res.Source == 0:
			s.t.Errorf("seed %d: impossible: %+v", s.seed, res)
		case res.Allowed:
			_ = s.mem.Record(a)
			if s.refunds && r.IntN(10) == 0 {
				a.Called, a.Cost = s.w.nowNS(), -cost
				_ = l.Refund(context.Background(), key, cost) // it may be closed
				a.Returned = s.w.nowNS()
				_ = s.mem.Record(a)
			}
		}
	}
	time.Sleep(ms(oneOf(r, 1, 10, 100, 900)))
}
