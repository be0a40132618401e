package remote

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tierlimit/tierlimit/tier"
)

func TestEncodeAsks(t *testing.T) {
	asks := []tier.Ask{
		{
			Key:    "tl:1:{3}api:a",
			Limit:  tier.Limit{Algorithm: tier.SlidingLog, Rate: 100, Period: time.Second, Burst: 100},
			SlotUS: 150_000, Born: 11, Version: 12, Own: 13, Back: true,
			Lease: 14, Spent: 9, Spends: []tier.Spend{{AgeUS: 2000, Count: 4}, {AgeUS: 0, Count: 5}}, Carry: 15, Return: 16, Refund: tier.RefundAll,
			Need: []tier.Cost{{N: 1, Count: 3}, {N: 7, Count: 1}}, Want: 17, Seen: 18,
		},
		{
			Key:   "tl:1:{3}api:b",
			Limit: tier.Limit{Algorithm: tier.SlidingLog, Rate: 1e15, Period: 24 * time.Hour, Burst: 5, SubWindows: 10}, SlotUS: 150_000, Spent: 2,
		},
	}
	dark := tier.Darkness{Missing: 1, Most: 2, Fleet: 3, From: 4, Until: 5, Episode: 6, Returned: 7, Least: 8}
	got, err := encodeAsks(99, dark, asks)
	ok(t, err)
	if fmt.Sprint(got[:len(got)-1]...) != fmt.Sprint(nil, nil, int64(2), "tl:1:{3}api:a", "tl:1:{3}api:b") || len(got) != cap(got) {
		t.Errorf("encoded %v in %d", got, cap(got))
	}
	want := slices.Concat(
		numbers7(99, 1, 2, 3, 4, 5, 6, 7, 8), []byte{2},
		numbers7(100, 1e6, 100, 1, 150_000), numbers7(1e15, 86_400_000_000, 1e15, 10, 150_000),
		[]byte{1, 1, 2, 0}, numbers7(11, 12, 18, 17), numbers7(13, 14, 9, 15, 16, maxInteger), []byte{1, 2, 0}, numbers7(2000, 4, 0, 5), numbers7(1, 3, 7, 1),
		[]byte{2, 1, 0, 0}, numbers7(0, 0, 0, 0), numbers7(0, 0, 2, 0, 0, 0), []byte{0, 0, 0})
	if text := got[len(got)-1].([]byte); !bytes.Equal(text, want) {
		t.Errorf("encoded % x\nwant    % x", text, want)
	}
	// Of one policy, and one without anything to report. A bucket's capacity is its burst.
	for i := range asks {
		asks[i] = tier.Ask{Key: "k", Limit: tier.Limit{Algorithm: tier.TokenBucket, Rate: 7, Period: time.Second, Burst: 5}, SlotUS: 3, Want: 4}
	}
	asks[1].Back = true
	got, err = encodeAsks(0, tier.Darkness{}, asks)
	ok(t, err)
	want = slices.Concat(
		numbers7(0, 0, 0, 0, 0, 0, 0, 0, 0), []byte{1}, numbers7(7, 1e6, 5, 1, 3),
		[]byte{1, 0, 0, 0}, numbers7(0, 0, 0, 4),
		[]byte{1, 1, 0, 0}, numbers7(0, 0, 0, 4), numbers7(0, 0, 0, 0, 0, 0), []byte{1, 0, 0})
	if text := got[len(got)-1].([]byte); !bytes.Equal(text, want) {
		t.Errorf("encoded % x\nwant    % x", text, want)
	}
}

func TestEncodeAsksRefuses(t *testing.T) {
	for _, n := range []int64{-1, -2, math.MinInt64, maxInteger + 1, math.MaxInt64} {
		for what, set := range map[string]func(a *tier.Ask, d *tier.Darkness){
			"fence":   nil,
			"missing": func(_ *tier.Ask, d *tier.Darkness) { d.Missing = n },
			"least":   func(_ *tier.Ask, d *tier.Darkness) { d.Least = n },
			"rate":    func(a *tier.Ask, _ *tier.Darkness) { a.Limit.Rate = n },
			"own":     func(a *tier.Ask, _ *tier.Darkness) { a.Own = n },
			"refund":  func(a *tier.Ask, _ *tier.Darkness) { a.Refund = n - bit(n == tier.RefundAll) },
			"age":     func(a *tier.Ask, _ *tier.Darkness) { a.Spends = []tier.Spend{{AgeUS: n}} },
			"count":   func(a *tier.Ask, _ *tier.Darkness) { a.Need = []tier.Cost{{N: 1, Count: n}} },
		} {
			asks, fence := benchAsks(2), int64(0)
			var dark tier.Darkness
			if set == nil {
				fence = n
			} else {
				set(&asks[1], &dark)
			}
			if args, err := encodeAsks(fence, dark, asks); err == nil || !NotExecuted(err) || args != nil {
				t.Errorf("%s %d: %v, %v", what, n, args, err)
			}
		}
	}
	asks := benchAsks(1)
	asks[0].Refund = maxInteger // on the wire it means RefundAll
	if _, err := encodeAsks(0, tier.Darkness{}, asks); err == nil {
		t.Error("a refund that would be a reset")
	}
}

// numbers7 encodes numbers, apart from the code under test.
func numbers7(all ...int64) (text []byte) {
	for _, n := range all {
		text = append(text, binary.LittleEndian.AppendUint64(nil, uint64(n))[:numberBytes]...)
	}
	return text
}

// grantOf returns a whole grant whose number i, after the flags, is n; the others pass.
func grantOf(flags byte, i int, n int64) string {
	g := make([]int64, keyReply-1)
	for j := range g {
		g[j] = int64(j + 2)
	}
	g[9] = 3 // leased
	if i >= 0 {
		g[i] = n
	}
	if flags&flagWhole == 0 {
		g = g[:shortReply-1]
	}
	return string(flags) + string(numbers7(g...))
}

func replyOf(late byte, grants ...string) string {
	return string(numbers7(1700000000000000)) + string(late) + strings.Join(grants, "")
}

var oneAsk = []tier.Ask{{Born: 99, Want: 3, Need: []tier.Cost{{N: 1, Count: 2}}}}

func TestDecodeReply(t *testing.T) {
	got, err := decodeReply(replyOf(0, grantOf(flagWhole|flagCredited, 4, -1)), oneAsk)
	want := Reply{Now: 1700000000000000, Grants: []tier.Grant{{
		Credited: true, Served: 2, Slot: 3, LifeUS: 4, Remaining: 5, RetryUS: -1, ResetUS: 7, Activity: 8, Version: 9, TTLUS: 10,
		Lease: 3, Out: 12, Active: 13, Born: 14, DelayUS: 15,
	}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	got, err = decodeReply(replyOf(0, grantOf(flagLost, 8, maxInteger)), oneAsk)
	want.Grants[0] = tier.Grant{
		Lost: true, Served: 2, Slot: 3, LifeUS: 4, Remaining: 5, RetryUS: 6, ResetUS: 7, Activity: 8, Version: 9, TTLUS: maxInteger,
		Active: 1, Born: 99,
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	late, err := decodeReply(replyOf(1), oneAsk)
	if err != nil || !late.Late || late.Now != 1700000000000000 || late.Grants != nil {
		t.Errorf("late: %+v, %v", late, err)
	}
}

func TestDecodeReplyRefuses(t *testing.T) {
	short, whole := replyOf(0, grantOf(0, -1, 0)), replyOf(0, grantOf(flagWhole, -1, 0))
	bad := map[string]any{
		"nil":              nil,
		"text":             "OK",
		"integer":          int64(1),
		"array":            []any{int64(1), int64(1)},
		"bytes":            []byte(whole),
		"map":              map[any]any{int64(1): int64(0)},
		"no grants":        replyOf(0),
		"short for whole":  replyOf(0, grantOf(0, -1, 0)[:1]+"\x00"),
		"one long":         whole + string(numbers7(0)),
		"a byte long":      short + "\x00",
		"twice":            short + grantOf(0, -1, 0),
		"late with grants": replyOf(1, grantOf(0, -1, 0)),
		"late is 2":        replyOf(2, grantOf(0, -1, 0)),
		"late is 2, alone": replyOf(2),
		"now is negative":  string(numbers7(-1)) + short[numberBytes:],
		"unknown flag":     replyOf(0, grantOf(flagWhole|flagsEnd, -1, 0)),
		"negative flags":   replyOf(0, "\xff"+grantOf(flagWhole, -1, 0)[1:]),
	}
	for i := range short {
		bad[fmt.Sprintf("short, cut at %d", i)] = short[:i]
	}
	for i := range whole {
		bad[fmt.Sprintf("whole, cut at %d", i)] = whole[:i]
	}
	for i := range keyReply - 1 {
		for _, n := range []int64{-2, maxInteger + 1, 1 << 55} {
			bad[fmt.Sprintf("number %d is %d", i, n)] = replyOf(0, grantOf(flagWhole, i, n))
		}
		if i != 4 {
			bad[fmt.Sprintf("number %d is -1", i)] = replyOf(0, grantOf(flagWhole, i, -1))
		}
	}
	bad["served more than needed"] = replyOf(0, grantOf(0, 0, 3))
	bad["leased more than wanted"] = replyOf(0, grantOf(flagWhole, 9, 4))
	for name, answer := range bad {
		r, err := decodeReply(answer, oneAsk)
		if err == nil || len(r.Grants) > 0 {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
		if p, ok := errors.AsType[*ProtocolError](err); !ok || !p.Ours() || NotExecuted(err) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestNeeded(t *testing.T) {
	for _, c := range []struct {
		need []tier.Cost
		want int64
	}{
		{nil, 0},
		{[]tier.Cost{{N: 3, Count: 4}, {N: 1, Count: 1}}, 13},
		{[]tier.Cost{{N: -3, Count: 4}, {N: 0, Count: 1}, {N: 1, Count: -1}}, 0},
		{[]tier.Cost{{N: 1e15, Count: 1e15}}, math.MaxInt64},
		{[]tier.Cost{{N: math.MaxInt64, Count: 1}, {N: 1, Count: 1}}, math.MaxInt64},
	} {
		if got := needed(c.need); got != c.want {
			t.Errorf("%v: %d, want %d", c.need, got, c.want)
		}
	}
}

func viewOf(i int, v any) []any {
	all := make([]any, beatReply)
	for j := range all {
		all[j] = int64(100 + j)
	}
	all[1], all[3], all[4], all[12] = int64(0), int64(2), int64(1), int64(1)
	if i >= 0 {
		all[i] = v
	}
	return all
}

func TestDecodeView(t *testing.T) {
	got, err := decodeView(viewOf(-1, nil))
	want := View{
		Now: 100, N: 102, Rank: 2, Ready: true, WasMissing: true, Beats: 113, LostAt: 114, Change: 115,
		Darkness: tier.Darkness{Missing: 105, Most: 106, Fleet: 107, From: 108, Until: 109, Episode: 110, Returned: 111, Least: 116},
	}
	if err != nil || got != want {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	if v, err := decodeView(viewOf(3, int64(-1))); err != nil || v.Rank != -1 {
		t.Errorf("no member: %+v, %v", v, err)
	}
	for _, late := range [][]any{{int64(5), int64(1)}, viewOf(1, int64(1))} {
		if v, err := decodeView(late); err != nil || v != (View{Now: late[0].(int64), Late: true}) {
			t.Errorf("late: %+v, %v", v, err)
		}
	}
	bad := []any{nil, "OK", []any{}, viewOf(-1, nil)[:beatReply-1], append(viewOf(-1, nil), int64(0)), viewOf(3, int64(102)), viewOf(2, int64(math.MaxInt32+1))}
	for i := range beatReply {
		for _, v := range []any{nil, "1", 1.0, int64(-2), int64(maxInteger + 1)} {
			bad = append(bad, viewOf(i, v))
		}
	}
	for _, answer := range bad {
		if v, err := decodeView(answer); err == nil || v != (View{}) {
			t.Errorf("%v: %+v, %v", answer, v, err)
		}
	}
}

// answerOf makes an answer of any shape from bytes: a kind and eight bytes for each element.
func answerOf(data []byte) any {
	if len(data) > 0 && data[0] == 0xff {
		return string(data)
	}
	var all []any
	for len(data) >= 9 {
		n := int64(binary.BigEndian.Uint64(data[1:]))
		switch data[0] % 8 {
		case 0, 1, 2, 3:
			all = append(all, n)
		case 4:
			all = append(all, nil)
		case 5:
			all = append(all, fmt.Sprint(n))
		case 6:
			all = append(all, float64(n))
		case 7:
			all = append(all, []any{n})
		}
		data = data[9:]
	}
	return all
}

func bytesOf(answer []any) (data []byte) {
	for _, v := range answer {
		n, ok := v.(int64)
		kind := byte(0)
		if !ok {
			kind = 4
		}
		data = append(data, kind)
		data = binary.BigEndian.AppendUint64(data, uint64(n))
	}
	return data
}

// Whatever comes back, nothing panics and nothing is granted that was not asked for.
func FuzzDecodeReply(f *testing.F) {
	f.Add([]byte(replyOf(0, grantOf(0, -1, 0))), uint8(1), int64(3), int64(2))
	f.Add([]byte(replyOf(0, grantOf(flagWhole, 4, -1), grantOf(flagLost, 0, 1))), uint8(2), int64(3), int64(2))
	f.Add([]byte(replyOf(0, grantOf(flagCredited, 5, -1))), uint8(1), int64(3), int64(2))
	f.Add([]byte(replyOf(1)), uint8(1), int64(3), int64(2))
	f.Add(bytesOf(viewOf(-1, nil)), uint8(0), int64(0), int64(0))
	f.Add([]byte("\xff"), uint8(1), int64(1), int64(1))
	f.Fuzz(func(t *testing.T, data []byte, keys uint8, want, need int64) {
		asks := make([]tier.Ask, keys%(MaxKeys+1))
		for i := range asks {
			asks[i].Want, asks[i].Need = want, []tier.Cost{{N: need, Count: 1}}
		}
		r, err := decodeReply(string(data), asks)
		if err != nil {
			if !reflect.DeepEqual(r, Reply{}) {
				t.Errorf("%+v beside %v", r, err)
			}
		} else {
			if r.Now < 0 || r.Now > maxInteger || len(r.Grants) != len(asks) && !r.Late || r.Late && len(r.Grants) > 0 {
				t.Errorf("%d grants for %d keys, late %v, now %d", len(r.Grants), len(asks), r.Late, r.Now)
			}
			for _, g := range r.Grants {
				if g.Lease > max(0, want) || g.Served > max(0, need) || g.RetryUS < -1 {
					t.Errorf("want %d need %d: %+v", want, need, g)
				}
				for i, n := range []int64{
					g.Served, g.Lease, g.Slot, g.LifeUS, g.Remaining, g.RetryUS + 1, g.ResetUS, g.Out, g.Active, g.Activity, g.Born, g.Version, g.TTLUS, g.DelayUS,
				} {
					if n < 0 || n > maxInteger+1 {
						t.Errorf("number %d of %+v", i, g)
					}
				}
			}
		}
		v, err := decodeView(answerOf(data))
		if err != nil && v != (View{}) || v.N < 0 || v.Rank < -1 || v.Rank >= max(1, v.N) || v.Beats < 0 || v.Beats > maxInteger {
			t.Errorf("%+v, %v", v, err)
		}
	})
}

func benchAsks(n int) []tier.Ask {
	asks := make([]tier.Ask, n)
	for i := range asks {
		asks[i] = tier.Ask{
			Key:    fmt.Sprintf("tl:1:{3}api:user-%d", i),
			Limit:  tier.Limit{Algorithm: tier.TokenBucket, Rate: 1000, Period: time.Second, Burst: 2000},
			SlotUS: 150_000, Born: 1700000000000000, Version: 1234, Lease: 1700000000150000, Spent: 37, Carry: 5, Want: 40, Seen: 1700000000000000,
		}
	}
	return asks
}

func BenchmarkEncodeAsks(b *testing.B) {
	for _, n := range []int{1, MaxKeys} {
		asks := benchAsks(n)
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := encodeAsks(1700000000000000, tier.Darkness{}, asks); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkDecodeReply(b *testing.B) {
	asks := benchAsks(MaxKeys)
	answer := any(replyOf(0, slices.Repeat([]string{grantOf(flagWhole, 0, 0)}, len(asks))...))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := decodeReply(answer, asks); err != nil {
			b.Fatal(err)
		}
	}
}
