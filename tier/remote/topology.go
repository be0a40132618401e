package remote

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// A Domain is what fails together: one Redis, or one master of a Cluster, or one shard of a Ring. Tag is the lowest group that
// lives there, so that all instances give a domain the same name, and so that its membership record lives there too.
type Domain struct{ Tag uint8 }

// Keys are the names of the domain's membership record: heartbeats, joins, and the fleet's history.
// '!' is in no limiter's name, so they collide with no limiter's key.
func (d Domain) Keys(prefix string) [3]string {
	tagged := prefix + groupTags[d.Tag] + "!"
	return [3]string{tagged + "beats", tagged + "joins", tagged + "fleet"}
}

// A topology maps each group to the tag of its domain. The zero topology is one domain.
type topology struct{ tags [Groups]uint8 }

// What a client is, by what it can do: a type that embeds one of go-redis's clients is taken for that client.
type (
	plainClient interface {
		Options() *redis.Options
	}
	clusterClient interface {
		ForEachMaster(ctx context.Context, fn func(ctx context.Context, client *redis.Client) error) error
		MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	}
	ringClient interface {
		GetShardClientForKey(key string) (*redis.Client, error)
	}
)

// Grouped reports whether keys of different groups may live on different servers, so that a call must keep to one group. True
// for a Cluster and a Ring, and for a client of unknown kind (an AutoPipeliner, a wrapper), where it is the safe answer. A plain
// client that turns out to talk to a cluster (CROSSSLOT) becomes grouped at that moment.
func (c *Client) Grouped() bool { return c.grouped.Load() }

// Domain maps a group to its domain as of the last Refresh; everything is Domain{0} before, and always for a plain or failover
// client. It never dials.
func (c *Client) Domain(group uint8) Domain { return Domain{Tag: c.topology.Load().tags[group]} }

// Refresh re-reads the topology; call it now and then, and when a domain keeps failing: go-redis by itself reloads a Cluster's only
// on a redirect. It is a no-op for a plain client and does not dial for a Ring, whose topology changes when the client drops a
// shard (that shard's keys then start anew elsewhere). On an error the old topology stays. It honours ctx as Exchange does.
func (c *Client) Refresh(ctx context.Context) error {
	switch rdb := c.rdb.(type) {
	case clusterClient:
		t, err := through(ctx, c.refreshing, func(ctx context.Context) (*topology, error) {
			// A loop over masters is the one call of go-redis that reloads the state before it returns; nothing is sent to them.
			err := rdb.ForEachMaster(ctx, func(context.Context, *redis.Client) error { return nil })
			if err != nil {
				return nil, err
			}
			return survey(c.prefix, func(key string) (*redis.Client, error) { return rdb.MasterForKey(ctx, key) })
		})
		if err != nil {
			return err
		}
		c.topology.Store(t)
	case ringClient:
		t, err := survey(c.prefix, rdb.GetShardClientForKey)
		if err != nil {
			return err
		}
		c.topology.Store(t)
	}
	return nil
}

var errNoServer = errors.New("tierlimit: no server for a group of keys")

// survey asks for the server of each group.
func survey(prefix string, serverOf func(key string) (*redis.Client, error)) (*topology, error) {
	t := new(topology)
	lowest := make(map[*redis.Client]uint8)
	for g := range Groups {
		server, err := serverOf(prefix + groupTags[g])
		if err != nil {
			return nil, err
		}
		if server == nil {
			return nil, errNoServer
		}
		tag, known := lowest[server]
		if !known {
			tag = uint8(g)
			lowest[server] = tag
		}
		t.tags[g] = tag
	}
	return t, nil
}
