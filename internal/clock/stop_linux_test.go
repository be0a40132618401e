package clock

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A process that was stopped reads the right time first thing when it goes on: nothing had to run meanwhile.
func TestFastAfterAStop(t *testing.T) {
	if os.Getenv("TIERLIMIT_CLOCK_CHILD") != "" {
		stopped(t)
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^TestFastAfterAStop$", "-test.v")
	cmd.Env = append(os.Environ(), "TIERLIMIT_CLOCK_CHILD=1", "GOMAXPROCS=1")
	var out syncBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 600 { // it warms up first, and a busy machine lets that take long
		if strings.Contains(out.String(), ready) {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	for range 10 {
		time.Sleep(100 * time.Millisecond)
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			break // it has ended
		}
		time.Sleep(50 * time.Millisecond)
		_ = cmd.Process.Signal(syscall.SIGCONT)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
}

// ready is what the child says when it may be stopped.
const ready = "ready to be stopped"

// stopped checks without a pause, while its parent stops it.
func stopped(t *testing.T) {
	c := New()
	warm(t, c)
	fmt.Println(ready)
	var last int64
	stops := 0
	for end := time.Now().Add(1200 * time.Millisecond); time.Now().Before(end); {
		for range 1000 {
			if !check(t, c) {
				return
			}
			now := c.Now()
			if last != 0 && now-last > int64(30*time.Millisecond) {
				stops++
			}
			last = now
		}
	}
	if stops == 0 {
		t.Error("it was never stopped")
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  []byte
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b = append(s.b, p...)
	return len(p), nil
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.b)
}
