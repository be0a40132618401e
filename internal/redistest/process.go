package redistest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// startTimeout bounds a start, loading a data set included. It is generous:
// it only decides how soon a broken start is reported.
const startTimeout = 30 * time.Second

// ProcessBackend is the Backend of child processes.
type ProcessBackend struct{}

// Name returns "process".
func (ProcessBackend) Name() string { return "process" }

// Start is the package's Start.
func (ProcessBackend) Start(tb testing.TB, opts ...Option) Server {
	tb.Helper()
	return Start(tb, opts...)
}

// Process is a redis-server running as a child process. It dies with its
// parent on Linux, however the parent dies.
type Process struct {
	bin  string
	host string
	port int
	dir  string
	args []string // all but port and directory

	mu      sync.Mutex
	persist bool
	child   *child // nil when down
	clients []*redis.Client
	closed  bool
}

// child is one run of the server.
type child struct {
	proc   *os.Process
	exited chan struct{}
	hung   bool
}

// Start runs a redis-server and closes it when the test ends. It fails the
// test if there is none.
func Start(tb testing.TB, opts ...Option) *Process {
	tb.Helper()
	p, err := Open(opts...)
	if err != nil {
		tb.Fatal(err)
	}
	closeWith(tb, p)
	return p
}

// Open is Start for programs that are not tests; the caller calls Close.
func Open(opts ...Option) (*Process, error) {
	return openData("127.0.0.1", false, NewConfig(opts...))
}

// openData runs a server that stores data, with its cluster bus if it has one.
func openData(host string, cluster bool, cfg Config) (*Process, error) {
	args := []string{
		"--save", "", // snapshots would make what survives a kill depend on timing
		"--repl-diskless-sync-delay", "0", // the default waits 5 s for more replicas
	}
	if cfg.Persist {
		args = append(args, "--appendonly", "yes", "--appendfsync", "always")
	}
	conf := ""
	if cfg.Master != "" {
		h, port, err := net.SplitHostPort(cfg.Master)
		if err != nil {
			return nil, err
		}
		conf = "replicaof " + h + " " + port + "\n"
	}
	p, err := open(host, cluster, conf, append(args, cfg.Args...))
	if err != nil {
		return nil, err
	}
	p.persist = cfg.Persist
	return p, nil
}

// open runs a server with conf as its first configuration file and args, which
// override it at each start.
func open(host string, bus bool, conf string, args []string) (*Process, error) {
	bin, err := binary()
	if err != nil {
		return nil, err
	}
	version, err := major(bin)
	if err != nil {
		return nil, err
	}
	common := []string{"--bind", host, "--protected-mode", "no", "--daemonize", "no"}
	if version >= 7 {
		common = append(common,
			"--enable-debug-command", "yes", // DEBUG SLEEP and its kin, on by default before 7
			"--bind-source-addr", host, // before 7 the first bind address is the source
		)
	}
	p := &Process{bin: bin, host: host, args: append(common, args...)}
	if p.dir, err = os.MkdirTemp("", "redistest-"); err != nil {
		return nil, err
	}
	// The port is free when it is chosen, but another process may bind it
	// before redis-server does. Then the server exits, or the probe meets a
	// server with another pid, and another port is as good.
	for range 5 {
		if err = os.WriteFile(p.conf(), []byte(conf), 0o600); err != nil {
			break
		}
		if p.port, err = reservePort(host, bus); err != nil {
			break
		}
		if err = p.start(); err == nil {
			return p, nil
		}
		_ = p.Kill()
		releasePort(host, p.port)
		if !strings.Contains(err.Error(), "already in use") && !errors.Is(err, errForeign) {
			break
		}
	}
	_ = os.RemoveAll(p.dir)
	return nil, err
}

// Addr returns host:port.
func (p *Process) Addr() string { return net.JoinHostPort(p.host, strconv.Itoa(p.port)) }

// Options returns Options(p.Addr()).
func (p *Process) Options() *redis.Options { return Options(p.Addr()) }

// Client returns a new client with p.Options(), edited by opts, which Close
// closes.
func (p *Process) Client(opts ...func(*redis.Options)) *redis.Client {
	o := p.Options()
	for _, f := range opts {
		f(o)
	}
	c := redis.NewClient(o)
	p.mu.Lock()
	p.clients = append(p.clients, c)
	p.mu.Unlock()
	return c
}

// FlushAll removes every key.
func (p *Process) FlushAll(ctx context.Context) error { return FlushAll(ctx, p.Addr()) }

// Pid returns the process id, or 0 when the server is down.
func (p *Process) Pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.upLocked() {
		return 0
	}
	return p.child.proc.Pid
}

// Log returns what the server has logged, over all its runs.
func (p *Process) Log() string {
	b, _ := os.ReadFile(filepath.Join(p.dir, "log"))
	return string(b)
}

// Kill ends the server with SIGKILL and waits for its end.
func (p *Process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.killLocked()
}

// Stop ends the server with SIGTERM, which flushes and says goodbye to its
// replicas. A hung server continues in order to stop.
func (p *Process) Stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.upLocked() {
		return nil
	}
	c := p.child
	if err := c.proc.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if c.hung {
		if err := resume(c.proc); err != nil {
			return err
		}
		c.hung = false
	}
	select {
	case <-c.exited:
		p.child = nil
		return nil
	case <-time.After(startTimeout):
		return fmt.Errorf("redistest: %s did not stop\n%s", p.Addr(), p.logTail())
	}
}

// Restart starts the server again with its data, killing it first if it is up,
// and returns when it answers. Without Persist there is no data to come back,
// so it fails; RestartEmpty says what is meant.
func (p *Process) Restart() error {
	if !p.persist {
		return errors.New("redistest: Restart needs a server started with Persist; RestartEmpty does not")
	}
	if err := p.Kill(); err != nil {
		return err
	}
	return p.start()
}

// RestartEmpty is Restart without the data.
func (p *Process) RestartEmpty() error {
	if err := p.Kill(); err != nil {
		return err
	}
	if err := os.RemoveAll(p.dataDir()); err != nil {
		return err
	}
	return p.start()
}

// Hang stops the process with SIGSTOP. The kernel still accepts connections
// and bytes for it, and after Continue it executes them.
func (p *Process) Hang() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.upLocked() {
		return fmt.Errorf("redistest: %s is down and cannot hang", p.Addr())
	}
	if err := suspend(p.child.proc); err != nil {
		return err
	}
	p.child.hung = true
	return nil
}

// Continue undoes Hang and returns when the server answers.
func (p *Process) Continue() error {
	p.mu.Lock()
	if !p.upLocked() {
		p.mu.Unlock()
		return fmt.Errorf("redistest: %s is down and cannot continue", p.Addr())
	}
	c := p.child
	err := resume(c.proc)
	c.hung = false
	p.mu.Unlock()
	if err != nil {
		return err
	}
	return p.waitReady(c)
}

// Follow makes the server a replica of addr. It returns before the first
// synchronisation; see WaitReplica.
func (p *Process) Follow(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	return p.replicaOf(host, port)
}

// Promote makes the server a primary with the data it has.
func (p *Process) Promote() error { return p.replicaOf("NO", "ONE") }

func (p *Process) replicaOf(host, port string) error {
	c := patient(p.Addr())
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := c.Do(ctx, "REPLICAOF", host, port).Err(); err != nil {
		return err
	}
	// As operators and Sentinel do, so that a restart finds the same role.
	return c.ConfigRewrite(ctx).Err()
}

// Close kills the server, closes its clients and removes its data.
func (p *Process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	for _, c := range p.clients {
		_ = c.Close() // the test may have closed it already
	}
	err := p.killLocked()
	releasePort(p.host, p.port)
	return errors.Join(err, os.RemoveAll(p.dir))
}

// conf is outside of the data directory: RestartEmpty loses data, not roles.
func (p *Process) conf() string { return filepath.Join(p.dir, "conf") }

func (p *Process) dataDir() string { return filepath.Join(p.dir, "data") }

func (p *Process) upLocked() bool {
	if p.child == nil {
		return false
	}
	select {
	case <-p.child.exited: // by itself, or by a SHUTDOWN command
		p.child = nil
		return false
	default:
		return true
	}
}

func (p *Process) killLocked() error {
	if !p.upLocked() {
		return nil
	}
	// SIGKILL also ends a stopped process.
	if err := p.child.proc.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.child.exited
	p.child = nil
	return nil
}

// start runs the server and waits for its first answer. The wait holds no
// lock, so that a server can be killed while it loads.
func (p *Process) start() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return errClosed
	}
	if p.upLocked() {
		p.mu.Unlock()
		return fmt.Errorf("redistest: %s was started by another call", p.Addr())
	}
	c, err := p.spawnLocked()
	p.child = c
	p.mu.Unlock()
	if err != nil {
		return err
	}
	return p.waitReady(c)
}

func (p *Process) spawnLocked() (*child, error) {
	if err := os.MkdirAll(p.dataDir(), 0o700); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(p.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the child has its own descriptor
	args := []string{p.conf(), "--port", strconv.Itoa(p.port), "--dir", p.dataDir()}
	cmd := exec.Command(p.bin, append(args, p.args...)...)
	return spawn(cmd, log)
}

// spawn starts cmd so that it dies with this process.
func spawn(cmd *exec.Cmd, log *os.File) (*child, error) {
	cmd.Stdout, cmd.Stderr = log, log // files, so that no goroutine copies
	cmd.SysProcAttr = childAttr()
	c := &child{exited: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig fires when the *thread* that forked ends, and the runtime
		// ends threads when it likes. This goroutine keeps its thread until
		// the child is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			c.proc = cmd.Process
		}
		started <- err
		if err == nil {
			_ = cmd.Wait() // a killed child is no error here
			close(c.exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}

// errForeign reports that another process's server answers on our port.
var errForeign = errors.New("another server answers on this port")

func (p *Process) waitReady(c *child) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := probe(p.Addr(), c.proc.Pid)
		if err == nil {
			return nil
		}
		if errors.Is(err, errForeign) {
			return fmt.Errorf("redistest: %s: %w", p.Addr(), err)
		}
		select {
		case <-c.exited:
			return fmt.Errorf("redistest: %s exited while starting\n%s", p.Addr(), p.logTail())
		case <-ctx.Done():
			return fmt.Errorf("redistest: %s does not answer: %w\n%s", p.Addr(), err, p.logTail())
		case <-time.After(time.Millisecond):
		}
	}
}

// probe asks the server at addr for a PONG and its process id. An open port
// proves neither that the data is loaded nor that the server is ours. It
// speaks the protocol by hand because a client pool per attempt costs more
// than the server's start.
func probe(addr string, pid int) error {
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
		if id, ok := strings.CutPrefix(line, "process_id:"); ok {
			if id != strconv.Itoa(pid) {
				return errForeign
			}
			return nil
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	return errors.New("connection closed")
}

func (p *Process) logTail() string {
	lines := strings.Split(strings.TrimSpace(p.Log()), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// Ports. They lie below the range from which kernels take the source ports of
// outgoing connections, so that the port of a server that is down, or of a
// proxy that refuses, is not taken by some client's connection meanwhile.
// Cluster buses use the port + 10000, outside the range of the others.
const (
	portLow  = 11000
	portHigh = 21000
	busShift = 10000
)

var ports struct {
	sync.Mutex
	taken map[string]bool
}

// reservePort chooses a free port that no other server or proxy of this
// process gets until releasePort, not even while its owner is down.
func reservePort(host string, bus bool) (int, error) {
	var last error
	for range 200 {
		port := portLow + rand.IntN(portHigh-portLow)
		addr := net.JoinHostPort(host, strconv.Itoa(port))
		ports.Lock()
		busy := ports.taken[addr]
		if !busy {
			if ports.taken == nil {
				ports.taken = map[string]bool{}
			}
			ports.taken[addr] = true
		}
		ports.Unlock()
		if busy {
			continue
		}
		err := tryBind(addr)
		if err == nil && bus {
			err = tryBind(net.JoinHostPort(host, strconv.Itoa(port+busShift)))
		}
		if err == nil {
			return port, nil
		}
		last = err
		releasePort(host, port)
	}
	return 0, fmt.Errorf("redistest: no free port on %s: %w", host, last)
}

func releasePort(host string, port int) {
	ports.Lock()
	delete(ports.taken, net.JoinHostPort(host, strconv.Itoa(port)))
	ports.Unlock()
}

func tryBind(addr string) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	return ln.Close()
}
