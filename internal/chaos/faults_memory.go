package chaos

import (
	"cmp"
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// What Redis forgets (G6).

// Forgets notes that Redis is about to lose what it knew of the keys. Call it before each loss.
func (w *World) Forgets() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lost = append(w.lost, envelope.Now())
}

// Losses is the overshoot that G6 allows: for each loss one lease per instance, and what was granted until the loss was noticed; a
// capacity at most. It is noticed by each instance with its next exchange, two sync intervals later at the latest, or after what else kept
// calls from Redis; where one says so later, then. Losses add up in a bucket, and elsewhere where they fall into two
// windows.
func Losses(w *World, r *fleet.Result) int64 { return w.losses(w.Limit, only(r, w.Keys)) }

// losses is Losses for what was admitted under a limit.
func (w *World) losses(l tierlimit.Limit, r *fleet.Result) int64 {
	w.mu.Lock()
	lost, calm := w.lost, w.calm
	w.mu.Unlock()
	leases := int64(w.Instances) * l.Burst / 10 // WithLocalShare
	bucket := l.Algorithm == tierlimit.AlgorithmTokenBucket || l.Algorithm == tierlimit.AlgorithmLeakyBucket
	var worst int64
	costs := make([]int64, len(lost))
	for i, at := range lost {
		noticed := max(w.toldAfter(at), at+int64(100*time.Millisecond))
		if calm != 0 {
			noticed = max(noticed, calm+int64(100*time.Millisecond))
		}
		costs[i] = min(l.Burst, leases+r.AdmittedIn(at, noticed))
		var sum int64
		for j, earlier := range lost[:i+1] {
			if bucket || at-earlier <= int64(2*l.Period) {
				sum += costs[j]
			}
		}
		worst = max(worst, sum)
	}
	return worst
}

// flushAll empties server 0.
func flushAll(w *World) error {
	w.Forgets()
	return redistest.FlushAll(context.Background(), w.Servers[0].Addr())
}

// theKeys calls f with the keys of the limiter "fleet" (or of World.limiters), and with those of the fleet's own record if all is true.
func (w *World) theKeys(all bool, f func(context.Context, *redis.Client, []string) error) error {
	return w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
		pattern := w.Prefix + "1:{*}" + cmp.Or(w.limiters, "fleet") + ":*"
		if all {
			pattern = w.Prefix + "*"
		}
		keys, err := rdb.Keys(ctx, pattern).Result()
		if err != nil {
			return err
		}
		if len(keys) == 0 { // they have expired, or are lost already
			return nil
		}
		w.Forgets()
		return f(ctx, rdb, keys)
	})
}

func deleteKeys(w *World) error {
	return w.theKeys(false, func(ctx context.Context, rdb *redis.Client, keys []string) error { return rdb.Del(ctx, keys...).Err() })
}

// startsFull is that a key which no living instance remembers starts full, also after a loss.
func startsFull(w *World) error {
	l, err := w.Hybrids[0].Limiter("fleet", w.Limit)
	if err != nil {
		return err
	}
	a := envelope.Admission{Called: envelope.Now(), Cost: w.Limit.Burst, Key: envelope.KeyID("new")}
	res, err := l.AllowN(context.Background(), "new", a.Cost)
	if err != nil {
		return err
	}
	if a.Returned = envelope.Now(); res.Allowed {
		return w.extra.memory.Record(a)
	}
	w.short("a key that nobody knew did not start full: %+v", res)
	return nil
}

var memoryFaults = []Fault{
	{
		Name: "flushall", Main: true, random: onMemory, Course: Away, For: 500 * time.Millisecond, Allowed: Losses,
		Begin: flushAll, Back: startsFull,
	},
	{
		Name: "kill-restart-empty", Main: true, random: onMemory, Course: Away, Silences: 1, For: time.Second, Allowed: Losses,
		Begin: kill, Back: startsFull,
		End: func(w *World) error {
			w.Forgets()
			return w.Servers[0].RestartEmpty()
		},
	},
	{Name: "keys-deleted", Main: true, random: onMemory, For: 500 * time.Millisecond, Allowed: Losses, Begin: deleteKeys, Back: startsFull},
	{
		Name: "keys-deleted-at-random", For: 3 * time.Second, Allowed: Losses,
		During: every(300*time.Millisecond, func(w *World) error {
			return w.theKeys(true, func(ctx context.Context, rdb *redis.Client, keys []string) error {
				return rdb.Del(ctx, keys[w.IntN(len(keys))]).Err()
			})
		}),
	},
	{
		// Every key is a list, the fleet's record included.
		Name: "keys-of-another-type", random: onMemory, For: 500 * time.Millisecond, Allowed: Losses, Back: startsFull,
		Begin: func(w *World) error {
			return w.theKeys(true, func(ctx context.Context, rdb *redis.Client, keys []string) error {
				_, err := rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
					for _, k := range keys {
						p.Del(ctx, k)
						p.RPush(ctx, k, "x")
						p.Expire(ctx, k, time.Minute)
					}
					return nil
				})
				return err
			})
		},
	},
	{
		// There is never enough: whatever is there goes, one key after another, at each write.
		Name: "eviction", random: onMemory, For: 500 * time.Millisecond, Allowed: Losses, Back: startsFull,
		Begin: func(w *World) error {
			w.Forgets()
			if err := configure("maxmemory-policy", "allkeys-lru", "maxmemory", "1")(w); err != nil {
				return err
			}
			err := w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
				for range 20 {
					_ = rdb.Set(ctx, "filler", "x", time.Second).Err() // it may well find no room
				}
				return nil
			})
			if err != nil {
				return err
			}
			return configure("maxmemory", "0")(w)
		},
	},
}
