package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// A writer that remembers its first error.
type page struct {
	w   io.Writer
	err error
}

func (p *page) f(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *page) row(cells ...string) { p.f("| %s |\n", strings.Join(cells, " | ")) }

func (p *page) head(cells ...string) {
	p.row(cells...)
	p.f("|%s\n", strings.Repeat(" --- |", len(cells)))
}

// Markdown writes docs/benchmarks.md. plot is the file with the plot, relative to it.
func (res *Results) Markdown(w io.Writer, plot string) error {
	p := &page{w: w}
	c := res.Config
	p.f("# Benchmarks\n\n")
	p.f("Written by `%s`; do not edit. Everything ran side by side in one go, peers and floors included, so compare within the page and not with other machines.\n\n", c["command"])
	if c["mode"] != "full" {
		p.f("**A quick run**: few and short repetitions, good for a look and not for a claim.\n\n")
	}
	p.head("", "")
	for _, k := range []struct{ key, name string }{
		{"machine", "machine"}, {"os", "system"}, {"goversion", "Go"}, {"redis", "Redis"}, {"date", "date"}, {"took", "took"}, {"load", "load of the machine before"}, {"peers", "peers"},
	} {
		if c[k.key] != "" {
			p.row(k.name, c[k.key])
		}
	}
	p.f("\nFigures are medians, in process of %s repetitions in %s round(s). Redis is a child process on the same processors, reached over loopback: what Redis and the client use of them they take from each other. Limits are so high that all checks pass, but where a row says otherwise.\n\n", c["samples"], c["rounds"])
	p.f("![Time by check in process, and checks a second by way of Redis](%s)\n\n", plot)
	if len(res.Failed) > 0 {
		p.f("**%d runs failed**, and are missing below:\n\n", len(res.Failed))
		for _, f := range res.Failed {
			p.f("- `%s`\n", strings.TrimSpace(f))
		}
		p.f("\n")
	}
	res.goals(p)
	res.losses(p)
	res.allow(p)
	res.redis(p)
	res.rest(p)
	p.f("## What is compared\n\n%s", compared)
	return p.err
}

const compared = `- **floor**: what no limiter of that kind can do without: taking the next key (harness, in all rows), its hash, the clock, a lock-free table with an atomic add; over Redis an empty script (evalsha-empty), and tierlimit's own script sent bare (evalsha-same).
- **tierlimit lease**: the defaults; in process with 10,000 keys and more ` + "`WithLeaseTTL(time.Minute)`" + `, so that it is the check of a warm key that is measured and not the renewal of leases: what the defaults come to with so many keys is under "By way of Redis". **denied**: a kept denial. **local**: ` + "`NewLocal`" + `. **share0**: ` + "`WithLocalShare(0)`" + `, each check decided in Redis.
- **x-time-rate**, **failsafe-go** (bursty), **slidingwindow** (local window) have no keys of their own and are kept in a sync.Map. **go-limiter** (memorystore, sized for the keys), **throttled** (memstore without a bound), **ulule** (memory), **httprate** (local counter, without response headers) as they come.
- **redis_rate** with go-redis's default pool and with 128 connections; ratios are by the faster of the two. **rueidis** pipelines by itself; its limiter is no module that can be pinned, so it sends a script of ours with the same commands (a GET and an INCRBY for each check).
- Not here: mennanov/limiters, which cannot be pinned either.
`

func (res *Results) goals(p *page) {
	p.f("## Goals\n\n")
	verdicts := res.Judge()
	met, known := 0, 0
	for _, v := range verdicts {
		if v.Known {
			known++
		}
		if v.Met {
			met++
		}
	}
	p.f("%d of %d are met", met, known)
	if known < len(verdicts) {
		p.f("; %d were not measured", len(verdicts)-known)
	}
	p.f(".\n\n")
	p.head("goal", "target", "measured", "")
	for _, v := range verdicts {
		verdict := "not measured"
		switch {
		case v.Met:
			verdict = "met"
		case v.Known:
			verdict = "**not met**"
		}
		p.row(v.Goal, v.Target, v.Measured, verdict)
	}
	p.f("\n")
}

func (res *Results) losses(p *page) {
	losses := res.Losses()
	p.f("## Rows we lose\n\n")
	if len(losses) == 0 {
		p.f("None.\n\n")
		return
	}
	p.f("In %d rows a peer has the better median. What asks Redis is held against what asks Redis, a lease of a warm key also against limiters that share nothing.\n\n", len(losses))
	p.head("row", "ours", "better")
	for _, l := range losses {
		mine, _ := l.Row.Median(l.Unit)
		better := make([]string, len(l.Better))
		for i, b := range l.Better {
			v, _ := b.Median(l.Unit)
			better[i] = fmt.Sprintf("%s %s", b.Subject(), show(l.Unit, v))
		}
		p.row(fmt.Sprintf("%s, %s, %s", l.Row.circumstances(), l.Row.Subject(), called(l.Unit)), show(l.Unit, mine), strings.Join(better, ", "))
	}
	p.f("\n")
}

// circumstances are a row's labels but for its subject.
func (r *Row) circumstances() string {
	out := []string{r.Bench}
	for _, l := range []string{"keys", "goroutines", "table", "case"} {
		if v := r.Labels[l]; v != "" {
			if l == "goroutines" || l == "table" {
				v = l + " " + v
			}
			out = append(out, v)
		}
	}
	if r.Bench == "Allow" {
		out = append(out, "-cpu "+r.CPU)
	}
	return strings.Join(out, ", ")
}

// withRatio is a value, and in brackets ours by it.
func withRatio(r, ours *Row, unit string, interval bool) string {
	s, ok := r.Summary(unit)
	if !ok {
		return ""
	}
	out := show(unit, s.Center)
	if interval && len(r.values[unit]) >= 6 {
		out += " " + strings.ReplaceAll(s.PctRangeString(), "%", " %")
	}
	if mine, ok := ours.Median(unit); ok && r != ours {
		out += fmt.Sprintf(" (%.2f)", mine/s.Center)
	}
	return out
}

func (res *Results) allow(p *page) {
	rows := res.all("Allow")
	if len(rows) == 0 {
		return
	}
	subjects := values(rows, "subject")
	p.f("## In process\n\nTime of a check of a key that is known. In brackets: tierlimit's lease by this row, so less than 1 is faster than it.\n\n")
	for _, cpu := range values(res.all("Allow", "goroutines=1"), "cpu") {
		p.f("One goroutine, `-cpu %s`:\n\n", cpu)
		keys := values(res.all("Allow", "goroutines=1", "cpu="+cpu), "keys")
		p.head(slices.Concat([]string{""}, keys, []string{"allocations"})...)
		for _, s := range subjects {
			cells := []string{s}
			allocs := ""
			for _, k := range keys {
				r := res.one("Allow", "subject="+s, "keys="+k, "goroutines=1", "cpu="+cpu)
				cells = append(cells, withRatio(r, res.one("Allow", "subject="+lease, "keys="+k, "goroutines=1", "cpu="+cpu), "ns/op", true))
				if n, ok := r.Median("allocs/op"); ok && allocs == "" {
					allocs = fmt.Sprintf("%.0f", n)
				}
			}
			p.row(append(cells, allocs)...)
		}
		p.f("\n")
		var asked []string
		for _, k := range keys {
			if part, ok := res.one("Allow", "subject="+lease, "keys="+k, "goroutines=1", "cpu="+cpu).Median("%remote"); ok {
				asked = append(asked, fmt.Sprintf("%s %.4f %%", k, part))
			}
		}
		p.f("Of tierlimit's lease Redis decided: %s.\n\n", strings.Join(asked, ", "))
	}
	p.f("Many goroutines, wall time by checks of all of them:\n\n")
	for _, k := range values(rows, "keys") {
		for _, cpu := range values(rows, "cpu") {
			group := slices.DeleteFunc(res.all("Allow", "keys="+k, "cpu="+cpu), func(r *Row) bool { return r.Labels["goroutines"] == "1" })
			counts := values(group, "goroutines")
			if len(counts) == 0 {
				continue
			}
			p.f("<details><summary>%s, -cpu %s</summary>\n\n", k, cpu)
			head := []string{"goroutines"}
			head = append(head, counts...)
			p.head(head...)
			for _, s := range values(group, "subject") {
				cells := []string{s}
				for _, n := range counts {
					cells = append(cells, withRatio(res.one("Allow", "subject="+s, "keys="+k, "goroutines="+n, "cpu="+cpu),
						res.one("Allow", "subject="+lease, "keys="+k, "goroutines="+n, "cpu="+cpu), "ns/op", false))
				}
				p.row(cells...)
			}
			p.f("\n</details>\n\n")
		}
	}
}

func (res *Results) redis(p *page) {
	for _, group := range []struct{ bench, title, text string }{
		{"Redis", "By way of Redis", "No key is known at the start. In brackets: by the faster redis_rate."},
		{"RTT", "1 ms farther away", "The same with a millisecond added on the way to Redis by a proxy (`internal/redistest`), which takes its own time from the same processors: floor evalsha-empty with one goroutine shows the round trip as it is."},
	} {
		rows := res.all(group.bench)
		if len(rows) == 0 {
			continue
		}
		p.f("## %s\n\nChecks a second by number of goroutines. %s\n\n", group.title, group.text)
		counts := values(rows, "goroutines")
		for _, k := range values(rows, "keys") {
			p.head(append([]string{k}, counts...)...)
			for _, s := range values(res.all(group.bench, "keys="+k), "subject") {
				cells := []string{s}
				for _, n := range counts {
					cell := ""
					if ns, ok := res.remote(group.bench, s, k, n).Median("ns/op"); ok {
						cell = rate(ns)
						if theirs, ok := res.redisRate(group.bench, k, n).Median("ns/op"); ok {
							cell += fmt.Sprintf(" (%s)", digits(theirs/ns))
						}
					}
					cells = append(cells, cell)
				}
				p.row(cells...)
			}
			p.f("\n")
		}
		p.f("<details><summary>Latency, processor time, calls</summary>\n\n")
		p.head("keys", "goroutines", "", "p50", "p99", "Redis's processor time by check", "client's", "calls by check", "µs by call", "calls over 1 ms", "% decided by Redis")
		for _, r := range rows {
			cells := []string{r.Labels["keys"], r.Labels["goroutines"], r.Subject()}
			for _, unit := range []string{"p50-ns", "p99-ns", "redis-cpu-ns/op", "client-cpu-ns/op", "calls/op", "us/call", "slow-calls", "%remote"} {
				cell := ""
				if v, ok := r.Median(unit); ok {
					cell = show(unit, v)
				}
				cells = append(cells, cell)
			}
			p.row(cells...)
		}
		p.f("\n</details>\n\n")
	}
}

// rest are the groups of which each is one table.
func (res *Results) rest(p *page) {
	for _, group := range []struct {
		bench, title, text string
		units, heads       []string
	}{
		{"Cold", "Cold keys", "A check of a key that nobody has seen before: with tierlimit's lease one exchange, as with every limiter that asks Redis.",
			[]string{"ns/op", "p50-ns", "p99-ns"}, []string{"time by check", "p50", "p99"}},
		{"Memory", "Memory", "A million keys (a fifth in a quick run) of 24 bytes, checked once and then left alone. Kept: a token is missing for an hour, and a limiter has to know; full: it is back after a microsecond, and 15 seconds have passed. A collection is a whole `runtime.GC()`, the median of seven; without the keys it takes what the last column says.",
			[]string{"B/key", "gc-ms", "gc0-ms", "ns/op"}, []string{"by key", "collection, ms", "without, ms", "first check, many goroutines"}},
		{"Flat", "Number of keys", "One goroutine checks the same thousand keys while the table holds more and more.", []string{"ns/op"}, []string{"time by check"}},
		{"Loop", "The background loop", "Of one processor. The loop is what runs in goroutines that tierlimit started (by labels in a profile); the process includes those that call it.",
			[]string{"loop-%", "process-%", "keys/s"}, []string{"loop, %", "process, %", "new keys a second"}},
		{"Latency", "Latency under load", "A million checks a second are offered by 64 goroutines, zipf over 10,000 keys of 10,000/s, which the hottest dozen exceed. Times are of single calls; the empty loop shows what the machine and the harness add. In process: those that did not wait for Redis.",
			[]string{"p50-ns", "p99-ns", "p99.9-ns", "max-ns", "local-p50-ns", "local-p99-ns", "local-p99.9-ns", "local-max-ns", "%local", "checks/s", "exchanges/s"},
			[]string{"p50", "p99", "p99.9", "max", "in process p50", "p99", "p99.9", "max", "% in process", "checks/s", "exchanges/s"}},
	} {
		rows := res.all(group.bench)
		if len(rows) == 0 {
			continue
		}
		p.f("## %s\n\n%s\n\n", group.title, group.text)
		p.head(append([]string{""}, group.heads...)...)
		for _, r := range rows {
			name := []string{}
			if s := r.Subject(); s != "" {
				name = append(name, s)
			}
			for _, l := range []string{"goroutines", "table", "case"} {
				if v := r.Labels[l]; v != "" {
					name = append(name, strings.TrimPrefix(l+" "+v, "case "))
				}
			}
			cells := []string{strings.Join(name, ", ")}
			for _, u := range group.units {
				cell := ""
				if v, ok := r.Median(u); ok {
					cell = show(u, v)
				}
				cells = append(cells, cell)
			}
			p.row(cells...)
		}
		p.f("\n")
	}
}
