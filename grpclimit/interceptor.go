package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/tierlimit/tierlimit"
)

// Limits says which Limiter is for which methods: "/pkg.Service/Method" for one, "/pkg.Service/*" for a service, "*" for all. The most
// specific one holds, alone. A method that none fits is not limited. One Limiter may stand under several patterns, which then share
// its counts, as far as their keys are the same.
type Limits map[string]*tierlimit.Limiter

// An Interceptor limits calls. Its four methods return the interceptors for servers and clients; all count together, and use the same
// Limiters. Safe for concurrent use. It holds nothing that has to be closed.
type Interceptor struct {
	cfg   config
	key   Key
	rules table[*rule]

	patterns map[string]bool // of the limits and of what is skipped, for CheckServer

	allowed, denied, missing, unlimited, failed atomic.Int64 // moments
	refunded, refundsLost                       atomic.Int64 // tokens
}

// New returns an Interceptor that counts calls by key under limits. Every fault (no limits, a pattern of another form, a nil
// Limiter or Key, an option out of range) is listed in one error that wraps tierlimit.ErrConfig; nothing panics.
func New(limits Limits, key Key, opts ...Option) (*Interceptor, error) {
	i := &Interceptor{cfg: defaults(), key: key, patterns: map[string]bool{}}
	var wrong []string
	if len(limits) == 0 {
		wrong = append(wrong, "no limits")
	}
	for _, pattern := range slices.Sorted(maps.Keys(limits)) {
		l := limits[pattern]
		if l == nil {
			wrong = append(wrong, fmt.Sprintf("the Limiter of %q is nil", pattern))
			continue
		}
		if w := i.rules.add(pattern, newRule(l)); w != "" {
			wrong = append(wrong, w)
		}
		i.patterns[pattern] = true
	}
	wrong = append(wrong, keyFaults(key)...)
	for _, o := range opts {
		if o == nil {
			wrong = append(wrong, "an Option is nil")
			continue
		}
		o.apply(&i.cfg)
	}
	wrong = append(wrong, i.cfg.faults()...)
	for _, pattern := range i.cfg.skipped {
		i.patterns[pattern] = true
	}
	if len(wrong) > 0 {
		faults := make([]error, len(wrong))
		for n, w := range wrong {
			faults[n] = fmt.Errorf("%w: grpclimit: %s", tierlimit.ErrConfig, w)
		}
		return nil, errors.Join(faults...)
	}
	return i, nil
}

// CheckServer returns an error that wraps tierlimit.ErrConfig and lists each pattern of Limits and WithSkipMethods that fits no method of s: a
// name misspelt is a method not limited. Call it when all services are registered; s is a *grpc.Server, or what stands in for one. A nil s
// has no methods.
func (i *Interceptor) CheckServer(s interface {
	GetServiceInfo() map[string]grpc.ServiceInfo
}) error {
	var info map[string]grpc.ServiceInfo
	if server, ok := s.(*grpc.Server); s != nil && (!ok || server != nil) {
		info = s.GetServiceInfo()
	}
	methods := map[string]bool{}
	for service, of := range info {
		for _, m := range of.Methods {
			methods[service+"/"+m.Name] = true
		}
	}
	var faults []error
	for _, pattern := range slices.Sorted(maps.Keys(i.patterns)) {
		name := strings.TrimPrefix(pattern, "/")
		service, whole := strings.CutSuffix(name, "/*")
		if _, found := info[service]; pattern != "*" && !(whole && found) && !methods[name] {
			faults = append(faults, fmt.Errorf("%w: grpclimit: the server has no method that %q fits", tierlimit.ErrConfig, pattern))
		}
	}
	return errors.Join(faults...)
}

// Stats counts moments: unary calls, openings of streams, and messages where WithStreams counts them. Each is in one of Allowed,
// Denied, Unlimited and Errors. Refunded and RefundsLost count tokens, as Limiter.Stats does.
type Stats struct {
	Allowed   int64 // passed by a Limiter
	Denied    int64 // above a limit, or without a key under MissingDeny
	Unlimited int64 // passed without asking a Limiter: no pattern fits, skipped, cost 0, or without a key under MissingAllow
	Errors    int64 // ended since a Limiter returned an error: closed, the context done, a negative cost

	MissingKeys int64 // had no key, whatever became of them; among the above
	Refunded    int64 // tokens given back; lost all the same where Redis is out of reach, of which Limiter.Refund has no error
	RefundsLost int64 // tokens not given back, since the Limiter returned an error
}

// Stats returns a snapshot.
func (i *Interceptor) Stats() Stats {
	return Stats{
		Allowed: i.allowed.Load(), Denied: i.denied.Load(), Unlimited: i.unlimited.Load(), Errors: i.failed.Load(),
		MissingKeys: i.missing.Load(), Refunded: i.refunded.Load(), RefundsLost: i.refundsLost.Load(),
	}
}

// named is c with the method in its one form.
func named(c Call) Call {
	if !strings.HasPrefix(c.FullMethod, "/") {
		c.FullMethod = "/" + c.FullMethod
	}
	return c
}

// ruleFor is the rule for a call, nil where nothing limits it.
func (i *Interceptor) ruleFor(ctx context.Context, c Call) *rule {
	r, ok := i.rules.find(c.FullMethod)
	if !ok {
		return nil
	}
	if _, skipped := i.cfg.unlimited.find(c.FullMethod); skipped {
		return nil
	}
	for _, skip := range i.cfg.skip {
		if skip(ctx, c) {
			return nil
		}
	}
	return r
}

// A charge is what a moment cost whom; the zero one is nothing.
type charge struct {
	limiter *tierlimit.Limiter
	key     string // set where the Limiter was asked, also for a denial
	n       int64
}

// ask decides one moment of c. A nil rule lets it pass. The Result is zero where the Limiter gave none. The error is a *refusal.
func (i *Interceptor) ask(ctx context.Context, r *rule, c Call, at Moment) (charge, tierlimit.Result, error) {
	n := int64(1)
	if r != nil && i.cfg.cost != nil {
		n = i.cfg.cost(ctx, c)
	}
	if r == nil || n == 0 {
		i.unlimited.Add(1)
		return charge{}, tierlimit.Result{}, nil
	}
	key, ok := i.key.Of(ctx, c)
	if !ok || key == "" {
		i.missing.Add(1)
		switch i.cfg.missing {
		case MissingAllow:
			i.unlimited.Add(1)
			return charge{}, tierlimit.Result{}, nil
		case MissingCommon:
			key = "" // which is no call's own
		default:
			i.denied.Add(1)
			return charge{}, tierlimit.Result{}, r.withoutKey()
		}
	}
	var res tierlimit.Result
	var err error
	if i.cfg.wait&at != 0 {
		err = r.limiter.WaitN(ctx, key, n)
	} else {
		res, err = r.limiter.AllowN(ctx, key, n)
		if err == nil && !res.Allowed {
			i.denied.Add(1)
			return charge{key: key}, res, r.denied(res.RetryAfter)
		}
	}
	switch {
	case errors.Is(err, tierlimit.ErrNever):
		i.denied.Add(1)
		return charge{}, tierlimit.Result{}, r.denied(tierlimit.Never)
	case err != nil:
		i.failed.Add(1)
		return charge{}, tierlimit.Result{}, failure(err)
	}
	i.allowed.Add(1)
	if res.Shadowed {
		n = 0 // a denial that passes spends nothing
	}
	return charge{r.limiter, key, n}, res, nil
}

// giveBack refunds ch.
func (i *Interceptor) giveBack(ctx context.Context, ch charge) error {
	if err := ch.limiter.Refund(ctx, ch.key, ch.n); err != nil {
		i.refundsLost.Add(ch.n)
		return err
	}
	i.refunded.Add(ch.n)
	return nil
}

// refundable says whether a call that ended with err is to cost nothing.
func (i *Interceptor) refundable(err error) bool {
	if err == nil || i.cfg.refundOn == nil {
		return false
	}
	code := status.Code(err)
	if _, ok := status.FromError(err); !ok {
		code = status.FromContextError(err).Code() // as the server makes a status of what a handler returned
	}
	return i.cfg.refundOn[code]
}
