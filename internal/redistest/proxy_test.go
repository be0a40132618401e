//go:build unix

package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

// raw is a connection that speaks inline commands, to see bytes and errors
// that a client would hide.
type raw struct {
	t *testing.T
	net.Conn
}

func dialRaw(t *testing.T, addr string) raw {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	ok(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return raw{t, c}
}

func (r raw) send(s string) {
	r.t.Helper()
	_, err := r.Write([]byte(s + "\r\n"))
	ok(r.t, err)
}

// read returns what arrives within d.
func (r raw) read(d time.Duration) (string, error) {
	_ = r.SetReadDeadline(time.Now().Add(d))
	buf := make([]byte, 4096)
	n, err := r.Read(buf)
	return string(buf[:n]), err
}

func (r raw) want(s string) {
	r.t.Helper()
	got, err := r.read(20 * time.Second)
	if err != nil || got != s+"\r\n" {
		r.t.Fatalf("read %q, %v; want %q", got, err, s)
	}
}

func (r raw) silent() {
	r.t.Helper()
	if got, err := r.read(50 * time.Millisecond); !isTimeout(err) {
		r.t.Fatalf("read %q, %v; want silence", got, err)
	}
}

func (r raw) reset() {
	r.t.Helper()
	if got, err := r.read(20 * time.Second); !errors.Is(err, syscall.ECONNRESET) {
		r.t.Fatalf("read %q, %v; want a reset", got, err)
	}
}

func setMode(t *testing.T, p *Proxy, m Mode) {
	t.Helper()
	ok(t, p.SetMode(m))
}

// value waits until key has the value: the server executes what the proxy
// forwarded, but nobody says when.
func value(t *testing.T, s *Process, key, want string) {
	t.Helper()
	c := s.Client()
	eventually(t, func() error {
		if v := get(t, c, key); v != want {
			return fmt.Errorf("%s = %q, want %q", key, v, want)
		}
		return nil
	})
}

func TestProxyModes(t *testing.T) {
	t.Parallel()
	s := Start(t)
	tests := []struct {
		mode Mode
		// While the mode lasts:
		executed bool
		// The connection that sent a request in it, once it is over:
		after string // "answer", "reset"
	}{
		{BlackHole, false, "reset"},
		{CutRequests, false, "reset"},
		{CutReplies, true, "reset"},
		{Hold, false, "answer"},
		{HoldRequests, false, "answer"},
		{HoldReplies, true, "answer"},
	}
	for _, tt := range tests {
		t.Run(tt.mode.String(), func(t *testing.T) {
			t.Parallel()
			p := StartProxy(t, s.Addr())
			old, idle := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
			for _, r := range []raw{old, idle} {
				r.send("PING")
				r.want("+PONG")
			}
			setMode(t, p, tt.mode)
			young := dialRaw(t, p.Addr())
			key := strings.ReplaceAll(tt.mode.String(), " ", "-")
			executed := ""
			if tt.executed {
				executed = "1"
			}
			for i, r := range []raw{old, young} {
				r.send(fmt.Sprintf("INCR %s%d", key, i))
				r.silent()
				value(t, s, fmt.Sprint(key, i), executed)
			}
			setMode(t, p, Pass)
			for i, r := range []raw{old, young} {
				if tt.after == "reset" {
					r.reset()
				} else {
					r.want(":1")
					r.send("PING")
					r.want("+PONG")
				}
				if tt.after == "answer" || tt.executed {
					value(t, s, fmt.Sprint(key, i), "1")
				} else {
					value(t, s, fmt.Sprint(key, i), "")
				}
			}
			// What lost nothing goes on, and new connections work.
			for _, r := range []raw{idle, dialRaw(t, p.Addr())} {
				r.send("PING")
				r.want("+PONG")
			}
		})
	}
}

func TestProxyRefuseAndReset(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := StartProxy(t, s.Addr())
	for range 3 {
		old := dialRaw(t, p.Addr())
		old.send("PING")
		old.want("+PONG")
		setMode(t, p, Refuse)
		setMode(t, p, Refuse)
		old.reset()
		if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("dial: %v, want refused", err)
		}
		setMode(t, p, Reset)
		// The reset may come before Dial has looked at the connection.
		if c, err := net.Dial("tcp", p.Addr()); err == nil {
			raw{t, c}.reset()
			_ = c.Close()
		} else if !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("dial: %v, want a reset", err)
		}
		setMode(t, p, Pass)
	}
	idle := dialRaw(t, p.Addr())
	idle.send("PING")
	idle.want("+PONG")
	p.ResetConns()
	idle.reset()
	c := dialRaw(t, p.Addr())
	c.send("PING")
	c.want("+PONG")
}

// A held request is executed after its caller has given up: what a healed
// network does to calls that timed out.
func TestProxyHeldRequestOutlivesItsClient(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := StartProxy(t, s.Addr())
	c := redis.NewClient(p.Options())
	ok(t, c.Ping(within(t)).Err())
	setMode(t, p, HoldRequests)
	if err := c.Incr(within(t), "late").Err(); err == nil {
		t.Fatal("answered")
	}
	ok(t, c.Close())
	value(t, s, "late", "")
	setMode(t, p, Pass)
	value(t, s, "late", "1")
	eventually(t, func() error {
		if n := p.Conns(); n != 0 {
			return fmt.Errorf("%d connections are left", n)
		}
		return nil
	})
}

func TestProxyDelay(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := StartProxy(t, s.Addr())
	c := dialRaw(t, p.Addr())
	for _, tt := range []struct {
		name     string
		to, from Delay
		least    time.Duration
	}{
		{"requests", Delay{Latency: 60 * time.Millisecond}, Delay{}, 60 * time.Millisecond},
		{"replies", Delay{}, Delay{Latency: 60 * time.Millisecond}, 60 * time.Millisecond},
		{"both", Delay{Latency: 40 * time.Millisecond}, Delay{40 * time.Millisecond, 20 * time.Millisecond}, 80 * time.Millisecond},
	} {
		p.SetDelay(tt.to, tt.from)
		start := time.Now()
		c.send("PING")
		c.want("+PONG")
		if d := time.Since(start); d < tt.least {
			t.Errorf("%s: answered after %v", tt.name, d)
		}
	}

	// Bytes are delayed, not spaced: 20 requests that do not wait for each
	// other take one latency, not 20. Their order stays whatever the jitter.
	p.SetDelay(Delay{100 * time.Millisecond, 50 * time.Millisecond}, Delay{100 * time.Millisecond, 50 * time.Millisecond})
	start := time.Now()
	var want bytes.Buffer
	for i := range 20 {
		c.send(fmt.Sprintf("ECHO m%02d", i))
		fmt.Fprintf(&want, "$3\r\nm%02d\r\n", i)
		time.Sleep(2 * time.Millisecond)
	}
	got := make([]byte, want.Len())
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	_, err := io.ReadFull(c, got)
	ok(t, err)
	if !bytes.Equal(got, want.Bytes()) {
		t.Errorf("replies out of order: %q", got)
	}
	if d := time.Since(start); d < 200*time.Millisecond || d > 3*time.Second {
		t.Errorf("20 requests took %v", d)
	}

	// A mode, or the end of the proxy, does not wait for what is under way.
	p.SetDelay(Delay{Latency: time.Hour}, Delay{})
	c.send("PING")
	time.Sleep(5 * time.Millisecond) // most likely the proxy has it; either way it is reset
	p.ResetConns()
	c.reset()
}

func TestProxyLosesReplies(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := StartProxy(t, s.Addr())
	ctx := within(t)
	c := fresh(t, p.Addr())
	script := redis.NewScript(`return redis.call('INCRBY', KEYS[1], ARGV[1])`)
	ok(t, script.Load(ctx, c).Err())

	const n = 3
	p.LoseReplies(n, "EVALSHA")
	ok(t, c.Set(ctx, "other", "1", 0).Err()) // does not count
	failed := 0
	for range 10 {
		if err := script.EvalSha(ctx, c, []string{"sum"}, 1).Err(); err != nil {
			if isTimeout(err) {
				t.Fatalf("the reset came too late: %v", err)
			}
			failed++
		}
	}
	if failed != n || p.Lost() != n {
		t.Errorf("%d calls failed, Lost is %d, want %d", failed, p.Lost(), n)
	}
	value(t, s, "sum", "10") // each executed once, answered or not

	// Without words the handshake of new connections does not count.
	p.LoseReplies(1)
	c2 := fresh(t, p.Addr())
	if err := c2.Incr(ctx, "first").Err(); err == nil {
		t.Error("the reply was not lost")
	}
	ok(t, c2.Incr(ctx, "first").Err())
	value(t, s, "first", "2")

	p.LoseReplies(5)
	p.LoseReplies(0)
	ok(t, c2.Incr(ctx, "first").Err())
}

// All of a pipeline is executed, also the commands behind the one whose reply
// came first, and also when it comes in many reads.
func TestProxyLosesAPipelineOfLargeRequests(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := StartProxy(t, s.Addr())
	c := fresh(t, p.Addr())
	ctx := within(t)
	ok(t, c.Ping(ctx).Err())
	for round := range 5 {
		p.LoseReplies(1)
		// One command larger than any buffer on the way.
		big := strings.Repeat("x", 1<<20)
		if err := c.Set(ctx, fmt.Sprint("big", round), big, 0).Err(); err == nil {
			t.Fatal("the reply was not lost")
		}
		if n := s.Client().StrLen(ctx, fmt.Sprint("big", round)).Val(); n != 1<<20 {
			t.Fatalf("round %d: server has %d bytes", round, n)
		}
		p.LoseReplies(1)
		_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for range 200 {
				pipe.Incr(ctx, "n")
			}
			return nil
		})
		if err == nil {
			t.Fatal("the replies were not lost")
		}
		value(t, s, "n", fmt.Sprint(200*(round+1)))
	}
}

func TestProxyWhenTheServerIsDown(t *testing.T) {
	t.Parallel()
	s := Start(t, Persist())
	p := StartProxy(t, s.Addr())
	c := dialRaw(t, p.Addr())
	c.send("PING")
	c.want("+PONG")
	ok(t, s.Kill())
	if _, err := c.read(20 * time.Second); err == nil || isTimeout(err) {
		t.Fatalf("the end of the server did not reach the client: %v", err)
	}
	c = dialRaw(t, p.Addr())
	c.send("PING")
	c.reset()
	ok(t, s.Restart())
	c = dialRaw(t, p.Addr())
	c.send("PING")
	c.want("+PONG")

	other := Start(t)
	p.SetTarget(other.Addr())
	ok(t, fresh(t, p.Addr()).Set(within(t), "here", "1", 0).Err())
	value(t, other, "here", "1")
}

// Everything at once, seeded; then the proxy works and its Close leaves
// nothing. No t.Parallel: goleak must not see other tests' goroutines.
func TestProxyUnderConcurrentChangesLeavesNothing(t *testing.T) {
	before := goleak.IgnoreCurrent()
	s, err := Open()
	ok(t, err)
	p, err := OpenProxy(s.Addr())
	ok(t, err)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var wg sync.WaitGroup
	stop := time.Now().Add(700 * time.Millisecond)
	for i := range 4 {
		wg.Go(func() {
			o := p.Options()
			o.ReadTimeout = 20 * time.Millisecond
			c := redis.NewClient(o)
			defer c.Close()
			for time.Now().Before(stop) {
				_ = c.Incr(t.Context(), fmt.Sprint("k", i)).Err() // mostly fails
			}
		})
	}
	for i := range 3 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			for time.Now().Before(stop) {
				switch r.IntN(5) {
				case 0:
					p.ResetConns()
				case 1:
					p.LoseReplies(r.IntN(3))
				case 2:
					p.SetDelay(Delay{Jitter: time.Duration(1+r.IntN(3)) * time.Millisecond}, Delay{Latency: time.Millisecond})
				default:
					if err := p.SetMode(Mode(r.IntN(len(modeNames)))); err != nil {
						t.Error(err)
					}
				}
				time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
			}
		})
	}
	wg.Wait()
	setMode(t, p, Pass)
	p.LoseReplies(0)
	p.SetDelay(Delay{}, Delay{})
	c := redis.NewClient(p.Options())
	ok(t, c.Set(within(t), "k", "v", 0).Err())
	ok(t, c.Close())

	// Close with connections in every state.
	for _, m := range []Mode{Pass, Hold, BlackHole, CutReplies} {
		setMode(t, p, m)
		dialRaw(t, p.Addr()).send("INCR x")
	}
	p.Close()
	p.Close()
	if p.SetMode(Pass) == nil {
		t.Error("a closed proxy changed its mode")
	}
	ok(t, s.Close())
	goleak.VerifyNone(t, before, ignoreDialer)
}
