// Package accesslog reads web server logs in Common and Combined Log Format, as Apache and nginx write them.
//
//	host ident user [02/Jan/2006:15:04:05 -0700] "METHOD target PROTOCOL" status size ["referer" "agent" ...]
package accesslog

import (
	"errors"
	"strings"
	"time"
)

// An Entry is what one line says of its request.
type Entry struct {
	Host   string    // the client as logged: an address, or a name where the server looks names up
	Time   time.Time // when the request was received: to the second, or finer if the log is
	Method string    // "" if the request line could not be read
	Path   string    // without query and fragment; the whole request line if that could not be read
	Status int       // 100 to 999
}

// The faults of a line, each named after the field that is missing or wrong.
var (
	errHost    = errors.New("no host before the first space")
	errTime    = errors.New("no [02/Jan/2006:15:04:05 -0700]")
	errRequest = errors.New("no quoted request after the time")
	errStatus  = errors.New("no status of three digits after the request")
	errSize    = errors.New("no size after the status")
	errRest    = errors.New("text after the size that is not set off by a space")
)

const layout = "02/Jan/2006:15:04:05 -0700"

// Parse reads one line without its end. Fields after the size are not looked at, so formats that append to Combined
// work too. A request that is not HTTP (a port scan, "-" for a timeout) does not make a line malformed. Pure; the
// Entry shares the line's memory.
func Parse(line string) (Entry, error) {
	var e Entry
	host, rest, ok := strings.Cut(line, " ")
	if !ok || host == "" {
		return Entry{}, errHost
	}
	e.Host = host
	// ident and user are the client's own words and may hold spaces.
	_, rest, ok = strings.Cut(rest, "[")
	if !ok {
		return Entry{}, errTime
	}
	stamp, rest, ok := strings.Cut(rest, "]")
	if !ok {
		return Entry{}, errTime
	}
	var err error
	if e.Time, err = time.Parse(layout, stamp); err != nil || e.Time.Year() < 1 {
		return Entry{}, errTime
	}
	rest, ok = strings.CutPrefix(rest, ` "`)
	if !ok {
		return Entry{}, errRequest
	}
	end := quoteEnd(rest)
	if end < 0 {
		return Entry{}, errRequest
	}
	e.Method, e.Path = request(rest[:end])
	rest, ok = strings.CutPrefix(rest[end+1:], " ")
	if !ok || len(rest) < 3 {
		return Entry{}, errStatus
	}
	for _, c := range []byte(rest[:3]) {
		if c < '0' || c > '9' {
			return Entry{}, errStatus
		}
		e.Status = 10*e.Status + int(c-'0')
	}
	if e.Status < 100 {
		return Entry{}, errStatus
	}
	rest, ok = strings.CutPrefix(rest[3:], " ")
	if !ok {
		return Entry{}, errSize
	}
	size := strings.TrimLeft(rest, "0123456789")
	if len(size) == len(rest) {
		if size, ok = strings.CutPrefix(rest, "-"); !ok {
			return Entry{}, errSize
		}
	}
	if size != "" && size[0] != ' ' {
		return Entry{}, errRest
	}
	return e, nil
}

// quoteEnd is the index of the quote that ends s, -1 if there is none. Servers write a quote inside as \".
func quoteEnd(s string) int {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}

// request takes a request line apart.
func request(line string) (method, path string) {
	method, target, ok := strings.Cut(line, " ")
	if !ok || method == "" {
		return "", line
	}
	target, _, _ = strings.Cut(target, " ")
	if target == "" {
		return "", line
	}
	// A proxy is asked for http://host/path.
	if _, after, found := strings.Cut(target, "://"); found && target[0] != '/' {
		if i := strings.IndexByte(after, '/'); i >= 0 {
			target = after[i:]
		} else {
			target = "/"
		}
	}
	if i := strings.IndexAny(target, "?#"); i > 0 {
		target = target[:i]
	}
	return method, target
}
