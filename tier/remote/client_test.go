package remote

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier"
)

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func TestMain(m *testing.M) {
	redis.SetLogger(silent{}) // every fault here is meant
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

// counting scripts obey the calling convention and count, per key, how often they ran: as the lease, which the caller can
// check against what it sent. Package lua tests its own scripts.
func counting() *scripts {
	const (
		clock   = "local t = redis.call('TIME') local now = t[1] * 1000000 + t[2] "
		numbers = `local function numbers(...) return struct.pack('<' .. string.rep('I7', select('#', ...)), ...) end `
	)
	s := new(scripts)
	for alg := 1; alg <= tier.Algorithms; alg++ {
		body := clock + numbers + fmt.Sprintf("local r = numbers(now) .. '\\0' -- algorithm %d", alg) + `
			local fence = struct.unpack('<I7', ARGV[1])
			if fence > 0 and now > fence then return numbers(now) .. '\1' end
			if #ARGV ~= 1 or #ARGV[1] < 64 + 35 + 32 * #KEYS then return redis.error_reply('ERR tierlimit arguments') end
			for i, key in ipairs(KEYS) do
				local n = redis.call('INCR', key)
				redis.call('PEXPIRE', key, 600000)
				r = r .. '\4' .. numbers(0, 0, 0, 0, -1, 0, 0, n, 0, n, 0, 1, now, 0)
			end
			return r`
		s.exchange[alg] = script{sha: redis.NewScript(body).Hash(), body: body}
	}
	body := clock + `
		local fence = tonumber(ARGV[1])
		if fence > 0 and now > fence then return {now, 1} end
		local n = redis.call('INCR', KEYS[1])
		redis.call('PEXPIRE', KEYS[1], 600000)
		return {now, 0, 3, 1, 1, 0, 0, 3, 0, 0, 0, 0, 0, n, 0, 0, 3}`
	s.membership = script{sha: redis.NewScript(body).Hash(), body: body}
	return s
}

const prefix = "tl:"

func asksFor(names ...string) []tier.Ask {
	asks := make([]tier.Ask, len(names))
	for i, name := range names {
		asks[i] = tier.Ask{Key: name, Limit: tier.Limit{Algorithm: tier.TokenBucket, Rate: 10, Period: time.Second, Burst: 10}, SlotUS: 150_000, Want: 1 << 40}
	}
	return asks
}

func keyNamed(key string) string {
	name, _ := KeyName(prefix, "api", key)
	return name
}

// exchange makes a call for names and returns how often each has run.
func exchange(ctx context.Context, c *Client, names ...string) ([]int64, error) {
	r, err := c.Exchange(ctx, tier.TokenBucket, 0, tier.Darkness{}, asksFor(names...))
	var runs []int64
	for _, g := range r.Grants {
		runs = append(runs, g.Lease)
	}
	return runs, err
}

func patience(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// stock is a client as users have it: three retries, a context that is not honoured, time-outs of seconds.
func stock(t *testing.T, addr string) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// served returns how often the server at addr was given a command, and how often it executed it without an error.
func served(t *testing.T, rdb redis.UniversalClient, command string) (calls, failed int) {
	t.Helper()
	info, err := rdb.Info(patience(t, 5*time.Second), "commandstats").Result()
	ok(t, err)
	for line := range strings.Lines(info) {
		if rest, found := strings.CutPrefix(line, "cmdstat_"+command+":"); found {
			for field := range strings.SplitSeq(strings.TrimSpace(rest), ",") {
				name, value, _ := strings.Cut(field, "=")
				n, _ := strconv.Atoi(value)
				switch name {
				case "calls":
					calls = n
				case "failed_calls":
					failed = n
				}
			}
		}
	}
	return calls, failed
}

func TestExchange(t *testing.T) {
	s := redistest.Start(t)
	c := newClient(stock(t, s.Addr()), prefix, counting())
	ctx := patience(t, 5*time.Second)
	if c.Grouped() || c.Domain(200) != (Domain{}) || !slices.Equal(c.domains(), []Domain{{}}) {
		t.Errorf("a plain client: grouped %v, domains %v", c.Grouped(), c.domains())
	}
	ok(t, c.Refresh(ctx))

	var names []string
	for i := range MaxKeys {
		names = append(names, keyNamed(fmt.Sprint("k", i)))
	}
	for want := int64(1); want <= 2; want++ {
		runs, err := exchange(ctx, c, names...)
		ok(t, err)
		if len(runs) != MaxKeys || slices.Min(runs) != want || slices.Max(runs) != want {
			t.Fatalf("runs %v, want %d", runs, want)
		}
	}
	if c.Calls() != 3 { // EVALSHA, EVAL, EVALSHA
		t.Errorf("%d calls", c.Calls())
	}

	r, err := c.Exchange(ctx, tier.TokenBucket, 1, tier.Darkness{}, asksFor(names[0]))
	if err != nil || !r.Late || r.Now < 1e15 || r.Grants != nil {
		t.Errorf("behind its fence: %+v, %v", r, err)
	}
	now := r.Now
	r, err = c.Exchange(ctx, tier.TokenBucket, now+60e6, tier.Darkness{}, asksFor(names[0]))
	if err != nil || r.Late || r.Now < now || r.Grants[0].Lease != 3 {
		t.Errorf("before its fence: %+v, %v", r, err)
	}

	v, err := c.Heartbeat(ctx, c.Domain(3), Beat{Op: OpBeat, ID: "me", HeartbeatUS: 1e6, DeadUS: 1e7, HorizonUS: 1e6})
	if err != nil || v.N != 3 || v.Rank != 1 || v.Beats != 1 {
		t.Errorf("heartbeat: %+v, %v", v, err)
	}
}

func TestUnsendable(t *testing.T) {
	s := redistest.Start(t)
	c := newClient(s.Client(), prefix, counting())
	good := asksFor(keyNamed("a"), keyNamed("b"))
	mixed := slices.Clone(good)
	mixed[1].Limit.Algorithm = tier.FixedWindow
	for name, call := range map[string]func() error{
		"no keys":    func() error { _, err := c.Exchange(t.Context(), tier.TokenBucket, 0, tier.Darkness{}, nil); return err },
		"algorithm":  func() error { _, err := c.Exchange(t.Context(), 0, 0, tier.Darkness{}, good); return err },
		"algorithm6": func() error { _, err := c.Exchange(t.Context(), 6, 0, tier.Darkness{}, good); return err },
		"mixed": func() error {
			_, err := c.Exchange(t.Context(), tier.TokenBucket, 0, tier.Darkness{}, mixed)
			return err
		},
		"many": func() error {
			_, err := c.Exchange(t.Context(), tier.TokenBucket, 0, tier.Darkness{}, make([]tier.Ask, MaxKeys+1))
			return err
		},
		"groups": func() error {
			c.grouped.Store(true)
			_, err := c.Exchange(t.Context(), tier.TokenBucket, 0, tier.Darkness{}, good)
			return err
		},
		"done": func() error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := exchange(ctx, c, keyNamed("a"))
			if !errors.Is(err, context.Canceled) {
				t.Errorf("a cancelled context: %v", err)
			}
			return err
		},
	} {
		if err := call(); err == nil || !NotExecuted(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if c.Calls() != 0 {
		t.Errorf("%d calls were sent", c.Calls())
	}
}

// Cases A9 and A10: a server that lost its scripts is taught them again, at any time and as often as it takes.
func TestNoScript(t *testing.T) {
	s := redistest.Start(t)
	rdb := stock(t, s.Addr())
	c := newClient(rdb, prefix, counting())
	ctx := patience(t, 10*time.Second)
	for i := int64(1); i <= 3; i++ {
		runs, err := exchange(ctx, c, keyNamed("a"), keyNamed("b"))
		if err != nil || !slices.Equal(runs, []int64{i, i}) {
			t.Fatalf("after %d flushes: %v, %v", i-1, runs, err)
		}
		if v, err := c.Heartbeat(ctx, Domain{}, Beat{Op: OpBeat}); err != nil || v.Beats != i {
			t.Fatalf("heartbeat after %d flushes: %+v, %v", i-1, v, err)
		}
		ok(t, rdb.ScriptFlush(ctx).Err())
	}
	if sha, failed := served(t, rdb, "evalsha"); sha != 6 || failed != 6 {
		t.Errorf("%d EVALSHA, %d refused, want 6 and 6", sha, failed)
	}
	if eval, failed := served(t, rdb, "eval"); eval != 6 || failed != 0 || c.Calls() != 12 {
		t.Errorf("%d EVAL, %d refused; %d calls", eval, failed, c.Calls())
	}

	ok(t, s.RestartEmpty())
	runs, err := exchange(ctx, c, keyNamed("a"))
	for err != nil && ctx.Err() == nil { // connections of before the restart are found dead one by one
		runs, err = exchange(ctx, c, keyNamed("a"))
	}
	if err != nil || len(runs) != 1 {
		t.Errorf("after a restart: %v, %v", runs, err)
	}
}

// Many calls meet the flush at once, on a client that pipelines what it is given.
func TestNoScriptAtOnce(t *testing.T) {
	s := redistest.Start(t)
	blocking, err := stock(t, s.Addr()).AutoPipeline()
	ok(t, err)
	async, err := stock(t, s.Addr()).AsyncAutoPipeline()
	ok(t, err)
	for name, rdb := range map[string]redis.UniversalClient{"plain": stock(t, s.Addr()), "pipelined": blocking, "asynchronous": async} {
		t.Run(name, func(t *testing.T) {
			ok(t, s.FlushAll(t.Context()))
			c := newClient(rdb, prefix, counting())
			other := s.Client()
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for range 25 {
						if _, err := exchange(patience(t, 5*time.Second), c, keyNamed("a")); err != nil {
							t.Error(err)
						}
					}
				})
			}
			for range 10 {
				ok(t, other.ScriptFlush(t.Context()).Err())
				time.Sleep(2 * time.Millisecond)
			}
			wg.Wait()
			if runs, err := exchange(patience(t, 5*time.Second), c, keyNamed("a")); err != nil || runs[0] != 201 {
				t.Errorf("ran %v times, want 201: %v", runs, err)
			}
		})
	}
}

// A server that is connected and silent, behind a client that ignores contexts and retries.
func TestHungServer(t *testing.T) {
	s := redistest.Start(t)
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr(), PoolSize: 1000, MinIdleConns: 2 * maxAbandoned, ReadTimeout: 2 * time.Second})
	t.Cleanup(func() { _ = rdb.Close() })
	// With a connection at hand for each, calls hang in a read, where go-redis does not look at the context.
	for ctx := patience(t, 10*time.Second); rdb.PoolStats().IdleConns < 2*maxAbandoned; time.Sleep(time.Millisecond) {
		ok(t, ctx.Err())
	}
	c := newClient(rdb, prefix, counting())
	_, err := exchange(patience(t, 5*time.Second), c, keyNamed("a"))
	ok(t, err)
	before := runtime.NumGoroutine()
	ok(t, s.Hang())
	t.Cleanup(func() { _ = s.Continue() })

	const timeout = 50 * time.Millisecond
	var mu sync.Mutex
	var worst time.Duration
	outcomes := map[string]int{}
	var wg sync.WaitGroup
	for range 300 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			start := time.Now()
			_, err := exchange(ctx, c, keyNamed("a"))
			d := time.Since(start)
			mu.Lock()
			defer mu.Unlock()
			worst = max(worst, d)
			switch {
			case errors.Is(err, ErrBusyClient):
				outcomes["busy"]++
			case NotExecuted(err):
				outcomes["unsent"]++
			case errors.Is(err, context.DeadlineExceeded):
				outcomes["unknown"]++
			default:
				t.Errorf("outcome %v", err)
			}
		})
	}
	wg.Wait()
	// The client's own time-out, four times over, is 8 s. Starting 300 calls at once on a busy machine takes its time, too.
	if worst > timeout+time.Second {
		t.Errorf("a call took %v", worst)
	}
	if outcomes["unknown"] == 0 || len(c.gate(Domain{}).places) > maxAbandoned {
		t.Errorf("outcomes %v, %d calls under way", outcomes, len(c.gate(Domain{}).places))
	}
	if grown := runtime.NumGoroutine() - before; grown > 2*maxAbandoned+16 { // a dial each may be under way
		t.Errorf("%d goroutines more", grown)
	}

	ok(t, s.Continue())
	deadline := time.Now().Add(20 * time.Second)
	for len(c.gate(Domain{}).places) > 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	if n := len(c.gate(Domain{}).places); n > 0 {
		t.Fatalf("%d calls are under way 20 s after the server went on", n)
	}
	runs, err := exchange(patience(t, 5*time.Second), c, keyNamed("a"))
	ok(t, err)
	// Abandoned calls may have run, each once. Nothing was sent a second time.
	calls, _ := served(t, rdb, "evalsha")
	eval, _ := served(t, rdb, "eval")
	if total := int64(calls + eval); total > c.Calls() {
		t.Errorf("the server was given %d script calls, %d were made", total, c.Calls())
	}
	if runs[0] > 2+maxAbandoned {
		t.Errorf("ran %d times", runs[0])
	}
}

// deaf hangs every command until it is released, whatever the context says.
type deaf struct{ release chan struct{} }

func (deaf) DialHook(next redis.DialHook) redis.DialHook { return next }
func (d deaf) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { <-d.release; return io.EOF }
}
func (deaf) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestBusyClient(t *testing.T) {
	rdb := stock(t, "127.0.0.1:1")
	d := deaf{make(chan struct{})}
	rdb.AddHook(d)
	c := newClient(rdb, prefix, counting())
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	for range 3 * maxAbandoned {
		wg.Go(func() {
			_, err := exchange(patience(t, 20*time.Millisecond), c, keyNamed("a"))
			if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrBusyClient) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for range 1000 {
		if _, err := exchange(patience(t, time.Minute), c, keyNamed("a")); !errors.Is(err, ErrBusyClient) || !NotExecuted(err) {
			t.Fatalf("while all places are taken: %v", err)
		}
	}
	if _, err := c.Heartbeat(patience(t, time.Minute), Domain{}, Beat{}); !errors.Is(err, ErrBusyClient) {
		t.Errorf("a heartbeat meanwhile: %v", err)
	}
	if grown := runtime.NumGoroutine() - before; grown > maxAbandoned || c.Calls() != maxAbandoned || len(c.gate(Domain{}).places) != maxAbandoned {
		t.Errorf("%d goroutines more, %d calls", grown, c.Calls())
	}
	close(d.release)
	for ctx := patience(t, 10*time.Second); len(c.gate(Domain{}).places) > 0; time.Sleep(time.Millisecond) {
		ok(t, ctx.Err())
	}
	if _, err := exchange(patience(t, time.Minute), c, keyNamed("a")); !errors.Is(err, io.EOF) {
		t.Errorf("after the hang: %v", err)
	}
}

// A reply that is lost leaves a script that ran once, whatever the client's retries.
func TestLostReply(t *testing.T) {
	s := redistest.Start(t)
	p := redistest.StartProxy(t, s.Addr())
	rdb := stock(t, p.Addr())
	c := newClient(rdb, prefix, counting())
	ctx := patience(t, 10*time.Second)
	_, err := exchange(ctx, c, keyNamed("a"))
	ok(t, err)
	p.LoseReplies(3, "evalsha")
	for range 3 {
		if _, err := exchange(ctx, c, keyNamed("a")); err == nil || NotExecuted(err) {
			t.Errorf("a lost reply: %v", err)
		}
	}
	if runs, err := exchange(ctx, c, keyNamed("a")); err != nil || runs[0] != 5 {
		t.Errorf("ran %v times, want 5: %v", runs, err)
	}
}

func TestDeadServer(t *testing.T) {
	s := redistest.Start(t)
	c := newClient(s.Client(), prefix, counting())
	_, err := exchange(patience(t, 5*time.Second), c, keyNamed("a"))
	ok(t, err)
	ok(t, s.Kill())
	// The first calls may find a connection of before, and do not know whether it still carried them.
	for range 10 {
		_, err = exchange(patience(t, 5*time.Second), c, keyNamed("a"))
		if err == nil {
			t.Fatal("a dead server answered")
		}
	}
	if !NotExecuted(err) {
		t.Errorf("a refused connection: %v", err)
	}
	// A client that retries its dials for seconds is not waited for, and then it is not known how it ended.
	c = newClient(stock(t, s.Addr()), prefix, counting())
	start := time.Now()
	if _, err := exchange(patience(t, 50*time.Millisecond), c, keyNamed("a")); !errors.Is(err, context.DeadlineExceeded) || NotExecuted(err) {
		t.Errorf("dials under way: %v", err)
	}
	if d := time.Since(start); d > 300*time.Millisecond {
		t.Errorf("took %v", d)
	}
}

func TestReadOnlyAndFullServers(t *testing.T) {
	s := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(s.Addr()))
	ok(t, redistest.WaitReplica(patience(t, 20*time.Second), replica.Addr()))
	c := newClient(replica.Client(), prefix, counting())
	if _, err := exchange(patience(t, 5*time.Second), c, keyNamed("a")); !redis.IsReadOnlyError(err) || !NotExecuted(err) {
		t.Errorf("replica: %v", err)
	}
	full := redistest.Start(t, redistest.Args("--maxmemory", "1"))
	c = newClient(full.Client(), prefix, counting())
	if _, err := exchange(patience(t, 5*time.Second), c, keyNamed("a")); !redis.IsOOMError(err) || NotExecuted(err) {
		t.Errorf("out of memory: %v", err)
	}
}

// fakeServer answers every script call with reply and everything else with OK.
func fakeServer(t *testing.T, reply string) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				in := bufio.NewReader(conn)
				for {
					command, err := readCommand(in)
					if err != nil {
						return
					}
					answer := "+OK\r\n"
					switch strings.ToLower(command) {
					case "evalsha", "eval":
						answer = reply
					case "hello":
						answer = "-ERR unknown command\r\n"
					}
					if _, err := io.WriteString(conn, answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	return ln.Addr().String()
}

func readCommand(in *bufio.Reader) (name string, err error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	n, _ := strconv.Atoi(strings.Trim(line, "*\r\n"))
	for i := range n {
		if line, err = in.ReadString('\n'); err != nil {
			return "", err
		}
		size, _ := strconv.Atoi(strings.Trim(line, "$\r\n"))
		arg := make([]byte, size+2)
		if _, err := io.ReadFull(in, arg); err != nil {
			return "", err
		}
		if i == 0 {
			name = string(arg[:size])
		}
	}
	return name, nil
}

// On the wire: nothing that a server answers is a grant unless it is exactly one of ours, and what proves that a call did
// not run is told from what does not.
func TestAnswers(t *testing.T) {
	for reply, notExecuted := range map[string]bool{
		"-READONLY You can't write against a read only replica.": true,
		"-LOADING Redis is loading the dataset in memory":        true,
		"-MASTERDOWN Link with MASTER is down":                   true,
		"-CLUSTERDOWN Hash slot not served":                      true,
		"-TRYAGAIN Multiple keys request during rehashing":       true,
		"-BUSY Redis is busy running a script.":                  true,
		"-NOAUTH Authentication required.":                       true,
		"-NOPERM this user has no permissions":                   true,
		"-MOVED 3999 127.0.0.1:1":                                true,
		"-ASK 3999 127.0.0.1:1":                                  true,
		"-CROSSSLOT Keys in request don't hash to the same slot": true,
		"-NOSCRIPT No matching script. Please use EVAL.":         true,
		"-NOREPLICAS Not enough good replicas to write.":         true,
		"-MISCONF Redis is configured to save RDB snapshots":     true,
		"-ERR max number of clients reached":                     true,
		"-ERR tierlimit arguments":                               true,
		"-ERR unknown command 'evalsha'":                         true,
		"-ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY You can't write": true,
		"-ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -OOM command not allowed":  false,
		"-OOM command not allowed when used memory > 'maxmemory'.":                                            false,
		"-WRONGTYPE Operation against a key holding the wrong kind of value":                                  false,
		"-ERR user_script:7: attempt to index a nil value":                                                    false,
		"+OK":                     false,
		":1":                      false,
		"$-1":                     false,
		"*-1":                     false,
		"*0":                      false,
		"*2\r\n:1\r\n:0":          false,
		"*2\r\n:1\r\n$-1":         false,
		"*3\r\n:1\r\n:1\r\n:0":    false,
		"*2\r\n:1\r\n-ERR inside": false,
		"*18" + strings.Repeat("\r\n$1\r\n1", 18):                false,
		"*18" + strings.Repeat("\r\n:1", 17) + "\r\n-ERR inside": false,
		"*18" + strings.Repeat("\r\n:-1", 18):                    false,
		"*18" + strings.Repeat("\r\n:9007199254740992", 18):      false,
		"*19" + strings.Repeat("\r\n:0", 19):                     false,
		"?what":                                                  false,
	} {
		addr := fakeServer(t, reply+"\r\n")
		o := redistest.Options(addr)
		o.Protocol = 2
		rdb := redis.NewClient(o)
		c := newClient(rdb, prefix, counting())
		r, err := c.Exchange(patience(t, 5*time.Second), tier.TokenBucket, 0, tier.Darkness{}, asksFor(keyNamed("a")))
		if err == nil || r.Grants != nil {
			t.Errorf("%q: %+v, %v", reply, r, err)
		}
		if NotExecuted(err) != notExecuted {
			t.Errorf("%q: NotExecuted %v: %v", reply, !notExecuted, err)
		}
		if want := strings.HasPrefix(reply, "-CROSSSLOT"); c.Grouped() != want {
			t.Errorf("%q: grouped %v", reply, c.Grouped())
		}
		_ = rdb.Close()
	}
}

func TestNotExecuted(t *testing.T) {
	dial := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{io.EOF, false},
		{context.DeadlineExceeded, false},
		{context.Canceled, false},
		{&net.OpError{Op: "read", Err: errors.New("reset")}, false},
		{dial, true},
		{fmt.Errorf("hook: %w", dial), true},
		{&abandonedError{cause: dial}, false},
		{unsent(context.Canceled), true},
		{ErrBusyClient, true},
		{redis.ErrPoolTimeout, true},
		{redis.ErrPoolExhausted, true},
		{redis.ErrClosed, true},
		{redis.ErrNoScript, true},
		{redis.Nil, false},
		{malformed("x"), false},
		{unsendable("x"), true},
	} {
		if got := NotExecuted(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

func BenchmarkExchange(b *testing.B) {
	s, err := redistest.Open()
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	c := newClient(s.Client(), prefix, counting())
	for _, n := range []int{1, 32, MaxKeys} {
		asks := benchAsks(n)
		for i := range asks {
			asks[i].Want = 1 << 40
		}
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				if _, err := c.Exchange(ctx, tier.TokenBucket, 0, tier.Darkness{}, asks); err != nil {
					b.Fatal(err)
				}
				cancel()
			}
		})
	}
}
