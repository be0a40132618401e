package tierlimit_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Helpers of the external tests. Those of the simulations, which see inside, are in loop_test.go; they cannot be shared, since
// internal/fleet imports the root.

// shared is the one server of the tests that break nothing.
var shared struct {
	once sync.Once
	srv  *redistest.Process
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.srv != nil {
		// G7: whatever was done to them, keys expire.
		if err := checkTTLs(shared.srv); err != nil {
			fmt.Fprintln(os.Stderr, "after all tests:", err)
			code = max(code, 1)
		}
		_ = shared.srv.Close()
	}
	if code == 0 {
		// go-redis notices up to a second late that its client was closed.
		if err := goleak.Find(goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// checkTTLs looks at every key of every database that the tests use.
func checkTTLs(srv *redistest.Process) error {
	for _, db := range []int{0, 1} {
		rdb := srv.Client(func(o *redis.Options) { o.DB = db; o.ReadTimeout = 5 * time.Second })
		err := redistest.CheckTTLs(context.Background(), rdb, "")
		_ = rdb.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func sharedServer(t *testing.T) *redistest.Process {
	t.Helper()
	shared.once.Do(func() { shared.srv, shared.err = redistest.Open() })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.srv
}

func clientOf(t *testing.T, o *redis.Options, edit ...func(*redis.Options)) *redis.Client {
	t.Helper()
	o.PoolSize = 32
	o.ReadTimeout, o.WriteTimeout = 5*time.Second, 5*time.Second // the limiter's own deadline is what is tested
	for _, f := range edit {
		f(o)
	}
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

var prefixes atomic.Int64

// ownPrefix is another at each call, so that what shares a server does not meet.
func ownPrefix(t *testing.T) string {
	return fmt.Sprintf("%.60s/%d:", strings.NewReplacer("{", "", "}", "").Replace(t.Name()), prefixes.Add(1))
}

// hybridOn returns a Hybrid that is closed with the test; patient, since the machine of a test may be busy.
func hybridOn(t *testing.T, rdb redis.UniversalClient, prefix string, opts ...tierlimit.Option) *tierlimit.Hybrid {
	t.Helper()
	h, err := tierlimit.New(rdb, append([]tierlimit.Option{
		tierlimit.WithPrefix(prefix), tierlimit.WithRemoteTimeout(2 * time.Second), tierlimit.WithHeartbeat(2 * time.Second),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = h.Close(ctx) // a Redis that was cut off cannot be told
	})
	return h
}

func onShared(t *testing.T, opts ...tierlimit.Option) *tierlimit.Hybrid {
	t.Helper()
	return hybridOn(t, clientOf(t, sharedServer(t).Options()), ownPrefix(t), opts...)
}

func alone(t *testing.T, opts ...tierlimit.Option) *tierlimit.Hybrid {
	t.Helper()
	h, err := tierlimit.NewLocal(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close(context.Background()) })
	return h
}

func limiterOf(t *testing.T, h *tierlimit.Hybrid, limit tierlimit.Limit, opts ...tierlimit.LimiterOption) *tierlimit.Limiter {
	t.Helper()
	l, err := h.Limiter("l", limit, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func allowN(t *testing.T, l *tierlimit.Limiter, key string, n int64) tierlimit.Result {
	t.Helper()
	r, err := l.AllowN(context.Background(), key, n)
	if err != nil {
		t.Errorf("AllowN(%d): %v", n, err)
	}
	if r.Remaining < 0 || r.Remaining > r.Limit || r.Allowed && r.RetryAfter != 0 || !r.Allowed && r.RetryAfter <= 0 {
		t.Errorf("AllowN(%d): a result that cannot be: %+v", n, r)
	}
	return r
}

// admitted makes calls of cost 1, one after another.
func admitted(t *testing.T, l *tierlimit.Limiter, key string, calls int) (n int) {
	t.Helper()
	for range calls {
		if allowN(t, l, key, 1).Allowed {
			n++
		}
	}
	return n
}

// drained spends until a denial outlasts every pause there is, and returns what was admitted.
func drained(t *testing.T, l *tierlimit.Limiter, key string) (n int64) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		r := allowN(t, l, key, 1)
		switch {
		case r.Allowed:
			n++
		case r.RetryAfter > 500*time.Millisecond:
			return n
		default:
			time.Sleep(r.RetryAfter)
		}
	}
	t.Fatal("not drained in 20 seconds")
	return n
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("did not happen: %s", what)
}

func isOnline(h *tierlimit.Hybrid) func() bool {
	return func() bool { return h.Stats().State == tierlimit.StateOnline }
}

// fiveOf are the algorithms with rate tokens per period.
func fiveOf(rate int64, period time.Duration) []tierlimit.Limit {
	return []tierlimit.Limit{
		tierlimit.TokenBucket(rate, period), tierlimit.LeakyBucket(rate, period), tierlimit.FixedWindow(rate, period),
		tierlimit.SlidingWindow(rate, period), tierlimit.SlidingLog(rate, period),
	}
}

// farFromWindowEnd waits until a window of the machine's clock has at least room left.
func farFromWindowEnd(window, room time.Duration) {
	if left := window - time.Duration(time.Now().UnixNano()%int64(window)); left < room {
		time.Sleep(left + time.Millisecond)
	}
}

// cases are subtests that mostly wait: they run side by side, more of them than -parallel would let; a third as many under the race
// detector, with which they wait less.
type cases struct {
	names []string
	tests []func(*testing.T)
}

func (c *cases) add(name string, test func(*testing.T)) {
	c.names, c.tests = append(c.names, name), append(c.tests, test)
}

func (c *cases) run(t *testing.T, atOnce int) {
	t.Helper()
	if tierlimit.RaceEnabled {
		atOnce = (atOnce + 2) / 3
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for i, name := range c.names {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			t.Run(name, c.tests[i])
		})
	}
	wg.Wait()
}

// A jury judges figures: how much was admitted, and how soon. A machine that does not let the load run makes them worse, and so does
// the race detector, which makes everything ten times slower: what falls short then is not judged. That nothing is admitted
// beyond the limit is judged always, and not here.
type jury struct{ cases, dismissed atomic.Int64 }

// newJury fails the test in the end if more than a third of its cases could not be judged.
func newJury(t *testing.T) *jury {
	j := new(jury)
	t.Cleanup(func() {
		if all, out := j.cases.Load(), j.dismissed.Load(); !tierlimit.RaceEnabled && 3*out > all {
			t.Errorf("%d of %d cases were not judged: this machine is too busy for the test", out, all)
		}
	})
	return j
}

// judge lets check say what falls short. Unless there is a reason not to judge it, that is an error.
func (j *jury) judge(t *testing.T, reason string, check func(short func(format string, args ...any))) {
	t.Helper()
	if tierlimit.RaceEnabled {
		reason = "the race detector slows everything down"
	}
	var all []string
	check(func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) })
	j.cases.Add(1)
	if len(all) > 0 && reason != "" {
		j.dismissed.Add(1)
		t.Logf("not judged: %s", reason)
	}
	for _, fault := range all {
		if reason != "" {
			t.Log(fault)
		} else {
			t.Error(fault)
		}
	}
}

// watchMachine sleeps for a millisecond again and again until late is called, which says how much longer that took at most: so much
// later than it should anything else may have happened meanwhile.
func watchMachine(t *testing.T) (late func() time.Duration) {
	t.Helper()
	stop, done := make(chan struct{}), make(chan time.Duration, 1)
	go func() {
		late := time.Duration(0)
		for {
			began := time.Now()
			select {
			case <-stop:
				done <- late
				return
			case <-time.After(time.Millisecond):
				late = max(late, time.Since(began)-time.Millisecond)
			}
		}
	}()
	end := sync.OnceValue(func() time.Duration { close(stop); return <-done })
	t.Cleanup(func() { end() })
	return end
}

// busy is a reason not to judge what took long while the machine was so late.
func busy(late time.Duration) string {
	if late > 5*time.Millisecond {
		return fmt.Sprintf("the machine woke a goroutine %v late", late)
	}
	return ""
}

// run judges a fleet to whose Redis nothing was done.
func (j *jury) run(t *testing.T, r *fleet.Result, check func(short func(format string, args ...any))) {
	t.Helper()
	reason, _ := r.Stalled()
	switch {
	case reason != "":
	case r.GeneratorLate > 15*time.Millisecond: // half of the hundredth that may be missing of 3 seconds
		reason = fmt.Sprintf("the generator was up to %v late", r.GeneratorLate)
	case r.Failures > 0:
		reason = fmt.Sprintf("%d calls were not answered by a Redis that nothing was done to", r.Failures)
	}
	j.judge(t, reason, check)
}

// The simulations' limit for the checker is the fleet's.
func TestEnvelopes(t *testing.T) {
	for _, limit := range append(fiveOf(7, time.Second), tierlimit.SlidingWindow(8, time.Second).WithSubWindows(4), tierlimit.TokenBucket(3, time.Hour).WithBurst(9)) {
		if a, b := fleet.Envelope(limit), tierlimit.EnvelopeOf(limit); a != b {
			t.Errorf("%v: %+v and %+v", limit, a, b)
		}
	}
}
