//! Persistent bitmaps of disks: found when an image is opened, kept from when the first of them is added, and taken along
//! when a disk goes on in another image.

use ringtap_image::bitmap_store::{Binding, KeptIn, LOGGED, Sidecar, move_sidecar, remove_sidecar};
use ringtap_image::{Container, on_a_ring};
use ringtap_io::Io;
use ringtap_vbd::Disk;

use crate::Error;

fn failed(container: &Container, why: impl ToString) -> Error {
    Error::Bitmaps { path: container.path().to_owned(), why: why.to_string() }
}

/// What holds a disk's image.
fn container_of(vbd: &Disk) -> Option<Container> {
    vbd.image().ok()?.container().cloned()
}

/// Those that are kept of a disk's image since an earlier server. Nobody has been served yet.
///
/// # Errors
/// Where they cannot be found, and what is kept of them cannot be removed: it would lack what is written from now on.
pub(crate) fn restore(vbd: &Disk) -> Result<(), Error> {
    if vbd.info().read_only {
        return Ok(());
    }
    let Some(container) = container_of(vbd) else { return Ok(()) };
    let found = Sidecar::of(&container, false).map_err(|error| failed(&container, error));
    let kept = match found {
        Ok(None) => return Ok(()),
        Ok(Some(sidecar)) => kept_in(sidecar, &container),
        Err(error) => Err(error),
    };
    let restored = kept.and_then(|kept| {
        let (own, path) = (vbd.clone(), container.path().to_owned());
        let end = on_a_ring(&path, |io| async move { own.keep_bitmaps(&io, kept).await });
        end?.map_err(|error| failed(&container, error))
    });
    let Err(error) = restored else { return Ok(()) };
    remove_sidecar(&container)?;
    tracing::error!(
        "{error}: the disk has lost its persistent bitmaps, and the next backup is a full one"
    );
    Ok(())
}

fn kept_in(sidecar: Sidecar, container: &Container) -> Result<KeptIn, Error> {
    let binding = Binding::of(container).map_err(|error| failed(container, error))?;
    let Sidecar { container: sidecar, memory, .. } = sidecar;
    Ok(KeptIn { sidecar, memory, binding, region: LOGGED })
}

/// Where bitmaps of a disk are to be kept that has had none.
pub(crate) fn begin(vbd: &Disk) -> Result<KeptIn, Error> {
    let Some(container) = container_of(vbd) else {
        return Err(Error::Job(
            "no persistent bitmaps are kept of its image: it is of another format, or has an external data file".into(),
        ));
    };
    let sidecar = Sidecar::of(&container, true).map_err(|error| failed(&container, error))?;
    match sidecar {
        Some(sidecar) => kept_in(sidecar, &container),
        None => Err(failed(&container, "there is no place for them")),
    }
}

/// A disk goes on in the image that it is now. Where that cannot be written down its bitmaps are lost once the server ends.
pub(crate) async fn moved(io: &Io, vbd: &Disk) {
    let Some((sidecar, memory)) = vbd.bitmap_sidecar() else { return };
    let end = async {
        let container =
            container_of(vbd).ok_or_else(|| failed(&sidecar, "the image has no file"))?;
        let binding = Binding::of(&container).map_err(|error| failed(&container, error))?;
        let rebound = vbd.rebind_bitmaps(io, binding).await;
        rebound.map_err(|error| failed(&container, error))?;
        move_sidecar(&sidecar, &*memory, &container)?;
        Ok::<(), Error>(())
    };
    if let Err(error) = end.await {
        tracing::error!("{error}: its persistent bitmaps are lost once the server ends");
    }
}
