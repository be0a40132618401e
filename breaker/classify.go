package breaker

import (
	"context"
	"errors"
	"slices"
	"strings"
)

// Class says what an error of a call to Redis means for the breaker. No class means that a request is allowed.
type Class uint8

// The classes of outcomes.
const (
	OK      Class = iota + 1 // no error
	Failure                  // Redis, or the way to it, cannot serve now
	Ignored                  // says nothing about Redis: the caller gave up
	Ours                     // Redis is well and refused what it was sent: a script, protocol or routing fault
)

// String returns the class in words.
func (c Class) String() string {
	switch c {
	case OK:
		return "ok"
	case Failure:
		return "failure"
	case Ignored:
		return "ignored"
	case Ours:
		return "ours"
	}
	return "unknown"
}

// failing are the codes with which a server says that it cannot serve, as a whole and for now.
var failing = map[string]bool{
	"READONLY": true, "LOADING": true, "MASTERDOWN": true, "CLUSTERDOWN": true, "TRYAGAIN": true, "OOM": true, "BUSY": true,
	"NOREPLICAS": true, "MISCONF": true, "UNBLOCKED": true, "UNKILLABLE": true, "NOMASTERLINK": true,
	"NOAUTH": true, "WRONGPASS": true, "NOPERM": true, "DENIED": true, "NOPROTO": true,
}

// refusing are the codes of answers that are no failure of the server, for errors that are known by their text only.
var refusing = map[string]bool{
	"ERR": true, "WRONGTYPE": true, "MOVED": true, "ASK": true, "CROSSSLOT": true, "NOSCRIPT": true, "EXECABORT": true, "NOTBUSY": true,
}

// failingErr are the beginnings of the same without a code of their own.
var failingErr = []string{
	"ERR max number of clients reached",
	"ERR unknown command", // a server or proxy that runs no scripts
	"ERR invalid password",
	"ERR Client sent AUTH",
	"ERR AUTH ",
}

// Classify tells what err, as returned by a call to Redis, means:
// nil is OK; a cancelled context is Ignored, and so is ErrOpen; an answer that says the server cannot serve (READONLY, LOADING, ...)
// is a Failure; any other answer (WRONGTYPE, MOVED, NOSCRIPT, an error of the script) and whatever has a method Ours that
// returns true is Ours; the rest (time-outs, refused and broken connections, a pool without a free one, a closed client) is a
// Failure.
//
// An answer of the server is told from the client's own errors by its method RedisError, or by a known code at its beginning.
func Classify(err error) Class {
	if err == nil {
		return OK
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, ErrOpen) {
		return Ignored
	}
	if e, ok := errors.AsType[interface {
		error
		Ours() bool
	}](err); ok && e.Ours() {
		return Ours
	}
	msg := err.Error()
	answer, isAnswer := errors.AsType[interface {
		error
		RedisError()
	}](err)
	if isAnswer {
		msg = answer.Error()
	}
	code := codeOf(msg)
	switch {
	case failing[code]:
		return Failure
	case code == "ERR" && slices.ContainsFunc(failingErr, func(beginning string) bool { return strings.HasPrefix(msg, beginning) }):
		return Failure
	case isAnswer || refusing[code]:
		return Ours
	}
	return Failure
}

// codeOf returns the first word of a server's error. Before version 7 Redis wraps the error of a command that a script ran:
// "ERR Error running script (call to f_...): @user_script:1: @user_script: 1: -OOM command not allowed ...". The inner code counts.
func codeOf(msg string) string {
	if rest, ok := strings.CutPrefix(msg, "ERR Error running script"); ok {
		if _, inner, ok := strings.Cut(rest, ": -"); ok {
			msg = inner
		}
	}
	code, _, _ := strings.Cut(msg, " ")
	return code
}
