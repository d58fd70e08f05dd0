//! The persistent dirty bitmaps inside an image.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringtap_image::qcow2::{self, BitmapChange};
use ringtap_image::{Format, on_a_ring};

use crate::files::same_file;
use crate::format_of;
use crate::opening::{cannot, container as look_at, format_to_write};
use crate::{Error, Writing};

/// One change of one bitmap.
#[derive(Clone, Debug)]
pub enum Step {
    /// A change of it alone.
    Change(BitmapChange),
    /// What is set in the bitmap of that name is set in it too.
    Merge(String),
}

/// What is changed, and where.
#[derive(Clone, Debug)]
pub struct Changes<'a> {
    /// The image, which nobody uses.
    pub path: &'a Path,
    /// The format, if that is named; else it is recorded.
    pub format: Option<Format>,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// What it may name for its data.
    pub data_files: &'a [PathBuf],
    /// The bitmap that others are merged into.
    pub bitmap: &'a str,
    /// The image that they are in, and its format if that is named; none: this one.
    pub source: Option<(&'a Path, Option<Format>)>,
    /// The changes, in their order.
    pub steps: Vec<Step>,
}

/// Change bitmaps.
///
/// # Errors
///
/// An image's format has none, there is no bitmap of a name, or one already; they cannot be read or written. Steps before a merge
/// within one image may have been done then.
pub fn change(job: Changes<'_>) -> Result<(), Error> {
    let Changes { path, steps, .. } = job;
    let format = format_to_write(path, job.format)?;
    if format != Format::Qcow2 {
        return Err(cannot(path, format, "have no bitmaps"));
    }
    let container = Writing::new(format, job.force_format, job.data_files).settled(path)?;
    let changed = container.clone();
    let other = match job.source.filter(|(source, _)| !same_file(source, path)) {
        Some((source, named)) => {
            let (format, _) = format_of(source, named)?;
            if format != Format::Qcow2 {
                return Err(cannot(source, format, "have no bitmaps"));
            }
            Some(look_at(source, false)?)
        }
        None => None,
    };
    let name = job.bitmap.to_owned();
    on_a_ring(path, |io| async move {
        let mut changes = vec![];
        for step in steps {
            match step {
                Step::Change(change) => changes.push(change),
                Step::Merge(source) => {
                    // What is merged from this very image is as the steps before have left it.
                    if other.is_none() && !changes.is_empty() {
                        qcow2::change_bitmaps(&io, &container, &std::mem::take(&mut changes))
                            .await?;
                    }
                    let from = other.as_ref().unwrap_or(&container);
                    let from = Arc::new(qcow2::load_bitmap(&io, from, &source).await?);
                    changes.push(BitmapChange::Merge { into: name.clone(), from });
                }
            }
        }
        qcow2::change_bitmaps(&io, &container, &changes).await
    })??;
    changed.confirm_format(format);
    Ok(())
}
