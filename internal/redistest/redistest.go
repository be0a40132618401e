// Package redistest runs a real Redis for tests, and breaks it on purpose.
//
// [Start] runs redis-server as a child process that can be killed, stopped,
// hung and restarted with or without its data, always on the same address.
// [StartProxy] puts a TCP proxy in front of any server: it refuses, swallows,
// holds, delays, resets, and loses replies. [StartCluster] and [StartSentinel]
// build topologies from the same parts.
//
// Faults return errors instead of failing the test, because chaos suites cause
// them from goroutines, where t.Fatal is not allowed.
package redistest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// EnvServer names the environment variable that overrides the redis-server
// found in PATH.
const EnvServer = "TIERLIMIT_REDIS_SERVER"

// ErrNoServer reports that there is no redis-server to run.
var ErrNoServer = errors.New("redis-server not found: install it (Debian: apt-get install redis-server; macOS: brew install redis) or set " + EnvServer)

var errClosed = errors.New("redistest: server is closed")

// Backend starts servers. The chaos suite takes one, so that it runs the same
// on child processes and on containers.
type Backend interface {
	// Name is short and fit for a subtest's name.
	Name() string
	// Start returns a server that answers, and closes it when the test ends.
	// It fails the test if it cannot; it never skips.
	Start(tb testing.TB, opts ...Option) Server
}

// Server is one Redis that can be broken. Methods are safe for concurrent use.
// A fault has taken effect when its method returns, and Restart, RestartEmpty
// and Continue return when the server answers again.
type Server interface {
	// Addr is host:port, the same for the server's whole life.
	Addr() string
	// Options are go-redis options for Addr with tight timeouts and no
	// retries, so that a test sees each fault once and soon.
	Options() *redis.Options
	// Client returns a new client with Options, edited by opts. It is closed
	// with the server.
	Client(opts ...func(*redis.Options)) *redis.Client

	Kill() error         // SIGKILL; no error if it is down already
	Stop() error         // orderly shutdown; no error if it is down already
	Restart() error      // Kill if it is up, then start with its data; needs Persist
	RestartEmpty() error // Kill if it is up, then start without data
	Hang() error         // SIGSTOP: connections stay open, nothing answers
	Continue() error     // SIGCONT

	Follow(addr string) error // become a replica of addr, also after restarts
	Promote() error           // become a primary, also after restarts

	// Close kills the server and removes its data. Repeated calls do nothing.
	Close() error
}

// Config is what the options amount to. It is exported for other back ends.
type Config struct {
	Persist bool     // appendonly yes, appendfsync always: a SIGKILL loses no acknowledged write
	Master  string   // host:port to replicate from, or ""
	Args    []string // further redis-server arguments, last so that they win
}

// Option changes a Config.
type Option func(*Config)

// NewConfig applies opts to the defaults.
func NewConfig(opts ...Option) Config {
	var c Config
	for _, o := range opts {
		o(&c)
	}
	return c
}

// Persist keeps every acknowledged write over Kill and Restart.
func Persist() Option { return func(c *Config) { c.Persist = true } }

// ReplicaOf starts the server as a replica of addr, a Server's or a Proxy's:
// with a proxy in between the replication link can be cut.
func ReplicaOf(addr string) Option { return func(c *Config) { c.Master = addr } }

// Args appends redis-server arguments, such as "--maxmemory", "4mb".
func Args(args ...string) Option {
	return func(c *Config) { c.Args = append(c.Args, args...) }
}

// Options returns go-redis options for addr with tight timeouts and no retries.
//
// A call against a hung server returns in 250 ms. It is not less because with
// appendfsync always a busy disk alone can take 100 ms.
func Options(addr string) *redis.Options {
	return &redis.Options{
		Addr:                  addr,
		DialTimeout:           250 * time.Millisecond,
		ReadTimeout:           250 * time.Millisecond,
		WriteTimeout:          250 * time.Millisecond,
		MaxRetries:            -1,
		DialerRetries:         1,
		ContextTimeoutEnabled: true,
		PoolSize:              4,
		// Fewer commands on connect: LoseReplies and logs show the test's own.
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}

// patient returns a client for set-up commands, which must not fail because
// the machine is busy. The caller closes it.
func patient(addr string) *redis.Client { return redis.NewClient(patientOptions(addr)) }

func patientOptions(addr string) *redis.Options {
	o := Options(addr)
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 5*time.Second, 5*time.Second, 5*time.Second
	o.PoolSize = 1
	return o
}

// FlushAll removes every key of the server at addr.
func FlushAll(ctx context.Context, addr string) error {
	c := patient(addr)
	defer c.Close()
	return c.FlushAll(ctx).Err()
}

// WaitReplica returns when the server at addr is a replica in sync with its
// primary: it has what the primary acknowledged before the call, on disk too
// with Persist (a replica rewrites its append-only file after each full
// synchronisation, and until then a kill leaves it empty). It may never return
// while writes go on without a pause.
func WaitReplica(ctx context.Context, addr string) error {
	c := patient(addr)
	defer c.Close()
	return poll(ctx, func() error {
		info, err := c.Info(ctx).Result()
		if err != nil {
			return err
		}
		f := parseInfo(info)
		if f["aof_rewrite_in_progress"] != "0" || f["aof_rewrite_scheduled"] != "0" {
			return fmt.Errorf("replica %s: writing its append-only file", addr)
		}
		if f["role"] != "slave" || f["master_link_status"] != "up" || f["master_sync_in_progress"] != "0" {
			return fmt.Errorf("replica %s: role %s, link %s", addr, f["role"], f["master_link_status"])
		}
		// The link is up; now wait for the offset the primary has reached.
		m := patient(f["master_host"] + ":" + f["master_port"])
		defer m.Close()
		info, err = m.Info(ctx, "replication").Result()
		if err != nil {
			return err
		}
		have, _ := strconv.ParseInt(f["slave_repl_offset"], 10, 64)
		want, _ := strconv.ParseInt(parseInfo(info)["master_repl_offset"], 10, 64)
		if have < want {
			return fmt.Errorf("replica %s: at offset %d of %d", addr, have, want)
		}
		return nil
	})
}

// poll calls f every few milliseconds until it returns nil or ctx ends; then
// it returns f's last complaint, which says more than "deadline exceeded".
func poll(ctx context.Context, f func() error) error {
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// parseInfo reads the "name:value" lines of INFO and CLUSTER INFO.
func parseInfo(s string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(s) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			m[k] = v
		}
	}
	return m
}

// binary returns the redis-server to run.
func binary() (string, error) {
	name := os.Getenv(EnvServer)
	if name == "" {
		name = "redis-server"
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w (%s)", ErrNoServer, name)
	}
	return path, nil
}

var majors sync.Map // path of the binary -> its major version

// major returns the major version of the binary: some arguments exist from 7
// on, and redis-server refuses to start with those it does not know.
func major(path string) (int, error) {
	if v, ok := majors.Load(path); ok {
		return v.(int), nil
	}
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		return 0, fmt.Errorf("%s --version: %w", path, err)
	}
	_, rest, _ := strings.Cut(string(out), " v=")
	digits, _, _ := strings.Cut(rest, ".")
	v, err := strconv.Atoi(digits)
	if err != nil {
		return 0, fmt.Errorf("%s --version: no version in %q", path, out)
	}
	majors.Store(path, v)
	return v, nil
}
