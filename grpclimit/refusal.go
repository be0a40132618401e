package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/tierlimit/tierlimit"
)

// ErrDenied is wrapped by the error of a call that an Interceptor in this process denied. It tells a client's own limit from that
// of the server, whose denials arrive with the same code. It does not cross the wire.
var ErrDenied = errors.New("grpclimit: denied")

// A refusal is a status with what it stands for, so that errors.Is finds that in this process.
type refusal struct {
	status     *status.Status
	cause      error
	retryAfter time.Duration // of a denial; Never where another try is of no use
}

// Error is the text of the status.
func (r *refusal) Error() string { return r.status.Err().Error() }

// GRPCStatus is what gRPC sends.
func (r *refusal) GRPCStatus() *status.Status { return r.status }

func (r *refusal) Unwrap() error { return r.cause }

// A rule is a Limiter with the texts of its denials. They name the limiter, which its operator chose, and nothing of the call.
type rule struct {
	limiter        *tierlimit.Limiter
	name           string // of the limiter, as a structured-field string
	over, keyless  string
	quota, unnamed *errdetails.QuotaFailure
}

func newRule(l *tierlimit.Limiter) *rule {
	r := &rule{
		limiter: l,
		name:    `"` + l.Name() + `"`, // of which no character is to be escaped
		over:    fmt.Sprintf("rate limit %q exceeded", l.Name()),
		keyless: fmt.Sprintf("rate limit %q: the call has no key to be counted by", l.Name()),
	}
	r.quota, r.unnamed = quotaFailure(l, r.over), quotaFailure(l, r.keyless)
	return r
}

func quotaFailure(l *tierlimit.Limiter, description string) *errdetails.QuotaFailure {
	return &errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{
		Subject:     "limiter:" + l.Name(),
		Description: description,
	}}}
}

func (r *rule) denied(retryAfter time.Duration) *refusal {
	if retryAfter == tierlimit.Never {
		return newDenial(r.over, retryAfter, r.quota)
	}
	return newDenial(r.over, retryAfter, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)}, r.quota)
}

func (r *rule) withoutKey() *refusal { return newDenial(r.keyless, tierlimit.Never, r.unnamed) }

func newDenial(text string, retryAfter time.Duration, details ...protoadapt.MessageV1) *refusal {
	st := status.New(codes.ResourceExhausted, text)
	if with, err := st.WithDetails(details...); err == nil { // it fails for the code OK only
		st = with
	}
	return &refusal{status: st, cause: ErrDenied, retryAfter: retryAfter}
}

// failure makes a status of a Limiter's error. Its text is ours: an error's own may grow to tell more than a caller should know.
func failure(err error) *refusal {
	code, text := codes.Internal, "rate limit: the call could not be counted"
	switch {
	case errors.Is(err, tierlimit.ErrClosed):
		code, text = codes.Unavailable, "rate limit: closed"
	case errors.Is(err, context.DeadlineExceeded):
		code, text = codes.DeadlineExceeded, "rate limit: the wait is longer than the call's deadline allows"
	case errors.Is(err, context.Canceled):
		code, text = codes.Canceled, "rate limit: the call was cancelled while it waited"
	case errors.Is(err, tierlimit.ErrCost):
		text = "rate limit: the cost of the call is negative"
	}
	return &refusal{status: status.New(code, text), cause: err}
}
