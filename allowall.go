package tierlimit

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tierlimit/tierlimit/tier/local"
)

// AllowAll spends the tokens of several checks as one: those of all checks, or none. Checks of the same limiter and key are added up. A check
// of 0 only looks, and denies nothing. The same limiter may come with several keys, and keys may live on several servers of a Redis Cluster.
//
// Tokens are taken from leases in hand, all at once. What this instance holds too little of it leases first, for all keys in parallel: one
// round trip, at most WithRemoteTimeout. Where others take those tokens meanwhile it asks once or twice more. If one check is denied, what was
// leased for the others stays in hand, for the next to come or to be returned: so also a key with WithLocalShare(0) is leased for a moment.
// ColdAdmit admits nothing here. Of the two tiers and of outages holds what AllowN says.
//
// Errors: ErrConfig for a Limiter that is nil or of another Hybrid, ErrCost for a negative N, ErrClosed, and ctx's own, wrapped, where it
// would wait; nothing is spent then. Cost, all keys warm: the locks of the keys, an allocation each for the parts and the Results.
func (h *Hybrid) AllowAll(ctx context.Context, checks ...Check) (Verdict, error) {
	ctx = orBackground(ctx)
	parts, err := h.parts(checks)
	if err != nil {
		return Verdict{}, err
	}
	a := all{h: h, parts: parts, deadline: h.now() + int64(h.cfg.remoteTimeout)}
	if err := a.decide(ctx); err != nil {
		return Verdict{}, err
	}
	return a.verdict(ctx, checks)
}

// A part is what AllowAll has to spend of one key.
type part struct {
	l      *Limiter
	key    string
	n      int64
	checks []int // that it is the sum of

	p    *policy
	hash uint64
	c    *local.Cell
	d    *domain // nil where there is no Redis

	standing standing
	asked    *local.Outcome // what Redis said
	lost     bool           // Redis did not
	result   Result
	taken    int64 // from the lease
}

// standing is how a part stands.
type standing uint8

const (
	lacking  standing = iota // of tokens
	ready                    // they are there
	fallback                 // Redis is out of reach
	passed                   // nothing to spend: no limit, or a denial that WithShadow lets pass
	denied
)

// parts are the checks with an N above 0, those of one key added up, in the order in which their cells are to be locked.
func (h *Hybrid) parts(checks []Check) ([]part, error) {
	if h.closed.Load() {
		return nil, ErrClosed
	}
	parts := make([]part, 0, len(checks))
	for i, k := range checks {
		switch {
		case k.Limiter == nil:
			return nil, fmt.Errorf("%w: check %d has no Limiter", ErrConfig, i)
		case k.Limiter.h != h:
			return nil, fmt.Errorf("%w: the Limiter of check %d, %q, is of another Hybrid", ErrConfig, i, k.Limiter.name)
		case k.N < 0:
			return nil, fmt.Errorf("%w: check %d costs %d, want 0 or more", ErrCost, i, k.N)
		case k.N > 0:
			parts = append(parts, part{l: k.Limiter, key: k.Key, n: k.N, checks: []int{i}})
		}
	}
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Or(cmp.Compare(a.l.id, b.l.id), cmp.Compare(a.key, b.key)) })
	sum := parts[:0]
	for _, p := range parts {
		if last := len(sum) - 1; last >= 0 && sum[last].l == p.l && sum[last].key == p.key {
			sum[last].n = min(sum[last].n, math.MaxInt64-p.n) + p.n
			sum[last].checks = append(sum[last].checks, p.checks...)
			continue
		}
		sum = append(sum, p)
	}
	return sum, nil
}

// all is one AllowAll.
type all struct {
	h        *Hybrid
	parts    []part
	deadline int64 // until when it may wait for Redis
}

// attempts is how often Redis is asked when others take what was leased.
const attempts = 3

// decide spends the tokens of all parts, or none.
func (a *all) decide(ctx context.Context) error {
	for i := range a.parts {
		a.parts[i].begin()
	}
	for attempt := 0; ; attempt++ {
		if err := a.lock(); err != nil {
			return err
		}
		now := a.h.now()
		for i := range a.parts {
			a.parts[i].lookLocked(now, attempt >= attempts)
		}
		switch {
		case a.any(denied):
			a.unlock()
			return nil
		case !a.any(lacking) && a.takeLocked(now):
			a.unlock()
			return nil
		case a.any(denied):
			a.unlock()
			return nil
		}
		if err := ctx.Err(); err != nil {
			a.unlock()
			return waitError(err)
		}
		waiters := a.askLocked()
		a.unlock()
		if err := a.await(ctx, waiters); err != nil {
			return err
		}
	}
}

// begin finds out what can be said without a cell.
func (p *part) begin() {
	p.p = p.l.policy.Load()
	p.hash = p.l.hash(p.key)
	switch {
	case p.p.unlimited:
		p.pass(Result{Allowed: true, Limit: p.p.capacity, Remaining: p.p.capacity, Source: Local})
	case p.n > p.p.capacity:
		p.deny(Result{Limit: p.p.capacity, Remaining: p.l.known(p.p, p.key), RetryAfter: Never, Source: Local})
	}
}

func (p *part) pass(r Result) { p.standing, p.result = passed, r }

// deny takes in that this part is denied, which WithShadow lets pass.
func (p *part) deny(r Result) {
	p.standing, p.result = denied, r
	if p.l.cfg.shadow {
		p.result, _ = p.l.shadow(r, nil, p.n)
		p.standing = passed
	}
}

func (a *all) any(s standing) bool {
	return slices.ContainsFunc(a.parts, func(p part) bool { return p.standing == s })
}

// lock finds the cells and locks them: all of those that are not decided, in the order of parts, which is everybody's.
func (a *all) lock() error {
	for {
		for i := range a.parts {
			if p := &a.parts[i]; p.standing != passed && p.standing != denied {
				p.standing = lacking
				if p.c = a.h.table.Find(p.hash, p.l.id, p.key); p.c == nil {
					p.c = p.l.cell(p.hash, p.key)
				}
			} else {
				p.c = nil
			}
		}
		dead := false
		for i := range a.parts {
			if c := a.parts[i].c; c != nil {
				c.Mu.Lock()
				dead = dead || c.Dead
			}
		}
		if a.h.closed.Load() {
			a.unlock()
			return ErrClosed
		}
		if !dead {
			return nil
		}
		a.unlock() // evicted since it was found
	}
}

func (a *all) unlock() {
	for i := range a.parts {
		if c := a.parts[i].c; c != nil {
			c.Mu.Unlock()
		}
	}
}

// lookLocked says how the part stands, without spending anything. Caller holds the lock of its cell.
func (p *part) lookLocked(now int64, last bool) {
	c, l := p.c, p.l
	if c == nil {
		return
	}
	c.Touch()
	p.d, p.taken, p.result = nil, 0, Result{Limit: p.p.capacity, Source: Local}
	if l.h.client == nil {
		if r := l.aloneLocked(c, p.p, 0, now); r.Remaining < p.n {
			l.denied.Add(p.n)
			wall := l.h.wall(now)
			p.deny(l.decided(p.p, c.Share.Peek(wall, p.p.tier, p.n), p.p.capacity, Local))
		} else {
			p.standing = ready
		}
		return
	}
	p.d = l.h.domainOf(c)
	c.Gather()
	have := c.Tokens()
	var r Result
	switch o := p.asked; {
	case have >= p.n && now <= c.Deadline():
		p.standing = ready
	case l.keptDenial(&r, c, p.p, p.n, have, now):
		p.deny(r)
	case p.lost || p.d.down():
		p.standing = fallback
	case o != nil && (!o.Allowed && o.Remaining < p.n || last):
		l.denied.Add(p.n)
		p.deny(p.refused(o))
	}
}

// refused is the Result of a denial by Redis, or by those who took what it gave.
func (p *part) refused(o *local.Outcome) Result {
	r := Result{
		Limit: p.p.capacity, Remaining: clip(min(o.Remaining, p.n-1), p.p.capacity), Source: Remote,
		RetryAfter: max(time.Duration(o.RetryNS), p.l.h.cfg.syncInterval/10), ResetAfter: time.Duration(max(o.ResetNS, o.RetryNS)),
	}
	if o.Never {
		r.RetryAfter = Never
	}
	return r
}

// takeLocked spends the tokens of all parts, and reports whether it did: else all is as it was, and some parts lack tokens or are denied. Only what
// an outage share has, and what others take of a lease without a lock, is not known before it is taken.
// Caller holds the locks of all cells.
func (a *all) takeLocked(now int64) bool {
	ok := true
	for i := range a.parts {
		if p := &a.parts[i]; p.standing == fallback || p.standing == ready && p.d == nil {
			ok = ok && p.takeShareLocked(now)
		}
	}
	var ends int64 = math.MaxInt64
	for i := range a.parts {
		if p := &a.parts[i]; ok && p.standing == ready && p.d != nil {
			ends = min(ends, p.c.Deadline())
			if _, took := p.c.Take(p.n); took {
				p.taken = p.n
			} else {
				p.standing, ok = lacking, false // another check was faster: it took it without the lock
			}
		}
	}
	// The clock is read after the last take: see local.Cell.Take.
	if now = a.h.clock.Fast(); ok && now > ends {
		for i := range a.parts {
			if p := &a.parts[i]; p.taken > 0 && now > p.c.Deadline() {
				p.standing, ok = lacking, false
			}
		}
	}
	for i := range a.parts {
		if p := &a.parts[i]; p.c != nil {
			if ok {
				p.spentLocked(now)
			} else {
				p.giveBackLocked(now)
			}
		}
	}
	return ok
}

// takeShareLocked spends of what is counted in this process: an outage share, or all there is without Redis.
func (p *part) takeShareLocked(now int64) bool {
	if p.d == nil {
		p.result = p.l.aloneLocked(p.c, p.p, p.n, now)
	} else {
		p.result = p.l.fallbackLocked(p.d, p.c, p.p, p.n, now)
	}
	if !p.result.Allowed {
		p.deny(p.result)
		return p.standing == passed
	}
	return true
}

// spentLocked takes in that the tokens are spent.
func (p *part) spentLocked(now int64) {
	c := p.c
	if p.taken == 0 {
		return
	}
	if c.Log != nil {
		c.Log.Record(now, p.n)
	}
	left := c.Tokens()
	p.result = Result{
		Allowed: true, Limit: p.p.capacity, Remaining: clip(left+c.Remaining(), p.p.capacity),
		ResetAfter: time.Duration(max(0, c.FullAt()-now)), Source: Local,
	}
	if p.asked != nil {
		p.result.Source = Remote
	}
	if c.Flow != nil {
		p.result.Delay = time.Duration(c.Flow.Place(p.l.h.now(), p.n, p.p.stepNS))
	}
	if left < c.Mark() && c.Note() {
		p.l.h.noteLocked(c)
	}
}

// giveBackLocked puts back what was taken: nobody was let pass for it.
func (p *part) giveBackLocked(now int64) {
	c := p.c
	switch {
	case p.taken > 0 && now <= c.Deadline():
		c.Unspend(p.taken)
	case p.standing != fallback || !p.result.Allowed:
	case p.result.Source == Local: // the fallback found a lease
		c.Unspend(p.n)
	default:
		p.l.fallback.Add(-p.n)
		if c.Share != nil && (p.l.cfg.fallback == FallbackShare || p.l.cfg.fallback == FallbackShareNow) {
			t := p.l.h.wall(now)
			if c.Outage().ShareAt != neverHeard {
				t = shareTime(p.p.tier.Algorithm, p.d.serverClock(), now)
			}
			c.Share.Refund(t, p.l.shareOf(p.d, p.p), p.n)
		}
	}
	p.taken = 0
}

// askLocked lets the parts that lack tokens wait for an exchange, which is to lease them. Caller holds the locks of their cells.
func (a *all) askLocked() []*local.Waiter {
	waiters := make([]*local.Waiter, len(a.parts))
	for i := range a.parts {
		if p := &a.parts[i]; p.standing == lacking {
			w := &local.Waiter{Hold: p.n, Left: a.deadline, Done: make(chan local.Outcome, 1)}
			waiters[i] = w
			p.d.joinLocked(p.c, w)
		}
	}
	return waiters
}

// await waits for what Redis says of each part.
func (a *all) await(ctx context.Context, waiters []*local.Waiter) error {
	t := time.NewTimer(time.Duration(max(0, a.deadline-a.h.now())))
	defer t.Stop()
	late := false
	for i, w := range waiters {
		if w == nil {
			continue
		}
		p := &a.parts[i]
		select {
		case o := <-w.Done:
			if err := p.heard(o); err != nil {
				return err
			}
			continue
		default:
		}
		if !late {
			select {
			case o := <-w.Done:
				if err := p.heard(o); err != nil {
					return err
				}
				continue
			case <-ctx.Done():
				for j, w := range waiters[i:] {
					if w != nil {
						dropWaiter(a.parts[i+j].c, w)
					}
				}
				return waitError(ctx.Err())
			case <-t.C:
				late = true
			}
		}
		dropWaiter(p.c, w)
		p.lost = true
	}
	return nil
}

func (p *part) heard(o local.Outcome) error {
	p.asked, p.lost = &o, o.Down
	if o.Closed {
		return ErrClosed
	}
	return nil
}

// verdict tells what came of it, check by check.
func (a *all) verdict(ctx context.Context, checks []Check) (Verdict, error) {
	v := Verdict{Allowed: true, Denied: -1, Results: make([]Result, len(checks))}
	for i := range a.parts {
		p := &a.parts[i]
		if p.standing == denied {
			v.Allowed = false
			v.RetryAfter = max(v.RetryAfter, p.result.RetryAfter)
			if first := slices.Min(p.checks); v.Denied < 0 || first < v.Denied {
				v.Denied = first
			}
		}
	}
	for i := range a.parts {
		p := &a.parts[i]
		if !v.Allowed && p.standing != denied && p.standing != passed {
			p.result = Result{Allowed: true, Limit: p.p.capacity, Remaining: p.l.known(p.p, p.key), Source: Local}
		}
		for _, k := range p.checks {
			v.Results[k] = p.result
		}
	}
	for i, k := range checks {
		if k.N == 0 {
			r, err := k.Limiter.Peek(ctx, k.Key)
			if err != nil {
				return Verdict{}, err
			}
			v.Results[i] = r
		}
	}
	return v, nil
}
