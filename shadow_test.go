package tierlimit_test

import (
	"math"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
)

// WithShadow lets pass what would be denied and says so; what is spent, and what is counted, is as without it.
func TestShadow(t *testing.T) {
	for name, open := range map[string]func(t *testing.T, opts ...tierlimit.Option) *tierlimit.Hybrid{
		"redis": onShared,
		"local": alone,
	} {
		t.Run(name, func(t *testing.T) {
			h := open(t)
			limit := tierlimit.FixedWindow(10, 24*time.Hour)
			l, err := h.Limiter("shadow", limit, tierlimit.WithShadow())
			must(t, err)
			allowed, shadowed := 0, 0
			for range 25 {
				r := allowN(t, l, "k", 1)
				if !r.Allowed || r.RetryAfter != 0 {
					t.Fatalf("%+v", r)
				}
				if r.Shadowed {
					shadowed++
					if r.Remaining != 0 || r.ResetAfter <= 0 {
						t.Errorf("%+v", r)
					}
				} else {
					allowed++
				}
			}
			if allowed != 10 || shadowed != 15 {
				t.Errorf("%d allowed and %d shadowed, want 10 and 15", allowed, shadowed)
			}
			if r := allowN(t, l, "other", 11); !r.Allowed || !r.Shadowed {
				t.Errorf("more than the capacity: %+v", r)
			}
			if r := allowN(t, l, "other", 10); !r.Allowed || r.Shadowed {
				t.Errorf("what was shadowed was spent: %+v", r)
			}
			began := time.Now()
			must(t, l.WaitN(t.Context(), "k", 3))
			if took := time.Since(began); took > time.Minute {
				t.Errorf("Wait took %v", took)
			}
			if r, err := l.Peek(t.Context(), "k"); err != nil || r.Allowed || r.Shadowed {
				t.Errorf("Peek: %+v %v", r, err)
			}
			eventually(t, "the denials are counted", func() bool {
				s := l.Stats()
				return s.Shadowed == 15+11+3 && (name == "redis" || s.Denied >= 18) && s.Local+s.Remote == 20
			})
			if b := l.Bound(); b.Overshoot != math.MaxInt64 {
				t.Errorf("%v", b)
			}
		})
	}
}

// Neither does an outage deny anything, and errors stay errors.
func TestShadowWithoutRedis(t *testing.T) {
	h := hybridOn(t, clientOf(t, &redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1}), ownPrefix(t), tierlimit.WithFallback(tierlimit.FallbackClosed), tierlimit.WithShadow())
	l := limiterOf(t, h, tierlimit.TokenBucket(10, time.Second))
	for range 20 {
		if r := allowN(t, l, "k", 1); !r.Allowed || !r.Shadowed || r.Source != tierlimit.Fallback {
			t.Fatalf("%+v", r)
		}
	}
	if _, err := l.AllowN(t.Context(), "k", -1); err == nil {
		t.Error("a negative cost passes")
	}
	must(t, h.Close(t.Context()))
	if r, err := l.Allow(t.Context(), "k"); err == nil || r.Allowed {
		t.Errorf("after Close: %+v %v", r, err)
	}
}
