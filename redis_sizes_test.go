package tierlimit_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/redistest"
)

// The table of sizes and times to live in docs/operations.md: go test -run TestRedisSizes -v . prints it. What a key costs
// must stay small and, for the sliding log, must not grow with the number of requests.
func TestRedisSizes(t *testing.T) {
	srv := redistest.Start(t)
	rdb := srv.Client()
	ctx := t.Context()
	rows := []struct {
		limit tierlimit.Limit
		name  string // of the row in docs/operations.md
	}{
		{tierlimit.TokenBucket(100, time.Second), "100/s token or leaky bucket"},
		{tierlimit.LeakyBucket(100, time.Second), "100/s token or leaky bucket"},
		{tierlimit.FixedWindow(5000, time.Hour), "5000/h fixed window"},
		{tierlimit.SlidingWindow(5000, time.Hour), "5000/h sliding window"},
		{tierlimit.SlidingWindow(5000, time.Hour).WithSubWindows(60), "the same with 60 sub-windows"},
		{tierlimit.SlidingLog(100, time.Second), "100/s sliding log, saturated"},
		{tierlimit.SlidingLog(100000, time.Second), "100000/s sliding log, saturated"},
	}
	said := documentedSizes(t)
	var table strings.Builder
	fmt.Fprintf(&table, "\n%-40s %12s %10s\n", "limit", "bytes", "ttl")
	h, err := tierlimit.New(rdb, tierlimit.WithPrefix("sizes:"), tierlimit.WithLocalShare(0))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close(ctx)
	ls := make([]*tierlimit.Limiter, len(rows))
	for i, row := range rows {
		if ls[i], err = h.Limiter(fmt.Sprintf("l%d", i), row.limit); err != nil {
			t.Fatal(err)
		}
	}
	// Spread evenly over all ticks of a second, so that a log is as full as it gets.
	for end := time.Now().Add(1200 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for i, l := range ls {
			if _, err := l.AllowN(ctx, "user-12345", rows[i].limit.Rate/100); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, row := range rows {
		keys := keysOf(t, rdb, fmt.Sprintf("sizes:*}l%d:*", i))
		if len(keys) != 1 {
			t.Fatalf("%v: keys %q, want one", row.limit, keys)
		}
		size, err := rdb.MemoryUsage(ctx, keys[0], 0).Result()
		if err != nil {
			t.Fatal(err)
		}
		ttl := rdb.PTTL(ctx, keys[0]).Val()
		fmt.Fprintf(&table, "%-40v %12d %10v\n", row.limit, size, ttl.Round(100*time.Millisecond))
		// Another allocator, or another tick, may cost some more or less.
		if most := said[row.name]; most == 0 || size > most*3/2 || size < most/2 {
			t.Errorf("%v takes %d bytes, docs/operations.md says %d", row.limit, size, most)
		}
		if ttl <= 0 {
			t.Errorf("%v has a TTL of %v", row.limit, ttl)
		}
	}
	members := int64(0)
	for _, key := range keysOf(t, rdb, "sizes:*!*") {
		size := rdb.MemoryUsage(ctx, key, 0).Val()
		members += size
		fmt.Fprintf(&table, "%-40v %9s %12d %10v\n", key[strings.IndexByte(key, '!'):]+" of one instance", "", size, rdb.PTTL(ctx, key).Val().Round(time.Minute))
	}
	t.Log(table.String())
	if most := said["membership, one instance"]; most == 0 || members > most*3/2 || members < most/2 {
		t.Errorf("the membership of one instance takes %d bytes, docs/operations.md says %d", members, most)
	}
}

// documentedSizes are the bytes of each row of the table; "232 while tokens are leased" aside, and of a sum the sum.
func documentedSizes(t *testing.T) map[string]int64 {
	t.Helper()
	text, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "| limit | bytes of a key |")
	rest, _, _ = strings.Cut(rest, "\n\n")
	said := map[string]int64{}
	for line := range strings.Lines(rest) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		bytes, _, _ := strings.Cut(cells[2], ";")
		for part := range strings.SplitSeq(bytes, "+") {
			n, _ := strconv.ParseInt(strings.TrimSpace(part), 10, 64)
			said[strings.TrimSpace(cells[1])] += n
		}
	}
	return said
}

func keysOf(t *testing.T, rdb *redis.Client, pattern string) []string {
	t.Helper()
	keys, err := rdb.Keys(t.Context(), pattern).Result()
	if err != nil {
		t.Fatal(err)
	}
	return keys
}
