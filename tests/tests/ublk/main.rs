//! ublk in a real guest: this host's kernel need not have it. One boot, many stories.

mod compare;
mod lab;
mod next;
mod replaced;
mod upgraded;

use std::path::Path;

use lab::{LONG, Lab, tail};
use ringtap_tests::{program, ringtap};

const MIB: u64 = 1 << 20;

#[test]
fn a_disk_is_a_block_device_of_the_host() {
    let lab = Lab::boot(&[6, 5]);
    carries_a_file_system(&lab);
    shows_the_disk_as_it_is(&lab);
    passes_on_what_is_asked(&lab);
    survives_its_server(&lab);
    holds_while_memory_is_short(&lab);
    outlives_its_mount_namespace(&lab);
    keeps_its_size_or_says_so(&lab);
    next::outlives_the_other_servers(&lab);
    next::waits_for_one_that_can_serve_it(&lab);
    next::stays_what_it_was(&lab);
    next::lies_on_another_servers_disk(&lab);
    is_refused_where_it_must_be(&lab);
    leaves_nothing_behind(&lab);
    is_for_ordinary_users_too(&lab);
    serves_many_at_once(&lab);
    has_its_memory_beside_its_processors(&lab);
    upgraded::is_refused_where_the_driver_loses_requests(&lab);
    replaced::is_replaced_over_and_over(&lab);
    compare::is_measured(&lab);
    assert!(!lab.guest.console().contains("WARNING:"), "{}", tail(&lab.guest.console()));
}

#[test]
#[ignore = "a thousand replacements take a quarter of an hour under TCG"]
fn a_block_device_goes_on_in_a_thousand_overlays() {
    replaced::is_replaced(&Lab::boot(&[6, 5]), 1000);
}

/// Where the kernel's driver bears it (Linux 6.16).
#[test]
fn block_devices_go_on_in_other_processes() {
    let lab = Lab::boot(&[6, 16]);
    upgraded::goes_on_in_other_processes(&lab);
    upgraded::goes_on_in_confined_ones(&lab);
    assert!(!lab.guest.console().contains("WARNING:"), "{}", tail(&lab.guest.console()));
}

/// Where the kernel has zero copy and resizing (Linux 6.16).
#[test]
fn a_newer_kernel_moves_bytes_uncopied() {
    let lab = Lab::boot(&[6, 16]);
    carries_a_file_system(&lab);
    survives_its_server(&lab);
    moves_bytes_uncopied(&lab);
    has_holes_and_clusters(&lab);
    next::stays_what_it_was(&lab);
    keeps_its_size_or_says_so(&lab);
    assert!(!lab.guest.console().contains("WARNING:"), "{}", tail(&lab.guest.console()));
}

fn carries_a_file_system(lab: &Lab) {
    lab.run(
        "a file system",
        "serve a /dev/vda -f raw --ublk
         mke2fs -q -t ext4 /dev/ublkb0
         mount -t ext4 /dev/ublkb0 /mnt/disk
         fio --name=v --directory=/mnt/disk --size=12M --rw=randwrite --bsrange=4k-64k \
             --iodepth=16 --ioengine=libaio --direct=1 --fsync=64 --verify=crc32c \
             --verify_state_save=0 --output=/tmp/fio
         bonnie++ -q -f -u 0 -d /mnt/disk -s 24M -r 12M -n 1 >/tmp/bonnie
         umount /mnt/disk
         e2fsck -fn /dev/ublkb0
         stop a
         none
         e2fsck -fn /dev/vda",
    );
}

fn shows_the_disk_as_it_is(lab: &Lab) {
    let said = lab.run(
        "its looks",
        "serve a /dev/vda -f raw --ublk=5 --queues 2
         cd /sys/block/ublkb5
         echo $(cat size ro queue/write_cache queue/fua queue/logical_block_size) $(ls mq | wc -l)
         grep VmLck /proc/$(cat /tmp/a.pid)/status
         # Confined, where nobody has asked for it.
         list
         /tmp/ringtap list --output json
         dd if=/dev/urandom of=/dev/ublkb5 bs=1M count=8 oflag=direct status=none
         dd if=/dev/urandom of=/dev/ublkb5 bs=4k count=8 oflag=direct,dsync status=none
         blkdiscard -z -o 4096 -l 1M /dev/ublkb5
         dd if=/dev/zero of=/tmp/zeros bs=1M count=1 status=none
         dd if=/dev/ublkb5 of=/tmp/read bs=4k skip=1 count=256 iflag=direct status=none
         cmp /tmp/zeros /tmp/read
         blkdiscard -o 2M -l 4M /dev/ublkb5
         kill -HUP $(cat /tmp/a.pid)
         kill -USR1 $(cat /tmp/a.pid)
         sleep 1
         cat /tmp/a.err
         stop a
         serve a /dev/vda -f raw --ublk --read-only
         cat /sys/block/ublkb0/ro
         if dd if=/dev/zero of=/dev/ublkb0 bs=4k count=1 oflag=direct status=none; then exit 1; fi
         dd if=/dev/ublkb0 of=/dev/null bs=1M count=8 iflag=direct status=none
         stop a
         serve a /dev/vda -f raw --ublk --cache writethrough
         cat /sys/block/ublkb0/queue/write_cache
         stop a",
    );
    let sectors = 96 * MIB / 512;
    assert!(said.contains(&format!("{sectors} 0 write back 1 512 2\n")), "{said}");
    assert!(!said.contains("VmLck:\t       0 kB"), "{said}");
    let live = format!("/dev/ublkb5: live, {} bytes, 2 queue(s), process ", 96 * MIB);
    assert!(said.contains(&live) && said.contains(", /dev/vda\n"), "{said}");
    for kind in ["discard", "write_zeroes"] {
        let ended = |n: &str| said.contains(&format!("\"{kind}\":{{\"ended\":{n}"));
        assert!(ended("") && !ended("0"), "{said}");
    }
    assert!(said.contains(r#"{"device":"/dev/ublkb5","state":"live","pid":"#), "{said}");
    assert!(said.ends_with("\n1\nwrite through\n"), "{said}");
}

/// Of two NUMA nodes with a processor each: what a queue's thread has is on its own.
fn has_its_memory_beside_its_processors(lab: &Lab) {
    let said = lab.run(
        "NUMA nodes",
        r#"cat /sys/devices/system/node/online
         for cpu in 0 1; do
             serve a /dev/vda -f raw --ublk --queues 1 --cpus $cpu
             dd if=/dev/ublkb0 of=/dev/null bs=1M count=16 iflag=direct status=none
             # Pages that are of no file, by node (proc(5), numa_maps).
             awk '/ anon=/ && !/ file=/ {
                     for (n = 3; n <= NF; n++) if (split($n, at, "=") == 2 && at[1] ~ /^N[01]$/) sum[at[1]] += at[2]
                 }
                 END { print sum["N0"] + 0, sum["N1"] + 0 }' /proc/$(cat /tmp/a.pid)/numa_maps
             stop a
         done"#,
    );
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.first(), Some(&"0-1"), "{said}");
    let pages = |line: usize| -> Vec<u64> {
        lines[line].split(' ').map(|count| count.parse().expect("a count")).collect()
    };
    let (first, second) = (pages(1), pages(2));
    // A queue has its buffers from the beginning: 64 requests of 256 KiB.
    let buffers = (16 * MIB / 4096) * 9 / 10;
    assert!(second[1] >= buffers && first[0] >= buffers, "{said}");
    assert!(first[1] < buffers / 2 && second[0] < buffers / 2, "{said}");
}

/// From every processor, each kind of request, as far as the disk below.
fn passes_on_what_is_asked(lab: &Lab) {
    lab.run(
        "requests",
        r#"serve a /dev/vda -f raw --ublk --queues 2
         used() {
             for thread in /proc/$(cat /tmp/a.pid)/task/*; do
                 [ $(cat $thread/comm) != vda:ub$1 ] || awk '{ print $1 }' $thread/schedstat
             done
         }
         for n in 0 1; do
             before=$(used $n)
             taskset $((n + 1)) dd if=/dev/ublkb0 of=/dev/null bs=4k count=64 iflag=direct status=none
             [ "$(used $n)" -gt "${before:-0}" ] || { echo "queue $n does nothing" >&2; exit 1; }
         done
         # The sixteenth field counts flushes.
         flushes() { awk '{ print $16 }' /sys/block/vda/stat; }
         flushed() { [ $(flushes) -ge $(($2 + $3)) ] || { echo "$1: too few flushes" >&2; exit 1; }; }
         before=$(flushes)
         dd if=/dev/urandom of=/dev/ublkb0 bs=4k count=8 oflag=direct,dsync status=none
         # Each is followed by a flush besides.
         flushed FUA $before 16
         before=$(flushes)
         dd if=/dev/urandom of=/dev/ublkb0 bs=4k count=8 oflag=direct conv=fsync status=none
         flushed flush $before 1
         stop a
         truncate -s 16M /mnt/files/sparse
         serve a /mnt/files/sparse -f raw --ublk
         blocks() { stat -c %b /mnt/files/sparse; }
         # But for a few that the file system needs for itself.
         freed() {
             freed=$(($1 - $(blocks)))
             [ $freed -gt $(($2 - 64)) ] && [ $freed -lt $(($2 + 64)) ] && return
             echo "$freed blocks are free, not $2" >&2
             exit 1
         }
         zeros() { dd if=/dev/ublkb0 bs=1M skip=$1 count=4 iflag=direct status=none | cmp -n 4M - /dev/zero; }
         dd if=/dev/urandom of=/dev/ublkb0 bs=1M count=16 oflag=direct status=none
         full=$(blocks)
         blkdiscard -z -l 4M /dev/ublkb0
         freed $full 0
         zeros 0
         blkdiscard -o 4M -l 4M /dev/ublkb0
         freed $full 8192
         zeros 4
         fallocate --punch-hole -o 8M -l 4M /dev/ublkb0
         freed $full 16384
         zeros 8
         if zeros 12 >/dev/null 2>&1; then exit 1; fi
         rm /mnt/files/sparse
         stop a"#,
    );
}

/// Killed again and again under load, it loses nothing, flushed or not.
fn survives_its_server(lab: &Lab) {
    let said = lab.run(
        "kill -9",
        "serve a /dev/vda -f raw --ublk
         fio --name=v --filename=/dev/ublkb0 --size=8M --rw=randwrite --bs=4k --iodepth=32 \
             --rate_iops=800,800 --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 \
             --verify_fatal=1 --verify_state_save=0 --loops=2 --output=/tmp/fio >/tmp/fio.out 2>&1 &
         fio=$!
         # So that the server always has requests in hand when it is killed.
         rm -f /tmp/enough
         read_on() {
             while [ ! -e /tmp/enough ]; do
                 dd if=/dev/ublkb0 of=/dev/null bs=1M skip=$1 count=32 iflag=direct status=none || return
             done
         }
         read_on 16 & one=$!
         read_on 48 & two=$!
         for round in 1 2 3; do
             sleep 1
             kill -0 $fio || { echo 'fio ended early'; cat /tmp/fio.out; }
             crash a
             sleep 0.5
             list
             serve a /dev/vda -f raw --ublk
         done
         wait $fio || { cat /tmp/fio.out /tmp/fio; exit 1; }
         touch /tmp/enough
         wait $one
         wait $two
         grep 'taking over' /tmp/a.err
         list
         # What is cached and not flushed waits for the next server, and is written then.
         crash a
         dd if=/dev/urandom of=/tmp/data bs=1M count=4 status=none
         dd if=/tmp/data of=/dev/ublkb0 bs=1M seek=40 conv=fsync status=none &
         dd=$!
         sleep 1
         serve a /dev/vda -f raw --ublk=0
         wait $dd
         dd if=/dev/ublkb0 of=/tmp/back bs=1M skip=40 count=4 iflag=direct status=none
         cmp /tmp/data /tmp/back
         stop a
         none",
    );
    assert!(said.contains("/dev/ublkb0: waiting"), "{said}");
    assert!(said.contains("/dev/ublkb0: live") && said.contains("taking over"), "{said}");
    assert!(!said.contains("/dev/ublkb1"), "{said}");
    assert!(!said.contains("ended early"), "the load was too short to be killed under: {said}");
}

/// Memory is written out to the very device that the server serves.
fn holds_while_memory_is_short(lab: &Lab) {
    let said = lab.run(
        "swap",
        "serve a /dev/vda -f raw --ublk
         cat /proc/$(cat /tmp/a.pid)/oom_score_adj
         awk '/^[0-9a-f]*-/ { code = / r-[x-]p .*ringtap/ } code && /^Size:/ { size = $2 }
              code && /^Rss:/ && size != $2 { partly = 1 }
              END { print (partly ? \"partly\" : \"whole\") }' \
             /proc/$(cat /tmp/a.pid)/smaps
         flushers a 'vda:ub[0-9]'
         # Memory for all the requests that may come is there before the first.
         awk '/^RssAnon:/ { print ($2 >= 16384 ? \"ready\" : \"not ready\") }' \
             /proc/$(cat /tmp/a.pid)/status
         serve f null:1M --fuse /tmp/file
         flushers f 'null:1M:fu[0-9]'
         stop f
         mkswap /dev/ublkb0 >/dev/null
         swapon /dev/ublkb0
         mkdir -p /mnt/ballast /mnt/swapped
         # A ramfs stays in memory, a tmpfs need not.
         mount -t ramfs none /mnt/ballast
         mount -t tmpfs -o size=80m none /mnt/swapped
         free=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
         dd if=/dev/zero of=/mnt/ballast/it bs=1M count=$((free - 48)) status=none
         dd if=/dev/urandom of=/mnt/files/data bs=1M count=72 oflag=direct status=none
         dd if=/mnt/files/data of=/mnt/swapped/data bs=1M iflag=direct status=none
         # What the kernel calls available is a guess: take more until it writes pages out.
         swapped() { awk '/^pswpout/ { print ($2 > 2000) }' /proc/vmstat; }
         for more in $(seq 40); do
             [ \"$(swapped)\" = 0 ] || break
             dd if=/dev/zero of=/mnt/ballast/$more bs=1M count=4 status=none
         done
         echo swapped \"$(swapped)\"
         cmp /mnt/files/data /mnt/swapped/data
         umount /mnt/ballast /mnt/swapped
         swapoff /dev/ublkb0
         rm /mnt/files/data
         stop a
         none",
    );
    assert_eq!(said, "-1000\nwhole\nready\nswapped 1\n");
}

/// The last process of a mount namespace unmounts what is mounted there; the server is not the one.
fn outlives_its_mount_namespace(lab: &Lab) {
    lab.run(
        "a mount namespace",
        r#"echo '. /tmp/library
            serve n /dev/vda -f raw --ublk
            mke2fs -q -t ext4 -F /dev/ublkb0
            mount -t ext4 /dev/ublkb0 /mnt/disk
            dd if=/dev/urandom of=/mnt/disk/file bs=1M count=4 status=none' >/tmp/inside
         unshare -m sh /tmp/inside
         pid=$(cat /tmp/n.pid)
         kill -KILL $pid
         for i in $(seq 300); do
             state=$(sed -n 's/^State:.//p' /proc/$pid/status 2>/dev/null) || state=gone
             case $state in Z* | gone | '') state=gone; break ;; esac
             sleep 0.1
         done
         [ "$state" = gone ] || { echo "the server waits for itself: $state" >&2; exit 1; }
         serve n /dev/vda -f raw --ublk
         e2fsck -fn /dev/ublkb0
         stop n
         none"#,
    );
}

/// The image grows while it is served.
fn keeps_its_size_or_says_so(lab: &Lab) {
    let said = lab.run(
        "a new size",
        "truncate -s 16M /mnt/files/grows
         serve a /mnt/files/grows -f raw --ublk
         truncate -s 24M /mnt/files/grows
         kill -HUP $(cat /tmp/a.pid)
         for i in $(seq 120); do
             [ $(cat /sys/block/ublkb0/size) = 49152 ] && break
             grep -q 'keeps its size' /tmp/a.err && break
             sleep 0.5
         done
         echo $(cat /sys/block/ublkb0/size) $(grep -c 'keeps its size' /tmp/a.err || true)
         stop a
         serve a /mnt/files/grows -f raw --ublk
         echo $(cat /sys/block/ublkb0/size)
         stop a
         none",
    );
    let kernel = lab.guest.exec("uname -r", LONG).expect("its kernel").stdout;
    let new = kernel.trim().split(['.', '-']).take(2).map(|part| part.parse().unwrap_or(0u32));
    let expected = if new.ge([6, 16]) { "49152 0\n49152\n" } else { "32768 1\n49152\n" };
    assert_eq!(said, expected);
}

/// The image's own bytes, uncopied, in requests of all sizes.
fn moves_bytes_uncopied(lab: &Lab) {
    let said = lab.run(
        "zero copy",
        "serve a /dev/vda -f raw --ublk
         list
         dd if=/dev/urandom of=/tmp/data bs=1M count=16 status=none
         for size in 512 4096 12288 1048576; do
             dd if=/dev/urandom of=/tmp/data bs=$size count=16 status=none
             dd if=/tmp/data of=/dev/ublkb0 bs=$size seek=3 oflag=direct status=none
             dd if=/dev/ublkb0 of=/tmp/back bs=$size skip=3 count=16 iflag=direct status=none
             cmp /tmp/data /tmp/back
         done
         stop a
         dd if=/dev/vda bs=1M skip=3 count=16 iflag=direct status=none | cmp - /tmp/data
         none",
    );
    assert!(said.contains(", zero copy, process"), "{said}");
}

/// Where somebody must look at the bytes, they are copied all the same.
fn has_holes_and_clusters(lab: &Lab) {
    let said = lab.run(
        "zero copy on qcow2",
        "/tmp/ringtap create -f qcow2 /mnt/files/q.qcow2 64M >/dev/null
         serve a /mnt/files/q.qcow2 -f qcow2 --ublk --queues 1
         list
         dd if=/dev/ublkb0 bs=1M count=8 iflag=direct status=none | cmp -n 8388608 - /dev/zero
         fio --name=v --filename=/dev/ublkb0 --size=24M --io_size=4M --rw=randrw --bsrange=4k-128k \
             --iodepth=16 --ioengine=libaio --direct=1 --verify=crc32c \
             --verify_state_save=0 --output=/tmp/fio
         # More at a time than are copied at a time.
         fio --name=w --filename=/dev/ublkb0 --size=24M --io_size=3M --rw=randwrite --bs=12k \
             --iodepth=64 --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 \
             --verify_state_save=0 --output=/tmp/fio
         crash a
         serve a /mnt/files/q.qcow2 -f qcow2 --ublk
         dd if=/dev/ublkb0 of=/tmp/before bs=1M iflag=direct status=none
         stop a
         /tmp/ringtap check /mnt/files/q.qcow2 >/dev/null
         serve a /mnt/files/q.qcow2 -f qcow2 --ublk --read-only
         dd if=/dev/ublkb0 bs=1M iflag=direct status=none | cmp - /tmp/before
         stop a
         none",
    );
    assert!(said.contains(", zero copy, process"), "{said}");
}

fn is_refused_where_it_must_be(lab: &Lab) {
    let said = lab.run(
        "refusals",
        "serve a null:16M --ublk=3
         if /tmp/ringtap serve null:32M --ublk=3 2>&1; then exit 1; fi
         if /tmp/ringtap list --reap=3 2>&1; then exit 1; fi
         crash a
         if /tmp/ringtap serve null:32M --ublk=3 2>&1; then exit 1; fi
         # What was made before it goes.
         if /tmp/ringtap serve null:16M --ublk=4 null:32M --ublk=99999999 2>&1; then exit 1; fi
         [ ! -e /dev/ublkc4 ]
         /tmp/ringtap list --reap=3 2>&1
         none",
    );
    assert!(said.contains("it shows null:16M, served by process"), "{said}");
    assert!(said.contains("waits for its server; choose another number"), "{said}");
    assert!(said.contains("cannot make /dev/ublkb99999999"), "{said}");
    assert!(said.contains("deleted /dev/ublkb3"), "{said}");
}

/// Whatever way a server ends, what it leaves can be found and removed.
fn leaves_nothing_behind(lab: &Lab) {
    let said = lab.run(
        "what is left",
        "serve a null:16M --ublk null:32M --ublk
         crash a
         list
         /tmp/ringtap list --reap 2>&1
         none
         # Stopped while it is mounted: its user gets errors, and it is gone all the same.
         serve a /dev/vda -f raw --ublk
         mke2fs -q -t ext4 -F /dev/ublkb0
         mount -t ext4 /dev/ublkb0 /mnt/disk
         kill -TERM $(cat /tmp/a.pid)
         ended a
         grep 'is in use' /tmp/a.err
         umount /mnt/disk
         none",
    );
    assert_eq!(said.matches(": waiting, ").count(), 2, "{said}");
    assert_eq!(said.matches("deleted /dev/ublkb").count(), 2, "{said}");
}

fn is_for_ordinary_users_too(lab: &Lab) {
    let said = lab.run(
        "an ordinary user",
        "chmod 666 /dev/ublk-control
         truncate -s 16M /mnt/files/own
         chown 1000 /mnt/files/own
         user='setpriv --reuid=1000 --regid=1000 --clear-groups'
         # Killed while it waits for the device's file to become its own: not a block device yet.
         # The next server removes what is left, and so does --reap.
         for who in server reap; do
             $user /tmp/ringtap serve /mnt/files/own -f raw --ublk >/dev/null 2>&1 &
             echo $! >/tmp/u.pid
             for i in $(seq 600); do [ -e /dev/ublkc0 ] && break; sleep 0.1; done
             crash u
             list
             if [ $who = reap ]; then
                 /tmp/ringtap list --reap 2>&1
             else
                 serve a /mnt/files/own -f raw --ublk
                 stop a
             fi
             none
         done
         # As udev's rules would, once a device appears.
         (for i in $(seq 900); do
             for f in /dev/ublkc* /dev/ublkb*; do [ ! -e $f ] || chown 1000 $f || true; done
             sleep 0.1
         done) >/dev/null 2>&1 &
         udev=$!
         $user /tmp/ringtap serve /mnt/files/own -f raw --ublk >/tmp/u.out 2>/tmp/u.err &
         echo $! >/tmp/u.pid
         for i in $(seq 600); do grep -q ready /tmp/u.out && break; sleep 0.1; done
         cat /tmp/u.err
         sleep 0.5
         echo mine | $user dd of=/dev/ublkb0 conv=notrunc,fsync status=none
         $user /tmp/ringtap list
         stop u
         kill $udev || true
         head -c 4 /mnt/files/own
         chmod 600 /dev/ublk-control
         [ -z \"$(ls /dev | grep 'ublk[bc]')\" ]",
    );
    assert!(said.contains("/dev/ublkb0: dead, 0 bytes"), "{said}");
    assert!(said.contains("deleted /dev/ublkb0"), "{said}");
    assert!(said.contains("/dev/ublkb0: live, 16777216 bytes"), "{said}");
    assert!(said.ends_with("mine"), "{said}");
}

fn serves_many_at_once(lab: &Lab) {
    let said = lab.run(
        "32 devices",
        "all=
         for n in $(seq 0 31); do
             truncate -s 16M /mnt/files/$n
             all=\"$all /mnt/files/$n -f raw --ublk=$n --queues 1\"
         done
         serve a $all
         list | wc -l
         # To each device a piece of its own, all pieces together one file.
         dd if=/dev/urandom of=/tmp/data bs=64k count=32 status=none
         jobs=
         for n in $(seq 0 31); do
             dd if=/tmp/data of=/dev/ublkb$n bs=64k skip=$n seek=3 count=1 oflag=direct \
                 conv=fsync status=none &
             jobs=\"$jobs $!\"
         done
         for job in $jobs; do wait $job; done
         back() {
             for n in $(seq 0 31); do
                 dd if=$1$n bs=64k skip=3 count=1 status=none $2
             done | cmp /tmp/data -
         }
         crash a
         serve a $all
         back /dev/ublkb iflag=direct
         stop a
         none
         back /mnt/files/",
    );
    assert_eq!(said.trim(), "32", "{said}");
}

#[test]
fn a_host_without_ublk_is_told_what_else_there_is() {
    if Path::new("/dev/ublk-control").exists() {
        eprintln!("skipped: this host has ublk");
        return;
    }
    let binary = ringtap();
    let binary = binary.to_str().expect("a plain path");
    let output = program(binary, "ringtap", ["serve", "null:1M", "--ublk"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nbd-client") && said.contains("--fuse and losetup"), "{said}");
    let output = program(binary, "ringtap", ["list"]);
    assert!(output.status.success() && output.stdout.is_empty());
}
