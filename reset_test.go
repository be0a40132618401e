package tierlimit_test

import (
	"errors"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A reset that did not reach Redis says so, and is done when the key is next settled.
func TestResetWithoutRedis(t *testing.T) {
	px := redistest.StartProxy(t, sharedServer(t).Addr())
	h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t), tierlimit.WithRemoteTimeout(200*time.Millisecond))
	l := limiterOf(t, h, tierlimit.TokenBucket(10, time.Hour))
	eventually(t, "online", isOnline(h))
	if n := drained(t, l, "k"); n != 10 {
		t.Fatalf("%d admitted, want 10", n)
	}
	if err := px.SetMode(redistest.Refuse); err != nil {
		t.Fatal(err)
	}
	eventually(t, "away", func() bool { _, _ = l.Allow(t.Context(), "other"); return !isOnline(h)() })
	if err := l.Reset(t.Context(), "k"); !errors.Is(err, tierlimit.ErrResetKept) {
		t.Errorf("a reset without Redis: %v", err)
	}
	if err := px.SetMode(redistest.Pass); err != nil {
		t.Fatal(err)
	}
	eventually(t, "online again", isOnline(h))
	eventually(t, "the key is full", func() bool { r, err := l.Peek(t.Context(), "k"); return err == nil && r.Remaining == 10 })
}

// One that Redis does not answer in time says that nobody knows.
func TestResetUnanswered(t *testing.T) {
	px := redistest.StartProxy(t, sharedServer(t).Addr())
	h := hybridOn(t, clientOf(t, px.Options()), ownPrefix(t), tierlimit.WithRemoteTimeout(500*time.Millisecond))
	l := limiterOf(t, h, tierlimit.TokenBucket(10, time.Hour))
	eventually(t, "online", isOnline(h))
	allowN(t, l, "k", 1)
	px.SetDelay(redistest.Delay{Latency: 2 * time.Second}, redistest.Delay{})
	if err := l.Reset(t.Context(), "k"); !errors.Is(err, tierlimit.ErrResetUnknown) {
		t.Errorf("a reset without an answer: %v", err)
	}
}
