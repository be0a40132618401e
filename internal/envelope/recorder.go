//go:build unix

package envelope

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Errors of the recorders, for errors.Is.
var (
	ErrFull   = errors.New("envelope: the recording is full")
	ErrFormat = errors.New("envelope: not a recording, or a damaged one")
	ErrClosed = errors.New("envelope: the recorder is closed")
)

// The file, in the machine's byte order: a header of headerSize bytes, then records of recordSize bytes.
//
//	header  0 magic   8 capacity in records   64 slots handed out   72 records refused because the file was full
//	record  0 state   8 called   16 returned   24 cost   32 key   40 instance (4 bytes), 4 bytes unused
//
// A record's state is written last, so whoever finds it done finds the rest complete.
const (
	magic      = 0x31304345525f4c54 // "TL_REC01"
	headerSize = 128                // the two counters have a cache line to themselves
	offMagic   = 0
	offCap     = 8
	offNext    = 64
	offLost    = 72

	recordSize  = 48
	offState    = 0
	offCalled   = 8
	offReturned = 16
	offCost     = 24
	offKey      = 32
	offInstance = 40

	stateEmpty = 0
	stateBegun = 1
	stateDone  = 2
)

// maxCapacity keeps a slot number and its successor within 32 bits, which the list of free slots needs.
const maxCapacity = math.MaxUint32 - 1

// A Recorder writes admissions to a memory-mapped file, so that kill -9 of the process loses none that was recorded:
// the pages belong to the kernel. (A crash of the machine may lose them: nothing is synced.)
//
// It is lock-free; its methods may be called concurrently, but Close only when all others have returned.
type Recorder struct {
	data     []byte
	capacity uint64
	closed   atomic.Bool
	free     atomic.Uint64 // list of dropped slots: a count of changes in the high half, slot+1 in the low half, 0 for none
}

// NewRecorder creates the file at path, which must not exist, with room for capacity records of 48 bytes each. All
// of it is written at once, so that a full disk is an error here and not a SIGBUS later.
func NewRecorder(path string, capacity int) (*Recorder, error) {
	if capacity < 1 || uint64(capacity) > maxCapacity || uint64(capacity) > (math.MaxInt-headerSize)/recordSize {
		return nil, fmt.Errorf("envelope: a recording of %d records", capacity)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("envelope: create recording: %w", err)
	}
	defer f.Close() // the mapping outlives it
	size := headerSize + capacity*recordSize
	zeros := make([]byte, min(size, 1<<20))
	for left := size; left > 0; left -= len(zeros) {
		zeros = zeros[:min(left, len(zeros))]
		if _, err := f.Write(zeros); err != nil {
			return nil, fmt.Errorf("envelope: reserve recording: %w", err)
		}
	}
	data, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("envelope: map recording: %w", err)
	}
	r := &Recorder{data: data, capacity: uint64(capacity)}
	r.word(offCap).Store(uint64(capacity))
	r.word(offMagic).Store(magic)
	return r, nil
}

func (r *Recorder) word(off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&r.data[off]))
}

func (r *Recorder) record(slot uint64, off int) int {
	return headerSize + int(slot)*recordSize + off
}

// Record appends an admission whose answer is known. If the file is full it returns ErrFull, and so will ReadFile; after
// Close it returns ErrClosed. About 100 ns, no allocation.
func (r *Recorder) Record(a Admission) error {
	c, err := r.Begin(a)
	if err == nil {
		c.End(a.Returned)
	}
	return err
}

// A Call is an admission asked for and not yet answered. End it or drop it, once.
type Call struct {
	r    *Recorder
	slot uint64
}

// Begin notes that a is being asked for; a.Returned is ignored. If the process dies before End or Drop, the admission is in
// doubt: the limiter may have admitted it. ReadFile leaves it out, which can only hide overshoot and never invent it, and
// ReadInDoubt returns it. Errors as for Record.
func (r *Recorder) Begin(a Admission) (Call, error) {
	if r.closed.Load() {
		return Call{}, ErrClosed
	}
	slot, ok := r.take()
	if !ok {
		r.word(offLost).Add(1)
		return Call{}, ErrFull
	}
	// A slot is its taker's alone until the state is stored, and readers look at the state first.
	r.put(slot, offCalled, uint64(a.Called))
	r.put(slot, offReturned, 0)
	r.put(slot, offCost, uint64(a.Cost))
	r.put(slot, offKey, a.Key)
	binary.NativeEndian.PutUint32(r.data[r.record(slot, offInstance):], uint32(a.Instance))
	r.word(r.record(slot, offState)).Store(stateBegun)
	return Call{r, slot}, nil
}

// put stores atomically although the slot has one owner: the returned field also links free slots, and a slow take may
// still be reading a link that is no longer one.
func (r *Recorder) put(slot uint64, off int, v uint64) { r.word(r.record(slot, off)).Store(v) }

// End says that the call was admitted and had its answer at returned (ns).
func (c Call) End(returned int64) {
	c.r.put(c.slot, offReturned, uint64(returned))
	c.r.put(c.slot, offState, stateDone)
}

// Drop says that the call was not admitted. Its slot is used again, so denied calls take no room.
func (c Call) Drop() {
	r := c.r
	r.put(c.slot, offState, stateEmpty)
	for {
		old := r.free.Load()
		r.put(c.slot, offReturned, old&math.MaxUint32)
		if r.free.CompareAndSwap(old, (old>>32+1)<<32|(c.slot+1)) {
			return
		}
	}
}

// take hands out a dropped slot, or else a fresh one.
func (r *Recorder) take() (uint64, bool) {
	for {
		old := r.free.Load()
		if old&math.MaxUint32 == 0 {
			break
		}
		slot := old&math.MaxUint32 - 1
		// Between this load and the swap another goroutine may take the slot, overwrite the link, and drop the slot
		// again. The count of changes has moved on then, and the swap fails.
		next := r.word(r.record(slot, offReturned)).Load() & math.MaxUint32
		if r.free.CompareAndSwap(old, (old>>32+1)<<32|next) {
			return slot, true
		}
	}
	if r.word(offNext).Load() >= r.capacity { // asked first, so that refused calls do not count it up for ever
		return 0, false
	}
	slot := r.word(offNext).Add(1) - 1
	return slot, slot < r.capacity
}

// Close unmaps the file. Idempotent, but not safe beside the other methods: a store to an unmapped page kills the process.
func (r *Recorder) Close() error {
	if r.closed.Swap(true) {
		return nil
	}
	if err := syscall.Munmap(r.data); err != nil {
		return fmt.Errorf("envelope: unmap recording: %w", err)
	}
	return nil
}

// ReadFile returns the admissions recorded at path, in no particular order. Read it when its writer has closed it or died; records that the
// writer was in the midst of, and admissions in doubt, are left out.
//
// With the records that could be read it returns ErrFull if the writer ran out of room, and ErrFormat if the file is
// cut short or damaged: such a history is incomplete.
func ReadFile(path string) ([]Admission, error) {
	return readFile(path, stateDone)
}

// ReadInDoubt returns the admissions that were begun and neither ended nor dropped, with a Returned of 0: their process died, or they
// are still in flight. Errors as for ReadFile.
func ReadInDoubt(path string) ([]Admission, error) {
	return readFile(path, stateBegun)
}

func readFile(path string, state uint64) ([]Admission, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("envelope: read recording: %w", err)
	}
	return decode(data, state)
}

// decode returns the records of data that are in the given state.
func decode(data []byte, state uint64) ([]Admission, error) {
	word := binary.NativeEndian.Uint64
	if len(data) < headerSize || word(data[offMagic:]) != magic {
		return nil, ErrFormat
	}
	capacity, next, lost := word(data[offCap:]), word(data[offNext:]), word(data[offLost:])
	data = data[headerSize:]
	used := min(capacity, next)
	present := uint64(len(data) / recordSize)
	var faults []error
	if present < used {
		faults = append(faults, fmt.Errorf("%w: %d of %d records", ErrFormat, present, used))
		used = present
	}
	if lost > 0 {
		faults = append(faults, fmt.Errorf("%w: %d records were refused", ErrFull, lost))
	}
	var out []Admission
	strange := 0
	for i := range used {
		rec := data[i*recordSize:][:recordSize]
		switch s := word(rec[offState:]); {
		case s == state:
			out = append(out, Admission{
				Called:   int64(word(rec[offCalled:])),
				Returned: int64(word(rec[offReturned:])),
				Cost:     int64(word(rec[offCost:])),
				Key:      word(rec[offKey:]),
				Instance: int32(binary.NativeEndian.Uint32(rec[offInstance:])),
			})
		case s > stateDone:
			strange++
		}
	}
	if strange > 0 {
		faults = append(faults, fmt.Errorf("%w: %d records in no known state", ErrFormat, strange))
	}
	return out, errors.Join(faults...)
}
