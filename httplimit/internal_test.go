package httplimit

import (
	"math"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit"
)

// D28: whole seconds, rounded up, at least 1, and nothing for Never.
func TestRetryAfterRounds(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		0: 1, 1: 1, time.Microsecond: 1, time.Second - 1: 1, time.Second: 1, time.Second + 1: 2, 90*time.Second + time.Millisecond: 91,
		-time.Second: 1, tierlimit.Never: 0, tierlimit.Never - 1: math.MaxInt64/int64(time.Second) + 1,
	} {
		if got := retryAfter(d); got != want {
			t.Errorf("%v: got %d, want %d", d, got, want)
		}
	}
}
