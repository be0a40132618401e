package accesslog

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
)

// A SyntaxError says why a line is no log line.
type SyntaxError struct {
	Line int // from 1
	Err  error
}

// Error is one line, without the log's own text: it may be personal, and binary.
func (e *SyntaxError) Error() string { return fmt.Sprintf("line %d: %v", e.Line, e.Err) }

// Unwrap returns Err.
func (e *SyntaxError) Unwrap() error { return e.Err }

// maxLine is the longest line that is read; servers cut requests at 8 to 64 kB.
const maxLine = 1 << 20

var errLong = fmt.Errorf("longer than %d bytes", maxLine)

// Read yields the entries of r in their order. For a malformed line it yields a *SyntaxError and goes on; any other error
// is the reader's and the last thing it yields. Blank lines are skipped.
func Read(r io.Reader) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		b := bufio.NewReaderSize(r, maxLine)
		for n := 1; ; n++ {
			line, err := b.ReadSlice('\n')
			long := false
			for errors.Is(err, bufio.ErrBufferFull) {
				long = true
				_, err = b.ReadSlice('\n')
			}
			if err != nil && !errors.Is(err, io.EOF) {
				yield(Entry{}, err)
				return
			}
			line = bytes.TrimRight(line, "\r\n")
			switch {
			case long:
				if !yield(Entry{}, &SyntaxError{n, errLong}) {
					return
				}
			case len(bytes.TrimSpace(line)) > 0:
				e, bad := Parse(string(line))
				if bad != nil {
					bad = &SyntaxError{n, bad}
				}
				if !yield(e, bad) {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
}
