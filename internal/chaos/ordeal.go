package chaos

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// quiet drops what go-redis logs of refused connections, which the suite causes by the thousand.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

const (
	settle   = 600 * time.Millisecond // until a fleet that starts full is saturated
	recovery = 2 * time.Second        // within which a fleet is back
	online   = 90 * time.Second       // how long a fleet may take until all instances have heard from Redis
	overload = 3                      // times the limit
)

// How long the load goes on before and after the fault.
var (
	before = choose(2600*time.Millisecond, 4600*time.Millisecond)
	after  = recovery + choose(2*time.Second, 5*time.Second)
)

// choose is one or the other: TIERLIMIT_LONG.
func choose(short, ifLong time.Duration) time.Duration {
	if long {
		return ifLong
	}
	return short
}

// ordeal puts one fleet through one fault and judges it.
func (j *jury) ordeal(t *testing.T, b redistest.Backend, f Fault, limit tierlimit.Limit) {
	w := newWorld(t, f, limit)
	w.start(b, f)
	var row *Row
	if f.Children != nil {
		row = w.endureAsChildren(f)
	} else {
		row = w.endure(f)
	}
	row.Backend = b.Name()
	j.judge(t, f, w, row)
	if err := row.write(); err != nil {
		t.Error(err)
	}
}

// start starts Redis.
func (w *World) start(b redistest.Backend, f Fault) {
	redis.SetLogger(quiet{})
	f.Topology.Start(w, b, f.Server...)
	if len(w.Keys) == 0 {
		w.Keys = []string{"hot"}
	}
	if f.Prepare != nil {
		if err := f.Prepare(w); err != nil {
			w.TB.Fatal(err)
		}
	}
}

// endureAsChildren is endure for a fleet of child processes.
func (w *World) endureAsChildren(f Fault) *Row {
	events := make([]fleet.ProcEvent, len(f.Children))
	for i, e := range f.Children {
		events[i] = fleet.ProcEvent{At: before + e.At, Do: e.Do}
	}
	// Every child counts the fleet itself: a child that was started again is one more than there are.
	r, err := fleet.RunProcesses(w.TB.Context(), fleet.ProcConfig{
		Instances: w.Instances, Addr: func(i int) string { return w.Proxies[i].Addr() }, Limit: w.Limit,
		Options: fleet.Options{Prefix: w.Prefix, Heartbeat: heartbeat, LeaseTTL: heartbeat, RemoteTimeout: w.Timeout},
		Load:    fleet.Even(w.Keys...), Rate: w.offered(), Duration: before + f.For + after, Workers: 16, AwaitOnline: online, Events: events,
	})
	if err != nil {
		w.TB.Fatal(err)
	}
	w.Begun, w.Ended = r.Started+int64(before), r.Started+int64(before+f.For)
	return w.measure(f, r, 0, w.Ended)
}

// offered is how much the load wants, in tokens per second.
func (w *World) offered() float64 {
	return overload * float64(w.Limit.Rate) / w.Limit.Period.Seconds() * float64(len(w.Keys))
}

// endure runs the fleet and measures.
func (w *World) endure(f Fault) *Row {
	watch := newWatch(w)
	w.options = append([]tierlimit.Option{
		tierlimit.WithPrefix(w.Prefix),
		tierlimit.WithHeartbeat(heartbeat),
		tierlimit.WithLeaseTTL(heartbeat),
		tierlimit.WithRemoteTimeout(w.Timeout),
		tierlimit.WithInstances(w.Instances),
		tierlimit.WithLogger(zap.New(watch.core())),
	}, f.Options...)
	silence := w.silence()
	lasts := f.For + time.Duration(f.Silences)*silence
	load := fleet.Load(fleet.Even(w.Keys...))
	if f.Load != nil {
		load = f.Load(w.Keys)
	}
	w.started = time.Now()
	var faults errorList
	during := make(chan struct{})
	ctx, cancel := context.WithCancel(w.TB.Context())
	defer cancel()
	do := func(what string, step func(*World) error) {
		if step == nil {
			return
		}
		if err := step(w); err != nil {
			faults.add(fmt.Errorf("%s: %w", what, err))
		}
	}
	var endBegan int64
	c := fleet.Config{
		Instances: w.Instances, Client: w.Client, Limit: w.Limit, Options: w.options,
		Load: load, Rate: w.offered(), Duration: before + lasts + after + f.After,
		Workers: 16, AwaitOnline: online, Made: watch.made, Each: w.answered,
		Events: []fleet.Event{
			{At: before - 300*time.Millisecond, Do: watch.weigh},
			{At: before, Do: unlabelled(func() {
				w.Begun = envelope.Now()
				watch.begin()
				do("begin", f.Begin)
				w.Struck = envelope.Now()
				go func() {
					defer close(during)
					if f.During == nil {
						return
					}
					if err := f.During(ctx, w); err != nil && !errors.Is(err, context.Canceled) {
						faults.add(fmt.Errorf("during: %w", err))
					}
				}()
			})},
			{At: before + lasts, Do: unlabelled(func() {
				endBegan = envelope.Now()
				cancel()
				<-during
				do("end", f.End)
				w.Ended = envelope.Now()
				watch.end()
				if f.Refusal != "" {
					if err := w.refused(f.Refusal); err != nil {
						w.short("%v", err)
					}
				}
			})},
			{At: before + lasts + f.After + f.recover() + 500*time.Millisecond, Do: unlabelled(func() { do("back", f.Back) })},
			{At: before + lasts + after + f.After - 300*time.Millisecond, Do: watch.weigh},
		},
	}
	var r *fleet.Result
	var err error
	watch.run(func() { r, err = fleet.Run(w.TB.Context(), c) })
	if err != nil {
		w.TB.Fatal(err)
	}
	if w.Ended == 0 {
		w.TB.Fatal("the fault never ended")
	}
	r.History = append(r.History, w.extra.history()...)
	if err := faults.all(); err != nil {
		w.TB.Error(err)
	}
	row := w.measure(f, r, silence, endBegan)
	watch.measure(row, r)
	return row
}

// measure makes a Row of what is in the history.
func (w *World) measure(f Fault, r *fleet.Result, silence time.Duration, endBegan int64) *Row {
	load := only(r, w.Keys)
	row := &Row{
		Topology: f.Topology.Name, Fault: f.Name, Algorithm: w.Limit.Algorithm.String(),
		Limit: w.Limit.Rate, Period: w.Limit.Period, Keys: len(w.Keys),
		Overshoot: r.Verdict(w.Limit).Overshoot,
		Slowest:   r.Latency.Max(), Errors: r.Errors + w.extra.errors.Load(), Failures: r.Failures,
		Series: series(load), SeriesStep: seriesStep,
		FaultFrom: time.Duration(w.Begun - r.Started), FaultTo: time.Duration(w.Ended - r.Started),
		Seed: w.Seed, When: time.Now().UTC(), Loose: f.Loose,
	}
	if f.Allowed != nil {
		row.Allowed = f.Allowed(w, r)
	}
	row.NotJudged, _ = r.Stalled()
	if took := time.Duration(w.Ended - endBegan); row.NotJudged == "" && took > f.After+time.Second {
		row.NotJudged = fmt.Sprintf("ending the fault took %v", took)
	}
	part := func(from, to int64) float64 { return used(load, w.Limit, from, to) }
	row.Before = part(r.Started+int64(settle), w.Begun)
	switch f.Course {
	case Shares:
		row.During = part(w.Struck+int64(silence), endBegan)
	case Steady: // it must not be seen right after it either
		row.During = part(w.Begun, max(endBegan, w.Begun+int64(recovery)))
	default:
		row.During = part(w.Begun, endBegan)
	}
	row.After = part(w.Ended+int64(f.recover()), r.Ended)
	w.measureSpared(row, r)
	row.Recovery = fullAgain(load, w.Limit, 0.9*f.present(w)*float64(len(w.Keys)), w.Ended)
	return row
}

// fullAgain is how long after an instant a part of the limit is admitted again, over a second or a period if that is longer; -1 if it
// never is.
func fullAgain(r *fleet.Result, l tierlimit.Limit, part float64, after int64) time.Duration {
	wide := int64(max(time.Second, l.Period))
	enough := int64(part * float64(l.Rate) * float64(wide) / float64(l.Period))
	for at := after; at+wide <= r.Ended; at += int64(20 * time.Millisecond) {
		if r.AdmittedIn(at, at+wide) >= enough {
			return time.Duration(at - after)
		}
	}
	return -1
}

// used is what part of the limit was admitted between two instants, 0 if no two whole periods fit.
func used(r *fleet.Result, l tierlimit.Limit, from, to int64) float64 {
	p := int64(l.Period)
	if to-from < 2*p {
		return 0
	}
	if l.Algorithm != tierlimit.AlgorithmSlidingLog || to-from < 3*p {
		return r.Utilisation(l, from, to)
	}
	// A saturated log admits in bursts a window and a bit apart: where an interval of whole windows begins must not decide.
	best := 0.0
	for late := int64(0); late < p; late += p / 20 {
		best = max(best, r.Utilisation(l, from+late, to-p+late))
	}
	return best
}

// silence is what Bound says for the limit, the alignment of windows included.
func (w *World) silence() time.Duration {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	defer rdb.Close()
	h, err := tierlimit.New(rdb, w.options...)
	if err != nil {
		w.TB.Fatal(err)
	}
	defer h.Close(context.Background())
	l, err := h.Limiter("fleet", w.Limit)
	if err != nil {
		w.TB.Fatal(err)
	}
	return l.Bound().Silence
}
