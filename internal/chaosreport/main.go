// Command chaosreport writes docs/chaos.md and its plots from what the chaos suite and the soak left behind. It is run from the root of the
// repository, by "make chaos-report" and "make soak".
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/tierlimit/tierlimit/internal/chaos"
)

func main() {
	rows := flag.String("rows", "", "file that TIERLIMIT_CHAOS_ROWS named: writes the part on faults")
	soak := flag.String("soak", "", "file that TIERLIMIT_SOAK_RESULT named: writes the part on the soak")
	docs := flag.String("docs", "docs", "directory of the page")
	command := flag.String("command", "", "the command that ran it")
	flag.Parse()
	if err := run(*rows, *soak, *docs, *command); err != nil {
		fmt.Fprintln(os.Stderr, "chaosreport:", err)
		os.Exit(1)
	}
}

const (
	pageName = "chaos.md"
	plotsDir = "chaos"
)

// run replaces the parts for which there are results.
func run(rowsFile, soakFile, docs, command string) error {
	path := filepath.Join(docs, pageName)
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	plots := map[string][]byte{}
	if rowsFile != "" {
		rows, err := read(rowsFile)
		if err != nil {
			return err
		}
		drawn, err := drawFaults(rows)
		if err != nil {
			return err
		}
		if text, err = replace(text, "faults", faultsPart(rows, drawn, thisMachine(), command)); err != nil {
			return err
		}
		for _, p := range drawn {
			plots[p.file] = p.svg
		}
	}
	if soakFile != "" {
		var r chaos.SoakResult
		b, err := os.ReadFile(soakFile)
		if err == nil {
			err = json.Unmarshal(b, &r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", soakFile, err)
		}
		if plots[soakPlot], err = drawSoak(&r); err != nil {
			return err
		}
		if text, err = replace(text, "soak", soakPart(&r, thisMachine(), command)); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(docs, plotsDir), 0o755); err != nil {
		return err
	}
	for name, svg := range plots {
		if err := os.WriteFile(filepath.Join(docs, plotsDir, name), svg, 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(path, text, 0o644)
}

// read reads rows, one a line.
func read(path string) ([]chaos.Row, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var rows []chaos.Row
	for d := json.NewDecoder(f); ; {
		var r chaos.Row
		switch err := d.Decode(&r); {
		case errors.Is(err, io.EOF) && len(rows) > 0:
			return rows, nil
		case err != nil:
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		rows = append(rows, r)
	}
}

// replace puts what was written in place of what is between the marks of a part.
func replace(page []byte, part string, written []byte) ([]byte, error) {
	begin, end := fmt.Appendf(nil, "<!-- %s: written by chaosreport, do not edit -->\n", part), fmt.Appendf(nil, "<!-- end of %s -->\n", part)
	before, rest, ok := bytes.Cut(page, begin)
	_, after, ok2 := bytes.Cut(rest, end)
	if !ok || !ok2 {
		return nil, fmt.Errorf("%s: the marks %q and %q are missing", pageName, bytes.TrimSpace(begin), bytes.TrimSpace(end))
	}
	return slices.Concat(before, begin, written, end, after), nil
}
