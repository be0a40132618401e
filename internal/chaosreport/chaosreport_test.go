package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/chaos"
)

// some are rows of two faults.
func some() []chaos.Row {
	row := chaos.Row{
		Backend: "process", Topology: "single", Fault: "kill", Algorithm: "sliding-log", Limit: 200, Period: 500 * time.Millisecond, Keys: 1,
		Before: 0.99, During: 0.97, After: 1, Notice: 20 * time.Millisecond, Recovery: 400 * time.Millisecond, P999: 5 * time.Microsecond, Slowest: 101 * time.Millisecond,
		Goroutines: 2, Series: make([]int64, 120), SeriesStep: 100 * time.Millisecond, FaultFrom: 3 * time.Second, FaultTo: 7 * time.Second,
		When: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
	for i := range row.Series {
		row.Series[i] = 40
	}
	worse, stalled, alone, crash := row, row, row, row
	worse.Algorithm, worse.Before, worse.Recovery, worse.HeapBytes = "token-bucket", 0.93, 1500*time.Millisecond, 50<<10
	stalled.Algorithm, stalled.Before, stalled.Recovery, stalled.NotJudged = "fixed-window", 0.2, -1, "the generator was late"
	alone.Backend = "container"
	crash.Topology, crash.Fault, crash.Keys = "cluster", "master-crashed", 3
	crash.SparedKeys, crash.SparedSeries, crash.Spared = 2, row.Series, 0.98
	crash.Overshoot, crash.Allowed = 5, 7
	return []chaos.Row{crash, row, worse, stalled, alone}
}

// page is docs/chaos.md as written for rows.
func page(t *testing.T, rows []chaos.Row, soak *chaos.SoakResult) (docs, text string) {
	t.Helper()
	dir := t.TempDir()
	docs = filepath.Join(dir, "docs")
	if err := os.Mkdir(docs, 0o755); err != nil {
		t.Fatal(err)
	}
	real, err := os.ReadFile("../../docs/chaos.md")
	if err != nil {
		t.Fatal(err)
	}
	var lines bytes.Buffer
	for _, r := range rows {
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(append(b, '\n'))
	}
	soaked, err := json.Marshal(soak)
	if err != nil {
		t.Fatal(err)
	}
	rowsFile, soakFile := "", ""
	write := func(name string, content []byte) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	write("docs/chaos.md", real)
	if rows != nil {
		rowsFile = write("rows", lines.Bytes())
	}
	if soak != nil {
		soakFile = write("soak", soaked)
	}
	if err := run(rowsFile, soakFile, docs, "make this"); err != nil {
		t.Fatal(err)
	}
	written, err := os.ReadFile(filepath.Join(docs, pageName))
	if err != nil {
		t.Fatal(err)
	}
	return docs, string(written)
}

func TestPage(t *testing.T) {
	docs, text := page(t, some(), nil)
	for _, want := range []string{
		"5 runs of 2 faults: none of them admitted more than is allowed, no check returned an error.",
		"The machine held the load up in 1 run, ",
		"| `kill` | 3 + 1 | 0 | 0 | 93 % | 97 % | 100 % | 20 ms | 1.5 s | 5.0 µs | 101 ms | +2 | +50 kB | 0 | 1 |",
		"| `master-crashed` | 1 | 5 | 7 |",
		"| `master-crashed` | 0 | 98 % |",
		"| date | 2026-01-02, 03:04 to ",
		"| command | `make this` |",
		"## The faults", // what is written by hand stays
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if a, b := strings.Index(text, "### One server"), strings.Index(text, "### Redis Cluster"); a < 0 || b < a {
		t.Errorf("One server at %d, Redis Cluster at %d", a, b)
	}
	wellFormed(t, filepath.Join(docs, plotsDir, overviewPlot))
	if t.Failed() {
		t.Log(text)
	}
}

// A load that does not ask for 90 % of the limit can be back, and never shows it.
func TestALooseFaultHasNoReturn(t *testing.T) {
	rows := some()
	rows[0].Recovery = -1
	loose := rows[1]
	loose.Fault, loose.Loose, loose.Recovery = "kill-pulsing-load", true, -1
	_, text := page(t, append(rows, loose), nil)
	for _, want := range []string{
		"| `kill-pulsing-load` | 1 | 0 | 0 | 99 % | 97 % | 100 % | 20 ms | – | 5.0 µs |",
		"| 20 ms | **never** | 5.0 µs |", // what is to come back and did not
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, text)
		}
	}
}

// What is broken stands out, and cannot be covered by runs that were not.
func TestPageTellsWhatIsBroken(t *testing.T) {
	rows := some()
	bad := rows[1]
	bad.Overshoot, bad.Errors, bad.Seed, bad.Findings = 3, 2, 99, []string{"overshoot 3, allowed 0", "2 checks returned an error"}
	_, text := page(t, append(rows, bad), nil)
	for _, want := range []string{
		"6 runs of 2 faults: 1 of them admitted more than is allowed, 2 checks returned an error.",
		"- single/kill/sliding-log (process, seed 99): overshoot 3, allowed 0; 2 checks returned an error",
		"| `kill` | 4 + 1 | **3** | 0 |",
		"| **2** | 1 |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, text)
		}
	}
}

func TestSoakPart(t *testing.T) {
	soak := &chaos.SoakResult{
		When: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Asked: time.Minute, Lasted: 61 * time.Second, Rounds: 12, Judged: 11, Instances: 4, Limits: []string{"1/s"},
		Faults: map[string]int{"kill": 3}, Recovery: []time.Duration{time.Second, time.Millisecond}, Losses: 2, LossOvershoot: 5, LossAllowed: 9,
		Samples: []chaos.Sample{{At: time.Second, Heap: 3 << 20, Keys: 4}, {At: 2 * time.Second, Heap: 3 << 20, Keys: 4}, {At: 3 * time.Second, Heap: 3 << 20, Keys: 4}},
		Heap:    chaos.Trend{Samples: 3, First: 3 << 20, Last: 3 << 20},
	}
	docs, text := page(t, nil, soak)
	for _, want := range []string{
		"**1m1s, 12 rounds: nothing that is promised was broken.**",
		"median 1 ms, p99 1 ms, worst 1.0 s",
		"| overshoot of the worst of 2 losses | 5, allowed 9 |",
		"| heap, MB | from 3.0 to 3.0 (a line through 3 samples) |",
		"`kill` 3",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in:\n%s", want, text)
		}
	}
	wellFormed(t, filepath.Join(docs, plotsDir, soakPlot))
	soak.Findings = []string{"round 7: overshoot"}
	if _, text = page(t, nil, soak); !strings.Contains(text, "1 finding.**\n\n- round 7: overshoot") {
		t.Errorf("the finding is not told:\n%s", text)
	}
}

// A page without marks is not overwritten.
func TestReplaceNeedsMarks(t *testing.T) {
	if _, err := replace([]byte("# Chaos\n"), "faults", nil); err == nil {
		t.Error("no error")
	}
}

func wellFormed(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := xml.NewDecoder(f); ; {
		switch _, err := d.Token(); {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			t.Fatalf("%s: %v", path, err)
		}
	}
}
