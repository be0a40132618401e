package remote

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/tier"
)

// A Client speaks the protocol over one redis.UniversalClient. It never dials by itself and never sends anything twice, whatever
// the options of the client it was given. Safe for concurrent use.
type Client struct {
	rdb     redis.UniversalClient
	prefix  string
	scripts *scripts

	grouped    atomic.Bool
	topology   atomic.Pointer[topology]
	gates      [Groups]atomic.Pointer[gate] // by the tag of the domain, so that a hung server takes no other's places
	refreshing *gate
	calls      atomic.Int64
}

// A script is known to a server by its digest; the body is sent only to a server that does not know it.
type script struct{ sha, body string }

type scripts struct {
	exchange   [tier.Algorithms + 1]script // by Algorithm; 0 is empty
	membership script
}

// New returns a Client for rdb. It does not dial. All keys begin with prefix, which must hold no '{'.
func New(rdb redis.UniversalClient, prefix string) *Client {
	return newClient(rdb, prefix, embedded())
}

func newClient(rdb redis.UniversalClient, prefix string, s *scripts) *Client {
	c := &Client{rdb: rdb, prefix: prefix, scripts: s, refreshing: newGate(4)}
	c.topology.Store(new(topology))
	_, plain := rdb.(plainClient)
	c.grouped.Store(!plain)
	if _, ring := rdb.(ringClient); ring {
		// Not an error yet: a Ring without live shards is one domain until Refresh says otherwise.
		_ = c.Refresh(context.Background())
	}
	return c
}

// Calls is the number of script calls sent so far, counting a script that had to be loaded as two.
func (c *Client) Calls() int64 { return c.calls.Load() }

// ExchangeThen settles and leases in one script call: asks are 1 to MaxKeys keys of algorithm alg, of one group where Grouped says so.
// fence is the latest server time (µs) at which it may run, 0 for whenever: without one, a call whose answer was given up may still
// run much later.
//
// then is called once, as soon as there is an answer or ctx is done, even where the client does not honour that; ctx should carry a
// deadline. ExchangeThen itself returns when the client has. NotExecuted tells whether an error proves that nothing was done;
// otherwise the outcome is unknown.
//
// The call is never sent twice, with one exception that is none: a server that does not know the script refuses it, and is then
// sent the script itself.
//
// Cost: one command, and a goroutine if ctx is done first; the server's work is that of the script, for each key.
func (c *Client) ExchangeThen(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask, then func(Reply, error)) {
	if err := c.check(alg, asks); err != nil {
		then(Reply{}, err)
		return
	}
	args, err := encodeAsks(fence, dark, asks)
	if err != nil {
		then(Reply{}, err)
		return
	}
	c.callThen(ctx, c.domainOf(asks[0].Key), &c.scripts.exchange[alg], args, func(answer any, err error) {
		if err != nil {
			then(Reply{}, err)
			return
		}
		then(decodeReply(answer, asks))
	})
}

// Exchange is ExchangeThen for a caller that waits. Cost: a goroutine more.
func (c *Client) Exchange(ctx context.Context, alg tier.Algorithm, fence int64, dark tier.Darkness, asks []tier.Ask) (Reply, error) {
	return await(func(done func(Reply, error)) { c.ExchangeThen(ctx, alg, fence, dark, asks, done) })
}

// check refuses what would fail at the server in a way that is hard to tell, or worse would not.
func (c *Client) check(alg tier.Algorithm, asks []tier.Ask) error {
	switch {
	case alg < 1 || int(alg) > tier.Algorithms:
		return unsendable("no such algorithm")
	case len(asks) == 0:
		return unsendable("no keys")
	case len(asks) > MaxKeys:
		return unsendable("too many keys")
	}
	tag := hashTag(asks[0].Key)
	for i := range asks {
		if asks[i].Limit.Algorithm != alg {
			return unsendable("keys of several algorithms")
		}
		if c.Grouped() && hashTag(asks[i].Key) != tag {
			return unsendable("keys of several groups")
		}
	}
	return nil
}

// hashTag returns what decides where key lives: what is in its first braces.
func hashTag(key string) string {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

// domainOf returns the domain of a key that KeyName made.
func (c *Client) domainOf(key string) Domain {
	tag := hashTag(key)
	group := 0
	for i := 0; i < len(tag); i++ {
		if tag[i] < '0' || tag[i] > '9' || group >= Groups {
			return Domain{}
		}
		group = group*10 + int(tag[i]-'0')
	}
	if group >= Groups {
		return Domain{}
	}
	return c.Domain(uint8(group))
}

// once is a command that go-redis must not retry by itself: its default is three times, and a script that runs twice spends twice.
// Redirections are followed all the same, because a redirected command did not run.
type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }

// callThen runs a script through the gate of its domain.
func (c *Client) callThen(ctx context.Context, domain Domain, s *script, args []any, done func(any, error)) {
	then(ctx, c.gate(domain), func(lasting context.Context) (any, error) {
		args[0], args[1] = "evalsha", s.sha
		answer, err := c.send(lasting, args)
		if isNoScript(err) {
			// At any moment: SCRIPT FLUSH, a restart, a replica promoted, another node of the cluster. EVAL runs the script and
			// teaches it in one round trip, at the very node that owns the key, where a SCRIPT LOAD would go to any node.
			if ctx.Err() != nil {
				return nil, unsent(err)
			}
			args = slices.Clone(args) // a hook may have kept the first command
			args[0], args[1] = "eval", s.body
			answer, err = c.send(lasting, args)
		}
		if isCrossSlot(err) {
			c.grouped.Store(true)
		}
		return answer, err
	}, done)
}

func (c *Client) send(ctx context.Context, args []any) (any, error) {
	cmd := once{redis.NewCmd(ctx, args...)}
	cmd.SetFirstKeyPos(3)
	// Known here, and asking for it would cost a COMMAND to some node of a Cluster, perhaps a hung one, before the first call.
	cmd.SetStepCount(1)
	c.calls.Add(1)
	if err := c.rdb.Process(ctx, cmd); err != nil {
		return nil, err
	}
	// An asynchronous client returns from Process before the answer is there; Result waits for it.
	return cmd.Result()
}

func (c *Client) gate(d Domain) *gate {
	if g := c.gates[d.Tag].Load(); g != nil {
		return g
	}
	c.gates[d.Tag].CompareAndSwap(nil, newGate(maxAbandoned))
	return c.gates[d.Tag].Load()
}
