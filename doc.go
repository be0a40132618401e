// Package tierlimit limits rates across a fleet, exactly, at in-process speed.
//
// A [Hybrid] holds tokens that were leased from Redis and answers most checks from them in tens of nanoseconds. A background
// loop settles leases with Redis in batches, through Lua. A circuit breaker switches to local decisions when Redis fails:
// each instance then admits its share of the limit, and the shares sum to the limit.
//
// The promise: Redis debits a token before an instance may spend it, and counts it at its least favourable time. So while
// Redis keeps its data the admissions of the whole fleet stay within the limit, not "about", for every number of instances, under lost,
// late and repeated calls, hung and killed instances, and any skew of their clocks. [Limiter.Bound] states what is promised under the
// options chosen; docs/guarantees.md derives each figure and names the test that would falsify it.
//
//	h, err := tierlimit.New(rdb)                                              // a go-redis client of any kind
//	defer h.Close(ctx)                                                        // on SIGTERM too: see docs/operations.md, Deploys and crashes
//	api, err := h.Limiter("api", tierlimit.TokenBucket(100, time.Second))     // 100 a second, bursts of 100, for each key
//	r, err := api.Allow(ctx, userID)
//	if err == nil && !r.Allowed {
//		// 429; r.RetryAfter says when it would pass
//	}
//
// A denial is a [Result], never an error. A Redis that is down is a [Source], never an error. Errors are for the caller's
// own mistakes, a context that ended while the check had to wait, and [ErrClosed].
package tierlimit
