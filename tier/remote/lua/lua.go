// Package lua holds the scripts that run inside Redis: one per algorithm for the exchange, and one for the membership of
// the fleet. They need Redis 6.2 or later and nothing of it that is newer.
package lua

import (
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"strings"

	"github.com/tierlimit/tierlimit/tier"
)

// The counts that both sides of the wire agree on; a test holds the scripts to them.
const (
	HeaderNumbers = 10 // of a message, before its policies
	PolicyNumbers = 5
	AskNumbers    = 7
	ReportNumbers = 8
	PairNumbers   = 2
	HeaderReply   = 2  // numbers before the keys'
	ShortReply    = 10 // numbers per key, the flags with them
	KeyReply      = 15 // where none is left out
	NumberBytes   = 7  // of most numbers

	MembershipKeys  = 3
	MembershipArgs  = 10
	MembershipReply = 17
)

//go:embed prelude.lua
var prelude string

//go:embed each.lua
var each string

//go:embed counts.lua
var counts string

//go:embed bucket.lua
var bucket string

//go:embed token_bucket.lua
var tokenBucket string

//go:embed leaky_bucket.lua
var leakyBucket string

//go:embed fixed_window.lua
var fixedWindow string

//go:embed sliding_window.lua
var slidingWindow string

//go:embed sliding_log.lua
var slidingLog string

//go:embed membership.lua
var membership string

var sources = [tier.Algorithms + 1]string{
	tier.TokenBucket:   join(prelude, tokenBucket, bucket),
	tier.LeakyBucket:   join(prelude, leakyBucket, bucket),
	tier.FixedWindow:   join(prelude, fixedWindow),
	tier.SlidingWindow: join(prelude, counts, slidingWindow),
	tier.SlidingLog:    join(prelude, counts, slidingLog),
}

// join makes a script of its files. A line "--+ name" in it stands for the part of each.lua of that name.
func join(files ...string) string {
	parts := map[string]string{}
	for _, part := range strings.Split(each, "\n--= ")[1:] {
		name, _, _ := strings.Cut(part, ":")
		_, code, _ := strings.Cut(part, "\n")
		parts[name] = code
	}
	var b strings.Builder
	for line := range strings.Lines(strings.Join(files, "\n")) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--+ "); ok {
			line = parts[name] + "\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

// Source is the exchange script of an algorithm, "" for one that is none.
func Source(alg tier.Algorithm) string {
	if int(alg) >= len(sources) {
		return ""
	}
	return sources[alg]
}

// Membership is the script of the heartbeat.
func Membership() string { return membership }

// SHA is the name under which EVALSHA knows a script.
func SHA(source string) string {
	sum := sha1.Sum([]byte(source))
	return hex.EncodeToString(sum[:])
}
