//! The dirty bitmaps of disks: what has changed since each was made or cleared.

use ringtap_vbd::{BitmapChange, DirtyBitmap, MergedFrom, Tracker};
use serde_json::Value;

use super::refusal::Refusal;
use super::schema::{Schema, Shape};
use super::shape::{Read, answer, arguments, object, wrong_type};
use crate::ids::DiskId;
use crate::running::Running;

/// The longest name of a bitmap. Source: QEMU, docs/interop/qcow2.
const NAME_LEN: usize = 1023;
/// The most bitmaps of a disk.
const MOST: usize = 64;
/// The most bytes of the bits of one.
const MOST_BYTES: u64 = 64 << 20;

answer! {
    /// A bitmap.
    struct BitmapInfo {
        "name" name: String,
        /// Bytes that have changed.
        "count" count: u64,
        "granularity" granularity: u64,
        "recording" recording: bool,
        "busy" busy: bool,
        "persistent" persistent: bool,
        /// Its marks are lost: everything may have changed.
        "inconsistent" inconsistent: Option<bool>,
    }
}

/// The bitmaps of a disk.
pub(super) fn bitmaps(running: &Running, id: DiskId) -> Option<Vec<BitmapInfo>> {
    let served = running.disks.get(&id)?;
    let info = |one: DirtyBitmap| BitmapInfo {
        count: one.marks.marked(),
        granularity: one.marks.granularity(),
        recording: one.recording && one.lost.is_none(),
        busy: running.pending.bitmaps.contains(&(id, one.name.clone())),
        persistent: one.persistent,
        inconsistent: one.lost.map(|_| true),
        name: one.name,
    };
    let all: Vec<BitmapInfo> = served.vbd.dirty_bitmaps().into_iter().map(info).collect();
    Some(all).filter(|all| !all.is_empty())
}

arguments! {
    /// `block-dirty-bitmap-add`
    struct AddBitmap {
        "node" node: String,
        "name" name: String,
        "granularity" granularity: Option<u32>,
        "persistent" persistent: Option<bool>,
        "disabled" disabled: Option<bool>,
    }
}

arguments! {
    /// `block-dirty-bitmap-remove`
    struct RemoveBitmap { "node" node: String, "name" name: String }
}

arguments! {
    /// `block-dirty-bitmap-clear`
    struct ClearBitmap { "node" node: String, "name" name: String }
}

arguments! {
    /// `block-dirty-bitmap-enable`
    struct EnableBitmap { "node" node: String, "name" name: String }
}

arguments! {
    /// `block-dirty-bitmap-disable`
    struct DisableBitmap { "node" node: String, "name" name: String }
}

arguments! {
    /// A bitmap of a node.
    struct NodeBitmap { "node" node: String, "name" name: String }
}

/// A bitmap that is merged: by its name, or of another node.
#[derive(Debug)]
pub(crate) enum MergedBitmap {
    /// Of the same node.
    Name(String),
    /// Of that node.
    Of(NodeBitmap),
}

impl Shape for MergedBitmap {
    fn shape(schema: &mut Schema) -> String {
        let (name, of) = (String::shape(schema), NodeBitmap::shape(schema));
        schema.alternate("MergedBitmap", &[&*name, &*of])
    }
}

impl Read for MergedBitmap {
    fn read(value: Value, at: &str) -> Result<MergedBitmap, Refusal> {
        match value {
            Value::String(name) => Ok(MergedBitmap::Name(name)),
            Value::Object(_) => Ok(MergedBitmap::Of(object(value, at)?)),
            _ => Err(wrong_type(at, "string or object")),
        }
    }
}

arguments! {
    /// `block-dirty-bitmap-merge`
    struct MergeBitmaps {
        "node" node: String,
        /// The bitmap in which the others are marked, too.
        "target" target: String,
        "bitmaps" bitmaps: Vec<MergedBitmap>,
    }
}

/// What becomes of bitmaps.
#[derive(Debug)]
pub(super) enum Action {
    Add(AddBitmap),
    Remove(String),
    Clear(String),
    Record(String, bool),
    Merge(MergeBitmaps),
}

/// A bitmap as it is after what comes before in the same transaction.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) name: String,
    lost: bool,
    pub(super) recording: bool,
    /// None: it is not there yet.
    pub(super) marks: Option<std::sync::Arc<Tracker>>,
}

impl From<DirtyBitmap> for Known {
    fn from(of: DirtyBitmap) -> Known {
        let (name, lost, recording) = (of.name, of.lost.is_some(), of.recording);
        Known { name, lost, recording, marks: Some(of.marks) }
    }
}

/// A bitmap that can be used.
pub(super) fn usable<'a>(
    running: &Running,
    id: DiskId,
    known: &'a [Known],
    name: &str,
) -> Result<&'a Known, Refusal> {
    let found = present(running, id, known, name)?;
    if found.lost {
        return Err(Refusal::new(format!(
            "Bitmap '{name}' is inconsistent and cannot be used: everything may have changed. Try \
             block-dirty-bitmap-remove to delete this bitmap from disk"
        )));
    }
    Ok(found)
}

fn present<'a>(
    running: &Running,
    id: DiskId,
    known: &'a [Known],
    name: &str,
) -> Result<&'a Known, Refusal> {
    let found = known.iter().find(|one| one.name == name);
    let found = found.ok_or_else(|| Refusal::new(format!("Dirty bitmap '{name}' not found")))?;
    if running.pending.bitmaps.contains(&(id, name.to_owned())) {
        return Err(Refusal::new(format!(
            "Bitmap '{name}' is currently in use by another operation and cannot be used"
        )));
    }
    Ok(found)
}

impl AddBitmap {
    fn change(self, size: u64, known: &[Known]) -> Result<BitmapChange, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let granularity = self.granularity.unwrap_or(Tracker::GRANULARITY as u32);
        if !granularity.is_power_of_two() || granularity < 512 {
            return refuse("Granularity must be a power of 2, at least 512".into());
        }
        if self.name.is_empty() || self.name.len() > NAME_LEN {
            return refuse("Bitmap name too long, or empty".into());
        }
        if known.iter().any(|one| one.name == self.name) {
            return refuse(format!("Bitmap already exists: {}", self.name));
        }
        if known.len() >= MOST {
            return refuse(format!("a disk has at most {MOST} bitmaps"));
        }
        let granularity = u64::from(granularity);
        if size / granularity / 8 > MOST_BYTES {
            let most = MOST_BYTES >> 20;
            return refuse(format!(
                "its bits would take more than {most} MiB: choose a coarser granularity"
            ));
        }
        let persistent = self.persistent.unwrap_or(false);
        let recording = !self.disabled.unwrap_or(false);
        Ok(BitmapChange::Add { name: self.name, granularity, persistent, recording })
    }
}

impl Action {
    /// What is to be changed, where that can be; `known` are the bitmaps before and after.
    pub(super) fn change(
        self,
        running: &Running,
        id: DiskId,
        known: &mut Vec<Known>,
    ) -> Result<BitmapChange, Refusal> {
        let gone = || Refusal::new("the disk is gone");
        let size = running.disks.get(&id).ok_or_else(gone)?.vbd.size();
        match self {
            Action::Add(add) => {
                let change = add.change(size, known)?;
                if let BitmapChange::Add { name, recording, .. } = &change {
                    let (name, recording) = (name.clone(), *recording);
                    known.push(Known { name, lost: false, recording, marks: None });
                }
                Ok(change)
            }
            Action::Remove(name) => {
                present(running, id, known, &name)?;
                known.retain(|one| one.name != name);
                Ok(BitmapChange::Remove(name))
            }
            Action::Clear(name) => {
                usable(running, id, known, &name)?;
                Ok(BitmapChange::Clear(name))
            }
            Action::Record(name, recording) => {
                usable(running, id, known, &name)?;
                known.iter_mut().filter(|one| one.name == name).for_each(|one| {
                    one.recording = recording;
                });
                Ok(BitmapChange::Record(name, recording))
            }
            Action::Merge(merge) => merge.change(running, id, size, known),
        }
    }
}

impl MergeBitmaps {
    fn change(
        self,
        running: &Running,
        id: DiskId,
        size: u64,
        known: &[Known],
    ) -> Result<BitmapChange, Refusal> {
        usable(running, id, known, &self.target)?;
        let mut from = vec![];
        for one in self.bitmaps {
            from.push(match one {
                MergedBitmap::Name(name) => {
                    usable(running, id, known, &name)?;
                    MergedFrom::Named(name)
                }
                MergedBitmap::Of(of) if of.node == self.node => {
                    usable(running, id, known, &of.name)?;
                    MergedFrom::Named(of.name)
                }
                MergedBitmap::Of(NodeBitmap { node, name }) => {
                    let other = running.named_node(&node)?;
                    let served = running.disks.get(&other);
                    let served = served.ok_or_else(|| Refusal::new("the disk is gone"))?;
                    if served.vbd.size() != size {
                        return Err(Refusal::new(format!(
                            "Bitmaps are of different sizes (destination size is {size}, source size is {})",
                            served.vbd.size()
                        )));
                    }
                    let all: Vec<Known> =
                        served.vbd.dirty_bitmaps().into_iter().map(Known::from).collect();
                    let found = usable(running, other, &all, &name)?;
                    let marks = found.marks.clone();
                    MergedFrom::Marks(marks.ok_or_else(|| Refusal::new("it is not there yet"))?)
                }
            });
        }
        Ok(BitmapChange::Merge(self.target, from))
    }
}

/// Commands that do one thing to a bitmap of a node.
macro_rules! one_action {
    ($($Name:ident |$it:ident| $action:expr;)*) => {
        $(
            impl $Name {
                /// The node, and what is done.
                pub(super) fn action(self) -> (String, Action) {
                    let $it = self;
                    ($it.node.clone(), $action)
                }
            }
        )*
    };
}

one_action! {
    AddBitmap |it| Action::Add(it);
    RemoveBitmap |it| Action::Remove(it.name);
    ClearBitmap |it| Action::Clear(it.name);
    EnableBitmap |it| Action::Record(it.name, true);
    DisableBitmap |it| Action::Record(it.name, false);
    MergeBitmaps |it| Action::Merge(it);
}
