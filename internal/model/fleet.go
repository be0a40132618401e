package model

import (
	"maps"
	"slices"

	"github.com/tierlimit/tierlimit/tier"
)

// What a heartbeat call does; as in package remote.
const (
	OpBeat   = "beat"
	OpPeek   = "peek"
	OpLeave  = "leave"
	OpChange = "change"
)

// A Beat is one instance's message to the membership record of a domain. It converts to and from remote.Beat.
type Beat struct {
	Fence       int64
	Op          string
	ID          string
	HeartbeatUS int64
	DeadUS      int64
	HorizonUS   int64
	Remembered  int64
	Members     int64
	Least       int64
	Since       int64
}

// A View is what the membership record says. It converts to and from remote.View.
type View struct {
	Now        int64
	Late       bool
	N          int
	Rank       int
	Ready      bool
	Darkness   tier.Darkness
	WasMissing bool
	Beats      int64
	LostAt     int64
	Change     int64
}

const day = 24 * 3600 * 1_000_000

// fleet is the membership record of a domain.
type fleet struct {
	expires int64
	beats   map[string]int64 // when each member was last heard
	joins   map[string]int64 // the number of the beat with which it joined
	acks    map[string]int64 // the number of a beat up to whose answer it can hold no older view
	acked   int64            // no ack is less, as of when they were last looked at
	lostNo  int64            // number of the beat that proved the last loss

	made     int64 // when the record was begun
	expected int64 // members before the last loss, 0 once that is long ago
	came     int64 // how many of them are members again, or were not lost

	count   int64 // beats so far
	last    int64 // when the last beat came, 0 for never
	up      int64 // since when beats have come without a gap
	lostAt  int64
	change  int64
	horizon int64

	dark tier.Darkness // Missing is not kept
}

func (f *fleet) clone() *fleet {
	c := *f
	c.beats, c.joins, c.acks = maps.Clone(f.beats), maps.Clone(f.joins), maps.Clone(f.acks)
	return &c
}

// ghosts is the number of members before the last loss that were not heard since: they may be using their shares.
func (f *fleet) ghosts() int64 { return max(0, f.expected-f.came) }

// silent is the number of members not heard since t.
func (f *fleet) silent(t int64) (n int64) {
	for _, at := range f.beats {
		if at < t {
			n++
		}
	}
	return n
}

// oldest is when the member was heard that has been silent longest.
func (f *fleet) oldest(otherwise int64) int64 {
	at := otherwise
	for i, b := range slices.Sorted(maps.Values(f.beats)) {
		if i == 0 {
			at = b
		}
	}
	return at
}

// remove forgets a member.
func (f *fleet) remove(id string) {
	delete(f.beats, id)
	delete(f.joins, id)
	delete(f.acks, id)
}

// In a fleet of more than so many members the acknowledgements are not looked at with each beat, but so that it comes to so many.
const lookedAt = 64

// heard reports whether all members but one are known to have heard the answer to beat n or to a later one.
func (f *fleet) heard(n int64, but string) bool {
	if members := int64(len(f.beats)); members > lookedAt && f.count%(members/lookedAt) > 0 {
		return f.acked >= n
	}
	f.acked = slices.Min(slices.Collect(maps.Values(f.acks)))
	for id := range f.beats {
		if id != but && f.acks[id] < n {
			return false
		}
	}
	return true
}

func (f *fleet) rank(id string) int {
	mine, ok := f.joins[id]
	if !ok {
		return -1
	}
	rank := 0
	for _, at := range f.joins {
		if at < mine {
			rank++
		}
	}
	return rank
}

// Heartbeat runs one membership call for the domain at server time now.
func (s *Store) Heartbeat(now int64, domain string, b Beat) View {
	v := View{Now: now, Rank: -1}
	if b.Fence > 0 && now > b.Fence && !s.Variant.NoFence {
		v.Late = true
		return v
	}
	f := s.fleets[domain]
	if f != nil && now >= f.expires {
		f = nil
	}
	if f == nil {
		f = &fleet{made: now, beats: map[string]int64{}, joins: map[string]int64{}, acks: map[string]int64{}}
		if b.Op != OpPeek {
			s.fleets[domain] = f
		}
	}
	d := 2 * b.HeartbeatUS
	missing := f.silent(now-d) + f.ghosts()
	switch b.Op {
	case OpLeave:
		f.remove(b.ID)
		f.dark.Fleet = min(f.dark.Fleet, int64(len(f.beats))+f.ghosts())
		missing = f.silent(now-d) + f.ghosts()
	case OpChange:
		f.change++
	case OpBeat:
		if s.Variant.Unheard {
			b.Remembered = f.count + 1
		}
		if s.Variant.NoRecall {
			b.Members = 0
		}
		missing = f.beat(now, d, &b, &v)
	}
	if b.Op != OpPeek {
		f.horizon = max(f.horizon, b.HorizonUS)
		f.expires = now + min(max(day, 2*f.horizon), 3650*day)
	}
	v.N, v.Rank = len(f.beats)+int(f.ghosts()), f.rank(b.ID)
	if b.Op == OpBeat {
		// Everybody else has a view in which this one is.
		v.Ready = f.heard(f.joins[b.ID], b.ID) && f.ghosts() == 0
	}
	v.Darkness = f.dark
	v.Darkness.Missing = missing
	v.Beats, v.LostAt, v.Change = f.count, f.lostAt, f.change
	return v
}

// beat records a sign of life and returns the number of members missing after it.
func (f *fleet) beat(now, d int64, b *Beat, v *View) int64 {
	f.horizon = max(f.horizon, b.HorizonUS)
	_, known := f.beats[b.ID]
	returns := b.Remembered > 0 && !known
	elsewhere := b.Members > 0 && f.expected == 0 && f.made > b.Since // it was heard before this record was begun
	lost := b.Remembered > 0 && f.count < b.Remembered || returns && elsewhere
	if lost {
		f.lostAt, f.count = now, max(f.count, b.Remembered)
		f.lostNo = f.count + 1
		if f.made <= b.Since { // a rolled back record: who is in it is no ghost
			f.came = int64(len(f.beats))
		}
	}
	if returns {
		f.came++
	}
	recalls := b.Members > 0 && (lost || returns && f.expected > 0)
	if recalls {
		f.expected = max(f.expected, b.Members)
	}
	f.count++
	if f.last == 0 || now-f.last > d {
		f.up = now
	}
	f.last = now
	if now-f.up >= b.DeadUS {
		// While the server was away nobody could be heard, so that nobody is dead.
		for id, at := range f.beats {
			if at < now-b.DeadUS {
				f.remove(id)
			}
		}
		if now-f.lostAt >= b.DeadUS {
			f.expected = 0
		}
	}
	before := f.silent(now-d) + f.ghosts()
	begin := f.oldest(now) + d
	switch {
	case recalls:
		begin = min(begin, b.Since)
	case f.ghosts() > 0:
		begin = min(begin, f.dark.From)
	}
	at, member := f.beats[b.ID]
	v.WasMissing = member && at < now-d
	if recalls && returns && b.Since < now-d {
		v.WasMissing = true
		before++
	}
	f.beats[b.ID] = now
	if !member {
		for _, j := range f.joins {
			f.count = max(f.count, j+1)
		}
		f.joins[b.ID] = f.count
		switch {
		case b.Remembered == 0: // it will hear of all that joined before
			f.acks[b.ID] = f.count - 1
		case b.Remembered >= f.lostNo: // it was forgotten, and may go by what it heard before that
			f.acks[b.ID] = b.Remembered
		default: // it goes by another record
			f.acks[b.ID] = 0
		}
		f.acked = min(f.acked, f.acks[b.ID])
	} else if b.Remembered >= f.joins[b.ID] {
		f.acks[b.ID] = b.Remembered
	}
	missing := f.silent(now-d) + f.ghosts()
	dark := &f.dark

	// On how many members a share may be based.
	all := int64(len(f.beats)) + f.ghosts()
	if dark.Fleet == 0 {
		dark.Fleet = all
	}
	dark.Fleet = min(dark.Fleet, all)
	if recalls {
		dark.Fleet = max(1, min(dark.Fleet, b.Least))
	}
	if !member && b.Remembered > 0 && b.Members > 0 { // it may still go by what it heard then
		dark.Fleet = min(dark.Fleet, b.Members)
	}
	if max(before, missing) == 0 && f.heard(max(f.lostNo, slices.Max(slices.Collect(maps.Values(f.joins)))), "") {
		dark.Fleet = all // as all members know
	}

	remembered := dark.Until > 0 && now-dark.Until <= f.horizon
	if n := max(before, missing); n > 0 {
		if remembered {
			dark.Most = max(dark.Most, n)
			dark.From = min(dark.From, begin)
			dark.Least = min(dark.Least, dark.Fleet)
		} else {
			dark.Episode = max(dark.Episode+1, now)
			dark.Most, dark.From, dark.Returned, dark.Least = n, begin, 0, dark.Fleet
		}
		dark.Until = now
	} else if !remembered {
		dark.Least = dark.Fleet
	}
	if v.WasMissing {
		dark.Returned++
	}
	return missing
}
