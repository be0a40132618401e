package redistest

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	masters = 3
	slots   = 16384
)

// Cluster is a Redis Cluster of three masters and their replicas. The first
// three Nodes start as masters, node 3+i is a replica of node i%3.
//
// Every node has a loopback address of its own where the system allows it, and
// announces its proxies: MOVED leads clients through them, and so do the links
// between nodes. A master is found failed after about a second, and with
// cluster-require-full-coverage no the other masters' keys go on.
type Cluster struct {
	Group
	ids []string // of the nodes, as they call each other
}

// StartCluster runs a cluster with so many replicas per master, waits until it
// works (about 2 s: Redis waits as long before it takes part), and closes it
// when the test ends.
func StartCluster(tb testing.TB, replicas int, opts ...Option) *Cluster {
	tb.Helper()
	c, err := OpenCluster(replicas, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	closeWith(tb, c)
	return c
}

// OpenCluster is StartCluster for programs that are not tests; the caller calls
// Close.
func OpenCluster(replicas int, opts ...Option) (*Cluster, error) {
	c := &Cluster{}
	if err := c.open(replicas, NewConfig(opts...)); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) open(replicas int, cfg Config) error {
	for i := range masters * (1 + replicas) {
		n, err := newNode(loopback(i), true, func(n *Node) (*Process, error) {
			own := cfg
			own.Args = append([]string{
				"--cluster-enabled", "yes",
				// Outside of the data: an emptied node is still the same node.
				"--cluster-config-file", "../nodes.conf",
				"--cluster-node-timeout", "1000",
				"--cluster-require-full-coverage", "no",
				"--cluster-allow-replica-migration", "no",
				"--cluster-announce-ip", n.Proxy.host,
				"--cluster-announce-port", strconv.Itoa(n.Proxy.port),
				"--cluster-announce-bus-port", strconv.Itoa(n.bus.port),
				"--repl-timeout", "2",
				"--repl-ping-replica-period", "1",
			}, cfg.Args...)
			return openData(n.Proxy.host, true, own)
		})
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, n)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()

	c.ids = make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		a := patient(n.Addr())
		defer a.Close()
		var err error
		if c.ids[i], err = a.Do(ctx, "CLUSTER", "MYID").Text(); err != nil {
			return err
		}
		// Epochs that differ from the start save the nodes from sorting out
		// their conflicts later.
		if err := a.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err(); err != nil {
			return err
		}
		if i < masters {
			// ADDSLOTS takes the numbers; ADDSLOTSRANGE needs Redis 7.
			if err := a.ClusterAddSlotsRange(ctx, slots*i/masters, slots*(i+1)/masters-1).Err(); err != nil {
				return err
			}
		}
		for _, m := range c.Nodes[:i] { // all pairs: gossip takes seconds longer
			if err := a.Do(ctx, "CLUSTER", "MEET", m.Proxy.host, m.Proxy.port, m.bus.port).Err(); err != nil {
				return err
			}
		}
	}
	for i, n := range c.Nodes[masters:] {
		a := patient(n.Addr())
		defer a.Close()
		err := poll(ctx, func() error { // it has to hear of its master first
			return a.ClusterReplicate(ctx, c.ids[i%masters]).Err()
		})
		if err != nil {
			return err
		}
	}
	if err := c.WaitOK(ctx); err != nil {
		return err
	}
	for _, n := range c.Nodes[masters:] {
		if err := WaitReplica(ctx, n.Addr()); err != nil {
			return err
		}
	}
	return nil
}

// WaitOK returns when every node that is up says that the cluster is ok, with
// all slots served and all nodes that are up known. Hung nodes are waited for.
func (c *Cluster) WaitOK(ctx context.Context) error {
	return poll(ctx, func() error {
		up := 0
		for _, n := range c.Nodes {
			if n.Pid() != 0 {
				up++
			}
		}
		for _, n := range c.Nodes {
			if n.Pid() == 0 {
				continue
			}
			f, err := clusterInfo(ctx, n)
			if err != nil {
				return err
			}
			known, _ := strconv.Atoi(f["cluster_known_nodes"])
			if f["cluster_state"] != "ok" || f["cluster_slots_ok"] != strconv.Itoa(slots) || known < up {
				return fmt.Errorf("redistest: node %s: state %s, %s slots ok, %d nodes known",
					n.Proxy.Addr(), f["cluster_state"], f["cluster_slots_ok"], known)
			}
		}
		return nil
	})
}

func clusterInfo(ctx context.Context, n *Node) (map[string]string, error) {
	a := n.admin()
	defer a.Close()
	s, err := a.ClusterInfo(ctx).Result()
	return parseInfo(s), err
}

// admin returns a client that goes around the proxy. Unlike patient it does not
// wait long, for it asks nodes that may be hung. The caller closes it.
func (n *Node) admin() *redis.Client {
	o := n.Process.Options()
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = time.Second, time.Second, time.Second
	o.PoolSize = 1
	return redis.NewClient(o)
}

// Client returns a new cluster client with tight timeouts that goes through the
// proxies. It reloads its view of the cluster twice a second, not once a
// minute. The caller closes it.
func (c *Cluster) Client(opts ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	o := Options("")
	co := &redis.ClusterOptions{
		Addrs:                      c.Addrs(),
		DialTimeout:                o.DialTimeout,
		ReadTimeout:                o.ReadTimeout,
		WriteTimeout:               o.WriteTimeout,
		MaxRetries:                 o.MaxRetries,
		DialerRetries:              o.DialerRetries,
		ContextTimeoutEnabled:      o.ContextTimeoutEnabled,
		PoolSize:                   o.PoolSize,
		DisableIdentity:            o.DisableIdentity,
		MaintNotificationsConfig:   o.MaintNotificationsConfig,
		ClusterStateReloadInterval: 500 * time.Millisecond,
	}
	for _, f := range opts {
		f(co)
	}
	return redis.NewClusterClient(co)
}

// Owner returns the index of the node that is the master of key's slot, as node
// i sees it: views differ while the network is cut.
func (c *Cluster) Owner(ctx context.Context, i int, key string) (int, error) {
	a := c.Nodes[i].admin()
	defer a.Close()
	slot, err := a.ClusterKeySlot(ctx, key).Result()
	if err != nil {
		return 0, err
	}
	ranges, err := a.ClusterSlots(ctx).Result() //nolint:staticcheck // its successor needs Redis 7, and 6.2 is supported
	if err != nil {
		return 0, err
	}
	for _, r := range ranges {
		if int64(r.Start) <= slot && slot <= int64(r.End) && len(r.Nodes) > 0 {
			return c.byAddr(r.Nodes[0].Addr)
		}
	}
	return 0, fmt.Errorf("redistest: nobody serves slot %d", slot)
}

// Key returns a key with the prefix whose master at the start is node i.
func (c *Cluster) Key(ctx context.Context, i int, prefix string) (string, error) {
	a := c.Nodes[i].admin()
	defer a.Close()
	for n := range 1000 {
		key := prefix + strconv.Itoa(n)
		slot, err := a.ClusterKeySlot(ctx, key).Result()
		if err != nil {
			return "", err
		}
		if int64(slots*i/masters) <= slot && slot < int64(slots*(i+1)/masters) {
			return key, nil
		}
	}
	return "", fmt.Errorf("redistest: no key %q... on node %d: is its hash tag fixed?", strings.ToValidUTF8(prefix, "?"), i)
}

// Slot returns the slot of a key.
func (c *Cluster) Slot(ctx context.Context, key string) (int, error) {
	a := c.Nodes[0].admin()
	defer a.Close()
	slot, err := a.ClusterKeySlot(ctx, key).Result()
	return int(slot), err
}

// A Move is a slot on its way from one master to another, as redis-cli moves it, a step at a time: clients use it all the while. From
// OpenSlot on the source answers ASK for keys that it does not have, and TRYAGAIN where it has some of a command's; MoveKeys takes all
// keys over, with their time to live; and after Close everybody answers MOVED.
type Move struct {
	c              *Cluster
	slot, from, to int
}

// OpenSlot begins to move a slot to another master.
func (c *Cluster) OpenSlot(ctx context.Context, slot, from, to int) (*Move, error) {
	m := &Move{c, slot, from, to}
	// In this order: who is sent on by the source must be let in.
	if err := m.set(ctx, to, "IMPORTING", c.ids[from]); err != nil {
		return nil, err
	}
	return m, m.set(ctx, from, "MIGRATING", c.ids[to])
}

// MoveKeys moves the slot's keys, and returns how many there were. Keys that are made meanwhile are made at the target.
func (m *Move) MoveKeys(ctx context.Context) (moved int, err error) {
	a := patient(m.c.Nodes[m.from].Addr())
	defer a.Close()
	to := m.c.Nodes[m.to].Proxy
	for {
		keys, err := a.ClusterGetKeysInSlot(ctx, m.slot, 100).Result()
		if err != nil || len(keys) == 0 {
			return moved, err
		}
		args := []any{"MIGRATE", to.host, to.port, "", 0, 5000, "KEYS"}
		for _, k := range keys {
			args = append(args, k)
		}
		// NOKEY: all of them expired meanwhile.
		if err := a.Do(ctx, args...).Err(); err != nil {
			return moved, err
		}
		moved += len(keys)
	}
}

// Close makes the target the slot's master. It fails while the source has keys of it.
func (m *Move) Close(ctx context.Context) error {
	// The target first: the source, once it has let go, sends everybody there.
	for _, i := range []int{m.to, m.from} {
		if err := m.set(ctx, i, "NODE", m.c.ids[m.to]); err != nil {
			return err
		}
	}
	for i, n := range m.c.Nodes {
		if i == m.to || i == m.from || n.Pid() == 0 {
			continue
		}
		role, err := m.c.role(ctx, i)
		if err == nil && role == "master" { // a replica hears of it from its master
			err = m.set(ctx, i, "NODE", m.c.ids[m.to])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *Move) set(ctx context.Context, node int, what, id string) error {
	a := patient(m.c.Nodes[node].Addr())
	defer a.Close()
	return a.Do(ctx, "CLUSTER", "SETSLOT", m.slot, what, id).Err()
}

func (c *Cluster) role(ctx context.Context, i int) (string, error) {
	a := c.Nodes[i].admin()
	defer a.Close()
	info, err := a.Info(ctx, "replication").Result()
	return parseInfo(info)["role"], err
}
