//! Persistent bitmaps of disks: found when an image is opened, kept from when the first of them is added, and taken along
//! when a disk goes on in another image.

use ringtap_image::bitmap_store::{
    Binding, KeptIn, LOGGED, Sidecar, is_of, move_sidecar, remove_sidecar, remove_sidecar_of,
    take_memory,
};
use ringtap_image::{Container, Image, Place, on_a_ring};
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
    let found = match find(vbd, &container) {
        Ok(None) => return Ok(()),
        Ok(Some((sidecar, binding))) => Ok(kept_in(sidecar, binding)),
        Err(error) => Err(error),
    };
    let restored = found.and_then(|kept| {
        let (own, path) = (vbd.clone(), container.path().to_owned());
        let (sidecar, memory) = (kept.sidecar.clone(), kept.memory.clone());
        let end = on_a_ring(&path, |io| async move { own.keep_bitmaps(&io, kept).await });
        end?.map_err(|error| failed(&container, error))?;
        Ok((sidecar, memory))
    });
    let error = match restored {
        Ok((sidecar, memory)) => {
            // By the name of the image before it would be found again, as long as that is there.
            if let Err(error) = move_sidecar(&sidecar, &*memory, &container) {
                tracing::warn!("{error}");
            }
            return Ok(());
        }
        Err(error) => error,
    };
    remove_sidecar(&container)?;
    tracing::error!(
        "{error}: the disk has lost its persistent bitmaps, and the next backup is a full one"
    );
    Ok(())
}

/// The sidecar of a disk's image, or of the one below it, where the server before this one was killed as the disk had gone on
/// from there.
fn find(vbd: &Disk, container: &Container) -> Result<Option<(Sidecar, Binding)>, Error> {
    let wrong = |error| failed(container, error);
    let binding = |of: &Container| Binding::of(of).map_err(|error| failed(of, error));
    let image = vbd.image().map_err(|error| failed(container, error))?;
    let former = image.below().and_then(Image::container);
    if let Some(former) = former {
        if let Err(error) = take_memory(former, container) {
            tracing::warn!("{error}");
        }
    }
    if let Some(sidecar) = Sidecar::of(container, false).map_err(wrong)? {
        return Ok(Some((sidecar, binding(container)?)));
    }
    // One that another server has is that one's disk's.
    let Some(former) = former else { return Ok(None) };
    let Ok(Some(sidecar)) = Sidecar::of(former, false) else { return Ok(None) };
    let binding = binding(container)?.after(former);
    let (path, kept, memory) =
        (container.path().to_owned(), sidecar.container.clone(), sidecar.memory.clone());
    let (binding, is_it) = on_a_ring(&path, |io| async move {
        let is_it = is_of(&io, &kept, &*memory, &binding).await;
        (binding, is_it)
    })?;
    let is_it = is_it.map_err(|error| failed(container, error))?;
    Ok(is_it.then_some((sidecar, binding)))
}

fn kept_in(sidecar: Sidecar, binding: Binding) -> KeptIn {
    let Sidecar { container: sidecar, memory } = sidecar;
    KeptIn { sidecar, memory, binding, region: LOGGED }
}

/// Where bitmaps of a disk are to be kept that has had none.
pub(crate) fn begin(vbd: &Disk) -> Result<KeptIn, Error> {
    let Some(container) = container_of(vbd) else {
        return Err(Error::Job(
            "no persistent bitmaps are kept of its image: it is of another format, or has an external data file".into(),
        ));
    };
    let sidecar = Sidecar::of(&container, true).map_err(|error| failed(&container, error))?;
    let binding = Binding::of(&container).map_err(|error| failed(&container, error))?;
    match sidecar {
        Some(sidecar) => Ok(kept_in(sidecar, binding)),
        None => Err(failed(&container, "there is no place for them")),
    }
}

/// Whether a disk is still in the image whose bitmaps are to be kept there.
pub(crate) fn is_there(vbd: &Disk, kept: &KeptIn) -> bool {
    container_of(vbd).is_some_and(|container| kept.binding.is_of(&container))
}

/// A disk is about to go on in that image: [`moved`] comes once it has, [`stays`] where it has not. Where the server is
/// killed meanwhile the next one finds the disk's bitmaps all the same.
pub(crate) fn moves(vbd: &Disk, image: &dyn Image) {
    let Some(container) = image.container() else { return };
    let end = Binding::of(container).and_then(|binding| vbd.announce_rebind(binding));
    if let Err(error) = end {
        tracing::warn!(
            "cannot note that the disk is about to go on in {}: {error}. Its persistent bitmaps would be lost where the              server is killed now",
            container.path().display()
        );
    }
}

/// Nothing came of it.
pub(crate) fn stays(vbd: &Disk) {
    vbd.forget_announced();
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

/// An image is about to be written to by a disk that lies upon it: what is kept of it would not say so, and is removed,
/// unless it is what is kept of that disk.
///
/// # Errors
/// Where that cannot be.
pub(crate) fn forget_below(vbd: &Disk, place: &Place) -> Result<(), Error> {
    let own = vbd.bitmap_sidecar().map(|(sidecar, _)| sidecar);
    if remove_sidecar_of(place, own.as_ref())? {
        let path = place.path().display();
        tracing::warn!(
            "what was kept of bitmaps of {path} is removed: a job writes to it from above"
        );
    }
    Ok(())
}
