package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The page is written from the results file alone, whose configuration lines may come at the end of the run.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	results := filepath.Join(dir, "results.out")
	if err := os.WriteFile(results, []byte("date: 2026-01-02\nBenchmarkLoop/case=idle-2 100 5 ns/op 0.50 loop-% 0.75 process-%\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := finish(results, 90_000_000_000); err != nil {
		t.Fatal(err)
	}
	if err := write(results, dir); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(dir, pageName))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| took | 1m30s |", "| date | 2026-01-02 |", "| idle | 0.50 | 0.75 |", "0.75 % of a core | met"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page has no %q:\n%s", want, page)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, plotName)); err != nil {
		t.Error(err)
	}
}

// Each step of the quick plan is one of the full plan: what is tried out is what is run.
func TestPlans(t *testing.T) {
	if len(quick.steps) != len(full.steps) {
		t.Fatalf("%d steps in the quick plan, %d in the full one", len(quick.steps), len(full.steps))
	}
	for i, s := range full.steps {
		if q := quick.steps[i]; q.name != s.name || q.bench != s.bench || q.time > s.time || q.count > 2*s.count {
			t.Errorf("step %d: quick %+v, full %+v", i, q, s)
		}
	}
}
