package tierlimit

import (
	"runtime"
	"sync/atomic"
	"time"
)

// A crowd is many callers that wait for exchanges and ask again as soon as they are answered. A flight that leaves before all of them are
// back splits them in two, one half of which is always waiting for the other's flight to land: so it waits for them, a little.
type crowd struct {
	arrived atomic.Int64 // callers that began to wait
	awaited atomic.Int64 // what arrived will be when those who were answered last are back
	size    atomic.Int64 // how many were answered
}

// leave notes that n callers are about to be answered.
func (c *crowd) leave(n int) {
	c.size.Store(int64(n))
	c.awaited.Store(c.arrived.Load() + int64(n))
}

// gather waits until those who were answered last are back, no longer than the given time. A lone caller has nobody to wait for.
func (c *crowd) gather(patience time.Duration) {
	size := c.size.Load()
	if size == 1 {
		return
	}
	runtime.Gosched() // who is just about to ask comes along
	if size < crowdFrom {
		return
	}
	const atOnce = 64
	for began, i := time.Now(), 0; c.arrived.Load() < c.awaited.Load() && time.Since(began) < patience; i++ {
		switch {
		case i < atOnce:
			runtime.Gosched()
		case patience < sleepFrom:
			return // they are not on their way, or a processor is not to be had
		default:
			time.Sleep(patience / 4)
		}
	}
}

// crowdFrom is how many callers are worth a wait.
const crowdFrom = 8

// sleepFrom is the shortest wait that is worth a timer.
const sleepFrom = 100 * time.Microsecond
