//! The directory of persistent bitmaps (docs/interop/qcow2 of QEMU: "Bitmaps").

use super::header::{MAX_NAME, OFFSET_MASK};
use super::name;
use super::offline::Offline;
use super::tool::ToolError;
use crate::bytes::{be16, be32, be64};

/// The most bytes of a directory.
const MAX_DIRECTORY: u64 = 16 << 20;
/// The most bitmaps of an image.
pub(super) const MAX_BITMAPS: u32 = 65535;
/// The most bytes of the tables of all bitmaps.
const MAX_TABLES: u64 = 16 << 20;
/// Where an entry has its flags.
const FLAGS_AT: usize = 12;
/// Granularities are 2^9 to 2^31 bytes.
pub(super) const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;

/// Flags of a bitmap.
pub mod flag {
    /// It was not saved: what it says is not to be believed.
    pub const IN_USE: u32 = 1;
    /// It is enabled: every write must be noted in it.
    pub const AUTO: u32 = 2;
    /// It may be used without knowing its extra data.
    pub const EXTRA_COMPATIBLE: u32 = 4;
}

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapEntry {
    /// Where its table lies.
    pub table_offset: u64,
    /// Entries of its table, one for each cluster of its data.
    pub table_size: u32,
    /// See [`flag`].
    pub flags: u32,
    /// 1: dirty tracking. No other kind exists.
    pub kind: u8,
    /// A bit stands for 2 to the power of this bytes of the disk.
    pub granularity_bits: u8,
    /// Its name, as it is shown.
    pub name: String,
    /// The bytes of that in the image, where they are no text.
    pub odd_name: Option<Vec<u8>>,
    /// Extra data, kept as it is.
    pub extra: Vec<u8>,
}

impl BitmapEntry {
    /// The entry at the beginning of `bytes`, and its length.
    fn parse(bytes: &[u8]) -> Option<(BitmapEntry, usize)> {
        let name_len = usize::from(be16(bytes, 18)?);
        let extra_len = be32(bytes, 20)? as usize;
        let extra = bytes.get(24..24usize.checked_add(extra_len)?)?;
        let name = bytes.get(24 + extra_len..24 + extra_len + name_len)?;
        let (shown, odd_name) = name::of_bytes(name);
        let entry = BitmapEntry {
            table_offset: be64(bytes, 0)?,
            table_size: be32(bytes, 8)?,
            flags: be32(bytes, 12)?,
            kind: *bytes.get(16)?,
            granularity_bits: *bytes.get(17)?,
            name: shown,
            odd_name,
            extra: extra.to_vec(),
        };
        let len = entry.len();
        Some((entry, len))
    }

    fn name_bytes(&self) -> &[u8] {
        name::bytes(&self.name, &self.odd_name)
    }

    /// Its bytes in the directory.
    pub(super) fn len(&self) -> usize {
        (FLAGS_AT + 12 + self.extra.len() + self.name_bytes().len()).next_multiple_of(8)
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.table_size.to_be_bytes());
        bytes.extend_from_slice(&self.flags.to_be_bytes());
        bytes.extend_from_slice(&[self.kind, self.granularity_bits]);
        bytes.extend_from_slice(&(self.name_bytes().len() as u16).to_be_bytes());
        bytes.extend_from_slice(&(self.extra.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&self.extra);
        bytes.extend_from_slice(self.name_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }

    /// Whether the bitmap's content may be believed and changed here.
    pub fn is_usable(&self) -> bool {
        self.is_known() && !self.is_in_use()
    }

    /// Whether nothing about it is unknown here.
    pub(super) fn is_known(&self) -> bool {
        let extra_known = self.extra.is_empty() || self.flags & flag::EXTRA_COMPATIBLE != 0;
        self.kind == 1 && extra_known && GRANULARITY_BITS.contains(&self.granularity_bits)
    }

    /// Whether it was not saved.
    pub fn is_in_use(&self) -> bool {
        self.flags & flag::IN_USE != 0
    }

    /// Whether every write must be noted in it.
    pub fn is_enabled(&self) -> bool {
        self.flags & flag::AUTO != 0
    }

    fn fault(&self) -> Option<&'static str> {
        if !(1..=MAX_NAME).contains(&self.name_bytes().len()) {
            Some("its name must have 1 to 1023 bytes")
        } else if self.flags & !7 != 0 {
            Some("it has flags that this version does not know")
        } else {
            None
        }
    }
}

/// Write the flags into the directory in its place: each lies within a sector. All else of it stays as it is.
pub(super) async fn write_flags(
    image: &Offline<'_>,
    entries: &[BitmapEntry],
) -> Result<(), ToolError> {
    if let Some(extension) = image.header.bitmaps() {
        let (offset, len) = (extension.directory_offset, extension.directory_size);
        let mut bytes = image.read(offset, len).await?;
        let mut at = FLAGS_AT;
        for entry in entries {
            if let Some(flags) = bytes.get_mut(at..at + 4) {
                flags.copy_from_slice(&entry.flags.to_be_bytes());
            }
            at += entry.len();
        }
        image.write(offset, &bytes).await?;
        image.sync().await?;
    }
    Ok(())
}

/// Why bitmaps take more than is read, if they do; `len` is that of their directory.
pub(super) fn too_much(entries: &[BitmapEntry], len: u64) -> Option<String> {
    let tables: u64 = entries.iter().map(|entry| u64::from(entry.table_size) * 8).sum();
    let over = |what: &str, len: u64, most: u64| {
        (len > most).then(|| format!("{what} of {len} bytes, and {most} are the most"))
    };
    over("a directory of bitmaps", len, MAX_DIRECTORY)
        .or_else(|| over("tables of bitmaps", tables, MAX_TABLES))
}

/// The directory's bytes.
pub fn to_bytes(entries: &[BitmapEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| entry.write(&mut bytes));
    bytes
}

/// `count` entries from the directory's bytes, which are no more and no less. The error says what is
/// wrong.
pub fn parse(bytes: &[u8], count: u32) -> Result<Vec<BitmapEntry>, String> {
    let mut entries = Vec::new();
    let mut rest = bytes;
    for number in 0..count {
        let cut_off = || format!("entry {number} is cut off");
        let (entry, len) = BitmapEntry::parse(rest).ok_or_else(cut_off)?;
        if let Some(fault) = entry.fault() {
            return Err(format!("entry {number} ({:?}): {fault}", entry.name));
        }
        rest = rest.get(len..).ok_or_else(cut_off)?;
        entries.push(entry);
    }
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find_map(|pair| pair.first().filter(|name| pair.last() == Some(name))) {
        Some(name) => Err(format!("two bitmaps are called {name:?}")),
        None if !rest.is_empty() => Err(format!("{} bytes are left over", rest.len())),
        None => Ok(entries),
    }
}

/// The bitmaps of an image; none where it has no consistent ones.
pub(super) async fn read(image: &Offline<'_>) -> Result<Vec<BitmapEntry>, ToolError> {
    let Some(extension) = image.header.bitmaps() else { return Ok(Vec::new()) };
    let (offset, len) = (extension.directory_offset, extension.directory_size);
    let wrong = |what: String| {
        image.corrupt(format!("the bitmap directory at {offset:#x} cannot be read: {what}"))
    };
    if len > MAX_DIRECTORY || extension.count == 0 || extension.count > MAX_BITMAPS {
        return Err(wrong(format!("it has {} bitmaps in {len} bytes", extension.count)));
    }
    if !image.is_cluster(offset) || !image.is_in_file(offset, len.max(1)) {
        return Err(wrong("it must lie in the file, at the beginning of a cluster".to_owned()));
    }
    let entries = parse(&image.read(offset, len).await?, extension.count).map_err(wrong)?;
    if let Some(found) = too_much(&entries, len) {
        return Err(wrong(found));
    }
    for entry in &entries {
        let len = u64::from(entry.table_size) * 8;
        if len > 0
            && !(image.is_cluster(entry.table_offset) && image.is_in_file(entry.table_offset, len))
        {
            let name = &entry.name;
            return Err(wrong(format!("the table of {name:?} is said to lie past the file's end")));
        }
    }
    Ok(entries)
}

/// The table of a bitmap. The error where an entry leads nowhere.
pub(super) async fn read_table(
    image: &Offline<'_>,
    entry: &BitmapEntry,
) -> Result<Vec<u64>, ToolError> {
    let table = image.read_table(entry.table_offset, u64::from(entry.table_size)).await?;
    for (index, word) in table.iter().enumerate() {
        let offset = word & OFFSET_MASK;
        let fine = match offset {
            0 => *word <= 1,
            offset => *word == offset && image.is_cluster(offset),
        };
        if !fine {
            let found =
                format!("entry {index} of the table of bitmap {:?} is {word:#x}", entry.name);
            return Err(image.corrupt(found));
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back() {
        let first = BitmapEntry {
            table_offset: 7 << 16,
            table_size: 3,
            flags: flag::AUTO,
            kind: 1,
            granularity_bits: 16,
            name: "backup".into(),
            odd_name: None,
            extra: vec![],
        };
        let second = BitmapEntry { name: "other".into(), extra: vec![1, 2, 3], ..first.clone() };
        assert!(first.is_usable() && !second.is_usable());
        let bytes = to_bytes(&[first.clone(), second.clone()]);
        assert_eq!(parse(&bytes, 2), Ok(vec![first.clone(), second]));
        for len in 0..bytes.len() {
            parse(&bytes[..len], 2).expect_err("cut off");
        }
        parse(&bytes, 1).expect_err("left over");
        let twice = to_bytes(&[first.clone(), first]);
        assert!(parse(&twice, 2).expect_err("the same name").contains("\"backup\""));
    }
}
