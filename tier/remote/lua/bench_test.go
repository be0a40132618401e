package lua_test

import (
	"fmt"
	"regexp"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

var perCall = regexp.MustCompile(`cmdstat_evalsha:calls=\d+,usec=\d+,usec_per_call=([\d.]+)`)

// BenchmarkServer reports how long the server itself works on a call; 64 keys are the most there are (remote.MaxKeys).
func BenchmarkServer(b *testing.B) {
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		for _, keys := range []int{1, 8, 64} {
			b.Run("algorithm="+algorithmName(alg)+"/keys="+strconv.Itoa(keys), func(b *testing.B) {
				s := open(b)
				script := redis.NewScript(lua.Source(alg))
				var asks []tier.Ask
				for i := range keys {
					asks = append(asks, tier.Ask{Key: fmt.Sprintf("b1:{7}%s:%d", b.Name(), i), Limit: micro(alg, 1_000_000, 1_000_000, 1_000_000), SlotUS: slot, Want: 20, Need: []tier.Cost{{N: 1, Count: 3}}})
				}
				names, args := arguments(0, tier.Darkness{}, asks)
				if err := script.Run(s.ctx, s.rdb, names, []byte(args)).Err(); err != nil {
					b.Fatal(err)
				}
				if err := s.rdb.ConfigResetStat(s.ctx).Err(); err != nil {
					b.Fatal(err)
				}
				for b.Loop() {
					if err := script.Run(s.ctx, s.rdb, names, []byte(args)).Err(); err != nil {
						b.Fatal(err)
					}
				}
				m := perCall.FindStringSubmatch(s.rdb.Info(s.ctx, "commandstats").Val())
				if m == nil {
					b.Fatal("no command statistics")
				}
				us, _ := strconv.ParseFloat(m[1], 64)
				b.ReportMetric(us, "server-µs/call")
				b.ReportMetric(us/float64(keys), "server-µs/key")
			})
		}
	}
}
