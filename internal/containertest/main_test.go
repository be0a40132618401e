package containertest

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/fleet"
)

func TestMain(m *testing.M) {
	fleet.Main() // an instance that the chaos suite kills is this program again
	Janitor()
	redis.SetLogger(silent{}) // every fault here is meant
	if _, err := engine(); err != nil {
		fmt.Fprintln(os.Stderr, err) // once, not once a test
		os.Exit(1)
	}
	os.Exit(m.Run())
}

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}
