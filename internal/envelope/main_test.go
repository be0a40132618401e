//go:build unix

package envelope

import (
	"flag"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		recordUntilKilled(path)
	}
	flag.Parse()
	explicit := false
	flag.Visit(func(f *flag.Flag) { explicit = explicit || f.Name == "rapid.checks" })
	if !explicit { // histories are small and the corners many: rapid's 100 would leave some out
		if err := flag.Set("rapid.checks", "600"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}
