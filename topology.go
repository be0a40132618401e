package tierlimit

import (
	"context"
	"slices"
	"time"

	"github.com/tierlimit/tierlimit/tier/remote"
)

// lookEvery is how often the map of a Cluster or Ring is read.
const lookEvery = 5 * time.Second

// followTopology keeps the map of a Cluster or Ring: at the start, now and then, when a server was given up and more often
// while one is: another may have taken over. Until it is known nothing is sent, since a key's message carries what its own
// server's heartbeat said.
func (h *Hybrid) followTopology() {
	const whileAway = time.Second
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-h.lost:
		case <-t.C:
		}
		wait := lookEvery
		switch err := h.refresh(); {
		case err != nil && !h.resolved.Load():
			wait = h.cfg.remoteTimeout
		case h.unsettled():
			wait = max(h.cfg.remoteTimeout, whileAway/10)
		case slices.ContainsFunc(h.allDomains(), (*domain).isAway):
			wait = whileAway
		}
		t.Reset(wait)
	}
}

// refresh reads the topology. While it has never been known, a failure counts against Redis as a whole, and callers are
// decided for locally once the breaker of the first domain opens.
func (h *Hybrid) refresh() error {
	ctx, cancel := context.WithTimeout(context.Background(), h.cfg.remoteTimeout)
	defer cancel()
	if h.resolved.Load() {
		err := h.client.Refresh(ctx)
		h.joinDomains()
		return err
	}
	d := h.domain(remote.Domain{})
	done, err := d.breaker.Begin()
	if err != nil {
		return err
	}
	err = h.client.Refresh(ctx)
	done(needed("topology", err)) // a server may not tell: an ACL, no cluster
	if err == nil {
		h.joinDomains()
		h.resolved.Store(true)
		for _, d := range h.allDomains() {
			d.rehome()
			d.wakeUp()
		}
	}
	d.wakeUp()
	return err
}

// joinDomains joins the fleet on every server, also where this instance has no key yet: when that server dies, whoever was not
// heard there would count itself alone, and the others would not count it.
func (h *Hybrid) joinDomains() {
	homes := *h.homes.Load()
	for g := range homes {
		now := h.client.Domain(uint8(g))
		d := h.domain(now)
		// A server that takes over others' groups may get another name, perhaps that of one that is out of reach. Its own keys go on under the
		// old name, which all instances keep alive there, until the new one answers.
		old := remote.Domain{Tag: homes[g]}
		if old != now {
			d.inherit(h.domain(old))
		}
		if state, _ := d.state(h.now()); old != now && h.resolved.Load() && state != StateOnline && h.client.Domain(old.Tag) == now {
			continue
		}
		if old != now && h.resolved.Load() {
			d.mu.Lock()
			d.m.came = h.now()
			d.mu.Unlock()
		}
		homes[g] = now.Tag
	}
	h.homes.Store(&homes)
}

// unsettled reports whether keys go on under an old name.
func (h *Hybrid) unsettled() bool {
	for g, tag := range h.homes.Load() {
		if h.client.Domain(uint8(g)).Tag != tag {
			return true
		}
	}
	return false
}

// rehome hands what was queued before the topology was known to the domains it belongs to.
func (d *domain) rehome() {
	d.mu.Lock()
	var places []place
	for _, q := range d.ready {
		places = append(places, q.all()...)
	}
	clear(d.ready)
	d.queued = 0
	d.m.away, d.m.due = 0, 0
	d.outage.Store(0)
	d.mu.Unlock()
	for _, p := range places {
		p.c.Mu.Lock()
		if p.leaveLocked() {
			d.h.domainOf(p.c).enqueueLocked(p.c)
		}
		p.c.Mu.Unlock()
	}
}

// inherit lets a domain whose record is new to this instance remember what the one knew under whose name its keys were so far: who was
// there and has not been heard since may be using its share, and what was leased there may be spent yet.
func (d *domain) inherit(old *domain) {
	now := d.h.now()
	_, view := old.state(now)
	clock := old.serverClock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.m.viewed == 0 && d.m.view.N < view.N {
		d.m.view, d.m.alive, d.m.oldClock = view, now, clock
	}
}
