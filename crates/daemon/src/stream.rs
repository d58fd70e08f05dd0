//! What lies below a disk's topmost image, brought into it while the disk is served, so that the disk needs nothing below, or
//! only what lies below one of them.
//!
//! Stopped anywhere, the disk is as it was: the topmost image names what lay below it until it has all of that, stable. It
//! is closed then, as an image at rest names what stays, and is opened upon that, while the disk stands still.

use std::path::{Path, PathBuf};

use ringtap_image::qcow2::Crypt;
use ringtap_image::{Format, Image, Place};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Job, OnError, Phase, Quiesced, Stream as Bring};

use crate::chain::{
    Backing, Layer, Names, Stays, layers, lead, nth, position, rename, stand_still,
};
use crate::reopen::{Anew, as_it_is, reopen};
use crate::snapshot::{header, is_encrypted};
use crate::{Disk, Error};

/// What is brought where.
pub(crate) struct Stream {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    /// The image that stays below; none where nothing is to stay.
    pub(crate) base: Option<PathBuf>,
    /// How the topmost image is to name it; by its whole path where nothing is said.
    pub(crate) backing_file: Option<String>,
    /// What becomes of the job where it meets an error.
    pub(crate) on_error: OnError,
}

impl Stream {
    /// Whether it can be done, as far as that is told without reading images; what would be in its way.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let top = self.vbd.image().map_err(|error| self.failed(error.to_string()))?;
        if let Some(base) = &self.base {
            self.find(&layers(&*top), base)?;
        }
        Ok(())
    }

    /// Do it, on this thread.
    pub(crate) fn run(self, job: &Job) -> Result<(), Error> {
        let top = self.vbd.image().map_err(|error| self.failed(error.to_string()))?;
        let below = layers(&*top);
        let stays = match &self.base {
            Some(base) => Some(self.find(&below, base)?),
            None => None,
        };
        let go = stays.as_ref().map_or(below.len(), |stays| stays.above as usize - 1);
        let go = &below[..go];
        let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
        let io = tasks.io().clone();
        let driven = |source| Error::Process { tried: "drive the io_uring", source };
        let job = job.clone();
        if go.is_empty() {
            let end = tasks.block_on(async move { job.finalized().await }).map_err(driven)?;
            return end.map_err(|error| self.failed(error.to_string()));
        }
        let format = top.info().format;
        if let Some(why) = why_not(&self.disk.path, format, go)? {
            return Err(self.failed(why));
        }
        let gone: Vec<PathBuf> = go.iter().map(|layer| layer.path.clone()).collect();
        let below = below.into_iter().map(|layer| layer.path).collect();
        let upon = stays.as_ref().and_then(|stays| nth(&*top, stays.above)).map(Image::fork);
        drop(top);
        tasks
            .block_on(
                async move { self.bring(&io, &job, stays, upon, Names { gone, below }).await },
            )
            .map_err(driven)?
    }

    fn failed(&self, why: impl Into<String>) -> Error {
        Error::Stream { path: self.disk.path.clone(), why: why.into() }
    }

    /// Which of the images below stays.
    fn find(&self, below: &[Layer], base: &Path) -> Result<Stays, Error> {
        let found = position(below, base).and_then(|at| Some((at, below.get(at)?)));
        let Some((at, layer)) = found else {
            return Err(Error::Job(format!(
                "Can't find '{}' in the backing chain",
                base.display()
            )));
        };
        let backing = Backing::of(layer, self.backing_file.as_deref(), &self.disk.path);
        let backing = backing.map_err(|why| self.failed(why))?;
        Ok(Stays { above: u32::try_from(at + 1).unwrap_or(u32::MAX), backing })
    }

    async fn bring(
        self,
        io: &Io,
        job: &Job,
        stays: Option<Stays>,
        upon: Option<Box<dyn Image>>,
        names: Names,
    ) -> Result<(), Error> {
        let above = stays.as_ref().map(|stays| stays.above);
        let on_error = self.on_error;
        let bring = Bring { on_error, ..Bring::new(self.vbd.clone(), above) };
        let brought = Box::pin(bring.run(io, job)).await;
        brought.map_err(|error| self.failed(error.to_string()))?;
        job.finalized().await.map_err(|error| self.failed(error.to_string()))?;
        job.is_at(Phase::Ending);
        // Before the chain is another: the disk is found by these whether it has those that go or not.
        lead(&names, &self.disk.path);
        let vbd = self.vbd.fork();
        let still = stand_still(io, &vbd).await;
        let still = still.map_err(|busy| self.failed(busy.to_string()))?;
        let (put, options) = (|still: &Quiesced<'_>, image| still.larger(image).map(drop), {
            as_it_is(&self.disk, Format::Qcow2)
        });
        let anew = Anew { options: options.clone(), below: upon };
        let change = async |place: &Place| {
            let stays = stays.as_ref().map(|stays| &stays.backing);
            let end = rename(io, place, &options, stays, &self.disk.path).await;
            end.map_err(|why| self.failed(why))
        };
        let failed = |why: String| self.failed(why);
        Box::pin(reopen(io, &vbd, &still, &failed, anew, change, put)).await
    }
}

/// What is in the way of an image of a disk that is to take what those hold that lie directly below it.
pub(crate) fn why_not(path: &Path, format: &str, go: &[Layer]) -> Result<Option<String>, Error> {
    if format != Format::Qcow2.name() {
        return Ok(Some(format!("it is a {format} image, and only qcow2 takes it")));
    }
    let own = header(path)?;
    if own.snapshots > 0 {
        let why =
            "it holds snapshots of its own, which would lose what lies below: delete those first";
        return Ok(Some(why.into()));
    }
    for layer in go.iter().filter(|_| own.crypt == Crypt::None) {
        if is_encrypted(&layer.path, layer.format)? {
            return Ok(Some(format!("{} is encrypted, and it is not", layer.path.display())));
        }
    }
    Ok(None)
}
