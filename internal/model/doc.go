// Package model is the exchange protocol in plain Go: what the Lua scripts do, written a second time from the specification and
// with exact integers, so that the two can be held against each other step by step, and so that whole fleets can be simulated
// without a server.
//
// A [Store] takes the time with each call and keeps no clock of its own. Its [Variant] switches single rules of the protocol off;
// such a plain store overshoots, which is how a property test shows that its generator would have found the fault.
//
// The trade: clarity before speed. A Store is not safe for concurrent use.
package model
