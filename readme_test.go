package tierlimit_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The Go block of the README is a program that builds, and the commands it names are there.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	if len(blocks) != 1 {
		t.Fatalf("%d Go blocks, want 1", len(blocks))
	}
	vet(t, blocks[0][1])
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range regexp.MustCompile(`make ([a-z-]+)`).FindAllStringSubmatch(string(text), -1) {
		if !strings.Contains(string(makefile), "\n"+target[1]+":") {
			t.Errorf("there is no target %s", target[0])
		}
	}
}

// The options that docs/operations.md advises are there. Its Go blocks are expressions.
func TestOperationsCompiles(t *testing.T) {
	text, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	if len(blocks) == 0 {
		t.Fatal("no Go block")
	}
	for _, b := range blocks {
		vet(t, `package main

import (
	"time"

	"github.com/redis/go-redis/v9"
)

var addr = "localhost:6379"

func main() {
	_ = `+strings.TrimSpace(b[1])+`
	_ = time.Second
}
`)
	}
}

func vet(t *testing.T, program string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "vet", file).CombinedOutput(); err != nil {
		t.Errorf("a Go block does not build: %v\n%s", err, out)
	}
}
