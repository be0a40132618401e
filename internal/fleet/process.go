//go:build unix

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
)

// EnvChild names the environment variable that makes Main run an instance instead of returning. It holds the path of its task.
const EnvChild = "TIERLIMIT_FLEET_CHILD"

// Options are what instances in child processes can be told. Zero values are the limiter's defaults.
type Options struct {
	Prefix        string                   `json:"prefix,omitempty"`
	LocalShare    *float64                 `json:"localShare,omitempty"`
	LeaseTTL      time.Duration            `json:"leaseTTL,omitempty"`
	SyncInterval  time.Duration            `json:"syncInterval,omitempty"`
	RemoteTimeout time.Duration            `json:"remoteTimeout,omitempty"`
	Heartbeat     time.Duration            `json:"heartbeat,omitempty"`
	Instances     int                      `json:"instances,omitempty"`
	Fallback      tierlimit.FallbackPolicy `json:"fallback,omitempty"`
}

func (o Options) list() []tierlimit.Option {
	var out []tierlimit.Option
	add := func(given bool, opt tierlimit.Option) {
		if given {
			out = append(out, opt)
		}
	}
	add(o.Prefix != "", tierlimit.WithPrefix(o.Prefix))
	if o.LocalShare != nil {
		out = append(out, tierlimit.WithLocalShare(*o.LocalShare))
	}
	add(o.LeaseTTL != 0, tierlimit.WithLeaseTTL(o.LeaseTTL))
	add(o.SyncInterval != 0, tierlimit.WithSyncInterval(o.SyncInterval))
	add(o.RemoteTimeout != 0, tierlimit.WithRemoteTimeout(o.RemoteTimeout))
	add(o.Heartbeat != 0, tierlimit.WithHeartbeat(o.Heartbeat))
	add(o.Instances != 0, tierlimit.WithInstances(o.Instances))
	add(o.Fallback != 0, tierlimit.WithFallback(o.Fallback))
	return out
}

// A ProcConfig describes a run of instances in child processes.
type ProcConfig struct {
	Instances int
	Addr      func(instance int) string // host:port of the Redis, or proxy, that an instance talks to
	Name      string                    // of the limiter; "fleet" if empty
	Limit     tierlimit.Limit
	Options   Options

	Load     Shape
	Rate     float64       // tokens per second offered to the whole fleet
	Duration time.Duration // of the load
	Workers  int           // as in Config
	Events   []ProcEvent

	AwaitOnline time.Duration // as in Config
	Capacity    int           // admissions that one instance can record; 0 is 1<<16. More are ErrFull
	Dir         string        // for recordings; must exist. "" is a temporary one, removed at the end
}

// A ProcEvent is something to be done during a run.
type ProcEvent struct {
	At time.Duration
	Do func(*Processes) error
}

// task is what a child is told.
type task struct {
	Instance    int             `json:"instance"`
	Instances   int             `json:"instances"`
	Addr        string          `json:"addr"`
	Name        string          `json:"name"`
	Limit       tierlimit.Limit `json:"limit"`
	Options     Options         `json:"options"`
	Load        Shape           `json:"load"`
	Rate        float64         `json:"rate"`
	Duration    time.Duration   `json:"duration"`
	Workers     int             `json:"workers"`
	Capacity    int             `json:"capacity"`
	AwaitOnline time.Duration   `json:"awaitOnline"`
	Recording   string          `json:"recording"`
	Report      string          `json:"report"`
}

// summary is what a child that lives to the end says of itself.
type summary struct {
	Instance      Instance
	Latency, Late map[int]int64
	LatencyMax    int64
	LateMax       int64
	GeneratorLate time.Duration
	Dropped       int64
	Peak          int
	Close         string
}

// Main runs an instance and exits if this process was started for that by RunProcesses; else it returns at once. Call it first
// in TestMain or main of every program that uses RunProcesses.
func Main() {
	path := os.Getenv(EnvChild)
	if path == "" {
		return
	}
	if err := child(path); err != nil {
		fmt.Fprintln(os.Stderr, "fleet child:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// child runs one instance.
func child(path string) error {
	// The parent holds the other end of stdin: when it dies, however it dies, so do we. It says there when the load starts.
	started := make(chan int64, 1)
	go func() {
		var at int64
		if _, err := fmt.Fscanln(os.Stdin, &at); err == nil {
			started <- at
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var t task
	if err := json.Unmarshal(text, &t); err != nil {
		return err
	}
	t.Load = t.Load.prepared()
	c := Config{
		Instances: t.Instances, Name: t.Name, Limit: t.Limit, Options: t.Options.list(),
		Client: func(int) redis.UniversalClient { return Client(t.Addr) },
		Load:   t.Load, Rate: t.Rate, Duration: t.Duration, Workers: t.Workers,
	}
	if err := c.validate(); err != nil {
		return err
	}
	rec, err := envelope.NewRecorder(t.Recording, t.Capacity)
	if err != nil {
		return err
	}
	r, err := newRunner(&c, t.Instance)
	if err != nil {
		return err
	}
	r.recorder = mapped{rec}
	to := make([]*runner, t.Instances)
	to[t.Instance] = r
	if err := awaitOnline(context.Background(), t.AwaitOnline, r); err != nil {
		return errors.Join(err, r.close())
	}
	fmt.Println("ready")
	start := time.Now().Add(time.Duration(<-started - envelope.Now()))
	time.Sleep(time.Until(start))
	g := &generator{load: t.Load, rate: t.Rate, instances: t.Instances, duration: t.Duration, start: start, to: to}
	// Late from the start, as a child that was started again is: what was due before is not ours.
	g.skip = max(0, time.Since(start))
	var s summary
	ended := make(chan struct{})
	var beside, workers sync.WaitGroup
	beside.Go(func() { watch(ended, start, &c, nil, nil, &s.Peak) })
	r.work(context.Background(), &workers, start, t.Duration)
	g.run(context.Background())
	workers.Wait()
	close(ended)
	beside.Wait()
	i, latency, late := r.report()
	s.Instance = i
	s.Latency, s.LatencyMax = latency.dense()
	s.Late, s.LateMax = late.dense()
	s.GeneratorLate, s.Dropped = g.late, g.dropped
	if err := r.close(); err != nil {
		s.Close = err.Error()
	}
	if err := rec.Close(); err != nil {
		return err
	}
	if fault := r.faults.Load(); fault != nil {
		return *fault
	}
	text, err = json.Marshal(&s)
	if err != nil {
		return err
	}
	return os.WriteFile(t.Report, text, 0o600)
}

// mapped records to a file that outlives the process.
type mapped struct{ r *envelope.Recorder }

func (m mapped) begin(a envelope.Admission) (func(int64, bool), error) {
	call, err := m.r.Begin(a)
	return func(returned int64, allowed bool) {
		if allowed {
			call.End(returned)
		} else {
			call.Drop()
		}
	}, err
}

// Client is a client for the Redis at addr as instances in child processes have it: go-redis' defaults, but for the small pool
// and fewer commands on connecting.
func Client(addr string) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr:                     addr,
		PoolSize:                 8,
		DialTimeout:              250 * time.Millisecond,
		ContextTimeoutEnabled:    true,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// Processes are the children of a run. Its methods may be called concurrently, by events.
type Processes struct {
	c     *ProcConfig
	dir   string
	start int64

	mu     sync.Mutex
	closed bool
	runs   []*process
	latest []*process // by instance
}

// process is one run of one instance.
type process struct {
	task   task
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	ready  chan struct{} // closed when it says so, or has ended
	stderr tail
	exited chan struct{}
	err    error // of Wait, once exited
	killed bool
}

// tail keeps the beginning of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p[:min(len(p), max(0, 4096-len(t.text)))]...)
	return len(p), nil
}

// startUp is how long children may take until they are ready.
const startUp = 20 * time.Second

// RunProcesses runs each instance in a child process, which is this program again: it must call Main. When ctx ends, the
// children are killed and its error is returned. A child that fails is an error; one that an event killed is not. The history is
// that of all, up to the kill; Denied and the like are not known of those killed.
func RunProcesses(ctx context.Context, c ProcConfig) (*Result, error) {
	check := Config{Instances: c.Instances, Load: c.Load, Rate: c.Rate, Duration: c.Duration, Workers: c.Workers}
	faults := []error{check.validate(), c.Limit.Validate()}
	if c.Addr == nil {
		faults = append(faults, errors.New("fleet: no Addr"))
	}
	if os.Getenv(EnvChild) != "" {
		faults = append(faults, errors.New("fleet: RunProcesses in a child: its program does not call Main"))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	if c.Capacity == 0 {
		c.Capacity = 1 << 16
	}
	dir, err := os.MkdirTemp(c.Dir, "fleet-*")
	if err != nil {
		return nil, fmt.Errorf("fleet: %w", err)
	}
	if c.Dir == "" {
		defer os.RemoveAll(dir)
	}
	p := &Processes{c: &c, dir: dir, latest: make([]*process, c.Instances)}
	defer p.close()
	for i := range c.Instances {
		if err := p.Start(i); err != nil {
			return nil, err
		}
	}
	patience := time.After(startUp)
	for i, q := range p.runs {
		select {
		case <-q.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-patience:
			return nil, fmt.Errorf("fleet: instance %d is not ready after %v", i, startUp)
		}
	}
	p.begin()
	var mu sync.Mutex
	var eventFaults []error
	events := make([]Event, len(c.Events))
	for i, e := range c.Events {
		events[i] = Event{e.At, func() {
			if err := e.Do(p); err != nil {
				mu.Lock()
				defer mu.Unlock()
				eventFaults = append(eventFaults, fmt.Errorf("fleet: event at %v: %w", e.At, err))
			}
		}}
	}
	over := make(chan struct{})
	var doing sync.WaitGroup
	start := time.Now().Add(time.Duration(p.start - envelope.Now()))
	var late time.Duration
	doing.Go(func() { late = runEvents(over, start, events) })
	err = p.wait(ctx, time.Until(start)+c.Duration)
	close(over)
	doing.Wait()
	if err = errors.Join(append(eventFaults, err)...); err != nil {
		return nil, err
	}
	r, err := p.result()
	if r != nil {
		r.EventsLate = late
	}
	return r, err
}

// begin lets all start their load.
func (p *Processes) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.start = envelope.Now() + int64(20*time.Millisecond)
	for _, q := range p.runs {
		_, _ = fmt.Fprintln(q.stdin, p.start) // one that is gone is found by wait
	}
}

// Start starts instance i, again if it was killed: then it takes up its part of the load where the fleet stands.
func (p *Processes) Start(i int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || i < 0 || i >= len(p.latest) {
		return fmt.Errorf("fleet: start of instance %d", i)
	}
	if q := p.latest[i]; q != nil && !q.killed {
		if p.over(q) {
			return nil
		}
		return fmt.Errorf("fleet: instance %d runs", i)
	}
	c, name := p.c, p.c.Name
	if name == "" {
		name = "fleet"
	}
	base := filepath.Join(p.dir, fmt.Sprintf("%d-%d", i, len(p.runs)))
	q := &process{exited: make(chan struct{}), ready: make(chan struct{}), task: task{
		Instance: i, Instances: c.Instances, Addr: c.Addr(i), Name: name, Limit: c.Limit, Options: c.Options, Load: c.Load,
		Rate: c.Rate, Duration: c.Duration, Workers: c.Workers, Capacity: c.Capacity, AwaitOnline: c.AwaitOnline,
		Recording: base + ".rec", Report: base + ".json",
	}}
	text, err := json.Marshal(&q.task)
	if err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	if err := os.WriteFile(base+".task", text, 0o600); err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	q.cmd = exec.Command(self)
	q.cmd.Env = append(os.Environ(), EnvChild+"="+base+".task")
	q.cmd.Stderr = &q.stderr
	if q.stdin, err = q.cmd.StdinPipe(); err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	stdout, err := q.cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	if err := q.cmd.Start(); err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	if p.start != 0 {
		_, _ = fmt.Fprintln(q.stdin, p.start) // one that is gone is found by wait
	}
	p.runs = append(p.runs, q)
	p.latest[i] = q
	go func() {
		// To the end before Wait, which closes it.
		_, _ = stdout.Read(make([]byte, 64))
		close(q.ready)
		_, _ = io.Copy(io.Discard, stdout)
		q.err = q.cmd.Wait()
		close(q.exited)
	}()
	return nil
}

// over says whether a child has ended as it should, with the load: an event that finds it so came too late (Result.EventsLate), which
// is no fault of the child.
func (p *Processes) over(q *process) bool {
	select {
	case <-q.exited:
		return q.err == nil && p.start != 0 && envelope.Now() >= p.start+int64(p.c.Duration)
	default:
		return false
	}
}

func (p *Processes) signal(i int, s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i < 0 || i >= len(p.latest) || p.latest[i] == nil {
		return fmt.Errorf("fleet: no instance %d", i)
	}
	q := p.latest[i]
	select {
	case <-q.exited:
		if q.killed || p.over(q) {
			return nil
		}
		return fmt.Errorf("fleet: instance %d has ended by itself: %w; %s", i, q.err, q.stderr.text)
	default:
	}
	if s == syscall.SIGKILL {
		q.killed = true
	}
	if err := q.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("fleet: instance %d: %w", i, err)
	}
	return nil
}

// Kill ends instance i at once, with SIGKILL, and returns when it is gone.
func (p *Processes) Kill(i int) error {
	if err := p.signal(i, syscall.SIGKILL); err != nil {
		return err
	}
	p.mu.Lock()
	q := p.latest[i]
	p.mu.Unlock()
	<-q.exited
	return nil
}

// Hang stops instance i as it is, with SIGSTOP.
func (p *Processes) Hang(i int) error { return p.signal(i, syscall.SIGSTOP) }

// Continue lets instance i go on.
func (p *Processes) Continue(i int) error { return p.signal(i, syscall.SIGCONT) }

// close kills what is left.
func (p *Processes) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, q := range p.runs {
		_ = q.cmd.Process.Signal(syscall.SIGKILL) // an error says that it is gone
		<-q.exited
		_ = q.stdin.Close()
	}
}

// grace is how long after the load children may take to close.
const grace = 10 * time.Second

// wait waits until all children have ended.
func (p *Processes) wait(ctx context.Context, load time.Duration) error {
	deadline := time.NewTimer(load + grace)
	defer deadline.Stop()
	for i := 0; ; i++ {
		p.mu.Lock()
		if i == len(p.runs) {
			p.closed = true // no event starts another
			p.mu.Unlock()
			return nil
		}
		q := p.runs[i]
		p.mu.Unlock()
		select {
		case <-q.exited:
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("fleet: instance %d has not ended %v after the load", q.task.Instance, grace)
		}
		p.mu.Lock()
		killed := q.killed
		p.mu.Unlock()
		if !killed && q.err != nil {
			return fmt.Errorf("fleet: instance %d: %w: %s", q.task.Instance, q.err, q.stderr.text)
		}
		// A kill late in a run may be followed by a start: that event is due before the load's end.
		if killed && i == len(p.runs)-1 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Until(time.Unix(0, p.start+int64(p.c.Duration)))):
			}
		}
	}
}

// result puts together what the children left.
func (p *Processes) result() (*Result, error) {
	r := &Result{Latency: new(Histogram), Late: new(Histogram), Started: p.start, Ended: p.start + int64(p.c.Duration),
		offer: offer{p.c.Load, p.c.Rate, p.c.Instances, p.c.Duration}}
	r.PerInstance = make([]Instance, p.c.Instances)
	for _, q := range p.runs {
		history, err := envelope.ReadFile(q.task.Recording)
		if q.killed && len(history) == 0 && (errors.Is(err, os.ErrNotExist) || errors.Is(err, envelope.ErrFormat)) {
			continue // before it had made its recording, and so before it admitted anything
		}
		if err != nil {
			return nil, fmt.Errorf("fleet: instance %d: %w", q.task.Instance, err)
		}
		r.History = append(r.History, history...)
		i := &r.PerInstance[q.task.Instance]
		text, err := os.ReadFile(q.task.Report)
		if err != nil {
			if !q.killed {
				return nil, fmt.Errorf("fleet: instance %d: %w", q.task.Instance, err)
			}
			i.Killed = true
			for _, a := range history { // what was admitted was offered too
				known := Counts{Offered: a.Cost, Admitted: a.Cost}
				i.Counts.add(known)
				r.Counts.add(known)
			}
			continue
		}
		var s summary
		if err := json.Unmarshal(text, &s); err != nil {
			return nil, fmt.Errorf("fleet: instance %d: %w", q.task.Instance, err)
		}
		i.Counts.add(s.Instance.Counts)
		i.Stats = s.Instance.Stats
		r.Counts.add(s.Instance.Counts)
		r.Exchanges += s.Instance.Stats.Exchanges
		r.Asked += s.Instance.Stats.Asked
		r.Heartbeats += s.Instance.Stats.Heartbeats
		r.Failures += s.Instance.Stats.Failures
		r.Latency.addDense(s.Latency, s.LatencyMax)
		r.Late.addDense(s.Late, s.LateMax)
		r.GeneratorLate = max(r.GeneratorLate, s.GeneratorLate)
		r.Dropped += s.Dropped
		r.PeakGoroutines = max(r.PeakGoroutines, s.Peak)
		if s.Close != "" {
			r.CloseErrors = append(r.CloseErrors, errors.New(s.Close))
		}
	}
	return r, nil
}
