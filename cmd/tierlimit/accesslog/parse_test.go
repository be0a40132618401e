package accesslog

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestParse(t *testing.T) {
	at := time.Date(2015, time.May, 17, 10, 5, 3, 0, time.UTC)
	for _, tc := range []struct {
		name, line string
		want       Entry
		err        error
	}{
		{"common", `198.51.100.7 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 2326`,
			Entry{"198.51.100.7", at, "GET", "/a", 200}, nil},
		{"combined", `198.51.100.7 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 2326 "http://x/" "Mozilla/5.0 (\"q\")"`,
			Entry{"198.51.100.7", at, "GET", "/a", 200}, nil},
		{"with fields of one's own behind", `h - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1 "-" "-" 0.003 up`,
			Entry{"h", at, "GET", "/a", 200}, nil},
		{"IPv6, a user, no size", `2001:db8::1 - frank [17/May/2015:12:05:03 +0200] "POST /b HTTP/2.0" 304 -`,
			Entry{"2001:db8::1", at, "POST", "/b", 304}, nil},
		{"a user with spaces", `h - a b c [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 401 12`,
			Entry{"h", at, "GET", "/", 401}, nil},
		{"query and fragment are cut", `h - - [17/May/2015:10:05:03 +0000] "GET /s?q=1#x HTTP/1.1" 200 1`,
			Entry{"h", at, "GET", "/s", 200}, nil},
		{"a quote in the request", `h - - [17/May/2015:10:05:03 +0000] "GET /\"x\" HTTP/1.1" 404 1`,
			Entry{"h", at, "GET", `/\"x\"`, 404}, nil},
		{"absolute target", `h - - [17/May/2015:10:05:03 +0000] "GET http://example.com/p?q HTTP/1.1" 200 1`,
			Entry{"h", at, "GET", "/p", 200}, nil},
		{"absolute target without a path", `h - - [17/May/2015:10:05:03 +0000] "GET http://example.com HTTP/1.1" 200 1`,
			Entry{"h", at, "GET", "/", 200}, nil},
		{"a URL in a path is a path", `h - - [17/May/2015:10:05:03 +0000] "GET /to/http://x/y HTTP/1.1" 200 1`,
			Entry{"h", at, "GET", "/to/http://x/y", 200}, nil},
		{"CONNECT and OPTIONS *", `h - - [17/May/2015:10:05:03 +0000] "OPTIONS * HTTP/1.1" 200 1`,
			Entry{"h", at, "OPTIONS", "*", 200}, nil},
		{"HTTP/0.9", `h - - [17/May/2015:10:05:03 +0000] "GET /old" 200 1`, Entry{"h", at, "GET", "/old", 200}, nil},
		{"a timeout", `h - - [17/May/2015:10:05:03 +0000] "-" 408 -`, Entry{"h", at, "", "-", 408}, nil},
		{"a TLS hello on port 80", `h - - [17/May/2015:10:05:03 +0000] "\x16\x03\x01" 400 226`, Entry{"h", at, "", `\x16\x03\x01`, 400}, nil},
		{"an empty request", `h - - [17/May/2015:10:05:03 +0000] "" 400 0`, Entry{"h", at, "", "", 400}, nil},

		{"empty", ``, Entry{}, errHost},
		{"one word", `hello`, Entry{}, errHost},
		{"a leading space", ` h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1`, Entry{}, errHost},
		{"no time", `h - - "GET / HTTP/1.1" 200 1`, Entry{}, errTime},
		{"an open time", `h - - [17/May/2015:10:05:03 +0000 "GET / HTTP/1.1" 200 1`, Entry{}, errTime},
		{"no such day", `h - - [31/Feb/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1`, Entry{}, errTime},
		{"another format's time", `h - - [2015-05-17T10:05:03Z] "GET / HTTP/1.1" 200 1`, Entry{}, errTime},
		{"no request", `h - - [17/May/2015:10:05:03 +0000]`, Entry{}, errRequest},
		{"cut in the request", `h - - [17/May/2015:10:05:03 +0000] "GET /abc`, Entry{}, errRequest},
		{"an escaped last quote", `h - - [17/May/2015:10:05:03 +0000] "GET /\" 200 1`, Entry{}, errRequest},
		{"cut after the request", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1"`, Entry{}, errStatus},
		{"status in words", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" abc 1`, Entry{}, errStatus},
		{"status too low", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 007 1`, Entry{}, errStatus},
		{"status too long", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 2000 1`, Entry{}, errSize},
		{"no size", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200`, Entry{}, errSize},
		{"size in words", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 x`, Entry{}, errSize},
		{"negative size", `h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 -5`, Entry{}, errRest},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Parse(tc.line)
			if !errors.Is(err, tc.err) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			if !got.Time.Equal(tc.want.Time) {
				t.Errorf("time %v, want %v", got.Time, tc.want.Time)
			}
			got.Time = tc.want.Time
			if got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

const good = `198.51.100.7 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 2326`

func TestRead(t *testing.T) {
	text := good + "\r\n\n  \nnonsense\n" + good + strings.Repeat("x", 3*maxLine) + "\n" + good
	var entries int
	var bad []string
	for _, err := range Read(iotest.HalfReader(strings.NewReader(text))) {
		if err != nil {
			bad = append(bad, err.Error())
			continue
		}
		entries++
	}
	if entries != 2 {
		t.Errorf("%d entries, want 2: a long line and an unended last line must not hide others", entries)
	}
	want := []string{"line 4: " + errHost.Error(), "line 5: " + errLong.Error()}
	if strings.Join(bad, "; ") != strings.Join(want, "; ") {
		t.Errorf("malformed %q, want %q", bad, want)
	}
	for range Read(strings.NewReader(text)) {
		break // stops where the caller stops
	}
}

func TestReadReportsTheReadersError(t *testing.T) {
	var last error
	n := 0
	for _, err := range Read(io.MultiReader(strings.NewReader(good+"\n"), iotest.ErrReader(io.ErrClosedPipe))) {
		n++
		last = err
	}
	if n != 2 || !errors.Is(last, io.ErrClosedPipe) {
		t.Errorf("%d steps, error %v", n, last)
	}
}

// Whatever a line holds: no panic, and what is accepted can be read again from the parts.
func FuzzParse(f *testing.F) {
	f.Add(good)
	f.Add(good + ` "-" "curl/8"`)
	f.Add(`h - - [17/May/2015:10:05:03.25 +0000] "GET / HTTP/1.1" 200 -`)
	f.Add(`::1 - a [b [17/May/2015:10:05:03 +0000] "\"" 200 -`)
	f.Fuzz(func(t *testing.T, line string) {
		e, err := Parse(line)
		if err != nil {
			if e != (Entry{}) {
				t.Errorf("an error and the entry %+v", e)
			}
			return
		}
		if e.Host == "" || strings.Contains(e.Host, " ") || !strings.HasPrefix(line, e.Host+" ") {
			t.Errorf("host %q of %q", e.Host, line)
		}
		if e.Status < 100 || e.Status > 999 {
			t.Errorf("status %d of %q", e.Status, line)
		}
		if !strings.Contains(line, e.Path) && e.Path != "/" {
			t.Errorf("path %q of %q", e.Path, line)
		}
		if e.Method != "" && (e.Path == "" || strings.ContainsAny(e.Method, " ")) {
			t.Errorf("method %q path %q of %q", e.Method, e.Path, line)
		}
		again := e.Host + " - - [" + e.Time.Format("02/Jan/2006:15:04:05.999999999 -0700") + `] "` + "GET /" + `" 200 -`
		if b, err := Parse(again); err != nil || b.Host != e.Host || !b.Time.Equal(e.Time) {
			t.Errorf("%q is read back as %+v, %v", again, b, err)
		}
	})
}

// Reading a file and reading its lines one by one say the same.
func FuzzRead(f *testing.F) {
	f.Add([]byte(good + "\n\r\nx\n" + good))
	f.Fuzz(func(t *testing.T, text []byte) {
		var want, got []string
		for line := range bytes.SplitSeq(text, []byte("\n")) {
			line = bytes.TrimRight(line, "\r")
			if len(bytes.TrimSpace(line)) == 0 {
				continue
			}
			e, err := Parse(string(line))
			want = append(want, e.Host+e.Path)
			if err != nil {
				want[len(want)-1] = "bad"
			}
		}
		for e, err := range Read(bytes.NewReader(text)) {
			var syntax *SyntaxError
			switch {
			case errors.As(err, &syntax):
				got = append(got, "bad")
			case err != nil:
				t.Fatal(err)
			default:
				got = append(got, e.Host+e.Path)
			}
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}
