//! What the control socket does to a guest's disk while the guest writes: an image that is replaced by an overlay on itself
//! over and over, and a job that ends with the guest's wish.

use ringtap_guest::Guest;
use ringtap_tests::replacements::{LEVELS, SHOW, load, replace, told, wanted};

use crate::lab::{LONG, Lab, device, run};

/// A shell function for the first domain.
const CONTROL: &str = r#"control() { ringtap disk --control unix:/tmp/control "$@"; }"#;

/// What a guest's first disk is known by.
fn disk_of(guest: &str) -> String {
    format!("xen$(xl domid {guest})-51712")
}

/// Of the guest `two`, whose disk is /srv/vm.qcow2.
pub(crate) fn is_replaced_over_and_over(lab: &Lab, two: &Guest) {
    is_replaced(lab, two, LEVELS / 16);
}

/// So often, or as told.
pub(crate) fn is_replaced(lab: &Lab, two: &Guest, by_default: usize) {
    let wanted = wanted(by_default);
    lab.first("before the replacements", "rm -f /tmp/pauses /tmp/held; touch /tmp/held");
    let load = two.start(&load("/dev/xvda")).unwrap_or_else(|error| panic!("{error}"));
    let mut done = 0;
    while done < wanted && !load.is_done() {
        let next = (done + LEVELS).min(wanted);
        lab.first(
            &format!("replacements up to {next}"),
            &replace("ringtap", &disk_of("two"), "/srv", done + 1, next),
        );
        done = next;
    }
    run(two, "touch /tmp/enough", "enough");
    let ended = load.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(ended.status, 0, "the load finds what it wrote: {}{}", ended.stdout, ended.stderr);
    told("Xen", wanted, &lab.first("what came of them", SHOW), &ended.stdout);
}

/// A disk that is copied goes when its guest gives it back. Of the guest `one`, on /srv/raw.
pub(crate) fn goes_with_its_jobs(lab: &Lab, one: &Guest) {
    let said = lab.first(
        "a job at a guest's disk",
        &format!(
            "{CONTROL}
             disk={}
             control list --output json
             ringtap create -q -f qcow2 /srv/copy.qcow2 $(stat -c %s /srv/raw)
             control mirror $disk /srv/copy.qcow2 -f qcow2 --copy --rate 64K --no-wait
             ringtap job list --control unix:/tmp/control --output json
             xl block-detach one xvda
             attached one
             echo given back
             ringtap job list --control unix:/tmp/control --output json
             control list --output json
             rm -f /srv/copy.qcow2",
            disk_of("one")
        ),
    );
    device(one, "xvda", false);
    let (before, after) = said.split_once("given back").expect("it was");
    let runs = |said: &str| said.contains(r#""status":"running""#);
    assert!(runs(before) && !runs(after), "{said}");
    lab.first("the disk again", "xl block-attach one $(disk xvda w /srv/raw)");
    device(one, "xvda", true);
    run(one, "dd if=/dev/xvda of=/dev/null bs=1M count=8 iflag=direct status=none", "a read");
}
