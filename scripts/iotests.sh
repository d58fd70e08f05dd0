#!/bin/bash
# QEMU's own tests of image formats, with Ringtap for its tools: scripts/iotests.sh [FORMAT...], as `make iotests` calls it.
# QEMU's source comes by a deb-src line in lists of its own, into target/iotests; the machine's lists stay as they are.
# TESTS="001 002" runs only these; PROTOCOL=nbd has the disk on an NBD server; RELEASE=trixie takes the tests of that Debian; WITH=qemu runs QEMU's own tools instead.
# WITH=daemon has Ringtap for qemu-storage-daemon alone; PROGRAMS=trixie takes QEMU's programs of that Debian, from a root of their own.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
target=$(cd "$here" && mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
release=${RELEASE:-bookworm}
work=$target/iotests/$release
formats=${*:-raw qcow2 vpc luks}

fetch() {
    mkdir -p "$work/new"
    "$here/scripts/qemu-of.sh" "$release" --source "$work/new"
    tar -xf "$work"/new/qemu_*.orig.tar.xz -C "$work/new" --strip-components=1 --wildcards \
        '*/tests/qemu-iotests*' '*/python/*' '*/scripts/*'
    rm -f "$work"/new/qemu_*
    mv "$work/new" "$work/source"
}

for program in qemu-img qemu-io qemu-nbd qemu-storage-daemon qemu-system-x86_64 python3 apt-get; do
    command -v $program > /dev/null || { echo "iotests: $program is missing: scripts/setup.sh test" >&2; exit 1; }
done
[ -d "$work/source" ] || fetch
if [ -n "${PROGRAMS:-}" ]; then
    programs=$("$here/scripts/qemu-of.sh" "$PROGRAMS")
    PATH=$programs:$PATH
    export QEMU_IMG_ITSELF=$programs/qemu-img QEMU_IO_ITSELF=$programs/qemu-io QEMU_NBD_ITSELF=$programs/qemu-nbd
fi

# Debian's QEMU has no accelerator for tests; its emulator does as well, with a firmware that halts.
mkdir -p "$work/bin"
head -c 65536 /dev/zero | tr '\0' '\364' > "$work/bin/halt"
cat > "$work/bin/qemu" <<'END'
#!/bin/bash
words=()
for word; do
    if [ "$word" = qtest ]; then words+=(tcg -bios "${0%/*}/halt"); else words+=("$word"); fi
done
exec qemu-system-x86_64 "${words[@]}"
END
chmod +x "$work/bin/qemu"

export QEMU_PROG=$work/bin/qemu
QEMU_NBD_PROG=$(command -v qemu-nbd) QSD_PROG=$(command -v qemu-storage-daemon)
export QEMU_NBD_PROG QSD_PROG
if [ "${WITH:-ringtap}" != ringtap ]; then
    [ "$WITH" = daemon ] && QSD_PROG=$here/tests/judges/qemu-storage-daemon
    QEMU_IMG_PROG=$(command -v qemu-img) QEMU_IO_PROG=$(command -v qemu-io)
else
    QEMU_IMG_PROG=$here/tests/judges/qemu-img QEMU_IO_PROG=$here/tests/judges/qemu-io
    # Elsewhere the tests that start it mean QEMU's.
    [ "${PROTOCOL:-file}" = nbd ] && QEMU_NBD_PROG=$here/tests/judges/qemu-nbd
fi
export QEMU_IMG_PROG QEMU_IO_PROG
export RINGTAP=${RINGTAP:-$target/debug/ringtap}
for format in $formats; do
    # shellcheck disable=SC2086 # words
    "$here/tests/judges/iotests" "$work/source" "$work/${WITH:-ringtap}" "$format" ${TESTS:-}
done
