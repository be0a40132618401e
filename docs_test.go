package tierlimit_test

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Docs name tests as the evidence for what they say: each must exist.
func TestDocsNameRealTests(t *testing.T) {
	named := regexp.MustCompile(`\b(Test|Fuzz|Benchmark|Example)[A-Z_]\w+`)
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark|Example)\w*)\(`)
	have := map[string]bool{}
	var docs []string
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != ".":
			return filepath.SkipDir
		case strings.HasSuffix(path, ".md"):
			docs = append(docs, path)
		case strings.HasSuffix(path, "_test.go"):
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range declared.FindAllSubmatch(text, -1) {
				have[string(m[1])] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(docs) == 0 || len(have) == 0 {
		t.Fatalf("found %d documents and %d tests", len(docs), len(have))
	}
	for _, path := range docs {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range named.FindAllString(string(text), -1) {
			if !have[name] {
				t.Errorf("%s names %s, which does not exist", path, name)
			}
		}
	}
}

// Links between documents lead somewhere, to a heading too where they name one.
func TestDocsLink(t *testing.T) {
	anchor := func(heading string) string {
		heading = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(strings.TrimSpace(strings.TrimLeft(heading, "# "))), "")
		return strings.ReplaceAll(heading, " ", "-")
	}
	followed := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != "." {
			return cmp.Or(err, filepath.SkipDir)
		}
		if !strings.HasSuffix(path, ".md") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			followed++
			file, fragment, _ := strings.Cut(m[1], "#")
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: a link leads nowhere: %s", path, m[1])
				continue
			}
			if fragment == "" {
				continue
			}
			body, err := os.ReadFile(target)
			if err != nil {
				return err
			}
			headings := regexp.MustCompile(`(?m)^#+ .*$`).FindAllString(string(body), -1)
			if !slices.ContainsFunc(headings, func(h string) bool { return anchor(h) == fragment }) {
				t.Errorf("%s: there is no heading %s", path, m[1])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if followed < 50 {
		t.Errorf("%d links were followed", followed)
	}
}

// The table of docs/algorithms.md is what Example_algorithms prints.
func TestDocsShowTheAlgorithms(t *testing.T) {
	doc, err := os.ReadFile("docs/algorithms.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("algorithms_example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, output, ok := strings.Cut(string(source), "// Output:\n")
	if !ok {
		t.Fatal("the example has no output")
	}
	rows := 0
	for line := range strings.Lines(output) {
		row, ok := strings.CutPrefix(strings.TrimSpace(line), "// ")
		if !ok {
			break
		}
		rows++
		if !strings.Contains(string(doc), row+"\n") {
			t.Errorf("docs/algorithms.md lacks the row %q", row)
		}
	}
	if rows < 8 {
		t.Errorf("the example prints %d rows, want a table", rows)
	}
}

// Under the race detector the jury judges nothing: each test that has one is among those that .ci/run runs without it. The chaos suite's
// own jury sits with make chaos-report and with make test: it needs a machine to itself.
func TestWhatIsJudgedRunsWithoutTheRaceDetector(t *testing.T) {
	script, err := os.ReadFile(".ci/run")
	if err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile(`(?m)^go test -count=1 .*-run '([^']+)' \.$`).FindAllSubmatch(script, -1)
	if len(lines) != 1 {
		t.Fatalf("%d lines of .ci/run run tests of the root package without the race detector, want 1", len(lines))
	}
	run := regexp.MustCompile(string(lines[0][1]))
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	judged := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for decl := range strings.SplitSeq(string(text), "\nfunc ") {
			name, _, _ := strings.Cut(decl, "(")
			if !strings.HasPrefix(name, "Test") || !strings.Contains(decl, "newJury(t)") || file == "docs_test.go" {
				continue
			}
			if judged++; !run.MatchString(name) {
				t.Errorf("%s is judged nowhere: .ci/run does not name it", name)
			}
		}
	}
	if judged < 15 {
		t.Errorf("%d tests with a jury were found", judged)
	}
}
