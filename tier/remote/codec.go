package remote

import (
	"cmp"
	"math"
	"slices"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

// The counts that both sides of the wire agree on.
const (
	headerNumbers = lua.HeaderNumbers
	policyNumbers = lua.PolicyNumbers
	askNumbers    = lua.AskNumbers
	reportNumbers = lua.ReportNumbers
	pairNumbers   = lua.PairNumbers
	headerReply   = lua.HeaderReply
	shortReply    = lua.ShortReply
	keyReply      = lua.KeyReply
	numberBytes   = lua.NumberBytes
	beatArgs      = lua.MembershipArgs
	beatReply     = lua.MembershipReply
)

// MaxKeys is the most keys a call carries, so that one call does not block the server for long: for about half a millisecond, and 0.8 for
// windows of 100 sub-windows (docs/decisions/0015).
const MaxKeys = 64

// maxInteger is the largest integer that Lua's numbers hold exactly. As a refund it stands for RefundAll.
const maxInteger = 1<<53 - 1

// never is -1 as an exchange's answer writes it.
const never = 1<<(8*numberBytes) - 1

// A Reply is what an exchange brought back.
type Reply struct {
	Now    int64        // the server's clock as the script ran, µs
	Late   bool         // it arrived after its fence: nothing was done, Grants is empty
	Grants []tier.Grant // in the order of the asks
}

// command returns the arguments of a script call up to its keys. The first two are filled in when it is sent.
func command(keys, argv int) []any {
	args := make([]any, 3, 3+keys+argv)
	args[2] = int64(keys)
	return args
}

// A policy is what of an ask the keys of a call mostly share.
type policy struct{ rate, period, capacity, sub, slot int64 }

func policyOf(a *tier.Ask) policy {
	return policy{a.Limit.Rate, a.Limit.PeriodUS(), a.Limit.Capacity(), int64(max(1, a.Limit.SubWindows)), a.SlotUS}
}

// reports tells whether there is more to say of a key than who asks and for what.
func reports(a *tier.Ask) bool {
	return a.Own|a.Lease|a.Spent|a.Carry|a.Return|a.Refund != 0 || a.Back || len(a.Spends) > 0
}

// encodeAsks returns the whole command of an exchange; the header of prelude.lua says what stands where.
func encodeAsks(fence int64, dark tier.Darkness, asks []tier.Ask) ([]any, error) {
	args := command(len(asks), 1)
	var known [4]policy
	policies := known[:0]
	most := headerNumbers + len(asks)*askNumbers
	for i := range asks {
		a := &asks[i]
		args = append(args, a.Key)
		if p := policyOf(a); !slices.Contains(policies, p) {
			policies = append(policies, p)
			most += policyNumbers
		}
		if reports(a) {
			most += reportNumbers
		}
		most += pairNumbers * (len(a.Spends) + len(a.Need))
	}
	w := writer{text: make([]byte, 0, most*numberBytes)}
	w.add(fence, dark.Missing, dark.Most, dark.Fleet, dark.From, dark.Until, dark.Episode, dark.Returned, dark.Least)
	w.add1(len(policies))
	for _, p := range policies {
		w.add(p.rate, p.period, p.capacity, p.sub, p.slot)
	}
	for i := range asks {
		w.ask(&asks[i], 1+slices.Index(policies, policyOf(&asks[i])))
	}
	if w.bad {
		return nil, unsendable("a number out of range")
	}
	return append(args, w.text), nil
}

// A writer appends integers, and remembers whether one of them is none that the scripts take.
type writer struct {
	text []byte
	bad  bool
}

func (w *writer) ask(a *tier.Ask, policy int) {
	w.add1(policy)
	w.add1(int(bit(reports(a)) + 2*bit(a.Whole)))
	w.add2(len(a.Need))
	w.add(a.Born, a.Version, a.Seen, a.Want)
	if reports(a) {
		refund := a.Refund
		switch refund {
		case tier.RefundAll:
			refund = maxInteger
		case maxInteger:
			w.bad = true
		}
		w.add(a.Own, a.Lease, a.Spent, a.Carry, a.Return, refund)
		w.add1(int(bit(a.Back)))
		w.add2(len(a.Spends))
	}
	for _, s := range a.Spends {
		w.add(s.AgeUS, s.Count)
	}
	for _, c := range a.Need {
		w.add(c.N, c.Count)
	}
}

func (w *writer) add(numbers ...int64) {
	for _, n := range numbers {
		w.bad = w.bad || n < 0 || n > maxInteger
		w.text = append(w.text, byte(n), byte(n>>8), byte(n>>16), byte(n>>24), byte(n>>32), byte(n>>40), byte(n>>48))
	}
}

func (w *writer) add1(n int) {
	w.bad = w.bad || n > math.MaxUint8
	w.text = append(w.text, byte(n))
}

func (w *writer) add2(n int) {
	w.bad = w.bad || n > math.MaxUint16
	w.text = append(w.text, byte(n), byte(n>>8))
}

func bit(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// Flags of a key's answer.
const (
	flagLost = 1 << iota
	flagCredited
	flagWhole // nothing is left out
	flagsEnd
)

// decodeReply reads an exchange's answer. It takes nothing from an answer that is not exactly one of ours.
func decodeReply(answer any, asks []tier.Ask) (Reply, error) {
	text, ok := answer.(string)
	if !ok {
		return Reply{}, malformed("not a string")
	}
	in := numbers{rest: text}
	r := Reply{Now: in.integer(), Late: in.byte(1) == 1}
	if in.err == nil && r.Late && in.rest != "" {
		in.err = malformed("wrong length")
	}
	if in.err != nil {
		return Reply{}, in.err
	}
	if r.Late {
		return r, nil
	}
	r.Grants = make([]tier.Grant, len(asks))
	for i := range r.Grants {
		g := &r.Grants[i]
		flags := in.byte(flagsEnd - 1)
		*g = tier.Grant{
			Lost: flags&flagLost != 0, Credited: flags&flagCredited != 0,
			Served: in.integer(), Slot: in.integer(), LifeUS: in.integer(), Remaining: in.integer(), RetryUS: in.orNever(),
			ResetUS: in.integer(), Activity: in.integer(), Version: in.integer(), TTLUS: in.integer(),
			Active: 1, Born: asks[i].Born,
		}
		if flags&flagWhole != 0 {
			g.Lease, g.Out, g.Active, g.Born, g.DelayUS = in.integer(), in.integer(), in.integer(), in.integer(), in.integer()
		}
		if in.err != nil {
			return Reply{}, in.err
		}
		if g.Lease > max(0, asks[i].Want) || g.Served > needed(asks[i].Need) {
			return Reply{}, malformed("more than was asked for")
		}
	}
	if in.rest != "" {
		return Reply{}, malformed("wrong length")
	}
	return r, nil
}

// numbers takes the integers of an exchange's answer one by one and remembers the first fault; after that it yields zeros.
type numbers struct {
	rest string
	err  error
}

func (r *numbers) fail(reason string) int64 {
	r.rest, r.err = "", cmp.Or(r.err, malformed(reason))
	return 0
}

// byte takes a number of one byte, which is high at most.
func (r *numbers) byte(high int64) int64 {
	if r.rest == "" {
		return r.fail("wrong length")
	}
	n := int64(r.rest[0])
	r.rest = r.rest[1:]
	if n > high {
		return r.fail("integer out of range")
	}
	return n
}

func (r *numbers) integer() int64 {
	n := r.orNever()
	if n < 0 {
		return r.fail("integer out of range")
	}
	return n
}

func (r *numbers) orNever() int64 {
	if len(r.rest) < numberBytes {
		return r.fail("wrong length")
	}
	s := r.rest[:numberBytes]
	r.rest = r.rest[numberBytes:]
	switch n := int64(s[0]) | int64(s[1])<<8 | int64(s[2])<<16 | int64(s[3])<<24 | int64(s[4])<<32 | int64(s[5])<<40 | int64(s[6])<<48; {
	case n == never:
		return -1
	case n > maxInteger:
		return r.fail("integer out of range")
	default:
		return n
	}
}

// needed is the sum of a need, as far as an integer goes.
func needed(need []tier.Cost) (sum int64) {
	for _, c := range need {
		if c.N <= 0 || c.Count <= 0 {
			continue
		}
		if c.Count > (math.MaxInt64-sum)/c.N {
			return math.MaxInt64
		}
		sum += c.N * c.Count
	}
	return sum
}

// A reader takes the integers of a heartbeat's answer one by one and remembers the first fault; after that it yields zeros.
type reader struct {
	rest []any
	err  error
}

// open begins at answer and reports whether it holds at least n elements.
func (r *reader) open(answer any, n int) bool {
	all, ok := answer.([]any)
	switch {
	case !ok:
		r.err = malformed("not an array")
	case len(all) < n:
		r.err = malformed("wrong length")
	}
	r.rest = all
	return r.err == nil
}

// between takes the next element, which must be an integer in [low, high].
func (r *reader) between(low, high int64) int64 {
	if r.err != nil {
		return 0
	}
	if len(r.rest) == 0 {
		r.err = malformed("wrong length")
		return 0
	}
	n, ok := r.rest[0].(int64)
	if !ok {
		r.err = malformed("not an integer")
		return 0
	}
	if n < low || n > high {
		r.err = malformed("integer out of range")
		return 0
	}
	r.rest = r.rest[1:]
	return n
}

func (r *reader) integer() int64 { return r.between(0, maxInteger) }
func (r *reader) flag() bool     { return r.between(0, 1) == 1 }
