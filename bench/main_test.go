package bench

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A million keys tell how a limiter does with more than the caches hold; -keys makes them fewer for a look.
var manyKeys = flag.Int("keys", 1_000_000, "number of the many keys")

// manyZipf is the many keys, few of them hot.
func manyZipf() *Keys { return Zipf(manyName(), *manyKeys, 1.1) }

func manyName() string {
	if *manyKeys%1_000_000 == 0 {
		return fmt.Sprintf("zipf%dM", *manyKeys/1_000_000)
	}
	return fmt.Sprintf("zipf%dk", *manyKeys/1000)
}

// benchTime is -benchtime where that is a duration.
func benchTime() time.Duration {
	if d, err := time.ParseDuration(flag.Lookup("test.benchtime").Value.String()); err == nil {
		return d
	}
	return time.Second
}

// first says whether this is the call with which testing tries a benchmark out. testing takes what is measured in it as the result, but
// makes it before it sets GOMAXPROCS to the first of -cpu, so nothing is to be measured yet.
func first(b *testing.B) bool { return b.N == 1 }

// open starts a subject until the benchmark's end, with a Redis of its own where it needs one and setting names none.
func open(b *testing.B, s Subject, setting Setting) (*Opened, *redis.Client) {
	b.Helper()
	var rdb *redis.Client
	if s.Redis && setting.Addr == "" {
		server := redistest.Start(b)
		setting.Addr = server.Addr()
		rdb = server.Client(func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = time.Minute, time.Minute })
		if err := LogSlow(b.Context(), rdb); err != nil {
			b.Fatal(err)
		}
	}
	o, err := s.Open(setting)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(o.Close)
	return o, rdb
}

// run drives a subject for -benchtime and reports wall time by checks, and latencies where each check is timed.
func run(b *testing.B, k *Keys, o *Opened, load Load) Outcome {
	b.Helper()
	load.For = benchTime()
	b.ResetTimer()
	out := Drive(k, o.Allow, load)
	b.StopTimer()
	b.ReportMetric(float64(out.Elapsed)/float64(max(1, out.Checks)), "ns/op")
	wanted(b, out.Other, out.Checks)
	return out
}

// wanted fails a benchmark that measures something else than it says. A few checks may fall into a pause of the machine.
func wanted(b *testing.B, other, checks int64) {
	b.Helper()
	if 1000*other > checks {
		b.Errorf("%d of %d checks were not answered as they should", other, checks)
	}
}

func remoteBefore(o *Opened) int64 {
	if o.Remote == nil {
		return 0
	}
	return o.Remote()
}

// reportRemote reports what part of the checks Redis decided.
func reportRemote(b *testing.B, o *Opened, before, checks int64) {
	if o.Remote != nil {
		b.ReportMetric(100*float64(o.Remote()-before)/float64(max(1, checks)), "%remote")
	}
}
