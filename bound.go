package tierlimit

import (
	"fmt"
	"math"
	"time"

	"github.com/tierlimit/tierlimit/tier"
)

// Bound is what a limiter promises under the options it was made with, in tokens of one key across the whole fleet.
// docs/guarantees.md derives each figure and names the test that would falsify it.
type Bound struct {
	// Overshoot is the most that can be admitted above the limit while Redis keeps its data. It is 0 unless WithColdStart says
	// ColdAdmit(n): then n for each instance, each time the key is cold there. A key is cold at first, and again after it was
	// evicted or forgotten as idle, so that over time this can recur without bound. The greatest int64 under WithShadow, which denies nothing.
	Overshoot int64

	// Outage is the most that can be admitted above the limit while Redis is out of reach and when it comes back.
	Outage int64

	// MemoryLoss is the most that can be admitted above the limit each time Redis loses its memory.
	MemoryLoss int64

	// Stranded is the number of tokens that are typically leased but not spent: what the limit may seem short of.
	Stranded int64

	// Silence is for how long an instance that is cut off spends nothing but the leases it has in hand, until its outage share
	// begins: counted from its last sign of life, the last moment at which Redis can have executed a heartbeat of it. With
	// fixed and sliding windows it is the most that this can take: a share begins with a window. 0 under FallbackShareNow,
	// which does not wait, and FallbackOpen and FallbackClosed, which have no share; also without a limit or without Redis. An
	// instance that has never heard from Redis does not wait either.
	Silence time.Duration

	// Leased says whether the limit is large enough to be leased at all; else every check is decided in Redis.
	Leased bool
}

// String lists the bound on one line.
func (b Bound) String() string {
	return fmt.Sprintf("overshoot %d, outage %d, memory loss %d, stranded %d, silence %v, leased %t",
		b.Overshoot, b.Outage, b.MemoryLoss, b.Stranded, b.Silence, b.Leased)
}

// Bound is what the limiter promises under its options, for the fleet as it stands. An instance that could not
// reach Redis since its start and was not told the size of the fleet (WithInstances) counts itself alone: nothing bounds what
// several of them admit, and Outage is the greatest int64 while that is so.
func (l *Limiter) Bound() Bound {
	p := l.policy.Load()
	b := Bound{Leased: p.leased && l.h.client != nil}
	if l.cfg.shadow {
		b.Overshoot = math.MaxInt64
	}
	if p.unlimited || l.h.client == nil {
		return b
	}
	n := max(1, int64(l.h.cfg.instances))
	heard := true
	for _, d := range l.h.allDomains() {
		state, view := d.state(l.h.now())
		n = max(n, int64(view.N))
		heard = heard && (state != StateShare || view.N > 0)
	}
	if !l.cfg.shadow {
		b.Overshoot = mulSat(int64(l.cfg.coldStart), n) // each time the key is cold on all of them
	}
	silence := l.silenceBefore(p)
	switch p.tier.Algorithm {
	case tier.FixedWindow:
		silence += p.tier.Period
	case tier.SlidingWindow:
		silence += time.Duration(p.tier.SubWindowUS())*time.Microsecond + p.tier.Period
	}
	switch l.cfg.fallback {
	case FallbackShare:
		b.Silence = silence
		if !heard && l.h.cfg.instances < 1 {
			b.Outage = math.MaxInt64 // each of an unknown number of instances would count itself alone
		}
	case FallbackShareNow:
		// The others, and Redis, count on the whole limit until the silence would have ended.
		b.Outage = int64(min(math.Ceil(p.perNS*float64(silence)), math.MaxInt64/2))
		if !p.tier.Algorithm.Bucket() {
			b.Outage = p.capacity
		}
	case FallbackOpen:
		b.Outage = math.MaxInt64
	}
	// In practice it is what living instances hold as leases and what was granted until they noticed. But whoever comes first may
	// not remember the key, and finds it full.
	b.MemoryLoss = p.capacity
	if b.Leased {
		sync := math.Ceil(p.perNS * float64(l.h.cfg.syncInterval))
		b.Stranded = min(p.capacity, int64(min(sync, math.MaxInt64/2))+n, mulSat(p.maxLease, n))
	}
	return b
}

func mulSat(a, b int64) int64 {
	if a != 0 && b > math.MaxInt64/a {
		return math.MaxInt64
	}
	return a * b
}
