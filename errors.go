package tierlimit

import "errors"

// The errors that callers tell apart with errors.Is. A denial is never one of them: it is a Result with Allowed false.
// Neither is a Redis that does not answer: it is a Result with Source Fallback.
var (
	// ErrConfig is wrapped by every fault of an option, a limiter name or a combination of them.
	ErrConfig = errors.New("tierlimit: invalid configuration")

	// ErrLimit is wrapped by every fault of a Limit, be it built in code or parsed from text.
	ErrLimit = errors.New("tierlimit: invalid limit")

	// ErrCost says that a cost was negative.
	ErrCost = errors.New("tierlimit: invalid cost")

	// ErrNever is returned by the waiting verbs when the cost can never pass: it is above the capacity, or the limit is 0.
	ErrNever = errors.New("tierlimit: the cost can never pass")

	// ErrClosed is returned by every verb once Close has begun.
	ErrClosed = errors.New("tierlimit: closed")
)
