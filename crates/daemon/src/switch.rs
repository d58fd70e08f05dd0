//! A disk that needs fewer images below: what stays is named by the image upon those that go, and the disk is opened upon that.
//!
//! It reads the same with those that go as without, and nobody writes to any of them. So one header write switches between
//! two chains, and the disk stands still only while its topmost image is opened upon the new one, of which all others are
//! open by then.

use std::path::PathBuf;

use ringtap_image::{Format, Image, Place, open_on, qcow2, record};
use ringtap_io::Io;
use ringtap_vbd::{Job, Phase, Quiesced};

use crate::chain::{
    Layer, Names, Stays, layers, lead, nth, options_of, rename, stand_still, to_read,
};
use crate::identity::identity;
use crate::reopen::{Anew, as_it_is, reopen};
use crate::{Disk, Error};

/// Other disks, as a job finds them that has a disk opened upon other images.
pub(crate) struct Beside {
    /// Those that the disk was opened upon.
    pub(crate) upon: Vec<ringtap_vbd::Disk>,
    /// What all the rest have open.
    pub(crate) held: Vec<PathBuf>,
}

/// Which images are to go.
pub(crate) struct Switch<'a> {
    pub(crate) disk: &'a Disk,
    pub(crate) vbd: &'a ringtap_vbd::Disk,
    pub(crate) beside: &'a Beside,
    /// How many images lie upon the first that goes.
    pub(crate) top: u32,
    /// What stays below the last; none where all go.
    pub(crate) stays: Option<&'a Stays>,
    pub(crate) failed: &'a dyn Fn(String) -> Error,
}

impl Switch<'_> {
    fn gone(&self) -> Error {
        (self.failed)("the images below it are others now".into())
    }

    fn place(&self, image: &dyn Image, above: u32) -> Result<Place, Error> {
        nth(image, above).and_then(Image::place).ok_or_else(|| self.gone())
    }

    /// Do it, once the job may end.
    pub(crate) async fn run(&self, io: &Io, job: &Job) -> Result<(), Error> {
        job.finalized().await.map_err(|error| (self.failed)(error.to_string()))?;
        job.is_at(Phase::Ending);
        let image = self.vbd.image().map_err(|error| (self.failed)(error.to_string()))?;
        let image = &*image;
        let below = layers(image);
        let mut lower = match self.stays {
            Some(stays) => {
                let left = below.len() as u32 + 1 - stays.above;
                let options = to_read(options_of(self.disk, stays.backing.format, left));
                Some(open_on(io, self.place(image, stays.above)?, &options).await?)
            }
            None => None,
        };
        self.lead(&below);
        let inner = self.top > 1;
        if inner {
            self.rename(io, image, &below).await?;
            for above in (1..self.top).rev() {
                lower = Some(self.open_upon(io, image, above, lower).await?);
            }
        }
        let own = as_it_is(self.disk, Format::Qcow2);
        let anew = Anew { options: own.clone(), below: lower };
        let change = async |place: &Place| match inner {
            true => Ok(()),
            false => {
                let stays = self.stays.map(|stays| &stays.backing);
                let end = rename(io, place, &own, stays, &self.disk.path).await;
                end.map_err(self.failed)
            }
        };
        self.reopen(io, anew, change).await
    }

    /// Before the chain is another: the disk is found by these whether it has those that go or not.
    fn lead(&self, below: &[Layer]) {
        let path = |layer: &Layer| layer.path.clone();
        let end = self.stays.map_or(below.len(), |stays| stays.above as usize - 1);
        let gone: Vec<PathBuf> = below[self.top as usize - 1..end].iter().map(path).collect();
        lead(&Names { gone, below: below.iter().map(path).collect() }, &self.disk.path);
    }

    /// An image of the chain, to be read, upon others than now; upon none where there are none.
    pub(crate) async fn open_upon(
        &self,
        io: &Io,
        image: &dyn Image,
        above: u32,
        lower: Option<Box<dyn Image>>,
    ) -> Result<Box<dyn Image>, Error> {
        let place = self.place(image, above)?;
        let options = to_read(options_of(self.disk, Format::Qcow2, 1));
        Ok(match lower {
            Some(lower) => qcow2::open_upon(io, &place, &options, lower).await?,
            None => open_on(io, &place, &options).await?,
        })
    }

    /// Open the images between the topmost one and `lower`, which so many lie upon, anew upon that, and the disk upon them.
    pub(crate) async fn put_upon(
        &self,
        io: &Io,
        image: &dyn Image,
        above: u32,
        lower: Box<dyn Image>,
    ) -> Result<(), Error> {
        let mut lower = lower;
        for above in (1..above).rev() {
            lower = self.open_upon(io, image, above, Some(lower)).await?;
        }
        let anew = Anew { options: as_it_is(self.disk, Format::Qcow2), below: Some(lower) };
        self.reopen(io, anew, async |_: &Place| Ok(())).await
    }

    async fn reopen(
        &self,
        io: &Io,
        anew: Anew,
        change: impl AsyncFnOnce(&Place) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let former = self.vbd.image().map_err(|error| (self.failed)(error.to_string()))?;
        let vbd = self.vbd.fork();
        let still = stand_still(io, &vbd).await;
        let still = still.map_err(|busy| (self.failed)(busy.to_string()))?;
        let put = |still: &Quiesced<'_>, image| still.larger(image).map(drop);
        Box::pin(reopen(io, &vbd, &still, self.failed, anew, change, put)).await?;
        drop(still);
        // Queues that rest keep these until their next request, and read nothing by them any more.
        let held = |place: Place| self.beside.held.iter().any(|one| *one == place.at());
        let is_held = |image: &&dyn Image| image.place().is_some_and(held);
        let below = std::iter::successors(former.below(), |image| image.below());
        below.filter(|image| !is_held(image)).for_each(|image| image.let_write(true));
        self.renew(io).await;
        Ok(())
    }

    /// The disks that it was opened upon read those of its images that they are by its handles: theirs know nothing of what
    /// has been written since they were opened, and refuse that anybody writes more.
    async fn renew(&self, io: &Io) {
        let Ok(image) = self.vbd.image() else { return };
        let file = |image: &dyn Image| image.place().and_then(|place| identity(&place.at()));
        for disk in &self.beside.upon {
            let Ok(own) = disk.image() else { continue };
            let wanted = file(&*own);
            let mut all = std::iter::successors(image.below(), |image| image.below());
            let Some(anew) = all.find(|one| wanted.is_some() && file(*one) == wanted) else {
                continue;
            };
            let vbd = disk.fork();
            let put = match stand_still(io, &vbd).await {
                Ok(still) => still.larger(anew.fork()).map(drop).map_err(|error| error.to_string()),
                Err(busy) => Err(busy.to_string()),
            };
            if let Err(why) = put {
                let _disk = disk.span().enter();
                tracing::warn!("it goes on being read as it was opened: {why}");
            }
        }
    }

    /// Have the image upon those that go name what stays. It lies below the disk itself: nobody else writes to it.
    async fn rename(&self, io: &Io, image: &dyn Image, below: &[Layer]) -> Result<(), Error> {
        let above = self.top - 1;
        let handle = nth(image, above).ok_or_else(|| self.gone())?;
        let place = self.place(image, above)?;
        let path = &below[above as usize - 1].path;
        let sealed = self.record(record::unseal(path))?;
        handle.let_write(true);
        let options = options_of(self.disk, Format::Qcow2, 1);
        let stays = self.stays.map(|stays| &stays.backing);
        let end = rename(io, &place, &options, stays, path).await;
        handle.let_write(false);
        if sealed {
            self.record(record::seal(path))?;
        }
        end.map_err(self.failed)
    }

    fn record<T>(&self, end: std::io::Result<T>) -> Result<T, Error> {
        end.map_err(|error| (self.failed)(format!("cannot write down where it goes on: {error}")))
    }
}
