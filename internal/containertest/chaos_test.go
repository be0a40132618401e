package containertest

import (
	"cmp"
	"os"
	"testing"

	"github.com/tierlimit/tierlimit/internal/chaos"
)

// TestChaos runs the suite on containers, as the root's test of that name does
// on child processes. Nine fleets side by side are done in little more than
// the time of the longest, and what a fault costs the engine adds to the load.
func TestChaos(t *testing.T) {
	const parallel = "TIERLIMIT_CHAOS_PARALLEL"
	t.Setenv(parallel, cmp.Or(os.Getenv(parallel), "9"))
	chaos.Run(t, Backend{})
}
