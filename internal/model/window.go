package model

import (
	"slices"

	"github.com/tierlimit/tierlimit/tier"
)

// window is the state of a fixed window (one count) or a sliding one (k+1 counts, the oldest first).
type window struct {
	idx    int64 // of the newest (sub-)window
	length int64 // of one, µs
	count  []int64
	out    int64 // leased in the newest and neither committed nor returned
}

// now returns the newest count.
func (w *window) now() *int64 { return &w.count[len(w.count)-1] }

// clear begins anew at index i.
func (w *window) clear(i, length int64, n int) {
	*w = window{idx: i, length: length, count: make([]int64, n)}
}

// moveTo makes i the newest (sub-)window. One step back is borne: the server's clock is being adjusted; more is not.
func (w *window) moveTo(i int64) {
	switch k := int64(len(w.count)); {
	case i > w.idx:
		n := min(i-w.idx, k)
		copy(w.count, w.count[n:])
		clear(w.count[k-n:])
		w.idx, w.out = i, 0
	case i < w.idx-1:
		w.clear(i, w.length, len(w.count))
	}
}

// take is what the report says of a lease of the newest (sub-)window.
func (w *window) take(a *tier.Ask) {
	back := min(a.Return, *w.now())
	*w.now() -= back
	w.out -= min(a.Spent+back, w.out)
}

// life is how long tokens of the newest (sub-)window are good for.
func (c *call) life(end int64) int64 {
	if c.v.NoTie {
		return c.ask.SlotUS
	}
	return max(0, end-c.now-1)
}

func (c *call) exchangeFixed(what claim) (ttl int64) {
	w, a, d := &c.window, c.ask, c.dark
	limit, period := a.Limit.Rate, a.Limit.PeriodUS()
	i := c.now / period
	if w.length != period {
		if w.count == nil || c.now >= (w.idx+1)*w.length {
			w.clear(i, period, 1)
		}
		w.idx, w.length = i, period // what the window that was not over has counted goes on
	}
	w.moveTo(i)
	start, end := w.idx*period, (w.idx+1)*period
	count := w.now()

	if what >= created {
		c.lost = true
		if a.Lease == w.idx {
			*count += a.Own + a.Carry
		}
	}
	if a.Back && (a.Lease == w.idx || a.Lease == 0) {
		*count += a.Own
	}
	if a.Lease == w.idx && what < created {
		c.g.Credited = true
		w.take(a)
	}
	switch {
	case a.Refund == tier.RefundAll:
		*count = min(*count, w.out)
	case a.Refund > 0:
		*count = max(min(*count, w.out), *count-a.Refund)
	}

	room := limit
	if d.Until > 0 && start >= d.From && (d.Missing > 0 || start <= d.Until) {
		room = c.spared(limit)
	}
	*count += c.need(max(0, room-*count))
	if c.life(end) > 0 {
		q := c.lease(max(0, room-*count))
		*count += q
		w.out += q
	}

	c.g.Slot, c.g.LifeUS = w.idx, c.life(end)
	c.g.Remaining = max(0, room-*count)
	c.g.Out = w.out
	switch {
	case c.room > limit:
		c.g.RetryUS = -1
	case c.room > room-*count:
		c.g.RetryUS = end - c.now
	}
	if *count > 0 {
		c.g.ResetUS = end - c.now
	}
	return end - c.now + 1_000_000
}

func (c *call) exchangeSliding(what claim) (ttl int64) {
	w, a, d := &c.window, c.ask, c.dark
	limit, period, length := a.Limit.Rate, a.Limit.PeriodUS(), a.Limit.SubWindowUS()
	k := int64(max(1, a.Limit.SubWindows))
	i := c.now / length
	if w.length != length || len(w.count) != int(k+1) {
		// Another division of time: what may still be inside counts as of now.
		old, out := *w, w.out
		w.clear(i, length, int(k+1))
		if n := int64(len(old.count)); c.now < (old.idx+n)*old.length {
			for _, x := range old.count {
				*w.now() += x
			}
		}
		w.out = out
	}
	w.moveTo(i)
	end := (w.idx + 1) * length
	count := w.now()

	if what >= created {
		c.lost = true
		*count += a.Own + a.Carry
	}
	if a.Back {
		*count += a.Own
	}
	if what < created && a.Lease > 0 {
		switch {
		case a.Lease == w.idx:
			c.g.Credited = true
			w.take(a)
		case a.Lease < w.idx && a.Lease >= w.idx-k:
			then := // never admitted, so that it may come back; but there is nothing to carry any more
				&w.count[a.Lease-(w.idx-k)]
			*then -= min(a.Return, *then)
		}
	}
	switch {
	case a.Refund == tier.RefundAll:
		out := min(*count, w.out)
		clear(w.count)
		*count = out
	case a.Refund > 0:
		*count = max(min(*count, w.out), *count-a.Refund)
	}

	room := limit
	if d.Until > 0 && c.now >= d.From && (d.Missing > 0 || c.now <= d.Until+period+length) {
		room = c.spared(limit)
	}
	left := func() int64 { return max(0, room-estimate(w.count, w.elapsed(c.now), length)) }
	*count += c.need(left())
	if c.life(end) > 0 {
		q := c.lease(left())
		*count += q
		w.out += q
	}

	c.g.Slot, c.g.LifeUS = w.idx, c.life(end)
	c.g.Remaining = left()
	c.g.Out = w.out
	c.g.RetryUS = -1
	switch {
	case c.room <= left():
		c.g.RetryUS = 0
	case c.room <= room:
		c.g.RetryUS = c.retrySliding(room)
	}
	for j, n := range w.count {
		if n > 0 {
			c.g.ResetUS = (w.idx+int64(j)+1)*length - c.now
		}
	}
	return end + period - c.now + 1_000_000
}

// elapsed is the part of the newest sub-window that is over.
func (w *window) elapsed(now int64) int64 { return max(0, now-w.idx*w.length) }

// estimate is the sum of the newest k counts and the part of the oldest that is still inside, rounded up.
func estimate(count []int64, elapsed, length int64) (sum int64) {
	for _, n := range count[1:] {
		sum += n
	}
	return sum + ceilDiv(count[0], length-elapsed, length, most)
}

// retrySliding walks over the sub-windows to come: the earliest time at which the estimate leaves room for the cost.
func (c *call) retrySliding(limit int64) int64 {
	count := slices.Clone(c.window.count)
	length := c.window.length
	for idx := c.window.idx; ; idx++ {
		e := int64(0)
		if idx == c.window.idx {
			e = c.window.elapsed(c.now)
		}
		free := limit - c.room
		for _, n := range count[1:] {
			free -= n
		}
		if free >= 0 {
			// The least e with ceil(oldest*(length-e)/length) <= free.
			if count[0] > free {
				e = max(e, length-floorDiv(free, length, count[0], length))
			}
			if e < length {
				return max(0, idx*length+e-c.now)
			}
		}
		copy(count, count[1:])
		count[len(count)-1] = 0
	}
}
