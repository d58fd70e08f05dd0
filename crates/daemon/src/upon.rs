//! Disks that were opened upon another's image, when that is opened anew: they stand still meanwhile, and go on upon what has
//! been opened then. Else they would read by a handle that knows nothing of what is written by the new one.

use std::iter::successors;
use std::path::PathBuf;

use ringtap_image::{Format, Image, Place};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Quiesced, Vbd};

use crate::chain::stand_still;
use crate::identity::{Identity, identity};
use crate::reopen::{Anew, as_it_is, reopen};
use crate::switch::{Beside, Switch};
use crate::threads::spawn_working;
use crate::{Disk, Error};

/// Such a disk.
pub(crate) struct Upon {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    pub(crate) beside: Beside,
}

/// Images that have been opened anew, each by its file.
type Opened = Vec<(Identity, Box<dyn Image>)>;

fn file(image: &dyn Image) -> Option<Identity> {
    image.place().and_then(|place| identity(&place.at()))
}

/// Have `change` open an image anew that these disks read, the nearest first, and give it, with the file that it lay in until
/// now, beside what else came of it.
///
/// # Errors
/// Before anything was changed: a disk does not stand still. Second, where one could not be opened upon the image: it is
/// stopped.
pub(crate) fn opened_anew<T: Send + 'static>(
    upon: Vec<Upon>,
    change: impl FnOnce() -> (T, Option<(Identity, Box<dyn Image>)>) + Send + 'static,
) -> Result<(T, Result<(), Error>), Error> {
    if upon.is_empty() {
        return Ok((change().0, Ok(())));
    }
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let io = tasks.io().clone();
    let driven = |source| Error::Process { tried: "drive the io_uring", source };
    tasks.block_on(async move { meanwhile(&io, &upon, change).await }).map_err(driven)?
}

async fn meanwhile<T: Send + 'static>(
    io: &Io,
    upon: &[Upon],
    change: impl FnOnce() -> (T, Option<(Identity, Box<dyn Image>)>) + Send + 'static,
) -> Result<(T, Result<(), Error>), Error> {
    let vbds: Vec<Vbd> = upon.iter().map(|one| one.vbd.fork()).collect();
    let mut still = vec![];
    for (one, vbd) in upon.iter().zip(&vbds) {
        let failed = |busy: ringtap_vbd::Busy| one.failed(busy.to_string());
        still.push((one, vbd, stand_still(io, vbd).await.map_err(failed)?));
    }
    // It has a ring of its own.
    let (gives, given) = std::sync::mpsc::channel();
    let thread = spawn_working("reopen", move || _ = gives.send(change()))?;
    let _ended = thread.join();
    let Ok((end, image)) = given.recv() else {
        return Err(Error::Usage("it could not be opened anew".into()));
    };
    let mut opened: Opened = vec![];
    opened.extend(image);
    let mut all = Ok(());
    for (one, vbd, still) in still {
        let _disk = one.vbd.span().enter();
        match one.put(io, vbd, &still, &opened).await {
            Ok(()) => {
                let own = one.vbd.image().ok();
                opened.extend(own.and_then(|image| Some((file(&*image)?, image))));
            }
            Err(error) => all = all.and(Err(error)),
        }
    }
    Ok((end, all))
}

impl Upon {
    fn failed(&self, why: String) -> Error {
        Error::Usage(format!("{}, which lies upon it: {why}", self.disk.path.display()))
    }

    /// Open it upon the nearest of those images that it lies upon.
    async fn put(
        &self,
        io: &Io,
        vbd: &Vbd,
        still: &Quiesced<'_>,
        opened: &Opened,
    ) -> Result<(), Error> {
        let failed = |why: String| self.failed(why);
        let former = still.image().map_err(|error| failed(error.to_string()))?;
        let anew = |image: &dyn Image| {
            let own = file(image)?;
            opened.iter().find(|(one, _)| *one == own).map(|(_, image)| image.fork())
        };
        let below = successors(former.below(), |image| image.below());
        let mut numbered = (1..).zip(below);
        let found = numbered.find_map(|(above, image)| Some((above, anew(image)?)));
        let Some((top, mut lower)) = found else { return Ok(()) };
        let (disk, beside) = (&self.disk, &self.beside);
        let switch = Switch { disk, vbd: &self.vbd, beside, top, stays: None, failed: &failed };
        for above in (1..top).rev() {
            lower = switch.open_upon(io, &*former, above, Some(lower)).await?;
        }
        let anew = Anew { options: as_it_is(disk, Format::Qcow2), below: Some(lower) };
        let put = |still: &Quiesced<'_>, image| still.larger(image).map(drop);
        Box::pin(reopen(io, vbd, still, &failed, anew, async |_: &Place| Ok(()), put)).await?;
        // Queues that rest keep those between until their next request.
        let is_held = |image: &&dyn Image| {
            let is_it = |place: Place| beside.held.iter().any(|one: &PathBuf| *one == place.at());
            image.place().is_some_and(is_it)
        };
        let between = successors(former.below(), |image| image.below()).take(top as usize - 1);
        between.filter(|image| !is_held(image)).for_each(|image| image.let_write(true));
        Ok(())
    }
}
