//! Another image below an overlay.

use std::path::PathBuf;
use std::sync::Arc;

use ringtap_image::{CacheMode, Format, Role, on_a_ring, open, qcow2};
use ringtap_vbd::{Copy, Progress, Vbd, Workers, copy};

use crate::convert::{PER_PROCESSOR, cluster_size};
use crate::files::same_file;
use crate::opening::cannot;
use crate::unfinished::finish;
use crate::{
    BackingFile, Doing, Error, NamedFormat, Reading, Watcher, Writing, chain, format_to_write,
};

/// What is rebased, and how.
#[derive(Clone, Debug)]
pub struct Rebase {
    /// The overlay; nobody may use it.
    pub path: PathBuf,
    /// The format, if that is named; else it is recorded.
    pub format: Option<Format>,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// The image that is to be below: its name, and its format if that is named; none: no image.
    pub backing: Option<(String, Option<NamedFormat>)>,
    /// Only change the name: what the overlay reads as is up to the caller.
    pub blindly: bool,
    /// What the overlay gets of what lay below is stored compressed, whole clusters of it.
    pub compress: bool,
    /// How host caching is used for the overlay.
    pub cache: CacheMode,
    /// How the images are opened.
    pub reading: Reading,
}

/// Put another image below an overlay, which reads as before.
///
/// # Errors
///
/// Its format has nothing below, the image lies over the overlay itself; one of them cannot be opened, read or written; or the work
/// was stopped. The overlay reads as before then, and names what it named.
pub fn rebase(job: &Rebase, watch: &Watcher) -> Result<(), Error> {
    let file = &job.path;
    let format = format_to_write(file, job.format)?;
    if format != Format::Qcow2 {
        return Err(cannot(file, format, "cannot change what is below them"));
    }
    let find = |(name, format): (String, _)| BackingFile::find(file, name, format);
    let backing = job.backing.clone().map(find).transpose()?;
    if backing.as_ref().is_some_and(|backing| same_file(file, &backing.path)) {
        if !job.blindly {
            return Err(Error::usage("an image cannot lie below itself"));
        }
        tracing::warn!(
            "{} is its own backing file from now on: nobody can open it until it is rebased again",
            file.display()
        );
    }
    if !job.blindly {
        if let Some(backing) = &backing {
            let below =
                chain::layers(&backing.path, Some(backing.format), true, &job.reading.names)?;
            if below.iter().any(|layer| same_file(&layer.path, file)) {
                let (path, file) = (backing.path.display(), file.display());
                return Err(Error::Refused(format!("{path} lies over {file} itself")));
            }
        }
        let own = chain::layer(file, Some(format), true)?;
        if own.backing.is_some() || backing.is_some() {
            own.tell_of_snapshots(watch);
        }
        keep_content(job, backing.as_ref(), watch).doing(|| {
            "what the overlay reads as is unchanged, and so is what it names as its backing file"
                .into()
        })?;
    }
    let writing = Writing::new(format, job.force_format, &job.reading.names.data_files);
    let container = writing.settled(file)?;
    let changed = container.clone();
    let new = backing.as_ref().map(|it| (it.name.clone(), it.format_name));
    if let Some(backing) = &backing {
        chain::also_allow(&changed.place(), Role::Backing, &backing.path);
    }
    on_a_ring(file, |io| async move {
        let backing = new.as_ref().map(|(name, format)| (name.as_str(), *format));
        qcow2::set_backing(&io, &container, backing).await
    })??;
    changed.confirm_format(format);
    let below = backing.as_ref().map(|it| &*it.path);
    chain::record(&changed.place(), Role::Backing, below);
    if let Some(backing) = &backing {
        chain::record_format_below(&changed.place(), &backing.path, backing.format);
    }
    Ok(())
}

/// Write into the overlay what it gets from below and the new backing file has not.
fn keep_content(job: &Rebase, new: Option<&BackingFile>, watch: &Watcher) -> Result<(), Error> {
    let file = &job.path;
    let compress = if job.compress { Some(cluster_size(file)?) } else { None };
    let options = job.reading.options_to_write(Format::Qcow2, job.cache, job.force_format)?;
    let overlay = Vbd::new(open(file, &options)?, job.cache);
    let below = match new {
        Some(new) => {
            Some(job.reading.open(&new.path, Some(new.format), CacheMode::Writeback, watch)?)
        }
        None => None,
    };
    let progress = Arc::new(Progress::default());
    watch.begins(overlay.size(), &progress);
    let usual = Copy::new(overlay.fork(), overlay.fork());
    let copied = Copy {
        // The overlay's own content stays where it is.
        layers: 1..u32::MAX,
        piece: usual.piece.max(compress.unwrap_or(0)),
        workers: if compress.is_some() { Workers::of_all(PER_PROCESSOR) } else { usual.workers },
        compress,
        zeroed: below.is_none(),
        zeros_stay: true,
        unless_in: below.map(Into::into),
        ..usual
    };
    let end = copy(copied, &progress).map_err(Error::from);
    let stable = finish(overlay, file);
    end.and(stable).doing(|| {
        format!("{} reads as before: the same command goes on with the rest", file.display())
    })
}
