package redistest

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
	"time"
)

// childAttr makes a child die with its parent, and keeps a terminal's Ctrl-C
// from reaching it first: a test that cleans up should find its server alive.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// suspend stops the process and returns when it is stopped: kill(2) may return
// before the other core has acted on the signal.
func suspend(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for range 1000 {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid))
		if err != nil {
			return err
		}
		// "pid (comm) S ...": the name may hold anything, so look behind it.
		if i := bytes.LastIndexByte(stat, ')'); i >= 0 && i+2 < len(stat) && stat[i+2] == 'T' {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("redistest: process %d does not stop", p.Pid)
}

func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
