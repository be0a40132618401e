package model

import (
	"maps"
	"slices"

	"github.com/tierlimit/tierlimit/tier"
)

// log keeps the admissions by ticks: those of tick i were made before (i+1)*tick.
type log struct {
	slots
	tick  int64
	ticks map[int64]int64
}

func (l *log) sum() (n int64) {
	for _, k := range l.ticks {
		n += k
	}
	return n
}

func (l *log) add(at, n int64) {
	if n > 0 {
		l.ticks[max(0, at)/l.tick] += n
	}
}

// leaves is when what was admitted in tick i is no longer inside the window.
func (l *log) leaves(i, period int64) int64 { return (i+1)*l.tick + period }

func (l *log) prune(now, period int64) {
	maps.DeleteFunc(l.ticks, func(i, _ int64) bool { return now >= l.leaves(i, period) })
}

// fold moves ticks to come into that of now: they were before the server's clock went back.
func (l *log) fold(now int64) {
	for i, n := range l.ticks {
		if i > now/l.tick {
			delete(l.ticks, i)
			l.add(now, n)
		}
	}
}

// advance rolls the slots over; leases that died unreported were spent at the last moment.
func (l *log) advance(now, length int64) {
	for now >= l.send && l.out() > 0 { // twice at most
		died := l.send
		l.add(died, l.roll(length))
	}
	if now >= l.send {
		l.open(now, length)
	}
}

// retick starts another resolution: what is there counts as of now.
func (l *log) retick(now, tick int64) {
	n := l.sum()
	l.tick, l.ticks = tick, map[int64]int64{}
	l.add(now, n)
}

func (c *call) exchangeLog(what claim) (ttl int64) {
	l, a, d := &c.log, c.ask, c.dark
	limit, period := a.Limit.Rate, a.Limit.PeriodUS()
	tick := max(1, period/500)
	if l.ticks == nil {
		l.tick, l.ticks = tick, map[int64]int64{}
		l.open(c.now, a.SlotUS)
	}
	if l.tick != tick {
		l.retick(c.now, tick)
	}
	l.stepBack(c.now)
	l.advance(c.now, a.SlotUS)
	l.prune(c.now, period)
	l.fold(c.now)

	if what >= created {
		c.lost = true
		l.add(c.now, a.Own+a.Carry)
	}
	if a.Back {
		l.add(c.now, a.Own)
	}
	room := limit
	if d.Until > 0 && c.now >= d.From && (d.Missing > 0 || c.now <= d.Until+2*period) {
		room = c.spared(limit)
	}
	sum := l.find(a.Lease)
	if c.v.LateReturns && sum == nil && a.Lease > 0 {
		l.giveBack(a.Return)
	}
	if sum != nil && what < created {
		c.g.Credited = true
		spends := a.Spends
		if len(spends) == 0 && a.Spent > 0 {
			spends = []tier.Spend{{Count: a.Spent}}
		}
		for _, s := range spends {
			n := min(s.Count, *sum)
			*sum -= n
			l.add(c.now-min(s.AgeUS, 2*l.length+period), n)
		}
		*sum -= min(a.Return, *sum)
		l.prune(c.now, period)
		if l.sum()+l.out() > room && !c.v.KeepsCarry {
			c.g.Credited = sum == &l.oc || a.Carry == 0
		} else {
			carry := min(a.Carry, *sum)
			*sum -= carry
			l.oc += carry
		}
	}
	switch {
	case a.Refund == tier.RefundAll:
		clear(l.ticks)
	case a.Refund > 0:
		l.giveBack(a.Refund)
	}

	left := func() int64 { return max(0, room-l.sum()-l.out()) }
	l.add(c.now, c.need(left()))
	q := c.lease(left())
	if c.v.NoStretch {
		l.add(c.now, q)
	} else {
		l.oc += q
	}

	c.g.Slot = l.send
	c.g.LifeUS = max(0, l.send+l.length-c.now-1)
	c.g.Remaining = left()
	c.g.Out = l.out()
	c.g.RetryUS = -1
	leaves := c.leaving(period)
	if c.room <= room {
		c.g.RetryUS = 0
		total := l.sum() + l.out()
		for _, x := range leaves {
			if total+c.room <= room {
				break
			}
			total -= x.n
			c.g.RetryUS = max(0, x.at-c.now)
		}
	}
	if len(leaves) > 0 {
		c.g.ResetUS = max(0, leaves[len(leaves)-1].at-c.now)
	}
	return 2*max(l.length, a.SlotUS) + period + l.tick + 1_000_000
}

// giveBack takes n admissions out of the newest ticks.
func (l *log) giveBack(n int64) {
	ticks := slices.Sorted(maps.Keys(l.ticks))
	for _, i := range slices.Backward(ticks) {
		k := min(n, l.ticks[i])
		l.ticks[i] -= k
		n -= k
		if l.ticks[i] == 0 {
			delete(l.ticks, i)
		}
	}
}

type leaving struct{ at, n int64 }

// leaving lists what is inside the window by the time at which it leaves: ticks, and leases as if they died unreported.
func (c *call) leaving(period int64) (all []leaving) {
	l := &c.log
	for i, n := range l.ticks {
		all = append(all, leaving{l.leaves(i, period), n})
	}
	if l.op > 0 {
		all = append(all, leaving{l.leaves(l.send/l.tick, period), l.op})
	}
	if l.oc > 0 {
		died := l.send + max(l.length, c.ask.SlotUS)
		all = append(all, leaving{l.leaves(died/l.tick, period), l.oc})
	}
	slices.SortFunc(all, func(a, b leaving) int {
		switch {
		case a.at < b.at:
			return -1
		case a.at > b.at:
			return 1
		}
		return 0
	})
	return all
}
