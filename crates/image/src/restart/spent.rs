//! Logs that are gone and had nothing that was not taken up: a copy of their image misses nothing that they held.
//!
//! For each a record of four words of the host's order, the boot (2), the number of the image's file and its last generation, in one
//! file of the logs' folder, at whose end each process writes.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::{CLOSED, COUNT, FIRST, GENERATION, MAGIC, NUMBER, TURN};

/// The file.
const NAME: &str = "spent";
const RECORD: usize = 32;
/// It grows no further: copies of images whose logs went later are asked about.
const MOST: u64 = 4 << 20;

/// The log in this file goes, unless it has changes: a copy of its image would miss them.
pub(crate) fn note(folder: &Path, log: &fs::File) {
    let has_none = beginning(log).is_ok_and(|words| {
        [0, 1].iter().all(|half| words[TURN[*half]] == 0 || words[COUNT[*half]] == 0)
    });
    if has_none {
        note_taken_up(folder, log);
    }
}

/// The log in this file goes, for an image has what it held.
pub(super) fn note_taken_up(folder: &Path, log: &fs::File) {
    if let Err(error) = append(folder, log) {
        tracing::debug!("cannot write down in {} that a log is spent: {error}", folder.display());
    }
}

fn beginning(log: &fs::File) -> io::Result<[u64; FIRST]> {
    let mut bytes = [0; 8 * FIRST];
    log.read_exact_at(&mut bytes, 0)?;
    Ok(std::array::from_fn(|at| u64::from_ne_bytes(crate::bytes::get(&bytes, 8 * at))))
}

fn append(folder: &Path, log: &fs::File) -> io::Result<()> {
    let words = beginning(log)?;
    if ![MAGIC, CLOSED].contains(&words[0]) || words[NUMBER] == 0 {
        return Ok(());
    }
    let mut file = fs::File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(folder.join(NAME))?;
    if file.metadata()?.len() >= MOST {
        return Err(io::ErrorKind::StorageFull.into());
    }
    let record = [1, 2, NUMBER, GENERATION[1]].map(|at| words[at].to_ne_bytes());
    file.write_all(record.as_flattened())
}

/// Whether one of those of this boot is known to `is_named` by its number and generation.
pub(super) fn any(folder: &Path, boot: u128, is_named: impl Fn(u64, u64) -> bool) -> bool {
    let mut bytes = Vec::new();
    let file = super::open_ours(folder, &folder.join(NAME), false);
    if file.and_then(|mut file| io::Read::read_to_end(&mut file, &mut bytes)).is_err() {
        return false;
    }
    bytes.chunks_exact(RECORD).any(|record| {
        let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(record, 8 * at));
        [word(0), word(1)] == [(boot >> 64) as u64, boot as u64] && is_named(word(2), word(3))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RestartLog, boot};

    #[test]
    fn a_log_that_goes_with_changes_is_not_spent_until_they_are_taken_up() {
        let dir = tempfile::tempdir().expect("a folder");
        let logs = dir.path().join("logs");
        let image = fs::File::create(dir.path().join("image")).expect("an image");
        let log = RestartLog::open(&logs, &image, 10).expect("a log");
        let boot = boot::identity(&logs).expect("a boot");
        let mut all = fs::read_dir(&logs).expect("logs").flatten().map(|entry| entry.path());
        let path = all.find(|path| path.extension().is_some_and(|end| end == "restart"));
        let file = fs::File::open(path.expect("its file")).expect("its file");
        let is_spent = |boot| any(&logs, boot, |number, last| (number, last) == (log.own().1, 7));
        log.start(7);
        assert!(log.append([1, 2, 3]));
        note(&logs, &file);
        assert!(!is_spent(boot));
        note_taken_up(&logs, &file);
        assert!(is_spent(boot) && !is_spent(boot + 1));
        fs::remove_file(logs.join(NAME)).expect("removed");
        log.start(7);
        note(&logs, &file);
        assert!(is_spent(boot));
    }
}
