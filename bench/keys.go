package bench

import (
	"fmt"
	"math/rand/v2"
)

// Keys is a set of keys and an order in which checks come for them, the same in every run. Keys are 24 bytes long.
type Keys struct {
	Name string
	All  []string // one string for each key
	// order is what comes after what, as indices of All; its length is a power of two. Odds follow the pattern, and which
	// key is a hot one is random, so that hot keys do not lie side by side in memory.
	order []uint32
}

// Key is key number i.
func Key(i int) string { return fmt.Sprintf("customer-%015d", i) }

// Hot is one key.
func Hot() *Keys { return &Keys{Name: "hot", All: []string{Key(0)}, order: []uint32{0}} }

// Uniform is n keys with equal odds.
func Uniform(name string, n int) *Keys {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	return newKeys(name, n, func() uint32 { return uint32(r.IntN(n)) })
}

// Zipf is n keys, the i-th with odds 1/i^s.
func Zipf(name string, n int, s float64) *Keys {
	r := rand.New(rand.NewPCG(2, uint64(n)))
	z := rand.NewZipf(r, s, 1, uint64(n-1))
	place := r.Perm(n)
	return newKeys(name, n, func() uint32 { return uint32(place[z.Uint64()]) })
}

func newKeys(name string, n int, next func() uint32) *Keys {
	k := &Keys{Name: name, All: make([]string, n)}
	for i := range k.All {
		k.All[i] = Key(i)
	}
	size := 1 << 16
	for size < 4*n {
		size <<= 1
	}
	k.order = make([]uint32, size)
	for i := range k.order {
		k.order[i] = next()
	}
	return k
}

// At is the key of check number i.
func (k *Keys) At(i int) string { return k.All[k.order[i&(len(k.order)-1)]] }
