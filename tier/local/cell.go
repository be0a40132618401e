package local

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/tierlimit/tierlimit/tier"
)

// A Cell is what one instance holds of one key of one limiter. The tokens are taken without a lock; everything
// below Mu is settled under it. Times are nanoseconds on the instance's monotonic clock.
type Cell struct {
	// What a warm check reads comes first, in the order in which it does, on as few cache lines as may be.
	next  atomic.Pointer[Cell] // chain of its table bucket
	Hash  uint64
	Owner uint32      // number of the limiter
	used  atomic.Bool // since the eviction hand last passed
	Key   string
	short [shortKey]byte // Key, if it fits: a cache line less to load

	deadline atomic.Int64            // tokens are void after this
	stripes  atomic.Pointer[stripes] // the rest of the tokens, nil until the cell is crowded
	tokens   atomic.Int64
	mark     atomic.Int64 // below this many tokens a note is left for the loop

	Log       *SpendLog    // when the tokens were spent; sliding log only
	remaining atomic.Int64 // what Redis last reported as left
	fullAt    atomic.Int64 // when the key is full again if nothing more is spent, as last reported
	Flow      *Flow        // when the tokens are due; leaky bucket only
	denyUntil atomic.Int64 // a denial is kept until then,
	denyCost  atomic.Int64 // for this cost or more
	denied    atomic.Int64 // checks answered by a kept denial since the last Demand
	crowds    atomic.Int32 // swaps that failed
	noted     atomic.Bool
	ring      int32 // place in the shard's eviction ring; guarded by the shard

	Mu sync.Mutex
	Settlement
}

// shortKey is the length up to which a key lies in its cell. With it the first two cache lines of a cell are what a warm check reads, and a cell
// fills seven.
const shortKey = 24

// newCell returns a cell with a copy of the key: the caller's may be a small part of something large.
func newCell(hash uint64, owner uint32, key string) *Cell {
	c := &Cell{Hash: hash, Owner: owner}
	if len(key) > len(c.short) {
		c.Key = strings.Clone(key)
	} else {
		c.Key = unsafe.String(&c.short[0], copy(c.short[:], key))
	}
	return c
}

// Settlement is the part of a cell that its exchanges work on. Guarded by Cell.Mu.
type Settlement struct {
	Dead      bool  // evicted: look the key up again
	Waited    bool  // it has a place ahead of those that nobody waits for
	InFlight  bool  // an exchange is on its way
	Unknown   bool  // an exchange timed out: what it did is not known, so nothing may be claimed of this lease
	Return    bool  // hand everything back at the next exchange
	Foreign   bool  // the lease is of a limit with another period: Own has other windows
	BackReady bool  // BackOwn is settled and to be sent
	Lost      uint8 // flights that came back and of which nobody knows whether they ran: counts round
	Waiters   []*Waiter
	Ticket    int64 // of its place in the queue for an exchange, 0 for none

	// The lease, as of the last settlement.
	Slot    int64 // Redis's name of the lease's slot, 0 for none
	Base    int64 // tokens in the cell then: Base - tokens are spent and unreported
	Retired int64 // tokens taken out of use, to be handed back
	LogSkip int64 // tokens reported before their record in Log: that is skipped
	Refund  int64 // given back by callers, to be credited; tier.RefundAll for a reset
	Counted int64 // tokens in hand as they stand in the Hybrid's sum
	Horizon int64 // the lease is meant to last this long

	// What Redis last said of the key.
	Born, Version, Activity int64
	Known                   int64 // Born and Version may be claimed until then
	Active, Out             int64

	// Demand.
	Rate    float64 // tokens per nanosecond that were spent, waited for or refused, averaged
	Settled int64   // when Rate was last updated, 0 for never
	Busy    int64   // when the present demand began: the last Settled that came more than a sync interval after the one before
	Due     int64   // when the loop looks at the cell again, 0 for never
	Pause   int64   // no exchange without waiters until then
	Backoff int64   // of polling an exhausted window

	Own Own

	Share      State // the outage share's count, nil when unused; the count itself where there is no Redis
	outage     *Outage
	ChargeCold int64 // admitted without asking, to be charged
	ColdUsed   int64 // admitted by ColdAdmit so far
	Landed     int64 // flights that came back
	Resets     int64 // the number of the last of them that is known to have reset the key
}

// Outage is what a cell keeps of an outage besides the share's count.
type Outage struct {
	ShareAt   int64 // which outage Share belongs to
	ShareCap  int64 // its capacity
	ShareFrom int64 // when it began
	BackSent  int64 // the last return of this instance that this key was told of
	BackOwn   int64 // what its share admitted
}

// Outage is what is kept of an outage: most cells never see one. Caller holds Mu.
func (s *Settlement) Outage() *Outage {
	if s.outage == nil {
		s.outage = new(Outage)
	}
	return s.outage
}

// BackSent is the last episode for which this key reported back, 0 for none. Caller holds Mu.
func (s *Settlement) BackSent() int64 {
	if s.outage == nil {
		return 0
	}
	return s.outage.BackSent
}

// A Waiter is a caller that waits for an exchange of its key.
type Waiter struct {
	N     int64        // 0: for the exchange itself, not for tokens
	Left  int64        // when it stops waiting
	Again bool         // it has been asked for once
	Hold  int64        // with an N of 0: tokens that it wants to find in the lease
	Done  chan Outcome // buffered, so that answering never blocks
}

// Outcome answers a Waiter.
type Outcome struct {
	Allowed                     bool
	Leased                      bool // from a lease
	Down                        bool // Redis did not answer: decide locally
	Remaining, RetryNS, ResetNS int64
	DelayNS                     int64
	Never                       bool
	Closed                      bool
}

// Tokens is the number of tokens in hand, spendable or void. Exact while Mu is held and nobody takes; what is taken meanwhile may or may
// not be counted.
func (c *Cell) Tokens() int64 {
	n := c.tokens.Load()
	if s := c.stripes.Load(); s != nil {
		for i := range s {
			n += s[i].tokens.Load()
		}
	}
	return n
}

// Deadline is when the tokens in hand become void.
func (c *Cell) Deadline() int64 { return c.deadline.Load() }

// Remaining is what Redis last reported as left.
func (c *Cell) Remaining() int64 { return c.remaining.Load() }

// FullAt is when the key is full again, as last reported.
func (c *Cell) FullAt() int64 { return c.fullAt.Load() }

// Take spends n tokens of the lease if there are as many, and reports how many are left, those in others' stripes not counted. The
// caller loads Deadline before and reads the clock after: then a caller that is preempted in between cannot spend a token past
// its deadline. While somebody holds Mu, it may miss tokens that lie in stripes.
func (c *Cell) Take(n int64) (left int64, ok bool) {
	if s := c.stripes.Load(); s != nil {
		return c.takeStriped(s, n)
	}
	return c.takeShared(n)
}

func (c *Cell) takeShared(n int64) (left int64, ok bool) {
	for {
		have := c.tokens.Load()
		if have < n {
			return have, false
		}
		if c.tokens.CompareAndSwap(have, have-n) {
			return have - n, true
		}
		c.crowd()
	}
}

// Mark is how many tokens must be left lest the loop be told.
func (c *Cell) Mark() int64 { return c.mark.Load() }

// Note reports whether it is for the caller to tell the loop that the lease runs low: once a deposit.
func (c *Cell) Note() bool { return !c.noted.Load() && c.noted.CompareAndSwap(false, true) }

// Touch marks the cell as used since the eviction hand last passed.
func (c *Cell) Touch() {
	if !c.used.Load() {
		c.used.Store(true)
	}
}

// Unspend puts up to n tokens back that were taken from the lease in hand, and returns how many. Caller holds Mu.
func (c *Cell) Unspend(n int64) int64 {
	back := max(0, min(n, c.Base-c.Tokens()-c.Retired)) // with what is taken meanwhile there is only more room
	c.tokens.Add(back)
	return back
}

// Clear takes all tokens out of the cell and returns how many. Caller holds Mu.
func (c *Cell) Clear() int64 {
	c.Gather()
	return c.tokens.Swap(0)
}

// Deposit sets the deadline and adds n tokens. Tokens that must not live on under the new deadline are cleared before.
// Caller holds Mu.
func (c *Cell) Deposit(n, deadline, mark int64) {
	c.deadline.Store(deadline)
	c.mark.Store(mark)
	c.tokens.Add(n)
	c.noted.Store(false)
}

// Report stores what Redis last said.
func (c *Cell) Report(remaining, fullAt int64) {
	c.remaining.Store(remaining)
	c.fullAt.Store(fullAt)
}

// Deny keeps a denial of costs of n or more until the given time.
func (c *Cell) Deny(n, until int64) {
	c.denyCost.Store(n)
	c.denyUntil.Store(until)
}

// Allow drops a kept denial.
func (c *Cell) Allow() { c.denyUntil.Store(0) }

// Denied reports whether a kept denial covers a cost of n now, and until when. It counts the check as demand.
func (c *Cell) Denied(now, n int64) (until int64, ok bool) {
	until = c.denyUntil.Load()
	if until <= now || n < c.denyCost.Load() {
		return 0, false
	}
	if s := c.stripes.Load(); s != nil {
		s.own().denied.Add(n)
		return until, true
	}
	for have := c.denied.Load(); !c.denied.CompareAndSwap(have, have+n); have = c.denied.Load() {
		c.crowd()
	}
	return until, true
}

// DeniedUntil is the time until which a denial is kept, 0 for none.
func (c *Cell) DeniedUntil() int64 { return c.denyUntil.Load() }

// DeniedCost is the least cost that the kept denial covers.
func (c *Cell) DeniedCost() int64 { return c.denyCost.Load() }

// DeniedDemand is the cost refused by kept denials since it was last taken.
func (c *Cell) DeniedDemand() int64 {
	n := c.denied.Load()
	if s := c.stripes.Load(); s != nil {
		for i := range s {
			n += s[i].denied.Load()
		}
	}
	return n
}

// TakeDeniedDemand returns DeniedDemand and resets it.
func (c *Cell) TakeDeniedDemand() int64 {
	n := c.denied.Swap(0)
	if s := c.stripes.Load(); s != nil {
		for i := range s {
			n += s[i].denied.Swap(0)
		}
	}
	return n
}

// Renote lets the next Take below the mark leave a note again.
func (c *Cell) Renote() { c.noted.Store(false) }

// Own counts an instance's own admissions of one key, so that a window that Redis lost can be told again. Guarded
// by Cell.Mu.
type Own struct {
	at        int64 // index of the window that cur counts
	cur, prev int64
}

// Add counts n admissions in window index at (of the window's whole length).
func (o *Own) Add(at, n int64) {
	o.roll(at)
	o.cur += n
}

// Sum is an upper bound of what may still be inside the window when it ends in window index at: what was counted in
// that window, and with prev also in the one before.
func (o *Own) Sum(at int64, prev bool) int64 {
	o.roll(at)
	if prev {
		return o.cur + o.prev
	}
	return o.cur
}

func (o *Own) roll(at int64) {
	switch {
	case at == o.at+1:
		o.at, o.prev, o.cur = at, o.cur, 0
	case at > o.at:
		o.at, o.prev, o.cur = at, 0, 0
	}
}

// Flow spaces the tokens of a leaky bucket's lease: each has its place in the queue that Redis keeps. Safe for concurrent
// use.
type Flow struct{ next atomic.Int64 }

// farthest is the last place in a queue, in ns: 36 years.
const farthest = 1 << 60

// Place takes the places of n tokens that are step ns apart and returns how long after now the first is due, 0 when it is
// overdue. A queue of more than decades counts as that long.
func (f *Flow) Place(now, n, step int64) int64 {
	length := int64(farthest)
	if step == 0 || n < farthest/step {
		length = n * step
	}
	for {
		next := f.next.Load()
		if f.next.CompareAndSwap(next, min(next+length, farthest)) {
			return max(0, next-now)
		}
	}
}

// Back gives the places of n tokens back, the last ones that were taken: whoever has them shares them with the next to come.
func (f *Flow) Back(n, step int64) {
	if step == 0 || n < farthest/step {
		f.next.Add(-n * step)
	}
}

// Begin moves the next place to at; with some of the places before it still to be taken, to no later than them.
func (f *Flow) Begin(at int64) { f.next.Store(at) }

// Next is the next place.
func (f *Flow) Next() int64 { return f.next.Load() }

// SpendLog remembers when tokens were spent, in ticks, for the sliding log: a ring of counters that is drained at
// each exchange. Safe for concurrent use.
type SpendLog struct {
	tickNS int64
	slots  [spendTicks]atomic.Uint64 // tick (low 24 bits) << 40 | count
}

const (
	spendTicks     = 32
	spendCountBits = 40
	spendCountMask = 1<<spendCountBits - 1
	tickMask       = 1<<24 - 1
)

// NewSpendLog returns a log with ticks of the given length.
func NewSpendLog(tickNS int64) *SpendLog { return &SpendLog{tickNS: max(1, tickNS)} }

// Record counts n tokens spent at now. A slot that holds another tick's count takes the newer label of the two, which errs
// to too few: some tokens then count as spent later than they were. The caller's tick may be the older one: it may have
// been preempted between its reading of the clock and this.
func (s *SpendLog) Record(now, n int64) {
	tick := uint64(now/s.tickNS) & tickMask
	slot := &s.slots[tick%spendTicks]
	for {
		old := slot.Load()
		label := old >> spendCountBits
		if old&spendCountMask == 0 || (tick-label)&tickMask < 1<<23 {
			label = tick
		}
		count := min(old&spendCountMask+uint64(n), spendCountMask)
		if slot.CompareAndSwap(old, label<<spendCountBits|count) {
			return
		}
	}
}

// Drain takes up to limit tokens out of the log, oldest first, and appends them to spends with their ages as of now
// (floored to µs and shortened by drift, so that nothing counts as older than it is). What a concurrent taker has recorded
// but the caller has not yet counted is the newest and stays for the next time.
func (s *SpendLog) Drain(now, limit int64, spends []tier.Spend) ([]tier.Spend, int64) {
	nowTick := uint64(now / s.tickNS)
	behind := func(v uint64) int64 {
		b := (nowTick - v>>spendCountBits) & tickMask
		if b >= 1<<23 { // recorded by a caller whose clock reading is later than now
			return 0
		}
		return int64(b)
	}
	var order [spendTicks]int
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order[:], func(a, b int) int {
		return cmp.Compare(behind(s.slots[b].Load()), behind(s.slots[a].Load()))
	})
	var sum int64
	for _, i := range order {
		for sum < limit {
			v := s.slots[i].Load()
			take := min(int64(v&spendCountMask), limit-sum)
			if take == 0 {
				break
			}
			// Concurrent Records add or relabel: then look again.
			if s.slots[i].CompareAndSwap(v, v-uint64(take)) {
				age := max(0, behind(v)-1) * s.tickNS // the end of the tick, not its start
				spends = append(spends, tier.Spend{AgeUS: (age - age/1000) / 1000, Count: take})
				sum += take
			}
		}
	}
	return spends, sum
}
