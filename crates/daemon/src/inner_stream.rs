//! What lies below an image between a disk's topmost one and the deepest, brought into that image while the disk is served.
//!
//! The image is opened once more, for writing, and the disk upon that handle: so that who reads it by the disk and the job
//! that writes to it have one memory of where its bytes lie. What it takes reads the same below it, so that the job may end
//! anywhere. Once it has all, stable and closed, the disk goes without those that go (`switch.rs`).

use std::path::PathBuf;

use ringtap_image::{Format, Image, open_on, record};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Job, OnError, Stream as Bring, Vbd};

use crate::chain::{Backing, Layer, Stays, layers, nth, options_of, position};
use crate::commit::{close, seal};
use crate::stream::why_not;
use crate::switch::{Beside, Switch};
use crate::{Disk, Error};

/// What is brought where.
pub(crate) struct InnerStream {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    pub(crate) beside: Beside,
    /// The image that takes what lies below it.
    pub(crate) into: PathBuf,
    /// The image that stays below that; none where nothing is to stay.
    pub(crate) base: Option<PathBuf>,
    /// How the image is to name it; by its whole path where nothing is said.
    pub(crate) backing_file: Option<String>,
    /// What becomes of the job where it meets an error.
    pub(crate) on_error: OnError,
}

/// The images that it is about.
struct Found {
    below: Vec<Layer>,
    /// How many lie upon the one that takes.
    into: u32,
    stays: Option<Stays>,
}

impl Found {
    fn taker(&self) -> &Layer {
        &self.below[self.into as usize - 1]
    }

    /// Those that go.
    fn go(&self) -> &[Layer] {
        let end = self.stays.as_ref().map_or(self.below.len(), |stays| stays.above as usize - 1);
        &self.below[self.into as usize..end]
    }
}

impl InnerStream {
    fn failed(&self, why: impl Into<String>) -> Error {
        let why = format!("{}: {}", self.into.display(), why.into());
        Error::Stream { path: self.disk.path.clone(), why }
    }

    fn top(&self) -> Result<Box<dyn Image>, Error> {
        self.vbd.image().map_err(|error| self.failed(error.to_string()))
    }

    /// Whether it can be done, as far as that is told without reading images; what would be in its way.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.find(&*self.top()?).map(drop)
    }

    fn find(&self, image: &dyn Image) -> Result<Found, Error> {
        let below = layers(image);
        let gone = || self.failed("it is no image of the disk any more");
        let into = position(&below, &self.into).ok_or_else(gone)?;
        let stays = match &self.base {
            None => None,
            Some(base) => {
                let found = position(&below, base).filter(|at| *at > into);
                let Some(at) = found else {
                    let base = base.display();
                    return Err(Error::Job(format!("Can't find '{base}' in the backing chain")));
                };
                let backing = Backing::of(&below[at], self.backing_file.as_deref(), &self.into);
                let backing = backing.map_err(|why| self.failed(why))?;
                Some(Stays { above: at as u32 + 1, backing })
            }
        };
        // Those upon it are opened anew.
        let formats = std::iter::once(image.info().format);
        let mut upon = formats.chain(below[..into].iter().map(|layer| layer.format.name()));
        if let Some(format) = upon.find(|format| *format != Format::Qcow2.name()) {
            return Err(self.failed(format!(
                "a {format} image lies upon it, and only qcow2 is made to lie upon another while it is served"
            )));
        }
        Ok(Found { into: into as u32 + 1, stays, below })
    }

    /// Do it, on this thread.
    pub(crate) fn run(self, job: &Job) -> Result<(), Error> {
        let image = self.top()?;
        let found = self.find(&*image)?;
        let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
        let (io, job) = (tasks.io().clone(), job.clone());
        let driven = |source| Error::Process { tried: "drive the io_uring", source };
        if found.go().is_empty() {
            let end = tasks.block_on(async move { job.finalized().await }).map_err(driven)?;
            return end.map_err(|error| self.failed(error.to_string()));
        }
        let (path, format) = (&found.taker().path, found.taker().format.name());
        if let Some(why) = why_not(path, format, found.go())? {
            return Err(self.failed(why));
        }
        let work = async move {
            let failed = |why: String| self.failed(why);
            let switch = Switch {
                disk: &self.disk,
                vbd: &self.vbd,
                beside: &self.beside,
                top: found.into + 1,
                stays: found.stays.as_ref(),
                failed: &failed,
            };
            Box::pin(self.take(&io, &job, image, &found, &switch)).await?;
            Box::pin(switch.run(&io, &job)).await
        };
        tasks.block_on(work).map_err(driven)?
    }

    /// Have the image take it; it is closed, and stable, when this returns.
    async fn take(
        &self,
        io: &Io,
        job: &Job,
        image: Box<dyn Image>,
        found: &Found,
        switch: &Switch<'_>,
    ) -> Result<(), Error> {
        // A snapshot may have left images below that are not stable: what follows flushes other handles of them.
        let flushed = self.vbd.fork().flush(io).await;
        flushed.map_err(|error| self.failed(error.to_string()))?;
        let path = &found.taker().path;
        record::unseal(path).map_err(|error| {
            self.failed(format!("cannot record where its disk goes on: {error}"))
        })?;
        let taken = Box::pin(self.take_recorded(io, job, &*image, found, switch)).await;
        seal(path);
        taken
    }

    async fn take_recorded(
        &self,
        io: &Io,
        job: &Job,
        image: &dyn Image,
        found: &Found,
        switch: &Switch<'_>,
    ) -> Result<(), Error> {
        let read = nth(image, found.into).ok_or_else(|| self.failed("it has gone"))?;
        let place = read.place().ok_or_else(|| self.failed("it has no file"))?;
        let left = found.below.len() as u32 + 1 - found.into;
        let options = options_of(&self.disk, Format::Qcow2, left);
        read.let_write(true);
        let opened = open_on(io, &place, &options).await.inspect_err(|_| read.let_write(false))?;
        opened.read_beside(true);
        let lower = opened.fork();
        let to = Vbd::new(opened, self.disk.options.cache);
        let put = Box::pin(switch.put_upon(io, image, found.into, lower)).await;
        let taken = match put {
            Ok(()) => self.bring(io, job, found, &to).await,
            Err(error) => {
                read.let_write(false);
                Err(error)
            }
        };
        let closed = close(io, to.disk(), &found.taker().path).await;
        if let Ok(image) = to.disk().image() {
            // The disk goes on reading it by this very handle.
            image.stop_writing();
        }
        taken.and(closed.map_err(|why| self.failed(why)))
    }

    async fn bring(&self, io: &Io, job: &Job, found: &Found, to: &Vbd) -> Result<(), Error> {
        to.share_device();
        let above = found.stays.as_ref().map(|stays| stays.above - found.into);
        let on_error = self.on_error;
        let bring = Bring { on_error, ..Bring::new(to.disk().clone(), above) };
        let brought = Box::pin(bring.run(io, job)).await;
        brought.map_err(|error| self.failed(error.to_string()))
    }
}
