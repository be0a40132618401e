package tierlimit_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
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
