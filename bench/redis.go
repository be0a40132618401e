package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// Usage is what a Redis server has done since it started.
type Usage struct {
	CPU    time.Duration // of the whole process
	Calls  int64         // of scripts
	InCall time.Duration // wall time in scripts
	Slow   int64         // commands that took a millisecond or more
}

// Sub is what was done between then and u.
func (u Usage) Sub(then Usage) Usage {
	return Usage{u.CPU - then.CPU, u.Calls - then.Calls, u.InCall - then.InCall, u.Slow - then.Slow}
}

// slowFrom is what the server is told to log: a call that keeps all others waiting for so long.
const slowFrom = time.Millisecond

// LogSlow lets the server count slow commands from now on.
func LogSlow(ctx context.Context, rdb *redis.Client) error {
	return errors.Join(
		rdb.ConfigSet(ctx, "slowlog-log-slower-than", strconv.FormatInt(slowFrom.Microseconds(), 10)).Err(),
		rdb.ConfigSet(ctx, "slowlog-max-len", "100000").Err(),
		rdb.Do(ctx, "slowlog", "reset").Err())
}

// UsageOf asks the server.
func UsageOf(ctx context.Context, rdb *redis.Client) (Usage, error) {
	var u Usage
	info, err := rdb.InfoMap(ctx, "cpu", "commandstats").Result()
	if err != nil {
		return u, err
	}
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		s, err := strconv.ParseFloat(info["CPU"][name], 64)
		if err != nil {
			return u, fmt.Errorf("bench: INFO cpu: %w", err)
		}
		u.CPU += time.Duration(s * 1e9)
	}
	for _, name := range []string{"cmdstat_evalsha", "cmdstat_eval"} {
		for field := range strings.SplitSeq(info["Commandstats"][name], ",") {
			key, value, _ := strings.Cut(field, "=")
			n, _ := strconv.ParseInt(value, 10, 64) // others are fractions
			switch key {
			case "calls":
				u.Calls += n
			case "usec":
				u.InCall += time.Duration(n) * time.Microsecond
			}
		}
	}
	u.Slow, err = rdb.Do(ctx, "slowlog", "len").Int64()
	return u, err
}

// Version is the server's.
func Version(ctx context.Context, rdb *redis.Client) (string, error) {
	info, err := rdb.Info(ctx, "server").Result()
	if err != nil {
		return "", err
	}
	for lines := bufio.NewScanner(strings.NewReader(info)); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "redis_version:"); ok {
			return v, nil
		}
	}
	return "", errors.New("bench: INFO without a version")
}

// RemoteFloors are bare calls: what a check that asks Redis cannot do without.
var RemoteFloors = []Subject{
	{Impl: "floor", Path: "evalsha-empty", Redis: true, Open: openEmptyScript},
	{Impl: "floor", Path: "evalsha-same", Redis: true, Open: openSameScript},
}

// openEmptyScript calls a script that does nothing.
func openEmptyScript(s Setting) (*Opened, error) {
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr})
	sha, err := rdb.ScriptLoad(background, "return 1").Result()
	if err != nil {
		return nil, err
	}
	keys := []string{"floor"}
	o := opened(func(string) bool { return rdb.EvalSha(background, sha, keys).Err() == nil })
	o.Close = func() { _ = rdb.Close() }
	return o, nil
}

// openSameScript calls tierlimit's own script as tierlimit does for one caller of one key, with nothing around the call: no
// loop, no batch, no reply taken apart. The key is always the same.
func openSameScript(s Setting) (*Opened, error) {
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr})
	kept := new(lastCall)
	rdb.AddHook(kept)
	name, _ := remote.KeyName("floor:", "bench", Key(0))
	ask := tier.Ask{
		Key:    name,
		Limit:  tier.Limit{Algorithm: tier.TokenBucket, Rate: s.Rate, Period: s.Period, Burst: s.Burst},
		SlotUS: time.Second.Microseconds(),
		Need:   []tier.Cost{{N: 1, Count: 1}},
	}
	if _, err := remote.New(rdb, "floor:").Exchange(background, tier.TokenBucket, 0, tier.Darkness{}, []tier.Ask{ask}); err != nil {
		return nil, err
	}
	args := kept.args
	args[0] = "evalsha" // the first call taught the server its script
	args[1] = kept.sha
	o := opened(func(string) bool { return rdb.Do(background, args...).Err() == nil })
	o.Close = func() { _ = rdb.Close() }
	return o, nil
}

// lastCall keeps the arguments of the last script call.
type lastCall struct {
	args []any
	sha  any
}

func (l *lastCall) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *lastCall) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (l *lastCall) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		switch cmd.Name() {
		case "evalsha":
			l.args, l.sha = cmd.Args(), cmd.Args()[1]
		case "eval":
			l.args = cmd.Args()
		}
		return next(ctx, cmd)
	}
}
