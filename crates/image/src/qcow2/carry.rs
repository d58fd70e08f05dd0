//! Bitmaps of one image that go on in another, in which its disk is about to go on.
//!
//! The other image says at first that everything has changed: whoever begins anew in between misses nothing. The bits
//! themselves come over in memory, while the disk stands still.

use std::sync::Arc;

use ringtap_io::Io;

use super::bitmap::change_bitmaps;
use super::bitmap_directory::{self, BitmapEntry};
use super::bitmap_set::BitmapSet;
use super::bits::Bits;
use super::offline::Offline;
use super::tool::ToolError;
use super::{BitmapChange, bitmap};
use crate::Container;

/// A bitmap that is to go on in another image.
#[derive(Clone, Debug)]
pub struct Carried {
    name: String,
    bits: Arc<Bits>,
    /// Whether writes are noted in it; else it stays as it is.
    records: bool,
}

/// What becomes of a bitmap of that name in the other image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// It knows nothing of this one.
    IsReplaced,
    /// It is the same, which has noted all since: where it was saved it stays.
    Stays,
}

impl BitmapSet {
    /// Those that writes are noted in, and those that are shown.
    pub fn carried(&self) -> Vec<Carried> {
        let records = |name: &str| self.get(name).is_some();
        let noted = self.names().filter_map(|name| Some((name, self.get(name)?)));
        let shown = self.shown().iter().map(|(name, bits)| (name.as_str(), bits));
        let all = noted.chain(shown.filter(|(name, _)| !records(name)));
        let carried = |(name, bits): (&str, &Arc<Bits>)| Carried {
            name: name.to_owned(),
            bits: bits.clone(),
            records: records(name),
        };
        all.map(carried).collect()
    }

    /// Let those that writes are noted in be as in another set, where that has them. Nothing is noted in either meanwhile; a
    /// server that is killed in the midst of it leaves too much, not too little.
    pub fn be_as(&self, other: &BitmapSet) {
        for name in self.names() {
            if let (Some(bits), Some(theirs)) = (self.get(name), other.get(name)) {
                bits.be_as(theirs);
            }
        }
    }
}

/// Have an image at rest hold these bitmaps: what they say until [`BitmapSet::be_as`] is that everything has changed.
pub async fn carry_bitmaps(
    io: &Io,
    container: &Container,
    all: &[Carried],
    there: There,
) -> Result<(), ToolError> {
    let image = Offline::open(io, container).await?;
    let entries = bitmap_directory::read(&image).await?;
    let mut changes = Vec::new();
    for one in all {
        let own = entries.iter().find(|entry| entry.name == one.name);
        let stays = |entry: &&BitmapEntry| entry.is_usable() && entry.is_enabled() == one.records;
        // What is not noted in either may have been changed by hand in one.
        if there == There::Stays && one.records && own.filter(stays).is_some() {
            continue;
        }
        changes.extend(own.map(|_| BitmapChange::Remove(one.name.clone())));
        let granularity = Some(1 << one.bits.granularity_bits());
        changes.push(BitmapChange::Add { name: one.name.clone(), granularity });
        let bits = bitmap::new_bits(&image, image.header.size, one.bits.granularity_bits())?;
        if one.records {
            bits.set(0, u64::MAX);
        } else {
            bits.merge(&one.bits);
        }
        changes.push(BitmapChange::Merge { into: one.name.clone(), from: Arc::new(bits) });
        changes.extend((!one.records).then(|| BitmapChange::Disable(one.name.clone())));
    }
    if changes.is_empty() { Ok(()) } else { change_bitmaps(io, container, &changes).await }
}

#[cfg(test)]
mod tests {
    use ringtap_sim::{Disk, alone};

    use super::*;
    use crate::Traits;
    use crate::qcow2::{CreateOptions, create, load_bitmap};

    const SIZE: u64 = 1 << 20;
    const PART: u64 = 64 << 10;

    fn marked(part: u64) -> Arc<Bits> {
        let bits = Bits::new(SIZE, 16).expect("bits");
        bits.set(part * PART, PART);
        Arc::new(bits)
    }

    /// What a bitmap of an image says in the end that a commit merges another into, which has noted its parts 1 and 2 in a
    /// bitmap of that name.
    fn after_commit(records: bool) -> Vec<(u64, u64)> {
        let disk = Disk::new(512);
        let container = Container::simulated(disk.add_file(0, 1), 0, Traits::FILE);
        let task = async move |io: Io| {
            let options = CreateOptions { size: SIZE, ..CreateOptions::default() };
            create(&io, &container, None, &options).await.expect("an image");
            let name = || "noted".to_owned();
            let mut changes = vec![
                BitmapChange::Add { name: name(), granularity: Some(PART) },
                BitmapChange::Merge { into: name(), from: marked(1) },
            ];
            changes.extend((!records).then(|| BitmapChange::Disable(name())));
            change_bitmaps(&io, &container, &changes).await.expect("a bitmap");
            let bits = marked(1);
            bits.merge(&marked(2));
            let all = [Carried { name: name(), bits, records }];
            carry_bitmaps(&io, &container, &all, There::Stays).await.expect("carried");
            load_bitmap(&io, &container, "noted").await.expect("a bitmap").runs().collect()
        };
        alone(&disk, 1, task)
    }

    #[test]
    fn a_commit_brings_what_was_done_by_hand_to_a_bitmap_that_does_not_record() {
        assert_eq!(after_commit(false), [(PART, 2 * PART)]);
        // What is noted in both comes over while the disk stands still.
        assert_eq!(after_commit(true), [(PART, PART)]);
    }
}
