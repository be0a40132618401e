package tierlimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.uber.org/zap"

	"github.com/tierlimit/tierlimit/breaker"
	"github.com/tierlimit/tierlimit/tier/local"
	"github.com/tierlimit/tierlimit/tier/remote"
)

// How the parts of an outage fit together (docs/guarantees.md derives it). An instance is missing to the others when no
// beat of it was executed for aliveBeats intervals. A view of the fleet may be used for viewFor after it was sent. So
// when that much time has passed since an instance's last beat can have been executed, every exchange of the others
// knows that it is missing, and keeps its share aside: now it may use it.
const (
	aliveBeats = 2
	deadBeats  = 12               // a member not heard for this many intervals,
	deadAfter  = 30 * time.Second // and not for this long, is forgotten
	driftParts = 1000             // clocks may differ in speed by one part in this many
)

func stretch(ns int64) int64 { return ns + ns/driftParts + 1 }
func shrink(ns int64) int64  { return ns - ns/driftParts - 1 }

// serverClock is what an instance knows of Redis's clock: it stood at us some time between sent and received.
type serverClock struct{ us, sent, received int64 }

func (k serverClock) known() bool { return k.us != 0 }

// at is the interval in which Redis's clock stands at the instance's time now.
func (k serverClock) at(now int64) local.Time {
	since := func(at int64, slow, fast func(int64) int64) int64 {
		if now >= at {
			return slow(now - at)
		}
		return -fast(at - now) // a time before the reading: the other way round
	}
	return local.Time{
		Lo: k.us + floorUS(since(k.received, shrink, stretch)),
		Hi: k.us + floorUS(since(k.sent, stretch, shrink)) + 1,
	}
}

// floorUS turns nanoseconds into microseconds, rounding down.
func floorUS(ns int64) int64 {
	us := ns / 1000
	if us*1000 > ns {
		us--
	}
	return us
}

// learn takes a new reading if it tells more than the old one does by now, or contradicts it: Redis's clock was set, or
// another server took over.
func (k serverClock) learn(us, sent, received int64) serverClock {
	old := k.at(received)
	if k.known() && us >= old.Lo-(received-sent)/1000 && us <= old.Hi && old.Hi-old.Lo < (received-sent)/1000 {
		return k
	}
	return serverClock{us, sent, received}
}

// fence is the latest server time at which a call sent now may run.
func (k serverClock) fence(now int64, timeout time.Duration) int64 {
	return k.at(now).Hi + timeout.Microseconds()
}

// membership is what a domain knows of its fleet. Guarded by domain.mu.
type membership struct {
	clock     serverClock
	oldClock  serverClock // of the server that the keys were with, while there is no other
	view      remote.View
	viewed    int64 // when the view in use was asked for; 0 for none
	due       int64 // when the next beat is to be sent
	tried     int64 // when the last one was
	leaving   bool  // no more beats
	asked     bool  // a beat was sent: it may be a member
	beating   bool  // one is on its way
	shaky     bool  // the last beat failed: only peek until Redis answers
	alive     int64 // the latest time at which a beat of this instance can have been executed
	wentAway  int64 // when Redis was last given up
	away      int64 // since when Redis is out of reach, 0 while it is not
	outage    int64 // number of the outage, unlike any other of its Hybrid: a key may move to another domain
	rejoining bool  // a beat is on its way that ends it
	back      int64 // the number of this instance's last return from being missing, unlike any other of its Hybrid
	backFrom  int64 // when the outage began that it ended
	backIn    int64 // the episode in which it was missing: told in another, it would stand for somebody else's return
	change    int64 // change counter as last heard
	untold    bool  // the fleet is to be told of a change
	telling   bool  // it is being told
	lostAt    int64 // as last heard
	came      int64 // when keys last moved here from another server, 0 for never
}

// heardLocked reports whether the fleet is known: from Redis, or from another that the keys were with. Caller holds domain.mu.
func (m *membership) heardLocked() bool { return m.viewed != 0 || m.view.N > 0 }

// viewFor is how long a view may be used, and a call that carries it may run.
func (h *Hybrid) viewFor() time.Duration { return h.cfg.heartbeat + h.cfg.remoteTimeout }

// deadAfter is how long a member must not be heard to be forgotten.
func (h *Hybrid) deadAfter() time.Duration { return max(deadAfter, deadBeats*h.cfg.heartbeat) }

// silence is how long after an instance's last sign of life its share may not be used.
func (h *Hybrid) silence() time.Duration {
	return time.Duration(stretch(int64(aliveBeats*h.cfg.heartbeat + h.viewFor() + time.Millisecond)))
}

// freshLocked reports whether exchanges may be sent now. Caller holds d.mu.
func (d *domain) freshLocked(now int64) bool {
	return d.m.viewed != 0 && !d.m.shaky && now < d.m.viewed+shrink(int64(d.h.viewFor()))
}

// beatLocked sends the next heartbeat if it is due. Caller holds d.mu.
func (d *domain) beatLocked(now int64) {
	if d.m.beating || now < d.m.due || d.h.forced.Load() || !d.h.resolved.Load() {
		return
	}
	done, err := d.breaker.Begin()
	if err != nil {
		d.m.due = now + max(int64(d.breaker.ProbeIn()), int64(time.Millisecond))
		d.m.shaky = true
		return
	}
	d.m.beating, d.m.tried = true, now
	d.h.heartbeats.Add(1)
	learn := d.m.shaky || !d.m.clock.known()
	d.flying.Go(func() { d.beat(learn, done) })
}

// hurryLocked lets the next beat be sent for the callers that wait for a view. The breaker is to find out at the pace of the time-outs; a
// refusal comes at once and must not make this a busy loop. Caller holds d.mu.
func (d *domain) hurryLocked(now int64) {
	if !d.m.beating && !d.m.leaving {
		d.m.due = min(d.m.due, max(now, d.m.tried+int64(time.Millisecond)))
	}
}

// newBeat is what every message about membership says.
func (h *Hybrid) newBeat(op string) remote.Beat {
	return remote.Beat{Op: op, ID: h.id, HeartbeatUS: h.cfg.heartbeat.Microseconds(), DeadUS: h.deadAfter().Microseconds()}
}

// message is a heartbeat to be sent now, and the latest time at which it can run, on this instance's clock.
func (d *domain) message(op string, now int64) (b remote.Beat, fenced int64) {
	b = d.h.newBeat(op)
	b.HorizonUS = max(d.h.longestFill(), aliveBeats*d.h.cfg.heartbeat).Microseconds()
	d.mu.Lock()
	defer d.mu.Unlock()
	b.Recall(d.m.view)
	if op != remote.OpPeek {
		k := d.m.clock
		timeout := int64(d.h.cfg.remoteTimeout)
		b.Fence = k.fence(now, d.h.cfg.remoteTimeout)
		// The fence is stretched once when it is set and once more until Redis's clock, if that is slow, reaches it.
		fenced = now + stretch(stretch(timeout+now-k.sent)) - (now - k.sent) + (k.received - k.sent)
	}
	return b, fenced
}

// errLate says that a heartbeat arrived after its fence, three times in a row.
var errLate = errors.New("tierlimit: heartbeats arrive too late to count")

// needed is the outcome that the breaker is to hear of a call without which there is no going on. What Redis refuses (by an ACL, say) is
// no failure of its own, and is not counted: here it is.
func needed(what string, err error) error {
	if breaker.Classify(err) == breaker.Ours {
		return errors.New("tierlimit: the " + what + " was refused: " + err.Error()) // not wrapped: it would be classified again
	}
	return err
}

// beat sends one heartbeat and takes in its answer. Where nothing is known of Redis's clock, or the outcome of the last
// beat is unknown, it peeks first: a peek is no sign of life, however late it runs.
func (d *domain) beat(learn bool, done func(error)) {
	var view remote.View
	var sent, received, fenced int64
	call := func(op string) error {
		if op == remote.OpBeat {
			// From here on the outage share must not be used, whether or not there is an outage yet: Redis may count on this instance.
			d.mu.Lock()
			d.m.rejoining, d.m.asked = true, true
			d.mu.Unlock()
		}
		sent = d.h.now()
		var b remote.Beat
		b, fenced = d.message(op, sent)
		ctx, cancel := context.WithTimeout(context.Background(), d.h.cfg.remoteTimeout)
		defer cancel()
		var err error
		view, err = d.h.client.Heartbeat(ctx, d.tag, b)
		received = d.h.now()
		if err == nil {
			d.mu.Lock()
			d.m.clock = d.m.clock.learn(view.Now, sent, received)
			d.m.rejoining = true // nor between a peek and the beat
			d.mu.Unlock()
		}
		return err
	}
	var err error
	if learn {
		err = call(remote.OpPeek)
	}
	unknown := false
	d.mu.Lock()
	if d.m.leaving {
		d.m.beating, d.m.rejoining = false, false
		d.mu.Unlock()
		done(err)
		return
	}
	d.mu.Unlock()
	if err == nil {
		for range 3 {
			if err = call(remote.OpBeat); err != nil || !view.Late {
				break
			}
		}
		unknown = err != nil && !remote.NotExecuted(err)
		if err == nil && view.Late {
			err = errLate
		}
	}
	done(needed("heartbeat", err))
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.wakeUp()
	d.m.beating, d.m.rejoining = false, false
	if err != nil {
		d.h.failures.Add(1)
		if unknown {
			// Redis may count on this instance until then: whatever share it had ends here, and a new silence begins.
			d.m.alive = max(d.m.alive, fenced)
			if d.m.away != 0 {
				d.m.away = received // where the share begins at once, it begins empty now
				d.m.outage = d.h.outages.Add(1)
				d.outage.Store(d.m.outage)
			}
		}
		d.m.shaky = true
		if !d.m.leaving {
			d.m.due = received + int64(d.h.cfg.heartbeat)/4
		}
		if d.queued > 0 {
			d.hurryLocked(received)
		}
		d.awayLocked(received)
		return
	}
	d.m.shaky = false
	if !d.m.leaving {
		d.m.due = received + int64(d.h.cfg.heartbeat)*3/4
	}
	d.m.alive = max(d.m.alive, received) // one of before may yet run
	d.m.away = 0
	d.outage.Store(0)
	first := d.m.viewed == 0
	missing := d.m.view.Darkness.Missing
	d.m.view, d.m.viewed = view, sent
	if view.WasMissing {
		d.m.back, d.m.backFrom, d.m.backIn = d.h.returns.Add(1), d.m.wentAway, view.Darkness.Episode
	}
	if !first && view.Change != d.m.change {
		d.laterLocked(d.h.dropDenials)
	}
	d.tellLocked()
	if !first && view.LostAt != d.m.lostAt {
		d.laterLocked(func() {
			d.h.log.Warn("Redis lost its data; telling it again what this instance knows")
			d.reseed()
		})
	}
	if was, is := missing, view.Darkness.Missing; was == 0 && is > 0 {
		d.laterLocked(func() {
			d.h.log.Warn("members of the fleet are not heard: what may be their shares is kept aside until they are heard again, leave or are forgotten",
				zap.Int64("missing", is), zap.Int("members", view.N), zap.Int64("share_of", view.Darkness.Fleet), zap.Duration("forgotten_after", d.h.deadAfter()))
		})
	} else if was > 0 && is == 0 {
		d.laterLocked(func() { d.h.log.Info("no member of the fleet is missing any more") })
	}
	d.m.change, d.m.lostAt = view.Change, view.LostAt
	d.awayLocked(received) // ForceLocal came while the beat was on its way
	d.reportStateLocked(received)
}

// awayLocked begins an outage, once Redis is given up. Caller holds d.mu.
func (d *domain) awayLocked(now int64) {
	if d.m.away == 0 && (!d.breaker.Ready() || d.h.forced.Load()) {
		d.m.away, d.m.wentAway = now, now
		d.m.outage = d.h.outages.Add(1)
		d.outage.Store(d.m.outage)
		d.reportStateLocked(now)
		for _, q := range d.ready {
			d.laterLocked(func() { d.putOff(q.all()) })
		}
		clear(d.ready)
		d.queued = 0
		select {
		case d.h.lost <- struct{}{}:
		default:
		}
	}
}

// outageID is the number of the outage that is under way, 0 for none.
func (d *domain) outageID() int64 { return d.outage.Load() }

// isAway reports whether an outage is under way.
func (d *domain) isAway() bool { return d.outageID() != 0 }

// down reports whether checks are decided without Redis.
func (d *domain) down() bool { return !d.breaker.Ready() || d.h.forced.Load() }

// force takes the domain out of the fleet by hand, or back.
func (d *domain) force(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.h.now()
	if on {
		d.tellLocked()
		d.awayLocked(now)
	} else {
		d.m.shaky = true // peek first: the share ends before the beat
		d.m.due = now
	}
	d.wakeUp()
}

// state is how the domain stands, and the fleet as last heard.
func (d *domain) state(now int64) (State, remote.View) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stateLocked(now), d.m.view
}

// stateLocked is how the domain stands. Caller holds d.mu.
func (d *domain) stateLocked(now int64) State {
	switch {
	case d.m.away != 0 && (!d.m.heardLocked() || now >= d.m.alive+int64(d.h.silence()+2*d.h.cfg.leaseTTL)):
		return StateShare
	case d.m.away != 0:
		return StateSilent
	case d.m.viewed == 0:
		return StateConnecting
	}
	return StateOnline
}

// reportStateLocked tells the observer and the log of a change. Caller holds d.mu; they are called without it.
func (d *domain) reportStateLocked(now int64) {
	s := d.stateLocked(now)
	if s == d.reported {
		return
	}
	e := StateEvent{From: d.reported, To: s, Instances: d.m.view.N, Rank: d.m.view.Rank}
	d.reported = s
	d.laterLocked(func() {
		d.h.log.Info("state", zap.Stringer("from", e.From), zap.Stringer("to", e.To), zap.Int("instances", e.Instances), zap.Int("rank", e.Rank))
		if o := d.h.cfg.observer; o != nil {
			o.State(e)
		}
	})
}

// Why leave does not tell Redis. What the others keep aside then is in Close's doc.
var (
	errLeaveForced = errors.New("tierlimit: Redis was not told that this instance leaves: ForceLocal is on")
	errLeaveDown   = errors.New("tierlimit: Redis was not told that this instance leaves: it is out of reach, the breaker is open")
)

// leave tells Redis that this instance is gone, so that the others may have its share.
func (d *domain) leave(ctx context.Context) error {
	d.mu.Lock()
	d.m.leaving = true
	d.m.due = math.MaxInt64
	d.mu.Unlock()
	// A beat that is on its way must not run after the leave: it would join again. The first one may join yet.
	err := d.await(ctx, func() bool { return !d.m.beating })
	d.mu.Lock()
	asked := d.m.asked || d.m.beating
	untold := d.m.untold
	d.mu.Unlock()
	switch {
	case !asked:
		return nil
	case d.h.forced.Load():
		return errLeaveForced
	case d.down():
		return errLeaveDown
	}
	if err != nil {
		return fmt.Errorf("tierlimit: Redis was not told that this instance leaves, its last heartbeat was on its way: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, d.h.cfg.remoteTimeout)
	defer cancel()
	if untold {
		_, _ = d.h.client.Heartbeat(ctx, d.tag, d.h.newBeat(remote.OpChange))
	}
	_, err = d.h.client.Heartbeat(ctx, d.tag, d.h.newBeat(remote.OpLeave))
	if err != nil {
		return fmt.Errorf("tierlimit: Redis could not be told that this instance leaves: %w", err)
	}
	return nil
}

// changed tells the fleet to drop kept denials, at the latest with their next heartbeats.
func (d *domain) changed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.m.untold = true
	d.tellLocked()
}

// changedSince reports whether a change was heard of after the counter stood so.
func (d *domain) changedSince(change int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.m.change != change
}

// tellLocked tells the fleet of a change that it has not been told of; of one that it may not have heard, after the next heartbeat again.
// Caller holds d.mu.
func (d *domain) tellLocked() {
	if !d.m.untold || d.m.telling || d.m.away != 0 || d.stopped {
		return
	}
	d.m.untold, d.m.telling = false, true
	d.flying.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), d.h.cfg.remoteTimeout)
		defer cancel()
		_, err := d.h.client.Heartbeat(ctx, d.tag, d.h.newBeat(remote.OpChange))
		d.mu.Lock()
		defer d.mu.Unlock()
		d.m.telling = false
		d.m.untold = d.m.untold || err != nil
	})
}

// dropDenials makes every kept denial void: a key was reset or a limit raised somewhere.
func (h *Hybrid) dropDenials() { h.table.Each((*local.Cell).Allow) }

// reseed settles every key that Redis may have forgotten, so that it learns what this instance knows.
func (d *domain) reseed() {
	now := d.h.now()
	tell := func(c *local.Cell) {
		if c.Born != 0 && now < c.Known && d.h.domainOf(c) == d {
			d.enqueueLocked(c)
		}
	}
	d.h.table.Each(func(c *local.Cell) {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		tell(c)
	})
	d.h.recall(func(owner uint32, key string) bool { return d.h.domainFor(owner, key) == d }, tell)
}
