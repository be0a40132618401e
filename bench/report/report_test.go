package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

const printed = `took: 1m0s
command: make bench
mode: full
date: 2026-01-02
rounds: 1
samples: 3
goos: linux
BenchmarkAllow/keys=hot/impl=floor/path=table/goroutines=1-2         100   40.0 ns/op   0 B/op   0 allocs/op
BenchmarkAllow/keys=hot/impl=tierlimit/path=lease/goroutines=1-2     100   50.0 ns/op   0 %remote   0 B/op   0 allocs/op
BenchmarkAllow/keys=hot/impl=tierlimit/path=lease/goroutines=1-2     100   90.0 ns/op   0 %remote   0 B/op   0 allocs/op
BenchmarkAllow/keys=hot/impl=tierlimit/path=lease/goroutines=1-2     100   60.0 ns/op   0 %remote   0 B/op   0 allocs/op
BenchmarkAllow/keys=hot/impl=tierlimit/path=lease/goroutines=1       100   61.0 ns/op   0 %remote   0 B/op   0 allocs/op
BenchmarkAllow/keys=hot/impl=x-time-rate/path=sync.Map/goroutines=1-2    100   240.0 ns/op   16 B/op   1 allocs/op
BenchmarkAllow/keys=hot/impl=tierlimit/path=lease/goroutines=16-2    100   80.0 ns/op
BenchmarkAllow/keys=hot/impl=x-time-rate/path=sync.Map/goroutines=16-2   100   70.0 ns/op
BenchmarkAllow/keys=10k/impl=x-time-rate/path=sync.Map/goroutines=1-2    --- FAIL: BenchmarkAllow/keys=10k/impl=x-time-rate/path=sync.Map/goroutines=1-2
    allow_test.go:53: 9 of 100 checks were not answered as they should
BenchmarkRedis/keys=hot/impl=tierlimit/path=share0/goroutines=128-2      100   1000 ns/op   90000 p50-ns   200000 p99-ns   10 redis-cpu-ns/op   2 slow-calls   300 us/call
BenchmarkRedis/keys=hot/impl=redis_rate/path=pool=default/goroutines=128-2   100   30000 ns/op   90000 p50-ns   400000 p99-ns   10000 redis-cpu-ns/op
BenchmarkRedis/keys=hot/impl=redis_rate/path=pool=128/goroutines=128-2       100   25000 ns/op   90000 p50-ns   400000 p99-ns   10000 redis-cpu-ns/op
BenchmarkMemory/impl=tierlimit/path=lease/case=kept-2     100   1000 ns/op   111.0 B/key   21.0 gc-ms   1.0 gc0-ms
BenchmarkLoop/case=churn-2     100   1000 ns/op   7000 keys/s   0.7 loop-%   9.0 process-%
--- FAIL: BenchmarkAllow/keys=10k
--- FAIL: BenchmarkAllow
FAIL
`

func parsed(t *testing.T) *Results {
	t.Helper()
	res, err := Parse(strings.NewReader(printed), "printed")
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func TestParse(t *testing.T) {
	res := parsed(t)
	r := res.one("Allow", "subject="+lease, "keys=hot", "goroutines=1", "cpu=2")
	if ns, ok := r.Median("ns/op"); !ok || ns != 60 {
		t.Errorf("median %v %v, want 60 of 50, 60, 90", ns, ok)
	}
	if ns, _ := res.one("Allow", "subject="+lease, "keys=hot", "goroutines=1", "cpu=1").Median("ns/op"); ns != 61 {
		t.Errorf("%v under -cpu 1, want 61", ns)
	}
	if res.Config["date"] != "2026-01-02" || len(res.Failed) != 1 || !strings.Contains(res.Failed[0], "goroutines=1-2: allow_test.go:53: 9 of 100") {
		t.Errorf("config %v, failed %q", res.Config, res.Failed)
	}
	if best := res.redisRate("Redis", "hot", "128"); best.Labels["path"] != "pool=128" {
		t.Errorf("the faster redis_rate is %v", best.Labels)
	}
}

func TestJudge(t *testing.T) {
	want := map[string]string{ // by the beginning of the goal
		"Allow of a warm key, one goroutine, hot":                        "met",
		"Allow of a warm key, one goroutine, 10k":                        "",
		"the same by the hand-written floor (table and atomic add), hot": "met", // 60 by 40
		"Allow of a warm key is faster than every peer":                  "not met",
		"allocations": "met",
		"local share 0: checks a second by redis_rate's, hot, 128":                             "met", // 25 times
		"processor time of Redis for a check by redis_rate's, hot, 128":                        "met",
		"p99 of local share 0 by redis_rate's, hot, 128":                                       "met",
		"calls of local share 0 that kept Redis":                                               "not met",
		"memory of an idle key":                                                                "met",
		"the loop with 10,000 new keys":                                                        "not met", // 7000 came
		"a full collection with":                                                               "not met",
		"1 ms farther away, local share 0: checks a second by redis_rate's, hot, 16 goroutine": "",
	}
	seen := 0
	for _, v := range parsed(t).Judge() {
		for goal, verdict := range want {
			if !strings.HasPrefix(v.Goal, goal) {
				continue
			}
			seen++
			if v.Known != (verdict != "") || v.Met != (verdict == "met") {
				t.Errorf("%s: measured %q, known %v, met %v, want %q", v.Goal, v.Measured, v.Known, v.Met, verdict)
			}
		}
	}
	if seen != len(want) {
		t.Errorf("%d of %d goals were judged", seen, len(want))
	}
}

func TestLosses(t *testing.T) {
	losses := parsed(t).Losses()
	if len(losses) != 1 || losses[0].Row.Labels["goroutines"] != "16" || len(losses[0].Better) != 1 {
		t.Errorf("%+v, want the row with 16 goroutines only", losses)
	}
}

// The page and the plot come out of what there is, be it little.
func TestWritten(t *testing.T) {
	for name, in := range map[string]string{"some": printed, "nothing": "date: 2026-01-02\n"} {
		t.Run(name, func(t *testing.T) {
			res, err := Parse(strings.NewReader(in), name)
			if err != nil {
				t.Fatal(err)
			}
			var page, plot bytes.Buffer
			if err := res.Markdown(&page, "benchmarks.svg"); err != nil {
				t.Fatal(err)
			}
			if err := res.Plot(&plot); err != nil {
				t.Fatal(err)
			}
			if name == "some" {
				for _, want := range []string{"| date | 2026-01-02 |", "0.25 (60 ns by 240 ns) | met", "tierlimit lease, time by check | 80 ns | x-time-rate sync.Map 70 ns |", "**1 runs failed**"} {
					if !strings.Contains(page.String(), want) {
						t.Errorf("the page has no %q", want)
					}
				}
			}
			for x := xml.NewDecoder(&plot); ; {
				if _, err := x.Token(); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatalf("the plot is not XML: %v", err)
				}
			}
		})
	}
}
