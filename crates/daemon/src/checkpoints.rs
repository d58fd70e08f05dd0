//! Persistent bitmaps of disks: found when an image is opened, kept from when the first of them is added, and taken along
//! when a disk goes on in another image.

use ringtap_image::bitmap_store::{
    Binding, KeptIn, LOGGED, Sidecar, is_of, move_sidecar, point_no_more, point_to, remove_sidecar,
    remove_sidecar_of,
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

/// What holds it, and what it is known by.
fn bound(image: &dyn Image) -> Option<(Container, std::io::Result<Binding>)> {
    let container = image.container()?;
    Some((container.clone(), Binding::of(container, image.data_file())))
}

fn bound_of(vbd: &Disk) -> Option<(Container, Result<Binding, Error>)> {
    let (container, binding) = bound(&*vbd.image().ok()?)?;
    let binding = binding.map_err(|error| failed(&container, error));
    Some((container, binding))
}

/// Those that are kept of a disk's image since an earlier server. Nobody has been served yet.
///
/// # Errors
/// Where they cannot be found, and what is kept of them cannot be removed: it would lack what is written from now on.
pub(crate) fn restore(vbd: &Disk) -> Result<(), Error> {
    if vbd.is_read_only() {
        return Ok(());
    }
    let Ok(image) = vbd.image() else { return Ok(()) };
    let Some(container) = image.container().cloned() else { return Ok(()) };
    let found = match find(&container, image.data_file()) {
        // The disk is written to from now on: what might have come with it does not hold later, either.
        Ok(None) => return Ok(point_no_more(&container.place())?),
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
    point_no_more(&container.place())?;
    remove_sidecar(&container)?;
    tracing::error!(
        "{error}: the disk has lost its persistent bitmaps, and the next backup is a full one"
    );
    Ok(())
}

/// The sidecar of a disk's image, or of the one that the disk was in before, where its server was killed, or the power was cut,
/// as the disk went on from there.
fn find(
    container: &Container,
    data: Option<&Container>,
) -> Result<Option<(Sidecar, Binding)>, Error> {
    let wrong = |error| failed(container, error);
    let binding = || Binding::of(container, data).map_err(|error| failed(container, error));
    if let Some(sidecar) = Sidecar::coming(container) {
        let (path, kept, binding) =
            (container.path().to_owned(), sidecar.container.clone(), binding()?);
        let (binding, is_it) = on_a_ring(&path, |io| async move {
            let is_it = is_of(&io, &kept, &binding).await;
            (binding, is_it)
        })?;
        if is_it.map_err(|error| failed(container, error))? {
            return Ok(Some((sidecar, binding)));
        }
    }
    match Sidecar::of(container, false).map_err(wrong)? {
        Some(sidecar) => Ok(Some((sidecar, binding()?))),
        None => Ok(None),
    }
}

fn kept_in(sidecar: Sidecar, binding: Binding) -> KeptIn {
    let Sidecar { container: sidecar, memory } = sidecar;
    KeptIn { sidecar, memory, binding, region: LOGGED }
}

/// Where bitmaps of a disk are to be kept that has had none.
pub(crate) fn begin(vbd: &Disk) -> Result<KeptIn, Error> {
    let Some((container, binding)) = bound_of(vbd) else {
        return Err(Error::Job("no persistent bitmaps are kept of images of its format".into()));
    };
    let sidecar = Sidecar::of(&container, true).map_err(|error| failed(&container, error))?;
    let binding = binding?;
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
/// killed meanwhile, or the power is cut, the next one finds the disk's bitmaps in whichever of the two it is.
pub(crate) async fn moves(io: &Io, vbd: &Disk, image: &dyn Image) {
    let Some((container, binding)) = bound(image) else { return };
    let container = &container;
    let binding = match binding {
        // Nothing is kept of such an image; nor is there anything now.
        Err(_) if vbd.bitmap_sidecar().is_none() => return,
        binding => binding,
    };
    let end = async {
        point(vbd, container)?;
        let binding = binding.map_err(|error| failed(container, error))?;
        let announced = vbd.announce_rebind(io, binding).await;
        announced.map_err(|error| failed(container, error))
    };
    if let Err(error) = end.await {
        // What is kept does not say so: it is not to be found by that name.
        if let Err(error) = point_no_more(&container.place()) {
            tracing::warn!("{error}");
        }
        tracing::warn!(
            "cannot note that the disk is about to go on in {}: {error}. Its persistent bitmaps would be lost where the \
             server is killed now",
            container.path().display()
        );
    }
}

/// The bitmaps of a disk are found by the image, too, that it is about to go on in.
fn point(vbd: &Disk, to: &Container) -> Result<(), Error> {
    let (Some((sidecar, _)), Some(own)) = (vbd.bitmap_sidecar(), container_of(vbd)) else {
        return Ok(());
    };
    Ok(point_to(&sidecar, &own.place(), to)?)
}

/// Bitmaps are kept of a disk from now on that may be about to go on in another image.
pub(crate) fn begun(vbd: &Disk) {
    let Some(to) = vbd.announced_image() else { return };
    if let Err(error) = point(vbd, &to) {
        tracing::warn!(
            "{error}: the disk's persistent bitmaps would be lost where the server is killed now"
        );
    }
}

/// Nothing came of it.
pub(crate) fn stays(vbd: &Disk) {
    let announced = vbd.announced_image();
    vbd.forget_announced();
    if let Some(Err(error)) = announced.map(|image| point_no_more(&image.place())) {
        tracing::warn!("{error}");
    }
}

/// A disk goes on in the image that it is now. Where that cannot be written down its bitmaps are lost once the server ends.
pub(crate) async fn moved(io: &Io, vbd: &Disk) {
    let Some((sidecar, memory)) = vbd.bitmap_sidecar() else {
        return vbd.forget_announced();
    };
    let end = async {
        let (container, binding) =
            bound_of(vbd).ok_or_else(|| failed(&sidecar, "the image has no file"))?;
        let rebound = vbd.rebind_bitmaps(io, binding?).await;
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
