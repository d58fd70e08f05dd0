//! Disks of Xen guests: a real Xen with its first domain in QEMU, `ringtap xen` there, and domains
//! whose kernel knows nothing of it. One boot, two domains, many stories.

mod lab;
mod pvh;
mod replaced;

use std::time::Instant;

use ringtap_guest::verify::FioVerify;
use ringtap_guest::{Domain, Guest, Job};

use lab::{LONG, Lab, MIB, device, run};

/// Has Linux's front end take rings of four pages and requests of 1 MiB, not of one and 128 KiB.
const LARGE_RINGS: &str =
    "xen_blkfront.max_ring_page_order=2 xen_blkfront.max_indirect_segments=256";

#[test]
fn guests_of_xen_have_their_disks_from_ringtap() {
    let lab = Lab::boot();
    let one = lab.create(&Domain::new("one").memory(320 << 20));
    the_guests_are_real(&lab, &one);
    let two = three_formats(&lab, &one, "", "--control unix:/tmp/control");
    each_processor_has_a_ring(&lab, &two, 1);
    replaced::is_replaced_over_and_over(&lab, &two);
    a_disk_grows(&lab, &one, "xvda", 64 * MIB);
    what_a_guest_asks_for_reaches_the_image(&lab, &one);
    a_cdrom_is_one(&lab, &one);
    replaced::goes_with_its_jobs(&lab, &one);
    a_disk_is_taken_away(&lab, &one);
    a_guest_that_panics_lets_go(&lab, two);
    // A disk of the other guest is still connected.
    lab.first("the server's end", "kill -TERM $(cat /tmp/served.pid)\nended");
}

#[test]
#[ignore = "a thousand replacements take three quarters of an hour under TCG"]
fn a_guest_of_xen_goes_on_in_a_thousand_overlays() {
    let lab = Lab::boot();
    let one = lab.create(&Domain::new("one").memory(320 << 20));
    let two = three_formats(&lab, &one, "", "--control unix:/tmp/control");
    replaced::is_replaced(&lab, &two, 1000);
}

#[test]
#[ignore = "takes four minutes under TCG, and longer beside other work"]
fn guests_of_xen_outlive_their_server() {
    let lab = Lab::boot();
    let one = lab.create(&Domain::new("one").memory(320 << 20));
    let two = three_formats(&lab, &one, "", "");
    each_processor_has_a_ring(&lab, &two, 1);
    two_at_once_outlive_the_server(&lab, &one, &two);
    disks_come_and_go(&lab, &one);
    disks_are_shown_as_they_are(&lab, &one);
    a_guest_may_die_at_any_moment(&lab, two);
    the_server_ends_well(&lab, one);
}

#[test]
#[ignore = "one more boot, and two minutes of load under TCG"]
fn guests_of_xen_have_large_rings_and_keep_what_was_promised() {
    let lab = Lab::boot();
    let one = lab.create(&Domain::new("one").memory(320 << 20));
    // With pages that stay mapped such rings take 270 MB of the guest's memory.
    let two = three_formats(&lab, &one, LARGE_RINGS, "--persistent-grants false");
    each_processor_has_a_ring(&lab, &two, 4);
    large_rings_are_served_around_their_end(&two);
    another_server_keeps_what_was_promised(&lab, &one, &two);
    pages_may_stay_mapped(&lab, &one);
    a_disk_is_taken_away_under_load(&lab, &one);
    lab.first("the server's end", "kill -TERM $(cat /tmp/served.pid)\nended");
}

/// The same guest and tools with the kernel's own back end, which then makes way.
fn the_guests_are_real(lab: &Lab, one: &Guest) {
    lab.first(
        "xen-blkback",
        "modprobe xen-blkback
         xl block-attach one format=raw,vdev=xvda,access=w,script=block-node,target=/dev/vdb",
    );
    device(one, "xvda", true);
    run(one, "echo from the guest | dd of=/dev/xvda conv=fsync status=none", "a write");
    let said = lab.first(
        "its end",
        "head -c 14 /dev/vdb
         xl block-detach one xvda
         rmmod xen-blkback",
    );
    assert_eq!(said, "from the guest");
}

/// Disks are attached to a running guest and given to a new one, on images of three formats.
fn three_formats(lab: &Lab, one: &Guest, options: &str, served: &str) -> Guest {
    lab.first(
        "three images",
        &format!(
            "truncate -s 48M /srv/raw
         ringtap create -q -f qcow2 /srv/vm.qcow2 48M
         ringtap create -q -f vpc /srv/vm.vhd 48M
         serve {served}
         xl block-attach one $(disk xvda w /srv/raw)
         xl block-attach one $(disk xvdb w vhd:/srv/vm.vhd)"
        ),
    );
    let target = "format=raw,vdev=xvda,access=w,script=block-ringtap,target=qcow2:/srv/vm.qcow2";
    let two = Domain::new("two").memory(320 << 20).cpus(2).disk(target).kernel_options(options);
    let two = lab.create(&two);
    for (guest, name) in [(one, "xvda"), (one, "xvdb"), (&two, "xvda")] {
        device(guest, name, true);
    }
    two
}

/// A guest of two processors has two rings, and what goes in by one comes out by the other.
fn each_processor_has_a_ring(lab: &Lab, two: &Guest, pages: u32) {
    let said = lab.first(
        "two rings",
        "xenstore-read /local/domain/$(xl domid two)/device/vbd/51712/multi-queue-num-queues
         grep -o 'connected, 2 ring(s) of .* page(s)' /tmp/served.err",
    );
    assert_eq!(said, format!("2\nconnected, 2 ring(s) of {pages} page(s)\n"));
    let said = run(
        two,
        "set -e
         for mask in 1 2; do
             head -c 1048576 /dev/urandom >/tmp/$mask
             taskset $mask dd if=/tmp/$mask of=/dev/xvda bs=64k seek=$((mask * 16)) oflag=direct status=none
         done
         for mask in 1 2; do
             taskset $((3 - mask)) dd if=/dev/xvda bs=64k skip=$((mask * 16)) count=16 iflag=direct status=none |
                 cmp - /tmp/$mask
         done
         grep blkif /proc/interrupts",
        "both rings",
    );
    let calls =
        |line: &str| line.split_whitespace().filter_map(|word| word.parse::<u64>().ok()).sum();
    let calls: Vec<u64> = said.lines().map(calls).collect();
    assert!(calls.len() == 2 && calls.iter().all(|count| *count > 0), "{said}");
}

/// A kernel's own end, with writes in flight, closes the image, and whoever waits for the guest is told.
fn a_guest_that_panics_lets_go(lab: &Lab, guest: Guest) {
    let began = Instant::now();
    let error = guest
        .exec(
            "dd if=/dev/zero of=/dev/xvda bs=64k oflag=direct status=none &
             sleep 0.2
             echo c >/proc/sysrq-trigger
             sleep 1000",
            LONG,
        )
        .expect_err("a guest that panicked");
    let said = error.to_string();
    assert!(said.contains("the guest ended") && said.contains("sysrq"), "{said}");
    eprintln!("a panic was known after {:?}", began.elapsed());
    lab.first(
        "its image",
        "for i in $(seq 600); do
             ! grep -q 'xen2-51712: closed' /tmp/served.err || break
             sleep 0.1
         done
         grep 'xen2-51712: closed' /tmp/served.err
         ringtap check -q /srv/vm.qcow2",
    );
}

/// More requests than its rings have places, many of them at a time, and some of 1 MiB.
fn large_rings_are_served_around_their_end(two: &Guest) {
    let said = run(two, "cat /sys/block/xvda/queue/max_segments", "segments of a request");
    assert_eq!(said, "256\n");
    for (load, offset) in [(4096, 0), (1 << 20, 0)] {
        let depth = if load == 4096 { 200 } else { 8 };
        let load = FioVerify::new("/dev/xvda").size(6 * MIB).block(load).depth(depth).seed(offset);
        load.run(two, LONG).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Discards free room in the image, and flushes come to the disk below.
fn what_a_guest_asks_for_reaches_the_image(lab: &Lab, one: &Guest) {
    run(one, "dd if=/dev/urandom of=/dev/xvda bs=1M count=16 oflag=direct status=none", "data");
    let blocks = |story: &str| -> u64 {
        let said = lab.first(story, "stat -c %b /srv/raw");
        said.trim().parse().unwrap_or_else(|_| panic!("{story}: {said}"))
    };
    let before = blocks("what it takes");
    run(one, "blkdiscard -o 4M -l 8M /dev/xvda", "a discard");
    let freed = before.saturating_sub(blocks("what is left"));
    assert!((16_000..17_000).contains(&freed), "{freed} of 16384 blocks are free");
    run(
        one,
        "[ $(dd if=/dev/xvda bs=1M skip=4 count=8 iflag=direct status=none | tr -d '\\0' | wc -c) = 0 ]",
        "zeros",
    );
    lab.first("a server's own count", "kill -USR1 $(cat /tmp/served.pid)");
    run(one, "echo last | dd of=/dev/xvda conv=fsync status=none", "a flush");
    let said = lab.first(
        "another",
        "kill -USR1 $(cat /tmp/served.pid)
         for i in $(seq 100); do
             [ $(grep -c '\"flush\"' /tmp/served.err) -lt 2 ] || break
             sleep 0.1
         done
         grep '\"flush\"' /tmp/served.err",
    );
    let flushes = |line: &str| {
        let all: serde_json::Value = serde_json::from_str(line).ok()?;
        all["stats"][0]["flush"]["ended"].as_u64()
    };
    let counts: Vec<u64> = said.lines().filter_map(flushes).collect();
    assert!(counts.len() == 2 && counts[1] > counts[0], "{said}");
}

/// A CD-ROM is shown as one, and is not written to.
fn a_cdrom_is_one(lab: &Lab, one: &Guest) {
    lab.first(
        "a CD-ROM",
        "dd if=/dev/urandom of=/srv/cd bs=1M count=4 status=none
         xl block-attach one format=raw,vdev=xvdc,access=r,devtype=cdrom,script=block-ringtap,target=/srv/cd",
    );
    device(one, "xvdc", true);
    let said = run(
        one,
        "cat /sys/block/xvdc/ro /sys/block/xvdc/removable
         dd if=/dev/xvdc bs=1M iflag=direct status=none | md5sum
         ! dd if=/dev/zero of=/dev/xvdc bs=4k count=1 oflag=direct status=none 2>/dev/null",
        "its looks",
    );
    let sum = lab.first("its end", "md5sum </srv/cd\nxl block-detach one xvdc");
    assert_eq!(said, format!("1\n1\n{sum}"));
}

/// A disk on /srv/raw grows under load: the guest sees it, and writes behind the old end.
fn a_disk_grows(lab: &Lab, one: &Guest, disk: &str, size: u64) {
    let load = FioVerify::new(format!("/dev/{disk}")).size(4 * MIB);
    let load = load.start(one).unwrap_or_else(|error| panic!("{error}"));
    lab.first("resize", &format!("truncate -s {size} /srv/raw\nkill -HUP $(cat /tmp/served.pid)"));
    let wait = format!(
        "until [ $(blockdev --getsize64 /dev/{disk}) = {size} ]; do sleep 0.1; done
         echo last | dd of=/dev/{disk} bs=512 seek={} conv=sync,fsync status=none",
        size / 512 - 1
    );
    run(one, &wait, "the new size");
    load.wait(LONG).unwrap_or_else(|error| panic!("the load: {error}"));
    assert_eq!(lab.first("its end", "tail -c 512 /srv/raw | head -c 4"), "last");
}

/// The toolstack takes an idle disk from a running guest, and what was written is in the image.
fn a_disk_is_taken_away(lab: &Lab, one: &Guest) {
    run(one, "echo from the guest | dd of=/dev/xvda conv=fsync status=none", "a write");
    let said = lab.first("detached", "xl block-detach one xvda\nattached one\nhead -c 14 /srv/raw");
    assert_eq!(said.lines().count(), 2, "one other disk is left: {said}");
    assert!(said.ends_with("from the guest"), "{said}");
}

/// Two guests write and check what they wrote, while their server is killed and started again.
fn two_at_once_outlive_the_server(lab: &Lab, one: &Guest, two: &Guest) {
    let load = |disk: &str, seed| FioVerify::new(format!("/dev/{disk}")).size(24 * MIB).seed(seed);
    let start = |guest, disk: &str, seed| {
        load(disk, seed).start(guest).unwrap_or_else(|error| panic!("{error}"))
    };
    // No lock on its image has the next server wait for the last one's end. The record is one of those
    // that are left when a guest ends while no server runs.
    let sum = lab.first(
        "a read-only disk",
        "head -c 4194304 /dev/urandom >/srv/still
         xl block-attach one $(disk xvdc r /srv/still)
         touch /run/ringtap/xen/xen999-51712q0
         md5sum </srv/still",
    );
    device(one, "xvdc", true);
    let read = "dd if=/dev/xvdc bs=1M iflag=direct status=none | md5sum";
    let (raw, vhd, qcow2) = (start(one, "xvda", 1), start(one, "xvdb", 2), start(two, "xvda", 3));
    // fio gives up where it cannot begin within seconds.
    for (guest, disk) in [(one, "xvda"), (one, "xvdb"), (two, "xvda")] {
        let writes = format!("$(awk '{{ print $5 }}' /sys/block/{disk}/stat)");
        run(guest, &format!("until [ {writes} -gt 100 ]; do sleep 0.1; done"), "first writes");
    }
    for _ in 0..2 {
        lab.first("kill -9", "sleep 1\ncrash\nserve");
        let busy = [&raw, &vhd, &qcow2].iter().any(|load| !load.is_done());
        assert!(busy, "the loads were too short to be killed under");
        assert_eq!(run(one, read, "the read-only disk"), sum);
    }
    lab.first(
        "an image that comes late",
        "crash\nmv /srv/still /srv/late\nserve\nsleep 1
         grep -q 'cannot serve .*; trying again' /tmp/served.err
         mv /srv/late /srv/still",
    );
    assert_eq!(run(one, read, "the read-only disk"), sum);
    lab.first("its end", "xl block-detach one xvdc");
    for (load, story) in [(raw, "raw"), (vhd, "VHD"), (qcow2, "qcow2")] {
        let done = load.wait(LONG).unwrap_or_else(|error| panic!("{story}: {error}"));
        assert_eq!((done.writes, done.reads), (24 * 256, 24 * 256), "{story}");
    }
}

/// One that would offer other things takes over what was offered: two rings, and pages that are the guest's
/// again after each request.
fn another_server_keeps_what_was_promised(lab: &Lab, one: &Guest, two: &Guest) {
    let said = lab.first(
        "other options",
        "kill -TERM $(cat /tmp/served.pid)
         ended
         : >/tmp/served.err
         serve --queues 1
         for i in $(seq 300); do
             [ $(grep -c connected, /tmp/served.err) -lt 3 ] || break
             sleep 0.1
         done
         grep connected, /tmp/served.err",
    );
    let count = |text: &str| said.matches(text).count();
    assert_eq!((count("changing grants"), count("2 ring(s) of 4")), (3, 1), "{said}");
    let reads = "taskset 1 dd if=/dev/xvda of=/dev/null bs=64k count=32 iflag=direct status=none";
    run(two, &format!("{reads}\n{}", reads.replace("taskset 1", "taskset 2")), "both rings");
    let load = FioVerify::new("/dev/xvda").size(4 * MIB).seed(7);
    load.run(one, LONG).unwrap_or_else(|error| panic!("{error}"));
    // What a guest's kernel says of pages that it cannot have back.
    assert!(!one.console().contains("still in use"), "{}", one.console());
}

/// A disk that was attached where pages may stay mapped, beside others where they may not.
fn pages_may_stay_mapped(lab: &Lab, one: &Guest) {
    lab.first(
        "a disk more",
        "truncate -s 32M /srv/kept
         xl block-attach one $(disk xvde w /srv/kept)
         grep -q 'persistent grants' /tmp/served.err",
    );
    device(one, "xvde", true);
    for block in [4096, 65536] {
        let load = FioVerify::new("/dev/xvde").size(4 * MIB).block(block);
        load.run(one, LONG).unwrap_or_else(|error| panic!("{error}"));
    }
    let sum = run(one, "dd if=/dev/xvde bs=1M count=4 iflag=direct status=none | md5sum", "a sum");
    let said = lab.first("its end", "xl block-detach one xvde\nhead -c 4194304 /srv/kept | md5sum");
    assert_eq!(said, sum);
}

/// Its user gets errors and the guest goes on; what was written is in the image, and the image is free.
fn a_disk_is_taken_away_under_load(lab: &Lab, one: &Guest) {
    lab.first(
        "a disk more",
        "ringtap create -q -f qcow2 /srv/busy.qcow2 32M
         xl block-attach one $(disk xvdf w qcow2:/srv/busy.qcow2)",
    );
    device(one, "xvdf", true);
    run(one, "dd if=/dev/urandom of=/dev/xvdf bs=1M count=4 oflag=direct status=none", "data");
    let sum = run(one, "dd if=/dev/xvdf bs=1M count=4 iflag=direct status=none | md5sum", "a sum");
    let load = "fio --name=v --filename=/dev/xvdf --offset=8M --rw=randwrite --bs=16k --iodepth=16 \
                --ioengine=libaio --direct=1 --time_based --runtime=600";
    let job: Job<'_> = one.start(load).unwrap_or_else(|error| panic!("{error}"));
    let said = lab.first(
        "detached under load",
        "sleep 2
         xl block-detach one xvdf
         ringtap check -q /srv/busy.qcow2
         ringtap convert -q -f qcow2 -O raw /srv/busy.qcow2 /srv/copy
         head -c 4194304 /srv/copy | md5sum",
    );
    assert_eq!(said, sum);
    let ended = job.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    assert_ne!(ended.status, 0, "a load on a disk that is gone");
    device(one, "xvdf", false);
}

/// Detached, an image is whole for everyone else; attached again, it is what it was.
fn disks_come_and_go(lab: &Lab, one: &Guest) {
    let sum = |disk: &str| {
        let script = format!("dd if=/dev/{disk} bs=1M count=24 iflag=direct status=none | md5sum");
        run(one, &script, "a sum")
    };
    let (raw, vhd) = (sum("xvda"), sum("xvdb"));
    assert_ne!(raw, vhd);
    let said = lab.first(
        "detached",
        "xl block-detach one xvda
         xl block-detach one xvdb
         attached one
         head -c 25165824 /srv/raw | md5sum
         ringtap convert -q -f vpc -O raw /srv/vm.vhd /srv/copy
         head -c 25165824 /srv/copy | md5sum
         qemu-img info -f vpc /srv/vm.vhd >/dev/null
         xl block-attach one $(disk xvda w vhd:/srv/vm.vhd)
         xl block-attach one $(disk xvdb w /srv/raw)",
    );
    assert_eq!(said, format!("{raw}{vhd}"));
    for name in ["xvda", "xvdb"] {
        device(one, name, true);
    }
    assert_eq!((sum("xvda"), sum("xvdb")), (vhd, raw));
}

fn disks_are_shown_as_they_are(lab: &Lab, one: &Guest) {
    lab.first(
        "a read-only disk",
        "truncate -s 16M /srv/fixed
         xl block-attach one $(disk xvdc r /srv/fixed)",
    );
    device(one, "xvdc", true);
    let said = run(
        one,
        "cat /sys/block/xvdc/ro
         dd if=/dev/xvdc of=/dev/null bs=1M iflag=direct 2>&1 | grep -o '^16+0 records in'
         if dd if=/dev/zero of=/dev/xvdc bs=4k count=1 oflag=direct status=none; then exit 1; fi
         blockdev --getsize64 /dev/xvdb",
        "its looks",
    );
    assert_eq!(said, format!("1\n16+0 records in\n{}\n", 48 * MIB));
    a_disk_grows(lab, one, "xvdb", 64 * MIB);
    let said = lab.first(
        "refusals",
        "for target in /srv/none qcow2:/srv/raw; do
             if xl block-attach one $(disk xvdd w $target) 2>&1; then exit 1; fi
             xl block-detach one xvdd
         done
         attached one",
    );
    assert!(said.contains("/srv/none"), "{said}");
    assert_eq!(said.lines().filter(|line| line.parse::<u32>().is_ok()).count(), 3, "{said}");
}

/// Destroyed under load, a guest leaves nothing: the hypervisor would keep a domain whose pages are
/// still mapped by another.
fn a_guest_may_die_at_any_moment(lab: &Lab, two: Guest) {
    let load = "fio --name=v --filename=/dev/xvda --rw=randwrite --bs=16k --iodepth=32 \
                --ioengine=libaio --direct=1 --time_based --runtime=600";
    let job: Job<'_> = two.start(load).unwrap_or_else(|error| panic!("{error}"));
    let said = lab.first(
        "a guest's death",
        "sleep 3
         id=$(xl domid two)
         xl destroy two
         for i in $(seq 300); do
             [ $(xl list | wc -l) -gt 3 ] || xenstore-exists /local/domain/0/backend/vbd/$id || break
             sleep 0.1
         done
         xl list
         xenstore-ls /local/domain/0/backend/vbd | grep -c two || true
         ringtap check /srv/vm.qcow2
         qemu-img check /srv/vm.qcow2",
    );
    drop(job);
    let list: Vec<&str> = said.lines().take_while(|line| !line.starts_with('0')).collect();
    assert_eq!(list.len(), 3, "a domain is left: {said}");
    drop(two);
}

fn the_server_ends_well(lab: &Lab, one: Guest) {
    run(&one, "dd if=/dev/xvda of=/dev/null bs=1M count=4 iflag=direct", "the other guest");
    drop(one);
    let said = lab.first(
        "the end",
        "kill -TERM $(cat /tmp/served.pid)
         ended
         xenstore-ls -f /local/domain/0/backend 2>/dev/null || true
         echo records: $(ls /run/ringtap/xen)
         cat /tmp/served.err",
    );
    // Images that could not be opened were meant to be refused.
    let wrong = |line: &&str| line.contains("ERROR") && !line.contains("cannot serve");
    assert_eq!(said.lines().find(wrong), None, "{said}");
    assert!(!said.contains("panicked") && !said.contains("vbd/"), "{said}");
    assert!(said.lines().any(|line| line == "records:"), "records are left: {said}");
    let console = lab.host.dom0().console();
    assert!(!console.contains("WARNING:"), "{console}");
}
