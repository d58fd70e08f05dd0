#!/bin/bash
# Installs what is missing to build, test, demonstrate or measure Ringtap on Debian 12 or 13:
#   scripts/setup.sh build|demo|test|bench|fuzz|deb
# As root or with sudo. What is there already is left as it is; where nothing is missing, nothing is
# asked of apt. `test` fetches QEMU 10 from Debian 13, once, where the machine's is older.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin

purpose=${1:-build}
case $purpose in
    build | demo | test | bench | fuzz | deb) ;;
    *) echo "usage: scripts/setup.sh build|demo|test|bench|fuzz|deb" >&2; exit 2 ;;
esac

release=$(. /etc/os-release 2>/dev/null && echo "${ID:-unknown}${VERSION_ID:-}")
missing=()

# need PROGRAM PACKAGE: note the package where the program (or file) is not there.
need() {
    case $1 in
        /*) [ -e "$1" ] ;;
        *) command -v "$1" >/dev/null ;;
    esac || missing+=("$2")
}

need cc gcc
need /usr/include/stdlib.h libc6-dev
need /etc/ssl/certs/ca-certificates.crt ca-certificates
case $release in
    debian12) rust=(rustc-web cargo-web) lint=(rustfmt-web rust-web-clippy) storage_daemon=qemu-system-common ;;
    *) rust=(rustc cargo) lint=(rustfmt rust-clippy) storage_daemon=qemu-utils ;;
esac
if ! scripts/cargo --find >/dev/null 2>&1; then
    missing+=("${rust[@]}")
fi

if [ "$purpose" = fuzz ]; then
    need c++ g++
fi
if [ "$purpose" = deb ] || [ "$purpose" = test ]; then
    need dh debhelper
    need dh_apparmor dh-apparmor
    need fakeroot fakeroot
    need apparmor_parser apparmor
fi
if [ "$purpose" = test ]; then
    need lintian lintian
    need bpftrace bpftrace
fi
if [[ ! $purpose =~ ^(build|fuzz|deb)$ ]]; then
    need linux.uml user-mode-linux
    need busybox busybox-static
    need mke2fs e2fsprogs
    need losetup mount
    need fio fio
    need bonnie++ bonnie++
    need qemu-img qemu-utils
    need qemu-nbd qemu-utils
    need qemu-storage-daemon "$storage_daemon"
    need cpio cpio
    need dmsetup dmsetup
    need fusermount3 fuse3
fi
if [ "$purpose" = test ] || [ "$purpose" = bench ]; then
    need nbdinfo libnbd-bin
    need nbdkit nbdkit
    need nbd-client nbd-client
    need zstd zstd
    need nbd-server nbd-server
    need qemu-system-x86_64 qemu-system-x86
fi
if [ "$purpose" = test ]; then
    need curl curl
    need nbdsh python3-libnbd
    need cryptsetup cryptsetup-bin
    /usr/bin/python3 -c 'import cryptography' 2>/dev/null || missing+=(python3-cryptography)
    /usr/bin/python3 -c 'import prometheus_client' 2>/dev/null || missing+=(python3-prometheus-client)
    need mkfs.xfs xfsprogs
    need fincore util-linux-extra
    need mkfs.btrfs btrfs-progs
    need rsync rsync
    need ssh openssh-client
    need sshd openssh-server
    need setfacl acl
    need systemd-socket-activate systemd
    need systemd-analyze systemd
    need nsenter util-linux
    need tc iproute2
    need strip binutils
    need chromium chromium
    # A cluster of one, and QEMU's driver for it.
    need ceph-mon ceph-mon
    need ceph-osd ceph-osd
    need rbd ceph-common
    need radosgw radosgw
    compgen -G '/usr/lib/*/librbd.so.1' >/dev/null || missing+=(librbd1)
    compgen -G '/usr/lib/*/qemu/block-rbd.so' >/dev/null || missing+=(qemu-block-extra)
    # Only a Rust of the distribution has these as packages; rustup's are its components.
    cargo=$(scripts/cargo --find 2>/dev/null || echo /usr/bin/cargo)
    for tool in fmt clippy; do
        scripts/cargo "$tool" --version >/dev/null 2>&1 && continue
        if [ -x "${cargo%/cargo}/rustup" ]; then
            echo "setup: rustup component add for cargo $tool"
            "${cargo%/cargo}/rustup" component add "${tool/fmt/rustfmt}"
        else
            missing+=("${lint[@]}")
        fi
    done
fi

as_root=()
if [ "$(id -u)" -ne 0 ] && command -v sudo >/dev/null; then
    as_root=(sudo)
fi
if [ ${#missing[@]} -gt 0 ]; then
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    install="apt-get install -y --no-install-recommends --no-remove ${missing[*]}"
    if ! command -v apt-get >/dev/null; then
        echo "setup: no apt-get here; install what these Debian packages bring: ${missing[*]}" >&2
        exit 1
    fi
    if [ "$(id -u)" -ne 0 ] && [ ${#as_root[@]} -eq 0 ]; then
        echo "setup: neither root nor sudo; as root run: apt-get update && $install" >&2
        exit 1
    fi
    echo "setup: to $purpose, this takes: ${missing[*]}"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q
    # shellcheck disable=SC2086 # one word a package
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $install
    hash -r
fi
# Installed, Prometheus would run a server of its own: it is unpacked for the tests.
prometheus=${CARGO_TARGET_DIR:-target}/prometheus
if [ "$purpose" = test ] && ! command -v promtool >/dev/null && [ ! -x "$prometheus/usr/bin/promtool" ]; then
    echo "setup: unpacking prometheus to $prometheus"
    packages=$(mktemp -d)
    if (cd "$packages" && { apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; }; }); then
        mkdir -p "$prometheus"
        dpkg-deb --fsys-tarfile "$packages"/prometheus_*.deb | tar -x -C "$prometheus" ./usr/bin
    else
        echo "setup: no package of prometheus; its tests will be skipped" >&2
    fi
    rm -rf "$packages"
fi
# The verbs are compared with those of QEMU 10; an older one stays where it is.
if [ "$purpose" = test ] && [ "$(qemu-img --version | sed -n '1s/[^0-9]*\([0-9]*\).*/\1/p')" -lt 10 ]; then
    unpacked=$(scripts/qemu-of.sh trixie) || {
        echo "setup: QEMU of Debian 13 cannot be fetched from deb.debian.org, and the verbs are tried beside it" >&2
        exit 1
    }
    echo "setup: QEMU of Debian 13 is unpacked in $unpacked"
fi
# FUSE is for every user; udev sees to that where it runs, and a container may have none.
if [ "$purpose" = test ] && [ "$(stat -c %a /dev/fuse 2>/dev/null)" = 600 ]; then
    "${as_root[@]}" chmod 666 /dev/fuse || echo "setup: /dev/fuse is closed to ordinary users" >&2
fi
echo "setup: $(scripts/cargo --version), nothing missing to $purpose"
