package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A subject that admits everything is quick. All of them are set up as they are measured, but for the limit, and have to keep it.
func TestSubjectsLimit(t *testing.T) {
	server := redistest.Start(t)
	for _, s := range slices.Concat(Local, Remote) {
		if s.Denies {
			continue
		}
		t.Run(s.Impl+"/"+s.Path, func(t *testing.T) {
			const rate = 5
			if err := server.FlushAll(t.Context()); err != nil {
				t.Fatal(err)
			}
			o, err := s.Open(Setting{Rate: rate, Period: time.Hour, Burst: rate, Keys: 2, Addr: server.Addr()})
			if err != nil {
				t.Fatal(err)
			}
			defer o.Close()
			for _, key := range []string{"a", "b"} {
				admitted := 0
				for range 20 {
					if o.Allow(key) {
						admitted++
					}
				}
				if admitted != rate {
					t.Errorf("key %s: %d of 20 checks admitted at %d an hour", key, admitted, rate)
				}
			}
		})
	}
}

// The floors answer yes, and the denying subject no, in process.
func TestSubjectsAnswer(t *testing.T) {
	server := redistest.Start(t)
	for _, s := range slices.Concat(Floors, RemoteFloors, Local, Remote) {
		t.Run(s.Impl+"/"+s.Path, func(t *testing.T) {
			setting := asked
			setting.Addr, setting.Keys = server.Addr(), 100
			o, err := s.Open(setting)
			if err != nil {
				t.Fatal(err)
			}
			defer o.Close()
			o.Warm(100, Key)
			for i := range 100 {
				if !o.Allow(Key(i)) {
					t.Fatalf("%s was not answered as it should be", Key(i))
				}
			}
		})
	}
}

func TestKeys(t *testing.T) {
	k := Zipf("z", 1000, 1.1)
	count := map[string]int{}
	for i := range len(k.order) {
		count[k.At(i)]++
	}
	top := slices.Max(slices.Collect(func(yield func(int) bool) {
		for _, n := range count {
			if !yield(n) {
				return
			}
		}
	}))
	// The first of 1000 keys has odds 1 in the sum of i^-1.1, which is 5.6.
	if share := float64(top) / float64(len(k.order)); share < 0.16 || share > 0.20 {
		t.Errorf("the hottest key has %.3f of the checks", share)
	}
	if len(k.All[0]) != 24 || len(count) < 900 {
		t.Errorf("key %q, %d keys of 1000 in use", k.All[0], len(count))
	}
}

// A Drive makes the checks it says, by so many goroutines.
func TestDrive(t *testing.T) {
	k := Uniform("u", 10)
	for _, n := range []int{1, 16} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			out := Drive(k, func(key string) bool { return key != k.At(0) }, Load{Goroutines: n, For: 20 * time.Millisecond, Every: 4})
			if out.Checks == 0 || out.Checks%4 != 0 || out.Other == 0 || out.Other == out.Checks {
				t.Errorf("%+v", out)
			}
			if timed := out.Latency.TotalCount(); timed != out.Checks/4 {
				t.Errorf("%d of %d checks were timed", timed, out.Checks)
			}
		})
	}
}
