//go:build unix && !linux

package redistest

import (
	"os"
	"syscall"
	"time"
)

// childAttr has nothing like Pdeathsig to ask for: the child stays in the
// parent's process group, so that Ctrl-C ends both.
func childAttr() *syscall.SysProcAttr { return nil }

func suspend(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	time.Sleep(5 * time.Millisecond) // delivery is asynchronous
	return nil
}

func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
