package tierlimit

import (
	"math/bits"

	"github.com/cespare/xxhash/v2"

	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// hash is the one hash of a check. The limiter's seed is folded in so that one key under two limiters falls into two places, and so that
// whoever chooses keys does not choose their shards, by the high bits, nor their buckets, by the low ones: xxhash has no seed of its own.
func (l *Limiter) hash(key string) uint64 {
	high, low := bits.Mul64(xxhash.Sum64String(key)^l.seed, 0x9e3779b97f4a7c15)
	return high ^ low
}

// cell returns the cell of key, making it if there is none.
func (l *Limiter) cell(hash uint64, key string) *local.Cell {
	return l.h.table.FindOrAdd(hash, l.id, key, l.initCell)
}

func (l *Limiter) initCell(c *local.Cell) {
	switch l.Limit().Algorithm {
	case AlgorithmLeakyBucket:
		c.Flow = new(local.Flow)
	case AlgorithmSlidingLog:
		c.Log = local.NewSpendLog(max(1, l.Limit().Period.Nanoseconds()/spendTicksPerWindow))
	}
}

// spendTicksPerWindow is how finely a sliding log is told when tokens were spent: as finely as Redis keeps it.
const spendTicksPerWindow = 500

// domainOf returns what a cell's key fails together with: the Redis server it lives on.
func (h *Hybrid) domainOf(c *local.Cell) *domain { return h.domainFor(c.Owner, c.Key) }

func (h *Hybrid) domainFor(owner uint32, key string) *domain {
	if h.only != nil {
		return h.only
	}
	_, group := remote.KeyName(h.cfg.prefix, h.limiter(owner).name, key)
	return h.domain(remote.Domain{Tag: h.homes.Load()[group]})
}
