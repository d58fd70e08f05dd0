//! An image in a guest that is replaced by an overlay on itself over and over, under a load that checks what it reads.
//!
//! `RINGTAP_REPLACEMENTS` sets how often; after every [`LEVELS`] the overlays are merged into the image while the load goes on.

use serde_json::Value;

/// Overlays upon the image at most.
pub const LEVELS: usize = 32;

/// Shows what `snapshot` has left behind, for [`told`].
pub const SHOW: &str = "wc -l </tmp/held
     cat /tmp/pauses";

/// How long requests waited at each replacement.
#[derive(Default)]
pub struct Pauses {
    all: Vec<[u64; 3]>,
}

impl Pauses {
    /// Add what the server told of one.
    pub fn add(&mut self, told: &Value) {
        let [pause, drain] =
            ["pause-ns", "drain-ns"].map(|key| told[key].as_u64().expect("nanoseconds"));
        assert!(drain <= pause, "{told}");
        self.add_one(pause, drain);
    }

    /// Add a pause, and until when of it requests in flight ended, in nanoseconds.
    pub fn add_one(&mut self, pause: u64, drain: u64) {
        self.all.push([pause, drain, pause - drain]);
    }

    /// How many there were.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Print how they are distributed.
    pub fn print(&self, transport: &str) {
        let what = ["pause", "of that requests in flight", "of that the exchange"];
        for (column, what) in what.iter().enumerate() {
            let times: Vec<u64> = self.all.iter().map(|one| one[column]).collect();
            println!("{transport}, {}: {what}: {}", times.len(), distribution(times));
        }
    }
}

/// The median, the times that a tenth and a hundredth are longer than, and the longest, of nanoseconds.
fn distribution(mut times: Vec<u64>) -> String {
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 100).or(times.last());
    let [half, most, nearly_all, longest] =
        [50, 90, 99, 100].map(|part| at(part).map_or(0, |ns| ns / 1000));
    format!("p50 {half} us, p90 {most} us, p99 {nearly_all} us, max {longest} us")
}

/// How many are wanted.
pub fn wanted(by_default: usize) -> usize {
    let told = std::env::var("RINGTAP_REPLACEMENTS").ok().and_then(|text| text.parse().ok());
    told.unwrap_or(by_default)
}

/// Writes a disk's beginning as no other turn does, and reads it back.
pub fn turn(device: &str, number: &str) -> String {
    format!(
        "cd /tmp
         fio --name=v --filename={device} --size=4M --rw=randwrite --bs=4k --iodepth=8 --fsync=64 \
             --ioengine=libaio --direct=1 --overwrite=1 --randseed={number} --verify=crc32c --do_verify=1 \
             --verify_fatal=1 --verify_state_save=0 --output=/tmp/load || {{ cat /tmp/load >&2; exit 1; }}"
    )
}

/// The same turn by turn, until /tmp/enough is there.
pub fn load(device: &str) -> String {
    let turn = turn(device, "$turn");
    format!(
        "turn=0
         while [ ! -e /tmp/enough ]; do
             turn=$((turn + 1))
             {turn}
         done
         echo $turn"
    )
}

/// A script that has a disk go on in the overlays from `first` to `last` in a folder, those counted that were written to, and
/// then in its image again.
pub fn replace(ringtap: &str, disk: &str, folder: &str, first: usize, last: usize) -> String {
    format!(
        r#"control() {{ {ringtap} disk --control unix:/tmp/control "$@"; }}
        disk={disk}
        for number in $(seq {first} {last}); do
            control snapshot $disk {folder}/over$number.qcow2 --output json >>/tmp/pauses
        done
        # One that holds nothing has a quarter of this. Programs take long where they are translated: one for all.
        for size in $(stat -c %s {folder}/over*.qcow2); do
            [ $size -lt 1048576 ] || echo held >>/tmp/held
        done
        control commit $disk --quiet
        rm {folder}/over*.qcow2
        "#
    )
}

/// Print what came of them, as [`SHOW`] says, after so many turns of the load.
pub fn told(transport: &str, wanted: usize, said: &str, turns: &str) {
    let mut lines = said.lines();
    let held = lines.next().and_then(|line| line.trim().parse::<usize>().ok());
    let held = held.unwrap_or_else(|| panic!("{said}"));
    let mut pauses = Pauses::default();
    lines.for_each(|line| pauses.add(&serde_json::from_str(line).expect("JSON")));
    pauses.print(transport);
    println!("{transport}: {} turns of the load, {held} overlays held something", turns.trim());
    assert_eq!(pauses.count(), wanted, "{said}");
    assert!(held > 0, "of {wanted} overlays none was written to: {said}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_that_of_all_that_was_told() {
        let times = (1..=1000).rev().map(|us| us * 1000).collect();
        assert_eq!(distribution(times), "p50 501 us, p90 901 us, p99 991 us, max 1000 us");
        assert_eq!(distribution(vec![7000]), "p50 7 us, p90 7 us, p99 7 us, max 7 us");
        assert_eq!(distribution(vec![]), "p50 0 us, p90 0 us, p99 0 us, max 0 us");
    }
}
