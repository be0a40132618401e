//go:build unix

package redistest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

var (
	_ Backend = ProcessBackend{}
	_ Server  = (*Process)(nil)
)

func TestProcessConforms(t *testing.T) { Conform(t, ProcessBackend{}) }

func TestBadArgsSayWhy(t *testing.T) {
	t.Parallel()
	_, err := Open(Args("--no-such-option", "1"))
	if err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Fatalf("error does not show the server's complaint: %v", err)
	}
}

func TestCloseLeavesNoProcessAndNoFile(t *testing.T) {
	t.Parallel()
	s, err := Open(Persist())
	ok(t, err)
	pid, dir := s.Pid(), s.dir
	ok(t, s.Kill())
	if s.Pid() != 0 {
		t.Error("a killed server has a pid")
	}
	if err := syscall.Kill(pid, 0); err == nil {
		t.Errorf("process %d is left", pid)
	}
	ok(t, s.Restart())
	pid = s.Pid()
	ok(t, s.Close())
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("directory is left: %v", err)
	}
	if err := syscall.Kill(pid, 0); err == nil {
		t.Errorf("process %d is left", pid)
	}
	if err := s.RestartEmpty(); !errors.Is(err, errClosed) {
		t.Errorf("a closed server restarted: %v", err)
	}
	if _, err := os.Stat(filepath.Dir(s.dataDir())); err == nil {
		t.Error("the refused restart made a directory")
	}
}

func TestMissingServerSaysHowToGetOne(t *testing.T) {
	t.Setenv(EnvServer, "no-such-redis-server")
	_, err := Open()
	if !errors.Is(err, ErrNoServer) || strings.Contains(err.Error(), "\n") {
		t.Fatalf("want one line: %v", err)
	}
	for _, hint := range []string{"apt-get install redis-server", "brew install redis", EnvServer} {
		if !strings.Contains(err.Error(), hint) {
			t.Errorf("no %q in %v", hint, err)
		}
	}
}

func TestServerOutlivesTheThreadThatAsked(t *testing.T) {
	t.Parallel()
	var s *Process
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		s = Start(t)
	}()
	<-done
	time.Sleep(50 * time.Millisecond) // nothing tells when the thread has ended, and the server is to go on whenever it does
	ok(t, s.Client().Ping(within(t)).Err())
}

func TestCheckTTLs(t *testing.T) {
	t.Parallel()
	s := Start(t)
	c := s.Client()
	ctx := within(t)
	ok(t, CheckTTLs(ctx, c, "a"))
	for i := range 30 {
		ok(t, c.Set(ctx, fmt.Sprint("a*:ttl", i), 1, time.Minute).Err())
	}
	ok(t, c.Set(ctx, "b:forever", 1, 0).Err())
	ok(t, c.Set(ctx, "ab:forever", 1, 0).Err()) // matches a*: unless escaped
	ok(t, CheckTTLs(ctx, c, "a*:"))
	ok(t, c.Set(ctx, "a*:forever", 1, 0).Err())
	err := CheckTTLs(ctx, c, "a*:")
	if err == nil || !strings.Contains(err.Error(), `1 keys without TTL: ["a*:forever"]`) {
		t.Fatalf("got %v", err)
	}
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": s.Addr()}})
	defer ring.Close()
	if CheckTTLs(ctx, ring, "b:") == nil {
		t.Error("ring: nothing found")
	}
	if CheckTTLs(ctx, ring, "nothing:") != nil {
		t.Error("ring: found something")
	}
}
