//! Images in which changes are missing that a killed server left: of use to nobody who reads them as they are.

use ringtap_image::{Container, Format, LeftBehind, OpenOptions, Standing, on_a_ring, qcow2, vhd};

use crate::Error;

/// See that an image has all that its guest knows of it. What a killed server left that belongs to another state of the image is
/// told, and no harm. `remedy` is what to do where something is missing.
///
/// # Errors
///
/// Something is, or that cannot be told.
pub fn waits_for_nothing(
    container: &Container,
    format: Format,
    options: OpenOptions,
    remedy: &str,
) -> Result<(), Error> {
    let path = container.path();
    match left(container, format, options)? {
        None => Ok(()),
        Some(left @ LeftBehind { standing: Some(Standing::Other(_)), .. }) => {
            tracing::warn!("{}: not used: {}", path.display(), left.told());
            Ok(())
        }
        Some(left) => Err(Error::Refused(format!(
            "{}: {}, which the image does not have yet: {remedy}",
            path.display(),
            left.told()
        ))),
    }
}

fn left(
    container: &Container,
    format: Format,
    options: OpenOptions,
) -> Result<Option<LeftBehind>, Error> {
    let own = container.clone();
    match format {
        Format::Vhd => {
            let found = on_a_ring(container.path(), |io| async move { vhd::left(&io, &own).await });
            Ok(found??)
        }
        Format::Qcow2 => {
            let options = OpenOptions { read_only: true, ..options };
            let found = on_a_ring(container.path(), |io| async move {
                let header = qcow2::Header::read(&io, &own).await?;
                qcow2::left(&own, &header, &options)
            });
            Ok(found??)
        }
        _ => Ok(None),
    }
}
