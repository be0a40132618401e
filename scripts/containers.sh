#!/bin/sh
# Prints the image with which the container tests can run here, having pulled or built it. Where they cannot, it prints nothing
# and says why in one line; with TIERLIMIT_CONTAINERS=1, which asks for them, it then fails. 0 leaves them out in any case.
set -eu
cd "$(dirname "$0")/.."

missing() {
	if [ "${TIERLIMIT_CONTAINERS:-0}" = 0 ]; then
		echo "container tests left out: $1" >&2
		exit 0
	fi
	echo "container tests cannot run, and TIERLIMIT_CONTAINERS=$TIERLIMIT_CONTAINERS asks for them: $1" >&2
	exit 1
}

[ "${TIERLIMIT_CONTAINERS:-}" != 0 ] || missing "TIERLIMIT_CONTAINERS=0"
command -v docker >/dev/null 2>&1 || missing "there is no docker command"
docker version >/dev/null 2>&1 || missing "no Docker engine answers"

if [ -n "${TIERLIMIT_REDIS_IMAGE:-}" ]; then
	image=$TIERLIMIT_REDIS_IMAGE
	if ! docker image inspect "$image" >/dev/null 2>&1 && ! docker pull -q "$image" >&2; then
		echo "TIERLIMIT_REDIS_IMAGE names $image, which cannot be pulled" >&2
		exit 1
	fi
else
	image=redis:7-alpine
	if ! docker image inspect "$image" >/dev/null 2>&1 && ! docker pull -q "$image" >/dev/null 2>&1; then
		image=redis:7-local
		sh scripts/redis-image.sh "$image" >&2 || missing "redis:7-alpine cannot be pulled, and scripts/redis-image.sh builds nothing in its place"
	fi
fi

# Both at once tell whether a container on the host's network has this machine's loopback. It has not in a virtual machine (Docker
# Desktop), in a rootless engine, or on another machine; and not where this script runs in a container itself.
here='cat /proc/sys/kernel/random/boot_id && ls -l /proc/self/ns/net'
loopback() { sed 's/.* //'; }
if [ "$(sh -c "$here" 2>/dev/null | loopback)" != "$(docker run --rm --network host --entrypoint sh "$image" -c "$here" 2>/dev/null | loopback)" ]; then
	missing "this Docker engine's containers do not share the loopback of this machine"
fi
echo "$image"
