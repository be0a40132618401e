// Command bench runs all benchmarks side by side and writes docs/benchmarks.md with its plot. It is run from the root of the
// repository, by "make bench".
package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tierlimit/tierlimit/bench"
	"github.com/tierlimit/tierlimit/bench/report"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A step is one run of the test binary.
type step struct {
	name  string
	bench string // regular expression, as of -bench
	time  time.Duration
	count int
	cpu   string
	once  bool // in the first round only: what does not vary, or takes long enough for it not to matter
}

// Rounds repeat all steps, so that a slow minute of the machine falls on all subjects and not on the repetitions of one.
type plan struct {
	rounds int
	steps  []step
}

var full = plan{rounds: 3, steps: []step{
	{name: "in process", bench: "Allow", time: 100 * time.Millisecond, count: 2, cpu: "1,2,8"},
	{name: "Redis", bench: "Redis", time: 200 * time.Millisecond, count: 2, cpu: "2"},
	{name: "round trip", bench: "RTT", time: 250 * time.Millisecond, count: 2, cpu: "2"},
	{name: "cold", bench: "Cold", time: 100 * time.Millisecond, count: 2, cpu: "2"},
	{name: "number of keys", bench: "Flat", time: 100 * time.Millisecond, count: 6, cpu: "2", once: true},
	{name: "memory", bench: "Memory", time: time.Millisecond, count: 1, cpu: "2", once: true},
	{name: "loop", bench: "Loop", time: 15 * time.Second, count: 1, cpu: "2", once: true},
	{name: "latency", bench: "Latency", time: 30 * time.Second, count: 1, cpu: "2", once: true},
}}

var quick = plan{rounds: 1, steps: []step{
	{name: "in process", bench: "Allow", time: 30 * time.Millisecond, count: 3, cpu: "2"},
	{name: "Redis", bench: "Redis", time: 50 * time.Millisecond, count: 1, cpu: "2"},
	{name: "round trip", bench: "RTT", time: 100 * time.Millisecond, count: 1, cpu: "2"},
	{name: "cold", bench: "Cold", time: 30 * time.Millisecond, count: 1, cpu: "2"},
	{name: "number of keys", bench: "Flat", time: 30 * time.Millisecond, count: 1, cpu: "2"},
	{name: "memory", bench: "Memory", time: time.Millisecond, count: 1, cpu: "2"},
	{name: "loop", bench: "Loop", time: 4 * time.Second, count: 1, cpu: "2"},
	{name: "latency", bench: "Latency", time: 4 * time.Second, count: 1, cpu: "2"},
}}

func main() {
	isQuick := flag.Bool("quick", false, "few and short repetitions")
	results := flag.String("results", "bench/results.out", "file for what the benchmarks print")
	only := flag.String("only", "", "regular expression for the names of the steps to run: "+strings.Join(names(), ", "))
	keys := flag.Int("keys", 0, "number of the many keys, of which the goals want a million; 0 is that, or a fifth for a quick run")
	rewrite := flag.Bool("rewrite", false, "run nothing, only write the page from the results there are")
	docs := flag.String("docs", "docs", "directory of the page")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := func() error {
		if !*rewrite {
			p, many := full, 1_000_000
			if *isQuick {
				p, many = quick, 200_000
			}
			if err := run(ctx, p, *isQuick, *results, *only, cmp.Or(*keys, many)); err != nil {
				return err
			}
		}
		return write(*results, *docs)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func names() []string {
	var out []string
	for _, s := range full.steps {
		out = append(out, s.name)
	}
	return out
}

// run runs a plan. Steps that fail are told of and passed over: what the others found is not to be lost.
func run(ctx context.Context, p plan, isQuick bool, results, only string, keys int) error {
	pick, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "tierlimit-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "bench.test")
	if out, err := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, "./bench").CombinedOutput(); err != nil {
		return fmt.Errorf("building the benchmarks: %w\n%s", err, out)
	}
	file, err := os.Create(results)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := describe(ctx, file, p, isQuick, binary); err != nil {
		return err
	}
	started := time.Now()
	for round := range p.rounds {
		for _, s := range p.steps {
			if !pick.MatchString(s.name) || s.once && round > 0 {
				continue
			}
			fmt.Fprintf(os.Stderr, "%6s  round %d of %d: %s\n", time.Since(started).Round(time.Second), round+1, p.rounds, s.name)
			cmd := exec.CommandContext(ctx, binary, "-test.run", "^$", "-test.bench", "^Benchmark"+s.bench+"$", "-test.benchtime", s.time.String(),
				"-test.count", strconv.Itoa(s.count), "-test.cpu", s.cpu, "-test.timeout", "1h", "-keys", strconv.Itoa(keys))
			cmd.Dir = dir
			cmd.Stdout, cmd.Stderr = file, os.Stderr
			if err := cmd.Run(); err != nil {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				fmt.Fprintf(os.Stderr, "%s: %v: the page will say what is missing\n", s.name, err)
			}
		}
	}
	return finish(results, time.Since(started))
}

// finish puts what is known only at the end before the results: a configuration line holds for what follows it.
func finish(results string, took time.Duration) error {
	all, err := os.ReadFile(results)
	if err != nil {
		return err
	}
	return os.WriteFile(results, append(fmt.Appendf(nil, "took: %s\n", took.Round(time.Second)), all...), 0o644)
}

// describe writes what the results hold for, as configuration lines of the benchmark format.
func describe(ctx context.Context, w io.Writer, p plan, isQuick bool, binary string) error {
	server, err := redistest.Open()
	if err != nil {
		return err
	}
	defer server.Close()
	version, err := bench.Version(ctx, server.Client())
	if err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	var peers []string
	for _, d := range info.Deps {
		if slices.ContainsFunc(compared, func(m string) bool { return d.Path == m }) {
			peers = append(peers, d.Path+" "+d.Version)
		}
	}
	mode, command := "full", "make bench"
	if isQuick {
		mode, command = "quick", "make bench BENCH=quick"
	}
	for _, kv := range [][2]string{
		{"command", command},
		{"mode", mode},
		{"machine", fmt.Sprintf("%s, %d processors", processor(), runtime.NumCPU())},
		{"os", runtime.GOOS + "/" + runtime.GOARCH},
		{"goversion", info.GoVersion},
		{"redis", version},
		{"date", time.Now().UTC().Format(time.DateOnly)},
		{"load", firstLine("/proc/loadavg")},
		{"rounds", strconv.Itoa(p.rounds)},
		{"samples", strconv.Itoa(p.rounds * p.steps[0].count)},
		{"peers", strings.Join(peers, ", ")},
	} {
		if _, err := fmt.Fprintf(w, "%s: %s\n", kv[0], kv[1]); err != nil {
			return err
		}
	}
	return nil
}

// compared are the modules whose versions matter.
var compared = []string{
	"github.com/RussellLuo/slidingwindow", "github.com/failsafe-go/failsafe-go", "github.com/go-chi/httprate", "github.com/go-redis/redis_rate/v10",
	"github.com/redis/go-redis/v9", "github.com/redis/rueidis", "github.com/sethvargo/go-limiter", "github.com/throttled/throttled/v2",
	"github.com/ulule/limiter/v3", "golang.org/x/time",
}

func processor() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

func firstLine(file string) string {
	b, _ := os.ReadFile(file)
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}

const (
	pageName = "benchmarks.md"
	plotName = "benchmarks.svg"
)

func write(results, docs string) error {
	file, err := os.Open(results)
	if err != nil {
		return err
	}
	defer file.Close()
	res, err := report.Parse(file, results)
	if err != nil {
		return err
	}
	var page, plot bytes.Buffer
	if err := errors.Join(res.Markdown(&page, plotName), res.Plot(&plot)); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(docs, pageName), page.Bytes(), 0o644),
		os.WriteFile(filepath.Join(docs, plotName), plot.Bytes(), 0o644))
}
