package grpclimit_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The Go blocks of docs/grpc.md stand in the examples, which run.
func TestDocsAreExamples(t *testing.T) {
	doc, err := os.ReadFile("../docs/grpc.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	flat := func(s string) string {
		var out strings.Builder
		for line := range strings.Lines(s) {
			out.WriteString(strings.TrimSpace(line) + "\n")
		}
		return out.String()
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(doc), -1)
	if len(blocks) < 5 {
		t.Errorf("%d Go blocks were found", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(flat(string(source)), flat(b[1])) {
			t.Errorf("no example has this:\n%s", b[1])
		}
	}
}
