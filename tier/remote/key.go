package remote

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// Groups is the number of slot groups. Keys of one group live on one server, always.
const Groups = 256

// layout is the version of the key layout and of the fields inside; it stands between the prefix and the group.
const layout = "1"

// longestKey is the most bytes of a key that are kept as they are. A longer one is replaced by a digest of 128 bits, so
// that a 10 kB key does not cost 10 kB in every message and in Redis's memory.
const longestKey = 128

// groupTags are the layout version and the hash tag of each group: "1:{0}" ... "1:{255}".
var groupTags = func() (tags [Groups]string) {
	for g := range tags {
		tags[g] = layout + ":{" + strconv.Itoa(g) + "}"
	}
	return tags
}()

// KeyName returns the Redis key of a limiter's key, and its group 0..255.
//
// The name is "<prefix>1:{<group>}<limiter>:<key>", or with "#<32 hex digits>" for a key of more than 128 bytes. Different keys
// have different names (limiter names hold neither ':' nor '#'), up to a collision of 128 bits of SHA-256. A key may hold any
// bytes: Redis hashes what is in the first braces only, which are the group's as long as the prefix holds no '{'.
func KeyName(prefix, limiter, key string) (name string, group uint8) {
	var d xxhash.Digest
	d.Reset()
	// A Digest's writes never fail.
	_, _ = d.WriteString(limiter)
	_, _ = d.WriteString(":")
	_, _ = d.WriteString(key)
	group = uint8(d.Sum64() >> 56)
	if len(key) <= longestKey {
		return prefix + groupTags[group] + limiter + ":" + key, group
	}
	sum := sha256.Sum256([]byte(key))
	var digest [32]byte
	hex.Encode(digest[:], sum[:16])
	return prefix + groupTags[group] + limiter + "#" + string(digest[:]), group
}
