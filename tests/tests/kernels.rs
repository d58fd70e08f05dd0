//! The tap on the distribution's own kernel, which may be older than this host's.

#[path = "ublk/lab.rs"]
mod lab;

use lab::{Lab, tail};
use ringtap_guest::{Appliance, Kernel};

const MIB: u64 = 1 << 20;

#[test]
fn the_tap_serves_on_the_kernel_of_the_distribution() {
    let kernel = Kernel::pc(&Appliance::default_cache()).unwrap_or_else(|error| panic!("{error}"));
    let programs = ["losetup", "qemu-img", "qemu-io", "nbdinfo", "nbdcopy"];
    let lab = Lab::with(kernel, &programs, &["fuse"]);
    eprintln!("{}", lab.run("the kernel", "uname -r"));
    serves_in_each_cache_mode(&lab);
    keeps_what_a_killed_server_acknowledged(&lab);
    is_a_file_that_a_loop_device_takes(&lab);
    is_measured(&lab);
    assert!(!lab.guest.console().contains("WARNING:"), "{}", tail(&lab.guest.console()));
}

/// A copy there and back, large requests among them, and holes.
fn serves_in_each_cache_mode(lab: &Lab) {
    lab.run(
        "cache modes",
        "mkdir -p /mnt/memory
         mount -t tmpfs none /mnt/memory
         uri=nbd+unix:///?socket=/tmp/a.sock
         dd if=/dev/urandom of=/tmp/from bs=1M count=8 status=none
         there_and_back() {
             nbdcopy --request-size=1048576 /tmp/from $uri
             qemu-io -f raw $uri -c 'write -P 7 -f 513 70000' -c 'write -z -u 2M 1M' \
                 -c 'discard 4M 1M' -c 'read -P 7 513 70000' -c 'read -P 0 2M 1M' \
                 -c 'aio_write -P 9 6M 512k' -c 'aio_write -P 8 7M 512k' -c aio_flush \
                 -c 'read -P 8 7M 512k' >/tmp/io
             if grep -i -e fail -e error /tmp/io >&2; then exit 1; fi
             nbdinfo --map $uri >/tmp/map
             grep -q hole /tmp/map || { echo no hole after $* >&2; exit 1; }
             nbdcopy --request-size=1048576 $uri /tmp/first
             nbdcopy $uri /tmp/second
             cmp /tmp/first /tmp/second
             stop a
             qemu-img compare -q -f $1 $2 -F raw /tmp/first
         }
         for cache in none writeback directsync; do
             truncate -s 8M /mnt/files/disk
             serve a /mnt/files/disk -f raw --cache $cache --nbd unix:/tmp/a.sock
             there_and_back raw /mnt/files/disk
             /tmp/ringtap create -q -f qcow2 /mnt/files/disk.qcow2 8M
             serve a /mnt/files/disk.qcow2 -f qcow2 --cache $cache --nbd unix:/tmp/a.sock
             there_and_back qcow2 /mnt/files/disk.qcow2
             qemu-img check -q /mnt/files/disk.qcow2
             rm /mnt/files/disk*
         done
         # This file system may not take O_DIRECT, and says so.
         truncate -s 8M /mnt/memory/disk
         serve a /mnt/memory/disk -f raw --cache writeback --nbd unix:/tmp/a.sock
         there_and_back raw /mnt/memory/disk
         /tmp/ringtap serve /mnt/memory/disk -f raw --nbd unix:/tmp/a.sock 2>/tmp/said &
         for i in $(seq 300); do
             if grep -q -e 'try --cache writeback' -e 'INFO serving' /tmp/said; then break; fi
             sleep 0.2
         done
         kill $! 2>/dev/null || true
         wait $! || true
         grep -q -e 'try --cache writeback' -e 'INFO serving' /tmp/said || { cat /tmp/said >&2; exit 1; }
         rm /mnt/memory/disk
         # Another way to each of these bytes.
         printf secret >/tmp/key
         chmod 600 /tmp/key
         /tmp/ringtap convert /tmp/from -f raw -O luks -o iter-time=100 --target-secret file:/tmp/key /mnt/files/luks
         /tmp/ringtap convert -f luks --secret file:/tmp/key /mnt/files/luks -O vpc /mnt/files/vhd
         /tmp/ringtap convert -c -f vpc /mnt/files/vhd -O qcow2 /mnt/files/qcow2
         /tmp/ringtap compare -q -f raw /tmp/from -F qcow2 /mnt/files/qcow2
         qemu-img check -q /mnt/files/qcow2
         rm /mnt/files/luks /mnt/files/vhd /mnt/files/qcow2",
    );
}

/// Flushed or not.
fn keeps_what_a_killed_server_acknowledged(lab: &Lab) {
    lab.run(
        "kill -9",
        "cd /mnt/files
         uri=nbd+unix:///?socket=/tmp/a.sock
         /tmp/ringtap create -q -f qcow2 base 32M
         qemu-io -f qcow2 base -c 'write -q -P 1 0 32M'
         /tmp/ringtap create -q -f qcow2 -b base -F qcow2 over
         for turn in 2 3 4 5 6 7; do
             serve a over -f qcow2 --cache none --nbd unix:/tmp/a.sock
             # It leaves without a flush.
             qemu-io -t unsafe -f raw $uri -c \"write -q -P $turn ${turn}0000 300000\" -c abort \
                 2>/dev/null || true
             crash a
             # Calls that the thread's own ring interrupts have to be made again.
             if grep 'no restart log' /tmp/a.err >&2; then exit 1; fi
         done
         serve a over -f qcow2 --cache none --nbd unix:/tmp/a.sock
         qemu-io -r -f raw $uri -c 'read -P 2 20000 10000' -c 'read -P 6 60000 10000' \
             -c 'read -P 7 70000 300000' -c 'read -P 1 370000 1M' >/tmp/io || {
             cat /tmp/io >&2
             exit 1
         }
         stop a
         qemu-img check -q over
         rm base over",
    );
}

fn is_a_file_that_a_loop_device_takes(lab: &Lab) {
    lab.run(
        "FUSE",
        "/tmp/ringtap create -q -f qcow2 /mnt/files/a.qcow2 64M
         touch /tmp/disk
         serve a /mnt/files/a.qcow2 -f qcow2 --fuse /tmp/disk
         losetup /dev/loop0 /tmp/disk
         mke2fs -q -t ext4 /dev/loop0
         mount /dev/loop0 /mnt/disk
         fio --name=v --directory=/mnt/disk --size=8M --rw=randwrite --bsrange=4k-64k --iodepth=16 \
             --ioengine=libaio --direct=1 --fsync=64 --verify=crc32c --verify_state_save=0 --output=/tmp/fio
         umount /mnt/disk
         e2fsck -fn /dev/loop0
         losetup -d /dev/loop0
         stop a
         qemu-img check -q /mnt/files/a.qcow2
         rm /mnt/files/a.qcow2
         # It grows, and nobody but the loop device asks.
         truncate -s 4M /mnt/files/g.raw
         touch /tmp/grows
         serve g /mnt/files/g.raw -f raw --fuse /tmp/grows
         losetup /dev/loop0 /tmp/grows
         truncate -s 8M /mnt/files/g.raw
         kill -HUP $(cat /tmp/g.pid)
         for i in $(seq 100); do
             losetup -c /dev/loop0
             [ $(cat /sys/block/loop0/size) = 16384 ] && break
             sleep 0.1
         done
         [ $(cat /sys/block/loop0/size) = 16384 ]
         losetup -d /dev/loop0
         stop g
         rm /mnt/files/g.raw",
    );
}

/// The lab's own client asks over vhost-user, and the server of each image is at its side.
fn is_measured(lab: &Lab) {
    lab.run(
        "the lab",
        "mkdir /mnt/files/lab
         cd /mnt/files/lab
         /tmp/ringtap compare -v --stages host --backends native,loop,ringtap-nbd,ringtap-vhost \
             --workloads randwrite-4k-qd32 --rounds 2 --size 64M --seconds 0.3 \
             --dir . --out run >/tmp/said 2>&1 || { cat /tmp/said >&2; exit 1; }
         grep -q '2 rounds, complete' /tmp/said",
    );
}
