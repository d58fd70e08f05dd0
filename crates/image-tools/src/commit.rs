//! What an overlay holds, written into an image below it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringtap_image::{
    CacheMode, Container, Format, LeftBehind, OpenOptions, Standing, on_a_ring, open, open_on,
    qcow2, record,
};
use ringtap_vbd::{Copy, Progress, Vbd, copy};

use crate::chain::Layer;
use crate::error::Tried;
use crate::files::{beside, same_file};
use crate::unfinished::finish;
use crate::{Doing, Error, Reading, Watcher, Writing, chain, format_to_write, resize};

/// What is committed, and how.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The overlay; nobody may use it, nor what lies below it.
    pub path: PathBuf,
    /// The format, if that is named; else it is recorded.
    pub format: Option<Format>,
    /// Write to images though they are recorded as of other formats.
    pub force_format: bool,
    /// Write into this image of the chain, named as the overlay would name it, and leave the overlay as it is; none: the overlay's own backing file.
    pub base: Option<PathBuf>,
    /// Leave the overlay as it is, instead of emptying it.
    pub keep: bool,
    /// The most bytes to read in a second.
    pub rate: Option<u64>,
    /// How host caching is used for the image written to.
    pub cache: CacheMode,
    /// How the images are opened.
    pub reading: Reading,
}

/// Commit an overlay. What is written is stable when this returns.
///
/// # Errors
///
/// It has no backing file, or not that; an image cannot be opened, read or written; or the work was stopped. The overlay is as it
/// was then, and what lies below holds a part of it, so that it reads as before.
pub fn commit(job: &Commit, watch: &Watcher) -> Result<(), Error> {
    let file = &job.path;
    let format = format_to_write(file, job.format)?;
    let layers = chain::layers(file, Some(format), true, &job.reading.names)?;
    if layers.len() < 2 {
        return Err(Error::Usage(format!("{} has no backing file", file.display())));
    }
    let depth = match &job.base {
        None => 1,
        Some(base) => {
            // As the overlay would name it, and not as seen from here: there may be another of that name.
            let position = |base: &Path| {
                let found = layers.iter().position(|layer| same_file(&layer.path, base));
                found.filter(|depth| *depth > 0)
            };
            match position(&beside(file, base)) {
                Some(depth) => depth,
                None if position(base).is_some() => {
                    let why = format!(
                        "--base is read as the overlay would name it, from the folder of {}: write it so, or give \
                         the whole path",
                        file.display()
                    );
                    return Err(Error::Usage(why));
                }
                None => {
                    let why = format!("{} is not below {}", base.display(), file.display());
                    return Err(Error::Refused(why));
                }
            }
        }
    };
    let has_data_file =
        layers[0].header.as_ref().is_some_and(|header| header.data_file().is_some());
    if has_data_file && !job.keep && job.base.is_none() {
        let why = "an image with an external data file cannot be emptied once it is committed: add -d, and remove it then";
        return Err(Error::Refused(why.into()));
    }
    let base = &layers[depth];
    layers[..depth].iter().for_each(|layer| layer.tell_of_snapshots(watch));
    let writing = |format| Writing::new(format, job.force_format, &job.reading.names.data_files);
    // Kept off everybody from here on; what lies above the base is then read without locks or restart logs of its own.
    let top = resize::to_change(&layers[0].place, writing(format))?;
    let _between = layers[1..depth]
        .iter()
        .map(|layer| without_log(layer, writing(layer.format)))
        .collect::<Result<Vec<_>, _>>()?;
    let overlay = OpenOptions {
        force_share: true,
        layers: Some(depth as u32),
        ..job.reading.options(format, CacheMode::Writeback)?
    };
    let from = Vbd::new(open(file, &overlay)?, CacheMode::Writeback);
    let below = Writing { succeeded: true, ..writing(base.format) };
    resize::grow(&base.place, below, from.size(), &job.reading)
        .doing(|| format!("cannot make {} as large as the overlay", base.path.display()))?;
    let own = job.reading.options_to_write(base.format, job.cache, job.force_format)?;
    let options = OpenOptions { succeeded: true, ..own };
    let opened = base.place.clone();
    let image = on_a_ring(&base.path, |io| async move { open_on(&io, &opened, &options).await })??;
    let to = Vbd::new(image, job.cache);
    let progress = Arc::new(Progress::default());
    watch.begins(from.size(), &progress);
    let copied = Copy { layers: 0..depth as u32, rate: job.rate, ..Copy::new(from, to.fork()) };
    let end = copy(copied, &progress).map_err(Error::from);
    let stable = finish(to, &base.path);
    end.and(stable).doing(|| {
        format!(
            "{} holds a part of the overlay, which is as it was: commit again",
            base.path.display()
        )
    })?;
    record::confirm_format(&base.place, base.format);
    // All that was written since a snapshot is in it.
    record::forget_successor(&base.place.at())
        .tried(|| format!("cannot write down that {} has it all", base.path.display()))?;
    if !job.keep && job.base.is_none() {
        if format != Format::Qcow2 {
            let why = format!(
                "{format} overlays cannot be emptied: all is committed, remove {}",
                file.display()
            );
            return Err(Error::Refused(why));
        }
        on_a_ring(file, |io| async move { qcow2::make_empty(&io, &top).await })??;
    }
    Ok(())
}

/// A layer between overlay and base has taken up what a killed server left for it, and is held where there was something.
fn without_log(layer: &Layer, writing: Writing<'_>) -> Result<Option<Container>, Error> {
    let left = chain::layer(&layer.place, Some(layer.format), false)?.left;
    match left {
        None | Some(LeftBehind { standing: Some(Standing::Other(_)), .. }) => Ok(None),
        Some(_) => {
            resize::to_change(&layer.place, Writing { succeeded: true, ..writing }).map(Some)
        }
    }
}
