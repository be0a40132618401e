package envelope

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"time"
)

// An Admission is one request that a limiter let pass, or one refund it took.
type Admission struct {
	Called   int64  // ns of the server's clock, taken just before the call
	Returned int64  // ns, taken just after it; if the clock was set back meanwhile and it is below Called, the two are exchanged
	Cost     int64  // tokens; negative for a refund
	Key      uint64 // what is limited; KeyID makes one of a string
	Instance int32  // who admitted it; not looked at by Check
}

// KeyID is a 64-bit hash of key, the same in every process (FNV-1a). Two keys with the same hash would be judged as one; for the
// thousands of keys of a test the odds are below 1e-10.
func KeyID(key string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // a hash never fails
	return h.Sum64()
}

// Now is the instant to record: ns since the Unix epoch by the machine's real-time clock, read afresh on every call. It is deliberately
// not a start instant plus monotonic time: that would drift from the clock that other processes and the server read.
func Now() int64 { return time.Now().UnixNano() }

// A Verdict is the worst moment of a history.
type Verdict struct {
	Overshoot int64  // tokens above the limit, 0 if the history is within it
	Key       uint64 // the key it happened to
	From, To  int64  // ns: the interval [From, To] that shows it, or the one nearest to the limit
	Admitted  int64  // tokens certainly admitted in it, net of refunds; sliding window: the estimate at To, rounded up
}

// String says what happened in one line, for test failures.
func (v Verdict) String() string {
	what := fmt.Sprintf("key %#x, %d admitted in %v [%d, %d]", v.Key, v.Admitted, time.Duration(v.To-v.From), v.From, v.To)
	if v.Overshoot > 0 {
		return fmt.Sprintf("overshoot %d: %s", v.Overshoot, what)
	}
	return "within the limit; nearest to it: " + what
}

// Check holds history against l, key by key, and returns the worst key's worst moment; what counts as overshoot is
// stated in the package comment. history is in any order and is not changed. Figures saturate at the int64 range.
//
// An invalid limit allows nothing: a test that forgot a field must fail, not pass.
//
// O(n log n) time, O(n) memory: for a million admissions of one key a few seconds and 320 bytes each.
func Check(l Limit, history []Admission) Verdict {
	if l.Validate() != nil {
		l = Limit{Kind: SlidingLog, Period: 1}
	}
	sorted := make([]Admission, 0, len(history))
	for _, a := range history {
		if a.Cost == 0 {
			continue
		}
		a.Called, a.Returned = min(a.Called, a.Returned), max(a.Called, a.Returned)
		if tick := int64(l.Tick); tick > 1 {
			a.Called = floorDiv(a.Called, tick) * tick
		}
		sorted = append(sorted, a)
	}
	slices.SortFunc(sorted, func(a, b Admission) int { return cmp.Compare(a.Key, b.Key) })

	worst, found := Verdict{Overshoot: math.MinInt64}, false
	var s sweep
	for len(sorted) > 0 {
		n := 1
		for n < len(sorted) && sorted[n].Key == sorted[0].Key {
			n++
		}
		if v, ok := s.judge(l, sorted[:n]); ok && (!found || v.Overshoot > worst.Overshoot) {
			worst, found = v, true
		}
		sorted = sorted[n:]
	}
	worst.Overshoot = max(0, worst.Overshoot)
	return worst
}

// Admitted is the tokens admitted in [from, to] to all keys, net of refunds: the sum of the costs of those that were called at
// from or later and had returned by to. With the [Demandable] of each key it makes a utilisation. O(n).
func Admitted(history []Admission, from, to int64) int64 {
	var sum wide
	for _, a := range history {
		if min(a.Called, a.Returned) >= from && max(a.Called, a.Returned) <= to {
			sum = sum.add(widen(a.Cost))
		}
	}
	return sum.clamp()
}
