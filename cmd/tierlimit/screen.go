package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// width is the most columns of any line.
const width = 100

// A screen is a stream that may be a terminal: only there is a line drawn over again, and only there is colour. Not for
// concurrent use.
type screen struct {
	w       io.Writer
	live    bool // a terminal
	colour  bool
	columns int
	drawn   bool // a progress line stands at the cursor
}

func newScreen(w io.Writer) *screen {
	s := &screen{w: w, columns: width}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return s
	}
	s.live = true
	s.colour = os.Getenv("NO_COLOR") == ""
	if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 0 {
		s.columns = min(n, width)
	}
	return s
}

// linef prints a line that stays. It is cut at nothing: what is printed must fit by itself.
func (s *screen) linef(format string, args ...any) {
	s.wipe()
	fmt.Fprintf(s.w, format+"\n", args...)
}

// progress draws a line over the one before; elsewhere than on a terminal it does nothing.
func (s *screen) progress(text string) {
	if !s.live {
		return
	}
	// One column less than there are: a full line would wrap, and could not be drawn over.
	fmt.Fprintf(s.w, "\r\x1b[K%s", cut(text, s.columns-1))
	s.drawn = true
}

// wipe removes the progress line.
func (s *screen) wipe() {
	if s.drawn {
		fmt.Fprint(s.w, "\r\x1b[K")
		s.drawn = false
	}
}

const (
	bold   = "1"
	red    = "1;31"
	green  = "1;32"
	yellow = "1;33"
)

// paint colours text where there is colour.
func (s *screen) paint(colour, text string) string {
	if !s.colour {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// cut shortens text to n columns.
func cut(text string, n int) string {
	r := []rune(text)
	if len(r) <= n {
		return text
	}
	if n < 2 {
		return ""
	}
	return string(r[:n-1]) + "…"
}

// printable replaces what would move the cursor or hide: keys come from a log, that is from strangers.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u2028' || r == '\u2029' || r >= '\u202a' && r <= '\u202e' || r >= '\u2066' && r <= '\u2069' {
			return '?'
		}
		return r
	}, text)
}
