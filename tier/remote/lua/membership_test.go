package lua_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

// A fleetPair is a membership record on the real thing and in the model.
type fleetPair struct {
	*store
	m      *model.Store
	script *redis.Script
	keys   []string
}

func openFleet(t testing.TB) *fleetPair {
	s := open(t)
	f := &fleetPair{store: s, m: model.New(model.Variant{}), script: s.script(lua.Membership())}
	for _, what := range []string{"beats", "joins", "fleet"} {
		f.keys = append(f.keys, "t1:{7}"+t.Name()+"!"+what)
	}
	return f
}

func (f *fleetPair) lose() {
	f.t.Helper()
	if err := f.rdb.Del(f.ctx, f.keys...).Err(); err != nil {
		f.t.Fatal(err)
	}
	f.m.Flush()
}

// loseSome deletes those of the keys whose bits are set, if that leaves some and there are members.
func (f *fleetPair) loseSome(bits int) bool {
	f.t.Helper()
	if n, err := f.rdb.Exists(f.ctx, f.keys...).Result(); err != nil || n < int64(len(f.keys)) {
		return false
	}
	for i, k := range f.keys {
		if bits>>i&1 == 1 {
			if err := f.rdb.Del(f.ctx, k).Err(); err != nil {
				f.t.Fatal(err)
			}
		}
	}
	f.m.Flush()
	return true
}

type fleetCopy struct {
	dumps []string
	m     model.Snapshot
}

func (f *fleetPair) copy() (c fleetCopy) {
	f.t.Helper()
	for _, k := range f.keys {
		d, err := f.rdb.Dump(f.ctx, k).Result()
		if err != nil {
			f.t.Fatal(err)
		}
		c.dumps = append(c.dumps, d)
	}
	c.m = f.m.Snapshot()
	return c
}

func (f *fleetPair) restore(c fleetCopy) {
	f.t.Helper()
	for i, k := range f.keys {
		if err := f.rdb.RestoreReplace(f.ctx, k, 48*time.Hour, c.dumps[i]).Err(); err != nil {
			f.t.Fatal(err)
		}
	}
	f.m.Restore(c.m)
}

// call runs a heartbeat on both and demands that they agree.
func (f *fleetPair) call(b model.Beat) model.View {
	f.t.Helper()
	out, err := f.run(f.script, f.keys, b.Fence, b.Op, b.ID, b.HeartbeatUS, b.DeadUS, b.HorizonUS, b.Remembered,
		b.Members, b.Least, b.Since)
	if err != nil {
		f.t.Fatal(err)
	}
	want := f.m.Heartbeat(f.now, "d", b)
	if got := view(f.t, out); got != want {
		f.t.Fatalf("at %d they differ\nbeat   %+v\nscript %+v\nmodel  %+v", f.now, b, got, want)
	}
	if b.Op == model.OpPeek || want.Late {
		return want
	}
	for _, k := range f.keys {
		// -2: an empty zset is no key.
		if px, err := f.rdb.PTTL(f.ctx, k).Result(); err != nil || px == -1 || px > 0 && px < 24*time.Hour-time.Minute {
			f.t.Fatalf("%s expires in %v: %v", k, px, err)
		}
	}
	return want
}

// recall is remote.Beat.Recall for the model's types.
func recall(b model.Beat, v model.View) model.Beat {
	r := remote.Beat(b)
	r.Recall(remote.View(v))
	return model.Beat(r)
}

func view(t testing.TB, r []int64) (v model.View) {
	t.Helper()
	if len(r) != lua.MembershipReply {
		t.Fatalf("answer of %d", len(r))
	}
	v.Now, v.Late, v.N, v.Rank, v.Ready = r[0], r[1] == 1, int(r[2]), int(r[3]), r[4] == 1
	d := &v.Darkness
	d.Missing, d.Most, d.Fleet, d.From, d.Until, d.Episode, d.Returned = r[5], r[6], r[7], r[8], r[9], r[10], r[11]
	v.WasMissing, v.Beats, v.LostAt, v.Change, d.Least = r[12] == 1, r[13], r[14], r[15], r[16]
	return v
}

// TestMembershipAgreesWithModel runs a random fleet: members that come, go, fall silent, return, and a server that forgets.
func TestMembershipAgreesWithModel(t *testing.T) {
	r := newRand(seed(t))
	f := openFleet(t)
	const heartbeat = 1_000_000
	remembered := map[string]model.View{}
	silent := map[string]bool{}
	episodes, losses, ghosts := int64(0), 0, 0
	for range *stepsFlag {
		f.now += pick[int64](r, 0, 1, heartbeat/10, heartbeat/10, heartbeat/3, heartbeat/2)
		switch r.IntN(300) {
		case 0:
			f.now += pick[int64](r, 2*heartbeat, 2*heartbeat+1, 8*heartbeat, 100*heartbeat)
		case 1:
			f.now -= pick[int64](r, 1, heartbeat)
		case 2:
			f.lose()
			losses++
		case 3:
			clear(silent)
		case 4:
			if f.loseSome(1 + r.IntN(6)) {
				losses++
			}
		}
		id := fmt.Sprintf("i%d", r.IntN(5))
		if r.IntN(80) == 0 {
			silent[id] = !silent[id]
		}
		if silent[id] {
			continue
		}
		b := model.Beat{Op: model.OpBeat, ID: id, HeartbeatUS: heartbeat, DeadUS: 6 * heartbeat, HorizonUS: pick[int64](r, 5*heartbeat, 5*heartbeat, 9*heartbeat)}
		switch r.IntN(60) {
		case 0:
			b.Op = model.OpLeave
		case 1:
			b.Op = model.OpChange
		case 2, 3, 4:
			b.Op = model.OpPeek
		}
		if r.IntN(2) == 0 {
			b = recall(b, remembered[id])
			if r.IntN(20) == 0 {
				b.Members, b.Least = pick[int64](r, 0, 1, 4, 9), pick[int64](r, 0, 1, 4, 9)
				b.Since = max(0, b.Since-pick[int64](r, 0, heartbeat, 50*heartbeat, 1<<52))
			}
		}
		b.Fence = f.now + pick[int64](r, 0, 1000, -1) - pick[int64](r, 0, f.now+2000)
		b.Fence = max(0, b.Fence)
		v := f.call(b)
		if v.Late {
			continue
		}
		remembered[id] = v
		episodes = max(episodes, v.Darkness.Episode)
		if v.LostAt > 0 && v.Darkness.Missing > 0 {
			ghosts++
		}
	}
	if episodes == 0 {
		t.Error("never dark: the generator is too weak")
	}
	if losses > 3 && ghosts == 0 {
		t.Error("nobody missing after a loss: the generator is too weak")
	}
}

// TestMembershipTypes: whatever lies where the record should be is replaced, and never read.
func TestMembershipTypes(t *testing.T) {
	f := openFleet(t)
	for i, k := range f.keys {
		if err := f.rdb.Set(f.ctx, k, fmt.Sprint(i), 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	b := model.Beat{Op: model.OpBeat, ID: "a", HeartbeatUS: 1_000_000, DeadUS: 6_000_000, HorizonUS: 5_000_000}
	if v := f.call(b); v.N != 1 || v.Rank != 0 || !v.Ready {
		t.Errorf("%+v", v)
	}
	for _, k := range f.keys {
		if err := errors.Join(f.rdb.Del(f.ctx, k).Err(), f.rdb.RPush(f.ctx, k, "x").Err()); err != nil {
			t.Fatal(err)
		}
	}
	f.m.Flush()
	b.Op = model.OpPeek // what an instance that lost touch sends first
	if v := f.call(b); v.N != 0 {
		t.Errorf("a look: %+v", v)
	}
	b.Op = model.OpBeat
	f.call(b)
	if err := f.rdb.Persist(f.ctx, f.keys[2]).Err(); err != nil {
		t.Fatal(err)
	}
	f.now++
	f.call(b) // looks at the times to live
}

// TestPartOfTheRecord: a record of which some keys were evicted is lost as a whole: all members are known again once each has
// beaten, none is counted twice, and nobody is missing.
func TestPartOfTheRecord(t *testing.T) {
	for bits := 1; bits < 7; bits++ {
		t.Run(fmt.Sprintf("%03b", bits), func(t *testing.T) {
			f := openFleet(t)
			heard := map[string]model.View{}
			round := func() (v model.View) {
				for _, id := range []string{"a", "b", "c", "d"} {
					f.now += 200_000
					b := model.Beat{Op: model.OpBeat, ID: id, HeartbeatUS: 1_000_000, DeadUS: 30_000_000, HorizonUS: 5_000_000}
					v = f.call(recall(b, heard[id]))
					heard[id] = v
				}
				return v
			}
			for range 3 {
				round()
			}
			if !f.loseSome(bits) {
				t.Fatal("there was no record")
			}
			if v := round(); v.LostAt == 0 || v.N != 4 || v.Darkness.Missing != 0 {
				t.Errorf("after all have beaten: %+v", v)
			}
			if v := round(); v.N != 4 || v.Darkness.Missing != 0 {
				t.Errorf("a round later: %+v", v)
			}
		})
	}
}

// TestMembershipFaults: what is not a message is refused before anything is written.
func TestMembershipFaults(t *testing.T) {
	f := openFleet(t)
	good := []any{0, "beat", "a", 1_000_000, 6_000_000, 5_000_000, 0, 0, 0, 0}
	for i, bad := range map[int]any{0: "x", 1: "beet", 3: "1.5", 4: -1, 5: "9007199254740992", 6: "nan", 7: -1, 8: "", 9: "1e99"} {
		args := append([]any(nil), good...)
		args[i] = bad
		if _, err := f.run(f.script, f.keys, args...); !isFault(err) {
			t.Errorf("argument %d = %v: %v", i+1, bad, err)
		}
	}
	if _, err := f.run(f.script, f.keys, good[:9]...); !isFault(err) {
		t.Errorf("9 arguments: %v", err)
	}
	if n := f.rdb.Exists(f.ctx, f.keys...).Val(); n != 0 {
		t.Errorf("%d keys were written", n)
	}
}

// Shares sum to the limit only among members that know of each other: one that was heard has not yet heard of who joined. Its
// next beat tells which answer it has.
func TestReadyWaitsForAcknowledgement(t *testing.T) {
	f := openFleet(t)
	plain := model.New(model.Variant{Unheard: true})
	beat := func(id string, remembered int64) (v, p model.View) {
		b := model.Beat{Op: model.OpBeat, ID: id, HeartbeatUS: 1_000_000, DeadUS: 6_000_000, HorizonUS: 5_000_000, Remembered: remembered}
		f.now += 100_000
		return f.call(b), plain.Heartbeat(f.now, "d", b)
	}
	a, _ := beat("a", 0)
	if !a.Ready || a.N != 1 {
		t.Fatalf("alone: %+v", a)
	}
	b, _ := beat("b", 0)
	if b.Ready || b.N != 2 || b.Rank != 1 {
		t.Errorf("a has not heard of b: %+v", b)
	}
	again, _ := beat("a", a.Beats) // its answer is lost
	if !again.Ready {
		t.Errorf("a makes room for nobody: %+v", again)
	}
	b, p := beat("b", b.Beats)
	if b.Ready || b.Darkness.Fleet != 1 || !p.Ready {
		t.Errorf("a was heard, and may know nothing of b: %+v; plain %+v", b, p)
	}
	beat("a", again.Beats)
	if b, _ = beat("b", b.Beats); !b.Ready || b.Darkness.Fleet != 2 {
		t.Errorf("a knows of b: %+v", b)
	}
	// What a remembers of a lost record acknowledges nothing.
	f.lose()
	plain.Flush()
	c, _ := beat("c", 0)
	beat("a", 1000)
	if c, _ = beat("c", c.Beats); c.Ready {
		t.Errorf("a has not heard of c: %+v", c)
	}
}

// TestLargeFleet: the acknowledgements of many members are not looked at with each beat, and are known soon all the same; as long as
// one member may not know of another, that one is not ready.
func TestLargeFleet(t *testing.T) {
	const members = 200
	f := openFleet(t)
	views := make([]model.View, members+1)
	beat := func(i int) model.View {
		f.now += 1000
		b := model.Beat{Op: model.OpBeat, ID: fmt.Sprint(i), HeartbeatUS: 1_000_000, DeadUS: 6_000_000, HorizonUS: 5_000_000}
		views[i] = f.call(recall(b, views[i]))
		return views[i]
	}
	ready := func(who int) (n int) {
		for i := range who {
			if beat(i).Ready {
				n++
			}
		}
		return n
	}
	for range 3 { // join, hear of those who joined after, say so
		ready(members)
	}
	if n := ready(members); n != members {
		t.Errorf("%d of %d are ready, and all know of all", n, members)
	}
	last := beat(members)
	for range 3 { // all but the first beat
		for i := 1; i <= members; i++ {
			last = beat(i)
		}
	}
	if last.Ready {
		t.Error("the last is ready, and the first has not heard of it")
	}
	if !views[1].Ready {
		t.Error("who had joined before is not ready any more")
	}
	beat(0)
	beat(0)
	ready(members + 1)
	if n := ready(members + 1); n != members+1 {
		t.Errorf("%d are ready, want all", n)
	}
}

// TestGhosts: who was there before a loss and was not heard since counts as missing, on the fleet that somebody remembers.
func TestGhosts(t *testing.T) {
	const second = 1_000_000
	f := openFleet(t)
	plain := model.New(model.Variant{NoRecall: true})
	last := map[string]model.View{}
	beat := func(id string) (v, p model.View) {
		f.t.Helper()
		b := recall(model.Beat{Op: model.OpBeat, ID: id, HeartbeatUS: second, DeadUS: 6 * second, HorizonUS: 5 * second}, last[id])
		p = plain.Heartbeat(f.now, "d", b)
		v = f.call(b)
		last[id] = v
		return v, p
	}
	together := func() {
		for range 4 {
			f.now += second
			for _, id := range []string{"a", "b", "c", "d"} {
				beat(id)
			}
		}
	}
	together()
	if v := last["a"]; !v.Ready || v.N != 4 || v.Darkness.Fleet != 4 {
		t.Fatalf("%+v", v)
	}
	heard := f.now
	lose := func(after int64) {
		f.now += after
		f.lose()
		plain.Flush()
	}

	lose(10 * second)
	v, p := beat("a")
	if d := v.Darkness; v.N != 4 || v.Ready || d.Missing != 3 || d.Fleet != 4 || d.Most != 4 || d.From != heard || d.Until != f.now || !v.WasMissing || d.Returned != 1 {
		t.Errorf("the first back: %+v", v)
	}
	if p.N != 1 || p.Darkness.Missing != 0 {
		t.Errorf("the plain variant: %+v", p)
	}
	f.now += second
	if v, _ = beat("new"); v.N != 5 || v.Darkness.Missing != 3 {
		t.Errorf("who joined since is no ghost: %+v", v)
	}
	if v, _ = beat("b"); v.N != 5 || v.Darkness.Missing != 2 || v.Darkness.Returned != 2 || !v.WasMissing {
		t.Errorf("the second back: %+v", v)
	}
	// Lost again: who has returned knows of the ghosts.
	lose(second)
	if v, _ = beat("b"); v.N != 5 || v.Darkness.Missing != 4 || v.Darkness.From != heard {
		t.Errorf("lost again: %+v", v)
	}
	for range 5 {
		f.now += second
		for _, id := range []string{"a", "b", "new"} {
			v, _ = beat(id)
		}
		if v.N != 5 || v.Darkness.Missing != 2 || v.Ready {
			t.Errorf("two are missing: %+v", v)
		}
	}
	f.now += second
	beat("a")
	beat("b")
	if v, _ = beat("new"); v.N != 3 || v.Darkness.Missing != 0 || !v.Ready {
		t.Errorf("the ghosts are forgotten: %+v", v)
	}

	// In a fleet that is in touch nobody comes back from missing.
	last["c"], last["d"] = model.View{}, model.View{}
	for range 10 {
		together()
	}
	lose(second / 2)
	for i, id := range []string{"d", "c", "b", "a"} {
		if v, _ = beat(id); v.WasMissing || v.Darkness.Missing != int64(3-i) || v.Darkness.Returned != 0 {
			t.Errorf("%d: %+v", i, v)
		}
	}
	// A replica without the last beats: all are in its record.
	together()
	copied := f.copy()
	f.now += second / 2
	beat("a")
	beat("b")
	f.restore(copied)
	f.now += second / 10
	if v, _ = beat("b"); v.LostAt != f.now || v.Darkness.Missing != 0 || v.N != 4 {
		t.Errorf("rolled back: %+v", v)
	}
}

// A stale record that a new instance began: who was heard before it proves the loss, however many beats it has by now.
func TestLossIsProvenByTheTime(t *testing.T) {
	const second = 1_000_000
	f := openFleet(t)
	b := model.Beat{Op: model.OpBeat, ID: "a", HeartbeatUS: second, DeadUS: 6 * second, HorizonUS: 5 * second}
	f.call(b)
	old := f.call(b)
	f.now++
	f.lose()
	b.ID = "new"
	for range 9 {
		f.now += second
		f.call(b)
	}
	b.ID = "a"
	old.N = 3 // as if two more had been there
	if v := f.call(recall(b, old)); v.LostAt != f.now || v.N != 4 || v.Darkness.Missing != 2 || v.Darkness.Fleet != 1 {
		t.Errorf("%+v", v)
	}
}

// TestFleetGrowsAfterDarkness: a darkness that a small fleet had is remembered for days; what is set aside for one of twenty that
// goes missing meanwhile is a twentieth.
func TestFleetGrowsAfterDarkness(t *testing.T) {
	const (
		second = 1_000_000
		limit  = 1000
		want   = limit * 19 / 20
	)
	f, p := openFleet(t), openPair(t)
	last := map[string]model.View{}
	beat := func(id string) model.View {
		b := model.Beat{Op: model.OpBeat, ID: id, HeartbeatUS: second, DeadUS: 30 * second, HorizonUS: 2 * 86_400 * second}
		last[id] = f.call(recall(b, last[id]))
		return last[id]
	}
	beats := func(rounds, members int) (v model.View) {
		for range rounds {
			f.now += second
			for i := range members {
				v = beat(fmt.Sprintf("m%d", i))
			}
		}
		return v
	}
	beats(3, 2)
	beat("crashes")
	beats(2, 2)
	if v := beats(40, 2); v.Darkness.Until == 0 || v.Darkness.Missing != 0 || v.Darkness.Fleet != 2 || v.Darkness.Least > 3 {
		t.Fatalf("two, and one forgotten: %+v", v)
	}
	f.now += second
	for i := range 20 {
		if v := beat(fmt.Sprintf("m%d", i)); v.Darkness.Fleet > 3 {
			t.Fatalf("not all have heard of all: %+v", v)
		}
	}
	if v := beats(2, 20); v.N != 20 || v.Darkness.Fleet != 20 || v.Darkness.Least > 3 || !v.Ready {
		t.Fatalf("twenty: %+v", v)
	}
	v := beats(4, 19)
	if d := v.Darkness; d.Missing != 1 || d.Fleet != 20 || d.Least > 3 || d.Until != f.now {
		t.Fatalf("one of twenty is missing: %+v", d)
	}
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		a := tier.Ask{Key: p.keyName(int(alg)), Limit: micro(alg, limit, second, limit), SlotUS: slot, Need: []tier.Cost{{N: 1, Count: 2 * limit}}}
		p.at((f.now/second + 1) * second)
		d := v.Darkness
		d.Until = p.now
		sum := int64(0)
		for i := range 401 {
			if i == 201 {
				sum = 0 // of the second second, by when the burst is gone
			}
			_, g := p.exchange(0, d, a)
			sum += g[0].Served
			p.at(p.now + second/200)
			if i%100 == 99 {
				d.Until = p.now
			}
		}
		if sum < want-want/50 || sum > want {
			t.Errorf("algorithm %d: %d in a second, want %d", alg, sum, want)
		}
	}
}

// TestForgottenMemberGoesByItsOldView: who was forgotten and joins again may not have heard the answer.
func TestForgottenMemberGoesByItsOldView(t *testing.T) {
	const second = 1_000_000
	f := openFleet(t)
	last := map[string]model.View{}
	beat := func(id string) model.View {
		b := model.Beat{Op: model.OpBeat, ID: id, HeartbeatUS: second, DeadUS: 6 * second, HorizonUS: 5 * second}
		return f.call(recall(b, last[id]))
	}
	beats := func(rounds int, ids ...string) {
		for range rounds {
			f.now += second
			for _, id := range ids {
				last[id] = beat(id)
			}
		}
	}
	beats(3, "a", "b")
	beats(30, "a", "c", "d", "e", "f")
	if v := last["a"]; v.N != 5 || v.Darkness.Fleet != 5 {
		t.Fatalf("%+v", v)
	}
	beat("b") // the answer is lost
	for range 4 {
		beats(1, "a", "c", "d", "e", "f")
	}
	if v := last["a"]; v.N != 6 || v.Darkness.Missing != 1 || v.Darkness.Fleet != 2 {
		t.Errorf("b goes by a fleet of two: %+v", v)
	}
	beats(3, "a", "b", "c", "d", "e", "f")
	if v := last["a"]; v.Darkness.Missing != 0 || v.Darkness.Fleet != 6 || v.Darkness.Least != 2 {
		t.Errorf("b knows of the others: %+v", v)
	}
}
