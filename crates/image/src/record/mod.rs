//! What Ringtap knows of an image that stands nowhere in it: its format, and the files it may name.
//!
//! The format stands in an extended attribute of the file, where no guest reaches it. What an image may
//! name is for those who may write the image to wish for, and not to decide: it stands in an attribute
//! that only root writes. Where there are no such attributes (block devices, some file systems, other
//! users) a file in the state folder holds both, found by the image's `identity()`.

mod attribute;
mod folder;
mod goes_on;
mod identity;
mod kept;
mod known;
mod named;
mod noted;
mod successor;
#[doc(hidden)]
pub mod testing;
mod transaction;

use std::io;
use std::path::Path;

use ringtap_sandbox::ask;

use crate::{Format, OpenError, OpenOptions, Place, probe};

use attribute::attribute;
pub(crate) use folder::{is_ours, keep_as, put};
pub use folder::{made_folder, remove_stably, state_folder, sync_folder_of};
pub use identity::identity;
use kept::Kept;
pub(crate) use kept::{COMING, SIDECAR, sidecar, sidecar_name};
pub(crate) use known::Allowed;
pub(crate) use named::format_below;
pub(crate) use named::{allowed, belong_together, owner};
pub use named::{also_allow, may_own, reach, set_allowed, set_format_below, set_owner};
pub(crate) use noted::{forget_log, note_log, noted_log};
pub(crate) use successor::may_go_on;
pub use successor::{
    find_successor, forget_successor, is_part_of, is_unsealed, lead_on, seal, set_successor,
    set_successor_in, successor, successor_of_this_or_original, take_back_unfinished, turn, unseal,
};
pub use transaction::{Part, Transaction};

/// Holds the format's name.
const FORMAT: &str = "user.ringtap.format";

/// The format that Ringtap wrote down for this image.
pub fn format(path: &Path) -> Option<Format> {
    let text = attribute(path, FORMAT).or_else(|| Kept::of(path)?.format)?;
    text.parse().ok()
}

/// Write down the format of an image.
pub fn set_format(path: &Path, format: Format) -> io::Result<()> {
    let set = ask::set_attribute(path, FORMAT, Some(format.name().as_bytes()));
    let attribute = set.is_ok();
    let kept = (!attribute).then(|| format.name().to_owned());
    Kept::change(path, attribute, |own| own.format = kept)
}

/// Forget what was written down, for it is not so any more.
pub fn forget_format(path: &Path) {
    let _ = ask::set_attribute(path, FORMAT, None);
    let _ = Kept::change(path, true, |own| own.format = None);
}

/// An image was written to as `format` and all is well: from now on it is known to be that.
pub fn confirm_format(place: impl Into<Place>, wanted: Format) {
    let place = place.into();
    let at = place.at();
    if format(&at) == Some(wanted) || ringtap_stores::is_store(place.path()) {
        return;
    }
    if let Err(error) = set_format(&at, wanted) {
        tracing::warn!(
            "cannot write down that {} is {wanted}: {error}; always name its format with -f",
            place.path().display()
        );
    }
}

/// What tells the file or block device at a path from all others, for good; none where nothing does.
pub(crate) fn identity_of(path: &Path) -> Option<String> {
    identity(path)
}

/// Whether the file behind `at`, which is called `name`, may be written to as the format of `options`: not
/// where it is known to be another, or bears the signature of another and nothing is known.
pub(crate) fn may_write(at: &Path, name: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    let Some(asked) = options.format.filter(|_| !options.force_format) else { return Ok(()) };
    let refused = |found: &'static str, recorded| {
        Err(OpenError::OtherFormat { path: name.to_owned(), asked, found, recorded })
    };
    if let Some(known) = format(at) {
        return if known == asked { Ok(()) } else { refused(known.name(), true) };
    }
    let failed = |source| OpenError::Os { what: "read", path: name.to_owned(), source };
    match probe::signature(at).map_err(failed)? {
        Some(found) if found != asked.name() => refused(found, false),
        _ => Ok(()),
    }
}
