package breaker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
)

// answer is an error as go-redis types what a server answers.
type answer string

func (a answer) Error() string { return string(a) }
func (answer) RedisError()     {}

type oursError bool

func (oursError) Error() string { return "tierlimit: reply: wrong length" }
func (o oursError) Ours() bool  { return bool(o) }

// Every answer that a sick, moved or foreign server gives is classified; none means "allow".
func TestClassify(t *testing.T) {
	for msg, want := range map[string]Class{
		"READONLY You can't write against a read only replica.":                                                                             Failure,
		"LOADING Redis is loading the dataset in memory":                                                                                    Failure,
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.":                                                  Failure,
		"CLUSTERDOWN The cluster is down":                                                                                                   Failure,
		"CLUSTERDOWN Hash slot not served":                                                                                                  Failure,
		"TRYAGAIN Multiple keys request during rehashing of slot":                                                                           Failure,
		"OOM command not allowed when used memory > 'maxmemory'.":                                                                           Failure,
		"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN.":                                                   Failure,
		"NOAUTH Authentication required.":                                                                                                   Failure,
		"WRONGPASS invalid username-password pair or user is disabled.":                                                                     Failure,
		"NOPERM this user has no permissions to run the 'evalsha' command":                                                                  Failure,
		"NOREPLICAS Not enough good replicas to write.":                                                                                     Failure,
		"MISCONF Redis is configured to save RDB snapshots, but it's currently unable to":                                                   Failure,
		"DENIED Redis is running in protected mode because protected mode is enabled":                                                       Failure,
		"ERR max number of clients reached":                                                                                                 Failure,
		"ERR unknown command 'evalsha', with args beginning with: ":                                                                         Failure,
		"ERR AUTH <password> called without any password configured for the default user":                                                   Failure,
		"ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica.":   Failure,
		"ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -OOM command not allowed when used memory > 'maxmemory'.": Failure,
		"ERR Error running script (call to f_0): @user_script:1: user_script:1: Script attempted to access nonexistent global variable":     Ours,
		"WRONGTYPE Operation against a key holding the wrong kind of value":                                                                 Ours,
		"MOVED 3999 127.0.0.1:6381":                                                                                                         Ours,
		"ASK 3999 127.0.0.1:6381":                                                                                                           Ours,
		"CROSSSLOT Keys in request don't hash to the same slot":                                                                             Ours,
		"NOSCRIPT No matching script. Please use EVAL.":                                                                                     Ours,
		"ERR tierlimit: wrong number of arguments":                                                                                          Ours,
		"ERR value is not an integer or out of range":                                                                                       Ours,
	} {
		for _, err := range []error{answer(msg), errors.New(msg), fmt.Errorf("hook: %w", answer(msg))} {
			if got := Classify(err); got != want {
				t.Errorf("%T %q: %v, want %v", err, msg, got, want)
			}
		}
	}
	for _, c := range []struct {
		err  error
		want Class
	}{
		{nil, OK},
		{context.Canceled, Ignored},
		{fmt.Errorf("call: %w", context.Canceled), Ignored},
		{ErrOpen, Ignored},
		{context.DeadlineExceeded, Failure},
		{fmt.Errorf("abandoned: %w", context.DeadlineExceeded), Failure},
		{os.ErrDeadlineExceeded, Failure},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, Failure},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, Failure},
		{&net.DNSError{Err: "no such host", IsNotFound: true}, Failure},
		{io.EOF, Failure},
		{io.ErrUnexpectedEOF, Failure},
		{net.ErrClosed, Failure},
		{errors.New("redis: connection pool timeout"), Failure},
		{errors.New("redis: connection pool exhausted"), Failure},
		{errors.New("redis: client is closed"), Failure},
		{errors.New("redis: all ring shards are down"), Failure},
		{errors.New("TLS handshake failed"), Failure},
		{errors.New(""), Failure},
		{answer(""), Ours},
		{answer("redis: nil"), Ours},
		{answer("SOMETHING new"), Ours},
		{oursError(true), Ours},
		{fmt.Errorf("wrapped: %w", oursError(true)), Ours},
		{oursError(false), Failure},
		{errors.Join(errors.New("x"), context.Canceled), Ignored},
	} {
		if got := Classify(c.err); got != c.want {
			t.Errorf("%T %v: %v, want %v", c.err, c.err, got, c.want)
		}
	}
}
