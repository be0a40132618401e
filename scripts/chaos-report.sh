#!/bin/sh
# Runs the chaos suite and writes what it came to into docs/chaos.md: on child processes with all algorithms (TIERLIMIT_LONG= makes
# it the short suite), some faults one by one, whose heap is then their own, and in containers where there can be any.
set -eu
cd "$(dirname "$0")/.."

go=${GO:-go}
dir=$(pwd)/bin
export TIERLIMIT_CHAOS_ROWS="$dir/chaos.jsonl"
mkdir -p "$dir"
rm -f "$TIERLIMIT_CHAOS_ROWS" "$dir/chaos.log"
long=${TIERLIMIT_LONG-1}
unset TIERLIMIT_LONG
set -- -count=1 -v -timeout 40m

failed=0
suite() {
	echo "$(date +%T) $1"
	shift
	"$@" >>"$dir/chaos.log" 2>&1 || failed=1
}
suite "child processes" env TIERLIMIT_LONG="$long" "$go" test "$@" -run '^TestChaos$' .
suite "one by one" env TIERLIMIT_CHAOS_PARALLEL=1 "$go" test "$@" \
	-run '^TestChaos$/^single$/^(kill|kill-restart-empty|hang|flushall|refused|replies-cut|replies-lost|connections-reset|flapping|50-join-and-leave)$/^sliding-log$' .
image=$(sh scripts/containers.sh)
[ -z "$image" ] || suite "containers" env TIERLIMIT_REDIS_IMAGE="$image" "$go" test "$@" -run '^TestChaos$' ./internal/containertest

echo "$(date +%T) docs/chaos.md"
"$go" run ./internal/chaosreport -rows "$TIERLIMIT_CHAOS_ROWS" -command "make chaos-report$([ -n "$long" ] || echo " TIERLIMIT_LONG=")"
[ $failed = 0 ] || {
	grep -E '^ *--- FAIL|^(FAIL|panic:)' "$dir/chaos.log" || true
	echo "some of it failed: docs/chaos.md says what, bin/chaos.log more" >&2
	exit 1
}
