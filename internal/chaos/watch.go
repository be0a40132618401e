package chaos

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// A watch looks at the instances of one fleet while it runs: their states, their goroutines, and how fast a warm key is.
type watch struct {
	w      *World
	stop   chan struct{}
	beside sync.WaitGroup
	warm   fleet.Histogram // checks of a warm key while the fault lasts

	mu     sync.Mutex
	begun  int64
	ended  int64
	left   int64   // when an instance was first seen not online after begun
	away   []int64 // when one was seen so after ended
	counts []count // of goroutines

	weights []count // bytes of heap
}

// count is how much there was at an instant.
type count struct{ at, n int64 }

// weigh takes down what is in use of the heap, if no other fleet runs beside this one.
func (x *watch) weigh() {
	if atOnce() == 1 {
		x.weights = append(x.weights, count{envelope.Now(), heap()})
	}
}

// heap is the bytes in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func newWatch(w *World) *watch { return &watch{w: w, stop: make(chan struct{})} }

// run calls f, which runs the fleet, and watches meanwhile.
func (x *watch) run(f func()) {
	leave := censuses.join(x)
	x.beside.Go(x.states)
	// Whatever is started from here on carries the label, and so can be told from other fleets' goroutines.
	pprof.Do(context.Background(), pprof.Labels(label, x.w.Prefix), func(context.Context) { f() })
	leave()
	close(x.stop)
	x.beside.Wait()
}

func (x *watch) begin() { x.mu.Lock(); x.begun = envelope.Now(); x.mu.Unlock() }
func (x *watch) end()   { x.mu.Lock(); x.ended = envelope.Now(); x.mu.Unlock() }

// lasts says whether the fault does.
func (x *watch) lasts() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.begun != 0 && x.ended == 0
}

// made takes an instance.
func (x *watch) made(_ int, h *tierlimit.Hybrid) {
	x.mu.Lock()
	x.w.Hybrids = append(x.w.Hybrids, h)
	x.mu.Unlock()
	x.beside.Go(func() { x.keepWarm(h) })
}

// states polls in what state the instances are.
func (x *watch) states() {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-x.stop:
			return
		case <-tick.C:
		}
		x.mu.Lock()
		if x.begun != 0 {
			for _, h := range x.w.Hybrids {
				if h.Stats().State == tierlimit.StateOnline {
					continue
				}
				now := envelope.Now()
				if x.left == 0 {
					x.left = now
				}
				if x.ended != 0 {
					x.away = append(x.away, now)
				}
				break
			}
		}
		x.mu.Unlock()
	}
}

// keepWarm makes checks of a key whose lease outlasts the fault, and measures them.
func (x *watch) keepWarm(h *tierlimit.Hybrid) {
	l, err := h.Limiter("warm", tierlimit.TokenBucket(1_000_000, time.Second), tierlimit.WithLeaseTTL(30*time.Second))
	if err != nil {
		x.w.TB.Error(err)
		return
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-x.stop:
			return
		case <-tick.C:
		}
		for range 10 {
			start := time.Now()
			r, err := l.Allow(context.Background(), "warm")
			took := time.Since(start)
			if err == nil && r.Source == tierlimit.Local && x.lasts() {
				x.warm.Record(took)
			}
		}
	}
}

// core takes down when an instance says that Redis has lost its data.
func (x *watch) core() zapcore.Core {
	nowhere := zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(io.Discard), zap.WarnLevel)
	return zapcore.RegisterHooks(nowhere, func(e zapcore.Entry) error {
		if strings.HasPrefix(e.Message, "Redis lost its data") {
			x.w.mu.Lock()
			x.w.told = append(x.w.told, envelope.Now())
			x.w.mu.Unlock()
		}
		return nil
	})
}

// measure completes a row, once the fleet is gone.
func (x *watch) measure(row *Row, r *fleet.Result) {
	at := x.left
	if told := x.w.toldAfter(x.begun); told != 0 && (at == 0 || told < at) {
		at = told
	}
	if at != 0 {
		row.Notice = time.Duration(at - x.begun)
	}
	if row.Recovery >= 0 {
		row.Recovery = max(row.Recovery, x.back())
	}
	if len(x.weights) == 2 {
		// The history of what was admitted meanwhile is the test's own.
		from, to := x.weights[0], x.weights[1]
		row.HeapBytes = to.n - from.n - only(r, x.w.Keys).AdmittedIn(from.at, to.at)*int64(unsafe.Sizeof(envelope.Admission{}))
	}
	row.P999 = x.warm.Percentile(99.9)
	row.Goroutines = x.mean(x.last()-int64(time.Second), x.last()) - x.mean(x.begun-int64(time.Second), x.begun)
	for _, c := range x.counts {
		if c.at >= x.begun && c.at < x.ended {
			row.Peak = max(row.Peak, c.n-x.mean(x.begun-int64(time.Second), x.begun))
		}
	}
}

// back is how long after the fault's end all were online, and stayed so for half a second: what a busy machine does to one later is
// not the fault's.
func (x *watch) back() time.Duration {
	back := x.ended
	for _, at := range x.away {
		if at > back+int64(500*time.Millisecond) {
			break
		}
		back = at
	}
	return time.Duration(back - x.ended)
}

func (x *watch) last() int64 {
	if len(x.counts) == 0 {
		return 0
	}
	return x.counts[len(x.counts)-1].at
}

// mean is how many goroutines there were on average between two instants.
func (x *watch) mean(from, to int64) int64 {
	var sum, n int64
	for _, c := range x.counts {
		if c.at >= from && c.at <= to {
			sum, n = sum+c.n, n+1
		}
	}
	return sum / max(1, n)
}

// toldAfter is when an instance first said that Redis has lost its data, 0 if none did.
func (w *World) toldAfter(at int64) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.told {
		if t >= at {
			return t
		}
	}
	return 0
}

// label marks the goroutines of a fleet with its prefix, for the goroutine profile to tell them apart.
const label = "chaos"

// unlabelled is f without the label: what it starts is the fault's, such as the connections of a proxy, and not an instance's.
func unlabelled(f func()) func() {
	return func() {
		pprof.SetGoroutineLabels(context.Background())
		f()
	}
}

// censuses counts goroutines for all fleets that run, from one profile.
var censuses census

type census struct {
	mu   sync.Mutex
	open map[*watch]struct{}
	stop chan struct{}
}

// join adds x until the returned function is called.
func (c *census) join(x *watch) (leave func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = map[*watch]struct{}{}
	}
	c.open[x] = struct{}{}
	if len(c.open) == 1 {
		c.stop = make(chan struct{})
		go c.run(c.stop)
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.open, x)
		if len(c.open) == 0 {
			close(c.stop)
		}
	}
}

func (c *census) run(stop <-chan struct{}) {
	tick := time.NewTicker(400 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		byLabel := goroutines()
		now := envelope.Now()
		c.mu.Lock()
		for x := range c.open {
			x.mu.Lock()
			x.counts = append(x.counts, count{now, byLabel[x.w.Prefix]})
			x.mu.Unlock()
		}
		c.mu.Unlock()
	}
}

// goroutines is how many there are, by label.
func goroutines() map[string]int64 {
	var text bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&text, 1) // a buffer takes everything
	byLabel := map[string]int64{}
	var n int64
	for s := bufio.NewScanner(&text); s.Scan(); {
		// "7 @ 0x43f 0x450", then perhaps `# labels: {"chaos":"prefix"}`, then the frames.
		line := s.Text()
		if number, _, ok := strings.Cut(line, " @ "); ok {
			n, _ = strconv.ParseInt(number, 10, 64)
		} else if _, value, ok := strings.Cut(line, `"`+label+`":"`); ok && strings.HasPrefix(line, "# labels:") {
			name, _, _ := strings.Cut(value, `"`)
			byLabel[name] += n
		}
	}
	return byLabel
}
