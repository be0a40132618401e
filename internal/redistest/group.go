package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"
)

// Node is a server of a topology. Others know it by the address of its Proxy:
// clients, replicas and sentinels all come that way and can be kept out. Its
// own Addr is the way around, for the test's eyes.
type Node struct {
	*Process
	Proxy *Proxy

	bus *Proxy // other nodes' cluster links come this way
}

// Group is the nodes of a topology and the network between them.
type Group struct {
	Nodes []*Node

	others []*Process // sentinels
}

// newNode makes a node with proxies in front, and lets start run its server,
// which has to announce them.
func newNode(host string, cluster bool, start func(n *Node) (*Process, error)) (n *Node, err error) {
	n = &Node{}
	defer func() {
		if err != nil {
			_ = n.close()
		}
	}()
	if n.Proxy, err = openProxy(host, ""); err != nil {
		return nil, err
	}
	if cluster {
		if n.bus, err = openProxy(host, ""); err != nil {
			return nil, err
		}
	}
	if n.Process, err = start(n); err != nil {
		return nil, err
	}
	n.Proxy.SetTarget(n.Addr())
	if n.bus != nil {
		n.bus.SetTarget(n.host + ":" + strconv.Itoa(n.port+busShift))
	}
	return n, nil
}

// Host returns the address from which the node comes to the others, see [Proxy.SetModeFrom].
func (n *Node) Host() string { return n.host }

func (n *Node) close() error {
	var err error
	if n.Process != nil {
		err = n.Process.Close()
	}
	for _, p := range []*Proxy{n.Proxy, n.bus} {
		if p != nil {
			p.Close()
		}
	}
	return err
}

// Isolate cuts the network between node i and all others, sentinels included,
// until Heal. Clients still reach it; n.Proxy.SetMode keeps them out as well.
// It needs a loopback address per node, which only Linux has by default.
func (g *Group) Isolate(i int) error { return g.between(i, BlackHole) }

// Heal ends Isolate.
func (g *Group) Heal(i int) error { return g.between(i, Pass) }

func (g *Group) between(i int, m Mode) error {
	a := g.Nodes[i]
	for j, b := range g.Nodes {
		if i == j {
			continue
		}
		if a.host == b.host {
			return fmt.Errorf("redistest: nodes share the address %s and cannot be told apart: %w", a.host, errors.ErrUnsupported)
		}
		a.from(b.host, m)
		b.from(a.host, m)
	}
	for _, s := range g.others { // nodes do not dial sentinels
		a.from(s.host, m)
	}
	return nil
}

func (n *Node) from(ip string, m Mode) {
	n.Proxy.SetModeFrom(ip, m)
	if n.bus != nil {
		n.bus.SetModeFrom(ip, m)
	}
}

// Addrs returns the announced addresses of all nodes.
func (g *Group) Addrs() []string {
	var addrs []string
	for _, n := range g.Nodes {
		addrs = append(addrs, n.Proxy.Addr())
	}
	return addrs
}

// Close closes all servers and proxies.
func (g *Group) Close() error {
	var errs []error
	for _, s := range g.others {
		errs = append(errs, s.Close())
	}
	for _, n := range g.Nodes {
		errs = append(errs, n.close())
	}
	return errors.Join(errs...)
}

func (g *Group) byAddr(addr string) (int, error) {
	for i, n := range g.Nodes {
		if n.Proxy.Addr() == addr {
			return i, nil
		}
	}
	return 0, fmt.Errorf("redistest: no node has the address %s", addr)
}

// ClientHost returns the address from which [DialFrom] lets the i-th client come, i below 200: with [Proxy.SetModeFrom] some clients
// can be cut off while others are not. It is the same for all where the system has only one loopback address.
func ClientHost(i int) string { return own("127.0.2." + strconv.Itoa(i+1)) }

// DialFrom is a dialer for go-redis whose connections come from a loopback address.
func DialFrom(host string, timeout time.Duration) func(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
	return d.DialContext
}

// loopback returns the i-th server's address: its own if the system has it.
func loopback(i int) string { return own("127.0.1." + strconv.Itoa(i+1)) }

func own(host string) string {
	if tryBind(host+":0") != nil {
		return "127.0.0.1"
	}
	return host
}

// closeWith closes c when the test ends.
func closeWith(tb testing.TB, c interface{ Close() error }) {
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
}
