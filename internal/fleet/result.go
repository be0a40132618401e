package fleet

import (
	"fmt"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
)

// Counts are sums over checks. Tokens unless they say checks.
type Counts struct {
	Offered  int64 // tokens asked for by the checks that were made
	Admitted int64
	Denied   int64
	Checks   int64    // checks made
	Errors   int64    // checks that returned an error
	BySource [4]int64 // checks answered, by tierlimit.Source; 0 is none of them
}

func (c *Counts) add(o Counts) {
	c.Offered += o.Offered
	c.Admitted += o.Admitted
	c.Denied += o.Denied
	c.Checks += o.Checks
	c.Errors += o.Errors
	for i := range c.BySource {
		c.BySource[i] += o.BySource[i]
	}
}

func (c Counts) since(o Counts) Counts {
	c.Offered -= o.Offered
	c.Admitted -= o.Admitted
	c.Denied -= o.Denied
	c.Checks -= o.Checks
	c.Errors -= o.Errors
	for i := range c.BySource {
		c.BySource[i] -= o.BySource[i]
	}
	return c
}

// Local is the number of checks answered from leases and kept denials.
func (c Counts) Local() int64 { return c.BySource[tierlimit.Local] }

// Remote is the number of checks that Redis decided.
func (c Counts) Remote() int64 { return c.BySource[tierlimit.Remote] }

// Fallback is the number of checks that were decided because Redis was out of reach.
func (c Counts) Fallback() int64 { return c.BySource[tierlimit.Fallback] }

// LocalPercent is the part of the checks that were answered locally, in percent.
func (c Counts) LocalPercent() float64 { return 100 * float64(c.Local()) / float64(max(1, c.Checks)) }

// An Instance is what one instance did.
type Instance struct {
	Counts
	Stats  tierlimit.Stats // at the end of the load, before it closed; zero if it was killed
	Killed bool            // processes: it was killed; of what it did until then Admitted is known, and counted as Offered, but not the rest
}

// A Result is what a run came to.
type Result struct {
	Counts
	History        []envelope.Admission // in no particular order
	Started, Ended int64                // of the load: ns of the server's clock
	PerInstance    []Instance
	Latency        *Histogram    // of each check, from before the call to after it
	Late           *Histogram    // from when a check was due to when it was called
	GeneratorLate  time.Duration // the latest the generator itself was: the machine did not let it run
	EventsLate     time.Duration // the latest an event was; one that comes after the load's end does nothing to processes
	Dropped        int64         // checks that were never made: their instance still had a queue of thousands
	Exchanges      int64         // script calls that settled keys
	Asked          int64         // keys settled by them
	Heartbeats     int64
	Failures       int64
	PeakGoroutines int
	offer          offer
	CloseErrors    []error // what Close of the instances returned
}

// Elapsed is how long the load lasted.
func (r *Result) Elapsed() time.Duration { return time.Duration(r.Ended - r.Started) }

// ExchangesPerSecond is script calls of the whole fleet per second of the load, heartbeats left out.
func (r *Result) ExchangesPerSecond() float64 {
	return float64(r.Exchanges) / max(1e-9, r.Elapsed().Seconds())
}

// Envelope is the limit as the checker knows it, with Redis's tick of a microsecond.
func Envelope(l tierlimit.Limit) envelope.Limit {
	return envelope.Limit{
		Kind:       envelope.Kind(l.Algorithm),
		Rate:       l.Rate,
		Period:     l.Period,
		Burst:      l.Burst,
		SubWindows: l.SubWindows,
		Tick:       time.Microsecond,
	}
}

// Verdict is the checker's judgement of the whole history.
func (r *Result) Verdict(l tierlimit.Limit) envelope.Verdict {
	return envelope.Check(Envelope(l), r.History)
}

// Utilisation is what was admitted in [from, to], in ns of the server's clock, as a part of what an ideal limiter would have
// admitted to the same keys had more been wanted of each at every instant. Keys are those that were admitted at all.
//
// With from <= Started 100 % is an ideal limiter that is full at from (envelope.Demandable): buckets Burst + Rate*T/Period,
// fixed window Rate for each window touched, sliding ones their start on an empty past.
//
// With from > Started the limiter is taken to be saturated already: buckets Rate*T/Period; the others are counted over whole
// periods: a fixed or sliding window over the aligned ones inside [from, to], a log over as many as fit, ending at to. Rate
// for each, less the one token per period that a sliding window's weight rounds away.
//
// A call belongs to the instant at which it returned. NaN if no whole period fits.
func (r *Result) Utilisation(l tierlimit.Limit, from, to int64) float64 {
	keys := int64(len(r.keys()))
	e := Envelope(l)
	period := int64(l.Period)
	var ideal float64
	if from <= r.Started {
		ideal = float64(envelope.Demandable(e, from, to))
	} else {
		perPeriod := float64(l.Rate)
		switch e.Kind {
		case envelope.TokenBucket, envelope.LeakyBucket:
		case envelope.SlidingLog:
			from = to - (to-from)/period*period
		default:
			from, to = (from+period-1)/period*period, to/period*period
			if e.Kind == envelope.SlidingWindow {
				perPeriod = max(perPeriod-1, perPeriod/2)
			}
		}
		ideal = perPeriod * float64(to-from) / float64(period)
	}
	return float64(r.AdmittedIn(from, to)) / (ideal * float64(keys))
}

// AdmittedIn is the tokens whose calls returned in [from, to).
func (r *Result) AdmittedIn(from, to int64) int64 {
	var n int64
	for _, a := range r.History {
		if a.Returned >= from && a.Returned < to {
			n += a.Cost
		}
	}
	return n
}

func (r *Result) keys() map[uint64]struct{} {
	keys := map[uint64]struct{}{}
	for _, a := range r.History {
		keys[a.Key] = struct{}{}
	}
	return keys
}

// Stalled says whether the machine, rather than the limiter, held the load up, and how.
func (r *Result) Stalled() (reason string, stalled bool) {
	if r.GeneratorLate > stall {
		return fmt.Sprintf("the generator was up to %v late", r.GeneratorLate), true
	}
	if r.EventsLate > 5*stall {
		return fmt.Sprintf("an event was %v late", r.EventsLate), true
	}
	if r.Dropped > 0 {
		return fmt.Sprintf("%d checks found a full queue", r.Dropped), true
	}
	return "", false
}

// stall is how late the generator may be before a run says little about throughput.
const stall = 40 * time.Millisecond

// String is one line for logs.
func (r *Result) String() string {
	return fmt.Sprintf("offered %d, admitted %d, denied %d in %v; local %.1f%%, fallback %d, errors %d; %.0f exchanges/s, p50 %v p99 %v; late p99 %v, generator %v",
		r.Offered, r.Admitted, r.Denied, r.Elapsed().Round(time.Millisecond), r.LocalPercent(), r.Fallback(), r.Errors,
		r.ExchangesPerSecond(), r.Latency.Percentile(50), r.Latency.Percentile(99), r.Late.Percentile(99), r.GeneratorLate.Round(100*time.Microsecond))
}
