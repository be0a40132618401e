package tierlimit_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier/remote"
)

func inState(h *tierlimit.Hybrid, want tierlimit.State) func() bool {
	return func() bool { return h.Stats().State == want }
}

func fleetOf(n int, hs ...*tierlimit.Hybrid) func() bool {
	return func() bool {
		return !slices.ContainsFunc(hs, func(h *tierlimit.Hybrid) bool {
			s := h.Stats()
			return s.State != tierlimit.StateOnline || s.Instances != n
		})
	}
}

// X was away once and tells a key so only in a later darkness, in which it was not missing: then nobody keeps Y's share aside.
func TestStaleBack(t *testing.T) {
	t.Parallel()
	j := newJury(t)
	var all cases
	for _, touched := range []bool{true, false} {
		for round := range 3 {
			all.add(fmt.Sprintf("touched=%t/%d", touched, round), func(t *testing.T) { staleBack(t, j, touched) })
		}
	}
	all.run(t, 6)
}

func staleBack(t *testing.T, j *jury, touched bool) {
	server := redistest.Start(t)
	prefix := ownPrefix(t)
	const window = 3 * time.Second
	var ls []*tierlimit.Limiter
	var hs []*tierlimit.Hybrid
	var ps []*redistest.Proxy
	for range 3 {
		p := redistest.StartProxy(t, server.Addr())
		rdb := redis.NewClient(p.Options())
		t.Cleanup(func() { _ = rdb.Close() })
		h := hybridOn(t, rdb, prefix, tierlimit.WithInstances(3), tierlimit.WithHeartbeat(200*time.Millisecond), tierlimit.WithRemoteTimeout(200*time.Millisecond), tierlimit.WithLeaseTTL(100*time.Millisecond),
			tierlimit.WithBreaker(breaker.Settings{Failures: 2, Cooldown: 50 * time.Millisecond}), tierlimit.WithLocalShare(0))
		l, err := h.Limiter("l", tierlimit.FixedWindow(90, window))
		if err != nil {
			t.Fatal(err)
		}
		ls, hs, ps = append(ls, l), append(hs, h), append(ps, p)
	}
	eventually(t, "a fleet of three", fleetOf(3, hs...))
	y, x, z := 0, 1, 2
	// E1: X is away and comes back, and has nothing to do with the key.
	must(t, ps[x].SetMode(redistest.BlackHole))
	eventually(t, "X has its share", inState(hs[x], tierlimit.StateShare))
	must(t, ps[x].SetMode(redistest.Pass))
	eventually(t, "X is back", fleetOf(3, hs...))
	time.Sleep(2*window + 500*time.Millisecond) // E1 is forgotten: by time alone, and nothing tells
	// E2: Y is away until its share begins.
	must(t, ps[y].SetMode(redistest.BlackHole))
	eventually(t, "Y has its share", inState(hs[y], tierlimit.StateShare))
	eventually(t, "X and Z count it as missing", func() bool { return hs[x].Stats().Missing == 1 && hs[z].Stats().Missing == 1 })
	farFromWindowEnd(window, window) // never: wait for the next start
	began := time.Now().UnixNano() / int64(window)
	share, told := 0, 0
	late := watchMachine(t)
	// A thousandth of what passed since Y last heard Redis's clock: so much later it knows for sure that the window began.
	eventually(t, "Y uses its share", func() bool { share += admitted(t, ls[y], "k", 1); return share > 0 })
	share += admitted(t, ls[y], "k", 60)
	if touched {
		told = admitted(t, ls[x], "k", 1)
	}
	must(t, ps[y].SetMode(redistest.Pass))
	eventually(t, "Y back", isOnline(hs[y]))
	rest := admitted(t, ls[z], "k", 200)
	reason := busy(late())
	if time.Now().UnixNano()/int64(window) != began {
		reason = "the window was over before it could be judged"
	} else if share+told+rest > 90 {
		t.Errorf("in one window the share admitted %d, X %d, then Z %d, of 90", share, told, rest)
	}
	// Y does not tell the key what it admitted: its share stays aside, whatever of it was used.
	j.judge(t, reason, func(short func(string, ...any)) {
		if share != 30 || touched && told != 1 || told+rest != 60 {
			short("the share admitted %d, X %d, then Z %d, want 30 and 60 of 90; %v, %v", share, told, rest, hs[x].Stats().State, hs[z].Stats().State)
		}
	})
}

// A shard of a Ring dies and is dropped: the keys of the other shard must not notice.
func TestRingDropLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	j := newJury(t)
	var all cases
	for _, names := range [][2]string{{"a", "b"}, {"b", "a"}} {
		for round := range 2 {
			all.add(fmt.Sprintf("dead=%s/%d", names[0], round), func(t *testing.T) { ringDrop(t, j, names) })
		}
	}
	all.run(t, 4)
}

func ringDrop(t *testing.T, j *jury, names [2]string) {
	dead, alive := redistest.Start(t), redistest.Start(t)
	prefix := ownPrefix(t)
	var ls []*tierlimit.Limiter
	var hs []*tierlimit.Hybrid
	var rings []*redis.Ring
	limit := tierlimit.TokenBucket(100, time.Second)
	for range 2 {
		rdb := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{names[0]: dead.Addr(), names[1]: alive.Addr()}, HeartbeatFrequency: 30 * time.Second, DialTimeout: 250 * time.Millisecond, MaxRetries: -1})
		t.Cleanup(func() { _ = rdb.Close() })
		h, err := tierlimit.New(rdb, tierlimit.WithPrefix(prefix), tierlimit.WithInstances(2), tierlimit.WithHeartbeat(200*time.Millisecond), tierlimit.WithRemoteTimeout(200*time.Millisecond), tierlimit.WithLeaseTTL(100*time.Millisecond),
			tierlimit.WithBreaker(breaker.Settings{Cooldown: 2 * time.Second}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = h.Close(context.Background()) })
		l, err := h.Limiter("l", limit, tierlimit.WithLocalShare(0))
		if err != nil {
			t.Fatal(err)
		}
		ls, hs, rings = append(ls, l), append(hs, h), append(rings, rdb)
	}
	eventually(t, "a fleet of two", fleetOf(2, hs...))
	key := ""
	for i := 0; key == ""; i++ {
		k := fmt.Sprint("k", i)
		if _, err := ls[0].Allow(t.Context(), k); err != nil {
			t.Fatal(err)
		}
		if names, _ := alive.Client().Keys(t.Context(), prefix+"*}l:"+k).Result(); len(names) > 0 {
			key = k
		}
	}
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "shares", func() bool { return hs[0].Stats().State == tierlimit.StateShare })
	rings[0].SetAddrs(map[string]string{names[1]: alive.Addr()}) // the other one is as late as its own heartbeat
	late := watchMachine(t)
	start := time.Now()
	fallback := 0
	var mem envelope.Memory
	for time.Since(start) < 3*time.Second {
		for i, l := range ls {
			a := envelope.Admission{Called: envelope.Now(), Cost: 1, Key: 1, Instance: int32(i)}
			r, err := l.Allow(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			if r.Source == tierlimit.Fallback {
				fallback++
			}
			if a.Returned = envelope.Now(); r.Allowed {
				must(t, mem.Record(a))
			}
		}
		time.Sleep(time.Millisecond)
	}
	if v := envelope.Check(fleet.Envelope(limit), mem.History()); v.Overshoot > 0 {
		t.Errorf("the dead one is %q: %v", names[0], v)
	}
	admitted, most := len(mem.History()), 100+100*time.Since(start).Seconds()
	t.Logf("the dead one is %q: %d admitted of %.0f, %d without Redis", names[0], admitted, most, fallback)
	j.judge(t, busy(late()), func(short func(string, ...any)) {
		if fallback > 100 || float64(admitted) < 0.9*most {
			short("of a key of the other %d checks were decided without Redis, and %d of %.0f admitted", fallback, admitted, most)
		}
	})
}

// The slot of the record of a master's fleet moves to another master; one instance knows it, the other is cut off before it looks.
func TestRecordMovesAndOneIsCutOff(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 0)
	ctx := patience(t)
	prefix := ownPrefix(t)
	limit := tierlimit.TokenBucket(100, time.Second)
	var ls []*tierlimit.Limiter
	var hs []*tierlimit.Hybrid
	add := func() {
		i := len(ls)
		rdb := c.Client(func(o *redis.ClusterOptions) { o.Dialer = redistest.DialFrom(redistest.ClientHost(i), time.Second) })
		t.Cleanup(func() { _ = rdb.Close() })
		h := hybridOn(t, rdb, prefix, tierlimit.WithInstances(2), tierlimit.WithHeartbeat(200*time.Millisecond), tierlimit.WithRemoteTimeout(100*time.Millisecond), tierlimit.WithLeaseTTL(200*time.Millisecond))
		l, err := h.Limiter("l", limit, tierlimit.WithLocalShare(0))
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "online", isOnline(h))
		ls, hs = append(ls, l), append(hs, h)
	}
	add()
	time.Sleep(3 * time.Second) // apart by so much: A looks at the topology at 5 s, B at 8 s
	born := time.Now()
	add()
	// A key of node 1, and the slot of that node's record.
	key := ""
	for i := 0; key == ""; i++ {
		name, _ := remote.KeyName(prefix, "l", fmt.Sprint("k", i))
		if owner, err := c.Owner(ctx, 0, name); err == nil && owner == 1 {
			key = fmt.Sprint("k", i)
		}
	}
	for _, l := range ls {
		allowN(t, l, key, 1)
	}
	node := admin(c.Nodes[1].Process)
	records := func() []string {
		names, err := node.Keys(ctx, prefix+"*!fleet").Result()
		must(t, err)
		return names
	}
	names := records()
	if len(names) != 1 {
		t.Fatal(names)
	}
	slot, err := c.Slot(ctx, names[0])
	must(t, err)
	m, err := c.OpenSlot(ctx, slot, 1, 0)
	must(t, err)
	_, err = m.MoveKeys(ctx)
	must(t, err)
	must(t, m.Close(ctx))
	eventually(t, "A has looked", func() bool { return len(records()) == 1 })
	for _, n := range c.Nodes {
		n.Proxy.SetModeFrom(redistest.ClientHost(1), redistest.BlackHole)
	}
	j, reason := newJury(t), ""
	if took := time.Since(born); took > 4*time.Second {
		reason = fmt.Sprintf("B was cut off %v after it began, when it may have looked", took)
	}
	beats := strings.Replace(records()[0], "!fleet", "!beats", 1)
	j.judge(t, reason, func(short func(string, ...any)) {
		if n := node.ZCard(ctx, beats).Val(); n != 1 {
			short("%d members in the new record, want only the one that looked", n)
		}
	})
	eventually(t, "B has its share", inState(hs[1], tierlimit.StateShare))
	admitted := [2]int{}
	var mem envelope.Memory
	late := watchMachine(t)
	start := time.Now()
	for ; time.Since(start) < 4*time.Second; time.Sleep(time.Millisecond) {
		for i, l := range ls {
			admitted[i] += spendRecorded(t, l, key, 1, &mem)
		}
	}
	took := time.Since(start)
	if v := envelope.Check(fleet.Envelope(limit), mem.History()); v.Overshoot > 0 {
		t.Errorf("%v admitted in %v: %v", admitted, took, v)
	}
	t.Logf("%v admitted in %v", admitted, took)
	// A half each; A's may have come together before, and B's begins empty.
	j.judge(t, busy(late()), func(short func(string, ...any)) {
		if half := int(50 * took.Seconds()); min(admitted[0], admitted[1]) < half*9/10 {
			short("%v admitted in %v, want about %d each", admitted, took, half)
		}
	})
}
