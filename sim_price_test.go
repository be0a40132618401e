package tierlimit

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// simPrices are how long Redis works: on an exchange, on each of its keys, on a heartbeat, and, while somebody has yet to
// acknowledge that another joined, on each member in each heartbeat.
type simPrices struct {
	call, key    [tier.Algorithms + 1]time.Duration
	beat, member time.Duration
}

// typicalPrices are what measurePrices found once; make sim goes by what it finds.
var typicalPrices = simPrices{
	call:   [...]time.Duration{0, 30_000, 24_000, 23_000, 21_000, 48_000},
	key:    [...]time.Duration{0, 14_000, 15_000, 11_000, 11_000, 15_000},
	beat:   54_000,
	member: 480,
}

var usedCPU = regexp.MustCompile(`used_cpu_(?:sys|user):([\d.]+)`)

// spentCPU is how much processor time the server has used so far.
func spentCPU(t *testing.T, rdb *redis.Client) (d time.Duration) {
	t.Helper()
	info, err := rdb.Info(t.Context(), "cpu").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range usedCPU.FindAllStringSubmatch(info, -1) {
		s, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		d += time.Duration(s * 1e9)
	}
	return d
}

// measurePrices has a real Redis work and takes the processor time it uses, reading and writing included, which depends less on what else
// the machine does than the time that passes.
func measurePrices(t *testing.T, calls int) (p simPrices) {
	srv := redistest.Start(t)
	rdb := srv.Client(func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = 5*time.Second, 5*time.Second })
	each := func(n int, do func(worker, i int) error) time.Duration {
		const workers = 4
		before := spentCPU(t, rdb)
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for i := w; i < n; i += workers {
					if err := do(w, i); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		return (spentCPU(t, rdb) - before) / time.Duration(n)
	}
	c := remote.New(rdb, "price:")
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		limit := five(1000, time.Second)[alg-1].tier()
		exchange := func(keys int) time.Duration {
			return each(calls/keys, func(w, i int) error {
				asks := make([]tier.Ask, keys)
				for k := range asks {
					name, _ := remote.KeyName("price:", fmt.Sprint("l", alg), fmt.Sprint("k", w*keys+k))
					asks[k] = tier.Ask{Key: name, Limit: limit, SlotUS: 250_000, Need: []tier.Cost{{N: 1, Count: 1}}, Want: int64(i % 3)}
				}
				_, err := c.Exchange(context.Background(), alg, 0, tier.Darkness{}, asks)
				return err
			})
		}
		exchange(1)
		one, all := exchange(1), exchange(remote.MaxKeys)
		p.key[alg] = max(0, (all-one)/(remote.MaxKeys-1))
		p.call[alg] = max(0, one-p.key[alg])
	}
	const members = 1000
	views := make([]remote.View, members)
	beat := func(i int) error {
		b := remote.Beat{Op: remote.OpBeat, ID: fmt.Sprintf("%026d", i), HeartbeatUS: 60_000_000, DeadUS: 720_000_000, HorizonUS: 4_000_000}
		if views[i].N > 0 {
			b.Recall(views[i])
		}
		v, err := c.Heartbeat(context.Background(), remote.Domain{}, b)
		views[i] = v
		return err
	}
	round := func() time.Duration { return each(members, func(_, i int) error { return beat(i) }) }
	round() // all join,
	joined := round()
	round()
	round() // all have acknowledged it
	p.beat = round()
	p.member = max(0, joined-p.beat) / simLook
	return p
}
