package tierlimit

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierlimit/tierlimit/internal/clock"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/local"
)

// A Limiter applies one Limit to many keys. Keys are any bytes; two keys never share a count. Safe for concurrent
// use. Made by Hybrid.Limiter.
type Limiter struct {
	h     *Hybrid
	table *local.Table // h's
	id    uint32
	name  string
	seed  uint64
	cfg   limiterConfig

	policy  atomic.Pointer[policy]
	setting sync.Mutex // serialises SetLimit

	local, remote, fallback, denied, shadowed atomic.Int64
}

// policy is a limit with what follows from it and the options.
type policy struct {
	limit     Limit
	tier      tier.Limit
	capacity  int64
	most      int64 // that a check can get by asking for tokens: the capacity, 0 where there is no limit
	unlimited bool
	leased    bool
	maxLease  int64   // the local share of the capacity
	slotUS    int64   // length of an accounting slot
	perNS     float64 // tokens per nanosecond
	stepNS    int64   // between two tokens of an even flow
	horizon   int64   // longest a lease is meant to last, ns
	pauseCap  int64   // longest pause after a short grant, ns
}

func newLimiter(h *Hybrid, id uint32, name string, limit Limit, cfg limiterConfig) *Limiter {
	l := &Limiter{h: h, table: h.table, id: id, name: name, cfg: cfg, seed: maphash.String(processSeed, name)}
	l.policy.Store(l.plan(limit))
	return l
}

// processSeed mixes limiters into different shards, and keeps whoever chooses keys from choosing shards.
var processSeed = maphash.MakeSeed()

func (l *Limiter) plan(limit Limit) *policy {
	t := limit.tier()
	p := &policy{limit: limit, tier: t, capacity: t.Capacity(), unlimited: limit == Unlimited()}
	if !p.unlimited {
		p.most = p.capacity
	}
	p.maxLease = int64(l.cfg.localShare * float64(p.capacity))
	p.perNS = float64(t.Rate) / float64(t.Period)
	if t.Rate > 0 && t.Algorithm == tier.LeakyBucket {
		p.stepNS = int64(t.Period) / t.Rate
	}
	slot := l.cfg.leaseTTL
	p.horizon = l.cfg.leaseTTL.Nanoseconds()
	if !t.Algorithm.Bucket() {
		// A lease dies with its (sub-)window: aim for a quarter of it. A log's uncommitted tokens leave a slot later.
		window := time.Duration(t.SubWindowUS()) * time.Microsecond
		p.horizon = min(p.horizon, window.Nanoseconds()/4)
		slot = min(slot, max(window/4, l.h.cfg.syncInterval))
	}
	p.slotUS = max(1, slot.Microseconds())
	sync := float64(l.h.cfg.syncInterval)
	// A limit whose local share is less than a token cannot be split. A window shorter than two sync intervals is over before a
	// lease of it could be reported. Both are decided call by call.
	p.leased = p.maxLease >= 1 && t.Rate > 0 && (t.Algorithm.Bucket() || t.SubWindowUS()*1000 >= 2*l.h.cfg.syncInterval.Nanoseconds())
	if t.Rate > 0 {
		p.pauseCap = int64(min(sync, float64(p.capacity)/p.perNS/100))
	}
	return p
}

// Name is the name the limiter was made with.
func (l *Limiter) Name() string { return l.name }

// Limit is the limit in force.
func (l *Limiter) Limit() Limit { return l.policy.Load().limit }

// LimitFor is the limit in force for key.
func (l *Limiter) LimitFor(key string) Limit { return l.Limit() }

// LimiterStats counts tokens since the limiter was made. Figures of warm keys arrive at the next exchange, a sync
// interval later or as soon as a lease is used up. What is answered without looking at a key is not counted: checks of an
// unlimited limiter, and denials with RetryAfter Never because the cost is above the capacity.
type LimiterStats struct {
	Local    int64 // admitted from leases, or by a Hybrid without Redis
	Remote   int64 // admitted by Redis
	Fallback int64 // admitted while Redis was out of reach
	Denied   int64 // refused, or what would have been with WithShadow
	Shadowed int64 // let pass by WithShadow though it would have been refused; counted at once, also where Denied does not count it
}

// Stats returns a snapshot.
func (l *Limiter) Stats() LimiterStats {
	return LimiterStats{l.local.Load(), l.remote.Load(), l.fallback.Load(), l.denied.Load(), l.shadowed.Load()}
}

// Allow is AllowN with a cost of 1.
func (l *Limiter) Allow(ctx context.Context, key string) (Result, error) {
	return l.AllowN(ctx, key, 1)
}

// AllowN spends n tokens of key, all or none, and says whether they were there. n is 0 or more: a negative n is
// ErrCost, 0 is Peek, and more than the capacity is a denial with RetryAfter Never that changes nothing.
//
// A warm key is decided in this process without a lock or an allocation, whatever state Redis is in (of a Hybrid made by
// NewLocal every check takes the lock of its key). A cold key waits for Redis, at most WithRemoteTimeout; ctx is looked at only then,
// and its error is returned. A denial and a Redis that is down are Results, not errors; ErrClosed after Close.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (r Result, err error) {
	p := l.policy.Load()
	if n <= 0 || n > p.most || l.h.closed.Load() {
		r, err = l.special(ctx, p, key, n)
		return l.shadow(r, err, n)
	}
	hash := l.hash(key)
	if c := l.table.Find(hash, l.id, key); c != nil {
		if l.h.client == nil {
			if r, ok := l.aloneAt(c, p, n); ok {
				return l.shadow(r, nil, n)
			}
		} else if l.warm(&r, c, p, n) {
			if !r.Allowed {
				return l.shadow(r, nil, n)
			}
			return r, nil
		}
	}
	r, err = l.cold(ctx, p, hash, key, n)
	return l.shadow(r, err, n)
}

// shadow lets a check that is denied pass, if that is what WithShadow asks for.
func (l *Limiter) shadow(r Result, err error, n int64) (Result, error) {
	if l.cfg.shadow && err == nil && !r.Allowed && n > 0 {
		l.shadowed.Add(n)
		r.Allowed, r.Shadowed, r.RetryAfter = true, true, 0
	}
	return r, err
}

// aloneAt decides for a Hybrid without Redis, unless c was evicted.
func (l *Limiter) aloneAt(c *local.Cell, p *policy, n int64) (Result, bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.Dead {
		return Result{}, false
	}
	return l.aloneLocked(c, p, n, l.h.now()), true
}

// special answers what needs no tokens.
func (l *Limiter) special(ctx context.Context, p *policy, key string, n int64) (Result, error) {
	switch {
	case n < 0:
		return Result{}, fmt.Errorf("%w: %d, want 0 or more", ErrCost, n)
	case l.h.closed.Load():
		return Result{}, ErrClosed
	case p.unlimited:
		return Result{Allowed: true, Limit: p.capacity, Remaining: p.capacity, Source: Local}, nil
	case n == 0:
		return l.Peek(ctx, key)
	}
	return Result{Limit: p.capacity, Remaining: l.known(p, key), RetryAfter: Never, Source: Local}, nil
}

// known is what this instance believes is left of key, the capacity if it knows nothing.
func (l *Limiter) known(p *policy, key string) int64 {
	c := l.h.table.Find(l.hash(key), l.id, key)
	switch {
	case c == nil:
		return p.capacity
	case l.h.client == nil:
		c.Mu.Lock()
		defer c.Mu.Unlock()
		return l.aloneLocked(c, p, 0, l.h.now()).Remaining
	}
	return clip(c.Tokens()+c.Remaining(), p.capacity)
}

// warm decides from what the cell holds, a lease or a denial that is kept, and fills in r.
func (l *Limiter) warm(r *Result, c *local.Cell, p *policy, n int64) bool {
	deadline := c.Deadline()
	left, took := c.Take(n)
	// The clock is read after the take: see local.Cell.Take. It may be a few microseconds ahead, which makes a lease end that much
	// earlier; it is never behind.
	now := l.h.clock.Fast()
	if !took {
		return l.keptDenial(r, c, p, n, left, now)
	}
	if c.Log != nil {
		c.Log.Record(now, n)
	}
	if left < c.Mark() && c.Note() {
		l.h.note(c)
	}
	if now > deadline {
		return false // void: the token is burnt, not spent
	}
	c.Touch()
	r.Allowed = true
	r.Limit = p.capacity
	r.Remaining = clip(left+c.Remaining(), p.capacity)
	r.ResetAfter = time.Duration(max(0, c.FullAt()-now))
	r.Source = Local
	if c.Flow != nil {
		r.Delay = time.Duration(c.Flow.Place(l.h.now(), n, p.stepNS))
	}
	return true
}

// keptDenial answers with a denial that is kept for later.
func (l *Limiter) keptDenial(r *Result, c *local.Cell, p *policy, n, left, now int64) bool {
	until, ok := c.Denied(now, n)
	if !ok {
		return false
	}
	c.Touch()
	if more := n - max(c.DeniedCost(), left+c.Remaining()); more > 0 && p.tier.Algorithm.Bucket() {
		// The denial is of a smaller cost: what is not there has to be made first. What a larger cost waits for in a window only Redis can tell.
		until += min(int64(min(float64(more)/p.perNS, float64(math.MaxInt64/4))), math.MaxInt64-clock.Margin-until)
	}
	r.Limit = p.capacity
	r.Remaining = clip(min(left+c.Remaining(), n-1), p.capacity) // less than asked for, or it is a pause
	r.RetryAfter = time.Duration(until - now + clock.Margin)
	r.ResetAfter = time.Duration(max(c.FullAt(), until) - now + clock.Margin)
	r.Source = Local
	return true
}

func clip(n, capacity int64) int64 { return max(0, min(n, capacity)) }

// lockedCell returns the cell of key with its Mu held, or ErrClosed.
func (l *Limiter) lockedCell(hash uint64, key string) (*local.Cell, error) {
	for c := l.table.Find(hash, l.id, key); ; c = nil {
		if c == nil {
			c = l.cell(hash, key)
		}
		c.Mu.Lock()
		switch {
		case l.h.closed.Load():
			c.Mu.Unlock()
			return nil, ErrClosed
		case !c.Dead:
			return c, nil
		}
		c.Mu.Unlock() // evicted since it was found
	}
}

// cold joins the waiters of a key that this instance holds too little of.
func (l *Limiter) cold(ctx context.Context, p *policy, hash uint64, key string, n int64) (Result, error) {
	ctx = orBackground(ctx)
	c, err := l.lockedCell(hash, key)
	if err != nil {
		return Result{}, err
	}
	if l.h.client == nil {
		r := l.aloneLocked(c, p, n, l.h.now())
		c.Mu.Unlock()
		return r, nil
	}
	var r Result
	c.Gather()
	if l.warm(&r, c, p, n) { // filled since it was tried
		c.Mu.Unlock()
		return r, nil
	}
	c.Touch()
	d := l.h.domainOf(c)
	if d.down() {
		r := l.fallbackLocked(d, c, p, n, l.h.now())
		c.Mu.Unlock()
		return r, nil
	}
	if c.Settled == 0 && c.ColdUsed+n <= int64(l.cfg.coldStart) {
		c.ColdUsed += n
		c.ChargeCold += n
		l.local.Add(n)
		d.enqueueLocked(c)
		c.Mu.Unlock()
		return Result{Allowed: true, Limit: p.capacity, Remaining: p.capacity - n, Source: Local}, nil
	}
	if err := ctx.Err(); err != nil {
		c.Mu.Unlock()
		return Result{}, waitError(err)
	}
	w := l.h.waiters.Get().(*local.Waiter)
	w.N, w.Left, w.Again = n, l.h.now()+int64(l.h.cfg.remoteTimeout), false
	d.joinLocked(c, w)
	c.Mu.Unlock()
	return l.await(ctx, d, c, p, w)
}

// await waits for w's outcome, ctx, or the remote timeout, whichever comes first.
func (l *Limiter) await(ctx context.Context, d *domain, c *local.Cell, p *policy, w *local.Waiter) (Result, error) {
	t := l.h.timers.Get().(*time.Timer)
	t.Reset(l.h.cfg.remoteTimeout)
	defer func() {
		t.Stop()
		l.h.timers.Put(t)
	}()
	select {
	case o := <-w.Done:
		n, again := w.N, w.Again
		l.h.waiters.Put(w)
		if o.Down && again {
			return l.refusedBefore(p, n), nil
		}
		return l.outcome(d, c, p, n, o)
	case <-ctx.Done():
		// A waiter that is in flight may still be granted tokens: they are burnt, since a later credit of a token
		// debited now would be minted twice. It is not pooled: the flight still holds it.
		dropWaiter(c, w)
		return Result{}, waitError(ctx.Err())
	case <-t.C:
		dropWaiter(c, w)
		select {
		case o := <-w.Done: // it came at the last moment
			return l.outcome(d, c, p, w.N, o)
		default:
		}
		if w.Again {
			return l.refusedBefore(p, w.N), nil
		}
		return l.withoutRedis(d, c, p, w.N)
	}
}

// refusedBefore is the answer for who was to be asked for once more, in vain: Redis has refused it.
func (l *Limiter) refusedBefore(p *policy, n int64) Result {
	l.denied.Add(n)
	return Result{Limit: p.capacity, RetryAfter: l.h.cfg.remoteTimeout, Source: Remote}
}

// withoutRedis decides for who waited for an exchange of c in vain. Its key may have another cell by now, which counts its share.
func (l *Limiter) withoutRedis(d *domain, c *local.Cell, p *policy, n int64) (Result, error) {
	c, err := l.lockedCell(c.Hash, c.Key)
	if err != nil {
		return Result{}, err
	}
	defer c.Mu.Unlock()
	return l.fallbackLocked(d, c, p, n, l.h.now()), nil
}

func waitError(err error) error { return fmt.Errorf("tierlimit: the wait was given up: %w", err) }

func dropWaiter(c *local.Cell, w *local.Waiter) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	dropLocked(c, w)
}

// dropLocked reports whether w was waiting for a flight to take it. Caller holds c.Mu.
func dropLocked(c *local.Cell, w *local.Waiter) bool {
	for i, x := range c.Waiters {
		if x == w {
			c.Waiters = append(c.Waiters[:i:i], c.Waiters[i+1:]...)
			return true
		}
	}
	return false
}

// outcome turns what an exchange answered into a Result.
func (l *Limiter) outcome(d *domain, c *local.Cell, p *policy, n int64, o local.Outcome) (Result, error) {
	switch {
	case o.Closed:
		return Result{}, ErrClosed
	case o.Down:
		return l.withoutRedis(d, c, p, n)
	}
	r := Result{
		Allowed:    o.Allowed,
		Limit:      p.capacity,
		Remaining:  clip(o.Remaining, p.capacity),
		ResetAfter: time.Duration(o.ResetNS),
		Source:     Remote,
	}
	if o.Leased {
		r.Source = Local
	}
	if o.Allowed {
		r.Delay = time.Duration(o.DelayNS)
		return r, nil
	}
	r.RetryAfter = time.Duration(o.RetryNS)
	if o.Never {
		r.RetryAfter = Never
	}
	return r, nil
}

// Wait is WaitN with a cost of 1.
func (l *Limiter) Wait(ctx context.Context, key string) error { return l.WaitN(ctx, key, 1) }

// WaitN waits until n tokens of key could be spent, and spends them. It returns ErrNever at once if n can never pass,
// and an error that wraps context.DeadlineExceeded at once if ctx's deadline lies before the earliest moment it could
// pass. While Redis is out of reach nobody knows that moment: it asks again each heartbeat, and a deadline ends the wait up to a heartbeat
// early. With a leaky bucket it also holds the caller for Result.Delay, so that callers leave evenly spaced;
// where ctx does not allow for that, the error comes after the place in the queue was given back, two times WithRemoteTimeout at most. A
// wait that is given up between two attempts spends nothing; one that is given up while Redis is being asked may burn what it asked for.
// With n of 0 it waits until a cost of 1 would pass, and spends nothing. Other errors: ErrCost for n < 0, ctx's own, wrapped, and
// ErrClosed.
func (l *Limiter) WaitN(ctx context.Context, key string, n int64) error {
	ctx = orBackground(ctx)
	for {
		if err := ctx.Err(); err != nil {
			return waitError(err)
		}
		r, err := l.AllowN(ctx, key, n)
		if err != nil {
			return err
		}
		if r.Allowed {
			if r.Delay <= 0 {
				return nil
			}
			if err := pause(ctx, l.h.stop, r.Delay); err != nil {
				if n > 0 {
					// The caller never goes: its place in the queue is free again, as far as that can be said in time.
					ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.h.cfg.remoteTimeout)
					defer cancel()
					_ = l.Refund(ctx, key, n)
				}
				return err
			}
			return nil
		}
		if r.RetryAfter == Never {
			return fmt.Errorf("%w: cost %d, capacity %d", ErrNever, n, r.Limit)
		}
		wait := r.RetryAfter
		if r.Source == Fallback {
			wait = min(wait, l.h.cfg.heartbeat) // Redis may be back
		}
		if err := pause(ctx, l.h.stop, wait); err != nil {
			return err
		}
	}
}

// orBackground lets a nil Context, which a caller may pass for long before a key is cold, be none that ends.
func orBackground(ctx context.Context) context.Context {
	if ctx == nil {
		return context.Background()
	}
	return ctx
}

// pause sleeps for d, or fails at once if ctx ends before, and when stop is closed.
func pause(ctx context.Context, stop <-chan struct{}, d time.Duration) error {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < d {
		return fmt.Errorf("tierlimit: the wait of %v is longer than the context allows: %w", d, context.DeadlineExceeded)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-stop:
		return ErrClosed
	case <-ctx.Done():
		return waitError(ctx.Err())
	}
}

// Peek says how key stands and spends nothing: Allowed means that a cost of 1 would pass. A key of which this instance holds
// nothing costs one exchange and waits for it as a check does, at most WithRemoteTimeout. Errors: ctx's, wrapped, where it would
// wait, and ErrClosed.
func (l *Limiter) Peek(ctx context.Context, key string) (Result, error) {
	ctx = orBackground(ctx)
	p := l.policy.Load()
	if l.h.closed.Load() {
		return Result{}, ErrClosed
	}
	if p.unlimited {
		return Result{Allowed: true, Limit: p.capacity, Remaining: p.capacity, Source: Local}, nil
	}
	c, err := l.lockedCell(l.hash(key), key)
	if err != nil {
		return Result{}, err
	}
	now := l.h.now()
	switch {
	case l.h.client == nil:
		r := l.aloneLocked(c, p, 0, now)
		c.Mu.Unlock()
		return r, nil
	case c.Tokens() > 0 && now <= c.Deadline():
		r := Result{Allowed: true, Limit: p.capacity, Remaining: clip(c.Tokens()+c.Remaining(), p.capacity), ResetAfter: time.Duration(max(0, c.FullAt()-now)), Source: Local}
		c.Mu.Unlock()
		return r, nil
	}
	if until := c.DeniedUntil(); until > now && c.DeniedCost() <= 1 {
		r := Result{Limit: p.capacity, Remaining: 0, RetryAfter: time.Duration(until - now), ResetAfter: time.Duration(max(0, c.FullAt()-now)), Source: Local}
		c.Mu.Unlock()
		return r, nil
	}
	d := l.h.domainOf(c)
	if d.down() {
		r := l.fallbackLocked(d, c, p, 0, now)
		c.Mu.Unlock()
		return r, nil
	}
	if err := ctx.Err(); err != nil {
		c.Mu.Unlock()
		return Result{}, waitError(err)
	}
	w := l.h.waiters.Get().(*local.Waiter)
	w.N, w.Left = 0, l.h.now()+int64(l.h.cfg.remoteTimeout)
	d.joinLocked(c, w)
	c.Mu.Unlock()
	return l.await(ctx, d, c, p, w)
}

// Refund gives n tokens back that the caller was allowed and did not use. It never fills a key above full; a window
// takes it back in the current window only, never below 0 spent. Tokens of the lease in hand are back at once; for others
// it waits for one exchange: three times WithRemoteTimeout at most if others are under way already, and where nothing answers until the
// breaker opens (by default after 5 timeouts), unless ctx ends before it is on its way; once it is, its answer is waited for, so that
// nothing is credited after Refund has returned. Where nothing was left, instances that keep a denial ask
// again within two heartbeats; a denial of a cost that is larger than what was left ends by itself. It is lost, which errs to too few, when Redis is out of
// reach, for which there is no error, or ctx ends before. Errors: ErrCost for n < 0, ctx's, wrapped, and ErrClosed.
func (l *Limiter) Refund(ctx context.Context, key string, n int64) error {
	ctx = orBackground(ctx)
	p := l.policy.Load()
	switch {
	case n < 0:
		return fmt.Errorf("%w: a refund of %d, want 0 or more", ErrCost, n)
	case l.h.closed.Load():
		return ErrClosed
	case n == 0 || p.unlimited:
		return nil
	}
	n = min(n, p.capacity)
	c, err := l.lockedCell(l.hash(key), key)
	if err != nil {
		return err
	}
	now := l.h.now()
	if l.h.client == nil {
		if c.Share != nil {
			c.Share.Refund(l.h.wall(now), p.tier, n)
		}
		c.Mu.Unlock()
		return nil
	}
	d := l.h.domainOf(c)
	if c.Share != nil && c.Outage().ShareAt == d.outageID() {
		c.Share.Refund(shareTime(p.tier.Algorithm, d.serverClock(), now), l.shareOf(d, p), n)
		c.Mu.Unlock()
		return nil
	}
	// Taking a spend of the lease in hand back is as if it had not been: no credit crosses the wire.
	if c.Log == nil && now <= c.Deadline() {
		back := c.Unspend(n)
		if c.Flow != nil {
			c.Flow.Back(back, p.stepNS)
		}
		n -= back
	}
	c.Allow()
	if n == 0 || c.Refund == tier.RefundAll || d.down() {
		c.Mu.Unlock()
		return nil
	}
	// A refund that were credited later than it is given could mint what a full key had discarded meanwhile: so it is
	// credited before this returns, or not at all.
	c.Refund = min(c.Refund+n, p.capacity)
	w := &local.Waiter{Done: make(chan local.Outcome, 1)}
	d.joinLocked(c, w)
	c.Mu.Unlock()
	select {
	case <-w.Done:
		return nil
	case <-ctx.Done():
	case <-l.h.stop:
	}
	c.Mu.Lock()
	given := !dropLocked(c, w)
	if !given && c.Refund > 0 { // a reset stays one
		c.Refund = max(0, c.Refund-n)
	}
	c.Mu.Unlock()
	if given { // a flight has taken it, and knows within a time-out
		<-w.Done
		return nil
	}
	if err := ctx.Err(); err != nil {
		return waitError(err)
	}
	return ErrClosed
}

// What Reset came to besides a reset key.
var (
	errResetKept    = errors.New("tierlimit: Redis was not reached: the key is reset with its next exchange")
	errResetUnknown = errors.New("tierlimit: Redis did not answer in time: the key may be reset or not")
)

// Reset makes key full again, less what instances hold as leases, across the fleet within one heartbeat, or one after the fleet can be
// told. It is a break of the limit that the caller asks for.
//
// It waits for one exchange, as long as Refund does. Errors: one that says so where Redis was not reached (the reset is kept for
// the key's next exchange, as long as the key is not evicted), or did not answer in time, so that nobody knows; ctx's, wrapped,
// after which it may still be done; ErrClosed.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	ctx = orBackground(ctx)
	p := l.policy.Load()
	if l.h.closed.Load() {
		return ErrClosed
	}
	if p.unlimited {
		return nil
	}
	c, err := l.lockedCell(l.hash(key), key)
	if err != nil {
		return err
	}
	c.Allow()
	if l.h.client == nil {
		if c.Share != nil {
			c.Share.Reset(l.h.wall(l.h.now()), p.tier)
		}
		c.Mu.Unlock()
		return nil
	}
	c.Share = nil
	d := l.h.domainOf(c)
	c.Refund = tier.RefundAll
	c.Own = local.Own{}
	d.enqueueLocked(c)
	landing := nextLandingLocked(c)
	c.Mu.Unlock()
	switch err := d.landed(ctx, c, landing); {
	case errors.Is(err, ErrClosed):
		return err
	case err != nil:
		return fmt.Errorf("tierlimit: Reset was given up, the key may be reset yet: %w", err)
	}
	c.Mu.Lock()
	done, kept := c.Resets >= landing, c.Refund == tier.RefundAll
	c.Mu.Unlock()
	switch {
	case done:
		return nil
	case kept:
		return errResetKept
	}
	return errResetUnknown
}

// SetLimit changes the limit, in force at once in this process; other instances follow when they are told by their own
// SetLimit. Tokens carry over, clipped to the new capacity; a raise fills nothing for free. It does not wait for Redis. Errors:
// ErrLimit for a limit that is not valid or of another algorithm, and ErrClosed.
func (l *Limiter) SetLimit(limit Limit) error {
	if l.h.closed.Load() {
		return ErrClosed
	}
	if err := limit.Validate(); err != nil {
		return err
	}
	l.setting.Lock()
	defer l.setting.Unlock()
	old := l.Limit()
	if limit.Algorithm != old.Algorithm {
		return fmt.Errorf("%w: the algorithm of limiter %q is %v and cannot become %v", ErrLimit, l.name, old.Algorithm, limit.Algorithm)
	}
	if limit == old {
		return nil
	}
	l.policy.Store(l.plan(limit))
	l.h.mu.Lock()
	l.h.stretchHorizonLocked(limit)
	l.h.mu.Unlock()
	// What is in hand was leased under the old limit: back it goes, and the next check asks under the new one.
	l.h.table.Each(func(c *local.Cell) {
		if c.Owner != l.id {
			return
		}
		c.Mu.Lock()
		defer c.Mu.Unlock()
		c.Allow()
		if limit.Period != old.Period {
			c.Own, c.Foreign = local.Own{}, c.Slot != 0 // its windows were others
		}
		if l.h.client != nil && c.Slot != 0 {
			c.Return = true
			l.h.domainOf(c).retireLocked(c)
		}
	})
	if limit.Period != old.Period {
		mine := func(owner uint32, _ string) bool { return owner == l.id }
		l.h.recall(mine, func(c *local.Cell) { c.Own = local.Own{} })
		// And of those that became cells between the two.
		l.h.table.Each(func(c *local.Cell) {
			if c.Owner == l.id {
				c.Mu.Lock()
				defer c.Mu.Unlock()
				c.Own = local.Own{}
			}
		})
	}
	for _, d := range l.h.allDomains() {
		d.changed()
	}
	return nil
}

// aloneLocked decides a check of a Hybrid without Redis.
func (l *Limiter) aloneLocked(c *local.Cell, p *policy, n, now int64) Result {
	t := l.h.wall(now)
	if c.Share == nil {
		c.Share = local.New(p.tier, t, true)
	}
	c.Touch()
	r := l.decided(p, takeOrPeek(c.Share, t, p.tier, n), p.capacity, Local)
	if r.Allowed {
		l.local.Add(n)
	} else {
		l.denied.Add(n)
	}
	return r
}

// decided turns a local decision into a Result.
func (l *Limiter) decided(p *policy, d local.Decision, capacity int64, source Source) Result {
	r := Result{
		Allowed:    d.Allowed,
		Limit:      p.capacity,
		Remaining:  clip(d.Remaining, capacity),
		ResetAfter: microseconds(d.ResetUS),
		Delay:      microseconds(d.DelayUS),
		Source:     source,
	}
	if !d.Allowed {
		r.RetryAfter = microseconds(d.RetryUS)
		if d.RetryUS < 0 {
			r.RetryAfter = Never
		}
	}
	return r
}

// microseconds turns a count into a Duration: a negative one into Never, any other into at most the longest but one.
func microseconds(us int64) time.Duration {
	if us < 0 {
		return Never
	}
	if us > (math.MaxInt64-1)/1000 {
		return math.MaxInt64 - 1
	}
	return time.Duration(us) * time.Microsecond
}
