package remote

import (
	"fmt"
	"strings"
	"testing"
)

// slot is Redis Cluster's: CRC16 (XMODEM) of what is in the first braces, or of all.
func slot(key string) int {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			key = tag
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc % 16384)
}

// awkwardKeys is case F45: braces, colons, NUL, spaces, 10 kB, empty.
func awkwardKeys() []string {
	long := strings.Repeat("x", 10<<10)
	return []string{
		"", " ", "  ", "\x00", "\x00\x00", "{", "}", "{}", "{}{}", "{a}", "{a}b", "a{b}", "}{", "{7}", ":", "::", "a:b", "a::b", "#", "a#b",
		"a b", "a\nb", "a\r\nb", "\xff\xfe", "ключ", long, long + "y", long[1:], strings.Repeat("x", 128), strings.Repeat("x", 129),
	}
}

func TestKeyName(t *testing.T) {
	for _, c := range []struct{ prefix, limiter, key, name string }{
		{"", "api", "alice", "1:{151}api:alice"},
		{"tl:", "api", "", "tl:1:{168}api:"},
		{"tl:", "api", strings.Repeat("k", 129), "tl:1:{241}api#9094034fb2d0ce2e407c9b260f2806ab"},
	} {
		name, group := KeyName(c.prefix, c.limiter, c.key)
		if name != c.name || !strings.Contains(c.name, fmt.Sprintf("1:{%d}", group)) {
			t.Errorf("KeyName(%q, %q, %.20q) = %q, %d, want %q", c.prefix, c.limiter, c.key, name, group, c.name)
		}
	}
}

// Names are distinct, and each lies in the slot of its group, whatever the key holds.
func TestAwkwardKeys(t *testing.T) {
	seen := map[string]string{}
	for _, limiter := range []string{"a", "a.b", "a-b", "b"} {
		for _, key := range awkwardKeys() {
			name, group := KeyName("tl:", limiter, key)
			id := fmt.Sprintf("%s / %.40q (%d bytes)", limiter, key, len(key))
			if other, dup := seen[name]; dup {
				t.Errorf("%s and %s share %q", id, other, name)
			}
			seen[name] = id
			if got, want := slot(name), slot(fmt.Sprintf("{%d}", group)); got != want {
				t.Errorf("%s: slot %d, its group's is %d", id, got, want)
			}
			if len(name) > 256 {
				t.Errorf("%s: a name of %d bytes", id, len(name))
			}
			if hashTag(name) != fmt.Sprint(group) {
				t.Errorf("%s: hash tag %q, group %d", id, hashTag(name), group)
			}
		}
	}
	for g := range Groups {
		for _, key := range (Domain{uint8(g)}).Keys("tl:") {
			if seen[key] != "" || slot(key) != slot(fmt.Sprintf("{%d}", g)) {
				t.Errorf("membership key %q: slot %d", key, slot(key))
			}
			seen[key] = key
		}
	}
}

func TestGroupsAreEven(t *testing.T) {
	var count [Groups]int
	const n = Groups * 100
	for i := range n {
		_, group := KeyName("", "api", fmt.Sprintf("user-%d", i))
		count[group]++
	}
	for g, c := range count {
		if c < 50 || c > 160 {
			t.Errorf("group %d has %d of %d keys", g, c, n)
		}
	}
}

func FuzzKeyName(f *testing.F) {
	for _, key := range awkwardKeys() {
		f.Add("api", key, "web", key)
		f.Add("api", key, "api", key+":")
	}
	f.Fuzz(func(t *testing.T, limiter1, key1, limiter2, key2 string) {
		if !validLimiter(limiter1) || !validLimiter(limiter2) {
			return // no names that a limiter can have
		}
		name1, group1 := KeyName("p:", limiter1, key1)
		name2, group2 := KeyName("p:", limiter2, key2)
		same := limiter1 == limiter2 && key1 == key2
		if (name1 == name2) != same {
			t.Errorf("%q %q and %q %q: %q, %q", limiter1, key1, limiter2, key2, name1, name2)
		}
		if same && group1 != group2 {
			t.Errorf("%q %q: groups %d and %d", limiter1, key1, group1, group2)
		}
		if want := "p:" + groupTags[group1] + limiter1; !strings.HasPrefix(name1, want) {
			t.Errorf("%q does not begin with %q", name1, want)
		}
		if slot(name1) != slot(fmt.Sprintf("{%d}", group1)) {
			t.Errorf("%q is not in the slot of group %d", name1, group1)
		}
	})
}

func validLimiter(name string) bool {
	return len(name) >= 1 && len(name) <= 64 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789._-") == ""
}

func BenchmarkKeyName(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		KeyName("tierlimit:", "api", "user-1234567")
	}
}
