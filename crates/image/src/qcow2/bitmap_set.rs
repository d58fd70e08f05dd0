//! The bitmaps of an image in use: writes are noted in the enabled ones, some are shown to clients.
//!
//! Before the first write the enabled ones are marked in the image as in use, and a power cut leaves
//! them so: nobody believes them any more. Closing the image stores them. A server that is killed
//! leaves their bits in memory beside the restart log (`kept_bits`), where the next one finds them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringtap_io::Io;

use super::bitmap::{drop_bits, find, load, load_into, put_bits, put_directory};
use super::bitmap_directory::{self, BitmapEntry, flag, read_table, write_flags};
use super::bits::Bits;
use super::header::OFFSET_MASK;
use super::kept_bits::{Kept, Layout};
use super::offline::Offline;
use super::rewrite::Rewrite;
use super::sabotage::{Broken, Sabotage};
use super::tool::ToolError;
use crate::{Container, OpenError, RestartLog, Standing, Words};

/// The most bytes of the bits of an image in use, whoever made it.
const MOST_BYTES: usize = 48 << 20;
/// The most bitmaps that writes are noted in: each costs every write a little.
const MOST_NOTED: usize = 64;

/// The bitmaps of an image in use. Queue threads share them.
#[derive(Debug, Default)]
pub struct BitmapSet {
    /// Those that writes are noted in.
    noted: Vec<Arc<Bits>>,
    /// The same with their names, to be stored.
    kept: Vec<(String, Arc<Bits>)>,
    shown: Vec<(String, Arc<Bits>)>,
}

/// What [`BitmapSet::load`] goes by, besides the image.
#[derive(Default)]
pub(super) struct Loading<'a> {
    /// Bitmaps to show.
    pub(super) shown: &'a [String],
    pub(super) log: Option<&'a RestartLog>,
    pub(super) broken: Broken,
}

impl BitmapSet {
    /// Load the enabled bitmaps, and mark them in the image as in use, so that nobody believes them
    /// before [`BitmapSet::store`]. Before the first write.
    pub async fn open(io: &Io, container: &Container) -> Result<BitmapSet, ToolError> {
        let set = BitmapSet::load(io, container, Loading::default()).await?;
        mark(io, container).await?;
        Ok(set)
    }

    /// Load those that writes are to be noted in, none where the image is read-only, and those to
    /// show.
    pub(super) async fn load(
        io: &Io,
        container: &Container,
        loading: Loading<'_>,
    ) -> Result<BitmapSet, ToolError> {
        let image = Offline::open(io, container).await?;
        let entries = bitmap_directory::read(&image).await?;
        let mut set = BitmapSet::default();
        if !container.traits().read_only {
            set.kept = load_noted(&image, &entries, &loading).await?;
        }
        if !loading.broken.does(Sabotage::BitmapsNotNoted) {
            set.noted = set.kept.iter().map(|(_, bits)| bits.clone()).collect();
        }
        let mut bytes = set.bytes();
        for name in loading.shown {
            let noted = set.get(name).cloned();
            let bits = match noted {
                Some(bits) => bits,
                None => Arc::new(load_shown(&image, &entries, name, &mut bytes).await?),
            };
            set.shown.push((name.clone(), bits));
        }
        Ok(set)
    }

    fn bytes(&self) -> usize {
        self.kept.iter().map(|(_, bits)| bits.len().div_ceil(8) as usize).sum()
    }

    /// Whether there is nothing to note.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Note a change of the disk. Any thread may, before the change can be seen on the disk.
    #[inline]
    pub fn note(&self, offset: u64, len: u64) {
        self.noted.iter().for_each(|bits| bits.set(offset, len));
    }

    /// Bitmaps that are shown, of no image in use.
    pub fn showing(shown: Vec<(String, Arc<Bits>)>) -> BitmapSet {
        BitmapSet { shown, ..BitmapSet::default() }
    }

    /// The bits of a bitmap that writes are noted in, by its name.
    pub fn get(&self, name: &str) -> Option<&Arc<Bits>> {
        self.kept.iter().find(|(other, _)| other == name).map(|(_, bits)| bits)
    }

    /// The names of those that writes are noted in.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kept.iter().map(|(name, _)| name.as_str())
    }

    /// The bitmaps to show, in the order that was asked for.
    pub fn shown(&self) -> &[(String, Arc<Bits>)] {
        &self.shown
    }

    /// Write them to the image, to be believed from then on. The image is at rest and whole, but for
    /// being about to be closed: everything else of it was flushed.
    pub async fn store(&self, io: &Io, container: &Container) -> Result<(), ToolError> {
        if self.is_empty() {
            return Ok(());
        }
        let mut image = Offline::open_to_change(io, container).await?;
        let mut entries = bitmap_directory::read(&image).await?;
        let mut changed = Vec::new();
        for (index, entry) in entries.iter_mut().enumerate() {
            let Some(bits) = self.get(&entry.name) else { continue };
            entry.flags &= !flag::IN_USE;
            if !is_stored(&image, entry, bits).await? {
                changed.push((index, bits));
            }
        }
        if changed.is_empty() {
            return write_flags(&image, &entries).await;
        }
        let mut rewrite = Rewrite::of(&mut image).await?;
        for (index, bits) in changed {
            let Some(entry) = entries.get_mut(index) else { continue };
            drop_bits(&mut rewrite, entry).await?;
            put_bits(&mut rewrite, entry, bits).await?;
        }
        put_directory(&mut rewrite, &entries).await?;
        rewrite.commit().await
    }
}

/// What keeps an image from being opened.
pub(super) fn failed(error: ToolError) -> OpenError {
    match error {
        ToolError::Open(error) => error,
        source => OpenError::Bitmaps { source: Box::new(source) },
    }
}

/// Mark in the image every bitmap that the first write makes wrong, those that cannot be kept here
/// among them.
pub(super) async fn mark(io: &Io, container: &Container) -> Result<(), ToolError> {
    let image = Offline::open(io, container).await?;
    let mut entries = bitmap_directory::read(&image).await?;
    let mut changed = false;
    for entry in entries.iter_mut().filter(|entry| entry.is_enabled() && !entry.is_in_use()) {
        if !entry.is_known() {
            tracing::warn!(
                "{}: bitmap {:?} has content that this version does not know: from now on it is \
                 marked as not saved",
                container.path().display(),
                entry.name
            );
        }
        entry.flags |= flag::IN_USE;
        changed = true;
    }
    if changed { write_flags(&image, &entries).await } else { Ok(()) }
}

fn too_large(image: &Offline<'_>, bytes: usize) -> ToolError {
    let (found, most) = (bytes.div_ceil(1 << 20), MOST_BYTES >> 20);
    image.refused(format!(
        "its bitmaps take {found} MiB of memory, and {most} MiB is the most: disable some with \
         ringtap bitmap --disable, or make them anew with a coarser granularity"
    ))
}

/// The enabled bitmaps that are valid, or whose bits a killed server left.
async fn load_noted(
    image: &Offline<'_>,
    entries: &[BitmapEntry],
    loading: &Loading<'_>,
) -> Result<Vec<(String, Arc<Bits>)>, ToolError> {
    let size = image.header.size;
    let is_own = |log: &&RestartLog| log.left().is_some() && *log.standing() == Standing::Same;
    let kept = loading.log.filter(is_own).and_then(Kept::left);
    let is_kept = |entry: &BitmapEntry| {
        kept.as_ref().is_some_and(|kept| kept.has(&entry.name, size, entry.granularity_bits))
    };
    let enabled = entries.iter().filter(|entry| entry.is_enabled() && entry.is_known());
    let (mut noted, mut lost) = (Vec::new(), Vec::new());
    for entry in enabled {
        if entry.is_in_use() && !is_kept(entry) { lost.push(entry) } else { noted.push(entry) }
    }
    for entry in lost {
        tracing::warn!(
            "{}: bitmap {:?} was not saved when the image was last used: it is of no use but to be \
             removed",
            image.container.path().display(),
            entry.name
        );
    }
    if noted.len() > MOST_NOTED {
        return Err(image.refused(format!(
            "it has {} enabled bitmaps, and {MOST_NOTED} is the most: disable or remove some with \
             ringtap bitmap",
            noted.len()
        )));
    }
    let layout = Layout::of(noted.iter().map(|entry| (&*entry.name, entry.granularity_bits)), size);
    let layout = layout.ok_or_else(|| too_large(image, usize::MAX))?;
    if layout.bytes() > MOST_BYTES {
        return Err(too_large(image, layout.bytes()));
    }
    let words = memory(image, loading.log.filter(|_| !noted.is_empty()), layout.words());
    let goes_on = kept.is_some_and(|kept| kept.is_laid_out_as(&layout));
    if !goes_on {
        layout.forget(&words);
    }
    let mut all = Vec::new();
    for (entry, first) in noted.into_iter().zip(layout.places()) {
        let bits = Bits::in_words(size, entry.granularity_bits, words.clone(), first);
        let bits = bits.ok_or_else(|| too_large(image, layout.bytes()))?;
        let forgotten = loading.broken.does(Sabotage::BitmapsForgotten);
        if !goes_on || !entry.is_in_use() || forgotten {
            bits.clear();
            load_into(image, entry, &bits).await?;
        }
        all.push((entry.name.clone(), Arc::new(bits)));
    }
    if let Some(log) = loading.log.filter(|_| !goes_on && !all.is_empty()) {
        layout.describe(&words, log);
    }
    Ok(all)
}

/// Memory for bits: beside the restart log where that can be.
fn memory(image: &Offline<'_>, log: Option<&RestartLog>, count: usize) -> Arc<Words> {
    let private = || -> Words {
        let words: Box<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
        Box::new(words)
    };
    let words = match log.map(|log| log.memory(Some(count))) {
        Some(Ok(words)) => words,
        Some(Err(error)) => {
            let path = image.container.path().display();
            tracing::warn!(
                "no shared memory for the bitmaps of {path}: {error}; they would not outlive a \
                 killed server"
            );
            private()
        }
        None => private(),
    };
    Arc::new(words)
}

/// A bitmap that no write is noted in.
async fn load_shown(
    image: &Offline<'_>,
    entries: &[BitmapEntry],
    name: &str,
    bytes: &mut usize,
) -> Result<Bits, ToolError> {
    let entry = entries.get(find(image, entries, name)?);
    let Some(entry) = entry.filter(|entry| entry.is_usable()) else {
        return Err(image.refused(format!(
            "bitmap {name:?} was not saved when the image was last used, and cannot be shown"
        )));
    };
    let words = Bits::words_for(image.header.size, entry.granularity_bits).unwrap_or(usize::MAX);
    *bytes = bytes.saturating_add(words.saturating_mul(8));
    if *bytes > MOST_BYTES {
        return Err(too_large(image, *bytes));
    }
    load(image, entry, image.header.size).await
}

/// Whether the image holds these bits already.
async fn is_stored(
    image: &Offline<'_>,
    entry: &BitmapEntry,
    bits: &Bits,
) -> Result<bool, ToolError> {
    let cluster = image.cluster();
    let mut ours = vec![0; cluster as usize];
    let firsts = (0..).step_by(cluster as usize * 8);
    for (first, word) in firsts.zip(read_table(image, entry).await?) {
        bits.to_bytes(first, &mut ours);
        let same = match word & OFFSET_MASK {
            0 if word == 0 => ours.iter().all(|byte| *byte == 0),
            0 => ours.iter().all(|byte| *byte == 0xff),
            offset => ours == image.read(offset, cluster).await?,
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}
