package remote

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestThroughReturnsAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(2)
		release := make(chan struct{})
		hang := func(context.Context) (int, error) { <-release; return 7, nil }
		start := time.Now()
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			n, err := through(ctx, g, hang)
			cancel()
			if n != 0 || !errors.Is(err, context.DeadlineExceeded) || NotExecuted(err) {
				t.Fatalf("%d, %v", n, err)
			}
		}
		if d := time.Since(start); d != 100*time.Millisecond {
			t.Fatalf("two calls took %v", d)
		}
		// Both places are taken by calls that nobody waits for.
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, err := through(ctx, g, hang); !errors.Is(err, ErrBusyClient) || !NotExecuted(err) || time.Since(start) != 100*time.Millisecond {
			t.Fatalf("third call: %v", err)
		}
		close(release)
		synctest.Wait()
		if n, err := through(ctx, g, hang); n != 7 || err != nil || g.abandoned.Load() != 0 || len(g.places) != 0 {
			t.Fatalf("after the hang: %d, %v, %d abandoned", n, err, g.abandoned.Load())
		}
	})
}

// A call that found no place was never made.
func TestThroughWaitsForAPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1)
		go func() {
			_, _ = through(context.Background(), g, func(context.Context) (int, error) { time.Sleep(time.Second); return 0, nil })
		}()
		synctest.Wait()
		ran := func(context.Context) (int, error) { return 1, nil }
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if _, err := through(ctx, g, ran); !errors.Is(err, context.DeadlineExceeded) || !NotExecuted(err) {
			t.Fatalf("in vain: %v", err)
		}
		if _, err := through(ctx, g, ran); !NotExecuted(err) {
			t.Fatalf("too late: %v", err)
		}
		if n, err := through(t.Context(), g, ran); n != 1 || err != nil {
			t.Fatalf("in time: %d, %v", n, err)
		}
	})
}

// An answer that lands in the very moment of the deadline is kept or given up, but the books balance.
func TestThroughAtTheSameMoment(t *testing.T) {
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			g := newGate(1)
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			n, err := through(ctx, g, func(context.Context) (int, error) { time.Sleep(time.Millisecond); return 7, nil })
			if (n == 7) != (err == nil) {
				t.Fatalf("%d, %v", n, err)
			}
			synctest.Wait()
			if g.abandoned.Load() != 0 || len(g.places) != 0 {
				t.Fatalf("%d abandoned, %d places taken", g.abandoned.Load(), len(g.places))
			}
		})
	}
}

// The call itself may take longer than its caller waits, but not for ever, and ends when it is cancelled.
func TestThroughLetsACallLinger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(1)
		start := time.Now()
		ends := make(chan time.Duration, 1)
		last := func(ctx context.Context) (int, error) {
			<-ctx.Done()
			ends <- time.Since(start)
			return 0, ctx.Err()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := through(ctx, g, last); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 50*time.Millisecond {
			t.Fatalf("%v after %v", err, time.Since(start))
		}
		cancel()
		if d := <-ends; d != 50*time.Millisecond+linger {
			t.Errorf("the call ended after %v", d)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Hour)
		start = time.Now()
		time.AfterFunc(time.Second, cancel)
		if _, err := through(ctx, g, last); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if d := <-ends; d != time.Second {
			t.Errorf("a cancelled call ended after %v", d)
		}
	})
}
