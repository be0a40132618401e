package httplimit

import "strings"

// lastElement takes the last element off the list of a Forwarded header. It reads from the right, so that quotes which a client left open
// on the left cannot swallow what a proxy added.
func lastElement(list string) (element, rest string, more bool) {
	quoted := false
	for i := len(list) - 1; i >= 0; i-- {
		switch list[i] {
		case '"':
			if !escaped(list, i) {
				quoted = !quoted
			}
		case ',':
			if !quoted {
				return list[i+1:], list[:i], true
			}
		}
	}
	return list, "", false
}

// escaped says whether an odd number of backslashes stands before byte i.
func escaped(s string, i int) bool {
	n := 0
	for n < i && s[i-1-n] == '\\' {
		n++
	}
	return n%2 == 1
}

// forNode is the value of the "for" parameter of one element, which has to be well-formed and to have exactly one.
func forNode(element string) (node string, ok bool) {
	for rest := element; ; {
		rest = strings.TrimLeft(rest, " \t")
		if rest == "" {
			return node, ok
		}
		if rest[0] == ';' { // RFC 7239 lets a pair be left out
			rest = rest[1:]
			continue
		}
		name, after, found := strings.Cut(rest, "=")
		if !found || !isToken(name) {
			return "", false
		}
		var value string
		var good bool
		if value, rest, good = pairValue(after); !good {
			return "", false
		}
		if rest = strings.TrimLeft(rest, " \t"); rest != "" && rest[0] != ';' {
			return "", false
		}
		if strings.EqualFold(name, "for") {
			if ok {
				return "", false
			}
			node, ok = value, true
		}
	}
}

// pairValue reads a token or a quoted string and returns what follows it. A token may hold colons and brackets too: many proxies write
// addresses without the quotes that RFC 7239 asks for.
func pairValue(s string) (value, rest string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexAny(s, "; \t")
		if end < 0 {
			end = len(s)
		}
		return s[:end], s[end:], end > 0 && !strings.Contains(s[:end], `"`)
	}
	for i := 1; i < len(s); i++ {
		if s[i] == '"' && !escaped(s, i) {
			return unescape(s[1:i]), s[i+1:], true
		}
	}
	return "", "", false
}

func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
