package lua_test

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

const maxInteger = 1<<53 - 1

// helpers is the part of the prelude before it looks at its arguments, and then a call of f for each four of them.
func helpers(t *testing.T, body string) *redis.Script {
	t.Helper()
	head, _, ok := strings.Cut(lua.Source(tier.TokenBucket), "-- The header and the numbers of all keys")
	if !ok {
		t.Fatal("the prelude looks otherwise than the test knows")
	}
	return redis.NewScript(head + `
local out = {}
for i = 1, #ARGV, 4 do
  local a, b, c, d = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  ` + body + `
end
return out`)
}

// operand is an integer from low to high, mostly at a corner or of a random magnitude.
func operand(r *rand.Rand, low, high int64) int64 {
	var n int64
	switch r.IntN(4) {
	case 0:
		n = pick[int64](r, low, low+1, high, high-1, 1e15, 1e15-1, 1e15+1, 315_360_000_000_000, 1<<26, 1<<26+1, 1<<32, 1<<52, 1_000_000, 3, 7)
	case 1:
		n = low + r.Int64N(high-low+1)
	default:
		n = r.Int64N(2) + r.Int64N(1<<r.IntN(53)+1)
	}
	return min(high, max(low, n))
}

func evaluate(t *testing.T, s *store, script *redis.Script, operands [][4]int64, results int) [][]int64 {
	t.Helper()
	args := make([]any, 0, 4*len(operands))
	for _, o := range operands {
		for _, n := range o {
			args = append(args, n)
		}
	}
	out, err := script.Run(s.ctx, s.rdb, nil, args...).Int64Slice()
	if err != nil || len(out) != results*len(operands) {
		t.Fatal(len(out), err)
	}
	var all [][]int64
	for i := 0; i < len(out); i += results {
		all = append(all, out[i:i+results])
	}
	return all
}

func TestArithmeticIsExact(t *testing.T) {
	r := newRand(seed(t))
	s := open(t)
	const n = 4000
	b := func(x int64) *big.Int { return big.NewInt(x) }
	var ops [][4]int64
	for range n {
		// The third operand is a period, a rate or a count: 7 times it stays below 2^53.
		ops = append(ops, [4]int64{operand(r, 0, maxInteger), operand(r, 0, maxInteger), operand(r, 1, 1_280_000_000_000_000), 0})
	}
	for i, got := range evaluate(t, s, helpers(t, "local q, r = muldiv(a, b, c); out[#out + 1] = q; out[#out + 1] = r"), ops, 2) {
		o := ops[i]
		q, rem := new(big.Int).QuoRem(new(big.Int).Mul(b(o[0]), b(o[1])), b(o[2]), new(big.Int))
		want := []int64{maxInteger, 0}
		if q.Cmp(b(maxInteger)) <= 0 {
			want = []int64{q.Int64(), rem.Int64()}
		}
		// A quotient of exactly 2^53-1 may count as too large: then its remainder is not told.
		if got[0] != want[0] || got[1] != want[1] && got[0] != maxInteger {
			t.Fatalf("muldiv(%d, %d, %d) = %v, want %v", o[0], o[1], o[2], got, want)
		}
	}
	for i, got := range evaluate(t, s, helpers(t, "out[#out + 1] = idiv(a, c)"), ops, 1) {
		if o := ops[i]; got[0] != o[0]/o[2] {
			t.Fatalf("idiv(%d, %d) = %d", o[0], o[2], got[0])
		}
	}
	ops = nil
	for range n {
		period := operand(r, 1, 315_360_000_000_000)
		ops = append(ops, [4]int64{operand(r, 0, 1e15), operand(r, 1, 1e15), period, r.Int64N(period)})
	}
	for i, got := range evaluate(t, s, helpers(t, "out[#out + 1] = time_for(a, b, c, d)"), ops, 1) {
		need, rate, period, fraction := ops[i][0], ops[i][1], ops[i][2], ops[i][3]
		// The least t with floor((t*rate + fraction) / period) >= need.
		x := new(big.Int).Sub(new(big.Int).Mul(b(need), b(period)), b(fraction))
		x.Add(x, b(rate-1))
		want := new(big.Int).Div(x, b(rate)).Int64()
		if need == 0 {
			want = 0
		}
		if x.Sign() > 0 && new(big.Int).Quo(x, b(rate)).Cmp(b(maxInteger)) >= 0 {
			want = maxInteger
		}
		if d := got[0] - want; d != 0 && !(got[0] == maxInteger && want > maxInteger-2) {
			t.Fatalf("time_for(%d, %d, %d, %d) = %d, want %d", need, rate, period, fraction, got[0], want)
		}
	}
	ops = nil
	for range n {
		fleet := operand(r, 0, 1_000_000)
		ops = append(ops, [4]int64{operand(r, 0, 1e15), operand(r, 0, fleet+2), fleet, 0})
	}
	for i, got := range evaluate(t, s, helpers(t, "out[#out + 1] = reserved(a, b, c)"), ops, 1) {
		if o := ops[i]; got[0] != tier.Reserved(o[0], o[1], o[2]) {
			t.Fatalf("reserved(%d, %d, %d) = %d, want %d", o[0], o[1], o[2], got[0], tier.Reserved(o[0], o[1], o[2]))
		}
	}
}

// TestNoDrift: however a stretch of time is cut into calls, the bucket makes floor(rate * time) tokens in it.
func TestNoDrift(t *testing.T) {
	s0 := seed(t)
	for i, l := range []struct{ rate, period, burst int64 }{{7, 1_000_000, 1e15}, {1e15 - 1, 315_360_000_000_000, 1e15}, {999_999_999_999_989, 7_000_003, 1e15}, {3, 11, 1e15}, {1, 1_000_003, 50}} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r := newRand(s0 + uint64(i))
			p := openPair(t)
			a := tier.Ask{Key: p.keyName(0), Limit: micro(tier.TokenBucket, l.rate, l.period, l.burst), SlotUS: 150_000}
			drain := func() int64 {
				g := p.one(a)
				b := a
				b.Need = []tier.Cost{{N: max(1, g.Remaining), Count: 1}}
				if g.Remaining == 0 {
					return 0
				}
				return p.one(b).Served
			}
			drain()
			began, total := p.now, int64(0)
			for range 150 {
				p.at(p.now + operand(r, 0, min(5_000_000, 40*l.period)))
				total += drain()
			}
			want := new(big.Int).Mul(big.NewInt(p.now-began), big.NewInt(l.rate))
			want.Quo(want, big.NewInt(l.period))
			if l.burst > 50 && want.Cmp(big.NewInt(total)) != 0 {
				t.Errorf("%d tokens in %d µs, want %s", total, p.now-began, want)
			}
			if want.Cmp(big.NewInt(total)) < 0 {
				t.Errorf("%d tokens in %d µs, more than %s", total, p.now-began, want)
			}
		})
	}
}
