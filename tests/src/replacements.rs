//! An image in a guest that is replaced by an overlay on itself over and over, under a load that checks what it reads.
//!
//! `RINGTAP_REPLACEMENTS` sets how often; after every [`LEVELS`] the overlays are merged into the image while the load goes on.

/// Overlays upon the image at most.
pub const LEVELS: usize = 32;

/// Counts what `snapshot` has left behind, for [`told`].
pub const COUNT: &str = "wc -l </tmp/pauses
     wc -l </tmp/held
     sed -n 's/.*\"pause-ns\":\\([0-9]*\\).*/\\1/p' /tmp/pauses | sort -n | tail -n 1";

/// How many are wanted.
pub fn wanted(by_default: usize) -> usize {
    let told = std::env::var("RINGTAP_REPLACEMENTS").ok().and_then(|text| text.parse().ok());
    told.unwrap_or(by_default)
}

/// Writes a disk's beginning as no other turn does, and reads it back, until /tmp/enough is there.
pub fn load(device: &str) -> String {
    format!(
        "cd /tmp
         turn=0
         while [ ! -e /tmp/enough ]; do
             turn=$((turn + 1))
             fio --name=v --filename={device} --size=4M --rw=randwrite --bs=4k --iodepth=8 --fsync=64 \
                 --ioengine=libaio --direct=1 --overwrite=1 --randseed=$turn --verify=crc32c --do_verify=1 \
                 --verify_fatal=1 --verify_state_save=0 --output=/tmp/load || {{ cat /tmp/load >&2; exit 1; }}
         done
         echo $turn"
    )
}

/// A script that has a disk go on in the overlays from `first` to `last` in a folder, each counted where it was written to
/// soon, and then in its image again.
pub fn replace(ringtap: &str, disk: &str, folder: &str, first: usize, last: usize) -> String {
    format!(
        r#"control() {{ {ringtap} disk --control unix:/tmp/control "$@"; }}
        for number in $(seq {first} {last}); do
            over={folder}/over$number.qcow2
            control snapshot {disk} $over --output json >>/tmp/pauses
            # One that holds nothing has a quarter of this.
            for i in $(seq 50); do
                [ $(stat -c %s $over) -lt 1048576 ] || {{ echo held >>/tmp/held; break; }}
                sleep 0.02
            done
        done
        control commit {disk} --quiet
        rm {folder}/over*.qcow2
        "#
    )
}

/// Print what came of them, as [`COUNT`] says, after so many turns of the load.
pub fn told(wanted: usize, said: &str, turns: &str) {
    let counts: Vec<usize> = said.lines().filter_map(|line| line.trim().parse().ok()).collect();
    let &[taken, held, longest] = counts.as_slice() else { panic!("{said}") };
    let turns = turns.trim();
    eprintln!("{taken} replacements, {held} overlays held something, {turns} turns of the load");
    eprintln!("requests waited for {} us at most", longest / 1000);
    assert_eq!(taken, wanted);
    assert!(held > 0, "of {wanted} overlays {held} were written to: {said}");
}
