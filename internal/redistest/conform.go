package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Conform holds a back end to what [Backend] and [Server] say, so that a suite
// that runs on several means the same on each.
func Conform(t *testing.T, b Backend) {
	for name, test := range map[string]func(*testing.T, Backend){
		"kill and restart":      conformRestart,
		"restart needs Persist": conformVolatile,
		"down refuses":          conformDown,
		"hang and continue":     conformHang,
		"follow and promote":    conformRoles,
		"arguments win":         conformArgs,
		"kill while loading":    conformLoading,
		"concurrent faults":     conformConcurrent,
		"two servers":           conformTwo,
		"close":                 conformClose,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, b)
		})
	}
}

// A server that is killed while it is written to comes back with every write
// that it acknowledged, on the same address.
func conformRestart(t *testing.T, b Backend) {
	s := b.Start(t, Persist())
	addr := s.Addr()
	host, _, err := net.SplitHostPort(addr)
	ok(t, err)
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		t.Fatalf("%s is not on loopback", addr)
	}
	written := 0
	enough, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		c := steady(t, addr)
		for ; c.Set(t.Context(), fmt.Sprint("k", written), written, 0).Err() == nil; written++ {
			if written == 100 {
				close(enough)
			}
		}
	}()
	select {
	case <-enough:
	case <-done:
		t.Fatalf("the %dth write failed before the kill", written)
	}
	ok(t, s.Kill())
	ok(t, s.Kill()) // down is down
	<-done
	kept := func() {
		t.Helper()
		if s.Addr() != addr {
			t.Fatalf("address changed from %s to %s", addr, s.Addr())
		}
		c := steady(t, addr)
		for i := range written {
			if v := get(t, c, fmt.Sprint("k", i)); v != fmt.Sprint(i) {
				t.Fatalf("k%d is %q, and %d writes were acknowledged", i, v, written)
			}
		}
	}
	ok(t, s.Restart())
	kept()

	// Stop, and Restart of a running server.
	ok(t, s.Stop())
	ok(t, s.Stop())
	ok(t, s.Restart())
	ok(t, s.Restart())
	kept()

	ok(t, s.RestartEmpty())
	if n := steady(t, addr).DBSize(within(t)).Val(); n != 0 {
		t.Fatalf("%d keys after RestartEmpty", n)
	}
	ok(t, steady(t, addr).Set(within(t), "k0", "0", 0).Err())
	ok(t, s.Kill())
	ok(t, s.RestartEmpty()) // of a server that is down
	if v := get(t, steady(t, addr), "k0"); v != "" {
		t.Fatalf("k0 is %q after RestartEmpty", v)
	}
}

func conformVolatile(t *testing.T, b Backend) {
	s := b.Start(t)
	c := steady(t, s.Addr())
	ok(t, c.Set(within(t), "k", "v", 0).Err())
	if err := s.Restart(); err == nil {
		t.Fatal("Restart promised data that is not there")
	}
	if get(t, c, "k") != "v" {
		t.Fatal("the refused Restart touched the server")
	}
	ok(t, FlushAll(within(t), s.Addr()))
	if get(t, c, "k") != "" {
		t.Fatal("FlushAll left a key")
	}
	ok(t, s.RestartEmpty())
}

// Who dials a dead server learns it at once, and who dials a hung one is
// accepted: nothing in between answers in the server's place.
func conformDown(t *testing.T, b Backend) {
	s := b.Start(t)
	c := s.Client()
	eventually(t, func() error { return c.Ping(within(t)).Err() }) // it is connected
	ok(t, s.Hang())
	conn, err := net.DialTimeout("tcp", s.Addr(), time.Second)
	if err != nil {
		t.Fatalf("a hung server does not accept: %v", err)
	}
	defer conn.Close()
	ok(t, s.Kill())
	if _, err := conn.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Fatalf("a connection outlives its server: %v", err)
	}
	if err := c.Ping(within(t)).Err(); err == nil {
		t.Fatal("a killed server answered")
	}
	conn, err = net.DialTimeout("tcp", s.Addr(), time.Second)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		if err == nil {
			_ = conn.Close()
		}
		t.Fatalf("dialling a killed server: %v", err)
	}
}

func conformHang(t *testing.T, b Backend) {
	s := b.Start(t)
	c := s.Client()
	eventually(t, func() error { return c.Ping(within(t)).Err() }) // it is connected
	ok(t, s.Hang())
	ok(t, s.Hang()) // hung is hung
	start := time.Now()
	if err := c.Incr(within(t), "late").Err(); err == nil {
		t.Fatal("a hung server answered")
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Fatalf("the tight client waited %v", d)
	}
	ok(t, s.Continue())
	ok(t, s.Continue())
	// The call that timed out is executed all the same.
	eventually(t, func() error {
		if v := get(t, steady(t, s.Addr()), "late"); v != "1" {
			return fmt.Errorf("late = %q", v)
		}
		return nil
	})

	// Hung servers can be killed, stopped and closed.
	ok(t, s.Hang())
	ok(t, s.Kill())
	if s.Hang() == nil || s.Continue() == nil {
		t.Fatal("a dead server cannot hang or continue")
	}
	ok(t, s.RestartEmpty())
	ok(t, s.Hang())
	ok(t, s.Stop())
	ok(t, s.RestartEmpty())
	ok(t, s.Hang())
	ok(t, s.RestartEmpty())
	ok(t, steady(t, s.Addr()).Ping(within(t)).Err())
	ok(t, s.Hang())
}

func conformRoles(t *testing.T, b Backend) {
	primary := b.Start(t)
	link := StartProxy(t, primary.Addr())
	replica := b.Start(t, Persist(), ReplicaOf(link.Addr()))
	c, rc := steady(t, primary.Addr()), steady(t, replica.Addr())
	ok(t, c.Set(within(t), "k", "1", 0).Err())
	ok(t, WaitReplica(within(t), replica.Addr()))
	if v := get(t, rc, "k"); v != "1" {
		t.Fatalf("replica has %q", v)
	}
	if err := rc.Set(within(t), "k", "2", 0).Err(); err == nil || !strings.HasPrefix(err.Error(), "READONLY") {
		t.Fatalf("a write to a replica: %v", err)
	}

	// The link is cut: the promoted replica has lost the last write.
	ok(t, link.SetMode(BlackHole))
	ok(t, c.Set(within(t), "k", "lost", 0).Err())
	ok(t, replica.Promote())
	ok(t, replica.Restart()) // stays a primary
	if v := get(t, steady(t, replica.Addr()), "k"); v != "1" {
		t.Fatalf("promoted replica has %q", v)
	}
	ok(t, steady(t, replica.Addr()).Set(within(t), "k", "new", 0).Err())

	// The old primary follows the new one, also after a restart.
	ok(t, primary.Follow(replica.Addr()))
	ok(t, primary.RestartEmpty())
	ok(t, WaitReplica(within(t), primary.Addr()))
	if v := get(t, steady(t, primary.Addr()), "k"); v != "new" {
		t.Fatalf("old primary has %q", v)
	}
}

func conformArgs(t *testing.T, b Backend) {
	s := b.Start(t, Args("--maxmemory", "8mb", "--appendonly", "yes"))
	c := steady(t, s.Addr())
	for name, want := range map[string]string{"maxmemory": "8388608", "appendonly": "yes"} {
		if got := c.ConfigGet(within(t), name).Val()[name]; got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	// DEBUG works, on versions that have it off by default too.
	ok(t, c.Do(within(t), "DEBUG", "SLEEP", "0").Err())

	p := b.Start(t, Args("--requirepass", "secret"))
	if err := steady(t, p.Addr()).Ping(within(t)).Err(); err == nil || !strings.HasPrefix(err.Error(), "NOAUTH") {
		t.Fatalf("no password asked: %v", err)
	}
	ok(t, p.Client(func(o *redis.Options) { o.Password, o.ReadTimeout = "secret", 10*time.Second }).Ping(within(t)).Err())
	ok(t, p.RestartEmpty()) // a server that asks for a password answers
}

// A loading server can be killed: whoever restarts it holds no lock meanwhile.
func conformLoading(t *testing.T, b Backend) {
	s := b.Start(t, Persist(), Args("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024"))
	c := s.Client(func(o *redis.Options) { o.ReadTimeout = 10 * time.Second })
	ok(t, c.Eval(within(t), `for i = 1, 20000 do redis.call('SET', 'k' .. i, i) end return 1`, nil).Err())
	ok(t, c.Do(within(t), "BGREWRITEAOF").Err())
	eventually(t, func() error {
		if f := parseInfo(c.Info(within(t), "persistence").Val()); f["aof_rewrite_in_progress"] != "0" || f["aof_rewrite_scheduled"] != "0" {
			return errors.New("rewriting")
		}
		return nil
	})
	ok(t, s.Kill())
	done := make(chan error, 1)
	go func() { done <- s.Restart() }()
	eventually(t, func() error {
		err := steady(t, s.Addr()).Get(within(t), "k1").Err()
		if err == nil {
			t.Fatal("loaded already: the test has nothing to interrupt")
		}
		if !strings.HasPrefix(err.Error(), "LOADING") {
			return fmt.Errorf("not loading: %w", err)
		}
		return nil
	})
	ok(t, s.Kill())
	if err := <-done; err == nil {
		t.Fatal("Restart of a server that was killed meanwhile succeeded")
	}
}

func conformConcurrent(t *testing.T, b Backend) {
	s := b.Start(t, Persist())
	addr := s.Addr()
	var wg sync.WaitGroup
	for _, f := range []func() error{s.Kill, s.Hang, s.Continue, s.Restart, s.RestartEmpty, s.Stop} {
		wg.Go(func() {
			for range 5 {
				_ = f() // it may find the server down or up
			}
		})
	}
	wg.Wait()
	ok(t, s.RestartEmpty())
	ok(t, steady(t, addr).Ping(within(t)).Err())
	if s.Addr() != addr {
		t.Fatalf("address changed from %s to %s", addr, s.Addr())
	}
}

// Servers do not share an address, data or faults.
func conformTwo(t *testing.T, b Backend) {
	one, other := b.Start(t, Persist()), b.Start(t, Persist())
	ok(t, steady(t, one.Addr()).Set(within(t), "k", "one", 0).Err())
	ok(t, steady(t, other.Addr()).Set(within(t), "k", "other", 0).Err())
	ok(t, one.RestartEmpty())
	if v := get(t, steady(t, one.Addr()), "k"); v != "" {
		t.Fatalf("the emptied server has %q", v)
	}
	ok(t, one.Close())
	ok(t, other.Restart())
	if v := get(t, steady(t, other.Addr()), "k"); v != "other" {
		t.Fatalf("the other server has %q", v)
	}
}

func conformClose(t *testing.T, b Backend) {
	s := b.Start(t, Persist())
	c := s.Client()
	ok(t, steady(t, s.Addr()).Set(within(t), "k", "v", 0).Err())
	ok(t, s.Hang())
	ok(t, s.Close())
	ok(t, s.Close())
	if err := c.Ping(within(t)).Err(); !errors.Is(err, redis.ErrClosed) {
		t.Errorf("the client is open: %v", err)
	}
	for name, f := range map[string]func() error{"Restart": s.Restart, "RestartEmpty": s.RestartEmpty} {
		if err := f(); err == nil {
			t.Errorf("%s of a closed server succeeded", name)
		}
	}
	if conn, err := net.DialTimeout("tcp", s.Addr(), time.Second); err == nil {
		_ = conn.Close()
		t.Error("a closed server accepts")
	}
}

// ok fails the test at once if err is not nil.
func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within returns a context for steps that take far less unless they fail.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// fresh returns a client whose pool has seen no fault: go-redis answers from a
// cached error for up to a second after its dials failed.
func fresh(t *testing.T, addr string) *redis.Client {
	c := redis.NewClient(Options(addr))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// steady is fresh for what has to succeed, on a busy machine too.
func steady(t *testing.T, addr string) *redis.Client {
	c := patient(addr)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// get returns the value of key, or "" if there is none.
func get(t *testing.T, c redis.Cmdable, key string) string {
	t.Helper()
	s, err := c.Get(within(t), key).Result()
	if errors.Is(err, redis.Nil) {
		return ""
	}
	ok(t, err)
	return s
}

// eventually waits until f returns nil.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	ok(t, poll(within(t), f))
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
