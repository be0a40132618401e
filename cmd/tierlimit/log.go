package main

import (
	"cmp"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tierlimit/tierlimit/cmd/tierlimit/accesslog"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// A parsedLog is a log as a load: one check for each line.
type parsedLog struct {
	checks      []fleet.Check // At counts from the earliest line, by the log's clock
	keys        map[string]int64
	first, last time.Time // the earliest and the latest line
	malformed   int
	faults      []string // the first few of them
}

// parseLog reads all of r. key is "ip", "path" or "ip+path". The error is the reader's.
func parseLog(r io.Reader, key string) (*parsedLog, error) {
	l := &parsedLog{keys: map[string]int64{}}
	names := map[string]string{} // one copy of each key
	var times []time.Time
	for e, err := range accesslog.Read(r) {
		if syntax, ok := errors.AsType[*accesslog.SyntaxError](err); ok {
			l.malformed++
			if len(l.faults) < shownFaults {
				l.faults = append(l.faults, syntax.Error())
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		k := e.Host
		switch key {
		case "path":
			k = e.Path
		case "ip+path":
			k += " " + e.Path
		}
		name, ok := names[k]
		if !ok {
			name = strings.Clone(k) // an Entry holds its whole line in memory
			names[name] = name
		}
		l.keys[name]++
		l.checks = append(l.checks, fleet.Check{Key: name, Cost: 1})
		times = append(times, e.Time)
	}
	if len(times) == 0 {
		return l, nil
	}
	l.first, l.last = slices.MinFunc(times, time.Time.Compare), slices.MaxFunc(times, time.Time.Compare)
	for i, t := range times {
		l.checks[i].At = t.Sub(l.first)
	}
	return l, nil
}

// pace sorts the lines by time, stably, and makes them come speed times faster.
func (l *parsedLog) pace(speed float64) error {
	if took := l.span().Seconds() / speed; took > maxReplay.Seconds() {
		return badInput("-speed: the log's %s at speed %s take %.0f hours, want at most %s", about(l.span()), number(speed), took/3600, about(maxReplay))
	}
	slices.SortStableFunc(l.checks, func(a, b fleet.Check) int { return cmp.Compare(a.At, b.At) })
	for i := range l.checks {
		l.checks[i].At = time.Duration(float64(l.checks[i].At) / speed)
	}
	return nil
}

// span is the time from the earliest line to the latest.
func (l *parsedLog) span() time.Duration { return l.last.Sub(l.first) }
