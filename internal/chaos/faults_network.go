package chaos

import (
	"context"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// What happens between the fleet and a server that is well.

// mode puts all proxies into a mode.
func mode(m redistest.Mode) func(*World) error {
	return func(w *World) error { return w.Mode(m) }
}

// delays makes every round trip take from least to most.
func delays(least, most time.Duration) func(*World) error {
	return func(w *World) error {
		d := redistest.Delay{Latency: least / 2, Jitter: (most - least) / 2}
		for _, p := range w.Proxies {
			p.SetDelay(d, d)
		}
		return nil
	}
}

func noDelay(w *World) error { return delays(0, 0)(w) }

var networkFaults = []Fault{
	{
		// The instances lose Redis and find it again one by one.
		Name: "black-hole-staggered", Main: true, Course: Shares, Silences: 4, For: time.Second, After: 2 * time.Second,
		During: func(ctx context.Context, w *World) error {
			return w.oneByOne(ctx, redistest.BlackHole, 70*time.Millisecond)
		},
		End: func(w *World) error { return w.oneByOne(context.Background(), redistest.Pass, 600*time.Millisecond) },
	},
	{
		Name: "one-cut-off", Main: true, Course: Shares, Silences: 4, For: time.Second, random: onNetwork,
		Begin: func(w *World) error { return w.Mode(redistest.Refuse, w.Proxies[0]) },
		End:   pass,
	},
	{
		// Calls that timed out are delivered when it is over.
		Name: "calls-held-back", Main: true, Course: Shares, Silences: 4, For: time.Second, random: onNetwork,
		Begin: mode(redistest.Hold), End: pass,
	},
	{Name: "refused", Course: Away, Silences: 1, For: time.Second, random: onNetwork, Begin: mode(redistest.Refuse), End: pass},
	{Name: "requests-cut", Course: Away, Silences: 1, For: time.Second, random: onNetwork, Begin: mode(redistest.CutRequests), End: pass},
	{Name: "replies-cut", Main: true, Course: Away, Silences: 1, For: time.Second, random: onNetwork, Begin: mode(redistest.CutReplies), End: pass},
	{Name: "20ms-away", Course: Steady, For: 2 * time.Second, random: onNetwork, Begin: delays(20*time.Millisecond, 20*time.Millisecond), End: noDelay},
	{Name: "200ms-away", Course: Away, Silences: 1, For: time.Second, random: onNetwork, Begin: delays(200*time.Millisecond, 200*time.Millisecond), End: noDelay},
	{Name: "20-to-200ms-away", Main: true, For: 3 * time.Second, random: onNetwork, Begin: delays(20*time.Millisecond, 200*time.Millisecond), End: noDelay},
	{
		Name: "connections-reset", For: 2 * time.Second, random: onNetwork,
		During: every(80*time.Millisecond, func(w *World) error {
			w.Proxies[w.IntN(len(w.Proxies))].ResetConns()
			return nil
		}),
	},
	{
		Name: "replies-lost", Main: true, For: 3 * time.Second, random: onNetwork,
		During: every(60*time.Millisecond, func(w *World) error {
			w.Proxies[w.IntN(len(w.Proxies))].LoseReplies(1+w.IntN(3), "evalsha")
			return nil
		}),
		End: func(w *World) error {
			for _, p := range w.Proxies {
				p.LoseReplies(0)
			}
			return nil
		},
	},
	{
		Name: "flapping", Main: true, For: 10 * time.Second, During: flap, End: pass,
		Options: []tierlimit.Option{tierlimit.WithBreaker(quick)},
	},
	{
		// So short a silence that shares come into use in each cut, and so short a timeout that a busy machine is one.
		Name: "flapping-into-shares", Loose: true, For: 10 * time.Second, During: flap, End: pass, Timeout: 15 * time.Millisecond,
		Options: []tierlimit.Option{
			tierlimit.WithBreaker(quick), tierlimit.WithHeartbeat(20 * time.Millisecond),
			tierlimit.WithLeaseTTL(20 * time.Millisecond), tierlimit.WithSyncInterval(10 * time.Millisecond),
		},
	},
}

// quick is a breaker that opens and closes with each flap.
var quick = breaker.Settings{Failures: 1, Cooldown: 10 * time.Millisecond, MaxCooldown: 50 * time.Millisecond}

// flap cuts Redis off and restores it every 200 ms, each time in another way.
func flap(ctx context.Context, w *World) error {
	ways := []redistest.Mode{redistest.Refuse, redistest.BlackHole, redistest.Hold, redistest.CutReplies}
	for cut := true; ; cut = !cut {
		m := redistest.Pass
		if cut {
			m = ways[w.IntN(len(ways))]
		}
		if err := w.Mode(m); err != nil {
			return err
		}
		if err := sleep(ctx, 200*time.Millisecond); err != nil {
			return nil
		}
	}
}

// oneByOne puts the proxies into a mode with a pause between them.
func (w *World) oneByOne(ctx context.Context, m redistest.Mode, pause time.Duration) error {
	for i, p := range w.Proxies {
		if i > 0 {
			if err := sleep(ctx, pause); err != nil {
				return err
			}
		}
		if err := p.SetMode(m); err != nil {
			return err
		}
	}
	return nil
}
