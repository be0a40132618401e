package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// columns of the demo's table; all are right-aligned.
var columns = []struct {
	name  string
	width int
}{
	{"time", 6},
	{"offered", 8},
	{"admitted", 9},
	{"limit", 6},
	{"overshoot", 10},
	{"local %", 8},
	{"redis/s", 8},
	{"p50", 7},
	{"p99", 7},
	{"breaker", 14},
	{"fleet", 15},
}

// A row is what happened between two moments of a run.
type row struct {
	at                       time.Duration // since the start
	offered, admitted, limit int64         // tokens a second
	overshoot                int64         // of the whole run so far
	local                    float64       // part decided without a call to Redis, 0 to 1
	calls                    float64       // to Redis, a second
	p50, p99                 time.Duration // of Allow
	breaker                  string
	fleet                    string
}

// header is the table's first line.
func header() string {
	var b strings.Builder
	for _, c := range columns {
		fmt.Fprintf(&b, "%*s", c.width, c.name)
	}
	return b.String()
}

// String is the row under header. %*s counts runes, so that a µ does not shift the columns.
func (r row) String() string {
	cells := []string{
		fmt.Sprintf("%.1fs", r.at.Seconds()),
		strconv.FormatInt(r.offered, 10),
		strconv.FormatInt(r.admitted, 10),
		strconv.FormatInt(r.limit, 10),
		strconv.FormatInt(r.overshoot, 10),
		fmt.Sprintf("%.1f", 100*r.local),
		fmt.Sprintf("%.0f", r.calls),
		short(r.p50),
		short(r.p99),
		r.breaker,
		r.fleet,
	}
	var b strings.Builder
	for i, c := range columns {
		fmt.Fprintf(&b, "%*s", c.width, cells[i])
	}
	return b.String()
}

// short is a duration in two or three digits: 85ns, 1.2µs, 340µs, 12ms, 1.5s.
func short(d time.Duration) string {
	for _, u := range []struct {
		name string
		unit time.Duration
	}{{"s", time.Second}, {"ms", time.Millisecond}, {"µs", time.Microsecond}} {
		if d >= u.unit {
			v := float64(d) / float64(u.unit)
			if v < 9.95 {
				return fmt.Sprintf("%.1f%s", v, u.name)
			}
			return fmt.Sprintf("%.0f%s", v, u.name)
		}
	}
	return fmt.Sprintf("%dns", d)
}

// share is part/whole, 0 of nothing.
func share(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
