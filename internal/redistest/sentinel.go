package redistest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
)

// MasterName is the name under which sentinels know the primary.
const MasterName = "tierlimit"

// Sentinel is a primary, a replica, and the sentinels that watch them. Node 0
// starts as the primary. Nodes and sentinels announce their proxies, so
// clients, other sentinels and replication go through them. A primary is found
// failed after about a second.
type Sentinel struct {
	Group
	Sentinels []*Process
	Doors     []*Proxy // by sentinel
}

// StartSentinel runs a primary, a replica and 1 to 3 sentinels, waits until
// they know each other, and closes all when the test ends.
func StartSentinel(tb testing.TB, sentinels int, opts ...Option) *Sentinel {
	tb.Helper()
	s, err := OpenSentinel(sentinels, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	closeWith(tb, s)
	return s
}

// OpenSentinel is StartSentinel for programs that are not tests; the caller
// calls Close.
func OpenSentinel(sentinels int, opts ...Option) (*Sentinel, error) {
	if sentinels < 1 || sentinels > 3 {
		return nil, fmt.Errorf("redistest: %d sentinels, want 1 to 3", sentinels)
	}
	s := &Sentinel{}
	if err := s.open(sentinels, NewConfig(opts...)); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Sentinel) open(sentinels int, cfg Config) error {
	for i := range 2 {
		n, err := newNode(loopback(i), false, func(n *Node) (*Process, error) {
			own := cfg
			if i > 0 {
				own.Master = s.Nodes[0].Proxy.Addr()
			}
			own.Args = append([]string{
				"--replica-announce-ip", n.Proxy.host,
				"--replica-announce-port", strconv.Itoa(n.Proxy.port),
				"--repl-timeout", "2",
				"--repl-ping-replica-period", "1",
			}, cfg.Args...)
			return openData(n.Proxy.host, false, own)
		})
		if err != nil {
			return err
		}
		s.Nodes = append(s.Nodes, n)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	// Sentinels ask the primary for its replicas at once and then every 10 s.
	if err := WaitReplica(ctx, s.Nodes[1].Addr()); err != nil {
		return err
	}
	primary := s.Nodes[0].Proxy
	for i := range sentinels {
		host := loopback(10 + i)
		door, err := openProxy(host, "")
		if err != nil {
			return err
		}
		s.Doors = append(s.Doors, door)
		conf := fmt.Sprintf("sentinel monitor %[1]s %[2]s %[3]d %[4]d\n"+
			"sentinel down-after-milliseconds %[1]s 1000\n"+
			"sentinel failover-timeout %[1]s 3000\n"+
			"sentinel announce-ip %[5]s\n"+
			"sentinel announce-port %[6]d\n", MasterName, primary.host, primary.port, sentinels/2+1, door.host, door.port)
		p, err := open(host, false, conf, []string{"--sentinel"})
		if err != nil {
			return err
		}
		door.SetTarget(p.Addr())
		s.Sentinels = append(s.Sentinels, p)
		s.others = s.Sentinels
	}
	return s.WaitOK(ctx)
}

// WaitOK returns when all sentinels that are up agree on a primary that is up,
// and know its replica and each other.
func (s *Sentinel) WaitOK(ctx context.Context) error {
	return poll(ctx, func() error {
		addrs := map[string]bool{}
		for _, p := range s.Sentinels {
			if p.Pid() == 0 {
				continue
			}
			m, err := master(ctx, p)
			if err != nil {
				return err
			}
			if m["flags"] != "master" || m["num-slaves"] != "1" || m["num-other-sentinels"] != strconv.Itoa(len(s.Sentinels)-1) {
				return fmt.Errorf("redistest: sentinel %s sees flags %q, %s replicas, %s other sentinels",
					p.Addr(), m["flags"], m["num-slaves"], m["num-other-sentinels"])
			}
			addrs[net.JoinHostPort(m["ip"], m["port"])] = true
		}
		if len(addrs) != 1 {
			return fmt.Errorf("redistest: sentinels name %d primaries", len(addrs))
		}
		return nil
	})
}

// Primary returns the index of the node to which all sentinels that are up send
// clients, an error as long as they do not agree. During a failover that is the
// new primary already, while WaitOK waits for its end.
func (s *Sentinel) Primary(ctx context.Context) (int, error) {
	named := map[string]bool{}
	err := errors.New("redistest: no sentinel is up")
	for _, p := range s.Sentinels {
		if p.Pid() == 0 {
			continue
		}
		addr, e := primaryAddr(ctx, p)
		if e != nil {
			err = e
			continue
		}
		named[net.JoinHostPort(addr[0], addr[1])] = true
	}
	if len(named) > 1 {
		return 0, fmt.Errorf("redistest: the sentinels do not agree: %v", slices.Sorted(maps.Keys(named)))
	}
	for addr := range named {
		return s.byAddr(addr)
	}
	return 0, err
}

func primaryAddr(ctx context.Context, p *Process) ([]string, error) {
	c := redis.NewSentinelClient(patientOptions(p.Addr()))
	defer c.Close()
	return c.GetMasterAddrByName(ctx, MasterName).Result()
}

func master(ctx context.Context, p *Process) (map[string]string, error) {
	c := redis.NewSentinelClient(patientOptions(p.Addr()))
	defer c.Close()
	return c.Master(ctx, MasterName).Result()
}

// SentinelAddrs returns the announced addresses of the sentinels.
func (s *Sentinel) SentinelAddrs() []string {
	var addrs []string
	for _, p := range s.Doors {
		addrs = append(addrs, p.Addr())
	}
	return addrs
}

// Close closes all servers and proxies.
func (s *Sentinel) Close() error {
	err := s.Group.Close()
	for _, p := range s.Doors {
		p.Close()
	}
	return err
}

// Client returns a new client with tight timeouts that follows the primary. The
// caller closes it.
func (s *Sentinel) Client(opts ...func(*redis.FailoverOptions)) *redis.Client {
	o := Options("")
	fo := &redis.FailoverOptions{
		MasterName:            MasterName,
		SentinelAddrs:         s.SentinelAddrs(),
		DialTimeout:           o.DialTimeout,
		ReadTimeout:           o.ReadTimeout,
		WriteTimeout:          o.WriteTimeout,
		MaxRetries:            o.MaxRetries,
		DialerRetries:         o.DialerRetries,
		ContextTimeoutEnabled: o.ContextTimeoutEnabled,
		PoolSize:              o.PoolSize,
		DisableIdentity:       o.DisableIdentity,
	}
	for _, f := range opts {
		f(fo)
	}
	return redis.NewFailoverClient(fo)
}
