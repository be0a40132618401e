package report

import "fmt"

// show is a value with its unit, as short as its digits are worth.
func show(unit string, v float64) string {
	switch unit {
	case "ns/op", "p50-ns", "p99-ns", "p99.9-ns", "max-ns", "local-p50-ns", "local-p99-ns", "local-p99.9-ns", "local-max-ns", "redis-cpu-ns/op", "client-cpu-ns/op":
		switch {
		case v < 10:
			return fmt.Sprintf("%.1f ns", v)
		case v < 1e3:
			return fmt.Sprintf("%.0f ns", v)
		case v < 1e6:
			return fmt.Sprintf("%s µs", digits(v/1e3))
		}
		return fmt.Sprintf("%s ms", digits(v/1e6))
	case "B/key":
		return fmt.Sprintf("%.0f bytes", v)
	case "gc-ms":
		return fmt.Sprintf("%s ms", digits(v))
	}
	return digits(v)
}

// digits are three.
func digits(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// rate is checks a second from nanoseconds a check.
func rate(ns float64) string {
	switch perSecond := 1e9 / ns; {
	case perSecond >= 1e6:
		return digits(perSecond/1e6) + " M/s"
	case perSecond >= 1e3:
		return digits(perSecond/1e3) + " k/s"
	default:
		return digits(perSecond) + " /s"
	}
}

// what unit is called in a table.
func called(unit string) string {
	switch unit {
	case "ns/op":
		return "time by check"
	case "p99-ns":
		return "p99"
	case "redis-cpu-ns/op":
		return "processor time of Redis by check"
	case "B/key":
		return "memory by key"
	case "gc-ms":
		return "full collection"
	}
	return unit
}
