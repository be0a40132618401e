package tierlimit_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// G1, point 6: a step of a client's clock changes nothing, because nobody reads it. All that is taken of the real-time clock is what it
// showed when a Hybrid was made (wall), for windows where there is no Redis. time.Now carries the monotonic clock along, and
// times are only compared: these are the ways to lose it.
func TestTheWallClockIsReadOnce(t *testing.T) {
	loses := []string{"Unix", "UnixMilli", "UnixMicro", "UnixNano", "UTC", "In", "Round", "Truncate", "AddDate", "Date", "Clock", "Parse", "MarshalText", "AppendFormat"}
	var reads []string
	files := 0
	for _, pattern := range []string{"*.go", "tier/*.go", "tier/*/*.go", "breaker/*.go", "internal/clock/*.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			files++
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok {
					if s, ok := call.Fun.(*ast.SelectorExpr); ok && slices.Contains(loses, s.Sel.Name) {
						reads = append(reads, path+": "+s.Sel.Name)
					}
				}
				return true
			})
		}
	}
	if want := []string{"fallback.go: UnixMicro"}; !slices.Equal(reads, want) {
		t.Errorf("the real-time clock is read by %q, want %q", reads, want)
	}
	if files < 20 {
		t.Errorf("only %d files were looked at", files)
	}
}
