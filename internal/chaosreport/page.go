package main

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tierlimit/tierlimit/internal/chaos"
)

// A group is the runs of one fault.
type group struct {
	topology, fault string
	rows            []chaos.Row
}

// judged are those of which the machine did not falsify the figures.
func (g group) judged() []chaos.Row {
	return slices.DeleteFunc(slices.Clone(g.rows), func(r chaos.Row) bool { return r.NotJudged != "" })
}

// groups are the faults in the order in which the topologies came.
func groups(rows []chaos.Row) []group {
	var out []group
	for _, r := range rows {
		i := slices.IndexFunc(out, func(g group) bool { return g.topology == r.Topology && g.fault == r.Fault })
		if i < 0 {
			i = len(out)
			out = append(out, group{topology: r.Topology, fault: r.Fault})
		}
		out[i].rows = append(out[i].rows, r)
	}
	slices.SortStableFunc(out, func(a, b group) int {
		return cmp.Or(slices.Index(topologies, a.topology)-slices.Index(topologies, b.topology), cmp.Compare(a.fault, b.fault))
	})
	return out
}

// topologies in their order, and what they are called.
var (
	topologies = []string{"single", "replica", "sentinel", "cluster", "masters", "ring"}
	headings   = map[string]string{
		"single": "One server", "replica": "A primary and its replica, promoted by hand", "sentinel": "Sentinel", "cluster": "Redis Cluster, 3 masters and 3 replicas",
		"masters": "Redis Cluster, 3 masters alone", "ring": "Ring",
	}
)

// A section is what is written.
type section struct{ bytes.Buffer }

func (t *section) f(format string, args ...any) { fmt.Fprintf(t, format, args...) }

func (t *section) row(cells ...string) { t.f("| %s |\n", strings.Join(cells, " | ")) }

func (t *section) head(cells ...string) {
	t.row(cells...)
	t.f("|%s\n", strings.Repeat(" --- |", len(cells)))
}

// faultsPart is what is written of the faults.
func faultsPart(rows []chaos.Row, drawn []picture, m machine, command string) []byte {
	t := new(section)
	var over, errs, unjudged int64
	backends, algorithms, wanting := map[string]int{}, map[string]int{}, []string(nil)
	first, last := rows[0].When, rows[0].When
	for _, r := range rows {
		if r.Overshoot > r.Allowed {
			over++
		}
		if r.NotJudged != "" {
			unjudged++
		}
		errs += r.Errors
		backends[r.Backend]++
		algorithms[r.Algorithm]++
		if r.When.Before(first) {
			first = r.When
		}
		if r.When.After(last) {
			last = r.When
		}
		if len(r.Findings) > 0 {
			wanting = append(wanting, fmt.Sprintf("%s/%s/%s (%s, seed %d): %s", r.Topology, r.Fault, r.Algorithm, r.Backend, r.Seed, strings.Join(r.Findings, "; ")))
		}
	}
	all := groups(rows)
	t.f("**%d runs of %d faults: %s of them admitted more than is allowed, %s returned an error.** ", len(rows), len(all), number(over, "none"), plural(errs, "check"))
	t.f("By algorithm: %s; by back end: %s. The machine held the load up in %s, whose figures of time were not judged.\n\n", counts(algorithms), counts(backends), plural(unjudged, "run"))
	if len(wanting) > 0 {
		t.f("What is promised was not so in %s:\n\n", plural(int64(len(wanting)), "run"))
		for _, w := range wanting {
			t.f("- %s\n", w)
		}
		t.f("\n")
	}
	t.facts(m, command, first, last)
	for _, p := range drawn {
		t.f("![%s](%s/%s)\n\n", p.alt, plotsDir, p.file)
	}
	for topology, some := range byTopology(all) {
		t.f("### %s\n\n", cmp.Or(headings[topology], topology))
		t.head("fault", "runs", "over", "allowed", "before", "during", "after", "noticed", "back", "warm p99.9", "slowest", "goroutines", "heap", "errors", "not judged")
		for _, g := range some {
			t.row(g.cells()...)
		}
		t.f("\n")
		t.spared(some)
	}
	return t.Bytes()
}

// facts say where it ran.
func (t *section) facts(m machine, command string, first, last time.Time) {
	t.head("", "")
	t.row("command", "`"+command+"`")
	t.row("date", fmt.Sprintf("%s, %s to %s UTC", first.UTC().Format(time.DateOnly), first.UTC().Format("15:04"), last.UTC().Format("15:04")))
	t.row("machine", m.processor+"; "+m.system)
	t.row("versions", fmt.Sprintf("Go %s, Redis %s", m.goVersion, m.redis))
	t.row("load of the machine at the end", m.load+" over 1, 5 and 15 minutes")
	t.f("\n")
}

// byTopology is groups that are in order, in parts.
func byTopology(all []group) func(yield func(string, []group) bool) {
	return func(yield func(string, []group) bool) {
		for len(all) > 0 {
			n := 1
			for n < len(all) && all[n].topology == all[0].topology {
				n++
			}
			if !yield(all[0].topology, all[:n]) {
				return
			}
			all = all[n:]
		}
	}
}

// cells are a fault's row: the worst of its runs.
func (g group) cells() []string {
	worst := slices.MaxFunc(g.rows, func(a, b chaos.Row) int {
		return cmp.Or(cmp.Compare(a.Overshoot-a.Allowed, b.Overshoot-b.Allowed), cmp.Compare(a.Overshoot, b.Overshoot))
	})
	// What went beyond the limit says more than the run that was allowed least.
	if worst.Overshoot <= worst.Allowed {
		worst = slices.MaxFunc(g.rows, func(a, b chaos.Row) int {
			return cmp.Or(cmp.Compare(a.Overshoot, b.Overshoot), cmp.Compare(a.Allowed, b.Allowed))
		})
	}
	judged := g.judged()
	heap := "–"
	var bytes, errs int64
	for _, r := range g.rows {
		errs += r.Errors
		if r.HeapBytes != 0 && (heap == "–" || r.HeapBytes > bytes) {
			bytes = r.HeapBytes
			heap = fmt.Sprintf("%+d kB", bytes/1024)
		}
	}
	goroutines := "–"
	if len(judged) > 0 {
		goroutines = fmt.Sprintf("%+d", slices.MaxFunc(judged, func(a, b chaos.Row) int { return cmp.Compare(a.Goroutines, b.Goroutines) }).Goroutines)
	}
	return []string{
		"`" + g.fault + "`", g.runs(), bold(worst.Overshoot, worst.Overshoot > worst.Allowed), fmt.Sprint(worst.Allowed),
		least(judged, func(r chaos.Row) float64 { return r.Before }),
		least(judged, func(r chaos.Row) float64 { return r.During }),
		least(judged, func(r chaos.Row) float64 { return r.After }),
		most(judged, func(r chaos.Row) time.Duration { return r.Notice }),
		back(judged),
		most(judged, func(r chaos.Row) time.Duration { return r.P999 }),
		most(judged, func(r chaos.Row) time.Duration { return r.Slowest }),
		goroutines, heap, bold(errs, errs > 0), fmt.Sprint(len(g.rows) - len(judged)),
	}
}

// runs are how many there were, on child processes and in containers.
func (g group) runs() string {
	n := len(slices.DeleteFunc(slices.Clone(g.rows), func(r chaos.Row) bool { return r.Backend != "process" }))
	if n == len(g.rows) {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%d + %d", n, len(g.rows)-n)
}

// spared writes what became of keys that the fault must not touch.
func (t *section) spared(some []group) {
	some = slices.DeleteFunc(slices.Clone(some), func(g group) bool { return g.rows[0].SparedKeys == 0 })
	if len(some) == 0 {
		return
	}
	t.f("The keys of the other servers meanwhile, from the fault's begin to the end of the load:\n\n")
	t.head("fault", "over", "admitted", "p99.9 of all checks", "checks decided without Redis")
	for _, g := range some {
		var over, alone int64
		for _, r := range g.rows {
			over = max(over, r.SparedOvershoot)
		}
		judged := g.judged()
		for _, r := range judged {
			alone = max(alone, r.SparedFallback)
		}
		without := "–"
		if len(judged) > 0 {
			without = fmt.Sprint(alone)
		}
		t.row("`"+g.fault+"`", bold(over, over > 0), least(judged, func(r chaos.Row) float64 { return r.Spared }),
			most(judged, func(r chaos.Row) time.Duration { return r.SparedP999 }), without)
	}
	t.f("\n")
}

// least is the least part of the limit that was admitted, as far as one was measured.
func least(rows []chaos.Row, of func(chaos.Row) float64) string {
	out := "–"
	worst := 0.0
	for _, r := range rows {
		if v := of(r); v > 0 && (out == "–" || v < worst) {
			worst = v
			out = fmt.Sprintf("%.0f %%", 100*v)
		}
	}
	return out
}

// most is the longest time, as far as one was measured.
func most(rows []chaos.Row, of func(chaos.Row) time.Duration) string {
	var worst time.Duration
	for _, r := range rows {
		worst = max(worst, of(r))
	}
	if worst == 0 {
		return "–"
	}
	return show(worst)
}

// back is the longest recovery, which a loose fault does not have: its load does not ask for 90 % of the limit.
func back(rows []chaos.Row) string {
	var worst time.Duration
	for _, r := range rows {
		if r.Loose {
			return "–"
		}
		if r.Recovery < 0 {
			return "**never**"
		}
		worst = max(worst, r.Recovery)
	}
	if len(rows) == 0 {
		return "–"
	}
	return show(worst)
}

// show writes a time with two digits or so.
func show(d time.Duration) string {
	switch {
	case d >= time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= time.Millisecond || d == 0:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d >= 10*time.Microsecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	}
	return fmt.Sprintf("%.1f µs", float64(d)/1e3)
}

func bold(n int64, bad bool) string {
	if bad {
		return fmt.Sprintf("**%d**", n)
	}
	return fmt.Sprint(n)
}

func number(n int64, none string) string {
	if n == 0 {
		return none
	}
	return fmt.Sprint(n)
}

func plural(n int64, what string) string {
	if n != 1 && n != 0 {
		what += "s"
	}
	return number(n, "no") + " " + what
}

// counts are numbers by name.
func counts(by map[string]int) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(by)) {
		out = append(out, fmt.Sprintf("%s %d", name, by[name]))
	}
	return strings.Join(out, ", ")
}

// soakPart is what is written of the soak.
func soakPart(r *chaos.SoakResult, m machine, command string) []byte {
	t := new(section)
	t.f("**%s, %d rounds: ", r.Lasted.Round(time.Second), r.Rounds)
	if len(r.Findings) == 0 {
		t.f("nothing that is promised was broken.**\n\n")
	} else {
		t.f("%s.**\n\n", plural(int64(len(r.Findings)), "finding"))
		for _, f := range r.Findings {
			t.f("- %s\n", f)
		}
		t.f("\n")
	}
	t.facts(m, command, r.When, r.When.Add(r.Lasted))
	t.f("![Heap, goroutines and keys over the soak](%s/%s)\n\n", plotsDir, soakPlot)
	t.head("", "")
	t.row("fleet", fmt.Sprintf("%d instances, %d of them replaced on the way, each with limiters %s", r.Instances, r.Replaced, strings.Join(r.Limits, ", ")))
	t.row("checks", fmt.Sprintf("%d; errors %d", r.Checks, r.Errors))
	t.row("overshoot while Redis kept its data", fmt.Sprint(r.Overshoot))
	t.row(fmt.Sprintf("overshoot of the worst of %d losses", r.Losses), fmt.Sprintf("%d, allowed %d", r.LossOvershoot, r.LossAllowed))
	t.row("rounds judged", fmt.Sprintf("%d of %d", r.Judged, r.Rounds))
	if len(r.Recovery) > 0 {
		slices.Sort(r.Recovery)
		at := func(part float64) string { return show(r.Recovery[int(part*float64(len(r.Recovery)-1))]) }
		t.row("back after the faults", fmt.Sprintf("median %s, p99 %s, worst %s", at(0.5), at(0.99), at(1)))
		t.row("warm p99.9 during the faults; slowest check", show(r.WarmP999)+"; "+show(r.Slowest))
	}
	for _, line := range []struct {
		name string
		chaos.Trend
		format string
		unit   float64
	}{
		{"heap, MB", r.Heap, "%.1f", 1 << 20}, {"goroutines of the fleet and its load", r.Goroutines, "%.0f", 1},
		{"keys in Redis", r.Keys, "%.0f", 1}, {"longest time to live of a limiter's key, s", r.TTL, "%.1f", 1},
	} {
		t.row(line.name, fmt.Sprintf("from "+line.format+" to "+line.format+" (a line through %d samples)", max(0, line.First/line.unit), max(0, line.Last/line.unit), line.Samples))
	}
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(r.Faults)) {
		faults = append(faults, fmt.Sprintf("`%s` %d", name, r.Faults[name]))
	}
	t.row("faults", strings.Join(faults, ", "))
	t.row("seed", fmt.Sprint(r.Seed))
	t.f("\n")
	return t.Bytes()
}
