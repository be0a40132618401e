package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// A store is the Redis of a run: the caller's own, or one inside this process.
type store struct {
	name     string // for the header line
	opts     *redis.Options
	embedded *miniredis.Miniredis
}

// openStore connects to address, "" for an embedded Redis, and makes sure that it answers.
func openStore(ctx context.Context, address string) (*store, error) {
	if address == "" {
		m := miniredis.NewMiniRedis()
		// Its keys would never expire by themselves.
		m.ClockTTL(true)
		if err := m.StartAddr("127.0.0.1:0"); err != nil {
			return nil, fmt.Errorf("starting the embedded Redis: %w", err)
		}
		return &store{name: "an embedded Redis (miniredis)", opts: tuned(&redis.Options{Addr: m.Addr()}), embedded: m}, nil
	}
	if !strings.Contains(address, "://") {
		address = "redis://" + address
	}
	opts, err := redis.ParseURL(address)
	if err != nil {
		// An error of net/url repeats the whole text, password and all.
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err
		}
		return nil, badInput("-redis: %w; want redis://[user:password@]host:port[/database]", err)
	}
	c := redis.NewClient(tuned(opts))
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := c.Ping(ctx).Err(); err != nil {
		return nil, badInput("-redis: %s %w", opts.Addr, unwilling(err))
	}
	if err := try(ctx, c); err != nil {
		return nil, badInput("-redis: %s answers, but not to what a limiter sends: %w", opts.Addr, err)
	}
	return &store{name: "Redis at " + opts.Addr, opts: opts}, nil
}

// unwilling says whether a Redis that cannot be used answered at all.
func unwilling(err error) error {
	switch said, ok := errors.AsType[redis.Error](err); {
	case !ok:
		return fmt.Errorf("does not answer: %w", err)
	case redis.IsAuthError(said):
		return fmt.Errorf("refuses the login: %w; want redis://[user:]password@host:port", err)
	default:
		return fmt.Errorf("answers with an error: %w", err)
	}
}

// try sends what a limiter sends, a heartbeat and an exchange, under a prefix of its own: a replica, a node of a Cluster and a user who may
// not do it all answer a PING. The limiter itself would take them for a Redis that is away, and not say why.
func try(ctx context.Context, rdb redis.UniversalClient) error {
	prefix := runPrefix("try")
	c := remote.New(rdb, prefix)
	beat := remote.Beat{Op: remote.OpBeat, ID: "try", HeartbeatUS: 1e6, DeadUS: 30e6, HorizonUS: 1e6}
	if _, err := c.Heartbeat(ctx, remote.Domain{}, beat); err != nil {
		return explained(err)
	}
	beat.Op = remote.OpLeave
	if _, err := c.Heartbeat(ctx, remote.Domain{}, beat); err != nil {
		return explained(err)
	}
	asks := make([]tier.Ask, 8) // of as many groups, which the nodes of a Cluster divide among them
	limit := tier.Limit{Algorithm: tier.TokenBucket, Rate: 1, Period: time.Second, Burst: 1}
	for i := range asks {
		name, _ := remote.KeyName(prefix, "try", strconv.Itoa(i))
		asks[i] = tier.Ask{Key: name, Limit: limit, SlotUS: 1e6, Need: []tier.Cost{{N: 1, Count: 1}}}
	}
	_, err := c.Exchange(ctx, limit.Algorithm, 0, tier.Darkness{}, asks)
	if c.Grouped() { // a Cluster refuses them in one call; one of a single node takes them one by one
		for i := range asks {
			if _, err = c.Exchange(ctx, limit.Algorithm, 0, tier.Darkness{}, asks[i:i+1]); err != nil {
				break
			}
		}
	}
	return explained(err)
}

// explained adds to MOVED what it means here.
func explained(err error) error {
	if err != nil && strings.HasPrefix(err.Error(), "MOVED ") {
		return fmt.Errorf("it is one node of a Cluster, which this command cannot use: %w", err)
	}
	return err
}

// joinWithin is how long a fleet may take to hear from Redis before the load begins: heartbeats that time out are sent again all
// the while.
const joinWithin = 5 * time.Second

// tuned sets what go-redis would wait too long for. The limiter does not depend on it: each exchange has its own deadline.
func tuned(o *redis.Options) *redis.Options {
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = time.Second, time.Second, time.Second
	o.ContextTimeoutEnabled = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled} // Redis Cloud only
	return o
}

// client returns a new client for the store, at addr if that is not "".
func (s *store) client(addr string) *redis.Client {
	o := *s.opts
	if addr != "" {
		o.Addr = addr
	}
	return redis.NewClient(&o)
}

func (s *store) close() {
	if s.embedded != nil {
		s.embedded.Close()
	}
}
