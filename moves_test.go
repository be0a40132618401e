package tierlimit

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// Keys that move from one server of a Cluster to another.

// They move, as they are, to a server from which one instance alone has been cut off for long: its share of these keys begins after a silence of its own,
// since nobody has kept it aside so far.
func TestKeysMoveToAServerThatOneCannotReach(t *testing.T) {
	const moving = 128 // groups from here on do
	for _, limit := range five(100, time.Minute) {
		t.Run(limit.Algorithm.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(model.Variant{}, time.Hour, 0)
				var moved, cut atomic.Bool
				var hs []*Hybrid
				var ls []*Limiter
				for i := range 2 {
					x := &groupedWire{
						wire: &wire{w: w},
						tagOf: func(g uint8) uint8 {
							if g < 64 || moved.Load() && g >= moving {
								return 0
							}
							return 64
						},
						dead: func(tag uint8) bool { return i == 1 && tag == 0 && cut.Load() },
					}
					h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithLocalShare(0)})
					if err != nil {
						t.Fatal(err)
					}
					h.begin(x)
					l, err := h.Limiter("l", limit)
					if err != nil {
						t.Fatal(err)
					}
					hs, ls = append(hs, h), append(ls, l)
				}
				for _, h := range hs {
					until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == 2 })
				}
				time.Sleep(time.Second)
				key := ""
				for i := 0; key == ""; i++ {
					if _, g := remote.KeyName("tierlimit:", "l", fmt.Sprint(i)); g >= moving {
						key = fmt.Sprint(i)
					}
				}
				var mem envelope.Memory
				check := func(i int) {
					a := envelope.Admission{Called: w.nowNS(), Cost: 1, Key: 1, Instance: int32(i)}
					r, err := ls[i].Allow(t.Context(), key)
					if err != nil {
						t.Fatal(err)
					}
					if a.Returned = w.nowNS(); r.Allowed {
						_ = mem.Record(a)
					}
				}
				cut.Store(true)
				time.Sleep(25 * time.Second) // less than after which it is forgotten
				time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(time.Minute + 5*time.Second)))
				for range 200 {
					check(0)
				}
				if n := len(mem.History()); n != 100 {
					t.Fatalf("%d of 100 admitted", n)
				}
				moved.Store(true)
				time.Sleep(8 * time.Second) // both have looked at the topology
				for range 200 {
					check(1)
				}
				closeAll(t, hs...)
				w.air.Wait()
				if v := envelope.Check(envelopeOf(limit), mem.History()); v.Overshoot > 0 {
					t.Error(v)
				}
			})
		})
	}
}

// Buckets under random moves between three servers, and random cuts of single instances from single servers.
func TestRandomMoves(t *testing.T) {
	seeds := uint64(30)
	if raceEnabled {
		seeds = 3
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, 7))
				limit := TokenBucket(1+r.Int64N(100), time.Second*time.Duration(1+r.IntN(20))).WithBurst(10 + r.Int64N(200))
				share := []float64{0, 0.2, 1}[r.IntN(3)]
				w := newWorld(model.Variant{}, time.Hour, 0)
				w.forget = true
				const n = 3
				var home atomic.Int32
				var cut [n][3]atomic.Bool
				tags := [3]uint8{0, 64, 128}
				home.Store(128)
				var hs []*Hybrid
				var ls []*Limiter
				for i := range n {
					x := &groupedWire{
						wire: &wire{w: w},
						tagOf: func(g uint8) uint8 {
							if g >= 192 {
								return uint8(home.Load())
							}
							return g / 64 * 64
						},
						dead: func(tag uint8) bool { return cut[i][tag/64].Load() },
					}
					h, err := newHybrid([]Option{WithHeartbeat(simBeat), WithRemoteTimeout(simTimeout), WithSyncInterval(simSync), WithLocalShare(share), WithLeaseTTL(200 * time.Millisecond), WithBreaker(quick)})
					if err != nil {
						t.Fatal(err)
					}
					h.begin(x)
					l, err := h.Limiter("l", limit)
					if err != nil {
						t.Fatal(err)
					}
					hs, ls = append(hs, h), append(ls, l)
				}
				for _, h := range hs {
					until(t, "the fleet is one", func() bool { s := h.Stats(); return s.State == StateOnline && s.Instances == n })
				}
				time.Sleep(time.Second)
				key := ""
				for i := 0; key == ""; i++ {
					if _, g := remote.KeyName("tierlimit:", "l", fmt.Sprint(i)); g >= 192 {
						key = fmt.Sprint(i)
					}
				}
				var mem envelope.Memory
				check := func(i int) {
					a := envelope.Admission{Called: w.nowNS(), Cost: 1, Key: 1, Instance: int32(i)}
					r, err := ls[i].Allow(t.Context(), key)
					if err != nil {
						t.Fatal(err)
					}
					if a.Returned = w.nowNS(); r.Allowed {
						_ = mem.Record(a)
					}
				}
				story := ""
				var since [n][3]time.Time
				begin := time.Now()
				for end := time.Now().Add(90 * time.Second); time.Now().Before(end); {
					switch r.IntN(6) {
					case 0:
						to := tags[r.IntN(3)]
						using := false // outage shares of the old server, of which the new one knows nothing: that is documented
						for i := range n {
							using = using || cut[i][home.Load()/64].Load() || !hs[i].domain(remote.Domain{Tag: uint8(home.Load())}).breaker.Ready()
						}
						if using {
							continue
						}
						home.Store(int32(to))
						story += fmt.Sprintf("%v: to %d\n", time.Since(begin), to)
					case 1, 2:
						i, s := r.IntN(n), r.IntN(3)
						on := !cut[i][s].Load()
						cut[i][s].Store(on)
						since[i][s] = time.Now()
						story += fmt.Sprintf("%v: %d from %d cut=%v\n", time.Since(begin), i, s*64, on)
					case 3:
						for i := range n {
							for s := range 3 {
								cut[i][s].Store(false)
							}
						}
						story += fmt.Sprintf("%v: all whole\n", time.Since(begin))
					}
					for i := range n {
						for s := range 3 {
							if cut[i][s].Load() && time.Since(since[i][s]) > 18*time.Second { // longer, and it is forgotten
								cut[i][s].Store(false)
								story += fmt.Sprintf("%v: %d from %d cut=false\n", time.Since(begin), i, s*64)
							}
						}
					}
					burst := r.IntN(2) * r.IntN(300)
					who := r.IntN(n)
					for range burst {
						check(who)
					}
					gap := time.Duration(1+r.IntN(30)) * time.Millisecond
					for e := time.Now().Add(time.Duration(r.IntN(6000)) * time.Millisecond); time.Now().Before(e); time.Sleep(gap) {
						for i := range n {
							check(i)
						}
					}
				}
				closeAll(t, hs...)
				w.air.Wait()
				if v := envelope.Check(envelopeOf(limit), mem.History()); v.Overshoot > 0 {
					t.Errorf("%v share %v: %v\n%s", limit, share, v, story)
				}
			})
		})
	}
}
