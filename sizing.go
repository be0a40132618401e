package tierlimit

import (
	"math"
	"time"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// rateOf is the demand for c in tokens per nanosecond: what was spent, waited for and refused, as an exponential average over a sync
// interval. While demand has lasted for less than that (since c.Busy), it is averaged over as long as it has lasted, a fifth of the
// interval at least: of a key that becomes hot all at once too little would be leased else, and that reported too late. Caller holds c.Mu.
func rateOf(c *local.Cell, demand, now int64, sync time.Duration) float64 {
	dt, over := float64(sync), float64(sync)
	if c.Settled != 0 {
		dt = float64(max(now-c.Settled, int64(time.Microsecond)))
		over = min(over, max(over/5, float64(now-c.Busy)))
	}
	return c.Rate + (float64(demand)/dt-c.Rate)*(1-math.Exp(-dt/over))
}

// horizon is how long a lease is meant to last: as long as WithLeaseTTL while the remaining tokens are plentiful, so that
// moderately busy keys are absorbed too, and down to the sync interval as they run out.
func (f *flight) horizon(p *policy, c *local.Cell, rate float64, now int64) int64 {
	sync := min(int64(f.d.h.cfg.syncInterval), p.horizon)
	fleet := rate * float64(max(1, c.Active))
	if c.Active == 0 || fleet <= 0 {
		return sync
	}
	// Others may be hot where this instance is not: as far as the capacity is gone, it is used up at the limit's own pace.
	remaining := float64(c.Remaining())
	fleet = max(fleet, p.perNS*(1-remaining/float64(p.capacity)))
	h := min(remaining/(2*fleet), float64(p.horizon))
	// A bucket mints nothing for tokens that are out and not reported. That matters where all of it is wanted.
	begun := c.Settled == 0 || now-c.Busy < sync
	if p.tier.Algorithm.Bucket() && p.perNS > 0 && (begun || fleet > p.perNS) {
		least := float64(p.capacity) / p.perNS / 100 // what may be lost until the first report
		h = min(h, least)
		if begun {
			// The rate is still a guess: what is out is reported before the bucket can be full again.
			full := float64(p.capacity-c.Remaining()-c.Out) / p.perNS
			sync = int64(min(float64(sync), max(full, least)))
		}
	}
	return int64(max(float64(sync), h))
}

// want is how many tokens to ask for as a lease: what the demand will use within the horizon and the round trip after it,
// less what is carried, up to the local share.
func (f *flight) want(c *local.Cell, p *policy, rate float64, carry, now int64) int64 {
	if !p.leased {
		return 0
	}
	sync := int64(f.d.h.cfg.syncInterval)
	h := f.horizon(p, c, rate, now)
	if h <= sync && rate*float64(sync) < 1 {
		return 0 // call by call
	}
	m := rate * f.rttWorst
	need := math.Ceil(rate*float64(h)*1.1 + m + 3*math.Sqrt(m))
	return max(0, min(int64(min(need, math.MaxInt32)), p.maxLease)-carry)
}

// pause is how long a key is left alone after a grant shorter than asked. It decides how many calls a saturated key costs:
// without it nearly every check becomes a call, since tokens trickle in one by one.
func (f *flight) pause(p *policy, active int64) int64 {
	if float64(p.capacity) < 50*p.perNS*f.rtt {
		return 0 // so small a bucket has to be asked call by call
	}
	fair := 10 * float64(active) / p.perNS
	return int64(max(2*f.rtt, min(fair, float64(p.pauseCap))))
}

// timeToFull is how long a rate takes to make n tokens, at most as long as a period may be.
func timeToFull(t tier.Limit, n int64) time.Duration {
	if t.Rate <= 0 || n <= 0 {
		return 0
	}
	d := float64(n) / float64(t.Rate) * float64(t.Period)
	if d >= float64(maxPeriod) {
		return maxPeriod
	}
	return time.Duration(math.Ceil(d))
}
