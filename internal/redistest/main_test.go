//go:build unix

package redistest

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	redis.SetLogger(silent{}) // every fault here is meant
	goleak.VerifyTestMain(m, ignoreDialer)
}

// go-redis probes for a lost server once a second, and notices up to a second
// late that its client was closed.
var ignoreDialer = goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}
