package remote

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier"
)

// permissions are those of docs/operations.md: the block, and what go-redis sends by itself.
func permissions(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/operations.md")
	ok(t, err)
	_, rest, _ := strings.Cut(string(text), "### Permissions")
	rest, _, _ = strings.Cut(rest, "###")
	all := regexp.MustCompile(`\+[a-z]+`).FindAllString(rest, -1)
	if len(all) < 20 {
		t.Fatalf("permissions %v", all)
	}
	return all
}

// A user with the permissions that docs/operations.md lists, and no others, can do all that is done; each that only a script needs is
// needed.
func TestPermissionsSuffice(t *testing.T) {
	s := redistest.Start(t)
	admin := s.Client()
	ctx := patience(t, 30*time.Second)
	all := permissions(t)
	// work does everything once as a user with these permissions.
	work := func(granted []string) error {
		ok(t, s.FlushAll(ctx))
		ok(t, admin.ScriptFlush(ctx).Err())
		rule := []any{"ACL", "SETUSER", "limiter", "reset", "on", ">secret", "-@all", "~" + prefix + "*"}
		for _, g := range granted {
			rule = append(rule, g)
		}
		ok(t, admin.Do(ctx, rule...).Err())
		rdb := redis.NewClient(&redis.Options{Addr: s.Addr(), Username: "limiter", Password: "secret", ClientName: "limiter", MaxRetries: -1})
		defer rdb.Close()
		c := New(rdb, prefix)
		var fault error
		note := func(err error) {
			if fault == nil {
				fault = err
			}
		}
		for alg := tier.TokenBucket; int(alg) <= tier.Algorithms; alg++ {
			limit := tier.Limit{Algorithm: alg, Rate: 1000, Period: time.Minute, Burst: 100}
			if alg == tier.SlidingWindow {
				limit.SubWindows = 10
			}
			name, _ := KeyName(prefix, "acl", strings.Repeat("k", int(alg)))
			ask := tier.Ask{Key: name, Limit: limit, SlotUS: 150_000, Need: []tier.Cost{{N: 1, Count: 1}}, Want: 20}
			r, err := c.Exchange(ctx, alg, 0, tier.Darkness{}, []tier.Ask{ask})
			note(err)
			if err == nil {
				g := r.Grants[0]
				ask.Need, ask.Lease, ask.Born, ask.Version, ask.Spent, ask.Return = nil, g.Slot, g.Born, g.Version, 10, 10
				_, err = c.Exchange(ctx, alg, 0, tier.Darkness{}, []tier.Ask{ask})
				note(err)
			}
		}
		beat := func(op, id string) {
			_, err := c.Heartbeat(ctx, Domain{}, Beat{Op: op, ID: id, HeartbeatUS: 5e6, DeadUS: 20_000, HorizonUS: 5e6})
			note(err)
		}
		for _, op := range []string{OpPeek, OpBeat, OpChange} {
			beat(op, "a")
			beat(op, "b")
		}
		time.Sleep(30 * time.Millisecond) // more than DeadUS, by the server's clock
		beat(OpBeat, "b")                 // a is forgotten
		beat(OpLeave, "b")
		// A record of another type is replaced.
		names, err := admin.Keys(ctx, prefix+"*!fleet").Result()
		ok(t, err)
		for _, name := range names {
			ok(t, admin.Set(ctx, name, "x", time.Minute).Err())
		}
		beat(OpBeat, "b")
		return fault
	}
	if err := work(all); err != nil {
		t.Fatalf("with %v: %v", all, err)
	}
	for _, one := range all {
		if slices.Contains([]string{"+ping", "+hello", "+client", "+select", "+cluster"}, one) {
			continue // of go-redis, which does without some
		}
		if err := work(slices.DeleteFunc(slices.Clone(all), func(g string) bool { return g == one })); err == nil {
			t.Errorf("%s is not needed", one)
		}
	}
}
