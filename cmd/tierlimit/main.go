// Command tierlimit shows the library at work: demo runs a fleet through an outage of Redis, replay puts a real access
// log through it. Both end with the verdict of a checker that shares no code with the limiter. bench measures what a check costs.
//
// Exit status: 0 when the limit was kept (bench: all was measured), 1 when it was broken, 2 for input that cannot be used, 3 when the run
// failed, 130 when it was interrupted.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	"github.com/redis/go-redis/v9"
)

const (
	exitOK          = 0
	exitBroken      = 1
	exitUsage       = 2
	exitFailed      = 3
	exitInterrupted = 130 // as a shell has it for Ctrl-C
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends it at once
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

type cli struct {
	Demo   demoCmd   `cmd:"" help:"Four instances under three times the limit; Redis is cut in the middle and comes back."`
	Replay replayCmd `cmd:"" help:"Put an access log through a fleet and see who is limited."`
	Bench  benchCmd  `cmd:"" help:"Measure what a check costs with your Redis and machine, and what a bare call does."`
}

const description = `Exact rate limits at in-process speed, to watch.

Flags take one dash or two: -redis and --redis are the same.
"tierlimit VERB -h" explains a verb with examples.

Exit status: 0 the limit was kept (bench: all was measured), 1 it was broken,
2 bad input, 3 the run failed, 130 it was interrupted.`

// streams are where a command reads and writes.
type streams struct {
	in  io.Reader
	out *screen
	err *screen
}

// usageError is input that cannot be used: exit status 2, nothing was run.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func badInput(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errBroken says that the checker found more admitted than the limit allows. The report has said so already.
var errBroken = errors.New("the limit was broken")

// run is the whole command but for the process around it.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) (code int) {
	redis.SetLogger(silent{}) // the cut is meant; what comes of it is on the screen
	type exit int             // kong's -h leaves through Exit
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			code = int(r)
		default:
			panic(r)
		}
	}()
	var c cli
	parser, err := kong.New(&c,
		kong.Name("tierlimit"),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: width, NoAppDescFormat: true}),
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { panic(exit(code)) }),
	)
	if err != nil {
		panic(err) // a fault in the struct tags above
	}
	s := streams{stdin, newScreen(stdout), newScreen(stderr)}
	if len(args) == 0 {
		args = []string{"-h"}
	}
	command, err := parser.Parse(doubleDash(args))
	if err != nil {
		err = usageError{plain(err)}
	} else {
		command.BindTo(ctx, (*context.Context)(nil))
		err = command.Run(s)
	}
	var usage usageError
	switch {
	case errors.Is(err, errBroken):
		return exitBroken
	case ctx.Err() != nil: // a verdict, if there is one, is of a part
		code, err = exitInterrupted, errors.New("interrupted")
	case err == nil:
		return exitOK
	case errors.As(err, &usage):
		code = exitUsage
	default:
		code = exitFailed
	}
	fmt.Fprintf(stderr, "tierlimit: %s\n", oneLine(err.Error()))
	return code
}

// doubleDash lets long flags go with one dash too, as Go's own tools take them, and be followed by a negative number, so that it is the
// verb that says what it wants.
func doubleDash(args []string) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			return append(out, args[i:]...)
		}
		if name, _, _ := strings.Cut(a, "="); len(name) > 2 && a[0] == '-' && a[1] >= 'a' && a[1] <= 'z' {
			a = "-" + a
		}
		if strings.HasPrefix(a, "--") && !strings.Contains(a, "=") && i+1 < len(args) && negative(args[i+1]) {
			i++
			a += "=" + args[i]
		}
		out = append(out, a)
	}
	return out
}

// negative says whether an argument begins as a negative number does. No flag does.
func negative(arg string) bool {
	return len(arg) > 1 && arg[0] == '-' && (arg[1] == '.' || arg[1] >= '0' && arg[1] <= '9')
}

// inPlainWords is what kong says, and what a user can do something with.
var inPlainWords = []struct {
	kong *regexp.Regexp
	says string
}{
	{regexp.MustCompile(`^--(\S+): expected \S+ value but got "EOL".*$`), `-$1 needs a value`},
	{regexp.MustCompile(`^--(\S+): expected \S+ value but got "(.*?)" \(.*$`), `-$1 needs a value; what follows is $2`},
	{regexp.MustCompile(`^--(\S+): expected a float but got (".*") \(string\)$`), `-$1: $2, want a number`},
	{regexp.MustCompile(`^--(\S+): expected a valid \d+ bit int but got (".*")$`), `-$1: $2, want a whole number of 64 bits`},
	{regexp.MustCompile(`^--(\S+): expected duration but got ("[^"]*").*$`), `-$1: $2, want a duration such as 10s`},
	{regexp.MustCompile(`^--(\S+): bool value must be .* but got (".*")$`), `-$1: $2, want true or false`},
	{regexp.MustCompile(`^--(\S+) must be one of (.*) but got (".*")$`), `-$1: $3, want one of $2`},
	{regexp.MustCompile(`^expected "<file>"$`), `replay needs a log, as in: tierlimit replay access.log (- is the standard input)`},
}

// plain is kong's error in our words.
func plain(err error) error {
	for _, p := range inPlainWords {
		if text := err.Error(); p.kong.MatchString(text) {
			return errors.New(p.kong.ReplaceAllString(text, p.says))
		}
	}
	return fmt.Errorf("%w (tierlimit -h lists verbs, tierlimit VERB -h its flags)", err)
}

// oneLine joins what errors.Join and other people's errors spread over several lines.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}
