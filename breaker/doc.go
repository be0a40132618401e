// Package breaker decides whether Redis is worth asking: gobreaker's circuit breaker with the settings, the classification of
// errors and the notice of changes that a limiter needs.
//
// The trade: a few callers wait one time-out each before it opens, so that a single lost packet does not send a whole fleet
// into its outage shares; after that nobody waits, and one probe at a time finds out when Redis is back.
package breaker
