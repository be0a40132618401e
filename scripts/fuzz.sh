#!/bin/sh
# Runs every fuzz target of every module: scripts/fuzz.sh [AMOUNT], as -fuzztime takes it. The default counts inputs: at the end of
# a time, go test up to 1.26 may report "context deadline exceeded" where nothing is wrong (golang.org/issue/75804).
set -eu
cd "$(dirname "$0")/.."

amount=${1:-30000x}
targets=$(grep -rn --include='*_test.go' '^func Fuzz' .) || {
	echo "no fuzz target was found" >&2
	exit 1
}
echo "$targets" | while IFS=: read -r file _ line; do
	target=${line#func }
	target=${target%%(*}
	# Not "go test -fuzz ./...", which takes one target at a time only.
	"${GO:-go}" test -run '^$' -fuzz "^$target\$" -fuzztime "$amount" "$(dirname "$file")" </dev/null || exit 1
done
