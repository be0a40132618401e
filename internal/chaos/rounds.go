package chaos

import (
	"cmp"
	"slices"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// A ledger is the history of one limit, judged round by round: what one round leaves to be known for judging the next is kept, the
// rest is forgotten. Over all rounds nothing is overlooked that a check of the whole history would find, but for the fraction of a token a
// round by which a bucket's past is rounded down.
type ledger struct {
	limit tierlimit.Limit
	kept  []envelope.Admission
}

// overlap is how much of a round is judged with the next one again: calls that had not returned when the round ended were called in it.
const overlap = 300 * time.Millisecond

// add takes what returned since the last round, and gives the history to judge: each key's apart.
func (l *ledger) add(history []envelope.Admission) map[uint64][]envelope.Admission {
	byKey := map[uint64][]envelope.Admission{}
	for _, a := range slices.Concat(l.kept, history) {
		byKey[a.Key] = append(byKey[a.Key], a)
	}
	return byKey
}

// close ends the round at now. It returns the instant from which on the history is kept.
func (l *ledger) close(byKey map[uint64][]envelope.Admission, now int64) int64 {
	l.kept = nil
	from := now - int64(overlap)
	for key, history := range byKey {
		at := quietAt(history, now-int64(overlap))
		from = min(from, at)
		if isBucket(l.limit) {
			if n := filled(l.limit, history, at); n > 0 {
				l.kept = append(l.kept, envelope.Admission{Called: at, Returned: at, Cost: n, Key: key})
			}
		} else { // a window, and the one before it
			at -= 2 * int64(l.limit.Period)
			from = min(from, at)
		}
		for _, a := range history {
			if a.Returned > at {
				l.kept = append(l.kept, a)
			}
		}
	}
	return from
}

// quietAt is the latest instant up to at that is within no call.
func quietAt(history []envelope.Admission, at int64) int64 {
	for again := true; again; {
		again = false
		for _, a := range history {
			if a.Called < at && a.Returned > at {
				at, again = a.Called, true
			}
		}
	}
	return at
}

// filled is what is in a bucket's meter at an instant within no call, by what was admitted until then: in one cost, all of the past that
// matters to what comes. What was beyond the burst has been judged.
func filled(l tierlimit.Limit, history []envelope.Admission, at int64) int64 {
	past := slices.DeleteFunc(slices.Clone(history), func(a envelope.Admission) bool { return a.Returned > at })
	slices.SortFunc(past, func(a, b envelope.Admission) int { return cmp.Compare(a.Called, b.Called) })
	var tokens float64
	var last int64
	for _, a := range past {
		tokens = max(0, tokens-perNS(l)*float64(a.Called-last)) + float64(a.Cost)
		last = a.Called
	}
	return min(l.Burst, int64(max(0, tokens-perNS(l)*float64(at-last))))
}

func isBucket(l tierlimit.Limit) bool {
	return l.Algorithm == tierlimit.AlgorithmTokenBucket || l.Algorithm == tierlimit.AlgorithmLeakyBucket
}

func perNS(l tierlimit.Limit) float64 { return float64(l.Rate) / float64(l.Period) }

// worst is the greatest overshoot of one key in a round, or beyond what a loss of memory allows if there is one.
type worst struct{ overshoot, allowed int64 }

func (w worst) beyond() int64 { return w.overshoot - w.allowed }

// judge judges a round. allowed says what may be beyond the limit, of a history of one key.
func (l *ledger) judge(byKey map[uint64][]envelope.Admission, allowed func(*fleet.Result) int64) (w worst) {
	for _, history := range byKey {
		over := envelope.Check(fleet.Envelope(l.limit), history).Overshoot
		if over == 0 {
			continue
		}
		v := worst{over, allowed(&fleet.Result{History: history})}
		if w.overshoot == 0 || v.beyond() > w.beyond() || v.beyond() == w.beyond() && v.overshoot > w.overshoot {
			w = v
		}
	}
	return w
}
