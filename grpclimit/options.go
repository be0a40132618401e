package grpclimit

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
)

// An Option configures an Interceptor. Of one that is given twice the later holds, save for the two that skip: those add up.
type Option interface{ apply(*config) }

type option func(*config)

func (f option) apply(c *config) { f(c) }

// MissingKey says what happens to a call that has no key. Stats counts it whichever it is.
type MissingKey uint8

const (
	// MissingDeny ends the call with ResourceExhausted and no RetryInfo: another try would have no key either. The default.
	MissingDeny MissingKey = iota + 1
	// MissingCommon counts all of them as one key, which no other call has.
	MissingCommon
	// MissingAllow lets it pass, uncounted by any Limiter. Whoever can leave the key out has no limit.
	MissingAllow
)

// String is the policy's name.
func (m MissingKey) String() string {
	switch m {
	case MissingDeny:
		return "deny"
	case MissingCommon:
		return "common"
	case MissingAllow:
		return "allow"
	}
	return fmt.Sprintf("MissingKey(%d)", uint8(m))
}

// Moment is a set of points of a call at which it can be counted.
type Moment uint8

const (
	// Opening is a unary call as a whole, or the opening of a stream.
	Opening Moment = 1 << iota
	// Received is each message that this side of a stream receives.
	Received
	// Sent is each message that this side of a stream sends.
	Sent
)

const allMoments = Opening | Received | Sent

type config struct {
	missing   MissingKey
	cost      func(context.Context, Call) int64
	skip      []func(context.Context, Call) bool
	unlimited table[struct{}]
	skipped   []string // the patterns of unlimited
	streams   Moment
	wait      Moment
	refundOn  map[codes.Code]bool
	headers   bool
	pushback  bool

	wrong []string // faults of options, in the order they were given
}

// defaults is the one place where defaults live.
func defaults() config {
	return config{missing: MissingDeny, streams: Opening}
}

func (c *config) fault(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// faults is what is wrong with c, each a sentence without its end.
func (c *config) faults() []string {
	out := c.wrong
	if c.missing < MissingDeny || c.missing > MissingAllow {
		out = append(out, fmt.Sprintf("unknown MissingKey %d", uint8(c.missing)))
	}
	if c.streams == 0 || c.streams&^allMoments != 0 {
		out = append(out, fmt.Sprintf("WithStreams(%d), want one or more of Opening, Received and Sent", c.streams))
	}
	if c.wait&^allMoments != 0 {
		out = append(out, fmt.Sprintf("WithWait(%d), want some of Opening, Received and Sent", c.wait))
	} else if c.wait&^(c.streams|Opening) != 0 {
		out = append(out, "WithWait names messages that WithStreams does not count")
	}
	return out
}

// WithMissingKey sets what happens to a call without a key; default MissingDeny. Stats counts them under each policy.
func WithMissingKey(m MissingKey) Option { return option(func(c *config) { c.missing = m }) }

// WithCost sets what a call, or a message of a stream, costs in tokens; default 1. 0 passes, and asks neither Key nor Limiter; a cost above the
// capacity is denied for good, without RetryInfo; a negative one ends the call with the code Internal. It is called by many goroutines at
// once. Bound what a caller can make of it: a request that names its own cost can use up a limit in one call.
func WithCost(cost func(ctx context.Context, c Call) int64) Option {
	return option(func(c *config) {
		if cost == nil {
			c.fault("the function of WithCost is nil")
		}
		c.cost = cost
	})
}

// WithSkip lets calls pass uncounted for which skip returns true. It is asked once for each call, before the key, by many goroutines at
// once; of a stream at its opening, for all its messages.
func WithSkip(skip func(ctx context.Context, c Call) bool) Option {
	return option(func(c *config) {
		if skip == nil {
			c.fault("the function of WithSkip is nil")
			return
		}
		c.skip = append(c.skip, skip)
	})
}

// WithSkipMethods lets calls of these methods pass uncounted, whatever limits there are for them. Patterns are those of Limits. Nothing
// is skipped by default: health checks and reflection are the usual ones, "/grpc.health.v1.Health/*" and
// "/grpc.reflection.v1.ServerReflection/*".
func WithSkipMethods(patterns ...string) Option {
	return option(func(c *config) {
		if len(patterns) == 0 {
			c.fault("WithSkipMethods without a pattern")
		}
		c.skipped = append(c.skipped, patterns...)
		for _, p := range patterns {
			if wrong := c.unlimited.add(p, struct{}{}); wrong != "" {
				c.fault("WithSkipMethods: %s", wrong)
			}
		}
	})
}

// WithStreams sets at which moments streams are counted, each moment as a call of its own with its own key and cost. Default: Opening. A
// unary call is counted once, whatever is set here.
//
// A message above its limit ends the stream: receiving or sending it, and all that is tried afterwards, returns the denial; on a
// server the denial is the stream's status, whatever the handler returns. A received message is counted once it is there, so that
// its cost and key are known: the connection's flow control, not the limit, bounds what a peer can send ahead.
func WithStreams(at Moment) Option { return option(func(c *config) { c.streams = at }) }

// WithWait waits at these moments until the limit allows, instead of denying at once: for as long as the call's context allows.
// Where its deadline is before the moment the call could pass, the call ends with DeadlineExceeded at once. Default: never.
//
// It is meant for clients, and for messages of streams, which it paces. A server that waits at openings holds a goroutine and a request
// for each caller that waits, for as long as that caller likes; with a leaky bucket the wait makes the flow even. A call that waits has no
// headers (WithHeaders).
func WithWait(at Moment) Option { return option(func(c *config) { c.wait = at }) }

// WithRefundOn gives what a call cost back when it ends with one of these codes: what failed through no fault of the caller
// (codes.Unavailable, codes.Internal) then costs nothing. Of a stream only the opening is given back. OK and values that are no code are
// faults that New lists.
//
// The refund comes before the answer: of tokens that this process has leased at once, else as Limiter.Refund says, which may wait for Redis.
// Stats counts those that are lost.
func WithRefundOn(failed ...codes.Code) Option {
	return option(func(c *config) {
		if len(failed) == 0 {
			c.fault("WithRefundOn without a code")
		}
		c.refundOn = map[codes.Code]bool{}
		for _, code := range failed {
			if code == codes.OK || code > codes.Unauthenticated {
				c.fault("WithRefundOn(%d): want a code that says a call failed", code)
			}
			c.refundOn[code] = true
		}
	})
}

// WithHeaders lets a server tell how the caller stands, in the header metadata of unary calls and openings of streams: ratelimit-policy and
// ratelimit, the fields of draft-ietf-httpapi-ratelimit-headers with the values that httplimit sends. Of several Interceptors in a chain each
// adds its own. Of an unlimited Limiter there are none. Default: off, since it tells callers the limits.
func WithHeaders() Option { return option(func(c *config) { c.headers = true }) }

// WithPushback lets a server tell the retries that are built into gRPC clients when to try again: the trailer grpc-retry-pushback-ms with
// the time of the RetryInfo in milliseconds, rounded up, or -1, which ends the retries, where a denied call can never pass. Clients
// retry a denied call only if their service config lists RESOURCE_EXHAUSTED. Default: off.
func WithPushback() Option { return option(func(c *config) { c.pushback = true }) }
