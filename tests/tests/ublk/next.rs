//! What a server leaves for the next one of the same image, and what that must not take.

use crate::lab::Lab;

/// Another server of the process ends by itself: what is mounted keeps its disk.
pub fn outlives_the_other_servers(lab: &Lab) {
    lab.run(
        "the end of another server",
        "truncate -s 48M /mnt/files/kept
         touch /tmp/beside
         serve a /mnt/files/kept -f raw --ublk null:1M --fuse /tmp/beside
         mke2fs -q -t ext4 -F /dev/ublkb0
         mount -t ext4 /dev/ublkb0 /mnt/disk
         dd if=/dev/urandom of=/tmp/data bs=1M count=4 status=none
         cp /tmp/data /mnt/disk/data
         umount /tmp/beside
         ended a
         grep -q 'unmounted by somebody else' /tmp/a.err
         grep -q '/dev/ublkb0 stays' /tmp/a.err
         serve a /mnt/files/kept -f raw --ublk
         sync
         umount /mnt/disk
         e2fsck -fn /dev/ublkb0
         mount -t ext4 /dev/ublkb0 /mnt/disk
         cmp /tmp/data /mnt/disk/data
         umount /mnt/disk
         stop a
         rm /mnt/files/kept
         none",
    );
}

/// Servers that run out of descriptors at every step do no harm to what waits.
pub fn waits_for_one_that_can_serve_it(lab: &Lab) {
    let said = lab.run(
        "servers that fail",
        "serve a /dev/vda -f raw --ublk
         dd if=/dev/urandom of=/tmp/data bs=1M count=2 status=none
         dd if=/tmp/data of=/dev/ublkb0 bs=1M oflag=direct status=none
         files=$(ls /proc/$(cat /tmp/a.pid)/fd | wc -l)
         crash a
         failed=0
         for most in $(seq 5 $((files + 9))); do
             : >/tmp/a.out
             (exec >/tmp/a.out 2>/tmp/a.err
              ulimit -n $most
              exec setsid /tmp/ringtap serve /dev/vda -f raw --ublk) &
             echo $! >/tmp/a.pid
             for i in $(seq 300); do
                 grep -q ready /tmp/a.out && break 2
                 kill -0 $(cat /tmp/a.pid) 2>/dev/null || break
                 sleep 0.1
             done
             cat /tmp/a.err
             failed=$((failed + 1))
         done
         grep -q ready /tmp/a.out || { cat /tmp/a.err >&2; exit 1; }
         kill -0 $(cat /tmp/a.pid) || { cat /tmp/a.out /tmp/a.err >&2; exit 1; }
         crash a
         serve a /dev/vda -f raw --ublk
         dd if=/dev/ublkb0 bs=1M count=2 iflag=direct status=none | cmp - /tmp/data
         stop a
         none
         echo $failed",
    );
    let (_, failed) = said.trim().rsplit_once('\n').unwrap_or_default();
    assert!(failed.parse().is_ok_and(|failed: u32| failed > 2), "too few failed: {said}");
    assert!(said.contains("cannot prepare to serve /dev/ublkb0"), "{said}");
}

/// It goes on as it was made, for this image and none of the same name.
pub fn stays_what_it_was(lab: &Lab) {
    let said = lab.run(
        "another server's ways",
        "truncate -s 16M /mnt/files/made
         serve a /mnt/files/made -f raw --cache writethrough --ublk
         crash a
         if /tmp/ringtap serve /mnt/files/made -f raw --read-only --ublk 2>/tmp/said; then exit 1; fi
         grep -q 'made for writing: serve the disk without --read-only' /tmp/said
         truncate -s 24M /mnt/files/made
         serve a /mnt/files/made -f raw --ublk
         # Nobody asks for a flush: each write is stable when it is answered.
         flushes() { awk '{ print $16 }' /sys/block/vdb/stat; }
         before=$(flushes)
         dd if=/dev/urandom of=/dev/ublkb0 bs=4k count=8 oflag=direct status=none
         [ $(flushes) -ge $((before + 8)) ] || { echo 'too few flushes' >&2; exit 1; }
         echo $(cat /sys/block/ublkb0/size) $(grep -c 'keeps its size' /tmp/a.err || true)
         crash a
         truncate -s 16M /mnt/files/other
         mv /mnt/files/other /mnt/files/made
         serve a /mnt/files/made -f raw --ublk
         list
         stop a
         /tmp/ringtap list --reap
         rm /mnt/files/made
         none",
    );
    let resized = said.starts_with("49152 0\n") || said.starts_with("32768 1\n");
    assert!(resized, "{said}");
    assert!(said.contains("/dev/ublkb0: waiting") && said.contains("/dev/ublkb1: live"), "{said}");
}

/// Its image lies on a disk that is one of another server's.
pub fn lies_on_another_servers_disk(lab: &Lab) {
    lab.run(
        "a disk on a disk",
        "serve a /dev/vda -f raw --ublk
         mke2fs -q -t ext4 -F /dev/ublkb0
         mount -t ext4 /dev/ublkb0 /mnt/disk
         mkdir /mnt/disk/below
         truncate -s 16M /mnt/disk/below/base
         /tmp/ringtap create -q -f qcow2 -b /mnt/disk/below/base -F raw /mnt/files/top
         serve b /mnt/files/top -f qcow2 --allow-backing /mnt/disk/below --ublk --nbd unix:/mnt/disk/below/sock
         [ -S /mnt/disk/below/sock ]
         grep -q ' /mnt/disk ' /proc/$(cat /tmp/b.pid)/mounts
         dd if=/dev/urandom of=/dev/ublkb1 bs=1M count=4 oflag=direct status=none
         stop b
         [ ! -e /mnt/disk/below/sock ]
         # One that has nothing there keeps nothing of it.
         serve b null:16M --ublk
         if grep -q ' /mnt/disk ' /proc/$(cat /tmp/b.pid)/mounts; then exit 1; fi
         stop b
         umount /mnt/disk
         stop a
         rm /mnt/files/top
         none",
    );
}
