package redistest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// CheckTTLs returns an error that lists the keys beginning with prefix that
// never expire. It scans all masters of a cluster and all shards of a ring.
func CheckTTLs(ctx context.Context, client redis.UniversalClient, prefix string) error {
	var mu sync.Mutex
	var forever []string
	scan := func(ctx context.Context, c *redis.Client) error {
		keys, err := keysWithoutTTL(ctx, c, prefix)
		mu.Lock()
		defer mu.Unlock()
		forever = append(forever, keys...)
		return err
	}
	var err error
	switch c := client.(type) {
	case *redis.Client:
		err = scan(ctx, c)
	case *redis.ClusterClient:
		err = c.ForEachMaster(ctx, scan)
	case *redis.Ring:
		err = c.ForEachShard(ctx, scan)
	default:
		err = fmt.Errorf("redistest: CheckTTLs knows no %T", client)
	}
	if err != nil {
		return err
	}
	if len(forever) == 0 {
		return nil
	}
	slices.Sort(forever)
	forever = slices.Compact(forever) // SCAN may return a key twice
	const most = 20
	msg := fmt.Sprintf("redistest: %d keys without TTL: %q", len(forever), forever[:min(most, len(forever))])
	if len(forever) > most {
		msg += " and more"
	}
	return errors.New(msg)
}

var globEscape = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

func keysWithoutTTL(ctx context.Context, c *redis.Client, prefix string) ([]string, error) {
	var forever []string
	var cursor uint64
	for {
		keys, next, err := c.Scan(ctx, cursor, globEscape.Replace(prefix)+"*", 1000).Result()
		if err != nil {
			return nil, err
		}
		if len(keys) > 0 {
			pipe := c.Pipeline()
			ttls := make([]*redis.DurationCmd, len(keys))
			for i, k := range keys {
				ttls[i] = pipe.PTTL(ctx, k)
			}
			if _, err := pipe.Exec(ctx); err != nil {
				return nil, err
			}
			for i, k := range keys {
				if ttls[i].Val() == -1 { // -2 is a key that is gone since the scan
					forever = append(forever, k)
				}
			}
		}
		if cursor = next; cursor == 0 {
			return forever, nil
		}
	}
}
