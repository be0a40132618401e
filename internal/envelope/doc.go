// Package envelope judges a limiter from outside: given what was admitted and when, is that within the limit?
//
// It shares no code with the limiter and imports only the standard library, so that a mistake in the one cannot hide a
// mistake in the other.
//
// # What counts as overshoot
//
// Nobody outside knows the instant at which a limiter admitted a request. Known is an interval: the caller called at
// Called and had the answer at Returned. [Check] charges only what no choice of instants inside those intervals
// explains. It looks at intervals [x, y] and adds up the admissions that happened inside [x, y] whatever the choice,
// that is those with x <= Called and Returned <= y, and holds the sum against what the limit allows there:
//
//   - token and leaky bucket: any x <= y; allowed Burst + Rate*(y-x)/Period
//   - fixed window: x and y in the same window; windows are aligned to the Unix epoch; allowed Rate
//   - sliding log: any y-x < Period, which is (t-Period, t]; allowed Rate
//   - sliding window: the limiter's own estimate at y: what happened in the sub-window of y and in the SubWindows-1 before it counts
//     whole, what happened in the one before those counts by its part still inside the window; allowed Rate. An admission that may
//     lie in several sub-windows counts with the least of its possible weights
//   - all of them: a single cost above the capacity is overshoot wherever it happened
//
// A rate of 0 allows nothing, whatever the burst.
//
// The verdict is a lower bound: no choice of instants has a smaller worst overshoot. For histories whose intervals are
// points it is exact. An admission that spans two fixed windows is counted in neither, so calls that last as long as a
// window blunt the check; keep calls short against the window.
//
// # Fractions
//
// Arithmetic is exact, on integers, without rounding on the way. Tokens are whole, so overshoot is what was admitted
// less the whole tokens allowed: an excess of a fraction of a token is reported as 1, an excess of nothing as 0.
//
// # Refunds
//
// A negative cost is a refund. A refund is taken to explain whatever it may explain: it reduces the sum over [x, y] when
// its own interval so much as touches [x, y], and then by the most it can. Two things it does not do: it does
// not undo what was certainly admitted after it (a refund never lifts a bucket above full, or a window below 0 spent),
// and it does not excuse an overshoot that was over before it began.
//
// # Clocks
//
// Times are nanoseconds of the server's clock, within 2^62 of the epoch. The checker compares them with each other and
// with the epoch only. A limiter whose clock ticks in microseconds cannot tell instants within one tick apart; set
// [Limit.Tick] so that it is not blamed for that.
package envelope
