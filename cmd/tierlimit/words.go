package main

import (
	"crypto/rand"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tierlimit/tierlimit"
)

// parseLimit reads the -limit flag.
func parseLimit(s string) (tierlimit.Limit, error) {
	l, err := tierlimit.ParseLimit(s)
	switch {
	case err != nil:
		return l, badInput("-limit: %s", strings.TrimPrefix(err.Error(), "tierlimit: "))
	case l == tierlimit.Unlimited():
		return l, badInput("-limit: %q limits nobody", s)
	}
	return l, nil
}

// perSecond is a limit's rate in tokens per second.
func perSecond(l tierlimit.Limit) float64 { return float64(l.Rate) / l.Period.Seconds() }

// runPrefix keeps the Redis keys of runs apart; they expire by themselves.
func runPrefix(verb string) string { return "tierlimit-" + verb + ":" + rand.Text()[:8] + ":" }

// number is a number as one would write it: 10000, not 1e+04.
func number(f float64) string {
	if math.Abs(f) >= 1 {
		f = math.Round(f*100) / 100
	}
	return strconv.FormatFloat(f, 'f', -1, 64)
}

// roughly is a number of 1 or more in two digits: 1.5, 59, 150,000.
func roughly(f float64) string {
	if f < 9.95 {
		return strconv.FormatFloat(f, 'f', 1, 64)
	}
	unit := math.Pow(10, math.Floor(math.Log10(f))-1)
	text := strconv.FormatFloat(math.Round(f/unit)*unit, 'f', 0, 64)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// about is a duration as one would say it: 83h, 16h23m, 59s, 1.5s, 120ms.
func about(d time.Duration) string {
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%.0fh", d.Hours())
	case d >= time.Hour:
		m := int(d.Round(time.Minute).Minutes())
		if m%60 == 0 {
			return fmt.Sprintf("%dh", m/60)
		}
		return fmt.Sprintf("%dh%dm", m/60, m%60)
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= 950*time.Millisecond:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Millisecond).String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1fs", d.Seconds()) }

// tally names what the instances are: "open" if all are, else the most first: "3 open, 1 …" in short.
func tally[K comparable](counts map[K]int) string {
	type one struct {
		name string
		n    int
	}
	var all []one
	sum := 0
	for k, n := range counts {
		if n > 0 {
			all = append(all, one{fmt.Sprint(k), n})
			sum += n
		}
	}
	slices.SortFunc(all, func(a, b one) int {
		if a.n != b.n {
			return b.n - a.n
		}
		return strings.Compare(a.name, b.name)
	})
	switch len(all) {
	case 0:
		return "-"
	case 1:
		return all[0].name
	}
	return fmt.Sprintf("%s %d/%d", all[0].name, all[0].n, sum)
}

// bar is the demo's progress line.
func bar(at, whole time.Duration, phase string) string {
	const cells = 30
	n := min(cells, int(int64(cells)*int64(at)/int64(max(1, whole))))
	return fmt.Sprintf("%6s  [%s%s] %s  %s", seconds(at), strings.Repeat("=", n), strings.Repeat(" ", cells-n), seconds(whole), phase)
}

// lineBar is replay's progress line, of at most so many columns: what matters less is left out where there are few.
func lineBar(done, all int64, at time.Duration, columns int) string {
	const least, most = 10, 40
	left := fmt.Sprintf("%3d %% [", 100*done/max(1, all))
	tail := []string{fmt.Sprintf("] %d of %d lines", done, all), ""}
	if at >= time.Second { // the first moments say nothing
		tail[1] = fmt.Sprintf(", %.0f/s", float64(done)/at.Seconds())
	}
	right := strings.Join(tail, "")
	for _, shorter := range []string{tail[0], "]"} {
		if columns-len(left)-len(right) >= least {
			break
		}
		right = shorter
	}
	cells := max(0, min(most, columns-len(left)-len(right)))
	n := int(int64(cells) * min(done, all) / max(1, all))
	return left + strings.Repeat("=", n) + strings.Repeat(" ", cells-n) + right
}
