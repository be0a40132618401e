package clock

import (
	"os"
	"strings"
	"sync"
)

// cycles is the processor's time-stamp counter. Reading it waits for nothing: it may run ahead of what stands before it in the program by
// some ten nanoseconds, never by more than what the processor has in the air.
func cycles() uint64

// steady reports whether the counter runs evenly and alike on all processors: where Linux found it to, it keeps its own time with it.
var steady = sync.OnceValue(func() bool {
	source, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	return err == nil && strings.TrimSpace(string(source)) == "tsc"
})
