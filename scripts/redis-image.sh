#!/bin/sh
# redis-image.sh: build a Redis container image without any registry.
#
# Usage: redis-image.sh [IMAGE]            (default IMAGE: redis:7-local)
#
# The image is made of Debian's own Redis (package redis-tools, whose
# redis-check-rdb is the same program as redis-server: it goes by the name it
# is called by), the shared libraries that the dynamic linker names for it, and
# a static busybox for the shell that the entrypoint and the wait strategies of
# testcontainers need. It behaves like the official image where tests look:
#
#   - redis-server, redis-cli and docker-entrypoint.sh lie in /usr/local/bin;
#   - arguments that start with "-", or a first argument that ends in ".conf",
#     are handed to redis-server, so testcontainers' redis module and
#     `docker run IMAGE --appendonly yes` work as documented;
#   - protected mode is off unless the arguments turn it on;
#   - Redis is process 1, logs to standard output, listens on 6379 and keeps
#     its files in /data, which survives a restart of the same container.
#
# Running it again is cheap: the image carries the hash of its files as a label
# and is left alone while that hash is what it would be built from now.
#
# Needs: a running Docker engine, tar, ldd, sha256sum; and, only where redis-cli
# or busybox are missing, root and apt-get to install Debian's packages.
set -eu

image=${1:-redis:7-local}
label=local.redis-image.hash

fail() {
	echo "redis-image: $*" >&2
	exit 1
}

[ $# -le 1 ] || fail "usage: $0 [IMAGE]"

for tool in docker tar ldd sha256sum; do
	command -v "$tool" >/dev/null || fail "$tool is not installed"
done
docker version --format '{{.Server.Version}}' >/dev/null ||
	fail "no Docker engine answers (see above): is dockerd running?"

# --- Debian packages -------------------------------------------------------

# need FILE PACKAGE: install PACKAGE unless FILE is there already. The second try
# is for package lists that are missing or too old.
need() {
	[ -x "$1" ] && return
	if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		fail "$1 is missing and this is not root on Debian: install the package $2"
	fi
	for try in cached updated; do
		[ $try = cached ] || apt-get update -q >&2 ||
			fail "apt-get update failed (no network?)"
		DEBIAN_FRONTEND=noninteractive apt-get install -q -y \
			--no-install-recommends "$2" >&2 && break
	done
	[ -x "$1" ] || fail "apt-get did not bring $1 (package $2)"
}

need /usr/bin/redis-check-rdb redis-tools
need /bin/busybox busybox-static

# --- root file system ------------------------------------------------------

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root/bin" "$root/usr/local/bin" "$root/etc" "$root/tmp" "$root/data"
chmod 1777 "$root/tmp" "$root/data"

cp /bin/busybox "$root/bin/busybox"
if ldd "$root/bin/busybox" >/dev/null 2>&1; then
	fail "/bin/busybox is not static: install busybox-static in its place"
fi
for applet in sh cat awk grep nc ls mkdir ps id kill rm sleep; do
	ln -s busybox "$root/bin/$applet"
done

cp /usr/bin/redis-check-rdb "$root/usr/local/bin/redis-server"
cp /usr/bin/redis-cli "$root/usr/local/bin/redis-cli"
for program in redis-server redis-cli; do
	ldd "$root/usr/local/bin/$program"
done >"$work/ldd"
if grep 'not found' "$work/ldd" >&2; then
	fail "a shared library of Redis is missing (see above)"
fi
# Lines read "NAME => /PATH (ADDRESS)" or, for the loader, "/PATH (ADDRESS)".
sed -n 's/^[^/]*\(\/[^ ]*\) (0x.*/\1/p' "$work/ldd" | sort -u |
	while read -r library; do
		mkdir -p "$root${library%/*}"
		cp -L "$library" "$root$library"
	done

printf 'root:x:0:0:root:/:/bin/sh\nredis:x:999:999:redis:/data:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nredis:x:999:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"

cat >"$root/usr/local/bin/docker-entrypoint.sh" <<'ENTRYPOINT'
#!/bin/sh
# Hands options and a configuration file to redis-server, as the official image
# does; anything else is run as it is. Protected mode comes first among the
# options, so that a later one can turn it on again.
set -e
case ${1-} in
redis-server) shift ;;
-* | *.conf) ;;
*) exec "$@" ;;
esac
case ${1-} in
-v | --version | -h | --help) exec redis-server "$@" ;;
*.conf)
	config=$1
	shift
	exec redis-server "$config" --protected-mode no "$@"
	;;
esac
exec redis-server --protected-mode no "$@"
ENTRYPOINT
chmod 755 "$root/usr/local/bin/docker-entrypoint.sh"

# --- image -----------------------------------------------------------------

# The archive depends on the files alone, so its hash, with this script's,
# says whether the image is up to date.
tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner \
	-cf "$work/root.tar" .
hash=$(cat "$0" "$work/root.tar" | sha256sum | cut -d' ' -f1)

have=$(docker image inspect --format "{{index .Config.Labels \"$label\"}}" "$image" 2>/dev/null || true)
if [ "$have" = "$hash" ]; then
	echo "redis-image: $image is up to date"
	exit 0
fi

docker import \
	--change 'ENV PATH=/usr/local/bin:/bin' \
	--change 'WORKDIR /data' \
	--change 'EXPOSE 6379' \
	--change 'USER redis' \
	--change 'ENTRYPOINT ["docker-entrypoint.sh"]' \
	--change 'CMD ["redis-server"]' \
	--change "LABEL $label=$hash" \
	"$work/root.tar" "$image" >/dev/null || fail "docker import failed"

version=$(docker run --rm --network none "$image" redis-server --version) ||
	fail "$image was built but its redis-server does not start"
echo "redis-image: built $image: $version"
