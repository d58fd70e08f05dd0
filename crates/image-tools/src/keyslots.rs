//! The keyslots of a LUKS1 header, alone or inside qcow2.

use std::path::Path;

use ringtap_image::luks::{self, HeaderPlace, KeyslotPlan};
use ringtap_image::{Format, OpenError, Secret, on_a_ring, qcow2};

pub use ringtap_image::luks::{Effort, KeyslotChange};

use crate::{Error, Writing};

/// A change of keyslots that can be made, and is not made yet.
pub struct Plan(KeyslotPlan);

/// Whether keyslots of an image of the format that `writing` says can be changed so; `opener` is a secret that opens it. With
/// `force` one in use is overwritten, or the last one erased.
///
/// # Errors
///
/// There is no such keyslot or none that is free, the secret does not open the image, or it cannot be read.
pub fn plan(
    file: &Path,
    writing: Writing<'_>,
    change: KeyslotChange,
    opener: Option<Secret>,
    force: bool,
) -> Result<Plan, Error> {
    // What a killed server left would not be taken for that of the changed file.
    let container = match writing.format {
        Format::Qcow2 => writing.settled(file)?,
        _ => writing.open(file)?,
    };
    let (format, path) = (writing.format, file.to_owned());
    let plan = on_a_ring(file, |io| async move {
        if format == Format::Qcow2 {
            return qcow2::plan_keyslots(&io, &container, change, opener.as_ref(), force).await;
        }
        let front = HeaderPlace::default();
        let end = luks::plan_keyslots(&io, &container, front, change, opener.as_ref(), force).await;
        end.map_err(|source| OpenError::Luks { path, source })
    })??;
    Ok(Plan(plan))
}

impl Plan {
    /// Make the change. Gives the keyslots.
    ///
    /// # Errors
    ///
    /// The header is another by now, or cannot be read or written.
    pub fn carry_out(self, file: &Path, writing: Writing<'_>) -> Result<Vec<u32>, Error> {
        let container = writing.open(file)?;
        let (format, changed, path) = (writing.format, container.clone(), file.to_owned());
        let slots = on_a_ring(file, |io| async move {
            let end = self.0.carry_out(&io, &container).await;
            end.map_err(|source| OpenError::Luks { path, source })
        })??;
        changed.confirm_format(format);
        Ok(slots)
    }
}
