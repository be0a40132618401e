package chaos

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// Single is one server, which each instance reaches through a proxy of its own.
var Single = Topology{
	Name: "single",
	Start: func(w *World, b redistest.Backend, opts ...redistest.Option) {
		server := b.Start(w.TB, opts...)
		w.Servers = []redistest.Server{server}
		for range w.Instances {
			w.Proxies = append(w.Proxies, redistest.StartProxy(w.TB, server.Addr()))
		}
		w.Client = func(i int) redis.UniversalClient { return redis.NewClient(clientOptions(w.Proxies[i].Addr())) }
	},
}

// clientOptions are what docs/operations.md recommends.
func clientOptions(addr string) *redis.Options {
	o := redistest.Options(addr)
	o.PoolSize = 20
	return o
}

// Admin runs f with a client of server i that goes around the proxies, and waits for as long as it takes.
func (w *World) Admin(i int, f func(context.Context, *redis.Client) error, edit ...func(*redis.Options)) error {
	o := redistest.Options(w.Servers[i].Addr())
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 5*time.Second, 5*time.Second, 5*time.Second
	for _, e := range edit {
		e(o)
	}
	rdb := redis.NewClient(o)
	defer rdb.Close()
	return f(context.Background(), rdb)
}

// Mode puts proxies into a mode, all of them if none is given.
func (w *World) Mode(m redistest.Mode, proxies ...*redistest.Proxy) error {
	if len(proxies) == 0 {
		proxies = w.Proxies
	}
	for _, p := range proxies {
		if err := p.SetMode(m); err != nil {
			return err
		}
	}
	return nil
}

// refused is nil if a server that is up has refused something with a code since it was started.
func (w *World) refused(code string) error {
	for i := range w.Servers {
		var counts string
		err := w.Admin(i, func(ctx context.Context, rdb *redis.Client) (err error) {
			counts, err = rdb.Info(ctx, "errorstats").Result()
			return err
		})
		if err == nil && strings.Contains(counts, "errorstat_"+code+":") {
			return nil
		}
	}
	return fmt.Errorf("no server refused anything with %s", code)
}
