package containertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

func TestContainersConform(t *testing.T) { redistest.Conform(t, Backend{}) }

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestBadArgsSayWhy(t *testing.T) {
	t.Parallel()
	_, err := open(redistest.NewConfig(redistest.Args("--no-such-option", "1")))
	if err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Fatalf("error does not show the server's complaint: %v", err)
	}
}

func TestMissingEngineSaysHowToGetOne(t *testing.T) {
	t.Parallel()
	_, err := connect(client.WithHost("unix://" + t.TempDir() + "/none.sock"))
	if !errors.Is(err, ErrNoEngine) || strings.Contains(err.Error(), "\n") {
		t.Fatalf("want one line: %v", err)
	}
}

// A restarted server is the same container, and Close removes it.
func TestCloseRemovesTheContainer(t *testing.T) {
	t.Parallel()
	s, err := open(redistest.NewConfig())
	ok(t, err)
	id := s.box.ID
	ok(t, s.RestartEmpty())
	if s.box.ID != id {
		t.Error("another container")
	}
	ok(t, s.Close())
	_, err = s.docker.ContainerInspect(within(t), id, client.ContainerInspectOptions{})
	if !errdefs.IsNotFound(err) {
		t.Errorf("the container is left: %v", err)
	}
	if err := s.RestartEmpty(); !errors.Is(err, errClosed) {
		t.Errorf("a closed server restarted: %v", err)
	}
}

// Whatever a process was doing when it was killed, its containers go.
func TestJanitorCleansUpAfterAKilledProcess(t *testing.T) {
	if os.Getenv("CONTAINERTEST_PARENT") != "" {
		for range 2 {
			_, err := open(redistest.NewConfig())
			ok(t, err)
		}
		if _, err := open(redistest.NewConfig(redistest.Args("--no-such-option", "1"))); err == nil {
			t.Fatal("a bad option was taken")
		}
		s, err := open(redistest.NewConfig())
		ok(t, err)
		ok(t, s.Kill())
		d, err := engine()
		ok(t, err)
		ids, err := left(t.Context(), d, session)
		ok(t, err)
		fmt.Printf("left=%d session=%s\n", len(ids), session)
		p, err := os.FindProcess(os.Getpid())
		ok(t, err)
		_ = p.Kill()
		select {}
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^TestJanitorCleansUpAfterAKilledProcess$")
	cmd.Env = append(os.Environ(), "CONTAINERTEST_PARENT=1")
	out, _ := cmd.Output() // it ends by a signal
	var n int
	var of string
	_, rest, _ := strings.Cut(string(out), "left=")
	if _, err := fmt.Sscanf(rest, "%d session=%s", &n, &of); err != nil {
		t.Fatalf("no session in %q", out)
	}
	if n != 3 {
		t.Errorf("the process had %d containers, want 3: those it did not close", n)
	}
	d, err := engine()
	ok(t, err)
	for ctx := within(t); ; time.Sleep(20 * time.Millisecond) {
		ids, err := left(ctx, d, of)
		ok(t, err) // fails when ctx ends
		if len(ids) == 0 {
			return
		}
	}
}
