package grpclimit

import (
	"context"
	"math/bits"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/tierlimit/tierlimit"
)

// The fields of draft-ietf-httpapi-ratelimit-headers, with the values that httplimit sends.
const (
	policyField    = "ratelimit-policy"
	rateLimitField = "ratelimit"
)

// maxInteger is the greatest integer that a structured field can hold (RFC 9651, 3.3.1).
const maxInteger = 999_999_999_999_999

// setHeaders tells how the caller stands. Fields of an Interceptor further out stay: both are lists.
func (r *rule) setHeaders(ctx context.Context, key string, res *tierlimit.Result) {
	limit := r.limiter.LimitFor(key)
	if limit == tierlimit.Unlimited() {
		return
	}
	value := append([]byte(r.name), ";r="...)
	value = strconv.AppendInt(value, min(res.Remaining, maxInteger), 10)
	if t, known := noMoreUntil(limit, res); known {
		value = append(value, ";t="...)
		value = strconv.AppendInt(value, t, 10)
	}
	// It fails where the header is out already, or there is no server around: the call goes on without.
	_ = grpc.SetHeader(ctx, metadata.MD{policyField: {policyOf(r.name, limit)}, rateLimitField: {string(value)}})
}

// policyOf is the policy of a limit. Burst is the capacity of windows too.
func policyOf(name string, limit tierlimit.Limit) string {
	value := append([]byte(name), ";q="...)
	value = strconv.AppendInt(value, min(limit.Burst, maxInteger), 10)
	if w, ok := window(limit); ok {
		value = append(value, ";w="...)
		value = strconv.AppendInt(value, w, 10)
	}
	return string(value)
}

// window is the time in which the capacity is given out once, in seconds: the window, or the time in which a bucket fills, so that q/w is
// the rate. ok is false if it is not a whole number of them: there is no other way to say it.
func window(l tierlimit.Limit) (seconds int64, ok bool) {
	ns := uint64(l.Period)
	if isBucket(l) {
		hi, lo := bits.Mul64(uint64(l.Burst), ns)
		if hi >= uint64(l.Rate) { // more than fits, or a rate of 0
			return 0, false
		}
		var rest uint64
		if ns, rest = bits.Div64(hi, lo, uint64(l.Rate)); rest != 0 {
			return 0, false
		}
	}
	s := ns / uint64(time.Second)
	return int64(s), s >= 1 && ns%uint64(time.Second) == 0
}

// noMoreUntil is the time within which no more than r.Remaining can be used, in seconds, rounded up: until the next token of a bucket, and
// until a window is over; in a denial the time to wait, at least 1. known is false for Never.
func noMoreUntil(l tierlimit.Limit, r *tierlimit.Result) (seconds int64, known bool) {
	if !r.Allowed && r.RetryAfter != tierlimit.Never {
		return max(1, roundUp(r.RetryAfter, time.Second)), true
	}
	after := r.ResetAfter
	if isBucket(l) && l.Rate > 0 {
		after = min(after, l.Period/time.Duration(l.Rate)+1) // which the division rounds down
	}
	if after == tierlimit.Never {
		return 0, false
	}
	if after > time.Second {
		after -= time.Millisecond // a log forgets a microsecond after its window, which is not to count as a second
	}
	return max(0, roundUp(after, time.Second)), true
}

func isBucket(l tierlimit.Limit) bool {
	return l.Algorithm == tierlimit.AlgorithmTokenBucket || l.Algorithm == tierlimit.AlgorithmLeakyBucket
}

// roundUp is d in units; d is above 0 or 0.
func roundUp(d, unit time.Duration) int64 {
	n := int64(d / unit)
	if d%unit > 0 {
		n++
	}
	return n
}
