//! The table of internal snapshots (docs/interop/qcow2 of QEMU: "Snapshots"), kept in memory whole.

use super::header::MAX_L1_BYTES;
use super::name;
use super::offline::Offline;
use super::tool::ToolError;
use crate::bytes::{be16, be32, be64};

/// The most bytes of a snapshot table that is kept in memory whole: 256 for each of as many snapshots as there may be.
pub(super) const MAX_TABLE: u64 = 16 << 20;
/// The most bytes of an entry's extra data.
pub(super) const MAX_EXTRA: usize = 1024;
/// What an entry has in front of its extra data.
pub(super) const FIXED: usize = 40;
/// Of a guest whose instructions were not counted.
pub(super) const NO_ICOUNT: [u8; 8] = u64::MAX.to_be_bytes();

/// An internal snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Where its L1 table lies.
    pub l1_offset: u64,
    /// Entries of its L1 table.
    pub l1_size: u32,
    /// Its ID, a number by custom, as it is shown.
    pub id: String,
    /// Its name, as it is shown.
    pub name: String,
    /// The bytes of the ID in the image, where they are no text.
    pub odd_id: Option<Vec<u8>>,
    /// The bytes of the name in the image, where they are no text.
    pub odd_name: Option<Vec<u8>>,
    /// When it was taken: seconds since 1970 and nanoseconds.
    pub taken: (u32, u32),
    /// How long the guest had run, in nanoseconds.
    pub guest_clock: u64,
    /// Bytes of the VM state saved with it; 0 for disk-only ones.
    pub vm_state_size: u64,
    /// The disk's size then, where it is recorded.
    pub disk_size: Option<u64>,
    /// Extra data past that, kept as it is: a count of instructions, and what is not known here.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// An entry and its length in the table. None where the bytes end before it does.
    fn parse(bytes: &[u8]) -> Option<Result<(Snapshot, usize), String>> {
        let [id_len, name_len] = [be16(bytes, 12)?, be16(bytes, 14)?].map(usize::from);
        let extra_len = be32(bytes, 36)? as usize;
        if extra_len > MAX_EXTRA {
            return Some(Err(format!(
                "{extra_len} bytes of extra data, at most 1024 are possible"
            )));
        }
        let extra = bytes.get(FIXED..FIXED + extra_len)?;
        let text_at = FIXED + extra_len;
        let id = bytes.get(text_at..text_at + id_len)?;
        let name = bytes.get(text_at + id_len..text_at + id_len + name_len)?;
        let len = (text_at + id_len + name_len).next_multiple_of(8);
        Some(Ok((Snapshot::of_parts(bytes, extra, (id, name))?, len)))
    }

    /// An entry of what it has at its front, its extra data, and its ID and name.
    pub(super) fn of_parts(
        fixed: &[u8],
        extra: &[u8],
        (id, name): (&[u8], &[u8]),
    ) -> Option<Snapshot> {
        let ((id, odd_id), (name, odd_name)) = (name::of_bytes(id), name::of_bytes(name));
        Some(Snapshot {
            l1_offset: be64(fixed, 0)?,
            l1_size: be32(fixed, 8)?,
            id,
            name,
            odd_id,
            odd_name,
            taken: (be32(fixed, 16)?, be32(fixed, 20)?),
            guest_clock: be64(fixed, 24)?,
            vm_state_size: be64(extra, 0).unwrap_or(u64::from(be32(fixed, 32)?)),
            disk_size: be64(extra, 8),
            extra: extra.get(16..).unwrap_or_default().to_vec(),
        })
    }

    /// Say that the disk was as large as it is, where that is not said.
    pub(super) fn complete(&mut self, size: u64) {
        if self.disk_size.is_none() {
            self.disk_size = Some(size);
        }
        if self.extra.is_empty() {
            self.extra = NO_ICOUNT.to_vec();
        }
    }

    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        let id = name::bytes(&self.id, &self.odd_id);
        let name = name::bytes(&self.name, &self.odd_name);
        bytes.extend_from_slice(&self.l1_offset.to_be_bytes());
        bytes.extend_from_slice(&self.l1_size.to_be_bytes());
        bytes.extend_from_slice(&(id.len() as u16).to_be_bytes());
        bytes.extend_from_slice(&(name.len() as u16).to_be_bytes());
        bytes.extend_from_slice(&self.taken.0.to_be_bytes());
        bytes.extend_from_slice(&self.taken.1.to_be_bytes());
        bytes.extend_from_slice(&self.guest_clock.to_be_bytes());
        let short = u32::try_from(self.vm_state_size).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&short.to_be_bytes());
        let extra_len = if self.disk_size.is_some() { 16 + self.extra.len() } else { 8 };
        bytes.extend_from_slice(&(extra_len as u32).to_be_bytes());
        bytes.extend_from_slice(&self.vm_state_size.to_be_bytes());
        if let Some(size) = self.disk_size {
            bytes.extend_from_slice(&size.to_be_bytes());
            bytes.extend_from_slice(&self.extra);
        }
        bytes.extend_from_slice(id);
        bytes.extend_from_slice(name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
}

/// The table's bytes.
pub(super) fn to_bytes(snapshots: &[Snapshot]) -> Vec<u8> {
    let mut bytes = Vec::new();
    snapshots.iter().for_each(|snapshot| snapshot.write(&mut bytes));
    bytes
}

/// `count` snapshots from the table's bytes, and the table's length. None where it goes on past them.
pub fn parse(bytes: &[u8], count: u32) -> Option<Result<(Vec<Snapshot>, u64), String>> {
    let mut snapshots = Vec::new();
    let mut at = 0;
    for number in 0..count {
        match Snapshot::parse(bytes.get(at..)?)? {
            Ok((snapshot, len)) => {
                snapshots.push(snapshot);
                at += len;
            }
            Err(what) => return Some(Err(format!("snapshot {number} at byte {at}: {what}"))),
        }
    }
    Some(Ok((snapshots, at as u64)))
}

/// The snapshots of an image, and the length of their table in bytes.
pub(super) async fn read(image: &Offline<'_>) -> Result<(Vec<Snapshot>, u64), ToolError> {
    let (count, offset) = (image.header.snapshots, image.header.snapshots_offset);
    if count == 0 {
        return Ok((Vec::new(), 0));
    }
    let wrong = |what: String| {
        image.corrupt(format!("the snapshot table at {offset:#x} cannot be read: {what}"))
    };
    let room = image.len().saturating_sub(offset).min(MAX_TABLE);
    let mut len = room.min(64 << 10);
    let (snapshots, len) = loop {
        let bytes = image.read(offset, len).await?;
        match parse(&bytes, count) {
            Some(end) => break end.map_err(wrong)?,
            None if len < room => len = (len * 4).min(room),
            None => return Err(wrong(format!("it goes on past byte {len}"))),
        }
    };
    let all: u64 = snapshots.iter().map(|snapshot| u64::from(snapshot.l1_size) * 8).sum();
    if all > image.len().next_multiple_of(image.cluster()) {
        return Err(wrong(format!("its L1 tables have {all} bytes, more than the file")));
    }
    for snapshot in &snapshots {
        let bytes = u64::from(snapshot.l1_size) * 8;
        let there = image.is_cluster(snapshot.l1_offset)
            && image.is_in_file(snapshot.l1_offset, bytes.max(1));
        if bytes > MAX_L1_BYTES || (bytes > 0 && !there) {
            let (offset, name) = (snapshot.l1_offset, &snapshot.name);
            let what = format!("snapshot {name:?} has an L1 table of {bytes} bytes at {offset:#x}");
            return Err(wrong(what));
        }
    }
    Ok((snapshots, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back() {
        let first = Snapshot {
            l1_offset: 5 << 16,
            l1_size: 7,
            id: "1".into(),
            name: "before the upgrade".into(),
            odd_id: None,
            odd_name: None,
            taken: (1_700_000_000, 5),
            guest_clock: 9,
            vm_state_size: 1 << 40,
            disk_size: Some(1 << 30),
            extra: vec![1, 2, 3],
        };
        let second = Snapshot { disk_size: None, extra: vec![], id: "22".into(), ..first.clone() };
        let bytes = to_bytes(&[first.clone(), second.clone()]);
        let all = vec![first, second];
        assert_eq!(parse(&bytes, 2), Some(Ok((all, bytes.len() as u64))));
        for len in 0..bytes.len() - 7 {
            assert_eq!(parse(&bytes[..len], 2), None, "{len}");
        }
    }
}
