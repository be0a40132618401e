package tierlimit

import (
	"fmt"
	"math"
	"runtime"
	"time"

	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit/breaker"
)

// An Option configures a Hybrid. Options that are also LimiterOptions set the default of all its limiters.
type Option interface{ apply(*config) }

// A LimiterOption configures one Limiter, or, given to New, all of them.
type LimiterOption interface {
	Option
	applyLimiter(*limiterConfig)
}

// FallbackPolicy says what an instance does with a check that Redis should decide while Redis is out of reach.
type FallbackPolicy uint8

const (
	// FallbackShare admits the instance's outage share, starting empty after Bound().Silence, so that the fleet
	// stays within the limit. The default.
	FallbackShare FallbackPolicy = iota + 1
	// FallbackShareNow starts the share at once; Bound().Outage states what that may admit above the limit.
	FallbackShareNow
	// FallbackOpen admits everything that neither a lease in hand nor a denial kept from before decides.
	FallbackOpen
	// FallbackClosed denies everything that no lease in hand decides.
	FallbackClosed
)

// String returns the policy's name.
func (p FallbackPolicy) String() string {
	switch p {
	case FallbackShare:
		return "share"
	case FallbackShareNow:
		return "share-now"
	case FallbackOpen:
		return "open"
	case FallbackClosed:
		return "closed"
	}
	return fmt.Sprintf("FallbackPolicy(%d)", uint8(p))
}

// ColdStart says how a key is treated that this instance holds nothing of.
type ColdStart int64

// ColdWait lets the caller of a cold key wait for Redis, at most WithRemoteTimeout. The default; exact.
const ColdWait ColdStart = 0

// ColdAdmit admits up to n tokens of a cold key at once, without waiting, and charges them to Redis afterwards, as far as
// tokens are left. It overshoots by up to n for each instance each time a key is cold on it: at first, and again whenever it
// was evicted (WithMaxKeys) or forgotten as idle. Bound().Overshoot states it for one such time. n < 1 is ErrConfig.
func ColdAdmit(n int64) ColdStart {
	if n < 1 {
		return -1
	}
	return ColdStart(n)
}

type limiterConfig struct {
	localShare float64
	leaseTTL   time.Duration
	coldStart  ColdStart
	fallback   FallbackPolicy
	shadow     bool
}

type config struct {
	limiterConfig
	log           *zap.Logger
	prefix        string
	remoteTimeout time.Duration
	syncInterval  time.Duration
	heartbeat     time.Duration
	breaker       breaker.Settings
	shards        int
	maxKeys       int
	instances     int
	fixed         bool // by WithInstances
	instanceID    string
	observer      Observer
}

// defaults is the one place where defaults live.
func defaults() config {
	return config{
		limiterConfig: limiterConfig{
			localShare: 0.1,
			leaseTTL:   time.Second,
			coldStart:  ColdWait,
			fallback:   FallbackShare,
		},
		log:           zap.NewNop(),
		prefix:        "tierlimit:",
		remoteTimeout: 50 * time.Millisecond,
		syncInterval:  50 * time.Millisecond,
		heartbeat:     time.Second,
		shards:        nextPowerOfTwo(8 * runtime.GOMAXPROCS(0)),
		maxKeys:       1 << 20,
	}
}

const (
	minInterval  = time.Millisecond
	maxInterval  = time.Minute
	maxShards    = 1 << 16
	maxPrefix    = 256
	maxInstances = 1 << 20
)

// faults returns every fault of c, each wrapping ErrConfig.
func (c *config) faults() []error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...))
	}
	interval := func(name string, d time.Duration) {
		if d < minInterval || d > maxInterval {
			fault("%s is %v, want %v to %v", name, d, minInterval, maxInterval)
		}
	}
	interval("WithRemoteTimeout", c.remoteTimeout)
	interval("WithSyncInterval", c.syncInterval)
	interval("WithHeartbeat", c.heartbeat)
	if c.heartbeat < c.syncInterval {
		fault("WithHeartbeat is %v, shorter than the sync interval of %v", c.heartbeat, c.syncInterval)
	}
	if c.heartbeat < c.remoteTimeout {
		fault("WithHeartbeat is %v, shorter than the remote timeout of %v", c.heartbeat, c.remoteTimeout)
	}
	if c.log == nil {
		fault("WithLogger is nil")
	}
	if len(c.prefix) > maxPrefix {
		fault("WithPrefix has %d bytes, want at most %d", len(c.prefix), maxPrefix)
	}
	for i := range len(c.prefix) {
		if c.prefix[i] == '{' || c.prefix[i] == '}' {
			fault("WithPrefix has a brace at byte %d: braces decide where a Redis Cluster keeps a key", i)
			break
		}
	}
	if c.shards < 1 || c.shards > maxShards {
		fault("WithShards is %d, want 1 to %d", c.shards, maxShards)
	}
	if c.maxKeys < 1 {
		fault("WithMaxKeys is %d, want at least 1", c.maxKeys)
	}
	if c.fixed && c.instances < 1 || c.instances > maxInstances {
		fault("WithInstances is %d, want 1 to %d", c.instances, maxInstances)
	}
	if err := c.breaker.Validate(); err != nil {
		fault("WithBreaker: %v", err)
	}
	return append(faults, c.limiterConfig.faults(c.syncInterval)...)
}

func (c *limiterConfig) faults(syncInterval time.Duration) []error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...))
	}
	if math.IsNaN(c.localShare) || c.localShare < 0 || c.localShare > 1 {
		fault("WithLocalShare is %v, want 0 to 1", c.localShare)
	}
	if c.leaseTTL < minInterval || c.leaseTTL > maxInterval {
		fault("WithLeaseTTL is %v, want %v to %v", c.leaseTTL, minInterval, maxInterval)
	} else if c.leaseTTL < syncInterval {
		fault("WithLeaseTTL is %v, shorter than the sync interval of %v: leases would burn unreported", c.leaseTTL, syncInterval)
	}
	if c.coldStart < 0 {
		fault("ColdAdmit needs at least 1 token")
	}
	if c.fallback < FallbackShare || c.fallback > FallbackClosed {
		fault("unknown FallbackPolicy %d", uint8(c.fallback))
	}
	return faults
}

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

type limiterOptionFunc func(*limiterConfig)

func (f limiterOptionFunc) apply(c *config)               { f(&c.limiterConfig) }
func (f limiterOptionFunc) applyLimiter(c *limiterConfig) { f(c) }

// WithLogger sets where state changes are logged; the default logs nothing, and nil is ErrConfig (zap.NewNop logs nothing). Keys are never
// logged. It is called without a lock held, by the loop that talks to Redis, which it holds up while it writes.
func WithLogger(log *zap.Logger) Option { return optionFunc(func(c *config) { c.log = log }) }

// WithPrefix sets what all Redis keys begin with; default "tierlimit:", at most 256 bytes without braces. Instances
// that share a prefix (and a Redis) are one fleet.
func WithPrefix(prefix string) Option { return optionFunc(func(c *config) { c.prefix = prefix }) }

// WithRemoteTimeout sets the most a caller waits for Redis and the deadline of each exchange; default 50ms, 1ms to
// 1m. Shorter frees callers earlier when Redis hangs, and calls a slow Redis dead earlier.
func WithRemoteTimeout(d time.Duration) Option {
	return optionFunc(func(c *config) { c.remoteTimeout = d })
}

// WithSyncInterval sets the longest time between two exchanges of a key in use; default 50ms, 1ms to 1m. Shorter
// strands fewer tokens and costs more Redis calls: about one per instance, hot key and interval. A bucket, sliding window
// or log that is exhausted and refills costs one per pause instead, which is at most the interval and often shorter
// (docs/operations.md, "Load").
func WithSyncInterval(d time.Duration) Option {
	return optionFunc(func(c *config) { c.syncInterval = d })
}

// WithHeartbeat sets how often an instance shows that it is alive; default 1s, 1ms to 1m, not below the sync
// interval and the remote timeout. Shorter notices a dead instance earlier and shortens Bound().Silence.
func WithHeartbeat(d time.Duration) Option { return optionFunc(func(c *config) { c.heartbeat = d }) }

// WithBreaker sets when exchanges are given up and when they are tried again: by default after 5 failures in a row,
// with a cool-down of 500ms. A zero field means its default; Failures is 1 or more, Cooldown 1ms or more, MaxCooldown Cooldown or more.
// Fewer failures and a shorter cool-down notice sooner that Redis is away or back; more and longer ones bear a shakier network, and
// spare a Redis that is overloaded.
func WithBreaker(s breaker.Settings) Option { return optionFunc(func(c *config) { c.breaker = s }) }

// WithShards sets the number of parts of the local cache, 1 to 65536, rounded up to a power of two; default 8 per processor.
// More shards mean less contention between cold keys; warm keys take no lock.
func WithShards(n int) Option {
	return optionFunc(func(c *config) {
		c.shards = n
		if n >= 1 && n <= maxShards {
			c.shards = nextPowerOfTwo(n)
		}
	})
}

// WithMaxKeys sets the most keys kept locally, of all limiters together; default 1<<20, 1 or more. Beyond it the coldest are
// evicted and their leases given back. Keys that wait for Redis, for a caller's sake or to be settled, are not: while all of a shard's
// do, the table grows beyond it, and comes back to it later. A key that NewLocal evicts is full again.
func WithMaxKeys(n int) Option { return optionFunc(func(c *config) { c.maxKeys = n }) }

// WithInstances fixes the fleet size used for outage shares, 1 to 1<<20; the default is to learn it from heartbeats. A fleet
// that turns out larger is counted as it is. An instance that has not heard from Redis since its start admits floor(limit/n), as
// soon as a check has waited for Redis in vain; without WithInstances it denies until the breaker opens, and then admits the
// whole limit (docs/decisions/0010).
func WithInstances(n int) Option {
	return optionFunc(func(c *config) { c.instances, c.fixed = n, true })
}

// WithInstanceID labels this instance in logs, as the field "instance"; any text, by default none. Membership uses a random id.
func WithInstanceID(id string) Option { return optionFunc(func(c *config) { c.instanceID = id }) }

// WithObserver reports exchanges and changes of state to o; nil, the default, is none. What it does delays the loop: see Observer.
func WithObserver(o Observer) Option { return optionFunc(func(c *config) { c.observer = o }) }

// WithLocalShare sets the greatest part of a limit's capacity that one instance may hold as a lease: the split
// between local and remote decisions. Default 0.1, 0 to 1; 0 decides every check in Redis.
func WithLocalShare(f float64) LimiterOption {
	return limiterOptionFunc(func(c *limiterConfig) { c.localShare = f })
}

// WithLeaseTTL sets how long a lease may be held while tokens are plentiful; default 1s, 1ms to 1m, not below the sync interval.
// Longer answers more checks of moderately busy keys locally, and lengthens Bound().Silence.
func WithLeaseTTL(d time.Duration) LimiterOption {
	return limiterOptionFunc(func(c *limiterConfig) { c.leaseTTL = d })
}

// WithColdStart sets how a cold key is treated: ColdWait (default) or ColdAdmit(n).
func WithColdStart(s ColdStart) LimiterOption {
	return limiterOptionFunc(func(c *limiterConfig) { c.coldStart = s })
}

// WithFallback sets what is decided while Redis is out of reach; default FallbackShare. They trade admissions above the limit for denials
// below it: FallbackShare keeps the fleet within the limit, and denies what is not leased for Bound().Silence; FallbackShareNow does not,
// and may admit Bound().Outage above the limit; FallbackOpen has no limit, and denies only what Redis had denied before; FallbackClosed
// admits nothing but what is leased, and keeps the limit.
func WithFallback(p FallbackPolicy) LimiterOption {
	return limiterOptionFunc(func(c *limiterConfig) { c.fallback = p })
}

// WithShadow lets every check pass and says what would have been: a check that is denied comes back with Allowed and Shadowed set, and is counted
// in LimiterStats.Shadowed. Tokens are spent as without it, so the figures are those of the real limit; by default checks are denied. For trying
// a limit on real traffic before it is enforced. Wait returns at once, and Peek says how the key really stands.
func WithShadow() LimiterOption {
	return limiterOptionFunc(func(c *limiterConfig) { c.shadow = true })
}

func nextPowerOfTwo(n int) int {
	p := 1
	for p < n {
		p <<= 1
	}
	return p
}
