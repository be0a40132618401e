package remote

import (
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier"
)

func TestRecall(t *testing.T) {
	v := View{Now: 1000, N: 4, Rank: 2, Beats: 77, Darkness: tier.Darkness{Fleet: 4, From: 100, Until: 900, Least: 3}}
	for _, c := range []struct {
		name           string
		horizon, until int64
		from, since    int64
	}{
		{"never dark", 50, 0, 0, 1000},
		{"dark now", 50, 1000, 100, 100},
		{"remembered", 50, 950, 100, 100},
		{"over", 50, 949, 100, 1000},
		{"begins later", 50, 1000, 1200, 1000},
	} {
		v.Darkness.From, v.Darkness.Until = c.from, c.until
		b := Beat{Op: OpBeat, ID: "me", HorizonUS: c.horizon}
		b.Recall(v)
		if want := (Beat{Op: OpBeat, ID: "me", HorizonUS: c.horizon, Remembered: 77, Members: 4, Least: 3, Since: c.since}); b != want {
			t.Errorf("%s: %+v", c.name, b)
		}
	}
	b := Beat{Op: OpBeat}
	if b.Recall(View{}); b != (Beat{Op: OpBeat}) {
		t.Errorf("of nothing: %+v", b)
	}
}

// An emptied server is told by the first to return how many there were.
func TestRecallAfterALoss(t *testing.T) {
	s := redistest.Start(t)
	c := New(stock(t, s.Addr()), prefix)
	ctx := patience(t, 20*time.Second)
	last := map[string]View{}
	beat := func(id string) View {
		t.Helper()
		b := Beat{Op: OpBeat, ID: id, HeartbeatUS: 1e6, DeadUS: 30e6, HorizonUS: 5e6}
		b.Recall(last[id])
		v, err := c.Heartbeat(ctx, Domain{}, b)
		ok(t, err)
		last[id] = v
		return v
	}
	for range 4 {
		beat("a")
		beat("b")
		beat("c")
	}
	if v := last["c"]; v.N != 3 || !v.Ready || v.Darkness.Fleet != 3 {
		t.Fatalf("before: %+v", v)
	}
	heard := last["b"].Now
	ok(t, s.FlushAll(ctx))
	if v := beat("b"); v.LostAt != v.Now || v.N != 3 || v.Rank != 0 || v.Ready || v.Darkness.Missing != 2 || v.Darkness.Fleet != 3 || v.Darkness.From != heard {
		t.Errorf("the first back: %+v", v)
	}
	if v := beat("a"); v.N != 3 || v.Rank != 1 || v.Darkness.Missing != 1 {
		t.Errorf("the second back: %+v", v)
	}
	if v := beat("c"); v.N != 3 || v.Rank != 2 || v.Darkness.Missing != 0 || v.LostAt == 0 {
		t.Errorf("all back: %+v", v)
	}
}
