//go:build unix

package redistest

import (
	"testing"

	"github.com/redis/go-redis/v9"
)

// What the proxy costs a round trip, so that nobody measures it as Redis.
func BenchmarkPing(b *testing.B) {
	s := Start(b)
	p := StartProxy(b, s.Addr())
	for name, addr := range map[string]string{"path=direct": s.Addr(), "path=proxy": p.Addr()} {
		b.Run(name, func(b *testing.B) {
			c := redis.NewClient(Options(addr))
			defer c.Close()
			for b.Loop() {
				if err := c.Ping(b.Context()).Err(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
