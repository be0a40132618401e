package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

func TestBench(t *testing.T) {
	code, out, errs := tool(t, "", "bench", "-duration", "300ms", "-concurrency", "8", "-keys", "uniform:1k")
	if code != exitOK || errs != "" {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
	wants(t, out, "bench: keys uniform:1k, limit 1000/s each, 8 goroutines, 1 instance; an embedded Redis", "no measure of Redis",
		benchHeader(), "\nfloor ", "\nshare 0 ", "\nshare 0.1 ")
}

// benchJSON is the part of the -json object that the tests look at.
type benchJSON struct {
	Redis       string
	Embedded    bool
	Note        string
	KeyCount    int `json:"key_count"`
	Interrupted bool
	Runs        []benchRun
}

func parseBench(t *testing.T, out string) (b benchJSON) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(out))
	if err := d.Decode(&b); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	if d.More() {
		t.Errorf("more than one object in %q", out)
	}
	return b
}

// consistent checks the sums of a run.
func consistent(t *testing.T, r benchRun) {
	t.Helper()
	near := func(what string, got, want float64) {
		if math.Abs(got-want) > 1e-6*max(1, want) {
			t.Errorf("%s: %s is %v, want %v", r.Name, what, got, want)
		}
	}
	if r.Checks == 0 || r.Errors != 0 || r.Seconds <= 0 || r.RatioToFloor == nil {
		t.Errorf("%s: %+v", r.Name, r)
		return
	}
	near("checks/s", r.Throughput, float64(r.Checks)/r.Seconds)
	near("redis/s", r.CallsRate, float64(r.RedisCalls)/r.Seconds)
	if r.P50 <= 0 || r.P99 < r.P50 || r.P999 < r.P99 || r.Max < r.P999 {
		t.Errorf("%s: p50 %d, p99 %d, p99.9 %d, max %d", r.Name, r.P50, r.P99, r.P999, r.Max)
	}
	d := r.Decisions
	if d == nil {
		if r.RedisCalls != r.Checks {
			t.Errorf("%s: %d calls for %d checks", r.Name, r.RedisCalls, r.Checks)
		}
		return
	}
	if d.Allowed+d.Denied != r.Checks || d.Local+d.Remote+d.Fallback != r.Checks {
		t.Errorf("%s: %+v are not %d checks", r.Name, *d, r.Checks)
	}
	near("allowed %", d.AllowedPercent, 100*float64(d.Allowed)/float64(r.Checks))
	near("local %", d.LocalPercent, 100*float64(d.Local)/float64(r.Checks))
}

// On a real Redis: the sums, the processor time, and that all it leaves behind expires.
func TestBenchJSON(t *testing.T) {
	srv := redistest.Start(t)
	rdb := srv.Client()
	defer rdb.Close()
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-info").Err(); err != nil {
		t.Fatal(err)
	}
	for user, known := range map[string]bool{"": true, "u:p@": false} {
		var out, errs bytes.Buffer
		code := run(t.Context(), []string{"bench", "-redis", "redis://" + user + srv.Addr(), "-duration", "600ms", "-concurrency", "8", "-instances", "2",
			"-keys", "hot", "-limit", "100000/s", "-share", "0.4", "-json"}, strings.NewReader(""), &out, &errs)
		if code != exitOK || errs.String() != "" {
			t.Errorf("exit %d, stderr %q", code, errs.String())
		}
		b := parseBench(t, out.String())
		if b.Redis != srv.Addr() || b.Embedded || b.Note != "" || b.KeyCount != 1 || b.Interrupted || len(b.Runs) != 3 {
			t.Fatalf("got %+v", b)
		}
		for i, name := range []string{"floor", "share 0", "share 0.4"} {
			r := b.Runs[i]
			if r.Name != name || (r.LocalShare == nil) != (i == 0) || (r.Decisions == nil) != (i == 0) {
				t.Errorf("run %d: %+v", i, r)
			}
			consistent(t, r)
			if (r.RedisCPU != nil) != known {
				t.Errorf("%s: processor time known: %v, want %v", name, r.RedisCPU != nil, known)
			}
		}
		if *b.Runs[0].RatioToFloor != 1 {
			t.Errorf("the floor is %v times itself", *b.Runs[0].RatioToFloor)
		}
		// What the command is there to show. A hot key is answered in process, however slow the machine is.
		if d := b.Runs[2].Decisions; d.LocalPercent < 50 || d.Allowed == 0 {
			t.Errorf("with leases: %+v", *d)
		}
	}
	keys, err := rdb.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		ttl, err := rdb.PTTL(t.Context(), key).Result()
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(key, "tierlimit-") || ttl == -1 || ttl > 25*time.Hour {
			t.Errorf("%s lives for %v", key, ttl)
		}
	}
}

// Ctrl-C ends it at once, with what was measured so far.
func TestBenchInterrupted(t *testing.T) {
	interrupt := func(after time.Duration, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), after)
		defer cancel()
		var out, errs bytes.Buffer
		started := time.Now()
		code := run(ctx, append([]string{"bench", "-concurrency", "8", "-keys", "hot", "-duration", "1m"}, args...), strings.NewReader(""), &out, &errs)
		if code != exitInterrupted || errs.String() != "tierlimit: interrupted\n" || time.Since(started) > after+5*time.Second {
			t.Errorf("exit %d after %v: %s", code, time.Since(started), errs.String())
		}
		return out.String()
	}
	wants(t, interrupt(300*time.Millisecond), "interrupted before anything was measured")
	out := interrupt(3 * time.Second)
	fits(t, out)
	wants(t, out, "\nfloor ", "interrupted: floor ran for ", "s of 20.0s; runs not listed were not made")
	b := parseBench(t, interrupt(3*time.Second, "-json"))
	if !b.Interrupted || !b.Embedded || b.Note != noMeasure || len(b.Runs) != 1 {
		t.Fatalf("got %+v", b)
	}
	consistent(t, b.Runs[0])
	if b := parseBench(t, interrupt(300*time.Millisecond, "-json")); b.Runs == nil || len(b.Runs) != 0 {
		t.Errorf("nothing was measured, got %+v", b)
	}
}

// A Redis that goes away ends it too, and is named.
func TestBenchLosesRedis(t *testing.T) {
	srv := redistest.Start(t)
	time.AfterFunc(2*time.Second, func() { _ = srv.Kill() })
	code, out, errs := tool(t, "", "bench", "-redis", "redis://"+srv.Addr(), "-concurrency", "8", "-keys", "hot", "-duration", "9s")
	if code != exitFailed || !strings.HasPrefix(errs, "tierlimit: floor: ") || !strings.Contains(errs, "checks failed") || strings.Count(errs, "\n") != 1 {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
	wants(t, out, "\nfloor ")
}

func TestBenchKeys(t *testing.T) {
	for text, want := range map[string]int{"hot": 1, "zipf:1": 1, "zipf:100k": 100_000, "uniform:10k": 10_000, "uniform:1m": 1_000_000, "zipf:7": 7} {
		form, n, err := parseKeys(text)
		if err != nil || n != want || !strings.HasPrefix(text, form) {
			t.Errorf("%s: %s of %d, %v", text, form, n, err)
		}
	}
	counts := func(form string, n int) (distinct, most int) {
		k := newKeySet(form, n)
		by := map[string]int{}
		for i := range len(k.order) {
			by[k.at(i)]++
			most = max(most, by[k.at(i)])
		}
		return len(by), 1000 * most / len(k.order)
	}
	for _, form := range []string{"hot", "uniform", "zipf"} {
		if n, most := counts(form, 1); n != 1 || most != 1000 {
			t.Errorf("%s of one: %d keys, the hottest %d/1000", form, n, most)
		}
	}
	if n, most := counts("uniform", 100); n != 100 || most > 20 {
		t.Errorf("uniform: %d keys, the hottest %d/1000", n, most)
	}
	// The sum of 1/i^1.1 up to 100 is 4.28, so the hottest has 0.234.
	if n, most := counts("zipf", 100); n != 100 || most < 220 || most > 250 {
		t.Errorf("zipf: %d keys, the hottest %d/1000", n, most)
	}
}

func TestDriveCountsErrorsApart(t *testing.T) {
	fault := errors.New("no")
	good := func(context.Context, string) (tierlimit.Result, error) {
		return tierlimit.Result{Allowed: true, Source: tierlimit.Local}, nil
	}
	bad := func(context.Context, string) (tierlimit.Result, error) { return tierlimit.Result{}, fault }
	o := drive(t.Context(), []checkFunc{good, bad}, newKeySet("hot", 1), 2, 50*time.Millisecond, func(time.Duration) {})
	if o.checks == 0 || o.allowed != o.checks || o.bySource[tierlimit.Local] != o.checks || o.latency.Count() != o.checks || o.errors == 0 || !errors.Is(o.err, fault) {
		t.Errorf("%d checks, %d allowed, %v, %d timed; %d errors, %v", o.checks, o.allowed, o.bySource, o.latency.Count(), o.errors, o.err)
	}
}

// A run that fell back is fast for the wrong reason.
func TestBenchFellBack(t *testing.T) {
	if (benchRun{Checks: 1000}).fellBack() || (benchRun{Checks: 1000, Decisions: &decisions{Fallback: 10}}).fellBack() {
		t.Error("a few more or less make no difference")
	}
	if !(benchRun{Checks: 1000, Decisions: &decisions{Fallback: 11}}).fellBack() {
		t.Error("more than a hundredth without Redis, and compared all the same")
	}
}

// The widest figures stay in their columns.
func TestBenchTable(t *testing.T) {
	cpu, ratio := 999e6, 123456.0
	r := benchRun{Name: "share 0.123", Throughput: 123456789, P50: 999, P99: 9e6, P999: 999e6, Max: 15e9,
		Decisions: &decisions{AllowedPercent: 100, LocalPercent: 100}, CallsRate: 1234567, RedisCPU: &cpu, RatioToFloor: &ratio}
	text := benchHeader() + "\n" + r.String() + "\n" + benchRun{Name: "floor"}.String() + "\n"
	fits(t, text)
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(line) - 1; n != utf8.RuneCountInString(benchHeader()) {
			t.Errorf("%d columns: %s", n, line)
		}
		if n := len(strings.Fields(line)); !strings.HasPrefix(line, "run") && n != 11 && n != 12 {
			t.Errorf("columns run together: %s", line)
		}
	}
}
