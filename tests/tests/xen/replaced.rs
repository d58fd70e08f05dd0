//! What the control socket does to a guest's disk while the guest writes: an image that is replaced by an overlay on itself
//! over and over, and jobs that end with the guest's wish.
//!
//! `RINGTAP_REPLACEMENTS` sets how often; after every 32 the overlays are merged into the image while the load goes on.

use ringtap_guest::Guest;

use crate::lab::{LONG, Lab, device, run};

/// Overlays upon the image at most.
const LEVELS: usize = 32;

/// Writes the disk's beginning as no other turn does, and reads it back, until there is enough.
const LOAD: &str = "turn=0
    while [ ! -e /tmp/enough ]; do
        turn=$((turn + 1))
        fio --name=v --filename=/dev/xvda --size=4M --rw=randwrite --bs=4k --iodepth=8 --fsync=64 \
            --ioengine=libaio --direct=1 --overwrite=1 --randseed=$turn --verify=crc32c --do_verify=1 \
            --verify_fatal=1 --verify_state_save=0 --output=/tmp/load || { cat /tmp/load >&2; exit 1; }
    done
    echo $turn";

/// Shell functions for the first domain: `snapshot DISK NUMBER` has a disk go on in another overlay, and counts it where it
/// was written to soon.
const LIBRARY: &str = r#"
control() { ringtap disk --control unix:/tmp/control "$@"; }
snapshot() {
    over=/srv/over$2.qcow2
    control snapshot $1 $over --output json >>/tmp/pauses
    for i in $(seq 50); do
        [ $(stat -c %s $over) -lt 1048576 ] || { echo held >>/tmp/held; break; }
        sleep 0.02
    done
}
disk_of() { echo xen$(xl domid $1)-51712; }
"#;

/// Of the guest `two`, whose disk is /srv/vm.qcow2.
pub(crate) fn is_replaced_over_and_over(lab: &Lab, two: &Guest) {
    let wanted = std::env::var("RINGTAP_REPLACEMENTS").ok().and_then(|text| text.parse().ok());
    let wanted: usize = wanted.unwrap_or(LEVELS / 16);
    lab.first("before the replacements", "rm -f /tmp/pauses /tmp/held; touch /tmp/held");
    let load = two.start(LOAD).unwrap_or_else(|error| panic!("{error}"));
    let mut done = 0;
    while done < wanted && !load.is_done() {
        let next = (done + LEVELS).min(wanted);
        lab.first(
            &format!("replacements up to {next}"),
            &format!(
                "{LIBRARY}
                 disk=$(disk_of two)
                 for number in $(seq {} {next}); do snapshot $disk $number; done
                 control commit $disk --quiet
                 rm /srv/over*.qcow2",
                done + 1
            ),
        );
        done = next;
    }
    run(two, "touch /tmp/enough", "enough");
    let ended = load.wait(LONG).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(ended.status, 0, "the load finds what it wrote: {}{}", ended.stdout, ended.stderr);
    let said = lab.first(
        "what came of them",
        "wc -l </tmp/pauses
         wc -l </tmp/held
         sed -n 's/.*\"pause-ns\":\\([0-9]*\\).*/\\1/p' /tmp/pauses | sort -n | tail -n 1",
    );
    let counts: Vec<usize> = said.lines().filter_map(|line| line.trim().parse().ok()).collect();
    let &[taken, held, longest] = counts.as_slice() else { panic!("{said}") };
    let turns = ended.stdout.trim();
    eprintln!("{taken} replacements, {held} overlays held something, {turns} turns of the load");
    eprintln!("requests waited for {} us at most", longest / 1000);
    assert_eq!(taken, wanted);
    assert!(held > 0, "of {wanted} overlays {held} were written to: {said}");
}

/// A disk that is copied goes when its guest gives it back. Of the guest `one`, on /srv/raw.
pub(crate) fn goes_with_its_jobs(lab: &Lab, one: &Guest) {
    let said = lab.first(
        "a job at a guest's disk",
        &format!(
            "{LIBRARY}
             disk=$(disk_of one)
             control list --output json
             ringtap create -q -f qcow2 /srv/copy.qcow2 $(stat -c %s /srv/raw)
             control mirror $disk /srv/copy.qcow2 -f qcow2 --copy --rate 64K --no-wait
             ringtap job list --control unix:/tmp/control --output json
             xl block-detach one xvda
             attached one
             echo given back
             ringtap job list --control unix:/tmp/control --output json
             control list --output json
             rm -f /srv/copy.qcow2"
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
