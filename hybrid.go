package tierlimit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/clock"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// A Hybrid is the two-tier runtime that limiters share: the sharded cache, the exchange loop, the breaker and the
// fleet membership. Make one per process and Redis, and Close it at the end. Safe for concurrent use.
type Hybrid struct {
	cfg    config
	log    *zap.Logger
	clock  *clock.Clock
	start  time.Time // when the clock stood at 0, by the wall
	client exchanger // nil for NewLocal
	table  *local.Table
	id     string

	mu       sync.Mutex // guards the four below
	byName   map[string]*Limiter
	domains  map[remote.Domain]*domain
	horizon  time.Duration // the longest time to full of any limiter
	stopping bool          // no more loops begin
	limiters atomic.Pointer[[]*Limiter]
	only     *domain // the domain of a plain client, nil for a Cluster or Ring

	homes        atomic.Pointer[[remote.Groups]uint8] // the tag of the domain of each group
	resolved     atomic.Bool                          // it is known which key lives on which server
	lost         chan struct{}                        // a server was given up: look where its keys are now
	forced       atomic.Bool
	closed       atomic.Bool
	closing      sync.Once
	stop         chan struct{}
	loops        sync.WaitGroup
	shareEvicted atomic.Int64 // when a cell with an outage share, or what one admitted, was last evicted
	backEvicted  atomic.Int64 // the last return for which a cell that had handed over was given up
	returns      atomic.Int64 // how often this instance came back from being missing
	outages      atomic.Int64 // how many outages began
	warned       atomic.Bool

	exchanges, asked, heartbeats, failures, leased atomic.Int64

	// Not shared between Hybrids: what was made in a bubble of testing/synctest must not leave it.
	waiters, timers sync.Pool
}

// New returns a Hybrid that leases tokens through rdb: a plain client, a failover client, a Cluster or a Ring. It
// never dials: a Redis that is down is a state (Stats), not an error. A nil rdb is ErrConfig, as is every option out
// of range; all faults are joined. The Hybrid does not close rdb.
func New(rdb redis.UniversalClient, opts ...Option) (*Hybrid, error) {
	var faults []error
	if isNil(rdb) {
		faults = append(faults, fmt.Errorf("%w: the Redis client is nil; use NewLocal to go without", ErrConfig))
	}
	h, err := newHybrid(opts, faults...)
	if err != nil {
		return nil, err
	}
	h.begin(remote.New(rdb, h.cfg.prefix))
	return h, nil
}

// begin starts the loops that talk through x.
func (h *Hybrid) begin(x exchanger) {
	h.client = x
	h.loops.Go(h.sweep)
	d := h.domain(remote.Domain{}) // there is always one, so that Stats tells what is not known yet
	if x.Grouped() {
		h.loops.Go(h.followTopology)
	} else {
		h.resolved.Store(true)
		h.only = d
		d.wakeUp()
	}
}

// NewLocal returns a Hybrid of one instance without Redis: every check is decided in this process. A key that WithMaxKeys pushes out is
// full again, so let it be more than there are keys in use.
func NewLocal(opts ...Option) (*Hybrid, error) {
	h, err := newHybrid(opts)
	if err != nil {
		return nil, err
	}
	h.table.Idle = h.idle
	return h, nil
}

func newHybrid(opts []Option, faults ...error) (*Hybrid, error) {
	cfg := defaults()
	for _, o := range opts {
		if o == nil {
			faults = append(faults, fmt.Errorf("%w: a nil Option", ErrConfig))
			continue
		}
		o.apply(&cfg)
	}
	if err := errors.Join(append(faults, cfg.faults()...)...); err != nil {
		return nil, err
	}
	h := &Hybrid{
		cfg:     cfg,
		log:     cfg.log,
		clock:   clock.New(),
		id:      rand.Text(),
		byName:  map[string]*Limiter{},
		domains: map[remote.Domain]*domain{},
		stop:    make(chan struct{}),
		lost:    make(chan struct{}, 1),
		waiters: sync.Pool{New: func() any { return &local.Waiter{Done: make(chan local.Outcome, 1)} }},
		timers:  sync.Pool{New: func() any { return time.NewTimer(time.Hour) }},
	}
	if cfg.instanceID != "" {
		h.log = h.log.With(zap.String("instance", cfg.instanceID))
	}
	h.start = h.clock.Start()
	h.limiters.Store(new([]*Limiter))
	h.homes.Store(new([remote.Groups]uint8))
	h.table = local.NewTable(cfg.shards, cfg.maxKeys, h.evict)
	return h, nil
}

func isNil(rdb redis.UniversalClient) bool {
	switch c := rdb.(type) {
	case nil:
		return true
	case *redis.Client:
		return c == nil
	case *redis.ClusterClient:
		return c == nil
	case *redis.Ring:
		return c == nil
	}
	return false
}

// now is the instance's monotonic clock in nanoseconds.
func (h *Hybrid) now() int64 { return h.clock.Now() }

var limiterName = regexp.MustCompile(`^[a-z0-9._-]{1,64}$`)

// Limiter returns the limiter of that name, making it if there is none. Names are 1 to 64 of a-z, 0-9, dot, dash and
// underscore. A name in use with the same limit returns the same Limiter (its options stay); with another limit it is
// ErrConfig: SetLimit changes a limit.
func (h *Hybrid) Limiter(name string, limit Limit, opts ...LimiterOption) (*Limiter, error) {
	if h.closed.Load() {
		return nil, ErrClosed
	}
	var faults []error
	if !limiterName.MatchString(name) {
		faults = append(faults, fmt.Errorf("%w: limiter name %.80q, want 1 to 64 of a-z, 0-9, '.', '_' and '-'", ErrConfig, name))
	}
	faults = append(faults, limit.Validate())
	cfg := h.cfg.limiterConfig
	for _, o := range opts {
		if o == nil {
			faults = append(faults, fmt.Errorf("%w: a nil LimiterOption", ErrConfig))
			continue
		}
		o.applyLimiter(&cfg)
	}
	faults = append(faults, cfg.faults(h.cfg.syncInterval)...)
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if l, ok := h.byName[name]; ok {
		if l.Limit() != limit {
			return nil, fmt.Errorf("%w: limiter %q has the limit %v already, not %v; SetLimit changes it", ErrConfig, name, l.Limit(), limit)
		}
		return l, nil
	}
	all := slices.Clone(*h.limiters.Load())
	l := newLimiter(h, uint32(len(all)), name, limit, cfg)
	h.byName[name] = l
	all = append(all, l)
	h.limiters.Store(&all)
	h.stretchHorizonLocked(limit)
	return l, nil
}

// stretchHorizonLocked keeps the time for which darkness is remembered at least as long as it can matter: until a bucket
// has filled, and until what was admitted in it has left every window. Caller holds h.mu.
func (h *Hybrid) stretchHorizonLocked(limit Limit) {
	t := limit.tier()
	if t.Algorithm.Bucket() {
		h.horizon = max(h.horizon, timeToFull(t, t.Burst))
	} else {
		h.horizon = max(h.horizon, 2*t.Period)
	}
}

// longestFill is the longest time to full of any limiter.
func (h *Hybrid) longestFill() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.horizon
}

// Limiters returns the limiters in the order they were made.
func (h *Hybrid) Limiters() iter.Seq[*Limiter] { return slices.Values(*h.limiters.Load()) }

func (h *Hybrid) limiter(id uint32) *Limiter { return (*h.limiters.Load())[id] }

// domain returns the domain d, starting its loop if it is new.
func (h *Hybrid) domain(rd remote.Domain) *domain {
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.domains[rd]
	if d == nil {
		d = newDomain(h, rd)
		h.domains[rd] = d
		if !h.stopping { // while Close waits for what is on its way, keys may yet move
			h.loops.Go(d.run)
		}
	}
	return d
}

func (h *Hybrid) allDomains() []*domain {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Values(h.domains))
}

// ForceLocal takes this instance out of the fleet by hand, before maintenance of Redis, and back. It leaves as an
// outage does: leases in hand are spent, then comes the silence of Bound, then the outage share.
func (h *Hybrid) ForceLocal(on bool) {
	if h.forced.Swap(on) == on {
		return
	}
	for _, d := range h.allDomains() {
		d.force(on)
	}
}

// Flush settles and returns everything that is idle, now: all unspent tokens go back to Redis. It returns when that
// is done, or when Redis, if it does not answer, is given up: after two times WithRemoteTimeout at most, and where nothing answers until
// the breaker opens. Errors: one that says of how many keys the tokens could not be returned, or nobody knows; they return by
// themselves when their leases end. ctx's, wrapped, and ErrClosed.
func (h *Hybrid) Flush(ctx context.Context) error {
	ctx = orBackground(ctx)
	if h.closed.Load() {
		return ErrClosed
	}
	return h.flush(ctx)
}

func (h *Hybrid) flush(ctx context.Context) error {
	if h.client == nil {
		return nil
	}
	type flushed struct {
		d       *domain
		c       *local.Cell
		landing int64
		lost    uint8
	}
	var all []flushed
	began := h.now()
	h.table.Each(func(c *local.Cell) {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		if c.Slot != 0 || c.Refund != 0 || c.ChargeCold > 0 || c.InFlight { // which may bring a lease
			d := h.domainOf(c)
			c.Return = true
			d.enqueueLocked(c)
			all = append(all, flushed{d, c, nextLandingLocked(c), c.Lost})
		}
	})
	kept := 0
	for _, f := range all {
		switch err := f.d.landed(ctx, f.c, f.landing); {
		case errors.Is(err, ErrClosed):
			return err
		case err != nil:
			return fmt.Errorf("tierlimit: returning unspent tokens was given up: %w", err)
		}
		f.c.Mu.Lock()
		if f.c.Lost != f.lost || unreturnedLocked(f.c, began, h.now()) {
			kept++
		}
		f.c.Mu.Unlock()
	}
	if kept > 0 {
		return fmt.Errorf("tierlimit: Redis did not answer in time for %d of %d keys: their unspent tokens return when their leases end", kept, len(all))
	}
	return nil
}

// unreturnedLocked reports whether c holds what was to be settled since began: the last exchange of it was lost, and may have been granted a
// lease, or did not run, or there was none. What lies under a lease that is over has returned by itself. Caller holds c.Mu.
func unreturnedLocked(c *local.Cell, began, now int64) bool {
	leased := c.Slot != 0 && now <= c.Deadline()
	if c.Unknown || leased && c.Retired > 0 {
		return true
	}
	// What came after it was settled is another's: a refund, say, that is on its way.
	return c.Settled < began && !c.Dead && (leased || c.Refund != 0 || c.ChargeCold > 0)
}

// Close returns unspent tokens to Redis, leaves the fleet and stops the background loops; none is left running when
// it returns. Checks that wait are answered with ErrClosed. It does not close the Redis client. A second call waits
// for the first, whatever its ctx, and returns nil. The error says that ctx ended, or that Redis could not be told, since it does not
// answer, is out of reach, or ForceLocal is on: then the tokens return by themselves when their leases end, and the fleet keeps this
// instance's share aside until it is forgotten, for 30 s or more. It is closed all the same.
func (h *Hybrid) Close(ctx context.Context) error {
	ctx = orBackground(ctx)
	var err error
	h.closing.Do(func() {
		h.mu.Lock()
		h.closed.Store(true)
		h.mu.Unlock()
		err = h.flush(ctx)
		for left := map[*domain]bool{}; ; {
			// Keys may move meanwhile to a server that is new to this instance: it leaves that too.
			h.mu.Lock()
			var there []*domain
			for _, d := range h.domains {
				if !left[d] {
					there = append(there, d)
				}
			}
			h.stopping = len(there) == 0
			h.mu.Unlock()
			if len(there) == 0 {
				break
			}
			for _, d := range there {
				left[d] = true
				err = errors.Join(err, d.drain(ctx), d.leave(ctx))
			}
		}
		close(h.stop)
		h.loops.Wait()
		h.table.Each(func(c *local.Cell) {
			c.Mu.Lock()
			defer c.Mu.Unlock()
			answerLocked(c, local.Outcome{Closed: true})
		})
	})
	return err
}

// Stats is a snapshot of a Hybrid.
type Stats struct {
	Keys       int    // keys in the local cache; of keys that lie idle a few bytes are kept beside it
	Leased     int64  // tokens in hand, as of each key's last exchange
	Exchanges  int64  // script calls tried to settle keys, once they are answered or given up
	Asked      int64  // keys that they were to settle
	Heartbeats int64  // heartbeats begun, of one to four script calls each
	Failures   int64  // exchanges and heartbeats that failed, were not answered, or, of heartbeats, came too late to count
	State      State  // of the worst part of Redis: one master of a Cluster may be away alone; online without Redis
	Breaker    string // "closed", "open" or "half-open", of the worst part of those in that state
	Instances  int    // members of the fleet, this instance included, on the server that knows most
	Missing    int    // members not heard lately, at worst: what may be their shares is kept aside, which can be all there is
	Rank       int    // this instance's place among them, the last if servers differ; -1 when it is none
}

// Stats returns a snapshot, from counters: a lock per shard and per Redis server.
func (h *Hybrid) Stats() Stats {
	s := Stats{
		Keys:       h.table.Len(),
		Leased:     h.leased.Load(),
		Exchanges:  h.exchanges.Load(),
		Asked:      h.asked.Load(),
		Heartbeats: h.heartbeats.Load(),
		Failures:   h.failures.Load(),
		State:      StateOnline,
	}
	// The domains come in no order, and the answer must not depend on it.
	now, circuit, most := h.now(), breaker.Closed, -1
	for _, d := range h.allDomains() {
		state, view := d.state(now)
		b := d.breaker.State()
		if state.worse(s.State) || state == s.State && b > circuit { // closed, half-open, open
			s.State, circuit = state, b
		}
		if view.N > most || view.N == most && view.Rank > s.Rank {
			most, s.Rank = view.N, view.Rank
		}
		s.Missing = max(s.Missing, int(view.Darkness.Missing))
	}
	s.Breaker, s.Instances = circuit.String(), max(1, most)
	return s
}

// answerLocked tells every waiter of c the same. Caller holds c.Mu.
func answerLocked(c *local.Cell, o local.Outcome) {
	for _, w := range c.Waiters {
		w.Done <- o
	}
	c.Waiters = nil
}
