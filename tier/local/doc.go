// Package local is the in-process tier: the sharded [Table] of keys with the [Cell] of each, which holds what was leased from Redis, and
// the five algorithms in Go.
//
// The algorithms are pure state machines for one key. They take the time with every call and never read a clock, hold no
// lock and know nothing of Redis. [New] makes a [State]; token and leaky bucket, fixed window, weighted sliding window and
// sliding log differ only in what is behind it.
//
// The times of an algorithm are microseconds (those of a Cell are nanoseconds), all tokens whole numbers, and all arithmetic is exact:
// products are 128 bits wide, what is less than a token is kept as a remainder in 1/period of a token, and nothing drifts. A value that
// does not fit into an int64 is the greatest int64. No input panics.
//
// # Clocks
//
// A [Time] is an interval in which the true time lies. With Lo == Hi an algorithm is the textbook one. With Lo < Hi it errs
// to too few: an admission enters the count at Lo and leaves as if it had happened at Hi, so that the limit holds for the
// true times, wherever in their intervals they were. A clock that stands still gives nothing new; one that goes back gives
// nothing either, and costs at most the step: until it has caught up with the latest time seen, that is the time.
//
// # Limits
//
// The [tier.Limit] comes with every call and may change between calls. Tokens and counts carry over, clipped to the new
// capacity: a raise is no refill, and a changed window is no fresh one. What is out of range denies everything: a rate or
// capacity of 0 or less, a period under a microsecond. The algorithm of a state is the one it was made with; the one in a
// later call's limit is not looked at. Rates and bursts over 1<<60 count as 1<<60.
package local
