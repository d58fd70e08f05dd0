//! What lies below an image that is written to: as a killed server left it, it is made whole first.
//!
//! An overlay may have taken an image's place while the image was not stable ([`crate::record::set_successor`]), and the
//! server have been killed before it was. A flush of the overlay must then reach all that was acknowledged before, and the
//! overlay's own does not: what lies in the image below, and in its restart log, which a power cut ends, is made stable here.

use ringtap_io::Io;
use ringtap_stores::is_store;

use super::Header;
use super::data_file::left;
use crate::backing::Chain;
use crate::{Container, Format, OpenError, OpenOptions, Place, Standing, record, vhd};

/// Take up what a killed server left for an image that is to lie below one that is written to.
pub(super) async fn make_whole(
    io: &Io,
    place: &Place,
    options: &OpenOptions,
    chain: &Chain,
) -> Result<(), OpenError> {
    let unsealed = record::is_unsealed(&place.at());
    let has_log = matches!(options.format, Some(Format::Qcow2 | Format::Vhd));
    // What lies on a server has no log, and may let nobody in a second time.
    if !unsealed && (!has_log || is_store(place.path())) {
        return Ok(());
    }
    let look = OpenOptions { read_only: true, ..options.clone() };
    let container = Container::open(place, &look)?;
    let left = match options.format {
        Some(Format::Qcow2) => {
            let header = Header::read(io, &container).await?;
            left(&container, &header, &look)?
        }
        Some(Format::Vhd) => vhd::left(io, &container).await?,
        _ => None,
    };
    drop(container);
    let waits = left.is_some_and(|left| !matches!(left.standing, Some(Standing::Other(_))));
    if !waits && !unsealed {
        return Ok(());
    }
    tracing::info!(
        "{}: a killed server may not have made it stable: that is done before what lies upon it is written to",
        place.path().display()
    );
    let write = OpenOptions {
        read_only: false,
        succeeded: true,
        layers: Some(1),
        bitmaps: vec![],
        ..options.clone()
    };
    let image = chain.open_alone(io, place, &write).await?;
    let closed = image.close(io).await;
    drop(image);
    closed.map_err(|error| OpenError::Os {
        what: "make stable what a killed server left for",
        path: place.path().to_owned(),
        source: std::io::Error::from_raw_os_error(error.errno()),
    })?;
    if let Err(error) = record::seal(&place.at()) {
        let path = place.path().display();
        tracing::warn!("cannot write down when {path} was last written to: {error}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::qcow2::{CreateOptions, create};
    use crate::{CacheMode, Role, on_a_ring, open};

    #[test]
    fn an_image_below_is_sealed_before_what_lies_upon_it_is_written_to() {
        let dir = tempfile::tempdir().expect("a folder");
        let (base, top) = (dir.path().join("base"), dir.path().join("top"));
        fs::write(&base, [7; 65536]).expect("written");
        fs::write(&top, "").expect("a file");
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            cache: CacheMode::Writeback,
            no_restart_log: true,
            ..OpenOptions::default()
        };
        let container = Container::open(&top, &options).expect("opened");
        let made = CreateOptions {
            size: 65536,
            backing_file: Some(base.display().to_string()),
            backing_format: Some("raw".into()),
            ..CreateOptions::default()
        };
        let task = |io| async move { create(&io, &container, None, &made).await.map(drop) };
        on_a_ring(&top, task).expect("a ring").expect("an image");
        if record::set_allowed(&top, Role::Backing, Some(&base)).is_err()
            || record::set_successor(&base, &top).is_err()
        {
            eprintln!("skipped: there is nowhere to record an image");
            return;
        }
        let read = OpenOptions { read_only: true, ..options.clone() };
        drop(open(&top, &read).expect("opened"));
        assert!(record::is_unsealed(&base), "who reads has made nothing stable");
        drop(open(&top, &options).expect("opened"));
        assert!(!record::is_unsealed(&base));
    }
}
