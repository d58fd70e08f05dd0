//! The keyslots of a LUKS1 header, alone or inside qcow2.

use std::path::Path;

use ringtap_image::luks::{self, HeaderPlace};
use ringtap_image::{Format, OpenError, Secret, on_a_ring, qcow2};

pub use ringtap_image::luks::{Effort, KeyslotChange};

use crate::{Error, Writing};

/// Change keyslots of an image of the format that `writing` says; `opener` is a secret that opens it. With `force` one in use is
/// overwritten, or the last one erased. Gives those that are changed.
///
/// # Errors
///
/// There is no such keyslot or none that is free, the secret does not open the image, or it cannot be read or written.
pub fn change(
    file: &Path,
    writing: Writing<'_>,
    change: KeyslotChange,
    opener: Option<Secret>,
    force: bool,
) -> Result<Vec<u32>, Error> {
    // What a killed server left would not be taken for that of the changed file.
    let container = match writing.format {
        Format::Qcow2 => writing.settled(file)?,
        _ => writing.open(file)?,
    };
    let (format, changed) = (writing.format, container.clone());
    let path = file.to_owned();
    let slots = on_a_ring(file, |io| async move {
        if format == Format::Qcow2 {
            return qcow2::change_keyslots(&io, &container, change, opener.as_ref(), force).await;
        }
        let front = HeaderPlace::default();
        let end =
            luks::change_keyslots(&io, &container, front, change, opener.as_ref(), force).await;
        end.map_err(|source| OpenError::Luks { path, source })
    })??;
    changed.confirm_format(format);
    Ok(slots)
}
