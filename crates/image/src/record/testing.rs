//! What stands in records, as it would be written again, and what becomes of the file of a transaction: for fuzz targets.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::goes_on::Successor;
use super::identity::handle_in;
use super::kept::Kept;
use super::known::{Allowed, Known};
use super::noted;
use super::transaction::{Part, take_back};

/// What kinds of records there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A file of the state folder.
    File,
    /// What an image may name.
    Names,
    /// Whose a data file is.
    Owner,
    /// Where a disk goes on.
    Successor,
    /// A part of a transaction.
    Part,
    /// That an image has a restart log.
    Log,
}

impl Record {
    /// All of them.
    pub const ALL: [Record; 6] =
        [Record::File, Record::Names, Record::Owner, Record::Successor, Record::Part, Record::Log];
}

fn again<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> Option<Vec<u8>> {
    serde_json::to_vec(&serde_json::from_slice::<T>(bytes).ok()?).ok()
}

/// A record as it would be written again; none where it is none.
pub fn written_again(record: Record, bytes: &[u8]) -> Option<Vec<u8>> {
    match record {
        Record::File => again::<Kept>(bytes),
        Record::Names => again::<Vec<Allowed>>(bytes),
        Record::Owner => again::<Known>(bytes),
        Record::Successor => again::<Successor>(bytes),
        Record::Part => again::<Part>(bytes),
        Record::Log => noted::again(std::str::from_utf8(bytes).ok()?),
    }
}

/// Whether a file could be found by what an identity says.
pub fn has_handle(identity: &str) -> bool {
    handle_in(identity).is_some()
}

/// Whether the file of a transaction is not needed any more once that part is taken back.
///
/// # Errors
/// Where it cannot be read.
pub fn ends_with(file: &Path, part: usize) -> std::io::Result<bool> {
    take_back(file, part)
}
