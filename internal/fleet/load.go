package fleet

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// A Check is one call that is offered to an instance.
type Check struct {
	At       time.Duration // when, from the start of the run
	Instance int           // 0 up to the number of instances
	Key      string
	Cost     int64 // tokens
}

// A Load says who offers what and when. It is a pure function, so that each process of a fleet can work out its own part.
type Load interface {
	// Next is check number k, from 0, for a fleet of so many instances that is offered rate tokens per second in all. At does not
	// fall as k rises. False means that there is none and that none will follow. Safe for concurrent use.
	Next(k int64, rate float64, instances int) (Check, bool)
}

// LoadFunc is a function as a Load.
type LoadFunc func(k int64, rate float64, instances int) (Check, bool)

// Next calls f.
func (f LoadFunc) Next(k int64, rate float64, instances int) (Check, bool) {
	return f(k, rate, instances)
}

// A Shape is a Load that can be written as JSON and so be handed to a child process. Make one with Even, OneHot and the like.
type Shape struct {
	Kind   string        `json:"kind"`
	Keys   []string      `json:"keys,omitempty"`
	Hot    int           `json:"hot,omitempty"`    // one-hot: the instance
	Part   float64       `json:"part,omitempty"`   // one-hot: what part goes to it; trickle: what part of the rate trickles
	Period time.Duration `json:"period,omitempty"` // moving-hot: how long one is hot; bursts: from burst to burst
	On     time.Duration `json:"on,omitempty"`     // pulse
	Off    time.Duration `json:"off,omitempty"`    // pulse
	Until  time.Duration `json:"until,omitempty"`  // trickle: when the rest comes
	Cost   int64         `json:"cost,omitempty"`   // of each check; 0 is 1
	N      int           `json:"n,omitempty"`      // zipf: number of keys
	S      float64       `json:"s,omitempty"`      // zipf: exponent

	cumulative []float64 // zipf: odds of the keys up to each
	names      []string
}

// The kinds of Shape.
const (
	kindEven    = "even"
	kindOneHot  = "one-hot"
	kindMoving  = "moving-hot"
	kindBursts  = "bursts"
	kindPulse   = "pulse"
	kindTrickle = "trickle"
	kindZipf    = "zipf"
)

// Even offers to all instances in turn, at an even pace. Without keys there is one, "k"; with several, each instance goes through all.
func Even(keys ...string) Shape { return Shape{Kind: kindEven, Keys: keys} }

// OneHot offers a part, 0 to 1, of the load to one instance and the rest to the others in turn.
func OneHot(instance int, part float64, keys ...string) Shape {
	return Shape{Kind: kindOneHot, Hot: instance, Part: part, Keys: keys}
}

// MovingHot offers everything to one instance for a period, then to the next.
func MovingHot(period time.Duration, keys ...string) Shape {
	return Shape{Kind: kindMoving, Period: period, Keys: keys}
}

// Bursts offers everything that belongs to a period at once, at its start.
func Bursts(period time.Duration, keys ...string) Shape {
	return Shape{Kind: kindBursts, Period: period, Keys: keys}
}

// Pulse offers all in the on part of each cycle, at the rate that keeps the mean, and nothing in the off part.
func Pulse(on, off time.Duration, keys ...string) Shape {
	return Shape{Kind: kindPulse, On: on, Off: off, Keys: keys}
}

// Trickle offers a part of the rate until an instant; then all that was held back comes at once, and from there on the rate.
func Trickle(part float64, until time.Duration, keys ...string) Shape {
	return Shape{Kind: kindTrickle, Part: part, Until: until, Keys: keys}
}

// IdleThenBurst offers nothing until an instant, then at once all that the rate would have offered, and from there on the rate.
func IdleThenBurst(idle time.Duration, keys ...string) Shape { return Trickle(0, idle, keys...) }

// Hoard offers evenly, but in checks of so many tokens; the rate counts tokens.
func Hoard(cost int64, keys ...string) Shape { return Shape{Kind: kindEven, Cost: cost, Keys: keys} }

// Zipf offers n keys, the i-th with odds 1/i^s, to instances at random. The sequence is the same in every run.
func Zipf(n int, s float64) Shape { return Shape{Kind: kindZipf, N: n, S: s}.prepared() }

// Costing is the shape with another cost per check; the rate still counts tokens.
func (s Shape) Costing(tokens int64) Shape {
	s.Cost = tokens
	return s
}

// String is the kind.
func (s Shape) String() string { return s.Kind }

// prepared works out the tables.
func (s Shape) prepared() Shape {
	if s.Kind != kindZipf || s.N < 1 || s.N > 1<<24 {
		return s
	}
	s.cumulative, s.names = make([]float64, s.N), make([]string, s.N)
	sum := 0.0
	for i := range s.N {
		sum += math.Pow(float64(i+1), -s.S)
		s.cumulative[i] = sum
		s.names[i] = "k" + strconv.Itoa(i)
	}
	return s
}

// Validate says what is wrong with the shape in a fleet of so many instances.
func (s Shape) Validate(instances int) error {
	var faults []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			faults = append(faults, fmt.Errorf("fleet: load %s: "+format, append([]any{s.Kind}, args...)...))
		}
	}
	fault(s.Cost < 0, "cost %d is negative", s.Cost)
	switch s.Kind {
	case kindEven:
	case kindOneHot:
		fault(s.Hot < 0 || s.Hot >= instances, "instance %d of %d", s.Hot, instances)
		fault(!(s.Part >= 0 && s.Part <= 1), "part %v, want 0 to 1", s.Part)
	case kindMoving, kindBursts:
		fault(s.Period <= 0, "period %v, want more than 0", s.Period)
	case kindPulse:
		fault(s.On <= 0 || s.Off < 0, "on %v, off %v", s.On, s.Off)
	case kindTrickle:
		fault(!(s.Part >= 0 && s.Part <= 1) || s.Until < 0, "part %v until %v", s.Part, s.Until)
	case kindZipf:
		fault(s.N < 1 || s.N > 1<<24, "%d keys, want 1 to %d", s.N, 1<<24)
		fault(!(s.S >= 0), "exponent %v", s.S)
	default:
		fault(true, "no such kind")
	}
	return errors.Join(faults...)
}

// Next is check number k.
func (s Shape) Next(k int64, rate float64, instances int) (Check, bool) {
	n := int64(instances)
	cost := max(1, s.Cost)
	rate /= float64(cost) // from here on in checks per second
	due := float64(k) / rate
	c := Check{Instance: int(k % n), Cost: cost}
	turn := k / n
	switch s.Kind {
	case kindOneHot:
		// The hot one has check k if its due share has just passed a whole number.
		if before := math.Floor(float64(k) * s.Part); math.Floor(float64(k+1)*s.Part) > before || n == 1 {
			c.Instance, turn = s.Hot, int64(before)
		} else {
			cold := k - int64(before)
			c.Instance, turn = int(cold%(n-1)), cold/(n-1)
			if c.Instance >= s.Hot {
				c.Instance++
			}
		}
	case kindMoving:
		c.Instance, turn = int(int64(due/s.Period.Seconds())%n), k
	case kindBursts:
		due = math.Floor(due/s.Period.Seconds()) * s.Period.Seconds()
	case kindPulse:
		cycle := (s.On + s.Off).Seconds()
		whole := math.Floor(due / cycle)
		due = whole*cycle + (due-whole*cycle)*s.On.Seconds()/cycle
	case kindTrickle:
		until := s.Until.Seconds()
		switch trickled := until * rate * s.Part; {
		case float64(k) < trickled:
			due = float64(k) / (rate * s.Part)
		case due < until:
			due = until
		}
	case kindZipf:
		x := scramble(uint64(k))
		c.Instance = int(scramble(x) % uint64(n))
		u := float64(x>>11) / (1 << 53) * s.cumulative[len(s.cumulative)-1]
		i, _ := slices.BinarySearch(s.cumulative, u)
		c.Key = s.names[min(i, len(s.names)-1)]
	}
	c.At = time.Duration(due * 1e9)
	if c.Key == "" {
		c.Key = "k"
		if len(s.Keys) > 0 {
			c.Key = s.Keys[turn%int64(len(s.Keys))]
		}
	}
	return c, true
}

// scramble is splitmix64.
func scramble(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// A Log is a recorded sequence of checks as a Load.
type Log struct {
	checks []Check
	paced  bool
}

// FromLog offers the given checks in order, to the instances in turn as a load balancer does (their Instance is not looked at).
// With paced they come at their own At, which must not fall; else at the rate of the run. It keeps the slice.
func FromLog(checks []Check, paced bool) Log { return Log{checks, paced} }

// Next is check number k.
func (l Log) Next(k int64, rate float64, instances int) (Check, bool) {
	if k >= int64(len(l.checks)) {
		return Check{}, false
	}
	c := l.checks[k]
	c.Instance = int(k % int64(instances))
	c.Cost = max(1, c.Cost)
	if !l.paced {
		c.At = time.Duration(float64(k) / rate * 1e9)
	}
	return c, true
}
