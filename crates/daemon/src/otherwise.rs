//! A disk's image opened otherwise while the disk is served: guests wait meanwhile, and go on by the new handle; by one like the
//! former where that cannot be.

use std::iter::successors;
use std::path::PathBuf;

use ringtap_image::{Away, Container, Format, Image, Info, Place, on_a_ring};
use ringtap_io::{Io, Panic};
use ringtap_stores::is_store;
use ringtap_vbd::Quiesced;

use crate::chain::stand_still;
use crate::opened::{Wrap, image, named, record_formats};
use crate::{Disk, Error, checkpoints, successor};

/// What is to lie below it.
pub(crate) enum Below {
    /// What does now.
    Stays,
    /// What it is told to, or names.
    AsOpened,
    Is(Box<dyn Image>),
}

/// How it is to be from now on.
pub(crate) struct Otherwise {
    pub(crate) was: Disk,
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    /// The file that it is to lie in, where that is another.
    pub(crate) place: Option<Place>,
    pub(crate) below: Below,
    /// What lay below it, once it is put away.
    pub(crate) away: Option<Option<Box<dyn Image>>>,
    /// What other disks have open.
    pub(crate) held: Vec<PathBuf>,
    pub(crate) wrap: Wrap,
}

fn files(below: Option<&dyn Image>) -> impl Iterator<Item = PathBuf> + '_ {
    let place = |image: &dyn Image| Some(image.place()?.at().into_owned());
    successors(below, |image| image.below()).filter_map(place)
}

impl Otherwise {
    /// Open it so, on this thread.
    ///
    /// # Errors
    /// Why it is as it was. Where it could not be opened so, either, the disk is stopped.
    pub(crate) fn open(mut self) -> Result<(), Error> {
        let path = self.was.path.clone();
        if is_store(&path) && !self.stays() {
            self = on_a_ring(&path, |io| async move { Box::pin(self.put_away(&io)).await })??;
        }
        on_a_ring(&path, |io| async move { Box::pin(self.exchange(&io)).await })?
    }

    /// Whether the same file is written to, or not, as it was, upon the same.
    fn stays(&self) -> bool {
        let [was, is] = [&self.was, &self.disk].map(|disk| disk.options.read_only);
        self.place.is_none() && was == is && matches!(self.below, Below::Stays)
    }

    /// Close an image that nobody uses on a server, which may have room for one connection: no handle of it is left.
    async fn put_away(mut self, io: &Io) -> Result<Otherwise, Error> {
        let own = self.vbd.fork();
        let still = stand_still(io, &own).await.map_err(|busy| self.failed(busy))?;
        let wrong = |error: ringtap_image::Error| self.failed(error);
        let former = still.image().map_err(wrong)?;
        self.vbd.close(io).await.map_err(wrong)?;
        former.stop_writing();
        former.let_write(true);
        let info = Info { size: self.vbd.size(), ..former.info().clone() };
        let former = still.come_back(Box::new(Away::new(info))).map_err(wrong)?;
        self.away = Some(former.below().map(Image::fork));
        Ok(self)
    }

    fn failed(&self, why: impl ToString) -> Error {
        Error::Usage(format!("{}: {}", self.was.path.display(), why.to_string()))
    }

    async fn exchange(mut self, io: &Io) -> Result<(), Error> {
        let own = self.vbd.fork();
        let still = stand_still(io, &own).await.map_err(|busy| self.failed(busy))?;
        let former = still.image().map_err(|error| self.failed(error))?;
        let place = former.place().unwrap_or_else(|| (&*self.was.path).into());
        let is_qcow2 = former.info().format == Format::Qcow2.name();
        let stays = self.stays();
        let (is_away, lower) = match self.away.take() {
            Some(lower) => (true, lower),
            None => (false, former.below().map(Image::fork)),
        };
        let below = || lower.as_ref().filter(|_| is_qcow2).map(|image| image.fork());
        let upon = match std::mem::replace(&mut self.below, Below::Stays) {
            Below::Stays => below(),
            Below::AsOpened => None,
            Below::Is(image) => Some(image),
        };
        let moves = self.place.take();
        let wrong = |error: ringtap_image::Error| self.failed(error);
        if stays && is_store(&self.was.path) {
            // It is in no page cache here.
            let put = still.opened_otherwise(former, self.disk.options.cache);
            return put.map(drop).map_err(wrong);
        }
        // What is kept of bitmaps goes on where it stays, and so does what an overlay was made upon and is not stable yet.
        let closed = match stays {
            _ if is_away || stays && self.was.options.read_only => Ok(()),
            true => former.close(io).await,
            false => self.vbd.close(io).await,
        };
        closed.map_err(wrong)?;
        // What is opened next is mostly the same file; this handle of it is not used again.
        former.stop_writing();
        former.let_write(true);
        drop(former);
        let to = moves.unwrap_or_else(|| place.clone());
        let end = self.put(io, &still, &self.disk, to, upon, stays).await;
        if end.is_err() {
            let back = self.put(io, &still, &self.was, place, below(), stays).await;
            if let Err(error) = back {
                // There is no handle left by which it could be written to.
                let why = format!("it can be opened neither as was wanted nor as it was: {error}");
                self.vbd.health().fail(Panic::of(why));
            }
        }
        self.let_go(lower.as_deref());
        end
    }

    /// Open it as that disk, which it is from now on.
    async fn put(
        &self,
        io: &Io,
        still: &Quiesced<'_>,
        disk: &Disk,
        place: Place,
        upon: Option<Box<dyn Image>>,
        keeps_bitmaps: bool,
    ) -> Result<(), Error> {
        let opened = Panic::catch(|| image(disk, &self.wrap, &place, upon));
        let opened = opened.unwrap_or_else(|panic| Err(Error::panicked([&*disk.path], &panic)))?;
        let (own, size) = (opened.fork(), self.vbd.size());
        let named = named(disk, place, &*opened);
        let put = || {
            let is = own.current_size().unwrap_or(own.info().size);
            if own.info().size != size && is != size {
                return Err(self.failed(format!(
                    "the disk has {size} bytes, and its guests know; {} has {is}",
                    disk.path.display()
                )));
            }
            still
                .opened_otherwise(opened, disk.options.cache)
                .map_err(|error| self.failed(error))?;
            if !keeps_bitmaps {
                let goes_on_nowhere = own.container().is_some_and(Container::goes_on_nowhere);
                if !disk.options.read_only && !goes_on_nowhere {
                    successor::take_back(&disk.path);
                }
                self.vbd.forget_bitmaps();
                checkpoints::restore(&self.vbd)?;
            }
            Ok(())
        };
        let end = put();
        match &end {
            Ok(()) => record_formats(named.as_slice()),
            Err(_) => {
                if !disk.options.read_only
                    && let Err(error) = own.close(io).await
                {
                    tracing::warn!("cannot close it again: {error}");
                }
                own.stop_writing();
                own.let_write(true);
            }
        }
        end
    }

    /// Queues that rest keep what lay below until their next request, and read nothing by it any more.
    fn let_go(&self, lower: Option<&dyn Image>) {
        let Ok(now) = self.vbd.image() else { return };
        let stays: Vec<PathBuf> = files(now.below()).chain(self.held.iter().cloned()).collect();
        for image in successors(lower, |image| image.below()) {
            let is_held =
                image.place().is_some_and(|place| stays.iter().any(|one| *one == place.at()));
            if !is_held {
                image.let_write(true);
            }
        }
    }
}
