package chaos

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// What happens to a server while its data stays.

var persist = []redistest.Option{redistest.Persist()}

func kill(w *World) error      { return w.Servers[0].Kill() }
func restart(w *World) error   { return w.Servers[0].Restart() }
func hang(w *World) error      { return w.Servers[0].Hang() }
func continues(w *World) error { return w.Servers[0].Continue() }
func pass(w *World) error      { return w.Mode(redistest.Pass) }

// configure is CONFIG SET of pairs of a name and a value on server 0.
func configure(pairs ...string) func(*World) error {
	return func(w *World) error {
		return w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
			for i := 0; i < len(pairs); i += 2 {
				if err := rdb.ConfigSet(ctx, pairs[i], pairs[i+1]).Err(); err != nil {
					return fmt.Errorf("CONFIG SET %s: %w", pairs[i], err)
				}
			}
			return nil
		})
	}
}

var serverFaults = []Fault{
	{Name: "kill", Main: true, random: onServer, Course: Shares, Silences: 4, For: time.Second, Server: persist, Begin: kill, End: restart},
	{
		Name: "kill-hoarding-load", Course: Away, Silences: 4, For: time.Second, Server: persist, Begin: kill, End: restart,
		Load: func(keys []string) fleet.Load { return fleet.Hoard(20, keys...) },
	},
	{
		Name: "kill-pulsing-load", Course: Away, Silences: 4, For: time.Second, Server: persist, Begin: kill, End: restart, Loose: true,
		Load: func(keys []string) fleet.Load {
			return fleet.Pulse(300*time.Millisecond, 1200*time.Millisecond, keys...)
		},
	},
	{
		// The fleet lies idle until the shares have had the time to fill, and then wants everything.
		Name: "kill-idle-then-burst", Course: Away, Silences: 4, For: time.Second, Server: persist, Begin: kill, End: restart, Loose: true,
		Load: func(keys []string) fleet.Load { return fleet.IdleThenBurst(before+4*time.Second, keys...) },
	},
	{
		// Half of the instances have sent what Redis never reads, the other half wait for the answer to what it did.
		Name: "kill-amid-exchanges", Main: true, Course: Away, Silences: 1, For: time.Second, Server: persist,
		Begin: func(w *World) error {
			for i, p := range w.Proxies {
				m := redistest.HoldReplies
				if i%2 == 0 {
					m = redistest.HoldRequests
				}
				if err := w.Mode(m, p); err != nil {
					return err
				}
			}
			time.Sleep(50 * time.Millisecond) // several exchanges
			if err := kill(w); err != nil {
				return err
			}
			return pass(w)
		},
		End: restart,
	},
	{Name: "hang", Main: true, random: onServer, Course: Shares, Silences: 4, For: time.Second, Server: persist, Begin: hang, End: continues},
	{
		Name: "hang-hoarding-load", Course: Away, Silences: 4, For: time.Second, Begin: hang, End: continues,
		Load: func(keys []string) fleet.Load { return fleet.Hoard(20, keys...) },
	},
	// To freeze a container takes as long.
	{Name: "hang-under-timeout", Local: true, Course: Steady, For: timeout * 6 / 10, Begin: hang, End: continues},
	{Name: "hang-under-silence", For: 600 * time.Millisecond, Begin: hang, End: continues},
	{
		Name: "busy-script", random: onServer, Course: Away, Silences: 1, For: time.Second, Refusal: "BUSY",
		Begin: configure("lua-time-limit", "10"),
		During: func(ctx context.Context, w *World) error {
			ended := make(chan struct{})
			var ending error
			go func() {
				defer close(ended)
				ending = w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
					return rdb.Eval(ctx, "while true do end", nil).Err()
				}, func(o *redis.Options) { o.ReadTimeout = -1 })
			}()
			select {
			case <-ended:
				return fmt.Errorf("the script ended by itself: %w", ending)
			case <-ctx.Done():
			}
			for { // it may not have begun yet
				killed := w.Admin(0, func(ctx context.Context, rdb *redis.Client) error { return rdb.ScriptKill(ctx).Err() })
				select {
				case <-ended: // ending says that it was killed
					return nil
				case <-time.After(10 * time.Millisecond):
				}
				if killed != nil && !strings.HasPrefix(killed.Error(), "NOTBUSY") {
					return fmt.Errorf("SCRIPT KILL: %w", killed)
				}
			}
		},
	},
	{
		// Its data takes some seconds to load, in which it answers LOADING.
		Name: "loading", Course: Away, For: 1500 * time.Millisecond, After: 4 * time.Second, Refusal: "LOADING",
		Server: append([]redistest.Option{redistest.Args("--key-load-delay", "100")}, persist...),
		Prepare: func(w *World) error {
			return w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
				return rdb.Eval(ctx, "for i = 1, 10000 do redis.call('set', 'filler' .. i, '', 'ex', 600) end return 1", nil).Err()
			})
		},
		Begin: kill, End: restart,
	},
	{
		Name: "no-memory-left", random: onServer, Course: Away, Silences: 1, For: time.Second, Refusal: "OOM",
		Begin: configure("maxmemory-policy", "noeviction", "maxmemory", "1"),
		End:   configure("maxmemory", "0"),
	},
	{
		// A password keeps out who connects from then on: the others are made to.
		Name: "password", random: onServer, Course: Away, Silences: 1, For: time.Second, Refusal: "NOAUTH",
		Begin: func(w *World) error {
			return w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
				if err := rdb.ConfigSet(ctx, "requirepass", password).Err(); err != nil {
					return err
				}
				return rdb.ClientKillByFilter(ctx, "TYPE", "normal").Err()
			})
		},
		End: func(w *World) error {
			return w.Admin(0, func(ctx context.Context, rdb *redis.Client) error {
				return rdb.ConfigSet(ctx, "requirepass", "").Err()
			}, func(o *redis.Options) { o.Password = password })
		},
	},
	{
		Name: "scripts-flushed", Main: true, Course: Steady, For: 2 * time.Second, random: onServer,
		During: every(50*time.Millisecond, func(w *World) error {
			return w.Admin(0, func(ctx context.Context, rdb *redis.Client) error { return rdb.ScriptFlush(ctx).Err() })
		}),
		Refusal: "NOSCRIPT",
	},
}

const password = "a password"

// every does something again and again while the fault lasts.
func every(pause time.Duration, do func(*World) error) func(context.Context, *World) error {
	return func(ctx context.Context, w *World) error {
		for {
			if err := do(w); err != nil {
				return err
			}
			if err := sleep(ctx, pause); err != nil {
				return nil
			}
		}
	}
}

// sleep returns ctx's error if that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
