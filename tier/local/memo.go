package local

import "encoding/binary"

// A key that lies idle holds no tokens, and all that is worth keeping of it is what Redis was last heard to know: should Redis lose it,
// it can be told. A memo of that is a sixth of a cell, and holds no pointer for the garbage collector to follow.

// memos are those of one shard, whose lock guards them. They lie one behind the other in text; what is forgotten leaves a gap there until
// the gaps are the half of it.
type memos struct {
	at   map[uint64]uint32 // where a memo begins in text, by Cell.Hash: of two keys that collide the later is remembered
	text []byte
	gaps int // bytes
	most int // memos that there were since at was made: a map does not shrink by itself
}

// A memo is one of them, taken apart.
type memo struct {
	owner         uint32
	key           string
	born, version int64
	known         int64 // it is of use until then
	own           Own
	length        int // bytes
}

// compactFrom is how many bytes of gaps are worth the work.
const compactFrom = 4096

func (m *memos) len() int { return len(m.at) }

// keepLocked takes down what c knows. Caller holds c.Mu.
func (m *memos) keepLocked(c *Cell) {
	if len(m.text) > 1<<31 {
		return // more than there can be of keys of a sensible length; to be remembered is not a promise
	}
	if m.at == nil {
		m.at = map[uint64]uint32{}
	}
	m.forget(c.Hash)
	m.at[c.Hash] = uint32(len(m.text))
	for _, v := range [...]uint64{
		uint64(c.Owner), uint64(c.Born), uint64(c.Version), uint64(c.Known), uint64(c.Own.at), uint64(c.Own.cur), uint64(c.Own.prev), uint64(len(c.Key)),
	} {
		m.text = binary.AppendUvarint(m.text, v)
	}
	m.text = append(m.text, c.Key...)
	m.most = max(m.most, len(m.at))
}

// read takes apart the memo that begins at the given place. key is copied only if it is wanted.
func (m *memos) read(at uint32, withKey bool) memo {
	rest := m.text[at:]
	var v [8]uint64
	for i := range v {
		n := 0
		v[i], n = binary.Uvarint(rest)
		rest = rest[n:]
	}
	out := memo{
		owner: uint32(v[0]), born: int64(v[1]), version: int64(v[2]), known: int64(v[3]),
		own:    Own{at: int64(v[4]), cur: int64(v[5]), prev: int64(v[6])},
		length: len(m.text) - int(at) - len(rest) + int(v[7]),
	}
	if withKey {
		out.key = string(rest[:v[7]])
	}
	return out
}

// restore gives c, which is new, what is kept of its key.
func (m *memos) restore(c *Cell) {
	at, ok := m.at[c.Hash]
	if !ok {
		return
	}
	v := m.read(at, true)
	if v.owner != c.Owner || v.key != c.Key {
		return
	}
	c.Born, c.Version, c.Known, c.Own = v.born, v.version, v.known, v.own
	m.forget(c.Hash)
	m.compact()
}

func (m *memos) forget(hash uint64) {
	if at, ok := m.at[hash]; ok {
		m.gaps += m.read(at, false).length
		delete(m.at, hash)
	}
}

// drop forgets one, and reports whether there was any.
func (m *memos) drop() bool {
	for hash := range m.at {
		m.forget(hash)
		m.compact()
		return true
	}
	return false
}

// expire forgets those that are of no use any more.
func (m *memos) expire(now int64) {
	for hash, at := range m.at {
		if v := m.read(at, false); v.known <= now {
			m.gaps += v.length
			delete(m.at, hash)
		}
	}
	m.compact()
}

// compact closes the gaps once they are the half.
func (m *memos) compact() {
	if m.gaps < compactFrom || 2*m.gaps < len(m.text) {
		return
	}
	text := make([]byte, 0, len(m.text)-m.gaps)
	at := m.at
	if 4*len(at) < m.most {
		at = make(map[uint64]uint32, len(at))
		m.most = len(m.at)
	}
	for hash, from := range m.at {
		at[hash] = uint32(len(text))
		text = append(text, m.text[from:int(from)+m.read(from, false).length]...)
	}
	m.at, m.text, m.gaps = at, text, 0
}

// Expire forgets the memos that are of no use after now, in every shard whose number leaves the remainder part by parts.
func (t *Table) Expire(now int64, part, parts int) {
	for i := part; i < len(t.shards); i += parts {
		s := &t.shards[i]
		s.mu.Lock()
		s.memos.expire(now)
		s.mu.Unlock()
	}
}

// Remembered is the number of keys of which there is a memo and no cell.
func (t *Table) Remembered() int {
	n := 0
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		n += s.memos.len()
		s.mu.Unlock()
	}
	return n
}

// EachRemembered calls f for every key of which there is a memo, without holding a lock.
func (t *Table) EachRemembered(f func(owner uint32, key string)) {
	var all []memo
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		all = all[:0]
		for _, at := range s.memos.at {
			all = append(all, s.memos.read(at, true))
		}
		s.mu.Unlock()
		for _, v := range all {
			f(v.owner, v.key)
		}
	}
}
