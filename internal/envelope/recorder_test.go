//go:build unix

package envelope

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
)

const (
	childEnv     = "ENVELOPE_TEST_RECORD_TO"
	childThreads = 4
	childEach    = 200_000 // calls per goroutine, long enough for the kill to come in their midst
	childTold    = 5_000   // calls the child vouches for before it is killed
)

// sample makes a record whose fields can be checked against each other.
func sample(instance, seq int64) Admission {
	return Admission{Called: seq * 3, Returned: seq*3 + instance, Cost: seq + 1, Key: uint64(seq * 7), Instance: int32(instance)}
}

// recordUntilKilled is the child of TestKilledProcessLosesNothing: it records on four goroutines, says so after each has
// written childTold, and goes on until it is killed.
func recordUntilKilled(path string) {
	r, err := NewRecorder(path, childThreads*(childEach+1))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	var told, all sync.WaitGroup
	told.Add(childThreads)
	for i := range int64(childThreads) {
		all.Go(func() {
			if _, err := r.Begin(Admission{Called: 1, Cost: 2, Key: 99, Instance: int32(i)}); err != nil {
				panic(err) // in doubt for ever
			}
			for seq := range int64(childEach) { // the file has room for all: a slow goroutine must not find it full
				if seq == childTold {
					told.Done()
				}
				c, err := r.Begin(sample(i, seq))
				if err != nil {
					panic(err)
				}
				if seq%3 == 0 {
					c.Drop()
				} else {
					c.End(sample(i, seq).Returned)
				}
			}
		})
	}
	told.Wait()
	fmt.Println("recorded")
	all.Wait()
	_, _ = os.Stdin.Read(make([]byte, 1)) // blocks until the parent kills or goes away
	os.Exit(0)
}

func TestKilledProcessLosesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+path)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe() // held open: its end would let the child finish
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if line != "recorded\n" {
		t.Errorf("the child said %q, %v", line, err)
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the child was not killed")
	}

	history, err := ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	seqs := make([][]int64, childThreads)
	for _, a := range history {
		seq := a.Cost - 1
		if a != sample(int64(a.Instance), seq) {
			t.Fatalf("torn record %+v", a)
		}
		seqs[a.Instance] = append(seqs[a.Instance], seq)
	}
	for i, s := range seqs {
		slices.Sort(s)
		if len(s) < childTold*2/3-1 {
			t.Errorf("instance %d: %d records, the child had vouched for %d", i, len(s), childTold*2/3)
		}
		for n, seq := range s { // 1, 2, 4, 5, 7, 8, ...: every third was dropped
			if want := int64(n/2*3 + n%2 + 1); seq != want {
				t.Fatalf("instance %d: record %d is missing", i, want)
			}
		}
	}
	doubt, err := ReadInDoubt(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range int32(childThreads) {
		if want := (Admission{Called: 1, Cost: 2, Key: 99, Instance: i}); !slices.Contains(doubt, want) {
			t.Errorf("%+v is not in doubt", want)
		}
	}
	if len(doubt) > 2*childThreads {
		t.Errorf("%d in doubt, at most two per goroutine can be", len(doubt))
	}
	t.Logf("%d recorded, %d in doubt", len(history), len(doubt))
}

func TestRecorderConcurrently(t *testing.T) {
	const threads, each = 8, 2000
	path := filepath.Join(t.TempDir(), "recording")
	r, err := NewRecorder(path, threads*each+threads)
	if err != nil {
		t.Fatal(err)
	}
	var m Memory
	var wg sync.WaitGroup
	for i := range int64(threads) {
		wg.Go(func() {
			for seq := range int64(each) {
				// A denied call first: its slot must be used again, or the recording would be full half way.
				if c, err := r.Begin(sample(i, -5)); err != nil {
					t.Error(err)
				} else {
					c.Drop()
				}
				if err := errors.Join(r.Record(sample(i, seq)), m.Record(sample(i, seq))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	fromFile, err := ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var want []Admission
	for i := range int64(threads) {
		for seq := range int64(each) {
			want = append(want, sample(i, seq))
		}
	}
	for name, got := range map[string][]Admission{"file": fromFile, "memory": m.History()} {
		slices.SortFunc(got, func(a, b Admission) int {
			if a.Instance != b.Instance {
				return int(a.Instance - b.Instance)
			}
			return int(a.Cost - b.Cost)
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s: %d records, want %d, or they differ", name, len(got), len(want))
		}
	}
}

func TestRecorderFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	r, err := NewRecorder(path, 3)
	if err != nil {
		t.Fatal(err)
	}
	for i := range int64(3) {
		if err := r.Record(sample(0, i)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := r.Record(sample(0, 9)); !errors.Is(err, ErrFull) {
			t.Errorf("got %v, want ErrFull", err)
		}
	}
	if err := errors.Join(r.Close(), r.Close()); err != nil {
		t.Error(err)
	}
	if err := r.Record(sample(0, 9)); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
	got, err := ReadFile(path)
	if !errors.Is(err, ErrFull) || len(got) != 3 {
		t.Errorf("%d records, %v; want 3 and ErrFull", len(got), err)
	}
}

func TestRecorderRefusesToStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	for _, capacity := range []int{-1, 0} {
		if _, err := NewRecorder(path, capacity); err == nil {
			t.Errorf("capacity %d was accepted", capacity)
		}
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewRecorder(path, 1); !errors.Is(err, os.ErrExist) {
		t.Errorf("an existing file: %v", err)
	}
	if _, err := ReadFile(path); !errors.Is(err, ErrFormat) {
		t.Errorf("got %v, want ErrFormat", err)
	}
	if _, err := ReadFile(path + ".none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want ErrNotExist", err)
	}
}

// recording is a file with two records done, one in doubt and one dropped.
func recording(t testing.TB) []byte {
	path := filepath.Join(t.TempDir(), "recording")
	r, err := NewRecorder(path, 6)
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.Begin(sample(1, 5))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Begin(sample(1, 7)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Record(sample(2, 1)), r.Record(sample(3, 2))); err != nil {
		t.Fatal(err)
	}
	c.Drop()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestReadDamagedRecordings(t *testing.T) {
	whole := recording(t)
	second := headerSize + 2*recordSize // the first of the two records that are done
	tests := []struct {
		name   string
		damage func([]byte) []byte
		want   []Admission
		err    error
	}{
		{"none", func(b []byte) []byte { return b }, []Admission{sample(2, 1), sample(3, 2)}, nil},
		{"a record whose state was not reached", func(b []byte) []byte { clear(b[second : second+8]); return b }, []Admission{sample(3, 2)}, nil},
		{"a record in no known state", func(b []byte) []byte { b[second+1] = 9; return b }, []Admission{sample(3, 2)}, ErrFormat},
		{"cut inside a record", func(b []byte) []byte { return b[:second+recordSize+9] }, []Admission{sample(2, 1)}, ErrFormat},
		{"cut inside the header", func(b []byte) []byte { return b[:headerSize-1] }, nil, ErrFormat},
		{"empty", func(b []byte) []byte { return nil }, nil, ErrFormat},
		{"another magic", func(b []byte) []byte { b[0]++; return b }, nil, ErrFormat},
		{"another capacity", func(b []byte) []byte { clear(b[offCap : offCap+8]); return b }, nil, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "recording")
			if err := os.WriteFile(path, test.damage(slices.Clone(whole)), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := ReadFile(path)
			if !errors.Is(err, test.err) || !slices.Equal(got, test.want) {
				t.Errorf("got %+v, %v; want %+v, %v", got, err, test.want, test.err)
			}
		})
	}
	doubt, err := decode(whole, stateBegun)
	if a := sample(1, 7); err != nil || len(doubt) != 1 || doubt[0] != (Admission{Called: a.Called, Cost: a.Cost, Key: a.Key, Instance: 1}) {
		t.Errorf("in doubt: %+v, %v", doubt, err)
	}
}

func FuzzReadFile(f *testing.F) {
	whole := recording(f)
	f.Add(whole)
	f.Add(whole[:headerSize+recordSize+5])
	f.Add(whole[:headerSize])
	f.Add([]byte("no recording"))
	path := filepath.Join(f.TempDir(), "recording") // one for all: inputs of a worker come one by one
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		done, err := ReadFile(path)
		doubt, err2 := ReadInDoubt(path)
		if fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Errorf("two readings disagree: %v, %v", err, err2)
		}
		if n := len(done) + len(doubt); n*recordSize > len(data) {
			t.Errorf("%d records out of %d bytes", n, len(data))
		}
		Check(Limit{Kind: TokenBucket, Rate: 1, Period: 1, Burst: 1}, done) // whatever was read, the checker takes it
	})
}

func TestRecordingDoesNotAllocate(t *testing.T) {
	r, err := NewRecorder(filepath.Join(t.TempDir(), "recording"), 2000)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if n := testing.AllocsPerRun(1000, func() { _ = r.Record(sample(1, 1)) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkRecord(b *testing.B) {
	b.Run("to=file", func(b *testing.B) {
		r, err := NewRecorder(filepath.Join(b.TempDir(), "recording"), 1<<20)
		if err != nil {
			b.Fatal(err)
		}
		defer r.Close()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if r.Record(Admission{Called: 1, Returned: 2, Cost: 1}) != nil {
					r.word(offNext).Store(0) // begin again
				}
			}
		})
	})
	b.Run("to=memory", func(b *testing.B) {
		var m Memory
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				_ = m.Record(Admission{Called: 1, Returned: 2, Cost: 1})
			}
		})
	})
}
