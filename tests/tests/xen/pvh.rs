//! A guest of the kind that has hardware help, which here is QEMU's emulation of it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ringtap_guest::Domain;

use super::a_disk_grows;
use super::lab::{Lab, MIB, device, run};

/// Guests to try: about one in ten ends by QEMU's fault, see docs/xen.md.
const GUESTS: usize = 4;

#[test]
#[ignore = "one more boot under TCG, and perhaps more guests than one"]
fn a_pvh_guest_has_its_disk_from_ringtap() {
    let lab = Lab::boot();
    let able = lab.first("what there is", "xl info | grep virt_caps");
    assert!(able.contains("hvm"), "the processor carries no PVH guests: {able}");
    lab.first("the server", "serve");
    let mut ended = 0;
    loop {
        let name = format!("pvh{ended}");
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| one_guest(&lab, &name))) else { break };
        let faults = lab.first("faults of QEMU", FAULTS);
        if faults.trim().parse() != Ok(ended + 1) || ended + 1 == GUESTS {
            eprintln!("{}", lab.first("what Xen says", "xl dmesg | tail -n 60"));
            resume_unwind(panic);
        }
        ended += 1;
        eprintln!("{name} ended by a triple fault; another guest");
        lab.first("its end", &format!("xl destroy {name} 2>/dev/null || true"));
    }
    lab.first("the server's end", "kill -TERM $(cat /tmp/served.pid)\nended");
}

/// How many guests ended by a triple fault, as those do that have no disk at all: a backend that spoils a
/// guest's memory has its kernel say something.
const FAULTS: &str = "xl dmesg | grep -c 'Triple fault' || true";

fn one_guest(lab: &Lab, name: &str) {
    let guest = lab.create(&Domain::new(name).memory(320 << 20).pvh());
    assert_eq!(run(&guest, "cat /sys/hypervisor/guest_type", "its kind").trim(), "PVH");
    lab.first(
        "its disk",
        &format!(
            "rm -f /srv/raw
             truncate -s 48M /srv/raw
             xl block-attach {name} $(disk xvda w /srv/raw)"
        ),
    );
    device(&guest, "xvda", true);
    a_disk_grows(lab, &guest, "xvda", 64 * MIB);
    lab.first("detached", &format!("xl block-detach {name} xvda"));
}
