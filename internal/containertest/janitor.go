package containertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
)

// envJanitor tells a test binary that it is a janitor, and for which session.
const envJanitor = "TIERLIMIT_CONTAINERTEST_JANITOR"

// session is this process, as its containers' label says.
var session = fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())

// leash is the end of a pipe that nobody writes to. The kernel closes it with
// this process, however that ends.
var leash *os.File //nolint:unused // to be held is its use: a file that nobody holds is closed

// Janitor belongs at the begin of TestMain in a package that uses Backend. A
// container does not die with the process that started it, and tests clean up
// neither after a panic, nor at go test's timeout, nor when they are killed. So
// a copy of the test binary waits for this process's end and removes what is
// left. In that copy Janitor does not return.
func Janitor() {
	of := os.Getenv(envJanitor)
	if of == "" {
		return
	}
	// Ctrl-C reaches all processes of a terminal, and this one has yet to work.
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	_, _ = os.Stdin.Read(make([]byte, 1))
	d, err := connect()
	if err == nil {
		err = removeAll(d, of)
		// The engine finishes a request whose sender has died.
		time.Sleep(2 * time.Second)
		err = errors.Join(err, removeAll(d, of))
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func startJanitor() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	// Without a call of Janitor in TestMain this runs no test and ends.
	cmd := exec.Command(self, "-test.run=^$")
	cmd.Env = append(os.Environ(), envJanitor+"="+session)
	cmd.Stdin = r // its output goes nowhere: go test would wait for its end
	err = cmd.Start()
	_ = r.Close()
	if err != nil {
		_ = w.Close()
		return err
	}
	leash = w
	return cmd.Process.Release()
}

// left returns the containers of a session, those that are down included.
func left(ctx context.Context, d *testcontainers.DockerClient, session string) ([]string, error) {
	r, err := d.ContainerList(ctx, client.ContainerListOptions{
		All:     true,
		Filters: client.Filters{}.Add("label", label+"="+session),
	})
	var ids []string
	for _, c := range r.Items {
		ids = append(ids, c.ID)
	}
	return ids, err
}

func removeAll(d *testcontainers.DockerClient, session string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ids, err := left(ctx, d, session)
	for _, id := range ids {
		_, e := d.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		err = errors.Join(err, e)
	}
	return err
}
