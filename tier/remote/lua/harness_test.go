package lua_test

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit/internal/model"
	"github.com/tierlimit/tierlimit/internal/redistest"
	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of the random tests; 0: another each time")
	stepsFlag = flag.Int("steps", 1500, "steps of each random test against the model")
)

// seed returns the seed of a random test and has it logged with a failure.
func seed(t testing.TB) uint64 {
	s := *seedFlag
	if s == 0 {
		s = uint64(time.Now().UnixNano()) % 1_000_000_007
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("run again with -seed=%d", s)
		}
	})
	return s
}

func newRand(s uint64) *rand.Rand { return rand.New(rand.NewPCG(s, 1)) }

// One server for all tests of the package; each test uses keys of its own.
var server struct {
	sync.Once
	p   *redistest.Process
	err error
}

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if server.p != nil {
		if err := server.p.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// A store is a real Redis whose scripts read the time from a key instead of from the clock.
type store struct {
	t   testing.TB
	rdb *redis.Client
	ctx context.Context
	now int64
}

func open(t testing.TB) *store {
	t.Helper()
	server.Do(func() { server.p, server.err = redistest.Open() })
	if server.err != nil {
		t.Fatal(server.err)
	}
	rdb := server.p.Client(func(o *redis.Options) {
		o.ReadTimeout, o.WriteTimeout, o.DialTimeout = 30*time.Second, 30*time.Second, 30*time.Second
	})
	return &store{t: t, rdb: rdb, ctx: context.Background(), now: 1_700_000_000_000_000}
}

const (
	readsTime = "local clock = redis.call('TIME')\nlocal now = clock[1] * 1000000 + clock[2]\n"
	readsKey  = "local now = tonumber(redis.call('GET', '%s'))\n"
)

// timed replaces the reading of the clock, of which there must be exactly one, by that of a key.
func timed(t testing.TB, source, clock string) string {
	t.Helper()
	if strings.Count(source, readsTime) != 1 || strings.Count(source, "'TIME'") != 1 {
		t.Fatal("a script reads the time otherwise than the tests know, or more than once")
	}
	return strings.Replace(source, readsTime, fmt.Sprintf(readsKey, clock), 1)
}

// clockKey holds the injected time; tests that run side by side have one each.
func (s *store) clockKey() string { return "now:" + s.t.Name() }

func (s *store) script(source string) *redis.Script {
	return redis.NewScript(timed(s.t, source, s.clockKey()))
}

// raw runs a script at s.now.
func (s *store) raw(script *redis.Script, keys []string, args ...any) (any, error) {
	s.t.Helper()
	if err := s.rdb.Set(s.ctx, s.clockKey(), s.now, time.Hour).Err(); err != nil {
		s.t.Fatal(err)
	}
	return script.Run(s.ctx, s.rdb, keys, args...).Result()
}

// run runs the script of the membership at s.now and returns its flat answer.
func (s *store) run(script *redis.Script, keys []string, args ...any) ([]int64, error) {
	s.t.Helper()
	answer, err := s.raw(script, keys, args...)
	if err != nil {
		return nil, err
	}
	all, ok := answer.([]any)
	if !ok {
		return nil, fmt.Errorf("an answer of type %T", answer)
	}
	out := make([]int64, len(all))
	for i, v := range all {
		n, ok := v.(int64)
		if !ok {
			return nil, fmt.Errorf("element %d is %T", i, v)
		}
		out[i] = n
	}
	return out, nil
}

// keyName makes a key of the test's own.
func (s *store) keyName(i int) string {
	return fmt.Sprintf("t1:{7}%s:%d", strings.ToLower(strings.ReplaceAll(s.t.Name(), "/", ".")), i)
}

// A wire is a sequence of the protocol's numbers.
type wire []byte

// add appends numbers of 7 bytes.
func (w wire) add(numbers ...int64) wire {
	for _, n := range numbers {
		w = w.narrow(lua.NumberBytes, n)
	}
	return w
}

// narrow appends a number of so many bytes.
func (w wire) narrow(bytes int, n int64) wire {
	return append(w, binary.LittleEndian.AppendUint64(nil, uint64(n))[:bytes]...)
}

func (w wire) number(i int) int64 {
	return int64(binary.LittleEndian.Uint64(append(slices.Clip(w[i*lua.NumberBytes:(i+1)*lua.NumberBytes]), 0)))
}

// take takes a number of so many bytes; -1 is bytes of ones.
func (w *wire) take(t testing.TB, bytes int) int64 {
	t.Helper()
	if len(*w) < bytes {
		t.Fatal("an answer that ends too soon")
	}
	n := int64(binary.LittleEndian.Uint64(append(slices.Clip((*w)[:bytes]), make([]byte, 8-bytes)...)))
	*w = (*w)[bytes:]
	if n == 1<<(8*lua.NumberBytes)-1 {
		return -1
	}
	return n
}

// policyOf is what of an ask many may share.
func policyOf(a *tier.Ask) [lua.PolicyNumbers]int64 {
	return [...]int64{a.Limit.Rate, a.Limit.PeriodUS(), a.Limit.Capacity(), int64(max(1, a.Limit.SubWindows)), a.SlotUS}
}

// arguments encodes an exchange as the protocol says, apart from package remote. Where that sends a report only if there is something
// to report, this sends one with every other key anyway.
func arguments(fence int64, d tier.Darkness, asks []tier.Ask) (keys []string, message wire) {
	message = message.add(fence, d.Missing, d.Most, d.Fleet, d.From, d.Until, d.Episode, d.Returned, d.Least)
	var policies [][lua.PolicyNumbers]int64
	for i := range asks {
		if p := policyOf(&asks[i]); !slices.Contains(policies, p) {
			policies = append(policies, p)
		}
	}
	message = message.narrow(1, int64(len(policies)))
	for _, p := range policies {
		message = message.add(p[:]...)
	}
	for i := range asks {
		a := &asks[i]
		keys = append(keys, a.Key)
		back, refund := int64(0), a.Refund
		if a.Back {
			back = 1
		}
		if refund == tier.RefundAll {
			refund = maxInteger
		}
		report := wire{}.add(a.Own, a.Lease, a.Spent, a.Carry, a.Return, refund).narrow(1, back).narrow(2, int64(len(a.Spends)))
		reports := int64(1)
		if i%2 == 0 && !slices.ContainsFunc(report, func(b byte) bool { return b != 0 }) {
			report, reports = nil, 0
		}
		if a.Whole {
			reports += 2
		}
		message = message.narrow(1, int64(slices.Index(policies, policyOf(a))+1)).narrow(1, reports).narrow(2, int64(len(a.Need)))
		message = append(message.add(a.Born, a.Version, a.Seen, a.Want), report...)
		for _, s := range a.Spends {
			message = message.add(s.AgeUS, s.Count)
		}
		for _, c := range a.Need {
			message = message.add(c.N, c.Count)
		}
	}
	return keys, message
}

// exchange runs an exchange on the real thing.
func (s *store) exchange(alg tier.Algorithm, script *redis.Script, fence int64, d tier.Darkness, asks ...tier.Ask) (late bool, grants []tier.Grant) {
	s.t.Helper()
	keys, message := arguments(fence, d, asks)
	out, err := s.raw(script, keys, []byte(message))
	if err != nil {
		s.t.Fatalf("algorithm %d: %v\n%+v", alg, err, asks)
	}
	answer, ok := out.(string)
	if !ok {
		s.t.Fatalf("an answer of type %T", out)
	}
	in := wire(answer)
	next := func() int64 { s.t.Helper(); return in.take(s.t, lua.NumberBytes) }
	if now := next(); now != s.now {
		s.t.Fatalf("answered at %d, at %d", now, s.now)
	}
	if late := in.take(s.t, 1); late == 1 {
		if len(in) > 0 {
			s.t.Fatalf("a late answer of %d bytes", len(answer))
		}
		return true, nil
	}
	for i := range asks {
		flags := in.take(s.t, 1)
		g := tier.Grant{
			Lost: flags&1 != 0, Credited: flags&2 != 0,
			Served: next(), Slot: next(), LifeUS: next(), Remaining: next(), RetryUS: next(), ResetUS: next(), Activity: next(),
			Version: next(), TTLUS: next(), Active: 1, Born: asks[i].Born,
		}
		if flags&4 != 0 {
			g.Lease, g.Out, g.Active, g.Born, g.DelayUS = next(), next(), next(), next(), next()
		}
		grants = append(grants, g)
	}
	if len(in) > 0 {
		s.t.Fatalf("%d bytes too many in an answer of %d", len(in), len(answer))
	}
	return false, grants
}

// A pair is the real thing and the model, to which everything is done alike.
type pair struct {
	*store
	m       *model.Store
	scripts [tier.Algorithms + 1]*redis.Script
	known   map[string]bool
}

func openPair(t testing.TB) *pair {
	p := &pair{store: open(t), m: model.New(model.Variant{}), known: map[string]bool{}}
	for a := tier.Algorithm(1); int(a) <= tier.Algorithms; a++ {
		p.scripts[a] = p.script(lua.Source(a))
	}
	return p
}

// at moves both clocks. Keys whose time is over by the injected clock are deleted: Redis's own clock stands still beside it.
func (p *pair) at(now int64) {
	p.t.Helper()
	p.now = now
	for k := range p.known {
		if p.m.TTL(now, k) == 0 {
			p.forget(k)
		}
	}
}

// forget loses a key.
func (p *pair) forget(key string) {
	p.t.Helper()
	if err := p.rdb.Del(p.ctx, key).Err(); err != nil {
		p.t.Fatal(err)
	}
	p.m.Delete(key)
	delete(p.known, key)
}

// exchange does one exchange on both and demands that they agree.
func (p *pair) exchange(fence int64, d tier.Darkness, asks ...tier.Ask) (late bool, grants []tier.Grant) {
	p.t.Helper()
	alg := asks[0].Limit.Algorithm
	late, grants = p.store.exchange(alg, p.scripts[alg], fence, d, asks...)
	lateModel, want := p.m.Exchange(p.now, alg, fence, d, asks)
	if late != lateModel || len(grants) != len(want) {
		p.t.Fatalf("late: script %v, model %v", late, lateModel)
	}
	for i := range grants {
		p.known[asks[i].Key] = true
		if grants[i] != want[i] {
			p.t.Fatalf("at %d they differ\nask    %+v\ndark   %+v\nscript %+v\nmodel  %+v", p.now, asks[i], d, grants[i], want[i])
		}
		p.checkTTL(asks[i].Key, grants[i].TTLUS)
	}
	return late, grants
}

// one is exchange for one ask, without fence and darkness.
func (p *pair) one(a tier.Ask) tier.Grant {
	p.t.Helper()
	_, g := p.exchange(0, tier.Darkness{}, a)
	return g[0]
}

func (p *pair) checkTTL(key string, ttlUS int64) {
	p.t.Helper()
	px, err := p.rdb.PTTL(p.ctx, key).Result()
	if err != nil {
		p.t.Fatal(err)
	}
	ms := int64(px / time.Millisecond)
	if px <= 0 || ms > (ttlUS+999)/1000 || ms < ttlUS/1000-900 {
		p.t.Fatalf("%s expires in %d ms, said %d µs", key, ms, ttlUS)
	}
}

// isFault reports whether err is a refusal of ours.
func isFault(err error) bool {
	var e redis.Error
	return errors.As(err, &e) && strings.HasPrefix(e.Error(), "ERR tierlimit ")
}
