#!/bin/sh
# Makes sure that there is a redis-server (6.2 or newer) for the tests to start as their own child process.
# It installs one where that needs no password, and says in one line how to where it does.
set -eu

server=${TIERLIMIT_REDIS_SERVER:-redis-server}
command -v "$server" >/dev/null 2>&1 && exit 0
if [ -n "${TIERLIMIT_REDIS_SERVER:-}" ]; then
	echo "TIERLIMIT_REDIS_SERVER names $server, which is no program" >&2
	exit 1
fi

echo "redis-server is missing: trying to install it" >&2
if command -v apt-get >/dev/null 2>&1; then
	root=
	[ "$(id -u)" = 0 ] || root="sudo -n"
	# The unit that the package brings would start a server of its own, which no test needs: RUNLEVEL=1 keeps it off.
	$root apt-get update -qq >&2 &&
		$root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >&2 || true
elif command -v brew >/dev/null 2>&1; then
	brew install redis >&2 || true
fi

command -v "$server" >/dev/null 2>&1 && exit 0
echo "redis-server is missing: install it (Debian, Ubuntu: apt-get install redis-server; macOS: brew install redis) or name it in TIERLIMIT_REDIS_SERVER" >&2
exit 1
