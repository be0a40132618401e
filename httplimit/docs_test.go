package httplimit_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The Go code of docs/http.md is part of the examples, which run.
func TestDocsShowExamples(t *testing.T) {
	doc, err := os.ReadFile("../docs/http.md")
	if err != nil {
		t.Fatal(err)
	}
	examples, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	flat := func(code string) string {
		var lines []string
		for line := range strings.Lines(code) {
			lines = append(lines, strings.TrimSpace(line))
		}
		return strings.TrimSpace(strings.Join(lines, "\n"))
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(doc), -1)
	if len(blocks) < 3 {
		t.Fatalf("%d Go blocks were found", len(blocks))
	}
	run := flat(string(examples))
	for _, b := range blocks {
		if !strings.Contains(run, flat(b[1])) {
			t.Errorf("no example has\n%s", b[1])
		}
	}
}
