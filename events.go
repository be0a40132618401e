package tierlimit

import (
	"fmt"
	"time"
)

// State says how a Hybrid stands with Redis.
type State uint8

const (
	// StateConnecting means that Redis has not been heard from yet.
	StateConnecting State = iota + 1
	// StateOnline means that leases are exchanged.
	StateOnline
	// StateSilent means that Redis is out of reach and only leases in hand are spent.
	StateSilent
	// StateShare means that Redis is out of reach and the fallback decides.
	StateShare
)

// String is the state's name in lower case.
func (s State) String() string {
	switch s {
	case StateConnecting:
		return "connecting"
	case StateOnline:
		return "online"
	case StateSilent:
		return "silent"
	case StateShare:
		return "share"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// worse reports whether s is farther from normal than o.
func (s State) worse(o State) bool {
	severity := [...]int{StateOnline: 0, StateConnecting: 1, StateSilent: 2, StateShare: 3}
	return severity[s] > severity[o]
}

// An Observer is told of exchanges and of changes of state. Its methods are called without a lock held and must be safe for
// concurrent use: Exchange is called by the goroutine of each exchange, of which 16 may be on their way to each Redis server, State
// by one loop for each server. They should be quick: State holds up that server's exchanges and heartbeats, either holds up Close.
// Neither may call Close, which would wait for itself.
type Observer interface {
	Exchange(ExchangeEvent)
	State(StateEvent)
}

// ExchangeEvent is one script call that was tried to settle keys.
type ExchangeEvent struct {
	Algorithm Algorithm
	Keys      int           // keys that it was to settle
	Waiters   int           // callers that waited for it
	Duration  time.Duration // from before the send until the answer was here, or was not waited for any more
	Err       error         // nil when Redis answered: it settled the keys, or the call had arrived too late and did nothing
}

// StateEvent is a change of state.
type StateEvent struct {
	From, To  State
	Instances int // members of the fleet as last heard
	Rank      int // this instance's place among them, from 0; -1 when it is none
}
