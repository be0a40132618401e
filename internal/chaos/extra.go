package chaos

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/tierlimit/tierlimit/internal/envelope"
)

// extra is what instances admitted that a fault started besides the fleet's.
type extra struct {
	memory envelope.Memory
	errors atomic.Int64 // returned by their checks
}

func (e *extra) history() []envelope.Admission { return e.memory.History() }

// errorList collects errors of several goroutines.
type errorList struct {
	mu   sync.Mutex
	list []error
}

func (l *errorList) add(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, err)
}

// all is the errors so far, joined.
func (l *errorList) all() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.list...)
}
