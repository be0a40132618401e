package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/alicebob/miniredis/v2"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// tool runs the command and returns its exit status and what it wrote.
func tool(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, strings.NewReader(stdin), &out, &errs)
	fits(t, out.String())
	return code, out.String(), errs.String()
}

// fits checks that no line is too wide, and that nothing but text was written: these streams are no terminals.
func fits(t *testing.T, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	if strings.ContainsAny(text, "\x1b\r") {
		t.Errorf("escape sequences in %q", text)
	}
}

func wants(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q is missing", p)
		}
	}
	if t.Failed() {
		t.Logf("in:\n%s", text)
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update rewrites it), got:\n%s\nwant:\n%s", file, got, want)
	}
}

func TestTable(t *testing.T) {
	rows := []row{
		{at: 500 * time.Millisecond, offered: 5992, admitted: 5614, limit: 2000, local: 0.952, calls: 175.4, p50: 271, p99: 44 * time.Millisecond, breaker: "closed", fleet: "online"},
		{at: 12500 * time.Millisecond, offered: 15000, admitted: 5000, limit: 5000, overshoot: 123456, local: 1, calls: 2000, p50: 9960, p99: 1500 * time.Microsecond, breaker: tally(map[string]int{"half-open": 3, "open": 1}), fleet: tally(map[string]int{"connecting": 2, "online": 2})},
	}
	text := header() + "\n"
	for _, r := range rows {
		text += r.String() + "\n"
	}
	fits(t, text)
	golden(t, "table.golden", text)
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0ns", 999: "999ns", 1000: "1.0µs", 9949: "9.9µs", 9950: "10µs", 85 * time.Microsecond: "85µs",
		time.Millisecond: "1.0ms", 340 * time.Millisecond: "340ms", 1500 * time.Millisecond: "1.5s",
	} {
		if got := short(d); got != want {
			t.Errorf("short(%d) is %s, want %s", d, got, want)
		}
	}
}

// The whole outage on the screen, and a verdict: what README's first command does.
func TestDemo(t *testing.T) {
	started := time.Now()
	code, out, errs := tool(t, "", "demo", "-duration", "10s", "-limit", "500/s", "--cut=refuse")
	if code != exitOK || errs != "" {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
	if took := time.Since(started); took > 30*time.Second {
		t.Errorf("a demo of 10s took %v", took)
	}
	wants(t, out, header(), "Redis cut:", "silence: leases in hand only", "outage share: each instance admits its part", "Redis back:", "online again:",
		"verdict: kept, overshoot 0", "an embedded Redis", demoSettings, "of 9.0s; the rest of 10s is", "\nonline again ", "told apart once a row")
	if strings.Contains(out, "\nRedis back ") {
		t.Error("the phase after the outage has two names")
	}
}

// An interrupted demo still judges what it saw.
func TestDemoInterrupted(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	started := time.Now()
	code := run(ctx, []string{"demo"}, strings.NewReader(""), &out, &errs)
	if code != exitInterrupted || errs.String() != "tierlimit: interrupted\n" || time.Since(started) > 15*time.Second {
		t.Errorf("exit %d after %v: %s", code, time.Since(started), errs.String())
	}
	wants(t, out.String(), "verdict: kept")
}

// Ctrl-C ends the reading of a log too, be it long or a terminal at which nobody types.
func TestReadingInterrupted(t *testing.T) {
	idle, hold := io.Pipe()
	defer hold.Close()
	line := `h - - [01/Mar/2026:12:00:09 +0000] "GET / HTTP/1.1" 200 1` + "\n"
	for name, in := range map[string]io.Reader{"idle": idle, "endless": endless(line)} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		var out, errs bytes.Buffer
		started := time.Now()
		code := run(ctx, []string{"replay", "-"}, in, &out, &errs)
		if code != exitInterrupted || errs.String() != "tierlimit: interrupted\n" || time.Since(started) > 5*time.Second {
			t.Errorf("%s: exit %d after %v: %s", name, code, time.Since(started), errs.String())
		}
	}
}

// endless is a reader of one line again and again.
type endless string

func (e endless) Read(b []byte) (int, error) { return copy(b, e), nil }

// What a Redis says is told apart from one that says nothing.
func TestUnwillingRedis(t *testing.T) {
	srv := redistest.Start(t)
	admin := srv.Client()
	defer admin.Close()
	if err := admin.ConfigSet(t.Context(), "requirepass", "pw").Err(); err != nil {
		t.Fatal(err)
	}
	for url, want := range map[string]string{
		"redis://" + srv.Addr():               "refuses the login: NOAUTH",
		"redis://:hush@" + srv.Addr():         "refuses the login: WRONGPASS",
		"redis://:pw@" + srv.Addr() + "/9999": "answers with an error: ERR DB index",
	} {
		code, out, errs := tool(t, "", "replay", "testdata/access.log", "-redis", url)
		if code != exitUsage || out != "" || !strings.Contains(errs, want) || strings.Contains(errs, "does not answer") || strings.Contains(errs, "hush") {
			t.Errorf("%s: exit %d, stdout %q, stderr %q", want, code, out, errs)
		}
	}
}

// A Redis that answers a PING and would refuse a limiter: it is said why, at once.
func TestUnfitRedis(t *testing.T) {
	srv := redistest.Start(t)
	admin := srv.Client()
	defer admin.Close()
	if err := admin.Do(t.Context(), "ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-set").Err(); err != nil {
		t.Fatal(err)
	}
	replica := redistest.Start(t)
	slave := replica.Client()
	defer slave.Close()
	host, port, _ := strings.Cut(srv.Addr(), ":")
	if err := slave.Do(t.Context(), "REPLICAOF", host, port).Err(); err != nil {
		t.Fatal(err)
	}
	cluster := redistest.StartCluster(t, 0)
	for url, want := range map[string]string{
		"redis://u:p@" + srv.Addr():     "can't run this command",
		"redis://" + replica.Addr():     "READONLY",
		"redis://" + cluster.Addrs()[0]: "one node of a Cluster",
	} {
		started := time.Now()
		code, out, errs := tool(t, "", "replay", "testdata/access.log", "-redis", url)
		if code != exitUsage || out != "" || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 || time.Since(started) > 4*time.Second {
			t.Errorf("%s: exit %d after %v, stdout %q, stderr %q", want, code, time.Since(started), out, errs)
		}
	}
	if code, _, errs := tool(t, "", "replay", "testdata/access.log", "-redis", "redis://"+srv.Addr(), "-rate", "5000"); code != exitOK {
		t.Errorf("one that is fit: exit %d, %s", code, errs)
	}
}

func TestGzip(t *testing.T) {
	const packed = "\x1f\x8b\x08\x00more"
	file := filepath.Join(t.TempDir(), "a.gz")
	if err := os.WriteFile(file, []byte(packed), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, stdin := range map[string]string{file: "", "-": packed} {
		code, out, errs := tool(t, stdin, "replay", name)
		if code != exitUsage || out != "" || !strings.Contains(errs, "zcat") {
			t.Errorf("exit %d, stdout %q, stderr %q", code, out, errs)
		}
	}
}

// A planted admission must turn the verdict and the exit status.
func TestJudgeBites(t *testing.T) {
	limit := tierlimit.FixedWindow(3, time.Minute)
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).UnixNano()
	var history []envelope.Admission
	for i := range int64(3) {
		history = append(history, envelope.Admission{Called: at + i, Returned: at + i, Cost: 1, Key: 7})
	}
	r := &fleet.Result{}
	r.Checks = 9
	var out bytes.Buffer
	if err := judge(t.Context(), newScreen(&out), limit, r, history); err != nil {
		t.Errorf("within the limit: %v", err)
	}
	history = append(history, envelope.Admission{Called: at + 9, Returned: at + 9, Cost: 1, Key: 7})
	if err := judge(t.Context(), newScreen(&out), limit, r, history); !errors.Is(err, errBroken) {
		t.Errorf("one too many: %v", err)
	}
	wants(t, out.String(), "checker: 3 admissions held", "verdict: kept, overshoot 0", "checker: 4 admissions held", "verdict: BROKEN, overshoot 1: 4 admitted")
	fits(t, out.String())
	if err := judge(t.Context(), newScreen(&out), limit, &fleet.Result{}, nil); !errors.Is(err, errNothing) {
		t.Errorf("nothing to judge: %v", err)
	}
	r.Errors = 1
	if err := judge(t.Context(), newScreen(&out), limit, r, history[:3]); err == nil {
		t.Error("checks that failed are no kept promise")
	}
}

// A history seen through a clock that is not Redis's is widened, never narrowed.
func TestSkew(t *testing.T) {
	h := []envelope.Admission{{Called: 100, Returned: 110, Cost: 1}}
	got := skew{-5, 3}.join(skew{-1, 9}).widen(h)
	if want := (envelope.Admission{Called: 95, Returned: 119, Cost: 1}); got[0] != want {
		t.Errorf("got %+v, want %+v", got[0], want)
	}
	if h[0].Called != 100 {
		t.Error("the caller's history was changed")
	}
}

func TestReplay(t *testing.T) {
	code, out, errs := tool(t, "", "replay", "testdata/access.log", "-limit", "5/s", "-rate", "600", "-top", "3")
	if code != exitOK || errs != "" {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
	wants(t, out, "replay of access.log: 600 lines,", "(ip), limit 5/s each", "4 instances, an embedded Redis",
		"the limit counts wall time: the log's 59s in 1s (600 lines a second, in the log's order)",
		"3 malformed lines are left out:", "line 51: no [02/Jan/2006", "line 201: no quoted request", "line 604: no [02/Jan/2006",
		"the log's 59s in 1", "times faster: what is limited is limited at that pace", "sent 600 in", "without asking Redis ", "Redis calls", "203.0.113.9", "2001:db8::7", "verdict: kept, overshoot 0")
	if strings.Index(out, "203.0.113.9") > strings.Index(out, "2001:db8::7") {
		t.Error("the key with most denials is not first")
	}
}

func TestReplaySpeedFromStandardInput(t *testing.T) {
	text, err := os.ReadFile("testdata/access.log")
	if err != nil {
		t.Fatal(err)
	}
	code, out, errs := tool(t, string(text), "replay", "-", "--key", "path", "--limit=30/s sliding-window", "--speed", "40", "--instances", "2")
	if code != exitOK || errs != "" {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
	wants(t, out, "replay of standard input: 600 lines, 6 keys (path)", "2 instances", "the limit counts wall time: the log's 59s in 1.5s (speed 40, sorted by time)",
		"/search", "verdict: kept, overshoot 0")
}

// sums reads the line of a report that must add up.
func sums(t *testing.T, out string) (sent, admitted, denied, unanswered int) {
	t.Helper()
	m := regexp.MustCompile(`sent (\d+) in \S+: admitted (\d+), denied (\d+) \(\S+ %\)(?:, unanswered (\d+))?\n`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no sums in:\n%s", out)
	}
	for i, p := range []*int{&sent, &admitted, &denied, &unanswered} {
		*p, _ = strconv.Atoi(m[i+1])
	}
	if sent != admitted+denied+unanswered || sent == 0 {
		t.Errorf("%s does not add up", m[0])
	}
	return sent, admitted, denied, unanswered
}

// Lines that an interrupted run did not send are nobody's.
func TestReplayInterrupted(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	var b strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&b, "10.0.%d.%d - - [01/Mar/2026:12:00:09 +0000] \"GET / HTTP/1.1\" 200 1\n", i/250, i%250)
	}
	var out, errs bytes.Buffer
	if code := run(ctx, []string{"replay", "-", "-rate", "200"}, strings.NewReader(b.String()), &out, &errs); code != exitInterrupted {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	fits(t, out.String())
	sent, _, _, _ := sums(t, out.String())
	wants(t, out.String(), fmt.Sprintf("interrupted: %d lines were not sent", 2000-sent), "no key was limited", "verdict: kept")
}

// What is denied since Redis died is not laid at the limit's door.
func TestReplayOutage(t *testing.T) {
	srv := redistest.Start(t)
	time.AfterFunc(time.Second, func() { _ = srv.Kill() })
	var b strings.Builder
	for i := range 600 {
		fmt.Fprintf(&b, "10.0.%d.%d - - [01/Mar/2026:12:00:09 +0000] \"GET / HTTP/1.1\" 200 1\n", i/250, i%250)
	}
	code, out, errs := tool(t, b.String(), "replay", "-", "-rate", "200", "-redis", srv.Addr())
	if code != exitOK {
		t.Errorf("exit %d: %s", code, errs)
	}
	_, _, denied, _ := sums(t, out)
	if denied == 0 {
		t.Error("nothing was denied in the outage")
	}
	wants(t, out, fmt.Sprintf("denied %d; denied by the limit: 0", denied), "no key was limited", fmt.Sprintf("%d keys were denied lines only while Redis did not answer", denied))
}

func TestLedger(t *testing.T) {
	book := newLedger(map[string]int64{"a": 4, "b": 9, "c": 2, "never": 3}, 100*time.Millisecond)
	tell := func(key string, n int, res tierlimit.Result, took time.Duration, err error) {
		for range n {
			book.record(fleet.Answer{Check: fleet.Check{Key: key, Cost: 1}, Returned: int64(took), Result: res, Err: err})
		}
	}
	tell("a", 1, tierlimit.Result{Allowed: true, Source: tierlimit.Local}, 0, nil)
	tell("a", 3, tierlimit.Result{Source: tierlimit.Remote}, time.Second, nil)
	tell("b", 2, tierlimit.Result{Source: tierlimit.Local}, 0, nil)
	tell("b", 5, tierlimit.Result{Source: tierlimit.Fallback}, 100*time.Millisecond, nil)
	tell("b", 1, tierlimit.Result{}, time.Second, context.Canceled)
	tell("c", 2, tierlimit.Result{Source: tierlimit.Fallback}, time.Microsecond, nil)
	got := book.census(5)
	want := census{[]limitedKey{{"a", 4, 1, 3, 0}, {"b", 8, 0, 2, 5}}, 2, 1, 5, 7}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if n := book.timedOut.Load(); n != 5 {
		t.Errorf("%d timed out, want 5", n)
	}
	counts := fleet.Counts{Checks: 14, Errors: 1}
	counts.BySource[tierlimit.Remote] = 3
	if n := unasked(counts, 5); n != 5 {
		t.Errorf("%d were decided without asking, want 5", n)
	}
	if top := book.census(1); len(top.most) != 1 || top.limited != 2 {
		t.Errorf("the first of them: %+v", top)
	}
}

// What is known before a run is said before it.
func TestWarnings(t *testing.T) {
	now := time.Date(2026, 3, 2, 22, 0, 0, 0, time.UTC)
	slow, fast := 0.001, 1e6
	log := &parsedLog{checks: make([]fleet.Check, 600)}
	mini, real := &store{embedded: miniredis.NewMiniRedis()}, &store{}
	for _, tc := range []struct {
		name string
		r    replay
		want string
	}{
		{"quick", replay{cmd: &replayCmd{}, log: log, st: mini, rate: 600, takes: time.Second}, ""},
		{"long", replay{cmd: &replayCmd{Speed: &slow}, log: log, st: mini, takes: 59000 * time.Second}, "this takes 16h23m, until Tue 14:23; Ctrl-C ends it with a report of what was sent"},
		{"a minute", replay{cmd: &replayCmd{}, log: log, st: mini, rate: 10, takes: time.Minute}, "this takes 1m0s, until 22:01; Ctrl-C ends it with a report of what was sent"},
		{"too fast", replay{cmd: &replayCmd{Rate: &fast}, log: log, st: real, rate: fast, takes: 600 * time.Microsecond}, "1000000 lines a second may be more than this machine can do; the report says what it came to"},
		{"too fast for it", replay{cmd: &replayCmd{}, log: log, st: mini, rate: 5000, takes: time.Second}, "5000 lines a second may be more than the embedded Redis can do; the report says what it came to"},
		{"at once", replay{cmd: &replayCmd{Speed: &fast}, log: log, st: real}, ""},
	} {
		if got := strings.Join(tc.r.warnings(now), "; "); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// Who is too slow is named.
func TestSlowerThanPlanned(t *testing.T) {
	log := &parsedLog{checks: make([]fleet.Check, 600)}
	for want, st := range map[string]*store{
		"slower than planned: 200 lines/s; the likely cause is the embedded Redis, try -redis URL": {embedded: miniredis.NewMiniRedis()},
		"slower than planned: 200 lines/s; the likely cause is Redis or this machine":              {},
	} {
		var out bytes.Buffer
		r := replay{cmd: &replayCmd{}, log: log, st: st, rate: 600, takes: time.Second, book: newLedger(nil, time.Second)}
		res := &fleet.Result{Latency: new(fleet.Histogram), Ended: int64(3 * time.Second)}
		res.Checks = 600
		r.report(t.Context(), newScreen(&out), res)
		wants(t, out.String(), want+"\n")
		fits(t, out.String())
	}
}

func TestLate(t *testing.T) {
	speed := 2.0
	for _, tc := range []struct {
		checks      int64
		took        time.Duration
		interrupted bool
		speed       *float64
		want        bool
	}{
		{1000, 10 * time.Second, false, nil, false},
		{1000, 12 * time.Second, false, nil, true},
		{500, 5 * time.Second, true, nil, false},
		{200, 5 * time.Second, true, nil, true},
		{200, 5 * time.Second, true, &speed, false},
	} {
		r := replay{cmd: &replayCmd{Speed: tc.speed}, rate: 100, takes: 10 * time.Second}
		res := &fleet.Result{Ended: int64(tc.took)}
		res.Checks = tc.checks
		if got := r.late(res, tc.interrupted); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
}

func TestPace(t *testing.T) {
	for _, tc := range []struct {
		span, took time.Duration
		want       string
	}{
		{83 * time.Hour, 2 * time.Second, "the log's 83h in 2s, 150,000 times faster: what is limited is limited at that pace"},
		{59 * time.Second, time.Second, "the log's 59s in 1s, 59 times faster: what is limited is limited at that pace"},
		{time.Minute, 100 * time.Minute, "the log's 1m0s in 1h40m, 100 times slower: what is limited is limited at that pace"},
		{time.Minute, 59 * time.Second, ""},
		{0, time.Second, ""},
	} {
		if got := pace(tc.span, tc.took); got != tc.want {
			t.Errorf("%v in %v: %q, want %q", tc.span, tc.took, got, tc.want)
		}
	}
}

func TestNumbers(t *testing.T) {
	for f, want := range map[float64]string{10000: "10000", 1e9: "1000000000", 0.001: "0.001", 1000.0 / 3: "333.33", -1: "-1"} {
		if got := number(f); got != want {
			t.Errorf("number(%v) is %s, want %s", f, got, want)
		}
	}
	for f, want := range map[float64]string{1: "1.0", 9.94: "9.9", 59: "59", 149400: "150,000", 1234567: "1,200,000", 999: "1,000"} {
		if got := roughly(f); got != want {
			t.Errorf("roughly(%v) is %s, want %s", f, got, want)
		}
	}
	for d, want := range map[time.Duration]string{83*time.Hour + 20*time.Minute: "83h", 16*time.Hour + 23*time.Minute + 20*time.Second: "16h23m", 24 * time.Hour: "24h", 59 * time.Second: "59s", 1475 * time.Millisecond: "1.5s", 999 * time.Millisecond: "1s", 120 * time.Millisecond: "120ms", 0: "0s"} {
		if got := about(d); got != want {
			t.Errorf("about(%v) is %s, want %s", d, got, want)
		}
	}
}

func TestLineBar(t *testing.T) {
	for columns, want := range map[int]string{
		99: " 50 % [====================                    ] 4800 of 9600 lines, 2400/s",
		59: " 50 % [============            ] 4800 of 9600 lines, 2400/s",
		39: " 50 % [======      ] 4800 of 9600 lines",
		20: " 50 % [======      ]",
	} {
		if got := lineBar(4800, 9600, 2*time.Second, columns); got != want {
			t.Errorf("in %d columns %q, want %q", columns, got, want)
		}
	}
	for _, done := range []int64{0, 1, 9600, 9700} {
		if got := lineBar(done, 9600, time.Microsecond, 99); strings.Contains(got, "/s") || len(got) > 99 {
			t.Errorf("at the start %q", got)
		}
	}
	_ = lineBar(0, 0, 0, 5)
}

// The header's figures are what is set, and the defaults are what the library has.
func TestDemoSettings(t *testing.T) {
	source, err := os.ReadFile("../../options.go")
	if err != nil {
		t.Fatal(err)
	}
	wants(t, string(source), "remoteTimeout: 50 * time.Millisecond", "heartbeat:     time.Second", "leaseTTL:   time.Second", "localShare: 0.1")
	wants(t, demoSettings, fmt.Sprintf("timeout %v (50ms)", demoTimeout), fmt.Sprintf("heartbeat %v (1s)", demoHeartbeat), fmt.Sprintf("lease %v (1s)", demoLease),
		fmt.Sprintf("share %v (0.1)", demoShare), fmt.Sprintf("cool-down %v to %v (500ms)", demoCooldown, demoMaxCooldown))
	fits(t, demoSettings)
	for name, c := range cuts {
		var out bytes.Buffer
		(&demo{s: newScreen(&out)}).say(12*time.Second, "Redis cut: "+c.says)
		if fits(t, out.String()); t.Failed() {
			t.Log(name)
		}
	}
}

// -speed sorts by time and leaves the lines of one second in the log's order.
func TestPaceIsStable(t *testing.T) {
	line := func(host, second string) string {
		return host + " - - [01/Mar/2026:12:00:" + second + ` +0000] "GET / HTTP/1.1" 200 1` + "\n"
	}
	log, err := parseLog(strings.NewReader(line("c", "09")+line("a", "01")+line("d", "09")+line("b", "01")), "ip")
	if err != nil {
		t.Fatal(err)
	}
	if err := log.pace(4); err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, c := range log.checks {
		got += c.Key + c.At.String() + " "
	}
	if want := "a0s b0s c2s d2s "; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestReplayKeys(t *testing.T) {
	line := `h - - [01/Mar/2026:12:00:09 +0000] "GET /p?q HTTP/1.1" 200 1`
	for key, want := range map[string]string{"ip": "h", "path": "/p", "ip+path": "h /p"} {
		log, err := parseLog(strings.NewReader(line), key)
		if err != nil {
			t.Fatal(err)
		}
		if log.checks[0].Key != want || log.keys[want] != 1 {
			t.Errorf("-key %s: %q, want %q", key, log.checks[0].Key, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	if got, want := printable("a\x1b[31mb\u202ec\u009bü"), "a?[31mb?c?ü"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Whatever is wrong with the input: one line that names it, exit status 2, nothing on the standard output.
func TestBadInput(t *testing.T) {
	long := "testdata/access.log"
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"bogus"}, "bogus"},
		{[]string{"demo", "-bogus"}, "unknown flag --bogus"},
		{[]string{"demo", "extra"}, "extra"},
		{[]string{"demo", "-limit", "many"}, "-limit"},
		{[]string{"demo", "-limit", "1/s"}, "20/s to 5000/s"},
		{[]string{"demo", "-limit", "6000/min"}, "period"},
		{[]string{"demo", "-limit", "unlimited"}, "limits nobody"},
		{[]string{"demo", "-duration", "1h"}, "8s to 20s"},
		{[]string{"demo", "-duration", "soon"}, "duration"},
		{[]string{"demo", "-cut", "axe"}, "black-hole"},
		{[]string{"demo", "-redis", "http://x"}, "-redis"},
		{[]string{"demo", "-redis", "127.0.0.1:1"}, "does not answer"},
		{[]string{"demo", "-redis", "redis://:sec%ret@h"}, "-redis"},
		{[]string{"replay"}, "tierlimit replay access.log"},
		{[]string{"replay", "testdata/none.log"}, "no such file"},
		{[]string{"replay", "testdata"}, "tierlimit: testdata: is a directory\n"},
		{[]string{"replay", "main.go"}, "Combined Log Format"},
		{[]string{"replay", os.DevNull}, "empty"},
		{[]string{"replay", "-"}, "empty"},
		{[]string{"replay", long, "-key", "agent"}, "ip+path"},
		{[]string{"replay", long, "-limit", "-1/s"}, "-limit"},
		{[]string{"replay", long, "-rate", "0"}, "-rate"},
		{[]string{"replay", long, "-rate", "NaN"}, "-rate"},
		{[]string{"replay", long, "-rate=-5"}, "-rate"},
		{[]string{"replay", long, "-rate", "1e9"}, "-rate"},
		{[]string{"replay", long, "-rate", "0.001"}, "hours"},
		{[]string{"replay", long, "-speed", "0"}, "-speed"},
		{[]string{"replay", long, "-speed", "Inf"}, "-speed"},
		{[]string{"replay", long, "-speed", "-1"}, "-speed: -1, want a number above 0\n"},
		{[]string{"replay", long, "-speed", "abc"}, "-speed: \"abc\", want a number\n"},
		{[]string{"replay", long, "-speed"}, "-speed needs a value\n"},
		{[]string{"replay", long, "-speed", "-top", "3"}, "-speed needs a value; what follows is --top\n"},
		{[]string{"replay", long, "-rate", "1e9"}, "-rate: 1000000000, want"},
		{[]string{"replay", long, "-top", "1.5"}, "-top: \"1.5\", want a whole number"},
		{[]string{"demo", "-limit", "10000/s"}, "is 10000 a second"},
		{[]string{"bench", "-json=maybe"}, "want true or false"},
		{[]string{"replay", long, "-speed", "0.0001"}, "hours"},
		{[]string{"replay", long, "-rate", "1", "-speed", "1"}, "exclude"},
		{[]string{"replay", long, "-instances", "0"}, "1 to 64"},
		{[]string{"replay", long, "-instances", "99999999999999999999"}, "instances"},
		{[]string{"replay", long, "-top", "-1"}, "top"},
		{[]string{"bench", "extra"}, "extra"},
		{[]string{"bench", "-concurrency", "0"}, "1 to 4096"},
		{[]string{"bench", "-concurrency", "many"}, "concurrency"},
		{[]string{"bench", "-keys", "zipf:0"}, "1 to 1000k"},
		{[]string{"bench", "-keys", "zipf"}, "1 to 1000k"},
		{[]string{"bench", "-keys", "uniform:k"}, "1 to 1000k"},
		{[]string{"bench", "-keys", "uniform:-5"}, "1 to 1000k"},
		{[]string{"bench", "-keys", "uniform:2m"}, "1 to 1000k"},
		{[]string{"bench", "-keys", "zipf:99999999999999999999"}, "1 to 1000k"},
		{[]string{"bench", "-keys", "pareto:10k"}, "zipf:N, uniform:N or hot"},
		{[]string{"bench", "-keys", "hot:3"}, "zipf:N, uniform:N or hot"},
		{[]string{"bench", "-keys", ""}, "zipf:N, uniform:N or hot"},
		{[]string{"bench", "-share", "2"}, "-share"},
		{[]string{"bench", "-share", "0"}, "a run of its own"},
		{[]string{"bench", "-share", "NaN"}, "-share"},
		{[]string{"bench", "-duration", "10ms"}, "300ms to 10m"},
		{[]string{"bench", "-duration", "1h"}, "300ms to 10m"},
		{[]string{"bench", "-instances", "0"}, "1 to 64"},
		{[]string{"bench", "-instances", "3", "-concurrency", "2"}, "nothing to do"},
		{[]string{"bench", "-limit", "unlimited"}, "limits nobody"},
		{[]string{"bench", "-redis", "127.0.0.1:1", "-json"}, "does not answer"},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			code, out, errs := tool(t, "", tc.args...)
			if code != exitUsage || out != "" {
				t.Errorf("exit %d, stdout %q", code, out)
			}
			if strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "tierlimit: ") || !strings.Contains(errs, tc.want) {
				t.Errorf("stderr %q, want one line with %q", errs, tc.want)
			}
			for _, kong := range []string{"(string)", "short flag", "perhaps try", "<EOL>", "e+"} {
				if strings.Contains(errs, kong) {
					t.Errorf("stderr %q: %q says nothing to a user", errs, kong)
				}
			}
			if strings.Contains(errs, "ret@h") {
				t.Error("the password is repeated")
			}
		})
	}
}

func TestHelpTeaches(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want []string
	}{
		{nil, []string{"demo", "replay", "bench", "Exit status"}},
		{[]string{"-h"}, []string{"demo", "replay"}},
		{[]string{"--help"}, []string{"demo", "replay"}},
		{[]string{"demo", "-h"}, []string{"Examples:", "outage share", "--redis", "--cut", "circuit breakers, fleet", "open 3/4", "dips", "has asked", "once a row"}},
		{[]string{"demo", "-help"}, []string{"Examples:"}},
		{[]string{"replay", "-h"}, []string{"Examples:", "--speed", "--key", "wall time"}},
		{[]string{"bench", "-h"}, []string{"Examples:", "--share", "EVALSHA", "closed", "prefix of their own"}},
	} {
		code, out, errs := tool(t, "", tc.args...)
		if code != exitOK || errs != "" {
			t.Errorf("%q: exit %d, stderr %q", tc.args, code, errs)
		}
		wants(t, out, tc.want...)
	}
}
