package tierlimit

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tierlimit/tierlimit/tier"
)

// The range of a Limit. Within it every number that the two tiers handle stays exact, in Go as in Lua.
const (
	maxTokens     = 1_000_000_000_000_000     // of a rate and of a burst
	minPeriod     = time.Microsecond          // the grain of the server's clock
	maxPeriod     = 10 * 365 * 24 * time.Hour // ten years of 365 days
	maxSubWindows = 100                       // each sub-window is a count in the key's string, read and written by every exchange
)

// Algorithm is one of the five ways to count. Zero is none of them.
type Algorithm uint8

// The five algorithms. docs/algorithms.md shows what tells them apart.
const (
	// AlgorithmTokenBucket refills continuously and admits a burst at once.
	AlgorithmTokenBucket Algorithm = iota + 1
	// AlgorithmLeakyBucket is a meter for Allow and a queue with an even outflow for Wait.
	AlgorithmLeakyBucket
	// AlgorithmFixedWindow counts in windows aligned to the server's clock.
	AlgorithmFixedWindow
	// AlgorithmSlidingWindow weights a counter for each sub-window.
	AlgorithmSlidingWindow
	// AlgorithmSlidingLog counts exactly in every window, wherever it begins.
	AlgorithmSlidingLog
)

var algorithmNames = [...]string{
	AlgorithmTokenBucket:   "token-bucket",
	AlgorithmLeakyBucket:   "leaky-bucket",
	AlgorithmFixedWindow:   "fixed-window",
	AlgorithmSlidingWindow: "sliding-window",
	AlgorithmSlidingLog:    "sliding-log",
}

// String is the algorithm's name as ParseLimit reads it: token-bucket, leaky-bucket, fixed-window, sliding-window or sliding-log.
func (a Algorithm) String() string {
	if a.valid() {
		return algorithmNames[a]
	}
	return "Algorithm(" + strconv.Itoa(int(a)) + ")"
}

func (a Algorithm) valid() bool { return a >= AlgorithmTokenBucket && a <= AlgorithmSlidingLog }

func (a Algorithm) bucket() bool { return a == AlgorithmTokenBucket || a == AlgorithmLeakyBucket }

// Limit is a policy: so many tokens in so long a time, counted by one of five algorithms. It is a plain value,
// comparable with ==; build it with TokenBucket, LeakyBucket, FixedWindow, SlidingWindow, SlidingLog, Unlimited
// or ParseLimit. Nothing checks it until Validate, which every function that takes a Limit calls first.
//
// The zero Limit is invalid, so that a forgotten limit is an error and neither "deny all" nor "allow all".
type Limit struct {
	// Algorithm is how tokens are counted.
	Algorithm Algorithm
	// Rate is the number of tokens per Period, 0 to 1e15. A rate of 0 denies everything.
	Rate int64
	// Period is the length in which Rate tokens refill, or of the window: whole microseconds, from 1µs to ten years.
	Period time.Duration
	// Burst is the most tokens a bucket holds, 1 to 1e15; for windows, and for a rate of 0, it equals Rate.
	Burst int64
	// SubWindows is the number of parts of a sliding window, 1 to 100, and 0 for every other algorithm.
	SubWindows int
}

// TokenBucket admits rate tokens per period with continuous refill, and at once as many as it holds: rate, unless
// WithBurst says otherwise. A key starts full.
func TokenBucket(rate int64, period time.Duration) Limit {
	return Limit{Algorithm: AlgorithmTokenBucket, Rate: rate, Period: period, Burst: rate}
}

// LeakyBucket drains rate tokens per period and holds rate of them unless WithBurst says otherwise. It is a meter for
// Allow, and for Wait a queue that lets requests out at an even pace.
func LeakyBucket(rate int64, period time.Duration) Limit {
	return Limit{Algorithm: AlgorithmLeakyBucket, Rate: rate, Period: period, Burst: rate}
}

// FixedWindow admits limit tokens in each window. Windows are aligned to the Unix epoch by the Redis server's clock,
// so that one of 24h is a UTC day. Around a boundary up to twice the limit can pass within one window's length.
func FixedWindow(limit int64, window time.Duration) Limit {
	return Limit{Algorithm: AlgorithmFixedWindow, Rate: limit, Period: window, Burst: limit}
}

// SlidingWindow admits limit tokens by a weighted count over sub-windows that are aligned to the Redis server's clock:
// the full ones inside the window, and the oldest by its part that is still inside. WithSubWindows sets their number,
// which is 1 (the current and the previous window) by default; the more, the closer to SlidingLog.
func SlidingWindow(limit int64, window time.Duration) Limit {
	return Limit{Algorithm: AlgorithmSlidingWindow, Rate: limit, Period: window, Burst: limit, SubWindows: 1}
}

// SlidingLog admits at most limit tokens in every window, wherever it begins. Denied requests are not logged.
func SlidingLog(limit int64, window time.Duration) Limit {
	return Limit{Algorithm: AlgorithmSlidingLog, Rate: limit, Period: window, Burst: limit}
}

// Unlimited admits everything. It is the token bucket of the greatest rate and burst there are, 1e15 per microsecond,
// so l == Unlimited() tells it from others.
func Unlimited() Limit { return TokenBucket(maxTokens, minPeriod) }

// WithBurst is l with a bucket that holds n tokens. It is for buckets; Validate refuses it on windows, as it refuses
// a burst of 0 under a rate above 0.
func (l Limit) WithBurst(n int64) Limit {
	l.Burst = n
	return l
}

// WithSubWindows is l with k sub-windows, 1 to 100, whose length must be whole microseconds. It is for SlidingWindow only.
func (l Limit) WithSubWindows(k int) Limit {
	l.SubWindows = k
	return l
}

// Validate returns every fault of l, joined, each wrapping ErrLimit and saying what is wrong and why; nil if there is none.
func (l Limit) Validate() error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%w: "+format, append([]any{ErrLimit}, args...)...))
	}
	if l == (Limit{}) {
		fault("it is the zero Limit: build one with TokenBucket, FixedWindow and their kin, or Unlimited")
		return errors.Join(faults...)
	}
	if !l.Algorithm.valid() {
		fault("algorithm %d is unknown: there are %d (%v) to %d (%v)", l.Algorithm,
			AlgorithmTokenBucket, AlgorithmTokenBucket, AlgorithmSlidingLog, AlgorithmSlidingLog)
	}
	if l.Rate < 0 {
		fault("rate %d is negative: 0 denies everything, Unlimited() admits everything", l.Rate)
	} else if l.Rate > maxTokens {
		fault("rate %d is above %d, beyond which counting would not be exact", l.Rate, int64(maxTokens))
	}
	switch {
	case l.Period <= 0:
		fault("period %v is not positive", l.Period)
	case l.Period%time.Microsecond != 0:
		fault("period %v is not whole microseconds, the grain of the Redis clock", l.Period)
	case l.Period > maxPeriod:
		fault("period %v is longer than ten years", l.Period)
	}
	switch {
	case l.Burst < 0:
		fault("burst %d is negative", l.Burst)
	case l.Burst > maxTokens:
		fault("burst %d is above %d, beyond which counting would not be exact", l.Burst, int64(maxTokens))
	case l.Burst == l.Rate:
	case l.Rate == 0:
		fault("burst %d with rate 0: a rate of 0 denies everything, so there is nothing to burst", l.Burst)
	case l.Algorithm.valid() && !l.Algorithm.bucket():
		fault("burst %d on a %v: only buckets have a burst, a window admits its limit of %d", l.Burst, l.Algorithm, l.Rate)
	case l.Burst == 0:
		fault("burst 0 with rate %d would deny everything: say so with a rate of 0, or set a burst of 1 or more", l.Rate)
	}
	switch k := l.SubWindows; {
	case l.Algorithm != AlgorithmSlidingWindow:
		if k != 0 && l.Algorithm.valid() {
			fault("%d sub-windows on a %v: only a sliding-window has them", k, l.Algorithm)
		}
	case k < 1 || k > maxSubWindows:
		fault("%d sub-windows: a sliding-window has 1 to %d", k, maxSubWindows)
	case l.Period > 0 && l.Period%time.Microsecond == 0 && l.Period.Microseconds()%int64(k) != 0:
		fault("%d sub-windows do not divide the window of %v into whole microseconds", k, l.Period)
	}
	return errors.Join(faults...)
}

// tier is l in the words of the tiers. It is called on valid limits only.
func (l Limit) tier() tier.Limit {
	return tier.Limit{
		Algorithm:  tier.Algorithm(l.Algorithm),
		Rate:       l.Rate,
		Period:     l.Period,
		Burst:      l.Burst,
		SubWindows: l.SubWindows,
	}
}

// String is l as ParseLimit reads it, in its shortest form: "100/s burst 200", "5000/h sliding-log",
// "3/min sliding-window sub-windows 6", "unlimited". An invalid limit is shown in a form that ParseLimit refuses.
func (l Limit) String() string {
	if l == Unlimited() {
		return "unlimited"
	}
	if l.Validate() != nil {
		return fmt.Sprintf("invalid %v %d/%v burst %d sub-windows %d", l.Algorithm, l.Rate, l.Period, l.Burst, l.SubWindows)
	}
	b := strconv.AppendInt(nil, l.Rate, 10)
	b = append(b, '/')
	for _, u := range periodUnits {
		if l.Period%u.length == 0 {
			if n := l.Period / u.length; n != 1 {
				b = strconv.AppendInt(b, int64(n), 10)
			}
			b = append(b, u.names[0]...)
			break
		}
	}
	if l.Algorithm != AlgorithmTokenBucket {
		b = append(b, ' ')
		b = append(b, l.Algorithm.String()...)
	}
	if l.Burst != l.Rate {
		b = append(b, " burst "...)
		b = strconv.AppendInt(b, l.Burst, 10)
	}
	if l.SubWindows > 1 {
		b = append(b, " sub-windows "...)
		b = strconv.AppendInt(b, int64(l.SubWindows), 10)
	}
	return string(b)
}

// MarshalText is String, and the error of Validate on an invalid limit. It makes a Limit a string in JSON.
func (l Limit) MarshalText() ([]byte, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	return []byte(l.String()), nil
}

// UnmarshalText is ParseLimit; on an error l stays as it was. With flag.TextVar it makes a Limit a flag.
func (l *Limit) UnmarshalText(text []byte) error {
	parsed, err := ParseLimit(string(text))
	if err != nil {
		return err
	}
	*l = parsed
	return nil
}

// periodUnits are the units of a period, the longest first; String uses the first name of each.
var periodUnits = []struct {
	length time.Duration
	names  []string
}{
	{24 * time.Hour, []string{"d", "day", "days"}},
	{time.Hour, []string{"h", "hour", "hours"}},
	{time.Minute, []string{"min", "m", "minute", "minutes"}},
	{time.Second, []string{"s", "sec", "second", "seconds"}},
	{time.Millisecond, []string{"ms"}},
	{time.Microsecond, []string{"us", "µs", "μs"}},
	{time.Nanosecond, []string{"ns"}},
}

// ParseLimit reads a limit from text:
//
//	RATE/PERIOD [ALGORITHM] [burst N] [sub-windows K]
//	unlimited
//
// such as "100/s burst 200", "5000/1h sliding-log", "10/min fixed-window", "3/60s sliding-window sub-windows 6" or
// "7/1500ms leaky-bucket burst 3". ALGORITHM is token-bucket (the default), leaky-bucket, fixed-window,
// sliding-window or sliding-log. RATE and N are whole numbers that may be grouped by _ and end in k, M or G (1_000,
// 10k). PERIOD is a unit (us, ms, s, sec, second, m, min, minute, h, hour, d, day), a number and a unit, or several
// of these like "1h30m". What String returns parses to the same Limit.
//
// Errors wrap ErrLimit and say where in the text the fault is, counting bytes from 1.
func ParseLimit(s string) (Limit, error) {
	p := parser{text: s}
	l, err := p.limit()
	if err != nil {
		return Limit{}, err
	}
	if err := l.Validate(); err != nil {
		return Limit{}, err
	}
	return l, nil
}

// parser reads text from pos on.
type parser struct {
	text string
	pos  int
}

func (p *parser) fail(at int, format string, args ...any) error {
	return fmt.Errorf("%w: at %d: "+format, append([]any{ErrLimit, at + 1}, args...)...)
}

// shown is a piece of the text for an error, cut where it would fill a log line.
func shown(s string) string {
	const most = 32
	if s == "" {
		return "the end"
	}
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.Quote(s)
}

const spaces = " \t\r\n"

func (p *parser) space() {
	for p.pos < len(p.text) && strings.IndexByte(spaces, p.text[p.pos]) >= 0 {
		p.pos++
	}
}

// word is the text up to the next space, after skipping spaces, and where it begins.
func (p *parser) word() (string, int) {
	p.space()
	begin := p.pos
	for p.pos < len(p.text) && strings.IndexByte(spaces, p.text[p.pos]) < 0 {
		p.pos++
	}
	return p.text[begin:p.pos], begin
}

func (p *parser) limit() (Limit, error) {
	slash := strings.IndexByte(p.text, '/')
	if slash < 0 {
		word, at := p.word()
		if rest, next := p.word(); word == "unlimited" && rest != "" {
			return Limit{}, p.fail(next, "unlimited stands alone, but %s follows", shown(rest))
		}
		switch word {
		case "unlimited":
			return Unlimited(), nil
		case "":
			return Limit{}, p.fail(at, `it is empty: write "100/s", "5000/h sliding-log" or "unlimited"`)
		}
		return Limit{}, p.fail(at, `%s is not a limit: write "100/s", "5000/h sliding-log" or "unlimited"`, shown(word))
	}
	p.space()
	begin := p.pos
	rate, err := p.number(strings.TrimRight(p.text[begin:slash], spaces), begin, "the rate")
	if err != nil {
		return Limit{}, err
	}
	p.pos = slash + 1
	word, at := p.word()
	period, err := p.period(word, at)
	if err != nil {
		return Limit{}, err
	}
	l := TokenBucket(rate, period)
	var algorithm, burst, subWindows bool
	for {
		word, at := p.word()
		if word == "" {
			break
		}
		var again bool
		switch word {
		case "burst":
			again, burst = burst, true
			value, at := p.word()
			if l.Burst, err = p.number(value, at, "the burst"); err != nil {
				return Limit{}, err
			}
		case "sub-windows":
			again, subWindows = subWindows, true
			value, at := p.word()
			k, err := p.number(value, at, "the number of sub-windows")
			if err != nil {
				return Limit{}, err
			}
			// 0 is the mark of a limit without sub-windows, so it must be refused before it can pass for one.
			if k < 1 || k > maxSubWindows {
				return Limit{}, p.fail(at, "%d sub-windows: a sliding-window has 1 to %d", k, maxSubWindows)
			}
			l.SubWindows = int(k)
		default:
			again, algorithm = algorithm, true
			if l.Algorithm = algorithmOf(word); !l.Algorithm.valid() {
				return Limit{}, p.fail(at, "%s is neither an algorithm (%s) nor burst nor sub-windows",
					shown(word), strings.Join(algorithmNames[AlgorithmTokenBucket:], ", "))
			}
		}
		if again {
			return Limit{}, p.fail(at, "%s says again what was said before", shown(word))
		}
	}
	if l.Algorithm == AlgorithmSlidingWindow && !subWindows {
		l.SubWindows = 1
	}
	return l, nil
}

// algorithmOf is the algorithm of that name, or 0.
func algorithmOf(name string) Algorithm {
	for a := AlgorithmTokenBucket; a.valid(); a++ {
		if algorithmNames[a] == name {
			return a
		}
	}
	return 0
}

// number reads a whole number, grouped by single underscores, with an optional k, M or G.
func (p *parser) number(s string, at int, what string) (int64, error) {
	if s == "" {
		return 0, p.fail(at, "%s is missing", what)
	}
	if s[0] == '-' {
		return 0, p.fail(at, "%s %s is negative", what, shown(s))
	}
	factor := uint64(1)
	digits := s
	switch s[len(s)-1] {
	case 'k':
		factor = 1e3
	case 'M':
		factor = 1e6
	case 'G':
		factor = 1e9
	}
	if factor > 1 {
		digits = s[:len(s)-1]
	}
	n := uint64(0)
	for i := range len(digits) {
		c := digits[i]
		if c == '_' && i > 0 && i < len(digits)-1 && digits[i-1] != '_' {
			continue
		}
		if c < '0' || c > '9' {
			return 0, p.fail(at+i, "%s %s is not a whole number like 100, 1_000 or 10k", what, shown(s))
		}
		if n = n*10 + uint64(c-'0'); n > maxTokens {
			return 0, p.fail(at, "%s %s is above %d, beyond which counting would not be exact", what, shown(s), int64(maxTokens))
		}
	}
	if digits == "" {
		return 0, p.fail(at, "%s %s is not a whole number like 100, 1_000 or 10k", what, shown(s))
	}
	if n > maxTokens/factor {
		return 0, p.fail(at, "%s %s is above %d, beyond which counting would not be exact", what, shown(s), int64(maxTokens))
	}
	return int64(n * factor), nil
}

// period reads a unit, or one or more pairs of a decimal number and a unit, to the nanosecond and never rounded.
func (p *parser) period(s string, at int) (time.Duration, error) {
	if s == "" {
		return 0, p.fail(at, "the period is missing: write a unit like s, min, h or d, or 1500ms")
	}
	if s[0] == '-' {
		return 0, p.fail(at, "the period %s is negative", shown(s))
	}
	if unit := unitOf(s); unit != 0 {
		return unit, nil
	}
	var total uint64
	for i := 0; i < len(s); {
		begin := i
		whole, n := leadingDigits(s[i:])
		i += n
		var fraction string
		if i < len(s) && s[i] == '.' {
			f := i + 1
			_, n := leadingDigits(s[f:])
			fraction = strings.TrimRight(s[f:f+n], "0")
			if n == 0 || f-1 == begin {
				return 0, p.fail(at+begin, "the period %s has a point without digits on both sides", shown(s))
			}
			i = f + n
		} else if n == 0 {
			return 0, p.fail(at+begin, "the period %s is neither a unit (s, min, h, d, ms, us) nor a number and a unit", shown(s))
		}
		name := s[i:]
		if end := strings.IndexAny(name, "0123456789."); end >= 0 {
			name = name[:end]
		}
		unit := unitOf(name)
		if unit == 0 {
			return 0, p.fail(at+i, "%s is not a unit of time: s, min, h, d, ms and us are", shown(name))
		}
		i += len(name)
		nanos, ok := scaled(whole, fraction, unit)
		if !ok {
			return 0, p.fail(at+begin, "the period %s has a part that is not whole nanoseconds", shown(s))
		}
		// Each part is cut just above the maximum, so that the sum cannot overflow.
		if total += min(nanos, uint64(maxPeriod)+1); total > uint64(maxPeriod) {
			return 0, p.fail(at, "the period %s is longer than ten years", shown(s))
		}
	}
	return time.Duration(total), nil
}

// leadingDigits is the number that s begins with, math.MaxUint64 when it is larger, and how many digits it has.
func leadingDigits(s string) (value uint64, n int) {
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		if value >= math.MaxUint64/10 {
			value = math.MaxUint64
		} else {
			value = value*10 + uint64(s[n]-'0')
		}
		n++
	}
	return value, n
}

func unitOf(name string) time.Duration {
	for _, u := range periodUnits {
		if slices.Contains(u.names, name) {
			return u.length
		}
	}
	return 0
}

// scaled is whole.fraction units in nanoseconds, math.MaxUint64 when that is more; ok is false when it is not whole.
func scaled(whole uint64, fraction string, unit time.Duration) (nanos uint64, ok bool) {
	u := uint64(unit)
	if fraction != "" {
		// A day has 8.64e13 ns, which divides by no power of ten above 13.
		if len(fraction) > 18 {
			return 0, false
		}
		part, scale := uint64(0), uint64(1)
		for i := range len(fraction) {
			part = part*10 + uint64(fraction[i]-'0')
			scale *= 10
		}
		hi, lo := bits.Mul64(part, u)
		var rest uint64
		// part < scale, so that the quotient is below u and hi below scale: Div64 cannot panic.
		if nanos, rest = bits.Div64(hi, lo, scale); rest != 0 {
			return 0, false
		}
	}
	if whole > (math.MaxUint64-nanos)/u {
		return math.MaxUint64, true
	}
	return whole*u + nanos, true
}
