package lua_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

// A file is one .lua file, header and body apart.
type file struct{ name, header, body string }

func files(t *testing.T) []file {
	t.Helper()
	names, err := filepath.Glob("*.lua")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	var all []file
	for _, n := range names {
		text, err := os.ReadFile(n)
		if err != nil {
			t.Fatal(err)
		}
		header, body, ok := strings.Cut(string(text), "--]]\n")
		if !ok || !strings.HasPrefix(header, "--[[\n"+n+": ") {
			t.Errorf("%s does not begin with a header of its name", n)
		}
		all = append(all, file{n, header, body})
	}
	return all
}

func find(t *testing.T, name string) file {
	t.Helper()
	for _, f := range files(t) {
		if f.name == name {
			return f
		}
	}
	t.Fatal(name)
	return file{}
}

// numbered returns the numbers that introduce an argument in a header: "  7 version    grant number known".
func numbered(header string) []int {
	var all []int
	for line := range strings.Lines(header) {
		for _, m := range regexp.MustCompile(`(?:^ARGV|^ {1,2}|\s{4,}) *(\d+) [a-z_]+ {2,}`).FindAllStringSubmatch(line, -1) {
			n, _ := strconv.Atoi(m[1])
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}

func upTo(n int) (all []int) {
	for i := range n {
		all = append(all, i+1)
	}
	return all
}

// listed counts the names between two phrases of a header.
func listed(t *testing.T, header, from, to string) int {
	t.Helper()
	_, rest, ok := strings.Cut(strings.Join(strings.Fields(header), " "), from)
	list, _, ok2 := strings.Cut(rest, to)
	if !ok || !ok2 {
		t.Fatalf("no %q ... %q in the header", from, to)
	}
	// Commas inside brackets are part of an explanation.
	return len(strings.Split(regexp.MustCompile(`\([^)]*\)`).ReplaceAllString(list, ""), ","))
}

// fields is how many numbers a format of struct has that a file calls name, and how many bytes they take.
func fields(t *testing.T, f file, name string) (n, bytes int) {
	t.Helper()
	m := regexp.MustCompile(`local (?:\w+, )*` + name + `(?:, \w+)* = (.*'<[I\d]+'.*)\n|local ` + name + ` = '(<[I\d]+)'`).FindStringSubmatch(f.body)
	if m == nil {
		t.Fatalf("%s: no format %s", f.name, name)
	}
	for _, width := range regexp.MustCompile(`I(\d)`).FindAllStringSubmatch(m[1]+m[2], -1) {
		w, _ := strconv.Atoi(width[1])
		n, bytes = n+1, bytes+w
	}
	return n, bytes
}

// called returns what a header calls the numbers of a part of a message, from 1. A header has two columns, of which each names its part
// once: "  policy   1 rate   ...   report   1 own  ...".
func called(header, part string) map[int]string {
	names := map[int]string{}
	_, header, _ = strings.Cut(header, "ARGV")
	header, _, _ = strings.Cut(header, "Reply")
	in := [2]string{} // the part that each column is at
	for line := range strings.Lines(header) {
		for _, m := range regexp.MustCompile(`(?:(policy|ask|report) +|\s{2,})(\d) ([a-z_]+)`).FindAllStringSubmatchIndex(line, -1) {
			column := 0
			if m[4] > 40 {
				column = 1
			}
			if m[2] >= 0 {
				in[column] = line[m[2]:m[3]]
			}
			if n, _ := strconv.Atoi(line[m[4]:m[5]]); in[column] == part {
				names[n] = line[m[6]:m[7]]
			}
		}
	}
	return names
}

func TestHeadersBodiesAndGoAgree(t *testing.T) {
	prelude := find(t, "prelude.lua")
	if got := numbered(prelude.header); !slices.Equal(got, upTo(lua.HeaderNumbers)) {
		t.Errorf("prelude.lua describes the arguments %v", got)
	}
	for format, want := range map[string][2]int{
		"HEADER": {lua.HeaderNumbers, 64}, "POLICY": {lua.PolicyNumbers, 35}, "ASK": {lua.AskNumbers, 32}, "REPORT": {lua.ReportNumbers, 45},
		"PAIR": {lua.PairNumbers, 14}, "REPLY_HEADER": {lua.HeaderReply, 8}, "REPLY": {lua.ShortReply, 64}, "REPLY_WHOLE": {lua.KeyReply, 99},
	} {
		if n, bytes := fields(t, prelude, format); n != want[0] || bytes != want[1] {
			t.Errorf("%s has %d numbers in %d bytes, want %d", format, n, bytes, want)
		}
	}
	if want := "local HEADER_BYTES, POLICY_BYTES, ASK_BYTES, REPORT_BYTES, PAIR_BYTES = 64, 35, 32, 45, 14\n"; !strings.Contains(prelude.body, want) {
		t.Errorf("prelude.lua does not say %s", want)
	}
	if want := fmt.Sprintf("a header of %d numbers; policies of %d", lua.HeaderNumbers, lua.PolicyNumbers); !strings.Contains(prelude.header, want) {
		t.Errorf("prelude.lua's header does not say: %s", want)
	}
	for _, want := range []string{fmt.Sprintf("ask of %d, a report of %d", lua.AskNumbers, lua.ReportNumbers), fmt.Sprintf("pairs of %d:", lua.PairNumbers), fmt.Sprintf("then %d per key", lua.KeyReply)} {
		if !strings.Contains(strings.Join(strings.Fields(prelude.header), " "), want) {
			t.Errorf("prelude.lua's header does not say: %s", want)
		}
	}
	arguments := fmt.Sprintf("a header; policies: %d numbers; for each key an ask: %d, a report: %d if", lua.PolicyNumbers, lua.AskNumbers, lua.ReportNumbers)
	token := find(t, "token_bucket.lua")
	parts := map[string]int{"policy": lua.PolicyNumbers, "ask": lua.AskNumbers, "report": lua.ReportNumbers}
	for part, want := range parts {
		if names := called(token.header, part); len(names) != want || names[want] == "" {
			t.Errorf("token_bucket.lua describes a %s as %v", part, names)
		}
	}
	if n := listed(t, token.header, fmt.Sprintf("now, late, then per key %d numbers: ", lua.KeyReply), " Clock"); n != lua.KeyReply {
		t.Errorf("token_bucket.lua lists %d of %d integers per key", n, lua.KeyReply)
	}
	read := map[string]int{}
	for _, f := range files(t) {
		if stored := regexp.MustCompile(`(\w+), (\w+)_BYTES = (\d+), (\d+)\n`).FindStringSubmatch(f.body); stored != nil {
			n, bytes := fields(t, f, stored[2]+"_STATE")
			sevens := bytes / lua.NumberBytes
			if !strings.Contains(f.header, fmt.Sprintf("%d numbers of %d bytes", sevens, lua.NumberBytes)) || n-sevens > 1 || strconv.Itoa(bytes) != stored[4] {
				t.Errorf("%s: a state of %d numbers, %d bytes", f.name, n, bytes)
			}
		}
		// The body calls each number as the header does.
		for part, pattern := range map[string]string{
			"policy": `\n +([a-z_, ]+) = read\(POLICY`, "ask": `local ([a-z_, ]+) = read\(ASK, data`, "report": `\n +([a-z_, ]+) = read\(REPORT`,
		} {
			got := regexp.MustCompile(pattern).FindStringSubmatch(f.body)
			if got == nil {
				continue
			}
			theirs, mine := called(token.header, part), called(f.header, part)
			for i, name := range strings.Split(got[1], ", ") {
				want := theirs[i+1]
				if mine[i+1] != "" {
					want = mine[i+1]
				}
				if name != "_" && name != want && (name != "pairs_at" || i != parts[part]) {
					t.Errorf("%s: number %d of a %s is %s in the body, %s in the header", f.name, i+1, part, name, want)
				}
			}
			read[f.name]++
		}
		switch f.name {
		case "prelude.lua", "membership.lua", "bucket.lua", "counts.lua", "each.lua":
			continue
		}
		for _, want := range []string{"KEYS[i]", arguments, fmt.Sprintf("now, late, then per key %d numbers", lua.KeyReply), "Clock", "Cost", "TTL", "Delivery"} {
			if !strings.Contains(f.header, want) {
				t.Errorf("%s: no %q in the header", f.name, want)
			}
		}
	}
	if want := map[string]int{"each.lua": 3}; !maps.Equal(read, want) {
		t.Errorf("the numbers of messages that were found read: %v", read)
	}
	// A window calls its third number limit, and each script has each part once.
	parts = map[string]int{}
	for _, m := range regexp.MustCompile(`\n--= (\w+): `).FindAllStringSubmatch(find(t, "each.lua").body, -1) {
		parts[m[1]] = 0
	}
	for alg := tier.Algorithm(1); int(alg) <= tier.Algorithms; alg++ {
		if strings.Contains(lua.Source(alg), "--+ ") || strings.Contains(lua.Source(alg), "--= ") {
			t.Errorf("the script of algorithm %d is not put together", alg)
		}
	}
	for _, name := range []string{"bucket.lua", "fixed_window.lua", "sliding_window.lua", "sliding_log.lua"} {
		body := find(t, name).body
		if strings.Contains(body, "local limit = capacity\n") != (name != "bucket.lua") {
			t.Errorf("%s: its limit", name)
		}
		for _, m := range regexp.MustCompile(`--\+ (\w+)\n`).FindAllStringSubmatch(body, -1) {
			if _, ok := parts[m[1]]; !ok || strings.Count(body, m[0]) != 1 {
				t.Errorf("%s: part %s", name, m[1])
			}
			parts[m[1]]++
		}
	}
	for name, n := range parts {
		if want := 4; n != want && (name != "aside" || n != 3) {
			t.Errorf("each.lua: %s is used %d times", name, n)
		}
	}
	if n, bytes := fields(t, find(t, "bucket.lua"), "BUCKET_WHOLE"); n != 13+6 || !strings.Contains(find(t, "bucket.lua").body, fmt.Sprintf("WHOLE_BYTES = %d\n", bytes)) {
		t.Errorf("bucket.lua: a whole state of %d numbers, %d bytes", n, bytes)
	}
	member := find(t, "membership.lua")
	if got := numbered(member.header); !slices.Equal(got, upTo(lua.MembershipArgs)) {
		t.Errorf("membership.lua describes the arguments %v", got)
	}
	if !strings.Contains(member.body, fmt.Sprintf("#KEYS ~= %d or #ARGV ~= %d ", lua.MembershipKeys, lua.MembershipArgs)) {
		t.Error("membership.lua counts its arguments otherwise than Go")
	}
	if n := listed(t, member.header, fmt.Sprintf("%d integers: ", lua.MembershipReply), " Clock"); n != lua.MembershipReply {
		t.Errorf("membership.lua lists %d of %d integers", n, lua.MembershipReply)
	}
}

var comment = regexp.MustCompile(`(?m)--.*$`)

// commands are those that the scripts call, in upper case.
func commands(t *testing.T) map[string]bool {
	t.Helper()
	used := map[string]bool{}
	for _, f := range files(t) {
		code := comment.ReplaceAllString(f.body, "")
		found := regexp.MustCompile(`redis\.p?call\((?:\w+ and '([A-Z]+)' or )?'([A-Z]+)'`).FindAllStringSubmatch(code, -1)
		if n := len(regexp.MustCompile(`redis\.p?call\b`).FindAllString(code, -1)); n != len(found) {
			t.Errorf("%s: %d calls, of which %d name their command", f.name, n, len(found))
		}
		for _, m := range found {
			used[m[1]], used[m[2]] = true, true
		}
	}
	delete(used, "")
	for _, c := range []string{"MGET", "SET", "PEXPIRE", "TIME", "ZRANGE", "ZREVRANGE"} {
		if !used[c] {
			t.Errorf("%s was not found: the test reads wrongly", c)
		}
	}
	return used
}

// entries are the pairs of a map of the protocol, which before RESP3 is an array.
func entries(t *testing.T, answer any) map[any]any {
	t.Helper()
	switch v := answer.(type) {
	case map[any]any:
		return v
	case []any:
		m := map[any]any{}
		for i := 0; i+1 < len(v); i += 2 {
			m[v[i]] = v[i+1]
		}
		return m
	}
	t.Fatalf("an answer of type %T", answer)
	return nil
}

// TestCommandsAreOld: nothing that Redis 6.2 has not.
func TestCommandsAreOld(t *testing.T) {
	used := commands(t)
	s := open(t)
	info, err := s.rdb.Info(s.ctx, "server").Result()
	if err != nil {
		t.Fatal(err)
	}
	old := regexp.MustCompile(`redis_version:[0-6]\.`).MatchString(info) // tells nothing of its commands; running on it is the test
	for _, resp := range []int{2, 3} {
		rdb := server.p.Client(func(o *redis.Options) { o.Protocol = resp; o.ReadTimeout = 30 * time.Second })
		told := 0
		for c := range used {
			answer, err := rdb.Do(s.ctx, "COMMAND", "DOCS", c).Result()
			if err != nil && old {
				t.Logf("this server does not tell when it learned a command: %v", err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			since := ""
			for _, docs := range entries(t, answer) {
				since, _ = entries(t, docs)["since"].(string)
			}
			var major, minor int
			if _, err := fmt.Sscanf(since, "%d.%d", &major, &minor); err != nil || major > 6 || major == 6 && minor > 2 {
				t.Errorf("%s is there since %q", c, since)
			}
			told++
		}
		if told != len(used) || told < 15 {
			t.Errorf("%d of %d commands were judged", told, len(used))
		}
	}
}

// TestPermissionsAreTheCommands: docs/operations.md grants what the scripts call, and nothing that they do not.
func TestPermissionsAreTheCommands(t *testing.T) {
	text, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "### Permissions")
	_, rest, ok2 := strings.Cut(rest, "```\n")
	block, _, ok3 := strings.Cut(rest, "```")
	if !ok || !ok2 || !ok3 {
		t.Fatal("docs/operations.md has no block of permissions")
	}
	granted, want := strings.Fields(block), []string{"+evalsha", "+eval"}
	for c := range commands(t) {
		want = append(want, "+"+strings.ToLower(c))
	}
	slices.Sort(granted)
	slices.Sort(want)
	if !slices.Equal(granted, want) {
		t.Errorf("docs/operations.md grants %v\nneeded is %v", granted, want)
	}
	// No other place names a permission that is not among them, go-redis's own aside.
	for _, m := range regexp.MustCompile("`(\\+[a-z]+)").FindAllStringSubmatch(string(text), -1) {
		if !slices.Contains(append([]string{"+ping", "+hello", "+client", "+select", "+cluster"}, want...), m[1]) {
			t.Errorf("docs/operations.md speaks of %s, which is not needed", m[1])
		}
	}
}

// TestNumbersArePrintedInFull: tostring and .. keep 14 digits of a number.
func TestNumbersArePrintedInFull(t *testing.T) {
	// What may stand beside a "..": texts, and small numbers in messages and formats.
	texts := `'(?:[^'\\]|\\.)*'|string\.rep\(|rep\(|cut\(|pack\(|text\(|before\b|within\b|after\b|ids\[i\]|id\b|gone\b|what\b|width\b|policy\b|i\b`
	for _, f := range files(t) {
		code := strings.ReplaceAll(comment.ReplaceAllString(f.body, ""), "...", "")
		if strings.Contains(code, "tostring(") {
			t.Errorf("%s: tostring", f.name)
		}
		all := len(regexp.MustCompile(`\.\.`).FindAllString(code, -1))
		good := len(regexp.MustCompile(`\.\.\s*(?:`+texts+`)`).FindAllString(code, -1))
		if all != good {
			t.Errorf("%s: %d of %d concatenations are of something else than a text", f.name, all-good, all)
		}
		for _, m := range regexp.MustCompile(`(\S+)\s*\.\.`).FindAllStringSubmatch(code, -1) {
			if !regexp.MustCompile(`(?:'|\bi|\bpolicy|\btext|\bbefore|\bwithin|\bwidth\)|\))$`).MatchString(m[1]) {
				t.Errorf("%s: %q before a concatenation", f.name, m[1])
			}
		}
	}
}

func TestSources(t *testing.T) {
	seen := map[string]bool{}
	for a := tier.Algorithm(1); int(a) <= tier.Algorithms; a++ {
		src := lua.Source(a)
		if src == "" || seen[lua.SHA(src)] {
			t.Errorf("algorithm %d has no script of its own", a)
		}
		seen[lua.SHA(src)] = true
		s := open(t)
		if sha, err := s.rdb.ScriptLoad(s.ctx, src).Result(); err != nil || sha != lua.SHA(src) {
			t.Errorf("the server calls it %s, we %s: %v", sha, lua.SHA(src), err)
		}
	}
	if lua.Source(0) != "" || lua.Source(200) != "" {
		t.Error("a script for no algorithm")
	}
}
