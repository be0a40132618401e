package httplimit

import (
	"fmt"
	"net/http"
	"time"

	"github.com/tierlimit/tierlimit"
)

// An Option configures a Middleware. Of one that is given twice the later holds, but for WithSkip: those add up.
type Option interface{ apply(*config) }

type option func(*config)

func (f option) apply(c *config) { f(c) }

// MissingKey says what happens to a request that has no key.
type MissingKey uint8

const (
	// MissingDeny refuses it, with WithMissingStatus. The default: whoever leaves the key out gains nothing, and a middleware that stands
	// where it finds no keys shows at the first request.
	MissingDeny MissingKey = iota + 1
	// MissingCommon counts all of them as one key, which no other request has.
	MissingCommon
	// MissingAllow lets it pass without a check. Whoever can leave the key out has no limit.
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

type config struct {
	cost          func(*http.Request) int64
	skip          []func(*http.Request) bool
	deny          func(http.ResponseWriter, *http.Request, Denial)
	missing       MissingKey
	missingStatus int
	missingSet    bool // by WithMissingStatus
	errorStatus   int
	noBody        bool
	noHeaders     bool
	legacy        bool
	unit          string
	secret        []byte
	keyed         bool // by WithPartitionKey
	delay         bool // by WithDelay
	maxWaiting    int
	maxWait       time.Duration
	wrong         []error
}

const (
	minSecret = 16
	maxUnit   = 64
	maxWait   = time.Hour
)

// defaults is the one place where defaults live.
func defaults() config {
	return config{missing: MissingDeny, missingStatus: http.StatusBadRequest, errorStatus: http.StatusServiceUnavailable}
}

// faults returns every fault of c, each wrapping tierlimit.ErrConfig.
func (c *config) faults(l *tierlimit.Limiter) []error {
	faults := c.wrong
	fault := func(format string, args ...any) { faults = append(faults, configFault(format, args...)) }
	if c.missing < MissingDeny || c.missing > MissingAllow {
		fault("unknown MissingKey %d", uint8(c.missing))
	}
	if c.missingStatus < 400 || c.missingStatus > 599 {
		fault("WithMissingStatus is %d, want 400 to 599", c.missingStatus)
	}
	if c.missingSet && c.missing != MissingDeny {
		fault("WithMissingStatus is never sent under the policy %v", c.missing)
	}
	if c.errorStatus < 400 || c.errorStatus > 599 {
		fault("WithErrorStatus is %d, want 400 to 599", c.errorStatus)
	}
	if c.noBody && c.deny != nil {
		fault("WithoutBody leaves WithDenyHandler nothing to write")
	}
	if c.noHeaders && (c.unit != "" || c.keyed) {
		fault("WithoutHeaders leaves WithQuotaUnit and WithPartitionKey no header to be in")
	}
	if c.keyed && len(c.secret) < minSecret {
		fault("WithPartitionKey has a secret of %d bytes, want at least %d", len(c.secret), minSecret)
	}
	if c.delay {
		if c.maxWaiting < 1 {
			fault("WithDelay lets %d requests wait, want at least 1", c.maxWaiting)
		}
		if c.maxWait < time.Millisecond || c.maxWait > maxWait {
			fault("WithDelay lets a request wait %v, want %v to %v", c.maxWait, time.Millisecond, maxWait)
		}
		if l != nil && l.Limit().Algorithm != tierlimit.AlgorithmLeakyBucket {
			fault("WithDelay needs a leaky bucket; limiter %q is a %v", l.Name(), l.Limit().Algorithm)
		}
	}
	return faults
}

// WithCost sets what a request costs, in tokens; the default is 1. With 0 it passes, and neither the Key nor the limiter is asked; more than
// the capacity never passes. A negative cost is an error of the limiter, see WithErrorStatus. f must be safe for
// concurrent use; it must not read the body, which the handler would miss. A nil f is ErrConfig.
func WithCost(f func(r *http.Request) int64) Option {
	return option(func(c *config) {
		if c.cost = f; f == nil {
			c.wrong = append(c.wrong, configFault("WithCost is nil"))
		}
	})
}

// WithSkip exempts the requests for which f is true: they pass without a key, a check or a header. Given several times, each exempts its
// own. f must be safe for concurrent use; a nil f is ErrConfig.
func WithSkip(f func(r *http.Request) bool) Option {
	return option(func(c *config) {
		if f == nil {
			c.wrong = append(c.wrong, configFault("WithSkip is nil"))
			return
		}
		c.skip = append(c.skip, f)
	})
}

// WithMissingKey sets what happens to a request without a key; default MissingDeny. Stats counts them under each policy.
func WithMissingKey(p MissingKey) Option { return option(func(c *config) { c.missing = p }) }

// WithMissingStatus sets what MissingDeny answers, 400 to 599; default 400: to send the same request again would not help, which is what 429
// asks for.
func WithMissingStatus(status int) Option {
	return option(func(c *config) { c.missingStatus, c.missingSet = status, true })
}

// WithErrorStatus sets what is answered where the limiter returns an error, 400 to 599; default 503. Those are a limiter that is closed,
// a context that ended while Redis was asked, and a negative cost. A request is never let pass for an error; a Redis that is down is none
// (tierlimit.WithFallback).
func WithErrorStatus(status int) Option { return option(func(c *config) { c.errorStatus = status }) }

// WithDenyHandler sets what writes the answer to each request that is refused, for whatever Reason. The headers are set by then, Retry-After
// too; f writes Denial.Status, or another one, and a body. It must be safe for concurrent use. A nil f is ErrConfig, and so is WithoutBody
// besides.
func WithDenyHandler(f func(w http.ResponseWriter, r *http.Request, d Denial)) Option {
	return option(func(c *config) {
		if c.deny = f; f == nil {
			c.wrong = append(c.wrong, configFault("WithDenyHandler is nil"))
		}
	})
}

// WithoutBody leaves the problem body (RFC 9457) of refused requests out.
func WithoutBody() Option { return option(func(c *config) { c.noBody = true }) }

// WithoutHeaders leaves RateLimit-Policy and RateLimit out, so that clients do not learn the limit. Retry-After stays.
func WithoutHeaders() Option { return option(func(c *config) { c.noHeaders = true }) }

// WithLegacyHeaders adds X-RateLimit-Limit, X-RateLimit-Remaining and X-RateLimit-Reset: when the key will be full, and in a denial when to
// try again, in seconds since 1970, which is how most clients of these headers read it. Of several limiters in a row the innermost is told.
func WithLegacyHeaders() Option { return option(func(c *config) { c.legacy = true }) }

// WithQuotaUnit names what a token is, for the parameter qu of RateLimit-Policy: 1 to 64 printable ASCII characters, as "content-bytes"
// where WithCost counts bytes. Without it clients assume requests.
func WithQuotaUnit(unit string) Option {
	return option(func(c *config) {
		c.unit = unit
		if len(unit) < 1 || len(unit) > maxUnit || !printable(unit) {
			c.wrong = append(c.wrong, configFault("WithQuotaUnit %.80q, want 1 to %d printable ASCII characters", unit, maxUnit))
		}
	})
}

// WithPartitionKey adds the parameter pk to both headers, so that a client that is counted under several keys can tell them apart: 16 bytes
// of HMAC-SHA256 of the limiter's name and the key. It says nothing about the key to whoever does not have the secret, at least 16 random
// bytes, the same on all instances. Costs about a microsecond and one allocation more.
func WithPartitionKey(secret []byte) Option {
	return option(func(c *config) { c.secret, c.keyed = append([]byte(nil), secret...), true })
}

// WithDelay holds an admitted request for Result.Delay, so that requests leave the leaky bucket at an even pace. At most maxWaiting wait at
// a time, in this Middleware, 1 or more; one that finds them all there is refused with 503. None waits longer than the given time, 1ms to 1h:
// one that the bucket has no room for is refused with 429 at once; one whose turn comes later is refused with 429 once its place is given
// back: at once for a leased token, else one exchange, a second at most, in which it does not count as waiting. A request whose context ends,
// or would end before its turn, is refused with 503, its place given back likewise. For a limiter with another algorithm it is ErrConfig.
func WithDelay(maxWaiting int, maxWait time.Duration) Option {
	return option(func(c *config) { c.delay, c.maxWaiting, c.maxWait = true, maxWaiting, maxWait })
}
