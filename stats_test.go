package tierlimit

import (
	"testing"

	"github.com/tierlimit/tierlimit/tier/remote"
)

// What Stats says of several servers does not depend on the order in which a map yields them.
func TestStatsOfSeveralServers(t *testing.T) {
	h, err := NewLocal()
	if err != nil {
		t.Fatal(err)
	}
	if s := h.Stats(); s.State != StateOnline || s.Breaker != "closed" || s.Instances != 1 || s.Rank != 0 {
		t.Errorf("without Redis: %+v", s)
	}
	for i, view := range []remote.View{{N: 2, Rank: 1}, {N: 3, Rank: 0}, {N: 3, Rank: 2}, {N: 1, Rank: -1}} {
		d := newDomain(h, remote.Domain{Tag: uint8(i)})
		d.m.view, d.m.viewed = view, 1
		d.m.view.Darkness.Missing = int64(i % 3)
		if i == 0 {
			d.m.away, d.m.alive = 1, h.now() // silent
		}
		h.domains[d.tag] = d
	}
	for range 50 {
		if s := h.Stats(); s.State != StateSilent || s.Breaker != "closed" || s.Instances != 3 || s.Missing != 2 || s.Rank != 2 {
			t.Fatalf("%+v", s)
		}
	}
	clear(h.domains)
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
