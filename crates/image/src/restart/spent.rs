//! Logs that are gone and had nothing that was not taken up: a copy of their image misses nothing that they held.
//!
//! For each a record of four words of the host's order, the boot (2), the number of the image's file and its last generation, in one
//! file of the logs' folder, at whose end each process writes.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::{CLOSED, FIRST, GENERATION, MAGIC, NUMBER};

/// The file.
const NAME: &str = "spent";
const RECORD: usize = 32;
/// It grows no further: copies of images whose logs went later are asked about.
const MOST: u64 = 4 << 20;

/// The log in this file goes.
pub(crate) fn note(folder: &Path, log: &fs::File) {
    if let Err(error) = append(folder, log) {
        tracing::debug!("cannot write down in {} that a log is spent: {error}", folder.display());
    }
}

fn append(folder: &Path, log: &fs::File) -> io::Result<()> {
    let mut bytes = [0; 8 * FIRST];
    log.read_exact_at(&mut bytes, 0)?;
    let word = |at: usize| u64::from_ne_bytes(crate::bytes::get(&bytes, 8 * at));
    if ![MAGIC, CLOSED].contains(&word(0)) || word(NUMBER) == 0 {
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
    let record = [1, 2, NUMBER, GENERATION[1]].map(|at| word(at).to_ne_bytes());
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
