package bench

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/RussellLuo/slidingwindow"
	"github.com/cespare/xxhash/v2"
	"github.com/failsafe-go/failsafe-go/ratelimiter"
	"github.com/go-chi/httprate"
	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"github.com/ulule/limiter/v3"
	"github.com/ulule/limiter/v3/drivers/store/memory"
	"golang.org/x/time/rate"

	"github.com/tierlimit/tierlimit"
)

// A Setting is what subjects are opened with: the same limit for all of them.
type Setting struct {
	Rate   int64 // tokens per Period and key
	Period time.Duration
	Burst  int64  // tokens at once; limiters that count in windows admit so many in each Period
	Keys   int    // about how many there will be
	Addr   string // of Redis
}

// A Subject is a limiter, or a floor, that is measured.
type Subject struct {
	Impl, Path string
	Redis      bool
	Denies     bool // the wanted answer is no
	Open       func(Setting) (*Opened, error)
}

// An Opened is a Subject at work.
type Opened struct {
	Allow  func(key string) bool             // whether the answer is the wanted one
	Warm   func(n int, key func(int) string) // makes the subject know n keys and, where it leases, hold tokens of each
	Remote func() int64                      // checks that Redis decided so far; nil where there is no such thing
	Close  func()
}

var background = context.Background()

func opened(allow func(string) bool) *Opened {
	return &Opened{
		Allow: allow,
		Warm: func(n int, key func(int) string) {
			for i := range n {
				allow(key(i))
			}
		},
		Close: func() {},
	}
}

// Floors are what a check in process cannot do without, each alone and the table with a clock.
var Floors = []Subject{
	{Impl: "floor", Path: "harness", Open: func(Setting) (*Opened, error) { return opened(func(key string) bool { return key != "" }), nil }},
	{Impl: "floor", Path: "hash", Open: func(Setting) (*Opened, error) {
		return opened(func(key string) bool { return xxhash.Sum64String(key) != 0 }), nil
	}},
	{Impl: "floor", Path: "clock", Open: func(Setting) (*Opened, error) {
		start := time.Now()
		return opened(func(string) bool { return time.Since(start) >= 0 }), nil
	}},
	{Impl: "floor", Path: "table", Open: func(Setting) (*Opened, error) { return openTable(func() bool { return true }), nil }},
	{Impl: "floor", Path: "table+clock", Open: func(Setting) (*Opened, error) {
		start := time.Now()
		return openTable(func() bool { return time.Since(start) >= 0 }), nil
	}},
}

// openTable is a Table that is filled when it is warmed.
func openTable(also func() bool) *Opened {
	var t *Table
	o := opened(func(key string) bool { return t.Allow(key) && also() })
	o.Warm = func(n int, key func(int) string) { t = NewTable(n, math.MaxInt64, key) }
	return o
}

// Local are the subjects that need no Redis to answer: peers as their documentation sets them up, with a map where they
// have none for keys.
var Local = []Subject{
	Lease,
	{Impl: "tierlimit", Path: "denied", Redis: true, Denies: true, Open: openDenied},
	{Impl: "tierlimit", Path: "local", Open: openLocal},
	{Impl: "x-time-rate", Path: "sync.Map", Open: openXTimeRate},
	{Impl: "go-limiter", Path: "memorystore", Open: openGoLimiter},
	{Impl: "throttled", Path: "memstore", Open: openThrottled},
	{Impl: "ulule", Path: "memory", Open: openUlule},
	{Impl: "httprate", Path: "local", Open: openHTTPRate},
	{Impl: "failsafe-go", Path: "sync.Map", Open: openFailsafe},
	{Impl: "slidingwindow", Path: "sync.Map", Open: openSlidingWindow},
}

// Lease is tierlimit as it is meant to be used: warm keys are answered from leased tokens.
var Lease = Subject{Impl: "tierlimit", Path: "lease", Redis: true, Open: openLease}

// Remote are the subjects that ask Redis for each check.
var Remote = []Subject{
	{Impl: "tierlimit", Path: "share0", Redis: true, Open: openShare0},
	{Impl: "redis_rate", Path: "pool=default", Redis: true, Open: func(s Setting) (*Opened, error) { return openRedisRate(s, 0) }},
	// The default pool, ten connections for each processor, is what most programs run with. This many are better for
	// redis_rate where callers are many and the way is long; more than this were not.
	{Impl: "redis_rate", Path: "pool=128", Redis: true, Open: func(s Setting) (*Opened, error) { return openRedisRate(s, 128) }},
	Rueidis,
}

// Rueidis is the limiter of rueidis. Its own module, rueidislimiter, cannot be pinned (it is not served as one), so this is a script of
// our own that does what that one does for each check, a GET of the window's end and an INCRBY, sent by rueidis, which pipelines by
// itself.
var Rueidis = Subject{Impl: "rueidis", Path: "fixed-window", Redis: true, Open: openRueidis}

// tierlimitOptions are the defaults, but for the time-out: a machine that is held up must not make this measure the fallback.
func tierlimitOptions(opts ...tierlimit.Option) []tierlimit.Option {
	return append([]tierlimit.Option{tierlimit.WithRemoteTimeout(time.Second), tierlimit.WithMaxKeys(1 << 21)}, opts...)
}

func (s Setting) bucket() tierlimit.Limit {
	return tierlimit.TokenBucket(s.Rate, s.Period).WithBurst(s.Burst)
}

// Hybrid returns a Hybrid on the Redis at addr, a limiter of it, and what closes both.
func Hybrid(addr string, limit tierlimit.Limit, opts ...tierlimit.Option) (*tierlimit.Hybrid, *tierlimit.Limiter, func(), error) {
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	h, err := tierlimit.New(rdb, tierlimitOptions(opts...)...)
	if err != nil {
		return nil, nil, nil, err
	}
	l, err := h.Limiter("bench", limit)
	if err != nil {
		return nil, nil, nil, err
	}
	return h, l, func() {
		// A million leases take longer to hand back than anybody here wants to wait; the server goes away with them.
		ctx, cancel := context.WithTimeout(background, time.Second)
		defer cancel()
		_ = h.Close(ctx)
		_ = rdb.Close()
	}, nil
}

func remoteOf(l *tierlimit.Limiter) func() int64 { return func() int64 { return l.Stats().Remote } }

// openLease uses the defaults up to a thousand keys. With more, a lease may be held for a minute instead of a second: of a million keys
// most are checked less often than once a second and would be cold each time, and 10,000 leases a second to renew would be measured with
// the check. Here it is the check of a warm key that is measured; what the defaults come to is in BenchmarkRedis.
func openLease(s Setting) (*Opened, error) {
	var opts []tierlimit.Option
	if s.Keys > 1000 {
		opts = append(opts, tierlimit.WithLeaseTTL(time.Minute))
	}
	_, l, closeAll, err := Hybrid(s.Addr, s.bucket(), opts...)
	if err != nil {
		return nil, err
	}
	o := &Opened{
		Allow: func(key string) bool {
			r, err := l.Allow(background, key)
			return err == nil && r.Allowed && r.Source != tierlimit.Fallback
		},
		Remote: remoteOf(l),
		Close:  closeAll,
	}
	o.Warm = func(n int, key func(int) string) {
		// The first exchange of a key leases nothing, the second what the pace of the checks calls for.
		for range 2 {
			each(n, func(i int) { o.Allow(key(i)) })
		}
	}
	return o, nil
}

func openShare0(s Setting) (*Opened, error) {
	_, l, closeAll, err := Hybrid(s.Addr, s.bucket(), tierlimit.WithLocalShare(0))
	if err != nil {
		return nil, err
	}
	o := opened(func(key string) bool {
		r, err := l.Allow(background, key)
		return err == nil && r.Allowed && r.Source == tierlimit.Remote
	})
	o.Remote, o.Close = remoteOf(l), closeAll
	return o, nil
}

// openDenied is a limit that is used up for an hour, whatever the setting.
func openDenied(s Setting) (*Opened, error) {
	_, l, closeAll, err := Hybrid(s.Addr, tierlimit.FixedWindow(1, time.Hour))
	if err != nil {
		return nil, err
	}
	return &Opened{
		Allow: func(key string) bool {
			r, err := l.Allow(background, key)
			return err == nil && !r.Allowed && r.Source == tierlimit.Local
		},
		Warm: func(n int, key func(int) string) {
			for range 3 {
				each(n, func(i int) { _, _ = l.Allow(background, key(i)) })
			}
		},
		Remote: remoteOf(l),
		Close:  closeAll,
	}, nil
}

func openLocal(s Setting) (*Opened, error) {
	h, err := tierlimit.NewLocal(tierlimitOptions()...)
	if err != nil {
		return nil, err
	}
	l, err := h.Limiter("bench", s.bucket())
	if err != nil {
		return nil, err
	}
	o := opened(func(key string) bool {
		r, err := l.Allow(background, key)
		return err == nil && r.Allowed
	})
	o.Close = func() { _ = h.Close(background) }
	return o, nil
}

// keyed is what programs do with limiters that know no keys.
func keyed[L any](make func() L, allow func(L) bool) *Opened {
	var m sync.Map
	return opened(func(key string) bool {
		v, ok := m.Load(key)
		if !ok {
			v, _ = m.LoadOrStore(key, make())
		}
		return allow(v.(L))
	})
}

func openXTimeRate(s Setting) (*Opened, error) {
	perSecond := rate.Limit(float64(s.Rate) / s.Period.Seconds())
	return keyed(func() *rate.Limiter { return rate.NewLimiter(perSecond, int(s.Burst)) }, (*rate.Limiter).Allow), nil
}

// Bursty, since its smooth limiter admits no burst at all.
func openFailsafe(s Setting) (*Opened, error) {
	return keyed(func() ratelimiter.RateLimiter[any] { return ratelimiter.NewBursty[any](uint(s.Burst), s.Period) }, ratelimiter.RateLimiter[any].TryAcquirePermit), nil
}

// With its local window: the one that syncs with Redis counts in each process alone between two syncs.
func openSlidingWindow(s Setting) (*Opened, error) {
	window := func() (slidingwindow.Window, slidingwindow.StopFunc) { return slidingwindow.NewLocalWindow() }
	return keyed(func() *slidingwindow.Limiter {
		l, _ := slidingwindow.NewLimiter(s.Period, s.Burst, window)
		return l
	}, (*slidingwindow.Limiter).Allow), nil
}

// The map is made for the keys there will be, which is the best it can have. The interval is so long that none ends: from the
// second on a key has interval/tokens nanoseconds' worth of tokens, which is none where tokens are plenty.
func openGoLimiter(s Setting) (*Opened, error) {
	store, err := memorystore.New(&memorystore.Config{Tokens: uint64(s.Burst), Interval: max(s.Period, time.Hour), InitialAlloc: s.Keys})
	if err != nil {
		return nil, err
	}
	o := opened(func(key string) bool {
		_, _, _, ok, err := store.Take(background, key)
		return ok && err == nil
	})
	o.Close = func() { _ = store.Close(background) }
	return o, nil
}

// Without a bound on the keys, which is the faster of its two stores.
func openThrottled(s Setting) (*Opened, error) {
	store, err := memstore.NewCtx(0)
	if err != nil {
		return nil, err
	}
	l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerDuration(int(s.Rate), s.Period), MaxBurst: int(s.Burst) - 1})
	if err != nil {
		return nil, err
	}
	// Ten attempts, the default, are too few for a key that all goroutines want: it then answers with an error.
	l.SetMaxCASAttemptsLimit(1 << 20)
	return opened(func(key string) bool {
		limited, _, err := l.RateLimitCtx(background, key, 1)
		return !limited && err == nil
	}), nil
}

func openUlule(s Setting) (*Opened, error) {
	l := limiter.New(memory.NewStore(), limiter.Rate{Period: s.Period, Limit: s.Burst})
	return opened(func(key string) bool {
		c, err := l.Get(background, key)
		return !c.Reached && err == nil
	}), nil
}

// Its whole check without what makes it a middleware: no response headers, which it would format for each request.
func openHTTPRate(s Setting) (*Opened, error) {
	l := httprate.NewRateLimiter(int(s.Burst), s.Period, httprate.WithResponseHeaders(httprate.ResponseHeaders{}))
	r, err := http.NewRequestWithContext(background, http.MethodGet, "/", nil)
	if err != nil {
		return nil, err
	}
	return opened(func(key string) bool { return !l.OnLimit(nil, r, key) }), nil
}

func openRedisRate(s Setting, pool int) (*Opened, error) {
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr, PoolSize: pool, PoolTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute})
	l := redis_rate.NewLimiter(rdb)
	limit := redis_rate.Limit{Rate: int(s.Rate), Burst: int(s.Burst), Period: s.Period}
	o := opened(func(key string) bool {
		r, err := l.Allow(background, key, limit)
		return err == nil && r.Allowed == 1
	})
	o.Close = func() { _ = rdb.Close() }
	return o, nil
}

var fixedWindow = rueidis.NewLuaScript(`
local count, ends, cost, now, window = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local at = tonumber(redis.call('GET', ends))
if not at or at <= now then
  at = now + window
  redis.call('SET', ends, at, 'PX', 2 * window)
  redis.call('SET', count, 0, 'PX', 2 * window)
end
return {redis.call('INCRBY', count, cost), at}
`)

// Without its client-side cache, which a script has no use for.
func openRueidis(s Setting) (*Opened, error) {
	c, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, DisableCache: true, ForceSingleClient: true})
	if err != nil {
		return nil, err
	}
	window := fmt.Sprint(s.Period.Milliseconds())
	o := opened(func(key string) bool {
		tag := "rueidis:{" + key + "}"
		now := fmt.Sprint(time.Now().UnixMilli())
		reply, err := fixedWindow.Exec(background, c, []string{tag, tag + ":ends"}, []string{"1", now, window}).AsIntSlice()
		return err == nil && len(reply) == 2 && reply[0] <= s.Burst
	})
	o.Close = c.Close
	return o, nil
}
