// Package tier holds the nouns that both tiers share: plain data, no behaviour beyond arithmetic on itself.
//
// Times are microseconds of the Redis server's clock unless a name says otherwise; tokens are whole numbers.
package tier

import "time"

// Algorithm names one of the five ways to count. Zero is none of them.
type Algorithm uint8

// The five algorithms.
const (
	TokenBucket Algorithm = iota + 1
	LeakyBucket
	FixedWindow
	SlidingWindow
	SlidingLog
)

// Algorithms is the number of algorithms; they are numbered from 1 to Algorithms.
const Algorithms = int(SlidingLog)

// Bucket reports whether a is one of the two bucket algorithms.
func (a Algorithm) Bucket() bool { return a == TokenBucket || a == LeakyBucket }

// Limit is a policy: Rate tokens per Period. Burst is the capacity of a bucket and equals Rate for windows.
// SubWindows is 1 or more for SlidingWindow and 0 otherwise.
type Limit struct {
	Algorithm  Algorithm
	Rate       int64
	Period     time.Duration
	Burst      int64
	SubWindows int
}

// Capacity is the most a key can admit at once: the burst of a bucket, the limit of a window.
func (l Limit) Capacity() int64 {
	if l.Algorithm.Bucket() {
		return l.Burst
	}
	return l.Rate
}

// PeriodUS is the period in microseconds.
func (l Limit) PeriodUS() int64 { return l.Period.Microseconds() }

// SubWindowUS is the length of one sub-window: the whole window for everything but SlidingWindow.
func (l Limit) SubWindowUS() int64 {
	if l.SubWindows > 1 {
		return l.PeriodUS() / int64(l.SubWindows)
	}
	return l.PeriodUS()
}

// Share is instance rank's part of total among n instances: the parts of the ranks 0..n-1 sum to total exactly,
// and a rank of total or more gets nothing. It never grows when n grows.
func Share(total int64, n, rank int) int64 {
	if n < 1 || rank < 0 || rank >= n {
		return 0
	}
	part := total / int64(n)
	if int64(rank) < total%int64(n) {
		part++
	}
	return part
}

// Reserved is what of total is left while missing of n instances may each be using their share of it.
func Reserved(total int64, missing, n int64) int64 {
	if missing <= 0 {
		return total
	}
	if n < 1 || missing >= n {
		return 0
	}
	part := total / n
	if total%n != 0 {
		part++
	}
	// missing*part cannot overflow: missing < n, and part <= total/n + 1.
	return max(0, total-missing*part)
}

// Cost is a run of Count callers that each ask for N tokens, in the order they came.
type Cost struct {
	N     int64
	Count int64
}

// Spend is Count tokens spent AgeUS microseconds before the message was sent.
type Spend struct {
	AgeUS int64
	Count int64
}

// Ask is one key's message in an exchange. Spent, Carry, Return, Refund and Back are credits: they are sent at most once.
type Ask struct {
	Key    string // the Redis key
	Limit  Limit
	SlotUS int64 // length of an accounting slot: a lease lives at most two of them

	Born    int64 // incarnation of the key as last heard, 0 when nothing is claimed
	Version int64 // its grant number as last heard
	Own     int64 // windows and logs: this instance's admissions still inside the window, re-added after a loss or an outage
	Back    bool  // first exchange of this key after this instance was missing: Own holds what its share admitted

	Lease  int64   // the slot of the lease being reported, 0 for none
	Spent  int64   // spent from it since the last report
	Spends []Spend // sliding log: the same tokens with their ages; sums to Spent
	Carry  int64   // unspent, kept
	Return int64   // unspent, handed back
	Refund int64   // given back by callers; RefundAll resets the key
	Need   []Cost  // callers waiting, first come first served, each all or nothing
	Want   int64   // tokens wanted as a lease
	Whole  bool    // Want is not cut to an equal part of what is left
	Seen   int64   // Grant.Activity of the last exchange
}

// RefundAll as Ask.Refund makes the key full again, less what is outstanding.
const RefundAll = -1

// Grant is the answer to an Ask.
type Grant struct {
	Lost      bool  // the key had lost what this instance knew of it, and was re-seeded
	Served    int64 // tokens for the callers in Need: replaying Need greedily with this many gives who passes
	Lease     int64 // tokens leased
	Credited  bool  // the reported lease's slot was still open: commits, carry and return were taken
	Slot      int64 // the slot of this lease and of the carry
	LifeUS    int64 // lease and carry are spendable this long from before the send
	Remaining int64 // tokens left at the server after this grant
	RetryUS   int64 // until the largest unserved cost of Need (or 1) would pass, if nobody else spends; -1: never
	ResetUS   int64 // until full, if nothing more is spent
	Out       int64 // tokens leased to instances and neither committed nor returned
	Active    int64 // instances that exchanged this key lately, this one included
	Activity  int64 // send back as Ask.Seen
	Born      int64
	Version   int64
	TTLUS     int64 // the key is remembered this long
	DelayUS   int64 // leaky bucket: time until the first token of this grant is due; the following are Period/Rate apart
}

// Darkness is what a heartbeat tells about missing instances; exchanges carry it to the keys.
type Darkness struct {
	Missing  int64 // members not heard lately, as of the last heartbeat
	Most     int64 // the most missing at once within the horizon
	Fleet    int64 // the least fleet size on which the share of a member missing now may be based
	From     int64 // darkness began at or after this server time
	Until    int64 // last server time at which somebody was missing, 0 for never
	Episode  int64 // number of the episode
	Returned int64 // members that came back from missing in this episode
	Least    int64 // the least fleet size on which a share in this episode may have been based
}
