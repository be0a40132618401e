package tierlimit

import (
	"time"

	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// wall is the clock that windows align to where Redis's is not known: this machine's.
func (h *Hybrid) wall(now int64) local.Time {
	return local.At(h.start.UnixMicro() + now/1000)
}

// shareTime is the clock that an outage share of the algorithm counts on. Buckets and logs only measure how much time has
// passed, on this instance's clock, taken as slow. Windows align to Redis's clock, of which an interval is known.
func shareTime(alg tier.Algorithm, k serverClock, now int64) local.Time {
	if alg == tier.FixedWindow || alg == tier.SlidingWindow {
		return k.at(now)
	}
	return local.At(shrink(now) / 1000)
}

// serverClock is the clock of Redis that outage shares go by.
func (d *domain) serverClock() serverClock {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.m.shareClockLocked()
}

// shareClockLocked is serverClock. Caller holds domain.mu.
func (m *membership) shareClockLocked() serverClock {
	if m.clock.known() {
		return m.clock
	}
	return m.oldClock
}

// shareOf is this instance's part of a limit. The parts of the fleet sum to the limit exactly: fleet size and rank come
// from the membership record, and a member that joined gets nothing until all others have made room for it.
func (l *Limiter) shareOf(d *domain, p *policy) tier.Limit {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, rank := 1, 0
	switch {
	case !d.m.heardLocked(): // neither from Redis nor from another that the keys were with
		n = max(1, l.h.cfg.instances)
		rank = n - 1
	case !d.m.view.Ready:
		rank = -1
	default:
		n, rank = max(d.m.view.N, l.h.cfg.instances), d.m.view.Rank
	}
	t := p.tier
	t.Rate, t.Burst = tier.Share(t.Rate, n, rank), tier.Share(t.Burst, n, rank)
	return t
}

// neverHeard is the number of the outage before Redis was first heard.
const neverHeard = -1

// fallbackLocked decides a check that Redis should decide and cannot. Caller holds c.Mu.
func (l *Limiter) fallbackLocked(d *domain, c *local.Cell, p *policy, n, now int64) Result {
	switch l.cfg.fallback {
	case FallbackOpen:
		l.fallback.Add(n)
		return Result{Allowed: true, Limit: p.capacity, Remaining: clip(c.Remaining()-n, p.capacity), Source: Fallback}
	case FallbackClosed:
		l.denied.Add(n)
		return Result{Limit: p.capacity, RetryAfter: l.h.cfg.heartbeat, Source: Fallback}
	}
	r := l.shareLocked(d, c, p, n, now)
	if r.Allowed {
		l.fallback.Add(n)
	} else {
		l.denied.Add(n)
	}
	return r
}

// shareLocked decides by the outage share. Caller holds c.Mu.
func (l *Limiter) shareLocked(d *domain, c *local.Cell, p *policy, n, now int64) Result {
	d.mu.Lock()
	outage, heard := d.m.outage, d.m.heardLocked()
	away, rejoining := d.m.away != 0, d.m.rejoining
	alive, came := d.m.alive, d.m.came
	var begin int64 // when the share begins
	clock := d.m.shareClockLocked()
	t := shareTime(p.tier.Algorithm, clock, now)
	switch {
	case !heard:
		t = l.h.wall(now)
	case l.cfg.fallback == FallbackShareNow:
		begin = d.m.away
	default:
		begin = alive + int64(l.silenceBefore(p))
	}
	d.mu.Unlock()
	denied := Result{Limit: p.capacity, Source: Fallback, RetryAfter: l.h.cfg.remoteTimeout}
	if !away && (heard || l.h.cfg.instances < 1) {
		return denied // a single exchange failed: Redis still counts on this instance
	}
	if rejoining {
		return denied
	}
	if heard && now < begin {
		denied.RetryAfter = time.Duration(begin - now)
		return denied
	}
	if !heard && l.h.cfg.instances < 1 && !l.h.warned.Swap(true) {
		d.mu.Lock()
		d.laterLocked(func() { // c.Mu is held here, and a log may do anything
			l.h.log.Warn("Redis was never reached and the fleet size is unknown (WithInstances): this instance admits the whole limit",
				zap.String("limiter", l.name))
		})
		d.mu.Unlock()
		d.wakeUp()
	}
	if !heard {
		outage = neverHeard
	}
	share := l.shareOf(d, p)
	if c.Share == nil || c.Outage().ShareAt != outage {
		// An evicted cell's share may have been this key's: then it begins again, empty, when that can no longer count.
		if evicted := l.h.shareEvicted.Load(); evicted > begin {
			begin = evicted
			if p.tier.Algorithm == tier.SlidingLog {
				begin += stretch(int64(p.tier.Period))
			}
		}
		if heard && came != 0 && l.cfg.fallback != FallbackShareNow {
			// It may have come from another server, where nobody kept this instance's share aside, and the others learn of that within a look.
			begin = max(begin, came+stretch(int64(lookEvery))+int64(l.silenceBefore(p)))
		}
		if now < begin {
			denied.RetryAfter = time.Duration(begin - now)
			return denied
		}
		ago := max(0, now-begin) / 1000
		if a := p.tier.Algorithm; a.Bucket() || a == tier.SlidingLog {
			ago = shrink(ago) // taken as slow, as t is
		}
		start, full := t, begin == 0 // never heard, and nothing was evicted
		if !full {
			start = local.Time{Lo: t.Lo - ago, Hi: t.Hi - ago}
		}
		o := c.Outage()
		if c.Share == nil || !heard || o.ShareAt == neverHeard || p.tier.Algorithm.Bucket() {
			if c.Share != nil && o.ShareAt == neverHeard {
				l.chargeNeverHeardLocked(c, p, now)
			}
			c.Share = local.New(share, start, full)
		} // else what the share of another outage admitted may still count in a window, and no return of it be known to Redis
		c.BackReady = false // what was to be handed over of another is kept aside
		o.ShareAt, o.ShareCap, o.ShareFrom = outage, share.Capacity(), begin
	}
	if from := c.Outage().ShareFrom; from != 0 && (!heard || l.cfg.fallback == FallbackShare) {
		at := l.h.wall(from)
		if heard {
			at = clock.at(from)
		}
		if wait := windowBegins(p, at, t); wait > 0 {
			denied.RetryAfter = time.Duration(wait)
			return denied
		}
	}
	if n > 0 && c.Slot != 0 && now <= c.Deadline() && c.Tokens() >= n {
		var r Result
		c.Gather()
		if l.warm(&r, c, p, n) { // filled between the look and the lock
			return r
		}
	}
	r := l.decided(p, takeOrPeek(c.Share, t, share, n), share.Capacity(), Fallback)
	if r.RetryAfter == Never && n <= p.capacity && p.tier.Rate > 0 {
		r.RetryAfter = l.h.cfg.heartbeat // the share is too small for it; Redis may be back
	}
	return r
}

// takeOrPeek spends n, or for 0 says whether 1 would pass.
func takeOrPeek(s local.State, t local.Time, l tier.Limit, n int64) local.Decision {
	if n == 0 {
		return s.Peek(t, l, 1)
	}
	return s.Take(t, l, n)
}

// silenceBefore is how long after an instance's last sign of life its share of this limit begins, window starts apart.
func (l *Limiter) silenceBefore(p *policy) time.Duration {
	s := l.h.silence()
	leases := time.Duration(stretch(2 * p.slotUS * 1000))
	switch p.tier.Algorithm {
	case tier.TokenBucket, tier.LeakyBucket:
		if p.leased {
			s += leases // others may spend what they leased before they knew
		}
	case tier.SlidingLog:
		s += time.Duration(stretch(int64(p.tier.Period)))
		if p.leased {
			s += leases
		}
	}
	return s
}

// windowBegins is how long it still takes until a share of a window that begins at the given time may be used, 0 when it may: it must be
// certain that the window (for a sliding window: the one before it) began after the share did.
func windowBegins(p *policy, begin, now local.Time) int64 {
	w := p.tier.SubWindowUS()
	first := (begin.Hi + w - 1) / w * w
	switch p.tier.Algorithm {
	case tier.FixedWindow:
	case tier.SlidingWindow:
		first += p.tier.PeriodUS()
	default:
		return 0
	}
	return max(0, (first-now.Lo)*1000)
}

// chargeNeverHeardLocked lets what a share admitted before Redis was first heard be charged, as far as tokens are left. Caller holds c.Mu.
func (l *Limiter) chargeNeverHeardLocked(c *local.Cell, p *policy, now int64) {
	wall := l.h.wall(now)
	used := c.Share.Admitted(wall)
	if p.tier.Algorithm.Bucket() {
		used = max(0, c.Outage().ShareCap-c.Share.Take(wall, p.tier, 0).Remaining)
	}
	c.ChargeCold = clip(c.ChargeCold+used, p.capacity)
}
