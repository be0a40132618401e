package remote

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// ErrBusyClient is returned at once, nothing sent, while as many calls as may linger were abandoned and have not come back:
// the server, or the way to it, swallows what it is sent.
var ErrBusyClient = errors.New("tierlimit: too many calls to Redis are waiting for an answer that nobody waits for")

// A ProtocolError is an answer that is not one of ours, or a call that cannot be made. Nothing of such an answer is used.
type ProtocolError struct {
	Reason string
	unsent bool
}

func (e *ProtocolError) Error() string { return "tierlimit: " + e.Reason }

// Ours tells package breaker that this is not the server's failure.
func (e *ProtocolError) Ours() bool { return true }

func malformed(reason string) error { return &ProtocolError{Reason: "reply: " + reason} }
func unsendable(reason string) error {
	return &ProtocolError{Reason: "call: " + reason, unsent: true}
}

// unsentError wraps the reason for which a call was given up before anything was sent.
type unsentError struct{ cause error }

func (e *unsentError) Error() string { return "tierlimit: call not sent: " + e.cause.Error() }
func (e *unsentError) Unwrap() error { return e.cause }

// abandonedError wraps the context's error for a call whose answer was no longer waited for.
type abandonedError struct{ cause error }

func (e *abandonedError) Error() string { return "tierlimit: no answer from Redis: " + e.cause.Error() }
func (e *abandonedError) Unwrap() error { return e.cause }

// NotExecuted reports whether err proves that the call did not run and never will: it was not sent, its connection was refused, or the
// server refused it before the script could write. With every other error the outcome is unknown: the script may have run, or
// may still run once the server comes back. A nil error proves nothing of the kind; Reply.Late does.
func NotExecuted(err error) bool {
	if err == nil {
		return false
	}
	// Abandoned while the client may still be dialling or sending: whatever else it wraps, the call may run later.
	if _, ok := errors.AsType[*abandonedError](err); ok {
		return false
	}
	if _, ok := errors.AsType[*unsentError](err); ok {
		return true
	}
	if e, ok := errors.AsType[*ProtocolError](err); ok {
		return e.unsent
	}
	for _, never := range []error{ErrBusyClient, redis.ErrPoolTimeout, redis.ErrPoolExhausted, redis.ErrClosed} {
		if errors.Is(err, never) {
			return true
		}
	}
	if e, ok := errors.AsType[redis.Error](err); ok {
		return refused(e.Error())
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "dial" {
		return true
	}
	return false
}

// refusals are the error codes with which a server answers instead of running a script, or refuses its every write. OOM is not among
// them: it refuses some writes and lets others pass, so a script may have got half way.
var refusals = []string{
	"NOSCRIPT", "MOVED", "ASK", "CROSSSLOT", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "BUSY",
	"NOAUTH", "WRONGPASS", "NOPERM", "NOREPLICAS", "MISCONF", "DENIED", "NOPROTO",
}

func refused(msg string) bool {
	// Before version 7 Redis wraps what a command inside a script answers:
	// "ERR Error running script (call to f_...): @user_script:1: @user_script: 1: -READONLY You can't write ...".
	if rest, ok := strings.CutPrefix(msg, "ERR Error running script"); ok {
		for _, code := range []string{"READONLY", "NOREPLICAS", "MISCONF", "MASTERDOWN"} {
			if strings.Contains(rest, ": -"+code+" ") {
				return true
			}
		}
		return false
	}
	code, _, _ := strings.Cut(msg, " ")
	if slices.Contains(refusals, code) {
		return true
	}
	return msg == "ERR max number of clients reached" || strings.HasPrefix(msg, "ERR unknown command") ||
		strings.HasPrefix(msg, "ERR tierlimit")
}

func isNoScript(err error) bool  { return err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") }
func isCrossSlot(err error) bool { return err != nil && redis.HasErrorPrefix(err, "CROSSSLOT") }

// unsent marks err, which may be a context's, as met before anything was sent.
func unsent(err error) error {
	if err == nil {
		err = context.Canceled
	}
	return &unsentError{cause: err}
}
