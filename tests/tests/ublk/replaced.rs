//! An image that is replaced by an overlay on itself over and over, under a load that checks what it reads: as in
//! tests/tests/snapshot/many.rs, where the disk is a block device.

use ringtap_tests::replacements::{LEVELS, SHOW, load, replace, told, wanted};

use crate::lab::{LONG, Lab};

pub fn is_replaced_over_and_over(lab: &Lab) {
    is_replaced(lab, LEVELS / 8);
}

/// So often, or as told.
pub fn is_replaced(lab: &Lab, by_default: usize) {
    let wanted = wanted(by_default);
    lab.run(
        "an image to be replaced",
        "rm -f /tmp/enough /tmp/pauses /tmp/held
         touch /tmp/held
         /tmp/ringtap create -q -f qcow2 /mnt/files/replaced.qcow2 64M
         serve a /mnt/files/replaced.qcow2 -f qcow2 --name a --ublk --control unix:/tmp/control",
    );
    let free = || -> u64 {
        let said = lab.run("what is free", "set -- $(df -k /mnt/files | tail -n 1)\necho $4");
        said.trim().parse().unwrap_or_else(|error| panic!("{error}: {said}"))
    };
    let before = free();
    let load = lab.guest.start(&load("/dev/ublkb0")).unwrap_or_else(|error| panic!("{error}"));
    let mut done = 0;
    while done < wanted && !load.is_done() {
        let next = (done + LEVELS).min(wanted);
        lab.run(
            &format!("replacements up to {next}"),
            &replace("/tmp/ringtap", "a", "/mnt/files", done + 1, next),
        );
        done = next;
    }
    // The image holds 4 MiB more; and a queue lets go of the last overlay when it has something to do.
    let lost = before.saturating_sub(free());
    eprintln!("{lost} KiB less free than before {done} replacements");
    assert!(lost < 12 << 10, "overlays that were removed still take {lost} KiB");
    let said = lab.run("what came of them", &format!("touch /tmp/enough\n{SHOW}"));
    let ended = load.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(ended.status, 0, "the load finds what it wrote: {}{}", ended.stdout, ended.stderr);
    told("ublk", wanted, &said, &ended.stdout);
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
