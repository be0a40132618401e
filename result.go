package tierlimit

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

// Never as a Result.RetryAfter says that waiting is of no use: the cost is above the capacity, or the limit is 0.
const Never time.Duration = math.MaxInt64

// Source says who decided a check.
type Source uint8

// The sources of a decision. Zero is none of them.
const (
	// Local means that this process decided from a lease that Redis had granted it before, or from a denial it was told to keep.
	Local Source = iota + 1
	// Remote means that Redis decided this check.
	Remote
	// Fallback means that Redis was out of reach, and the FallbackPolicy decided.
	Fallback
)

// String is the source's name in lower case, as it appears in logs and metric labels.
func (s Source) String() string {
	switch s {
	case Local:
		return "local"
	case Remote:
		return "remote"
	case Fallback:
		return "fallback"
	}
	return "Source(" + strconv.Itoa(int(s)) + ")"
}

// Result is the answer to one check. Tokens are whole numbers, 0 and up.
type Result struct {
	// Allowed says whether the cost was charged and the caller may go on.
	Allowed bool

	// Limit is the capacity of the key: the burst of a bucket, the limit of a window.
	Limit int64

	// Remaining is what this instance knows to be left, from 0 to Limit: its lease in hand and what Redis last
	// reported. Other instances spend from the same key, so it is a hint and not a promise.
	Remaining int64

	// Debt is the number of tokens owed for costs that turned out higher than reserved, to be paid before anything
	// is admitted; always 0 so far, since nothing reserves yet.
	Debt int64

	// RetryAfter is 0 when the check was allowed. Otherwise, waiting exactly this long is enough if nobody else
	// spends meanwhile; it is Never when the cost can never pass. With Source Fallback, and while Redis keeps the shares of
	// missing instances aside, it is a time to ask again: nothing is promised for then. Nor is it for a cost in a sliding window or log that is
	// larger than the one whose denial answers it.
	RetryAfter time.Duration

	// ResetAfter is the time until the key is full again if nothing more is spent.
	ResetAfter time.Duration

	// Delay is for the leaky bucket only: hold the request this long for an even flow. Wait does so by itself.
	Delay time.Duration

	// Source says who decided.
	Source Source

	// Shadowed says that the check would have been denied, and that WithShadow let it pass; RetryAfter is 0 then. ResetAfter and Remaining are
	// those of the denial.
	Shadowed bool
}

// String is one line for logs and examples, without the key: "allowed 9/10 (local)", "denied 0/10, retry after 6s (remote)".
func (r Result) String() string {
	verb := "denied"
	switch {
	case r.Shadowed:
		verb = "shadowed"
	case r.Allowed:
		verb = "allowed"
	}
	s := fmt.Sprintf("%s %d/%d", verb, r.Remaining, r.Limit)
	if r.Debt > 0 {
		s += fmt.Sprintf(", debt %d", r.Debt)
	}
	if r.RetryAfter == Never {
		s += ", never"
	} else if r.RetryAfter > 0 {
		s += ", retry after " + r.RetryAfter.String()
	}
	if r.Delay > 0 {
		s += ", delay " + r.Delay.String()
	}
	return s + " (" + r.Source.String() + ")"
}

// Check is one of several limits that a request has to pass together: see Hybrid.AllowAll.
type Check struct {
	Limiter *Limiter // of the Hybrid that is asked; another's is ErrConfig
	Key     string   // any bytes, any length
	N       int64    // cost in tokens, 0 and up; 0 only looks
}

// Verdict is the answer to several checks taken as one, all of them charged or none.
type Verdict struct {
	Allowed    bool
	Denied     int           // index of the first check that denied, -1 when all passed
	RetryAfter time.Duration // the longest of those that denied
	Results    []Result      // one for each check, in the order they were given; where another denied, Allowed says that this one did not
}
