package tierlimit

import (
	"math"
	"time"

	"github.com/tierlimit/tierlimit/tier"
)

// Bound is what the limiter promises under its options, for the fleet as it stands. An instance that could not
// reach Redis since its start and was not told the size of the fleet (WithInstances) counts itself alone: nothing bounds what
// several of them admit, and Outage is the greatest int64 while that is so.
func (l *Limiter) Bound() Bound {
	p := l.policy.Load()
	b := Bound{Leased: p.leased && l.h.client != nil}
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
	b.Overshoot = mulSat(int64(l.cfg.coldStart), n) // each time the key is cold on all of them
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
