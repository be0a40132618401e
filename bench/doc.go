// Package bench runs tierlimit side by side with its peers and with floors: what no limiter of that kind can do without.
//
// "make bench" at the root runs everything in one go and writes docs/benchmarks.md. The benchmarks themselves are ordinary
// Go ones, so that one of them can be run by hand:
//
//	go test -bench 'Allow/impl=tierlimit/path=lease/keys=hot/goroutines=1$' -benchtime 300ms -cpu 1,2,8 .
//
// Peers are pinned in this module's go.mod, so that a user of the core never sees them. Two of them are not Go modules
// that can be pinned: see Rueidis for the one, and docs/benchmarks.md for the other.
package bench
