#!/bin/sh
# Explores the models of docs/spec to the end: each must hold, each broken variant of it must be refuted, and what shows that a model
# does something must be reached. TIERLIMIT_LONG=1 adds larger ones. It needs Spin and a C compiler, installs them where that needs
# no password, and says in one line how to where it does.
set -eu
cd "$(dirname "$0")/.."

# What must come out, the model, its options. A variant is refuted where that takes the fewest states.
plan() {
	cat <<-'END'
		holds handover
		holds outage -DUNLEASED -DB=3 -DK=2
		holds exchange -DB=2
		holds outage
		holds exchange -DWINDOW -DB=3 -DS=3
	END
	[ "${TIERLIMIT_LONG:-0}" = 0 ] || cat <<-'END'
		holds outage -DUNLEASED -DN=3 -DB=4 -DR=2
		holds exchange -DB=4
		holds handover -DN=3 -DW=1
		holds outage -DB=4
		holds outage -DB=3
		holds outage -DUNLEASED -DN=3 -DB=3 -DR=3
		holds outage -DK=2 -DLOST_REPORTS
		holds handover -DINFLIGHT
		holds handover -DW=3
		holds exchange -DB=3
		holds exchange -DB=2 -DS=3
	END
	for variant in LATE_RETURN CREDIT_RESENT UNKNOWN_RECLAIMED FROM_RECEIPT LEASE_TOO_LONG; do
		echo "refuted exchange -DB=2 -DMUTANT_$variant"
		echo "refuted exchange -DWINDOW -DB=3 -DS=3 -DMUTANT_$variant"
	done
	for variant in MUTANT_NO_ROLLOVER MUTANT_CREDIT_FIRST; do
		echo "refuted exchange -DB=2 -D$variant"
	done
	echo "refuted exchange -DN=1 -DB=2 -DMUTANT_VOID_KEPT"
	echo "reached exchange -DB=2 -DREACH_LEASE"
	echo "reached exchange -DB=2 -DREACH_SUSTAINED"
	for variant in MUTANT_SILENCE_TOO_SHORT MUTANT_VIEW_NOT_FENCED MUTANT_BEAT_NOT_FENCED MUTANT_DOUBT_FORGOTTEN \
		MUTANT_OLD_BEAT_FORGOTTEN MUTANT_SHARE_NOT_PAUSED MUTANT_SHARE_STARTS_FULL MUTANT_STOCK_KEPT \
		MUTANT_SELF_NOT_MISSING MUTANT_DARKNESS_FORGOTTEN MUTANT_FORGOTTEN_KEY_FULL; do
		echo "refuted outage -DUNLEASED -DB=3 -D$variant"
	done
	echo "refuted outage -DUNLEASED -DB=3 -DR=1 -DMUTANT_SHARES_ROUNDED_UP"
	for variant in MUTANT_LEASES_NOT_WAITED_FOR MUTANT_CARRIED_ABOVE_THE_CAP; do
		echo "refuted outage -D$variant"
	done
	echo "reached outage -DUNLEASED -DREACH_SHARE"
	echo "reached outage -DUNLEASED -DB=3 -DREACH_RETURN"
	for variant in MUTANT_RETURNS_FORGOTTEN MUTANT_HANDED_OVER_IN_ANOTHER_EPISODE MUTANT_READY_KEPT \
		MUTANT_SHARE_FORGOTTEN_ON_RETURN MUTANT_SHARE_MADE_ANEW MUTANT_HANDED_OVER_AGAIN MUTANT_SILENCE_TOO_SHORT; do
		echo "refuted handover -D$variant"
	done
	echo "reached handover -DREACH_HANDOVER"
}

# one DIR NUMBER WANTED MODEL OPTIONS...: one search, in a directory of its own; writes a line of the table to DIR/NUMBER.
one() {
	dir=$1 number=$2 wanted=$3 model=$4
	shift 4
	mkdir "$dir/run$number"
	cp "docs/spec/$model.pml" "$dir/run$number"
	cd "$dir/run$number"
	options=$*
	level=-O2
	[ "$wanted" = holds ] || level=-O0
	if ! { spin -a "$@" "$model.pml" && ${CC:-cc} $level -w -DSAFETY -DNOREDUCE -DMEMLIM=12000 -o pan pan.c; } >out 2>&1; then
		cat out >&2
		echo "FAILED    $model $options: does not compile" >"$dir/$number"
		return
	fi
	# Every state is kept whole, and a bound that is reached is a failure.
	bounds="-m400000 -w20"
	[ "${TIERLIMIT_LONG:-0}" = 0 ] || bounds="-m10000000 -w26"
	began=$(date +%s)
	./pan $bounds >out 2>&1 || true
	took=$(($(date +%s) - began))
	states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
	depth=$(sed -n 's/.*depth reached \([0-9]*\),.*/\1/p' out)
	if grep -q 'assertion violated' out; then
		found=refuted
		[ "$wanted" != reached ] || found=reached
	elif grep -Eq 'not completed|too small|out of memory|MEMLIM' out || ! grep -q 'errors: 0' out; then
		found=truncated
	else
		found=holds
	fi
	mark=$found
	[ "$found" = "$wanted" ] || mark="FAILED: $found, not"
	printf '%-9s %-8s %9s states %8s deep %4s s  %s\n' "$mark" "$model" "${states:-?}" "${depth:-?}" "$took" "$options" >"$dir/$number"
	cd / && rm -r "$dir/run$number"
}

if [ "${1:-}" = -one ]; then
	shift
	one "$@"
	exit
fi

compiler=${CC:-cc}
present() { command -v spin >/dev/null 2>&1 && command -v "$compiler" >/dev/null 2>&1 && command -v cpp >/dev/null 2>&1; }
if ! present; then
	echo "Spin or a C compiler is missing: trying to install them" >&2
	if command -v apt-get >/dev/null 2>&1; then
		root=
		[ "$(id -u)" = 0 ] || root="sudo -n"
		$root apt-get update -qq >&2 &&
			$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends spin gcc libc6-dev >&2 || true
	elif command -v brew >/dev/null 2>&1; then
		brew install spin >&2 || true
	fi
	if ! present; then
		echo "Spin or a C compiler is missing: install them (Debian, Ubuntu: apt-get install spin gcc libc6-dev; macOS: brew install spin)" >&2
		exit 1
	fi
fi

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM
began=$(date +%s)
plan >"$dir/plan"
awk -v dir="$dir" '{ print dir, 100 + NR, $0 }' "$dir/plan" |
	xargs -P "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)" -L 1 sh "$PWD/scripts/spec.sh" -one
cat "$dir"/[0-9]*
failed=$(cat "$dir"/[0-9]* | grep -c FAILED || true)
echo "$(wc -l <"$dir/plan" | tr -d ' ') searches, $failed failed, $(($(date +%s) - began)) s"
[ "$failed" = 0 ] && [ "$(cat "$dir"/[0-9]* | wc -l)" = "$(wc -l <"$dir/plan")" ]
