// Package remote is the remote tier: it settles with Redis what instances spent and leases them more.
//
// A [Client] speaks the exchange protocol over a go-redis client that it was given. One exchange is one script call for up to
// [MaxKeys] keys of one algorithm; a heartbeat is one script call for one [Domain]. The package holds no state about keys: what
// a lost or late call means is the caller's to decide, with [NotExecuted] as its evidence.
//
// The trade: a call is never sent a second time, because a script that was asked twice spends twice. A reply that did not come
// is reported as such, and costs the caller the tokens it might have carried.
package remote
