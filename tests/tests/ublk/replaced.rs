//! An image that is replaced by an overlay on itself over and over, under a load that checks what it reads: as in
//! tests/tests/snapshot/many.rs, where the disk is a block device.
//!
//! `RINGTAP_REPLACEMENTS` sets how often; after every 32 the overlays are merged into the image while the load goes on.

use crate::lab::{LONG, Lab};

/// Overlays upon the image at most.
const LEVELS: usize = 32;

/// Writes the disk's beginning as no other turn does, and reads it back, until there is enough.
const LOAD: &str = "cd /tmp
    turn=0
    while [ ! -e /tmp/enough ]; do
        turn=$((turn + 1))
        fio --name=v --filename=/dev/ublkb0 --size=4M --rw=randwrite --bs=4k --iodepth=8 --fsync=64 \
            --ioengine=libaio --direct=1 --overwrite=1 --randseed=$turn --verify=crc32c --do_verify=1 \
            --verify_fatal=1 --verify_state_save=0 --output=/tmp/load || { cat /tmp/load >&2; exit 1; }
    done
    echo $turn";

/// Shell functions: `snapshot NUMBER` has the disk go on in another overlay, and counts it where it was written to soon.
const LIBRARY: &str = r#"
control() { /tmp/ringtap disk --control unix:/tmp/control "$@"; }
snapshot() {
    control snapshot a /mnt/files/over$1.qcow2 --output json >>/tmp/pauses
    for i in $(seq 50); do
        [ $(stat -c %s /mnt/files/over$1.qcow2) -lt 1048576 ] || { echo held >>/tmp/held; break; }
        sleep 0.02
    done
}
"#;

pub fn is_replaced_over_and_over(lab: &Lab) {
    let wanted = std::env::var("RINGTAP_REPLACEMENTS").ok().and_then(|text| text.parse().ok());
    let wanted: usize = wanted.unwrap_or(LEVELS / 8);
    lab.run(
        "an image to be replaced",
        "rm -f /tmp/enough /tmp/pauses /tmp/held
         /tmp/ringtap create -q -f qcow2 /mnt/files/replaced.qcow2 64M
         serve a /mnt/files/replaced.qcow2 -f qcow2 --name a --ublk --control unix:/tmp/control",
    );
    let load = lab.guest.start(LOAD).unwrap_or_else(|error| panic!("{error}"));
    let mut done = 0;
    while done < wanted && !load.is_done() {
        let next = (done + LEVELS).min(wanted);
        lab.run(
            &format!("replacements up to {next}"),
            &format!(
                "{LIBRARY}
                 for number in $(seq {} {next}); do snapshot $number; done
                 control commit a --quiet
                 rm /mnt/files/over*.qcow2",
                done + 1
            ),
        );
        done = next;
    }
    let said = lab.run(
        "what came of them",
        "touch /tmp/enough
         wc -l </tmp/pauses
         wc -l </tmp/held
         sed -n 's/.*\"pause-ns\":\\([0-9]*\\).*/\\1/p' /tmp/pauses | sort -n | tail -n 1",
    );
    let ended = load.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(ended.status, 0, "the load finds what it wrote: {}{}", ended.stdout, ended.stderr);
    let counts: Vec<usize> = said.lines().filter_map(|line| line.trim().parse().ok()).collect();
    let &[taken, held, longest] = counts.as_slice() else { panic!("{said}") };
    let turns = ended.stdout.trim();
    eprintln!("{taken} replacements, {held} overlays held something, {turns} turns of the load");
    eprintln!("requests waited for {} us at most", longest / 1000);
    assert_eq!(taken, wanted);
    assert!(held > 0, "of {wanted} overlays {held} were written to: {said}");
    // Closed, opened anew by its old name, all is as it was.
    lab.run(
        "after the replacements",
        "dd if=/dev/ublkb0 of=/tmp/before bs=1M count=4 iflag=direct status=none
         stop a
         /tmp/ringtap check -q /mnt/files/replaced.qcow2
         serve a /mnt/files/replaced.qcow2 -f qcow2 --ublk
         dd if=/dev/ublkb0 bs=1M count=4 iflag=direct status=none | cmp - /tmp/before
         stop a
         none
         rm /mnt/files/replaced.qcow2 /tmp/before",
    );
}
