// Package containertest runs the Redis of package redistest in containers: an
// engine of its own version, killed, paused and restarted as an operator's is.
//
// Containers share the network of this machine (host networking), where each
// listens on 127.0.0.1 and a port of its own. Clients, replicas and proxies
// then reach it, and it reaches them, at one address, over loopback; nothing
// translates, so a dead server refuses and a paused one still accepts, as
// child processes do. On a bridge a replica could not follow a [redistest.Proxy],
// which listens on this machine's loopback, and the engine's port forwarder
// would answer for servers that are down. The price is that it takes an engine
// on this machine, on Linux and not rootless.
package containertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/redis/go-redis/v9"
	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// EnvImage names the environment variable with the image to run. Without it
// that is the official one, or, where only that is there, the one that
// scripts/redis-image.sh builds.
const EnvImage = "TIERLIMIT_REDIS_IMAGE"

const (
	officialImage = "redis:7-alpine"
	localImage    = "redis:7-local"
)

// label marks our containers with the process that started them.
const label = "com.github.tierlimit.containertest"

const host = "127.0.0.1"

// patience bounds whatever takes far less unless it fails: each call to the
// engine, and a start, loading a data set included.
const patience = 30 * time.Second

// ErrNoEngine reports that there is no Docker engine to run containers.
var ErrNoEngine = errors.New("no Docker engine answers: start one, or run make test, which leaves the container tests out where there is none")

var errClosed = errors.New("containertest: server is closed")

// Backend is the redistest.Backend of containers.
type Backend struct{}

// Name returns "container".
func (Backend) Name() string { return "container" }

// Start runs a server in a container and removes it when the test ends. It
// fails the test if it cannot.
func (Backend) Start(tb testing.TB, opts ...redistest.Option) redistest.Server {
	tb.Helper()
	s, err := open(redistest.NewConfig(opts...))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// engine connects to the Docker engine, once.
var engine = sync.OnceValues(func() (*testcontainers.DockerClient, error) {
	// Testcontainers' reaper is one more image to pull; the janitor is here
	// already. This is before testcontainers reads its environment, once.
	if os.Getenv("TESTCONTAINERS_RYUK_DISABLED") == "" {
		if err := os.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true"); err != nil {
			return nil, err
		}
	}
	tclog.SetDefault(tclog.NewNoopLogger()) // it tells of each step
	if err := startJanitor(); err != nil {
		return nil, err
	}
	return connect()
})

func connect(opts ...client.Opt) (*testcontainers.DockerClient, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := testcontainers.NewDockerClientWithOpts(ctx, opts...)
	if err == nil {
		_, err = d.Ping(ctx, client.PingOptions{})
	}
	if err != nil {
		// One line, whatever the parts say.
		return nil, fmt.Errorf("%w (%s)", ErrNoEngine, strings.ReplaceAll(err.Error(), "\n", " "))
	}
	return d, nil
}

// image returns the image to run.
var image = sync.OnceValues(func() (string, error) {
	if name := os.Getenv(EnvImage); name != "" {
		return name, nil
	}
	d, err := engine()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, name := range []string{officialImage, localImage} {
		_, err := d.ImageInspect(ctx, name)
		if err == nil {
			return name, nil
		}
		if !errdefs.IsNotFound(err) {
			return "", err
		}
	}
	return officialImage, nil
})

// server is one Redis. Its container stays the same until Close.
type server struct {
	docker  *testcontainers.DockerClient
	persist bool
	port    int
	id      string // in the name of its configuration file, which INFO shows

	mu      sync.Mutex
	box     *testcontainers.DockerContainer
	clients []*redis.Client
	closed  bool
}

var _ redistest.Server = (*server)(nil)

// The configuration is outside of the data directory, as in redistest: an
// emptied server keeps its role. All of it is below /tmp, where any user may
// write, whichever image it is. A container that is down runs no rm, so who
// starts it leaves word in a file.
const (
	home       = "/tmp/redis"
	wipe       = home + "/wipe"
	entrypoint = `set -e
if ! [ -e "$CONF" ]; then
	mkdir -p "` + home + `"
	printf "%s" "$ROLE" >"$CONF"
fi
if [ -e "` + wipe + `" ]; then
	rm -rf "` + home + `/data" "` + wipe + `"
fi
mkdir -p "` + home + `/data"
case $(redis-server --version) in
*v=[1-6].*) ;;
*) set -- --enable-debug-command yes "$@" ;; # on by default before 7
esac
exec redis-server "$CONF" "$@"`
)

func open(cfg redistest.Config) (*server, error) {
	d, err := engine()
	if err != nil {
		return nil, err
	}
	s := &server{docker: d, persist: cfg.Persist}
	role := ""
	if cfg.Master != "" {
		h, port, err := net.SplitHostPort(cfg.Master)
		if err != nil {
			return nil, err
		}
		role = "replicaof " + h + " " + port + "\n"
	}
	// As in redistest, another process may take the port before redis-server
	// does; another one is as good.
	for range 5 {
		if s.port, err = reservePort(); err != nil {
			break
		}
		if err = s.create(role, cfg); err == nil {
			if err = s.start(); err == nil {
				return s, nil
			}
		}
		err = errors.Join(err, s.remove())
		releasePort(s.port)
		if !strings.Contains(err.Error(), "already in use") && !errors.Is(err, errForeign) {
			break
		}
	}
	return nil, err
}

func (s *server) create(role string, cfg redistest.Config) error {
	img, err := image()
	if err != nil {
		return err
	}
	s.id = strconv.FormatUint(rand.Uint64(), 36)
	args := []string{
		"--port", strconv.Itoa(s.port),
		"--bind", host,
		"--dir", home + "/data",
		"--protected-mode", "no",
		"--save", "", // snapshots would make what survives a kill depend on timing
		"--repl-diskless-sync-delay", "0", // the default waits 5 s for more replicas
	}
	if cfg.Persist {
		args = append(args, "--appendonly", "yes", "--appendfsync", "always")
	}
	// A pull takes as long as it takes; go test's own timeout bounds it.
	box, err := testcontainers.GenericContainer(context.Background(), testcontainers.GenericContainerRequest{
		ContainerRequest: testcontainers.ContainerRequest{
			Image:      img,
			Entrypoint: []string{"sh", "-c", entrypoint, "redis"},
			Cmd:        append(args, cfg.Args...),
			Env:        map[string]string{"CONF": s.conf(), "ROLE": role},
			Labels:     map[string]string{label: session},
			ConfigModifier: func(c *container.Config) {
				c.User = "65534:65534" // nobody: it needs no more
			},
			HostConfigModifier: func(h *container.HostConfig) {
				h.NetworkMode = "host"
			},
		},
		Logger: tclog.NewNoopLogger(),
	})
	s.box, _ = box.(*testcontainers.DockerContainer) // it may be there in spite of the error
	if err != nil {
		return fmt.Errorf("containertest: image %s (where no registry is reached, sh scripts/redis-image.sh builds one to name in %s): %w", img, EnvImage, err)
	}
	return nil
}

// remove removes the container, which may never have come to be.
func (s *server) remove() error {
	if s.box == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// Force kills it; Terminate would ask it to stop first.
	_, err := s.docker.ContainerRemove(ctx, s.box.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

func (s *server) conf() string { return home + "/" + s.id + ".conf" }

func (s *server) Addr() string { return net.JoinHostPort(host, strconv.Itoa(s.port)) }

func (s *server) Options() *redis.Options { return redistest.Options(s.Addr()) }

func (s *server) Client(opts ...func(*redis.Options)) *redis.Client {
	o := s.Options()
	for _, f := range opts {
		f(o)
	}
	c := redis.NewClient(o)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = append(s.clients, c)
	return c
}

// state is the engine's word on the container: it may have ended by itself, or
// by a SHUTDOWN command.
func (s *server) state(ctx context.Context) (*container.State, error) {
	r, err := s.docker.ContainerInspect(ctx, s.box.ID, client.ContainerInspectOptions{})
	if err != nil {
		return nil, err
	}
	return r.Container.State, nil
}

// locked calls f with the lock held, unless the server is closed, and then
// leaves no idle connection to the engine behind: suites count goroutines.
func (s *server) locked(f func(ctx context.Context) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	defer s.docker.Close()
	return f(ctx)
}

func (s *server) Kill() error { return s.locked(s.killLocked) }

func (s *server) killLocked(ctx context.Context) error {
	_, err := s.docker.ContainerKill(ctx, s.box.ID, client.ContainerKillOptions{Signal: "KILL"})
	if err != nil {
		if st, e := s.state(ctx); e == nil && !st.Running {
			return nil // it was down
		}
		return err
	}
	return s.awaitExit(ctx)
}

// awaitExit returns when the engine knows that the container is down; before
// that it would refuse to start it.
func (s *server) awaitExit(ctx context.Context) error {
	w := s.docker.ContainerWait(ctx, s.box.ID, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	select {
	case <-w.Result:
		return nil
	case err := <-w.Error:
		return err
	}
}

func (s *server) Stop() error {
	return s.locked(func(ctx context.Context) error {
		st, err := s.state(ctx)
		if err != nil || !st.Running {
			return err
		}
		if err := s.resumeLocked(ctx); err != nil {
			return err
		}
		// A container's first process hears no signal for which it has no
		// handler, and redis-server has none while it starts: ask again.
		for st.Running {
			if _, err := s.docker.ContainerKill(ctx, s.box.ID, client.ContainerKillOptions{Signal: "TERM"}); err != nil && !errdefs.IsConflict(err) {
				return fmt.Errorf("containertest: %s does not stop: %w\n%s", s.Addr(), err, s.logTail(context.Background()))
			}
			short, cancel := context.WithTimeout(ctx, time.Second)
			_ = s.awaitExit(short) // what it has come to is asked next
			cancel()
			if st, err = s.state(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// resumeLocked unpauses a container that is paused.
func (s *server) resumeLocked(ctx context.Context) error {
	st, err := s.state(ctx)
	if err != nil || !st.Paused {
		return err
	}
	_, err = s.docker.ContainerUnpause(ctx, s.box.ID, client.ContainerUnpauseOptions{})
	return err
}

func (s *server) Restart() error {
	if !s.persist {
		return errors.New("containertest: Restart needs a server started with Persist; RestartEmpty does not")
	}
	if err := s.Kill(); err != nil {
		return err
	}
	return s.start()
}

func (s *server) RestartEmpty() error {
	err := s.locked(func(ctx context.Context) error {
		if err := s.killLocked(ctx); err != nil {
			return err
		}
		return s.box.CopyToContainer(ctx, nil, wipe, 0o644)
	})
	if err != nil {
		return err
	}
	return s.start()
}

// start starts the container and waits for the server's first answer. The wait
// holds no lock, so that a server can be killed while it loads.
func (s *server) start() error {
	err := s.locked(func(ctx context.Context) error {
		st, err := s.state(ctx)
		if err != nil {
			return err
		}
		if st.Running {
			return fmt.Errorf("containertest: %s was started by another call", s.Addr())
		}
		return s.box.Start(ctx)
	})
	if err != nil {
		return err
	}
	return s.waitReady()
}

func (s *server) Hang() error {
	return s.locked(func(ctx context.Context) error {
		st, err := s.state(ctx)
		switch {
		case err != nil:
			return err
		case !st.Running:
			return fmt.Errorf("containertest: %s is down and cannot hang", s.Addr())
		case st.Paused:
			return nil
		}
		for {
			_, err = s.docker.ContainerPause(ctx, s.box.ID, client.ContainerPauseOptions{})
			// The kernel's older freezer takes its time on a busy machine, and
			// runc does not wait long for it.
			if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "unable to freeze") {
				return err
			}
		}
	})
}

func (s *server) Continue() error {
	err := s.locked(func(ctx context.Context) error {
		st, err := s.state(ctx)
		switch {
		case err != nil:
			return err
		case !st.Running:
			return fmt.Errorf("containertest: %s is down and cannot continue", s.Addr())
		}
		return s.resumeLocked(ctx)
	})
	if err != nil {
		return err
	}
	return s.waitReady()
}

func (s *server) Follow(addr string) error {
	h, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	return s.replicaOf(h, port)
}

func (s *server) Promote() error { return s.replicaOf("NO", "ONE") }

func (s *server) replicaOf(h, port string) error {
	o := s.Options()
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 5*time.Second, 5*time.Second, 5*time.Second
	c := redis.NewClient(o)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.Do(ctx, "REPLICAOF", h, port).Err(); err != nil {
		return err
	}
	// As operators and Sentinel do, so that a restart finds the same role.
	return c.ConfigRewrite(ctx).Err()
}

func (s *server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	for _, c := range s.clients {
		_ = c.Close() // the test may have closed it already
	}
	releasePort(s.port)
	defer s.docker.Close()
	return s.remove()
}

// errForeign reports that another process's server answers on our port.
var errForeign = errors.New("another server answers on this port")

// waitReady returns when the server answers a PING. Its log does not say: the
// lines of earlier starts are in it too.
func (s *server) waitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	defer s.docker.Close()
	looked := time.Now()
	for {
		err := probe(s.Addr(), s.conf())
		if err == nil {
			return nil
		}
		if errors.Is(err, errForeign) {
			return fmt.Errorf("containertest: %s: %w", s.Addr(), err)
		}
		if time.Since(looked) > 50*time.Millisecond {
			looked = time.Now()
			st, e := s.state(ctx)
			switch {
			case e != nil: // the engine is busy: what counts is the answer
			case !st.Running:
				return fmt.Errorf("containertest: %s exited while starting\n%s", s.Addr(), s.logTail(ctx))
			case st.Paused:
				return fmt.Errorf("containertest: %s was hung by another call", s.Addr())
			}
		}
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			return fmt.Errorf("containertest: %s does not answer; does the engine share this machine's loopback (see the package comment)? %w\n%s", s.Addr(), err, s.logTail(ctx))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// probe asks the server at addr for a PONG and the configuration file that
// tells it from other servers. It speaks the protocol by hand because a client
// pool remembers failed dials for a second.
func probe(addr, conf string) error {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("PING\r\nINFO server\r\n")); err != nil {
		return err
	}
	sc := bufio.NewScanner(conn)
	for first := true; sc.Scan(); first = false {
		line := sc.Text()
		if first {
			if strings.HasPrefix(line, "-NOAUTH") {
				return nil // it answers, only not to us
			}
			if line != "+PONG" {
				return errors.New(line)
			}
		}
		if file, ok := strings.CutPrefix(line, "config_file:"); ok {
			if file != conf {
				return errForeign
			}
			return nil
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}

func (s *server) logTail(ctx context.Context) string {
	r, err := s.box.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	b, _ := io.ReadAll(r) // what there is of it
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// Ports. They lie between those of redistest with their cluster buses and
// those from which kernels take the source ports of outgoing connections.
const (
	portLow  = 31001
	portHigh = 32767
)

var ports struct {
	sync.Mutex
	taken map[int]bool
}

// reservePort chooses a free port that no other server gets until releasePort,
// not even while its owner is down.
func reservePort() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	if ports.taken == nil {
		ports.taken = map[int]bool{}
	}
	err := errors.New("all are taken")
	for range 200 {
		port := portLow + rand.IntN(portHigh-portLow)
		if ports.taken[port] {
			continue
		}
		var ln net.Listener
		if ln, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port))); err != nil {
			continue
		}
		if err = ln.Close(); err == nil {
			ports.taken[port] = true
			return port, nil
		}
	}
	return 0, fmt.Errorf("containertest: no free port on %s: %w", host, err)
}

func releasePort(port int) {
	ports.Lock()
	defer ports.Unlock()
	delete(ports.taken, port)
}
