package redistest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// What only Linux has: Pdeathsig, and as many loopback addresses as one likes.

// The server must not outlive a parent that is killed, and must not die early
// when the runtime ends the thread that started it.
func TestChildDiesWithParent(t *testing.T) {
	if os.Getenv("REDISTEST_PARENT") != "" {
		s, err := Open()
		ok(t, err)
		fmt.Printf("pid=%d\n", s.Pid())
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^TestChildDiesWithParent$")
	// Whoever is killed removes nothing: its files go with this test's.
	cmd.Env = append(os.Environ(), "REDISTEST_PARENT=1", "TMPDIR="+t.TempDir())
	out, _ := cmd.Output() // it ends by a signal
	var pid int
	_, rest, found := strings.Cut(string(out), "pid=")
	if _, err := fmt.Sscan(rest, &pid); !found || err != nil {
		t.Fatalf("no pid in %q", out)
	}
	eventually(t, func() error {
		// An orphan may stay a zombie if nobody reaps it.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return nil
		}
		return fmt.Errorf("process %d is left", pid)
	})
}

func TestProxyModeFromOneAddress(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := StartProxy(t, s.Addr())
	dialFrom := func(ip string) raw {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
		c, err := d.DialContext(within(t), "tcp", p.Addr())
		ok(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return raw{t, c}
	}
	a, b := dialFrom("127.0.1.1"), dialFrom("127.0.1.2")
	for _, r := range []raw{a, b} {
		r.send("PING")
		r.want("+PONG")
	}
	p.SetModeFrom("127.0.1.1", BlackHole)
	a.send("PING")
	a.silent()
	b.send("PING")
	b.want("+PONG")
	p.SetModeFrom("127.0.1.1", Pass)
	a.reset()
	a = dialFrom("127.0.1.1")
	a.send("PING")
	a.want("+PONG")
}

// Clients that come from addresses of their own are cut off one by one.
func TestClientsAreToldApart(t *testing.T) {
	t.Parallel()
	g := Start(t)
	p := StartProxy(t, g.Addr())
	ctx := within(t)
	var clients []*redis.Client
	for i := range 2 {
		o := p.Options()
		o.Dialer = DialFrom(ClientHost(i), time.Second)
		c := redis.NewClient(o)
		defer c.Close()
		clients = append(clients, c)
		ok(t, c.Ping(ctx).Err())
	}
	p.SetModeFrom(ClientHost(0), BlackHole)
	if err := clients[0].Ping(ctx).Err(); err == nil {
		t.Error("a client that is cut off got an answer")
	}
	ok(t, clients[1].Ping(ctx).Err())
	p.SetModeFrom(ClientHost(0), Pass)
	eventually(t, func() error { return clients[0].Ping(ctx).Err() })
}
