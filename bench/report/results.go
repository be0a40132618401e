// Package report reads what the benchmarks printed, judges it by the goals, and writes it down: docs/benchmarks.md and its plot.
package report

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"golang.org/x/perf/benchfmt"
	"golang.org/x/perf/benchmath"
)

// Results are rows, and what was said about the run.
type Results struct {
	Config map[string]string // "date", "goversion", ...
	Failed []string          // benchmarks that failed, and why
	rows   map[string]*Row
	order  []string
}

// A Row is one benchmark, with the values of all its repetitions by unit.
type Row struct {
	Bench  string
	Labels map[string]string // keys, impl, path, goroutines, ...
	CPU    string            // GOMAXPROCS
	values map[string][]float64
}

// Parse reads benchmark output. A benchmark that occurs several times is one row.
func Parse(r io.Reader, name string) (*Results, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	res := &Results{Config: map[string]string{}, rows: map[string]*Row{}, Failed: failures(string(text))}
	in := benchfmt.NewReader(bytes.NewReader(text), name)
	for in.Scan() {
		rec, ok := in.Result().(*benchfmt.Result)
		if !ok {
			continue // a failure, seen already, or a unit
		}
		for _, c := range rec.Config {
			res.Config[c.Key] = string(c.Value)
		}
		res.add(rec)
	}
	return res, in.Err()
}

// failures are the benchmarks that failed, each with its reason, which stands on the line after; what contains them fails without one.
func failures(text string) []string {
	var out []string
	var name string
	for line := range strings.Lines(text) {
		if reason, ok := strings.CutPrefix(line, "    "); ok && name != "" {
			out = append(out, name+": "+strings.TrimSpace(reason))
		}
		_, name, _ = strings.Cut(strings.TrimSpace(line), "--- FAIL: ")
	}
	return out
}

func (res *Results) add(rec *benchfmt.Result) {
	base, parts := rec.Name.Parts()
	row := &Row{Bench: string(base), Labels: map[string]string{}, CPU: "1", values: map[string][]float64{}}
	for _, p := range parts {
		if cpu, ok := strings.CutPrefix(string(p), "-"); ok {
			row.CPU = cpu
			continue
		}
		key, value, _ := strings.Cut(strings.TrimPrefix(string(p), "/"), "=")
		row.Labels[key] = value
	}
	id := row.id()
	if old, ok := res.rows[id]; ok {
		row = old
	} else {
		res.rows[id] = row
		res.order = append(res.order, id)
	}
	for _, v := range rec.Values {
		unit, value := v.Unit, v.Value
		if v.OrigUnit != "" {
			unit, value = v.OrigUnit, v.OrigValue
		}
		row.values[unit] = append(row.values[unit], value)
	}
}

func (r *Row) id() string {
	var b strings.Builder
	b.WriteString(r.Bench)
	for _, k := range slices.Sorted(maps.Keys(r.Labels)) {
		fmt.Fprintf(&b, "/%s=%s", k, r.Labels[k])
	}
	return b.String() + "@" + r.CPU
}

// Subject is the implementation and the path.
func (r *Row) Subject() string {
	if r.Labels["path"] == "" {
		return r.Labels["impl"]
	}
	return r.Labels["impl"] + " " + r.Labels["path"]
}

// Ours says whether it is tierlimit's.
func (r *Row) Ours() bool { return r.Labels["impl"] == "tierlimit" }

// Floor says whether it is no limiter.
func (r *Row) Floor() bool { return r.Labels["impl"] == "floor" }

// Summary is the median with its interval.
func (r *Row) Summary(unit string) (benchmath.Summary, bool) {
	if r == nil || len(r.values[unit]) == 0 {
		return benchmath.Summary{}, false
	}
	return benchmath.AssumeNothing.Summary(benchmath.NewSample(slices.Clone(r.values[unit]), &benchmath.DefaultThresholds), 0.95), true
}

// Median of a unit.
func (r *Row) Median(unit string) (float64, bool) {
	s, ok := r.Summary(unit)
	return s.Center, ok
}

// A query picks rows: a benchmark, its labels as "key=value", and "cpu=N". A subject is "subject=impl path".
type query []string

func (q query) matches(r *Row) bool {
	if r.Bench != q[0] {
		return false
	}
	for _, want := range q[1:] {
		key, value, _ := strings.Cut(want, "=")
		have := r.Labels[key]
		switch key {
		case "cpu":
			have = r.CPU
		case "subject":
			have = r.Subject()
		}
		if have != value {
			return false
		}
	}
	return true
}

// all are the rows that a query picks, in the order they came.
func (res *Results) all(q ...string) []*Row {
	var rows []*Row
	for _, id := range res.order {
		if query(q).matches(res.rows[id]) {
			rows = append(rows, res.rows[id])
		}
	}
	return rows
}

// one is the first of them, or nil.
func (res *Results) one(q ...string) *Row {
	if rows := res.all(q...); len(rows) > 0 {
		return rows[0]
	}
	return nil
}

// values are the different values of a label among rows, in the order they came.
func values(rows []*Row, label string) []string {
	var out []string
	for _, r := range rows {
		v := r.Labels[label]
		switch label {
		case "cpu":
			v = r.CPU
		case "subject":
			v = r.Subject()
		}
		if v != "" && !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}
