package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

const (
	maxInstances = 64
	maxRate      = 1e6
	defaultRate  = 5000
	maxReplay    = 24 * time.Hour

	remoteTimeout = 500 * time.Millisecond
	shownFaults   = 3

	longReplay   = 30 * time.Second // what takes as long is announced
	fastReplay   = 50_000           // lines a second beyond which one may doubt that they can be sent
	fastEmbedded = 2_500
)

type replayCmd struct {
	File      string   `arg:"" help:"The log, Common or Combined Log Format; - is the standard input."`
	Key       string   `default:"ip" enum:"ip,path,ip+path" help:"What is limited: ${enum}."`
	Limit     string   `default:"10/s" help:"The limit of each key: \"RATE/PERIOD [ALGORITHM] [burst N]\"."`
	Instances int      `default:"4" help:"Size of the fleet; lines go to the instances in turn."`
	Redis     string   `placeholder:"URL" help:"A Redis to use: redis://host:port. Without it, one is started inside this process."`
	Rate      *float64 `placeholder:"R" help:"Send R lines a second, in their order (default: 5000)."`
	Speed     *float64 `placeholder:"S" help:"Keep the log's spacing instead, S times faster; lines are sorted by time first, stably."`
	Top       int      `default:"10" help:"How many of the keys that were limited are shown."`
}

// Help is what replay -h says besides the flags.
func (replayCmd) Help() string {
	return `Puts each line of an access log through the fleet as one check, and shows who was limited. The limit counts wall time: at -rate 5000 ten thousand lines pass in two seconds, be they of an hour or of a week, so clients look that much busier than they were; the report says by how much. With -speed 60 a limit of 10/s is what 10/min was to the log.

Malformed lines are counted and shown; they never end the run. Keys in Redis have a prefix of their own and expire by themselves.

Examples:

  tierlimit replay access.log
  tierlimit replay access.log -redis redis://127.0.0.1:6379 -limit "20/s burst 50"
  tierlimit replay access.log -key ip+path -limit "5/s sliding-window" -speed 60
  zcat access.log.*.gz | tierlimit replay - -key path -rate 20000`
}

func (c *replayCmd) check() (tierlimit.Limit, error) {
	limit, err := parseLimit(c.Limit)
	if err != nil {
		return limit, err
	}
	switch {
	case c.Rate != nil && c.Speed != nil:
		return limit, badInput("-rate and -speed exclude each other")
	case c.Rate != nil && !(*c.Rate > 0 && *c.Rate <= maxRate):
		return limit, badInput("-rate: %s, want more than 0, at most %d lines a second", number(*c.Rate), int(maxRate))
	case c.Speed != nil && (!(*c.Speed > 0) || math.IsInf(*c.Speed, 0)):
		return limit, badInput("-speed: %s, want a number above 0", number(*c.Speed))
	case c.Instances < 1 || c.Instances > maxInstances:
		return limit, badInput("-instances: %d, want 1 to %d", c.Instances, maxInstances)
	case c.Top < 0:
		return limit, badInput("-top: %d, want 0 or more", c.Top)
	}
	return limit, nil
}

// schedule says when each line is sent: it returns the rate (for a paced log it is not looked at) and how long it takes.
func (c *replayCmd) schedule(log *parsedLog) (rate float64, takes time.Duration, err error) {
	if c.Speed != nil {
		if err := log.pace(*c.Speed); err != nil {
			return 0, 0, err
		}
		return defaultRate, log.checks[len(log.checks)-1].At, nil
	}
	rate = defaultRate
	if c.Rate != nil {
		rate = *c.Rate
	}
	s := float64(len(log.checks)) / rate
	if s > maxReplay.Seconds() {
		return 0, 0, badInput("-rate: %d lines at %s a second take %.0f hours, want at most %s", len(log.checks), number(rate), s/3600, about(maxReplay))
	}
	return rate, time.Duration(s * 1e9), nil
}

// Run is the verb.
func (c *replayCmd) Run(ctx context.Context, s streams) error {
	limit, err := c.check()
	if err != nil {
		return err
	}
	log, err := c.load(ctx, s.in)
	if err != nil {
		return err
	}
	rate, takes, err := c.schedule(log)
	if err != nil {
		return err
	}
	st, err := openStore(ctx, c.Redis)
	if err != nil {
		return err
	}
	defer st.close()
	r := &replay{c, limit, log, st, rate, takes, newLedger(log.keys, remoteTimeout)}
	r.headline(s.out, time.Now())

	before, err := st.skew(ctx)
	if err != nil {
		return err
	}
	result, err := fleet.Run(ctx, fleet.Config{
		Instances: c.Instances,
		Client:    func(int) redis.UniversalClient { return st.client("") },
		Name:      "replay",
		Limit:     limit,
		Options: []tierlimit.Option{
			tierlimit.WithPrefix(runPrefix("replay")),
			// The default of 50ms is for a Redis that does not share its processors with a fleet and its load. A run that
			// falls back would say more about this machine than about the log.
			tierlimit.WithRemoteTimeout(remoteTimeout),
		},
		Load:        fleet.FromLog(log.checks, c.Speed != nil),
		Rate:        rate,
		AwaitOnline: joinWithin,
		// The log ends the run; checks that are late then are still made.
		Duration: takes + time.Hour,
		Workers:  16,
		Every:    100 * time.Millisecond,
		Observe: func(t fleet.Tick) {
			s.err.progress(lineBar(t.Total.Checks, int64(len(log.checks)), t.At, s.err.columns-1))
		},
		Each: r.book.record,
	})
	s.err.wipe()
	if err != nil {
		return err
	}
	after, err := st.skew(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	r.report(ctx, s.out, result)
	return judge(ctx, s.out, limit, result, before.join(after).widen(result.History))
}

// bare is err without the file's name, which the caller says.
func bare(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	return err
}

// A replay is one run as it is shown.
type replay struct {
	cmd   *replayCmd
	limit tierlimit.Limit
	log   *parsedLog
	st    *store
	rate  float64       // lines a second; not looked at with -speed
	takes time.Duration // as planned
	book  *ledger
}

// headline says what is about to run, by which clock, and for how long from now on.
func (r *replay) headline(s *screen, now time.Time) {
	c, log := r.cmd, r.log
	name := "standard input"
	if c.File != "-" {
		name = printable(filepath.Base(c.File))
	}
	s.linef("%s", s.paint(bold, cut(fmt.Sprintf("replay of %s: %d lines, %d keys (%s), limit %v each", name, len(log.checks), len(log.keys), c.Key, r.limit), width)))
	s.linef("%d instances, %s", c.Instances, r.st.name)
	how := number(r.rate) + " lines a second, in the log's order"
	if c.Speed != nil {
		how = "speed " + number(*c.Speed) + ", sorted by time"
	}
	s.linef("the limit counts wall time: the log's %s in %s (%s)", about(log.span()), about(r.takes), how)
	for _, note := range r.warnings(now) {
		s.linef("%s", s.paint(yellow, note))
	}
	if log.malformed > 0 {
		s.linef("%s", s.paint(yellow, fmt.Sprintf("%d malformed lines are left out:", log.malformed)))
		for _, fault := range log.faults {
			s.linef("  %s", fault)
		}
		if more := log.malformed - len(log.faults); more > 0 {
			s.linef("  and %d more", more)
		}
	}
}

// warnings are what one would rather know before the run than after it.
func (r *replay) warnings(now time.Time) (notes []string) {
	if r.takes >= longReplay {
		format, end := "15:04", now.Add(r.takes)
		if end.YearDay() != now.YearDay() {
			format = "Mon 15:04"
		}
		notes = append(notes, fmt.Sprintf("this takes %s, until %s; Ctrl-C ends it with a report of what was sent", about(r.takes), end.Format(format)))
	}
	most, who := float64(fastReplay), "this machine"
	if r.st.embedded != nil {
		most, who = fastEmbedded, "the embedded Redis"
	}
	rate := r.rate
	if r.cmd.Speed != nil { // what comes at once is made up for within a tenth of a second
		rate = float64(len(r.log.checks)) / max(r.takes, 100*time.Millisecond).Seconds()
	}
	if rate > most {
		notes = append(notes, fmt.Sprintf("%.0f lines a second may be more than %s can do; the report says what it came to", rate, who))
	}
	return notes
}

// report prints what came of the lines that were sent, and of whom.
func (r *replay) report(ctx context.Context, s *screen, res *fleet.Result) {
	note := func(format string, args ...any) {
		s.linef("%s", s.paint(yellow, cut(fmt.Sprintf(format, args...), width)))
	}
	took, sum := res.Elapsed(), r.book.census(r.cmd.Top)
	s.linef("")
	unanswered := ""
	if res.Errors > 0 {
		unanswered = fmt.Sprintf(", unanswered %d", res.Errors)
	}
	s.linef("sent %d in %s: admitted %d, denied %d (%.1f %%)%s", res.Checks, seconds(took), res.Admitted, res.Denied, 100*share(res.Denied, res.Checks), unanswered)
	s.linef("without asking Redis %.1f %%; Redis calls %d, one for %.1f checks; Allow p50 %s, p99 %s",
		100*share(unasked(res.Counts, r.book.timedOut.Load()), res.Checks), res.Exchanges+res.Heartbeats, float64(res.Checks)/float64(max(1, res.Exchanges+res.Heartbeats)),
		short(res.Latency.Percentile(50)), short(res.Latency.Percentile(99)))
	if n := res.Fallback(); n > 0 {
		note("without Redis, which did not answer in time: admitted %d, denied %d; denied by the limit: %d", n-sum.away, sum.away, sum.byLimit)
	}
	missing := int64(len(r.log.checks)) - res.Checks
	switch {
	case missing > 0 && ctx.Err() != nil:
		note("interrupted: %d lines were not sent", missing)
	case missing > 0:
		note("%d lines were not sent: an instance was tens of thousands of them behind", missing)
	}
	if r.late(res, ctx.Err() != nil) {
		cause := "Redis or this machine"
		if r.st.embedded != nil {
			cause = "the embedded Redis, try -redis URL"
		}
		note("slower than planned: %.0f lines/s; the likely cause is %s", float64(res.Checks)/took.Seconds(), cause)
	}
	for _, err := range res.CloseErrors {
		note("an instance was not closed cleanly: %s", printable(oneLine(err.Error())))
	}
	if ctx.Err() != nil { // as long as the whole log would have taken
		took = r.takes
		if r.cmd.Speed == nil {
			took = time.Duration(float64(res.Elapsed()) * float64(len(r.log.checks)) / float64(max(1, res.Checks)))
		}
	}
	r.table(s, sum, took)
	if sum.awayOnly > 0 {
		note("%d keys were denied lines only while Redis did not answer, and none by the limit", sum.awayOnly)
	}
}

// late says whether the lines came noticeably later than planned. Of an interrupted run with -speed that is not known.
func (r *replay) late(res *fleet.Result, interrupted bool) bool {
	const spare = 100 * time.Millisecond
	switch took := res.Elapsed(); {
	case !interrupted:
		return took > r.takes+r.takes/10+spare
	case r.cmd.Speed == nil:
		return float64(res.Checks) < 0.9*r.rate*(took-spare).Seconds()
	}
	return false
}

// table prints the keys that were limited, in a run that took so long for the whole log.
func (r *replay) table(s *screen, sum census, took time.Duration) {
	if sum.limited == 0 {
		s.linef("no key was limited")
		return
	}
	s.linef("")
	if note := pace(r.log.span(), took); note != "" {
		s.linef("%s", s.paint(yellow, note))
	}
	s.linef("%d of %d keys were limited; the most:", sum.limited, len(r.log.keys))
	// Without Redis is a column only where there is something in it.
	away, keyWidth := func(string) string { return "" }, width-42
	if sum.away > 0 {
		away, keyWidth = func(cell string) string { return fmt.Sprintf("%10s", cell) }, width-52
	}
	s.linef("%s", s.paint(bold, fmt.Sprintf("%10s%10s%10s%10s%s  %s", "sent", "admitted", "limited", "limited %", away("no Redis"), "key")))
	for _, k := range sum.most {
		s.linef("%10d%10d%10d%10.1f%s  %s", k.sent, k.admitted, k.limited, 100*share(k.limited, k.sent), away(strconv.FormatInt(k.away, 10)), cut(printable(k.key), keyWidth))
	}
	s.linef("")
}

// pace says how much faster or slower than in the log the lines came, "" if they hardly did.
func pace(span, took time.Duration) string {
	factor, how := span.Seconds()/max(took.Seconds(), 1e-3), "faster"
	if span <= 0 { // all in one second of the log
		return ""
	}
	if factor < 1 {
		factor, how = 1/factor, "slower"
	}
	if factor < 1.5 {
		return ""
	}
	return fmt.Sprintf("the log's %s in %s, %s times %s: what is limited is limited at that pace", about(span), about(took), roughly(factor), how)
}

// load reads the log. It returns when ctx ends, even where the standard input says nothing: the read is then left to the end of
// the process.
func (c *replayCmd) load(ctx context.Context, stdin io.Reader) (*parsedLog, error) {
	type outcome struct {
		log *parsedLog
		err error
	}
	read := make(chan outcome, 1)
	go func() {
		log, err := c.read(untilDone{ctx, stdin})
		read <- outcome{log, err}
	}()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case o := <-read:
		return o.log, o.err
	}
}

// untilDone is a reader that fails once ctx is done.
type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u untilDone) Read(b []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.r.Read(b)
}

// read reads the file, or the standard input.
func (c *replayCmd) read(stdin untilDone) (*parsedLog, error) {
	in := stdin
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return nil, badInput("%s: %w", c.File, bare(err))
		}
		defer func() { _ = f.Close() }()
		in.r = f
	}
	r := bufio.NewReader(in)
	if magic, _ := r.Peek(2); string(magic) == "\x1f\x8b" {
		if c.File == "-" {
			return nil, badInput("-: this is gzip; unpack it on the way: zcat FILE | tierlimit replay -")
		}
		return nil, badInput("%s: this is gzip; unpack it on the way: zcat %[1]s | tierlimit replay -", c.File)
	}
	log, err := parseLog(r, c.Key)
	if err != nil {
		return nil, badInput("%s: %w", c.File, bare(err))
	}
	if len(log.checks) == 0 {
		why := "it is empty"
		if len(log.faults) > 0 {
			why = "the first: " + log.faults[0]
		}
		return nil, badInput("%s: no line is in Common or Combined Log Format (%s)", c.File, strings.TrimSpace(why))
	}
	return log, nil
}
