// Command apilist records the exported API of every public package in api/, one text file for each, so that a change
// of the API shows in review; with -check it compares instead, and fails where they differ. It runs at the root.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const dir = "api"

func main() {
	check := flag.Bool("check", false, "compare with the record instead of writing it")
	flag.Parse()
	if err := run(*check); err != nil {
		fmt.Fprintln(os.Stderr, "apilist:", err)
		os.Exit(1)
	}
}

func run(check bool) error {
	listings, err := list(".")
	if err != nil {
		return err
	}
	recorded, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil {
		return err
	}
	changed := false
	for _, name := range recorded {
		if _, ok := listings[name]; ok {
			continue
		}
		if check {
			fmt.Printf("%s: the package is gone\n", name)
			changed = true
		} else if err := os.Remove(name); err != nil {
			return err
		}
	}
	for name, now := range listings {
		was, err := os.ReadFile(name)
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		if bytes.Equal(was, now) {
			continue
		}
		if !check {
			if err := os.WriteFile(name, now, 0o644); err != nil {
				return err
			}
			continue
		}
		changed = true
		fmt.Printf("%s:\n%s", name, diff(string(was), string(now)))
	}
	if changed {
		return fmt.Errorf("the exported API differs from %s/: if that is meant, run make api, commit it and tell CHANGELOG.md", dir)
	}
	return nil
}

// list maps the file of each public package under root to its listing.
func list(root string) (map[string][]byte, error) {
	listings := map[string][]byte{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		switch name := d.Name(); {
		case path != root && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_")):
			return fs.SkipDir
		case slices.Contains([]string{"internal", "testdata", "cmd", "bench", "examples", "tools", "docs", "bin"}, name):
			return fs.SkipDir
		}
		listing, err := listPackage(path)
		if err != nil || listing == nil {
			return err
		}
		name := "tierlimit"
		if path != root {
			name = strings.ReplaceAll(filepath.ToSlash(path), "/", "-")
		}
		listings[filepath.Join(dir, name+".txt")] = listing
		return nil
	})
	return listings, err
}

// listPackage is the exported declarations of the package in path, sorted, without comments and bodies; nil when there is none.
func listPackage(path string) ([]byte, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var decls []string
	name := ""
	fset := token.NewFileSet()
	for _, e := range entries {
		if e.IsDir() || !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(fset, filepath.Join(path, e.Name()), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		if file.Name.Name == "main" {
			return nil, nil
		}
		name = file.Name.Name
		if !ast.FileExports(file) {
			continue
		}
		for _, d := range file.Decls {
			text, err := declText(fset, d)
			if err != nil {
				return nil, err
			}
			if text != "" {
				decls = append(decls, text)
			}
		}
	}
	if name == "" {
		return nil, nil
	}
	slices.Sort(decls)
	return []byte("package " + name + "\n\n" + strings.Join(slices.Compact(decls), "\n") + "\n"), nil
}

func declText(fset *token.FileSet, d ast.Decl) (string, error) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv != nil && !ast.IsExported(receiver(d.Recv.List[0].Type)) {
			return "", nil
		}
		d.Body = nil
	case *ast.GenDecl:
		if d.Tok == token.IMPORT {
			return "", nil
		}
		if d.Tok == token.VAR {
			// The value of a variable is no part of the API; its type is, where it is written.
			for _, s := range d.Specs {
				if v, ok := s.(*ast.ValueSpec); ok && v.Type != nil {
					v.Values = nil
				}
			}
		}
	}
	var out bytes.Buffer
	if err := (&printer.Config{Mode: printer.UseSpaces, Tabwidth: 4}).Fprint(&out, fset, d); err != nil {
		return "", err
	}
	// The printer keeps the empty lines that comments left behind, and aligns by them.
	var lines []string
	for line := range strings.Lines(out.String()) {
		if line = strings.TrimRight(line, " \n"); line != "" {
			indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
			lines = append(lines, indent+strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(lines, "\n"), nil
}

// receiver is the name of a receiver's type.
func receiver(t ast.Expr) string {
	for {
		switch e := t.(type) {
		case *ast.StarExpr:
			t = e.X
		case *ast.IndexExpr:
			t = e.X
		case *ast.IndexListExpr:
			t = e.X
		case *ast.Ident:
			return e.Name
		default:
			return ""
		}
	}
}

// diff is the lines of one text that the other lacks: enough to see what changed in a sorted listing.
func diff(was, now string) string {
	a, b := strings.Split(was, "\n"), strings.Split(now, "\n")
	var out strings.Builder
	for _, line := range a {
		if !slices.Contains(b, line) {
			out.WriteString("  - " + line + "\n")
		}
	}
	for _, line := range b {
		if !slices.Contains(a, line) {
			out.WriteString("  + " + line + "\n")
		}
	}
	if out.Len() == 0 {
		out.WriteString("  the order of the lines differs\n")
	}
	return out.String()
}
