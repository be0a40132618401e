package main

import (
	"context"
	"fmt"
	"math"
	"net"
	"slices"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
)

// A skew is what is known of Redis's clock less this machine's: from lo to hi, ns. Windows are aligned to Redis's.
type skew struct{ lo, hi int64 }

// skew asks Redis for the time. A Redis on this machine reads the same clock.
func (s *store) skew(ctx context.Context) (skew, error) {
	if host, _, err := net.SplitHostPort(s.opts.Addr); err != nil || host == "localhost" || net.ParseIP(host).IsLoopback() {
		return skew{}, nil
	}
	c := s.client("")
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	k := skew{math.MinInt64, math.MaxInt64}
	for range 5 {
		sent := envelope.Now()
		t, err := c.Time(ctx).Result()
		received := envelope.Now()
		if err != nil {
			return skew{}, fmt.Errorf("asking Redis for the time: %w", err)
		}
		k.lo, k.hi = max(k.lo, t.UnixNano()-received), min(k.hi, t.UnixNano()+1000-sent)
	}
	if k.lo > k.hi { // a clock was set meanwhile
		k.lo, k.hi = k.hi, k.lo
	}
	return k, nil
}

// join is a skew that may be either, as clocks drift apart during a run.
func (k skew) join(o skew) skew { return skew{min(k.lo, o.lo), max(k.hi, o.hi)} }

// widen puts a history into Redis's clock: each admission may have happened anywhere the skew allows.
func (k skew) widen(history []envelope.Admission) []envelope.Admission {
	if k == (skew{}) {
		return history
	}
	history = slices.Clone(history)
	for i := range history {
		history[i].Called += k.lo
		history[i].Returned += k.hi
	}
	return history
}
