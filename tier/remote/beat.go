package remote

import (
	"context"
	"math"

	"github.com/tierlimit/tierlimit/tier"
)

// What a heartbeat call does.
const (
	OpBeat   = "beat"   // I am alive
	OpPeek   = "peek"   // read only: the half-open probe, and what the server's clock says
	OpLeave  = "leave"  // I am gone
	OpChange = "change" // a reset or a raised limit: everybody drop kept denials
)

// A Beat is one instance's message to the membership record of a domain.
type Beat struct {
	Fence       int64  // latest server time at which it may run, µs; 0: whenever
	Op          string // one of the Op constants
	ID          string // random, one per Hybrid
	HeartbeatUS int64  // interval of the beats
	DeadUS      int64  // a member not heard for this long is forgotten
	HorizonUS   int64  // for how long a darkness is remembered after it ended
	Remembered  int64  // View.Beats as last heard, 0 for nothing: a lower count proves that the server lost its data

	// What the last answer said of the fleet, for a server that lost its data: until the members that are missing then are heard,
	// or DeadUS has passed, they may be using their shares.
	Members int64 // View.N, 0 for nothing
	Least   int64 // the smaller of View.Darkness.Fleet and Least: on which a share in use may be based
	Since   int64 // View.Now; while a darkness was remembered, when that began
}

// Recall fills in what is remembered of the fleet: v is the last answer heard. HorizonUS has to be set.
func (b *Beat) Recall(v View) {
	d := v.Darkness
	b.Remembered, b.Members, b.Least, b.Since = v.Beats, int64(v.N), min(d.Fleet, d.Least), v.Now
	if d.Until > 0 && v.Now-d.Until <= b.HorizonUS {
		b.Since = min(v.Now, d.From)
	}
}

// A View is what the membership record says.
type View struct {
	Now        int64 // the server's clock as the script ran, µs
	Late       bool  // it arrived after its fence: nothing was done, nothing else is filled in
	N          int   // members
	Rank       int   // mine among them, by time of joining, from 0; -1 when I am none
	Ready      bool  // nobody can still be using a share that has not made room for mine
	Darkness   tier.Darkness
	WasMissing bool  // this beat ended my own silence
	Beats      int64 // beats counted so far by the whole fleet
	LostAt     int64 // server time of the last proven loss of data, 0 for never
	Change     int64 // a difference says: drop kept denials
}

// Heartbeat runs one membership call for a domain. It may be called with any Op at any time; like an exchange it is never resent.
// The errors are those of Exchange. The server does O(log n) work for n members.
func (c *Client) Heartbeat(ctx context.Context, domain Domain, b Beat) (View, error) {
	args := command(len(domain.Keys(c.prefix)), beatArgs)
	for _, key := range domain.Keys(c.prefix) {
		args = append(args, key)
	}
	args = append(args, b.Fence, b.Op, b.ID, b.HeartbeatUS, b.DeadUS, b.HorizonUS, b.Remembered,
		b.Members, b.Least, b.Since)
	answer, err := await(func(done func(any, error)) { c.callThen(ctx, domain, &c.scripts.membership, args, done) })
	if err != nil {
		return View{}, err
	}
	return decodeView(answer)
}

func decodeView(answer any) (View, error) {
	in := reader{}
	if !in.open(answer, headerReply) {
		return View{}, in.err
	}
	all := len(in.rest)
	v := View{Now: in.integer(), Late: in.flag()}
	switch {
	case in.err != nil:
		return View{}, in.err
	case v.Late && (all == headerReply || all == beatReply):
		return v, nil
	case all != beatReply:
		return View{}, malformed("wrong length")
	}
	v.N = int(in.between(0, math.MaxInt32))
	v.Rank = int(in.between(-1, math.MaxInt32))
	v.Ready = in.flag()
	v.Darkness = tier.Darkness{
		Missing: in.integer(), Most: in.integer(), Fleet: in.integer(),
		From: in.integer(), Until: in.integer(), Episode: in.integer(), Returned: in.integer(),
	}
	v.WasMissing = in.flag()
	v.Beats, v.LostAt, v.Change = in.integer(), in.integer(), in.integer()
	v.Darkness.Least = in.integer()
	if in.err != nil {
		return View{}, in.err
	}
	if v.Rank >= 0 && v.Rank >= v.N {
		return View{}, malformed("a rank outside the fleet")
	}
	return v, nil
}
