package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A SoakResult is what a soak came to; JSON for the report.
type SoakResult struct {
	When      time.Time     // it began
	Asked     time.Duration // how long it was to last,
	Lasted    time.Duration // and how long it did, or has so far
	Backend   string
	Seed      uint64
	Instances int
	Limits    []string

	Rounds   int
	Faults   map[string]int // how often each was drawn
	Losses   int            // how often Redis lost something
	Replaced int            // instances that were closed and replaced by others

	Checks, Errors             int64
	Overshoot                  int64 // of the worst round in which Redis kept what it had
	LossOvershoot, LossAllowed int64 // of the worst round in which it did not, and what docs/guarantees.md allows of that

	Judged, Fell int // rounds in which the machine let the load run; others that fell short

	// Of the rounds that were judged.
	Recovery []time.Duration // from the end of the faults until all were online and 90 % of each limit was admitted
	WarmP999 time.Duration   // of checks of a warm key while faults lasted
	Slowest  time.Duration   // check

	Samples          []Sample
	Heap, Goroutines Trend
	Keys, TTL        Trend // of Redis; TTL in seconds

	Findings []string // what is promised and was not so
}

const (
	samplesAtMost   = 400
	roundsToReplace = 5 // an instance

	visitEach = 50 * time.Millisecond
	visits    = 5 // checks that an instance makes of a visitor's key
	checkEach = 20 * time.Millisecond
	forgotten = 30 * time.Second // how long the dead are remembered, with a heartbeat of 200 ms
	checkers  = 3                // goroutines by instance and limit
	checks    = overload * limitRate * int(checkEach) / int(period) / (instances * checkers)
	noStall   = 40 * time.Millisecond
)

// A soak is one fleet on one Redis. Every instance has a limiter of each algorithm; all of them check one key far too often, and keys
// that come and go.
type soak struct {
	w       *World
	options []tierlimit.Option
	limits  []tierlimit.Limit
	started time.Time
	result  *SoakResult
	members []*member
	ledgers []*ledger // by limit
	over    chan struct{}
	beside  sync.WaitGroup

	mu      sync.RWMutex       // held for writing while the history is taken away
	history []*envelope.Memory // what returned since it was, by limit

	warm            fleet.Histogram
	made, failed    atomic.Int64 // checks
	slowest, latest atomic.Int64 // ns, in the round: a check; what the machine made somebody wait who should not
}

// A member is an instance and its load.
type member struct {
	hybrid   *tierlimit.Hybrid
	client   redis.UniversalClient
	limiters []*tierlimit.Limiter
	leaving  chan struct{}
	load     sync.WaitGroup
}

// Soak runs one fleet for so long under faults drawn at random, in rounds: a spell of faults, and some seconds in which all must be
// well again. What is left behind in heap, goroutines and keys must not add up. The result goes to the file that TIERLIMIT_SOAK_RESULT
// names, every minute and at the end.
func Soak(t *testing.T, b redistest.Backend, length time.Duration) *SoakResult {
	path := os.Getenv("TIERLIMIT_SOAK_RESULT")
	s := newSoak(t, b)
	r := s.result
	r.Asked = length
	t.Logf("seed %d", r.Seed)
	s.begin()
	next := draws(r.Seed, true)
	for said := time.Now(); time.Since(s.started) < length; {
		s.awaitForgotten()
		s.round(next())
		if r.Rounds%roundsToReplace == 0 {
			s.replace(r.Rounds / roundsToReplace % len(s.members))
		}
		if n := len(r.Samples); n == 0 || time.Since(s.started)-r.Samples[n-1].At > length/samplesAtMost {
			s.sample()
		}
		s.sum()
		if time.Since(said) > time.Minute {
			said = time.Now()
			t.Log(r)
			if err := r.write(path); err != nil {
				t.Error(err)
			}
		}
	}
	s.end()
	t.Log(r)
	for _, f := range r.Findings {
		t.Error(f)
	}
	if 3*r.Fell > r.Rounds && length >= time.Minute && !raceEnabled {
		t.Errorf("%d of %d rounds fell short and could not be judged: this machine is too busy for a soak", r.Fell, r.Rounds)
	}
	if err := r.write(path); err != nil {
		t.Error(err)
	}
	return r
}

// newSoak starts Redis.
func newSoak(t *testing.T, b redistest.Backend) *soak {
	w := newWorld(t, Fault{}, limits()[0])
	w.limiters = "soak-*"
	w.start(b, Fault{Topology: Single, Server: persist})
	s := &soak{w: w, limits: limits(), started: time.Now(), members: make([]*member, w.Instances), over: make(chan struct{})}
	s.options = []tierlimit.Option{
		tierlimit.WithPrefix(w.Prefix), tierlimit.WithHeartbeat(heartbeat), tierlimit.WithLeaseTTL(heartbeat),
		tierlimit.WithRemoteTimeout(w.Timeout), tierlimit.WithLogger(zap.New(newWatch(w).core())),
	}
	s.result = &SoakResult{When: s.started.UTC(), Backend: b.Name(), Seed: w.Seed, Instances: w.Instances, Faults: map[string]int{}}
	for _, l := range s.limits {
		s.result.Limits = append(s.result.Limits, l.String())
		s.ledgers = append(s.ledgers, &ledger{limit: l})
		s.history = append(s.history, new(envelope.Memory))
	}
	return s
}

// begin starts the fleet.
func (s *soak) begin() {
	s.beside.Go(s.sleep)
	for i := range s.members {
		s.join(i)
	}
	s.awaitOnline("start")
}

// end ends it, and looks at what is left.
func (s *soak) end() {
	for i := range s.members {
		s.leave(i)
	}
	close(s.over)
	s.beside.Wait()
	s.awaitGone()
	s.sum()
	if s.result.Errors > 0 {
		s.finding("%d checks returned an error", s.result.Errors)
	}
	s.result.Findings = append(s.result.Findings, s.result.trends()...)
}

// sum brings up to date what is counted beside the rounds.
func (s *soak) sum() {
	s.result.Lasted = time.Since(s.started)
	s.result.Checks, s.result.Errors, s.result.WarmP999 = s.made.Load(), s.failed.Load(), s.warm.Percentile(99.9)
	s.result.trends()
}

// String is one line for logs.
func (r *SoakResult) String() string {
	var now Sample
	if n := len(r.Samples); n > 0 {
		now = r.Samples[n-1]
	}
	return fmt.Sprintf("%v: %d rounds, %d of them judged; %d checks, %d errors; overshoot %d, after losses %d of %d allowed; back after %v at most; heap %d kB (%+.0f), %d goroutines (%+.1f), %d keys (%+.1f) for %v at most; %d findings",
		r.Lasted.Round(time.Second), r.Rounds, r.Judged, r.Checks, r.Errors, r.Overshoot, r.LossOvershoot, r.LossAllowed,
		slices.Max(append(r.Recovery, 0)).Round(time.Millisecond), now.Heap/1024, r.Heap.grown()/1024, now.Goroutines, r.Goroutines.grown(),
		now.Keys, r.Keys.grown(), now.TTL.Round(time.Second), len(r.Findings))
}

// write puts the result into a file, whole or not at all.
func (r *SoakResult) write(path string) error {
	if path == "" {
		return nil
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	part := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if err := os.WriteFile(part, append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(part, path)
}

// finding notes what is wrong.
func (s *soak) finding(format string, args ...any) {
	text := fmt.Sprintf("round %d: ", s.result.Rounds) + fmt.Sprintf(format, args...)
	s.result.Findings = append(s.result.Findings, text)
	s.w.TB.Log(text)
}

// sleep notes how late the machine lets somebody wake up.
func (s *soak) sleep() {
	const pause = 5 * time.Millisecond
	for {
		asleep := time.Now()
		select {
		case <-s.over:
			return
		case <-time.After(pause):
			raise(&s.latest, int64(time.Since(asleep)-pause))
		}
	}
}

// askRedis is how the machine lets Redis run, which is well for so long.
func (s *soak) askRedis(length time.Duration) error {
	return s.w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
		for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			asked := time.Now()
			if err := rdb.Ping(ctx).Err(); err != nil {
				return err
			}
			raise(&s.latest, int64(time.Since(asked)))
		}
		return nil
	})
}

// raise makes v at least n.
func raise(v *atomic.Int64, n int64) {
	for old := v.Load(); n > old && !v.CompareAndSwap(old, n); old = v.Load() {
	}
}

// join starts instance i and its load.
func (s *soak) join(i int) {
	m := &member{client: s.w.Client(i), leaving: make(chan struct{})}
	s.members[i] = m
	// What is started here carries the label; what proxies and faults start does not.
	pprof.Do(context.Background(), pprof.Labels(label, s.w.Prefix), func(context.Context) {
		var err error
		if m.hybrid, err = tierlimit.New(m.client, s.options...); err != nil {
			s.w.TB.Fatal(err)
		}
		for n, l := range s.limits {
			limiter, err := m.hybrid.Limiter("soak-"+l.Algorithm.String(), l)
			if err != nil {
				s.w.TB.Fatal(err)
			}
			m.limiters = append(m.limiters, limiter)
			for range checkers {
				m.load.Go(func() { m.every(checkEach, func() { s.check(limiter, n, "hot", checks) }) })
			}
		}
		m.load.Go(func() {
			m.every(visitEach, func() {
				visitor := int(time.Since(s.started) / visitEach)
				n := visitor % len(s.limits)
				s.check(m.limiters[n], n, fmt.Sprint("visitor-", visitor), visits)
			})
		})
	})
	s.w.Hybrids = s.w.Hybrids[:0:0]
	for _, m := range s.members {
		if m != nil {
			s.w.Hybrids = append(s.w.Hybrids, m.hybrid)
		}
	}
}

// leave ends instance i and its load.
func (s *soak) leave(i int) {
	m := s.members[i]
	close(m.leaving)
	m.load.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := errors.Join(m.hybrid.Close(ctx), m.client.Close()); err != nil {
		s.finding("instance %d: close: %v", i, err)
	}
}

// replace ends instance i and starts another in its place.
func (s *soak) replace(i int) {
	s.leave(i)
	s.join(i)
	s.awaitOnline("replacement")
	s.result.Replaced++
}

// awaitOnline returns when all instances are in touch with Redis.
func (s *soak) awaitOnline(after string) {
	end := time.Now().Add(online)
	for i, m := range s.members {
		for m.hybrid.Stats().State != tierlimit.StateOnline {
			if time.Now().After(end) {
				s.finding("%s: instance %d is not online after %v: %+v", after, i, online, m.hybrid.Stats())
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// awaitForgotten leaves Redis alone while an instance that was closed still counts: one that left just before a loss is remembered by the
// others, and its share kept aside, until Redis has been there for 30 s without a gap.
func (s *soak) awaitForgotten() {
	counted := func() (n int) {
		for _, m := range s.members {
			n = max(n, m.hybrid.Stats().Instances)
		}
		return n
	}
	for end := time.Now().Add(4 * forgotten); counted() > len(s.members); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.finding("%d instances are counted after %v without a fault, there are %d", counted(), 4*forgotten, len(s.members))
			return
		}
	}
}

// awaitGone returns when nothing is left of instances that were closed.
func (s *soak) awaitGone() {
	end := time.Now().Add(patience)
	for goroutines()[s.w.Prefix] > 0 {
		if time.Now().After(end) {
			s.finding("%d goroutines are left of instances that were closed", goroutines()[s.w.Prefix])
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// every calls f again and again until the member leaves. What it misses while f takes its time it does not make up for.
func (m *member) every(pause time.Duration, f func()) {
	t := time.NewTicker(pause)
	defer t.Stop()
	for {
		select {
		case <-m.leaving:
			return
		case <-t.C:
			f()
		}
	}
}

// check makes n checks of a key, under a limit by its number.
func (s *soak) check(l *tierlimit.Limiter, limit int, key string, n int) {
	for range n {
		a := envelope.Admission{Called: envelope.Now(), Cost: 1, Key: envelope.KeyID(key)}
		r, err := l.Allow(context.Background(), key)
		a.Returned = envelope.Now()
		s.made.Add(1)
		raise(&s.slowest, a.Returned-a.Called)
		switch {
		case err != nil:
			s.failed.Add(1)
		case r.Allowed:
			s.mu.RLock()
			_ = s.history[limit].Record(a) // never fails
			s.mu.RUnlock()
		}
	}
}

// take takes away what returned until now, by limit.
func (s *soak) take() (history [][]envelope.Admission, now int64) {
	s.mu.Lock()
	taken := s.history
	s.history = make([]*envelope.Memory, len(taken))
	for i := range taken {
		s.history[i] = new(envelope.Memory)
	}
	now = envelope.Now()
	s.mu.Unlock()
	for _, m := range taken {
		history = append(history, m.History())
	}
	return history, now
}

// round is a spell of faults, the recovery from it, and the judgement.
func (s *soak) round(d drawn) {
	s.result.Rounds++
	s.slowest.Store(0)
	s.latest.Store(0)
	earlier := s.forget(0)
	var names []string
	for _, f := range d.faults {
		names = append(names, f.Name)
		s.result.Faults[f.Name]++
	}
	what := fmt.Sprintf("%s for %v", strings.Join(names, " and "), d.last.Round(time.Millisecond))

	x := newWatch(s.w)
	x.beside.Go(x.states)
	for _, h := range s.w.Hybrids {
		x.beside.Go(func() { x.keepWarm(h) })
	}
	x.begin()
	if err := spell(s.w.TB.Context(), s.w, d.faults, d.last); err != nil {
		s.w.TB.Error(err)
	}
	x.end()
	s.w.mu.Lock()
	if s.w.calm = 0; len(d.faults) > 1 {
		s.w.calm = x.ended
	}
	s.w.mu.Unlock()
	if err := s.askRedis(recovery + time.Second + d.rest); err != nil {
		s.w.TB.Error(err)
	}
	s.awaitOnline(what)
	close(x.stop)
	x.beside.Wait()
	history, now := s.take()

	losses := s.forget(0)
	s.result.Losses += losses - earlier
	back, kept := x.back(), now
	for i, l := range s.ledgers {
		byKey := l.add(history[i])
		v := l.judge(byKey, func(r *fleet.Result) int64 { return s.w.losses(l.limit, r) })
		if v.beyond() > 0 {
			s.finding("%s: %v: overshoot %d, allowed %d", what, l.limit, v.overshoot, v.allowed)
		}
		if losses == 0 {
			s.result.Overshoot = max(s.result.Overshoot, v.overshoot)
		} else if v.overshoot > s.result.LossOvershoot {
			s.result.LossOvershoot, s.result.LossAllowed = v.overshoot, v.allowed
		}
		full := fullAgain(&fleet.Result{History: byKey[envelope.KeyID("hot")], Ended: now}, l.limit, 0.9, x.ended)
		if full < 0 {
			full = time.Duration(now - x.ended)
		}
		back = max(back, full)
		kept = min(kept, l.close(byKey, now))
	}
	s.forget(kept - int64(time.Second))
	if time.Duration(s.latest.Load()) > noStall || raceEnabled {
		if back > recovery {
			s.result.Fell++
		}
		return
	}
	s.result.Judged++
	s.result.Recovery = append(s.result.Recovery, back)
	s.warm.Add(&x.warm)
	slowest := time.Duration(s.slowest.Load())
	s.result.Slowest = max(s.result.Slowest, slowest)
	if back > recovery {
		s.finding("%s: back after %v, want %v", what, back, recovery)
	}
	if slowest > s.w.Timeout+250*time.Millisecond {
		s.finding("%s: a check took %v with a timeout of %v", what, slowest, s.w.Timeout)
	}
}

// forget forgets losses that came before an instant, and returns how many are left.
func (s *soak) forget(before int64) int {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	old := func(at int64) bool { return at < before }
	s.w.lost = slices.DeleteFunc(s.w.lost, old)
	s.w.told = slices.DeleteFunc(s.w.told, old)
	return len(s.w.lost)
}

// sample takes down what is in use.
func (s *soak) sample() {
	p := Sample{At: time.Since(s.started), Heap: heap(), Goroutines: goroutines()[s.w.Prefix]}
	err := s.w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
		for keys := rdb.Scan(ctx, 0, "*", 1000).Iterator(); ; {
			if !keys.Next(ctx) {
				return keys.Err()
			}
			kind, err := rdb.Type(ctx, keys.Val()).Result()
			if err != nil {
				return err
			}
			if kind == "list" { // a fault put it there
				continue
			}
			ttl, err := rdb.PTTL(ctx, keys.Val()).Result()
			if err != nil {
				return err
			}
			if ttl == -1 {
				s.finding("a key in Redis never expires")
			}
			p.Keys++
			if strings.Contains(keys.Val(), "}soak-") { // the fleet's own record is kept for a day
				p.TTL = max(p.TTL, ttl)
			}
		}
	})
	if err != nil {
		s.w.TB.Error(err)
	}
	s.result.Samples = append(s.result.Samples, p)
}
