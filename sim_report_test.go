package tierlimit

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// What make sim runs and writes. Without TIERLIMIT_LONG a small part of the same, on prices measured earlier.

const (
	simBegin = "<!-- make sim writes from here -->\n"
	simEnd   = "<!-- make sim writes to here -->\n"
)

// simRuns plays runs side by side and returns them in the order of the configs; fewer, when only some were asked for with -run, and
// then the document is not to be written.
func (d *simDoc) simRuns(t *testing.T, what string, configs []simConfig, judge func(t *testing.T, f *simFigure)) []*simFigure {
	out := make([]*simFigure, len(configs))
	t.Run(what, func(t *testing.T) {
		for k, c := range configs {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.seed += uint64(k + 1)
				out[k] = simulate(t, c)
				t.Log(out[k])
				if judge != nil {
					judge(t, out[k])
				}
			})
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	out = slices.DeleteFunc(out, func(f *simFigure) bool { return f == nil })
	d.partial = d.partial || len(out) < len(configs)
	for _, f := range out {
		d.runs++
		d.virtual += f.virtual
		d.elapsed += f.elapsed
		if f.loses == 0 {
			d.most = max(d.most, f.verdict.Overshoot)
		}
	}
	return out
}

// full fails a run that falls short of a part of what was there to be had, by more than a token.
func full(part float64) func(*testing.T, *simFigure) {
	return func(t *testing.T, f *simFigure) {
		if missing := (1 - f.use()) * float64(f.could); f.use() < part && missing > 1 {
			t.Errorf("utilisation %.4f, want %.2f: %v", f.use(), part, f)
		}
	}
}

// A simDoc collects the document.
type simDoc struct {
	bytes.Buffer
	runs    int
	virtual time.Duration
	elapsed time.Duration
	partial bool
	most    int64 // the greatest overshoot of the runs in which Redis kept its data
}

func (d *simDoc) text(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

func (d *simDoc) row(cells ...any) {
	for _, c := range cells {
		fmt.Fprintf(d, "| %v ", c)
	}
	d.WriteString("|\n")
}

func (d *simDoc) head(cells ...any) {
	d.WriteByte('\n')
	d.row(cells...)
	d.WriteString(strings.Repeat("|---", len(cells)) + "|\n")
}

// count writes a number with as many digits as matter.
func count(x float64) string {
	switch {
	case x >= 10000:
		return fmt.Sprintf("%.1fk", x/1000)
	case x >= 1000:
		return fmt.Sprintf("%.2fk", x/1000)
	case x >= 10:
		return fmt.Sprintf("%.0f", x)
	}
	return fmt.Sprintf("%.1f", x)
}

func percent(x float64) string { return fmt.Sprintf("%.1f", 100*x) }

// bars plots figures on a logarithmic scale.
func (d *simDoc) bars(names []string, values []float64) {
	const width = 48
	most := 1.0
	for _, v := range values {
		most = max(most, v)
	}
	d.text("```")
	for i, v := range values {
		d.text("%-34s %-*s %s", names[i], width, strings.Repeat("█", int(math.Round(width*math.Log10(1+v)/math.Log10(1+most)))), count(v))
	}
	d.text("```")
}

// line plots figures second by second.
func line(values []int64, scale int64) string {
	const steps = "▁▂▃▄▅▆▇█"
	var b strings.Builder
	for _, v := range values {
		if v == 0 {
			b.WriteByte(' ')
			continue
		}
		k := min(7, int(v*7/max(1, scale)))
		b.WriteString(steps[3*k : 3*k+3])
	}
	return b.String()
}

func simSizes() []int {
	switch {
	case simLong:
		return []int{1, 10, 100, 1000}
	case raceEnabled:
		return []int{1, 10}
	}
	return []int{1, 50}
}

// TestSimulation: overshoot is 0 at any size of fleet, sync interval and round trip, and what that costs.
func TestSimulation(t *testing.T) {
	if !simLong {
		t.Log("part of the matrix; TIERLIMIT_LONG=1 runs all")
	}
	began := time.Now()
	d := new(simDoc)
	prices := typicalPrices
	if simLong {
		prices = measurePrices(t, 20000)
	}
	d.prices(prices)
	d.sweep(t, prices)
	d.algorithms(t, prices)
	d.hotKey(t, prices)
	d.manyKeys(t, prices)
	d.thousand(t, prices)
	d.hours(t, prices)
	path := os.Getenv("TIERLIMIT_SIM")
	if path == "" || d.partial || t.Failed() {
		return
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), simBegin)
	_, after, ok2 := strings.Cut(rest, simEnd)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the figures", path)
	}
	all := before + simBegin + d.origin(time.Since(began)) + d.String() + simEnd + after
	if err := os.WriteFile(path, []byte(all), 0o644); err != nil {
		t.Fatal(err)
	}
}

// origin says where the figures come from.
func (d *simDoc) origin(took time.Duration) string {
	cpu := "unknown processor"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(info), "model name"); ok {
			name, _, _ := strings.Cut(rest, "\n")
			cpu = strings.TrimLeft(name, "\t: ")
		}
	}
	load := ""
	if avg, err := os.ReadFile("/proc/loadavg"); err == nil {
		load = ", load average at the end " + strings.Fields(string(avg))[0]
	}
	return fmt.Sprintf("\n%s, %s, %s/%s, %d cores (%s)%s. %d runs, %v of virtual time in %v (%.0f to 1), %v of running time summed over runs. **Overshoot %d in all runs in which Redis kept its data.**\n",
		time.Now().UTC().Format(time.DateOnly), runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), cpu, load, d.runs, d.virtual.Round(time.Minute), took.Round(time.Second), d.virtual.Seconds()/took.Seconds(), d.elapsed.Round(time.Second), d.most)
}

func (d *simDoc) prices(p simPrices) {
	d.text("\n### What Redis is taken to cost\n")
	d.text("Processor time of a real Redis per call, reading and writing included, measured in the same run. All \"Redis busy\" below is these figures times the simulated calls: an estimate.")
	d.head("µs", "token bucket", "leaky bucket", "fixed window", "sliding window", "sliding log", "heartbeat")
	us := func(x time.Duration) string { return fmt.Sprintf("%.1f", float64(x.Nanoseconds())/1000) }
	cells := []any{"a call"}
	for alg := 1; alg < len(p.call); alg++ {
		cells = append(cells, us(p.call[alg]))
	}
	d.row(append(cells, us(p.beat))...)
	cells = []any{"each key in it"}
	for alg := 1; alg < len(p.key); alg++ {
		cells = append(cells, us(p.key[alg]))
	}
	d.row(append(cells, "–")...)
	d.text("\nWhile somebody has yet to acknowledge that another joined, a heartbeat looks at every member, in a fleet of more than %d one in so many that it comes to that number: %s µs for each.", simLook, us(p.member))
}

// A simWay is how far Redis is, and how long an instance waits for it.
type simWay struct{ trip, timeout time.Duration }

func (w simWay) String() string {
	if w.timeout == 50*time.Millisecond {
		return fmt.Sprint("RTT ", w.trip)
	}
	return fmt.Sprintf("RTT %v, timeout %v", w.trip, w.timeout)
}

// sweep: size, sync interval and round trip.
func (d *simDoc) sweep(t *testing.T, prices simPrices) {
	const timeout = 50 * time.Millisecond // the default
	ways := []simWay{{500 * time.Microsecond, timeout}, {5 * time.Millisecond, timeout}, {30 * time.Millisecond, timeout}, {30 * time.Millisecond, 2 * timeout}}
	usual := []time.Duration{50 * time.Millisecond}
	syncs := map[int64][]time.Duration{100: usual, 1000: {10 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond}, 10000: usual}
	rates := []int64{100, 1000, 10000}
	if !simLong {
		ways, rates = []simWay{ways[0], ways[3]}, rates[:2]
		syncs[1000] = usual
	}
	d.text("\n### Size, sync interval, round trip\n")
	d.text("One key, a token bucket (burst: a second's tokens), three times the limit offered, evenly over the instances at random instants; defaults otherwise. Utilisation: admitted, in percent of what a central counter that decides at once would have admitted to the same checks; above 100 are leases of before the measured time; apart: the time-out leaves too little room for so many members to come together. In process: checks answered without a wait, kept denials included.")
	for _, rate := range rates {
		var configs []simConfig
		for _, n := range simSizes() {
			for _, sync := range syncs[rate] {
				for _, way := range ways {
					c := simConfig{
						name: fmt.Sprintf("%d/s/n=%d/sync=%v/%v", rate, n, sync, way), n: n, limit: TokenBucket(rate, time.Second), offered: 3 * float64(rate), rtt: way.trip,
						opts: []Option{WithSyncInterval(sync), WithRemoteTimeout(way.timeout)}, warm: 2 * time.Second, length: 10 * time.Second, prices: prices,
					}
					c.strained = 2*way.trip > way.timeout
					if n > 100 || rate > 1000 {
						c.length = 4 * time.Second
					}
					configs = append(configs, c)
				}
			}
		}
		fs := d.simRuns(t, "sweep", configs, func(t *testing.T, f *simFigure) {
			if f.rtt <= 10*time.Millisecond {
				full(0.99)(t, f)
			}
		})
		if d.partial {
			continue
		}
		columns := len(syncs[rate]) * len(ways)
		for _, m := range []struct {
			what string
			cell func(f *simFigure) string
		}{
			{"Utilisation, %", func(f *simFigure) string { return percent(f.use()) }},
			{"Answered in process, %", func(f *simFigure) string { return percent(f.local()) }},
			{"Denied unanswered (the timeout left no time for another round trip), % of the checks", func(f *simFigure) string {
				return percent(float64(f.source[Fallback]) / float64(max(1, f.checks)))
			}},
			{"Redis calls per second, heartbeats apart", func(f *simFigure) string { return count(f.exchanges()) }},
			{"Redis busy, % (estimate, heartbeats included)", func(f *simFigure) string { return percent(f.busy()) }},
		} {
			d.text("\n%d/s. %s:", rate, m.what)
			cells := []any{"N"}
			for _, sync := range syncs[rate] {
				for _, way := range ways {
					cells = append(cells, fmt.Sprintf("%v, %v", sync, way))
				}
			}
			d.head(cells...)
			for k, n := range simSizes() {
				cells := []any{n}
				for _, f := range fs[k*columns:][:columns] {
					if f.apart {
						cells = append(cells, "apart")
						continue
					}
					cells = append(cells, m.cell(f))
				}
				d.row(cells...)
			}
		}
		var names []string
		var values []float64
		for _, f := range fs {
			if f.rtt == ways[min(1, len(ways)-1)].trip {
				names, values = append(names, strings.TrimPrefix(f.name, fmt.Sprintf("%d/s/", rate))), append(values, f.exchanges())
			}
		}
		d.text("\nRedis calls per second at %d/s, on a logarithmic scale:\n", rate)
		d.bars(names, values)
	}
}

// algorithms: the other four, and limits with fewer tokens than instances.
func (d *simDoc) algorithms(t *testing.T, prices simPrices) {
	d.text("\n### All algorithms, small limits\n")
	d.text("Sync interval 50 ms, RTT 2 ms, three times the limit offered (at least 20 checks a second). Part: what an instance got of what its demand entitles it to, from the 5th to the 95th percentile of the instances; where it got few tokens that is chance.")
	d.head("limit", "N", "utilisation, %", "admitted of", "in process, %", "Redis calls/s", "beats/s", "Redis busy, %", "mean wait", "part")
	var configs []simConfig
	add := func(limit Limit, length time.Duration) {
		for _, n := range simSizes() {
			if n == 10 || n == 100 {
				continue
			}
			configs = append(configs, simConfig{
				name: fmt.Sprintf("%v/n=%d", limit, n), n: n, limit: limit, offered: max(20, 3*float64(limit.Rate)/limit.Period.Seconds()), rtt: 2 * time.Millisecond,
				warm: 3 * time.Second, length: length, prices: prices,
			})
		}
	}
	for _, limit := range five(100, time.Second) {
		add(limit, 8*time.Second)
	}
	for _, limit := range []Limit{TokenBucket(1, time.Second), FixedWindow(5, 10*time.Second), SlidingLog(3, 5*time.Second), TokenBucket(5000, time.Hour)} {
		add(limit, 20*time.Second)
	}
	fs := d.simRuns(t, "algorithms", configs, nil)
	for _, f := range fs {
		part := "–"
		if k := len(f.parts); k > 1 {
			part = fmt.Sprintf("%.2f to %.2f", f.parts[k/20], f.parts[k-1-k/20])
		}
		d.row(f.limit, f.n, percent(f.use()), f.could, percent(f.local()), count(f.exchanges()), count(float64(f.load.beats)/f.length.Seconds()), percent(f.busy()), f.wait.Round(10*time.Microsecond), part)
	}
}

// hotKey: everybody asks for the same exhausted key.
func (d *simDoc) hotKey(t *testing.T, prices simPrices) {
	d.text("\n### One exhausted key that everybody asks for\n")
	d.text("A token bucket, sync interval 50 ms, RTT 2 ms, so many checks per second on each instance. Queue: the longest that a call waited for the server.")
	d.head("limit", "N", "checks/s on each", "utilisation, %", "in process, %", "Redis calls/s", "Redis busy, %", "queue", "mean wait", "failed calls")
	var configs []simConfig
	eaches := []float64{1, 10, 100}
	sizes := []int{10, 100, 1000}
	if !simLong {
		eaches, sizes = []float64{20}, []int{50}
	}
	for _, n := range sizes {
		for _, each := range eaches {
			configs = append(configs, simConfig{
				name: fmt.Sprintf("n=%d/each=%v", n, each), n: n, limit: TokenBucket(100, time.Second), offered: each * float64(n), rtt: 2 * time.Millisecond,
				warm: 2 * time.Second, length: 3 * time.Second, prices: prices,
			})
		}
	}
	fs := d.simRuns(t, "hot", configs, nil)
	for _, f := range fs {
		d.row(f.limit, f.n, f.offered/float64(f.n), percent(f.use()), percent(f.local()), count(f.exchanges()), percent(f.busy()), f.load.queue.Round(100*time.Microsecond), f.wait.Round(10*time.Microsecond), f.failures)
	}
}

// manyKeys: what batches are for.
func (d *simDoc) manyKeys(t *testing.T, prices simPrices) {
	if !simLong {
		return
	}
	d.text("\n### Many keys\n")
	d.text("Keys as popular as 1/k (k the place in the ranking), 50/s each, 20 checks per second and instance. Defaults, RTT 2 ms.")
	d.head("N", "keys", "checks/s", "utilisation, %", "in process, %", "Redis calls/s", "keys per call", "Redis busy, %", "mean wait")
	var configs []simConfig
	for _, n := range []int{10, 100, 1000} {
		for _, keys := range []int{100, 10000} {
			configs = append(configs, simConfig{
				name: fmt.Sprintf("n=%d/keys=%d", n, keys), n: n, keys: keys, limit: TokenBucket(50, time.Second), offered: 20 * float64(n), rtt: 2 * time.Millisecond,
				warm: 3 * time.Second, length: 5 * time.Second, prices: prices,
			})
		}
	}
	fs := d.simRuns(t, "keys", configs, nil)
	for _, f := range fs {
		d.row(f.n, f.keys, count(f.offered), percent(f.use()), percent(f.local()), count(f.exchanges()), fmt.Sprintf("%.1f", float64(f.load.keys)/float64(max(1, f.load.exchanges))), percent(f.busy()), f.wait.Round(10*time.Microsecond))
	}
}

// thousand: a large fleet goes through what happens to fleets.
func (d *simDoc) thousand(t *testing.T, prices simPrices) {
	n := 1000
	if !simLong {
		n = simSizes()[1]
	}
	d.text("\n### %d instances: what happens to fleets\n", n)
	d.text("A token bucket of 100/s (fewer tokens than instances), twice the limit offered; the event comes after 8 s. Each sign is a second, its height what was admitted of the limit. Alone: instances that had no contact with Redis when their breaker opened, and count themselves alone ([guarantees.md](guarantees.md), \"Never heard from Redis\").")
	const at = 8 * time.Second
	type scenario struct {
		what string
		edit func(c *simConfig)
	}
	event := func(do func(f *simFleet)) func(*simConfig) {
		return func(c *simConfig) { c.events = append(c.events, simEvent{at: at, do: do}) }
	}
	tenth := n / 10
	scenarios := []scenario{
		{"nothing", func(*simConfig) {}},
		{"a tenth leaves in order", event(func(f *simFleet) { f.leave(tenth) })},
		{"a tenth is killed", event(func(f *simFleet) { f.kill(tenth) })},
		{"a tenth joins", event(func(f *simFleet) { f.join(tenth) })},
		{"a tenth is cut off for 15 s", event(func(f *simFleet) { f.cut(f.some(tenth), 15*time.Second, false) })},
		{"Redis refuses for 20 s", event(func(f *simFleet) { f.cut(f.live, 20*time.Second, true) })},
		{"Redis hangs for 20 s", event(func(f *simFleet) { f.hang(20 * time.Second) })},
		{"Redis loses its data", func(c *simConfig) { c.loses = 1; event(func(f *simFleet) { f.s.lose() })(c) }},
		{"all start within 1 s, under load", func(c *simConfig) { c.cold = true }},
		{"all start within 0.1 s, under load", func(c *simConfig) { c.cold, c.starts = true, 100*time.Millisecond }},
		{"a deployment: each 4 s a hundredth is replaced", func(c *simConfig) {
			for k := range 8 {
				c.events = append(c.events, simEvent{at: at + time.Duration(4*k)*time.Second, do: func(f *simFleet) {
					f.leave(n / 100)
					f.join(n / 100)
				}})
			}
		}},
	}
	length := 42 * time.Second
	if !simLong {
		scenarios, length = scenarios[5:8], 30*time.Second
	}
	const rate = 100
	var configs []simConfig
	for k, s := range scenarios {
		c := simConfig{
			name: s.what, n: n, limit: TokenBucket(rate, time.Second), offered: 2 * rate, rtt: 2 * time.Millisecond, warm: time.Second, length: length, prices: prices,
			offset: time.Duration(k-5) * 7 * time.Hour, drift: int64(900 * (k%3 - 1)),
		}
		s.edit(&c)
		configs = append(configs, c)
	}
	fs := d.simRuns(t, "thousand", configs, nil)
	if d.partial {
		return
	}
	d.head("event", "overshoot", "admitted of the limit, %", "Redis busy, %", "queue", "alone", "virtual to real time")
	for k, f := range fs {
		d.row(scenarios[k].what, f.verdict.Overshoot, percent(f.use()), percent(f.busy()), f.load.queue.Round(time.Millisecond), f.alone, fmt.Sprintf("%.1f", f.virtual.Seconds()/f.elapsed.Seconds()))
	}
	d.text("\n```")
	for k, f := range fs {
		d.text("%-46s |%s|", scenarios[k].what, line(f.perSecond[:len(f.perSecond)-1], rate))
	}
	d.text("```")
}

// hours: traffic for as long as nobody wants to wait for it.
func (d *simDoc) hours(t *testing.T, prices simPrices) {
	if !simLong {
		return
	}
	d.text("\n### Hours of trouble\n")
	d.text("Partitions, outages of three kinds, instances that join, leave and are killed, one thing after another (`trouble` in sim_test.go), one call in 500 lost or late, the server's clock hours off and 900 ppm fast or slow; three times the limit offered.")
	d.head("limit", "N", "virtual time", "events", "checks", "admitted", "overshoot", "of the limit, %", "real time", "virtual to real time")
	var configs []simConfig
	add := func(n int, limit Limit, length time.Duration) {
		k := len(configs)
		events := trouble(uint64(k+50), n, length)
		configs = append(configs, simConfig{
			name: fmt.Sprintf("%v/n=%d/%v", limit, n, length), n: n, limit: limit, offered: 3 * float64(limit.Rate) / limit.Period.Seconds(), zipf: float64(k % 2), rtt: 2 * time.Millisecond, lossy: 500,
			warm: time.Second, length: length, prices: prices, offset: time.Duration(5*k-11) * time.Hour, drift: int64(1800*(k%2) - 900), events: events,
		})
	}
	add(1000, TokenBucket(100, time.Second), 2*time.Minute)
	for _, limit := range five(20, time.Second) {
		add(16, limit, time.Hour)
	}
	add(8, FixedWindow(500, time.Minute), 24*time.Hour)
	fs := d.simRuns(t, "hours", configs, nil)
	for k, f := range fs {
		d.row(f.limit, f.n, f.length, len(configs[k].events), f.checks, f.admitted, f.verdict.Overshoot, percent(f.use()), f.elapsed.Round(100*time.Millisecond), fmt.Sprintf("%.0f", f.virtual.Seconds()/f.elapsed.Seconds()))
	}
}
