package main

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/tierlimit/tierlimit/internal/redistest"
)

// A machine is where it ran.
type machine struct{ processor, system, goVersion, redis, load string }

func thisMachine() machine {
	return machine{
		processor: fmt.Sprintf("%s, %d processors", cmp.Or(modelName(), runtime.GOARCH), runtime.NumCPU()),
		system:    runtime.GOOS + "/" + runtime.GOARCH,
		goVersion: strings.TrimPrefix(runtime.Version(), "go"),
		redis:     redisVersion(),
		load:      loadAverage(),
	}
}

func modelName() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// redisVersion is that of the server that the tests start.
func redisVersion() string {
	out, err := exec.Command(cmp.Or(os.Getenv(redistest.EnvServer), "redis-server"), "--version").Output()
	_, rest, ok := strings.Cut(string(out), " v=")
	if err != nil || !ok {
		return "unknown"
	}
	version, _, _ := strings.Cut(rest, " ")
	return version
}

// loadAverage is over 1, 5 and 15 minutes.
func loadAverage() string {
	fields := strings.Fields(firstLine("/proc/loadavg"))
	return strings.Join(fields[:min(3, len(fields))], ", ")
}

func firstLine(file string) string {
	b, _ := os.ReadFile(file)
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}
