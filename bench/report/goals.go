package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// A Verdict is one goal with what was measured.
type Verdict struct {
	Goal, Target, Measured string
	Known, Met             bool
}

// What the subjects of the goals are called in the results.
const (
	lease  = "tierlimit lease"
	denied = "tierlimit denied"
	alone  = "tierlimit local"
	share0 = "tierlimit share0"
	xtime  = "x-time-rate sync.Map"
	table  = "floor table"
	timed  = "floor table+clock"
)

// serialCPU is the GOMAXPROCS under which one goroutine is judged: the machine's own two.
const serialCPU = "cpu=2"

// patterns of keys in process, as they are called. The last is of a million unless the run was told otherwise.
func (res *Results) patterns() []string {
	out := []string{"hot", "10k", "zipf1M"}
	for _, k := range values(res.all("Allow"), "keys") {
		if strings.HasPrefix(k, "zipf") {
			out[2] = k
		}
	}
	return out
}

// Judge holds the results against the goals.
func (res *Results) Judge() []Verdict {
	var out []Verdict
	patterns := res.patterns()
	for i, most := range []float64{0.30, 0.35, 0.45} {
		out = append(out, res.ratio(fmt.Sprintf("Allow of a warm key, one goroutine, %s: by x/time/rate in a sync.Map", patterns[i]), most,
			res.serial(patterns[i], lease), res.serial(patterns[i], xtime), "ns/op"))
	}
	for _, p := range patterns {
		v := res.ratio(fmt.Sprintf("the same by the hand-written floor (table and atomic add), %s", p), 1.5, res.serial(p, lease), res.serial(p, table), "ns/op")
		if ns, ok := res.serial(p, lease).Median("ns/op"); ok {
			if floor, ok := res.serial(p, timed).Median("ns/op"); ok {
				v.Measured += fmt.Sprintf("; %.2f by the floor that also reads the clock", ns/floor)
			}
		}
		out = append(out, v)
	}
	out = append(out, res.fasterThanPeers())
	for _, cpu := range []string{"2", "8"} {
		out = append(out, res.ratio(fmt.Sprintf("eight goroutines on one hot key, -cpu %s: wall time by that of one goroutine", cpu), 1.2,
			res.one("Allow", "subject="+lease, "keys=hot", "goroutines=8", "cpu="+cpu), res.serial("hot", lease), "ns/op"))
	}
	out = append(out, res.allocations())
	for _, p := range patterns[:2] {
		out = append(out, res.ratio(fmt.Sprintf("a denied key by an allowed one, %s", p), 1, res.serial(p, denied), res.serial(p, lease), "ns/op"))
	}
	for _, at := range []struct {
		keys  string
		least float64
	}{{"hot", 20}, {"zipf10k", 4}} {
		for _, n := range []string{"128", "1024"} {
			out = append(out,
				res.faster("local share 0", at.least, res.remote("Redis", share0, at.keys, n), res.redisRate("Redis", at.keys, n), at.keys, n),
				res.ratio(fmt.Sprintf("p99 of local share 0 by redis_rate's, %s, %s goroutines", at.keys, n), 1,
					res.remote("Redis", share0, at.keys, n), res.redisRate("Redis", at.keys, n), "p99-ns"),
				res.ratio(fmt.Sprintf("processor time of Redis for a check by redis_rate's, %s, %s goroutines", at.keys, n), 0.25,
					res.remote("Redis", share0, at.keys, n), res.redisRate("Redis", at.keys, n), "redis-cpu-ns/op"))
		}
	}
	caller := res.ratio("one caller alone, local share 0: median latency by that of the same script called bare", 1.15,
		res.remote("Redis", share0, "hot", "1"), res.remote("Redis", "floor evalsha-same", "hot", "1"), "p50-ns")
	if mine, ok := res.remote("Redis", share0, "hot", "1").Median("p50-ns"); ok {
		if empty, ok := res.remote("Redis", "floor evalsha-empty", "hot", "1").Median("p50-ns"); ok {
			caller.Measured += fmt.Sprintf("; %.2f by an empty script", mine/empty)
		}
	}
	out = append(out, caller)
	for _, keys := range []string{"hot", "zipf10k"} {
		for _, at := range []struct {
			n     string
			least float64
		}{{"16", 1}, {"128", 4}, {"1024", 15}} {
			out = append(out, res.faster("1 ms farther away, local share 0", at.least, res.remote("RTT", share0, keys, at.n), res.redisRate("RTT", keys, at.n), keys, at.n))
		}
	}
	out = append(out, res.slowCalls())
	for _, n := range []string{"128", "1024"} {
		out = append(out, res.faster("leased", 400, res.remote("Redis", lease, "hot", n), res.redisRate("Redis", "hot", n), "hot", n))
	}
	out = append(out,
		res.atMost("memory of an idle key of 24 bytes that is not full, a million of them", 112, "%.0f bytes", "B/key", "Memory", "subject="+lease, "case=kept"),
		res.atMost("the same without Redis (NewLocal)", 112, "%.0f bytes", "B/key", "Memory", "subject="+alone, "case=kept"),
		res.atMost("a full collection with a million keys that are not full", 20, "%.1f ms", "gc-ms", "Memory", "subject="+lease, "case=kept"),
		res.atMost("the same without Redis (NewLocal)", 20, "%.1f ms", "gc-ms", "Memory", "subject="+alone, "case=kept"),
		res.flat(),
		res.atMost("the process, idle, with 100,000 leased keys", 1, "%.2f %% of a core", "process-%", "Loop", "case=idle"),
		res.churn(),
	)
	return out
}

// flat judges the largest table by the smallest.
func (res *Results) flat() Verdict {
	rows := res.all("Flat", "subject="+lease)
	if len(rows) == 0 {
		return res.ratio("a check among a million keys by one among a thousand", 1.2, nil, nil, "ns/op")
	}
	last := rows[len(rows)-1]
	return res.ratio(fmt.Sprintf("a check among %s keys by one among %s (the same thousand are checked)", last.Labels["table"], rows[0].Labels["table"]), 1.2, last, rows[0], "ns/op")
}

// churn counts only where the keys came: a machine that cannot offer them shows a loop that has little to do.
func (res *Results) churn() Verdict {
	v := res.atMost("the loop with 10,000 new keys a second", 5, "%.2f %% of a core", "loop-%", "Loop", "case=churn")
	if n, ok := res.one("Loop", "case=churn").Median("keys/s"); ok && n < 9_500 {
		v.Met = false
		v.Measured += fmt.Sprintf(", but only %.0f keys came", n)
	}
	return v
}

func (res *Results) serial(keys, subject string) *Row {
	return res.one("Allow", "subject="+subject, "keys="+keys, "goroutines=1", serialCPU)
}

func (res *Results) remote(bench, subject, keys, goroutines string) *Row {
	return res.one(bench, "subject="+subject, "keys="+keys, "goroutines="+goroutines)
}

// redisRate is the faster of the two settings of redis_rate.
func (res *Results) redisRate(bench, keys, goroutines string) *Row {
	var best *Row
	least := math.Inf(1)
	for _, r := range res.all(bench, "impl=redis_rate", "keys="+keys, "goroutines="+goroutines) {
		if ns, ok := r.Median("ns/op"); ok && ns < least {
			best, least = r, ns
		}
	}
	return best
}

// ratio judges a unit of a row by that of another.
func (res *Results) ratio(goal string, most float64, a, b *Row, unit string) Verdict {
	v := Verdict{Goal: goal, Target: fmt.Sprintf("at most %.2f", most)}
	x, ok := a.Median(unit)
	y, ok2 := b.Median(unit)
	if !ok || !ok2 {
		return v
	}
	v.Known, v.Met = true, x/y <= most
	v.Measured = fmt.Sprintf("%.2f (%s by %s)", x/y, show(unit, x), show(unit, y))
	return v
}

// faster judges checks a second by redis_rate's.
func (res *Results) faster(what string, least float64, a, b *Row, keys, goroutines string) Verdict {
	v := Verdict{Goal: fmt.Sprintf("%s: checks a second by redis_rate's, %s, %s goroutines", what, keys, goroutines), Target: fmt.Sprintf("at least %g", least)}
	x, ok := a.Median("ns/op")
	y, ok2 := b.Median("ns/op")
	if !ok || !ok2 {
		return v
	}
	v.Known, v.Met = true, y/x >= least
	v.Measured = fmt.Sprintf("%.1f (%s by %s)", y/x, rate(x), rate(y))
	return v
}

func (res *Results) atMost(goal string, most float64, format, unit string, q ...string) Verdict {
	v := Verdict{Goal: goal, Target: "at most " + fmt.Sprintf(strings.Replace(strings.Replace(format, "%.2f", "%g", 1), "%.1f", "%g", 1), most)}
	x, ok := res.one(q...).Median(unit)
	if !ok {
		return v
	}
	v.Known, v.Met = true, x <= most
	v.Measured = fmt.Sprintf(format, x)
	return v
}

func (res *Results) fasterThanPeers() Verdict {
	v := Verdict{Goal: "Allow of a warm key is faster than every peer in every row", Target: "0 rows lost"}
	rows, lost := 0, 0
	for _, r := range res.all("Allow", "subject="+lease) {
		rows++
		if len(res.better(r, "ns/op", false)) > 0 {
			lost++
		}
	}
	if rows > 0 {
		v.Known, v.Met, v.Measured = true, lost == 0, fmt.Sprintf("%d of %d rows lost", lost, rows)
	}
	return v
}

func (res *Results) allocations() Verdict {
	v := Verdict{Goal: "allocations of a check that is allowed or denied in process", Target: "0"}
	most := 0.0
	for _, p := range res.patterns() {
		for _, s := range []string{lease, denied, alone} {
			for _, r := range res.all("Allow", "subject="+s, "keys="+p, "goroutines=1") {
				if n, ok := r.Median("allocs/op"); ok {
					v.Known = true
					most = max(most, n)
				}
			}
		}
	}
	v.Met = v.Known && most == 0
	if v.Known {
		v.Measured = fmt.Sprintf("%.0f", most)
	}
	return v
}

func (res *Results) slowCalls() Verdict {
	v := Verdict{Goal: "calls of local share 0 that kept Redis for a millisecond or longer (SLOWLOG), all rows", Target: "0"}
	slow, longest := 0.0, 0.0
	for _, r := range res.all("Redis", "subject="+share0) {
		v.Known = true
		for _, n := range r.values["slow-calls"] {
			slow += n
		}
		us, _ := r.Median("us/call")
		longest = max(longest, us)
	}
	if v.Known {
		v.Met = slow == 0
		v.Measured = fmt.Sprintf("%.0f; the mean call of the row with the longest ones takes %.0f µs", slow, longest)
	}
	return v
}

// better are the peers' rows of the same circumstances that have less of a unit than r.
func (res *Results) better(r *Row, unit string, withRemote bool) []*Row {
	mine, ok := r.Median(unit)
	if !ok {
		return nil
	}
	var out []*Row
	for _, id := range res.order {
		p := res.rows[id]
		if p.Bench != r.Bench || p.CPU != r.CPU || p.Ours() || p.Floor() || p.Labels["impl"] == "empty" {
			continue
		}
		if slices.ContainsFunc([]string{"keys", "goroutines", "table", "case"}, func(l string) bool { return p.Labels[l] != r.Labels[l] }) {
			continue
		}
		if !withRemote && (p.Labels["impl"] == "redis_rate" || p.Labels["impl"] == "rueidis") {
			continue
		}
		if theirs, ok := p.Median(unit); ok && theirs < mine {
			out = append(out, p)
		}
	}
	return out
}

// A Loss is a row of ours with the peers that are better there.
type Loss struct {
	Row    *Row
	Unit   string
	Better []*Row
}

// Losses are all rows that a peer wins.
func (res *Results) Losses() []Loss {
	var out []Loss
	for _, id := range res.order {
		r := res.rows[id]
		if !r.Ours() || r.Labels["path"] == "denied" {
			continue
		}
		for _, unit := range []string{"ns/op", "p99-ns", "redis-cpu-ns/op", "B/key", "gc-ms"} {
			// NewLocal shares nothing, so it is held against peers that share nothing; what asks Redis against what asks Redis.
			remote := r.Subject() != alone
			better := res.better(r, unit, remote)
			if r.Bench == "Cold" && remote {
				better = slices.DeleteFunc(better, func(p *Row) bool { return p.Labels["impl"] != "redis_rate" && p.Labels["impl"] != "rueidis" })
			}
			if len(better) > 0 {
				out = append(out, Loss{r, unit, better})
			}
		}
	}
	return out
}
