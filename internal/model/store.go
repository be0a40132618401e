package model

import (
	"maps"

	"github.com/tierlimit/tierlimit/tier"
)

// A Variant switches rules of the protocol off. The zero value is the protocol.
type Variant struct {
	NoDiscard    bool // buckets: refill is credited as if nothing had been outstanding meanwhile
	NoRollover   bool // buckets: the discard is applied only when a call comes, not at each rollover
	LateReturns  bool // commits, carries and returns are taken whatever became of their slot
	NoTie        bool // windows: a lease lives for one slot instead of dying with its window
	NoStretch    bool // log: a lease's tokens leave as if they had been spent when they were granted
	NoFence      bool // calls run however late they come
	NoDarkness   bool // nothing is reserved for missing members
	KeepsCarry   bool // buckets and logs: a lease that is carried is renewed however little the present may hold
	NoMemory     bool // only the members missing now are reserved for: what came before this call is forgotten
	LossForgiven bool // a refuted claim is noticed but nothing is re-seeded
	FreshFull    bool // buckets: a key that is not stored has all that the darkness left at its end, however long it lasted
	Unheard      bool // membership: a member that was heard since another joined counts as having heard of it
	NoRecall     bool // membership: what a beat says of a lost record's members is ignored
}

// A Store is what one Redis server keeps.
type Store struct {
	Variant Variant
	keys    map[string]*entry
	fleets  map[string]*fleet
}

// New returns an empty Store.
func New(v Variant) *Store {
	return &Store{Variant: v, keys: map[string]*entry{}, fleets: map[string]*fleet{}}
}

// An entry is one key. Only one of the parts below common is used.
type entry struct {
	alg tier.Algorithm
	common
	bucket bucket
	window window
	log    log
}

// common is what every algorithm keeps.
type common struct {
	born, version int64
	expires       int64 // the key is gone from then on
	lost          bool
	aend, ac, ap  int64 // activity: end of the slot, instances in it, instances in the one before
	episode, rep  int64
	returned      int64 // the most returns in the episode that an exchange knew of
}

func (e *entry) clone() *entry {
	c := *e
	c.window.count = append([]int64(nil), e.window.count...)
	c.log.ticks = maps.Clone(e.log.ticks)
	return &c
}

// A Snapshot is what a Store held at one moment.
type Snapshot struct {
	keys   map[string]*entry
	fleets map[string]*fleet
}

// Snapshot returns a copy of everything: what a replica has.
func (s *Store) Snapshot() Snapshot {
	c := Snapshot{keys: map[string]*entry{}, fleets: map[string]*fleet{}}
	for k, e := range s.keys {
		c.keys[k] = e.clone()
	}
	for k, f := range s.fleets {
		c.fleets[k] = f.clone()
	}
	return c
}

// Restore makes the Store hold what it held when c was taken: a replica was promoted.
func (s *Store) Restore(c Snapshot) {
	t := Store{keys: c.keys, fleets: c.fleets}
	c = t.Snapshot()
	s.keys, s.fleets = c.keys, c.fleets
}

// Flush forgets everything.
func (s *Store) Flush() {
	clear(s.keys)
	clear(s.fleets)
}

// Delete forgets one key.
func (s *Store) Delete(key string) { delete(s.keys, key) }

// TTL returns for how long key is remembered, in µs; 0 when there is no such key.
func (s *Store) TTL(now int64, key string) int64 {
	if e := s.keys[key]; e != nil && now < e.expires {
		return e.expires - now
	}
	return 0
}

// Exchange runs one exchange at server time now; see package lua for the protocol. Asks are taken to be valid.
func (s *Store) Exchange(now int64, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) (late bool, grants []tier.Grant) {
	if fence > 0 && now > fence && !s.Variant.NoFence {
		return true, nil
	}
	if s.Variant.NoDarkness {
		dark = tier.Darkness{}
	}
	if s.Variant.NoMemory {
		dark.Most, dark.From, dark.Until = dark.Missing, 0, 0
	}
	for i := range asks {
		grants = append(grants, s.one(now, alg, &dark, &asks[i]))
	}
	return false, grants
}

// call is one key's part of one exchange.
type call struct {
	*entry
	v    *Variant
	now  int64
	dark *tier.Darkness
	ask  *tier.Ask
	g    tier.Grant
	room int64 // for the retry-after: the cost that did not pass, or 1
}

// claim says what became of what the caller knew.
type claim int

const (
	fresh    claim = iota // no such key, and the caller knew of none
	kept                  // as the caller knew it, or it knew of none
	created               // no such key, but the caller knew of one
	replaced              // another key than the caller knew
	reverted              // the same key with fewer grants than the caller knew of
)

func (s *Store) one(now int64, alg tier.Algorithm, dark *tier.Darkness, ask *tier.Ask) tier.Grant {
	e := s.keys[ask.Key]
	if e != nil && (now >= e.expires || e.alg != alg) {
		e = nil
	}
	what := kept
	switch {
	case e == nil && ask.Born > 0:
		what = created
	case e == nil:
		what = fresh
	case ask.Born > 0 && ask.Born != e.born:
		what = replaced
	case ask.Born > 0 && ask.Version > e.version:
		what = reverted
	}
	if e == nil {
		e = &entry{alg: alg, common: common{born: now}}
		s.keys[ask.Key] = e
	}
	if what == reverted {
		e.born, e.version = now, ask.Version
	}
	c := call{entry: e, v: &s.Variant, now: now, dark: dark, ask: ask}
	c.g.Lost = what >= created
	c.countActive()
	c.countEpisode()
	if s.Variant.LossForgiven && what >= created {
		if what == created {
			what = fresh
		} else {
			what = kept
		}
	}
	var ttl int64
	switch alg {
	case tier.TokenBucket, tier.LeakyBucket:
		ttl = c.exchangeBucket(what)
	case tier.FixedWindow:
		ttl = c.exchangeFixed(what)
	case tier.SlidingWindow:
		ttl = c.exchangeSliding(what)
	case tier.SlidingLog:
		ttl = c.exchangeLog(what)
	}
	if c.g.Served+c.g.Lease > 0 {
		e.version++
	}
	e.expires = max(e.expires, now+min(ttl, 20*year)) // never sooner: instances hold claims until then
	c.g.TTLUS = e.expires - now
	c.g.Active = max(e.ac, e.ap, 1)
	c.g.Activity = e.aend
	c.g.Born, c.g.Version = e.born, e.version
	return c.g
}

// countActive counts the instances that exchange this key, by slots of the caller's length.
func (c *call) countActive() {
	s := c.ask.SlotUS
	if c.now >= c.aend || c.aend-c.now > s {
		c.ap = 0
		if c.now < c.aend+s {
			c.ap = c.ac
		}
		c.aend, c.ac = c.now+s, 0
	}
	if c.ask.Seen != c.aend {
		c.ac++
	}
}

// countEpisode counts the members that came back and have told this key what their share admitted.
func (c *call) countEpisode() {
	if c.episode != c.dark.Episode {
		c.episode, c.rep, c.returned = c.dark.Episode, 0, 0
	}
	c.returned = max(c.returned, c.dark.Returned)
	if c.ask.Back {
		c.rep++
	}
}

// spared is what of a window's limit is left without the shares of who is missing, and of who came back and has not told this
// key what its share admitted.
func (c *call) spared(limit int64) int64 {
	d := c.dark
	missing := limit - tier.Reserved(limit, d.Missing, d.Fleet)
	back := limit - tier.Reserved(limit, max(0, c.returned-c.rep), d.Least)
	return max(0, limit-missing-back)
}

// need serves the callers who wait, from room, and notes the largest cost that did not pass.
func (c *call) need(room int64) (served int64) {
	c.room = 0
	for _, n := range c.ask.Need {
		k := n.Count
		if n.N > 0 {
			k = min(k, (room-served)/n.N)
		}
		served += k * n.N
		if k < n.Count {
			c.room = max(c.room, n.N)
		}
	}
	if c.room == 0 {
		c.room = 1
	}
	c.g.Served = served
	return served
}

// lease gives out an equal part of room, but a hundredth of the capacity, and what is wanted whole, undivided.
func (c *call) lease(room int64) int64 {
	part := max(room/max(c.ac, c.ap, 1), min(room, c.ask.Limit.Capacity()/100))
	if c.ask.Whole {
		part = room
	}
	c.g.Lease = max(0, min(c.ask.Want, part))
	return c.g.Lease
}
