package httplimit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tierlimit/tierlimit"
)

// A Middleware checks requests against one Limiter. Made by New; safe for concurrent use.
type Middleware struct {
	limiter *tierlimit.Limiter
	key     Key
	cfg     config
	headers *headers
	bodies  [ReasonError + 1]body // by Reason

	waiting                                   atomic.Int64
	allowed, denied, missing, skipped, failed atomic.Int64
	held, queueFull, turnTooLate, givenUp     atomic.Int64
	refunded, refundsLost                     atomic.Int64
}

// body is what a refusal says.
type body struct {
	text   []byte
	length string
}

// Reason says why a request was refused.
type Reason uint8

const (
	// ReasonLimit means that the limiter denied it: 429.
	ReasonLimit Reason = iota + 1
	// ReasonTurn means that its turn comes later than WithDelay lets a request wait: 429.
	ReasonTurn
	// ReasonQueue means that as many requests wait as WithDelay lets: 503.
	ReasonQueue
	// ReasonGone means that its context ended while it waited for its turn, or would have: 503.
	ReasonGone
	// ReasonMissing means that it has no key: WithMissingStatus.
	ReasonMissing
	// ReasonError means that the limiter returned an error: WithErrorStatus.
	ReasonError
)

// String is the reason in a word, for logs and metric labels.
func (r Reason) String() string {
	switch r {
	case ReasonLimit:
		return "limit"
	case ReasonTurn:
		return "turn"
	case ReasonQueue:
		return "queue"
	case ReasonGone:
		return "gone"
	case ReasonMissing:
		return "missing"
	case ReasonError:
		return "error"
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}

// A Denial is a request that is refused.
type Denial struct {
	Reason Reason
	Status int              // what to answer
	Result tierlimit.Result // zero for ReasonMissing and ReasonError
	Err    error            // for ReasonError and ReasonGone
}

// Stats counts requests since the Middleware was made; Refunded and RefundsLost count tokens, and Waiting is a gauge. Each request is in one of Allowed,
// Denied, TurnTooLate, QueueFull, GivenUp, Errors and Skipped, but for one without a key that was refused or let pass for that.
type Stats struct {
	Allowed     int64 // passed on after a check, Held among them
	Denied      int64 // refused by the limiter: ReasonLimit
	MissingKeys int64 // without a key, whatever the policy did with them
	Skipped     int64 // exempt by WithSkip, or at no cost by WithCost
	Errors      int64 // refused for an error of the limiter: ReasonError
	Held        int64 // held for an even flow and then passed on
	TurnTooLate int64 // ReasonTurn
	QueueFull   int64 // ReasonQueue
	GivenUp     int64 // ReasonGone
	Refunded    int64 // given back by handlers, and for requests that did not go on; lost all the same where Redis is out of reach, of which Limiter.Refund has no error
	RefundsLost int64 // not given back, since the Limiter returned an error
	Waiting     int64 // now
}

// New returns a Middleware that counts requests by key against l. All faults are reported together, each wrapping tierlimit.ErrConfig: a nil l,
// key or option, an option out of range or without effect, and those of the Key.
func New(l *tierlimit.Limiter, key Key, opts ...Option) (*Middleware, error) {
	var faults []error
	if l == nil {
		faults = append(faults, configFault("the Limiter is nil"))
	}
	faults = append(faults, keyFaults(key)...)
	cfg := defaults()
	for _, o := range opts {
		if o == nil {
			faults = append(faults, configFault("a nil Option"))
			continue
		}
		o.apply(&cfg)
	}
	if err := errors.Join(append(faults, cfg.faults(l)...)...); err != nil {
		return nil, err
	}
	m := &Middleware{limiter: l, key: key, cfg: cfg, headers: newHeaders(l, &cfg)}
	if !cfg.noBody {
		for reason := ReasonLimit; reason <= ReasonError; reason++ {
			m.bodies[reason].text = problem(reason, m.status(reason), l.Name())
		}
	}
	for i := range m.bodies {
		m.bodies[i].length = strconv.Itoa(len(m.bodies[i].text))
	}
	return m, nil
}

// Handler is the middleware itself, as routers take it: a handler that passes what is admitted on to next. A nil next is
// http.DefaultServeMux, as in http.Server.
//
// The request that next gets carries a Charge in its context. RateLimit-Policy and RateLimit are set before next is called, for it to change
// if it wants; the ResponseWriter is passed on as it came.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	if next == nil {
		next = http.DefaultServeMux
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
}

// Stats is a snapshot; each figure is read on its own.
func (m *Middleware) Stats() Stats {
	return Stats{
		Allowed:     m.allowed.Load(),
		Denied:      m.denied.Load(),
		MissingKeys: m.missing.Load(),
		Skipped:     m.skipped.Load(),
		Errors:      m.failed.Load(),
		Held:        m.held.Load(),
		TurnTooLate: m.turnTooLate.Load(),
		QueueFull:   m.queueFull.Load(),
		GivenUp:     m.givenUp.Load(),
		Refunded:    m.refunded.Load(),
		RefundsLost: m.refundsLost.Load(),
		Waiting:     m.waiting.Load(),
	}
}

func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	cost, skip := m.costOf(r)
	if skip {
		m.skipped.Add(1)
		next.ServeHTTP(w, r)
		return
	}
	key, ok := m.key.Of(r)
	if !ok || key == "" {
		m.missing.Add(1)
		switch m.cfg.missing {
		case MissingAllow:
			next.ServeHTTP(w, r)
			return
		case MissingDeny:
			m.refuse(w, r, Denial{Reason: ReasonMissing}, 0)
			return
		}
		key = "" // which is no request's own
	}
	ctx := r.Context()
	result, err := m.limiter.AllowN(ctx, key, cost)
	if err != nil {
		m.failed.Add(1)
		m.refuse(w, r, Denial{Reason: ReasonError, Err: err}, 0)
		return
	}
	if !result.Allowed {
		m.denied.Add(1)
		m.deny(w, r, key, Denial{Reason: ReasonLimit, Result: result}, result.RetryAfter)
		return
	}
	if result.Shadowed {
		cost = 0 // a denial that passes spends nothing
	}
	s := &scope{Context: ctx, charge: Charge{m: m, key: key, cost: cost, result: result, outer: FromContext(ctx)}}
	if m.cfg.delay && result.Delay > 0 {
		reason, err := m.hold(ctx, result.Delay)
		if reason != 0 {
			m.giveBack(&s.charge)
			// Tokens may be there, but none that would let this client pass now.
			result.Allowed, result.Remaining = false, 0
			wait := result.Delay
			if reason == ReasonTurn {
				wait -= m.cfg.maxWait
			}
			m.deny(w, r, key, Denial{Reason: reason, Result: result, Err: err}, wait)
			return
		}
		result.ResetAfter = max(0, result.ResetAfter-result.Delay)
	}
	m.allowed.Add(1)
	m.headers.set(w.Header(), key, &result, 0)
	next.ServeHTTP(w, r.WithContext(s))
}

// costOf is what r costs; skip says that nobody is to be asked.
func (m *Middleware) costOf(r *http.Request) (cost int64, skip bool) {
	for _, skip := range m.cfg.skip {
		if skip(r) {
			return 0, true
		}
	}
	if m.cfg.cost == nil {
		return 1, false
	}
	cost = m.cfg.cost(r)
	return cost, cost == 0
}

// hold waits for a request's turn, or says why it cannot.
func (m *Middleware) hold(ctx context.Context, d time.Duration) (Reason, error) {
	if d > m.cfg.maxWait {
		m.turnTooLate.Add(1)
		return ReasonTurn, nil
	}
	if m.waiting.Add(1) > int64(m.cfg.maxWaiting) {
		m.waiting.Add(-1)
		m.queueFull.Add(1)
		return ReasonQueue, nil
	}
	defer m.waiting.Add(-1)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < d {
		m.givenUp.Add(1)
		return ReasonGone, context.DeadlineExceeded
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		m.held.Add(1)
		return 0, nil
	case <-ctx.Done():
		m.givenUp.Add(1)
		return ReasonGone, context.Cause(ctx)
	}
}

// giveBack refunds a request that does not go on, before it is refused: at once for a leased token, else by one exchange. Its client may be
// gone, and the server is not to wait longer than a second.
func (m *Middleware) giveBack(c *Charge) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.Refund(ctx, c.cost)
}

// deny refuses a request that was checked, and says when to try again: in wait, which may be Never.
func (m *Middleware) deny(w http.ResponseWriter, r *http.Request, key string, d Denial, wait time.Duration) {
	seconds := retryAfter(wait)
	m.headers.set(w.Header(), key, &d.Result, seconds)
	m.refuse(w, r, d, seconds)
}

// refuse answers a request that does not pass. seconds is what Retry-After says, 0 for none.
func (m *Middleware) refuse(w http.ResponseWriter, r *http.Request, d Denial, seconds int64) {
	d.Status = m.status(d.Reason)
	if seconds > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(seconds, 10))
	}
	if m.cfg.deny != nil {
		m.cfg.deny(w, r, d)
		return
	}
	b := m.bodies[d.Reason]
	if b.text != nil {
		w.Header().Set("Content-Type", "application/problem+json")
	}
	w.Header().Set("Content-Length", b.length)
	w.WriteHeader(d.Status)
	_, _ = w.Write(b.text) // nobody is left to tell
}

func (m *Middleware) status(reason Reason) int {
	switch reason {
	case ReasonLimit, ReasonTurn:
		return http.StatusTooManyRequests
	case ReasonMissing:
		return m.cfg.missingStatus
	case ReasonError:
		return m.cfg.errorStatus
	}
	return http.StatusServiceUnavailable
}

// problem is the body of a refusal (RFC 9457). It tells the reason and the limiter's name, and nothing of the request.
func problem(reason Reason, status int, limiter string) []byte {
	p := struct {
		Type     string   `json:"type"`
		Title    string   `json:"title"`
		Status   int      `json:"status"`
		Violated []string `json:"violated-policies,omitempty"`
	}{Type: "about:blank", Title: cmp.Or(http.StatusText(status), "The request is refused"), Status: status}
	switch reason {
	case ReasonLimit, ReasonTurn:
		p.Type, p.Title, p.Violated = problemTypes+"quota-exceeded", "The rate limit is exceeded", []string{limiter}
	case ReasonQueue:
		p.Type, p.Title, p.Violated = problemTypes+"temporary-reduced-capacity", "Too many requests wait already", []string{limiter}
	}
	body, err := json.Marshal(p)
	if err != nil { // strings and a number: it cannot be
		return nil
	}
	return append(body, '\n')
}

// problemTypes is where the problem types of draft-ietf-httpapi-ratelimit-headers are registered.
const problemTypes = "https://iana.org/assignments/http-problem-types#"
