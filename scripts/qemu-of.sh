#!/bin/bash
# QEMU of a Debian release, unpacked below target/iotests and not installed: scripts/qemu-of.sh RELEASE
# Prints the folder in which qemu-img and the others are; what is there already is left as it is.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
target=$(cd "$here" && mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
release=$1
root=$target/iotests/$release/root

# apt-get of the release, with lists of its own: apt_of WORD...; the machine's stay as they are.
apt_of() {
    local at=$target/iotests/$release/apt keys=/usr/share/keyrings/debian-archive-keyring.gpg
    mkdir -p "$at"/{lists,cache/archives}/partial
    : > "$at/status"
    printf "%s [signed-by=$keys] http://deb.debian.org/debian $release main\n" deb deb-src > "$at/sources.list"
    apt-get -q -o "Dir::Etc::sourcelist=$at/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$at/lists" \
        -o "Dir::State::status=$at/status" -o "Dir::Cache=$at/cache" -o APT::Sandbox::User=root "$@" >&2
}

# `--source FOLDER` fetches the source package instead.
if [ "${2:-}" = --source ]; then
    apt_of update
    cd "$3" && apt_of source --download-only qemu
    exit
fi
# Where the folder has moved the programs do not run.
if ! "$root/run/qemu-img" --version >/dev/null 2>&1; then
    rm -rf "$root" "$root.new" "$target/iotests/$release/apt/cache/archives" && mkdir -p "$root.new/run"
    apt_of update
    apt_of install -y --download-only --no-install-recommends qemu-system-x86 qemu-utils
    for package in "$target/iotests/$release"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root.new"; done
    for program in qemu-{img,io,nbd,storage-daemon,system-x86_64}; do
        # The modules of this machine's QEMU are of another build.
        sed -i 's#/usr/lib/x86_64-linux-gnu/qemu#/non/lib/x86_64-linux-gnu/qemu#' "$root.new/usr/bin/$program"
        printf '#!/bin/bash\nexec %q --library-path %q %q "$@"\n' "$root/usr/lib64/ld-linux-x86-64.so.2" \
            "$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/$program" > "$root.new/run/$program"
        chmod +x "$root.new/run/$program"
    done
    mv "$root.new" "$root"
fi
echo "$root/run"
