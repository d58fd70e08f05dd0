#!/bin/bash
# try-deb.sh CODENAME OLD.deb NEW.deb: boots a Debian guest with its own systemd and AppArmor, installs OLD there, serves disks,
# upgrades to NEW under load, removes and purges it, and looks at what is left. As root: debootstrap needs it. docs/testing.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
release=${1:?usage: try-deb.sh CODENAME OLD.deb NEW.deb}
old=${2:?usage: try-deb.sh CODENAME OLD.deb NEW.deb} new=${3:?usage: try-deb.sh CODENAME OLD.deb NEW.deb}
cache=${RINGTAP_CACHE:-/var/tmp/ringtap-debian}
root=$cache/$release
packages=systemd-sysv,udev,dbus,linux-image-amd64,initramfs-tools,nbd-client,apparmor,kmod,zstd,e2fsprogs

if [ ! -e "$root/etc/systemd/system/story.service" ]; then
    mkdir -p "$cache"
    [ -e "$root/boot/vmlinuz" ] || [ -n "$(ls "$root"/boot/vmlinuz-* 2>/dev/null)" ] ||
        debootstrap --variant=minbase --include=$packages "$release" "$root" http://deb.debian.org/debian
    rm -rf "$root"/var/cache/apt/archives/*.deb
    echo 'LABEL=root / ext4 errors=remount-ro 0 1' >"$root/etc/fstab"
    echo guest >"$root/etc/hostname"
    cat >"$root/etc/systemd/system/story.service" <<'END'
[Unit]
Description=What this guest was booted for
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'mkdir -p /story; mount -o ro /dev/vdb /story; sh /story/run; echo "STORY ENDS $?"'
ExecStopPost=/sbin/poweroff
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=graphical.target
END
    mkdir -p "$root/etc/systemd/system/graphical.target.wants"
    ln -sf ../story.service "$root/etc/systemd/system/graphical.target.wants/"
fi

work=$(mktemp -d /var/tmp/try-deb.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/story"
cp "$here/deb/story" "$work/story/run"
cp "$old" "$work/story/old.deb"
cp "$new" "$work/story/new.deb"
truncate -s 3G "$work/root"
mke2fs -q -t ext4 -L root -d "$root" "$work/root"
truncate -s 512M "$work/disk"
mke2fs -q -t ext4 -d "$work/story" "$work/disk"
# A translated processor that shares its host is late with everything.
options="console=ttyS0 panic=-1 loglevel=4 no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1 systemd.default_timeout_start_sec=600 systemd.mask=serial-getty@ttyS0.service"
kernel=$(ls "$root"/boot/vmlinuz-* | tail -n 1) initrd=$(ls "$root"/boot/initrd.img-* | tail -n 1)
timeout ${PATIENCE:-1500} qemu-system-x86_64 -accel tcg,thread=multi -cpu max,-erms -smp 2 -m 1536 -nodefaults -display none -no-reboot \
    -kernel "$kernel" -initrd "$initrd" -append "root=LABEL=root $options" \
    -drive "if=none,id=root,file=$work/root,format=raw,cache=unsafe" -device virtio-blk-pci,drive=root \
    -drive "if=none,id=disk,file=$work/disk,format=raw,readonly=on" -device virtio-blk-pci,drive=disk \
    -serial stdio -monitor none </dev/null | tee "$work/said"
grep -q "STORY ENDS 0" "$work/said"
