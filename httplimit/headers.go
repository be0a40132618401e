package httplimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"math/bits"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierlimit/tierlimit"
)

// As net/http keeps header names.
const (
	policyField    = "Ratelimit-Policy"
	rateLimitField = "Ratelimit"
)

// maxInteger is the greatest integer that a structured field can hold (RFC 9651, 3.3.1).
const maxInteger = 999_999_999_999_999

// headers writes what a response says of a limiter.
type headers struct {
	limiter *tierlimit.Limiter
	name    string // as a structured-field string
	params  string // of the policy, after q and w
	legacy  bool
	hidden  bool
	pk      *partitionKeys // nil without

	policy atomic.Pointer[policy]
}

// policy is the value of RateLimit-Policy for one limit, without pk.
type policy struct {
	limit tierlimit.Limit
	value string
}

func newHeaders(l *tierlimit.Limiter, c *config) *headers {
	h := &headers{limiter: l, name: string(appendString(nil, l.Name())), legacy: c.legacy, hidden: c.noHeaders}
	if c.unit != "" {
		h.params = ";qu=" + string(appendString(nil, c.unit))
	}
	if c.keyed {
		h.pk = newPartitionKeys(l.Name(), c.secret)
	}
	return h
}

// set writes the headers for a response to key. seconds is what Retry-After says, 0 if it is not sent.
// Fields of a limiter further out stay: both are lists.
func (h *headers) set(to http.Header, key string, r *tierlimit.Result, seconds int64) {
	if h.hidden && !h.legacy {
		return
	}
	limit := h.limiter.LimitFor(key)
	if limit == tierlimit.Unlimited() {
		return
	}
	if !h.hidden {
		var scratch [160]byte
		value := append(scratch[:0], h.name...)
		value = append(value, ";r="...)
		value = strconv.AppendInt(value, min(r.Remaining, maxInteger), 10)
		if t, known := told(noMoreUntil(limit, r), seconds); known {
			value = append(value, ";t="...)
			value = strconv.AppendInt(value, t, 10)
		}
		of := h.policyOf(limit)
		if h.pk != nil {
			var more [192]byte
			from := len(value)
			value = h.pk.append(value, key)
			of = string(append(append(more[:0], of...), value[from:]...))
		}
		add(to, of, string(value))
	}
	if h.legacy {
		to.Set("X-Ratelimit-Limit", strconv.FormatInt(r.Limit, 10))
		to.Set("X-Ratelimit-Remaining", strconv.FormatInt(r.Remaining, 10))
		if full, known := told(r.ResetAfter, seconds); known {
			at := time.Now().Add(time.Duration(min(full, int64(10*365*24*time.Hour/time.Second))) * time.Second)
			to.Set("X-Ratelimit-Reset", strconv.FormatInt(at.Unix(), 10))
		}
	}
}

// noMoreUntil is the time within which no more than r.Remaining can be used: until the next token of a bucket, and until a window is over.
func noMoreUntil(l tierlimit.Limit, r *tierlimit.Result) time.Duration {
	if isBucket(l) && l.Rate > 0 {
		return min(r.ResetAfter, l.Period/time.Duration(l.Rate)+1) // which the division rounds down
	}
	return r.ResetAfter
}

// told is a time in seconds, rounded up; of a denial with a Retry-After what that says.
func told(after time.Duration, retry int64) (seconds int64, ok bool) {
	if retry != 0 {
		return retry, true
	}
	if after > time.Second && after != tierlimit.Never {
		after -= time.Millisecond // a log forgets a microsecond after its window, which is not to count as a second
	}
	return ceilSeconds(after)
}

func isBucket(l tierlimit.Limit) bool {
	return l.Algorithm == tierlimit.AlgorithmTokenBucket || l.Algorithm == tierlimit.AlgorithmLeakyBucket
}

// add adds a line to each of the two fields, whose names are in canonical form.
func add(to http.Header, of, state string) {
	if to[policyField] == nil && to[rateLimitField] == nil {
		both := [...]string{of, state} // one allocation for two slices, each full so that nothing is appended into the other
		to[policyField], to[rateLimitField] = both[0:1:1], both[1:2:2]
		return
	}
	to[policyField] = append(to[policyField], of)
	to[rateLimitField] = append(to[rateLimitField], state)
}

// policyOf is the policy of a limit, which is worked out anew when the limit has changed. Burst is the capacity of windows too.
func (h *headers) policyOf(limit tierlimit.Limit) string {
	if p := h.policy.Load(); p != nil && p.limit == limit {
		return p.value
	}
	value := append([]byte(h.name), ";q="...)
	value = strconv.AppendInt(value, min(limit.Burst, maxInteger), 10)
	if w, ok := window(limit); ok {
		value = append(value, ";w="...)
		value = strconv.AppendInt(value, w, 10)
	}
	p := &policy{limit: limit, value: string(value) + h.params}
	h.policy.Store(p)
	return p.value
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

// ceilSeconds rounds up; ok is false for Never.
func ceilSeconds(d time.Duration) (seconds int64, ok bool) {
	if d == tierlimit.Never {
		return 0, false
	}
	seconds = int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return max(0, seconds), true
}

// retryAfter is what Retry-After says: whole seconds, rounded up, at least 1; 0 for Never, when it is not sent.
func retryAfter(d time.Duration) int64 {
	s, ok := ceilSeconds(d)
	if !ok {
		return 0
	}
	return max(1, s)
}

// appendString adds s, printable ASCII, as a structured-field string (RFC 9651, 4.1.6).
func appendString(to []byte, s string) []byte {
	to = append(to, '"')
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			to = append(to, '\\')
		}
		to = append(to, s[i])
	}
	return append(to, '"')
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// partitionKeys names keys without telling them.
type partitionKeys struct {
	name   string
	hashes sync.Pool // of *keyedHash
}

type keyedHash struct {
	hash hash.Hash
	text []byte
	sum  [sha256.Size]byte
}

func newPartitionKeys(name string, secret []byte) *partitionKeys {
	p := &partitionKeys{name: name}
	p.hashes.New = func() any { return &keyedHash{hash: hmac.New(sha256.New, secret)} }
	return p
}

func (p *partitionKeys) append(to []byte, key string) []byte {
	h := p.hashes.Get().(*keyedHash)
	defer p.hashes.Put(h)
	h.hash.Reset()
	h.text = append(appendPart(h.text[:0], p.name), key...)
	h.hash.Write(h.text)
	if cap(h.text) > 4096 { // one key of a megabyte is not to stay
		h.text = nil
	}
	sum := h.hash.Sum(h.sum[:0])
	to = append(to, ";pk=:"...)
	to = base64.StdEncoding.AppendEncode(to, sum[:16])
	return append(to, ':')
}
