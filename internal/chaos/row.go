package chaos

import (
	"encoding/json"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// A Row is what one run came to.
type Row struct {
	Backend, Topology, Fault, Algorithm string

	Limit     int64         // tokens per Period
	Period    time.Duration //
	Overshoot int64         // tokens admitted beyond the limit, by internal/envelope
	Allowed   int64         // what docs/guarantees.md allows of that

	// Parts of the limit that were admitted: before the fault, during it (once the silence was over, if the fault outlasted it), and
	// from when the fleet had to be back. 0 where no whole period fits.
	Before, During, After float64

	Keys int // that the load wants, with that limit each

	// Of the keys that the fault must not touch, from its begin on.
	SparedKeys      int           // how many of Keys these are
	Spared          float64       // part of their limit that was admitted
	SparedOvershoot int64         // tokens
	SparedFallback  int64         // checks that were decided without Redis
	SparedP999      time.Duration // of their checks
	SparedSeries    []int64       // as Series, which counts them too

	Notice     time.Duration // from the fault's begin until an instance knew; 0: nobody did
	Recovery   time.Duration // from the fault's end until all were online and 90 % of the limit was admitted; -1: not within the run
	P999       time.Duration // of checks of a warm key during the fault
	Slowest    time.Duration // the longest any check took
	Goroutines int64         // of the instances: more of them at the end than before the fault
	Peak       int64         // the same at its worst, during the fault
	HeapBytes  int64         // likewise; 0 if other fleets ran beside this one
	Errors     int64         // returned to callers
	Failures   int64         // calls of Redis that failed or were not answered

	Series             []int64       // admitted to Keys in each SeriesStep from the start of the load
	SeriesStep         time.Duration //
	FaultFrom, FaultTo time.Duration // from the start of the load

	Findings  []string // what is promised and was not so, as far as it was judged
	NotJudged string   // why the figures of time and utilisation say nothing: what the machine did
	Seed      uint64
	When      time.Time
	Loose     bool // the fault is one: no part of the limit is demanded, nor a return
}

const seriesStep = 100 * time.Millisecond

// series is what was admitted, step by step.
func series(r *fleet.Result) []int64 {
	out := make([]int64, (r.Ended-r.Started)/int64(seriesStep)+1)
	for _, a := range r.History {
		if i := (a.Returned - r.Started) / int64(seriesStep); i >= 0 && i < int64(len(out)) {
			out[i] += a.Cost
		}
	}
	return out
}

// only is the part of a result that concerns some keys.
func only(r *fleet.Result, keys []string) *fleet.Result {
	ids := make([]uint64, len(keys))
	for i, k := range keys {
		ids[i] = envelope.KeyID(k)
	}
	part := *r
	part.History = nil
	for _, a := range r.History {
		if slices.Contains(ids, a.Key) {
			part.History = append(part.History, a)
		}
	}
	return &part
}

var rowsFile sync.Mutex

// write appends the row to the file of TIERLIMIT_CHAOS_ROWS.
func (r *Row) write() error {
	path := os.Getenv("TIERLIMIT_CHAOS_ROWS")
	if path == "" {
		return nil
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	rowsFile.Lock()
	defer rowsFile.Unlock()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.Write(append(text, '\n')); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}
