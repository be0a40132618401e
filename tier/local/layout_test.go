package local

import (
	"bytes"
	"strings"
	"testing"
	"unsafe"
)

// What a warm check reads of a cell are its first two cache lines, and all cells begin with one: the allocator's sizes around it are multiples of
// 64 bytes only where a cell's is.
func TestCellFillsCacheLines(t *testing.T) {
	var c Cell
	if size := unsafe.Sizeof(c); size%64 != 0 || size > 512 {
		t.Errorf("a cell has %d bytes, want a multiple of 64 up to 512", size)
	}
	if at := unsafe.Offsetof(c.deadline); at != 64 {
		t.Errorf("deadline is at %d, want 64", at)
	}
	if at := unsafe.Offsetof(c.Flow) + unsafe.Sizeof(c.Flow); at > 128 {
		t.Errorf("what a warm check reads ends at %d, want 128", at)
	}
}

// A cell keeps its own copy of the key.
func TestCellCopiesItsKey(t *testing.T) {
	for _, n := range []int{0, 1, shortKey, shortKey + 1, 1000} {
		large := bytes.Repeat([]byte("k"), n+1)
		c := newCell(1, 2, unsafe.String(&large[0], n))
		clear(large)
		if c.Key != strings.Repeat("k", n) {
			t.Errorf("%d bytes: %q", n, c.Key)
		}
	}
}
