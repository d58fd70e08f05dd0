//! What images between a disk's topmost one and one below hold, brought into that one, while the disk is served: it goes on
//! in the same image, and needs fewer below.
//!
//! As when a whole disk is committed (`commit.rs`), what is written to the image below lies below what those upon it hold, so
//! that they never look there; nobody writes to any of them. Once it has all, stable and closed, the disk goes without those
//! that go (`switch.rs`).

use std::path::{Path, PathBuf};

use ringtap_image::{Format, Image, open_on, record};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Ending, Job, Mirror, OnErrors, Scope, Vbd};

use crate::chain::{Backing, Layer, Stays, layers, nth, options_of, position};
use crate::commit::{close, larger, seal};
use crate::switch::{Beside, Switch};
use crate::{Disk, Error, checkpoints};

/// What is brought where.
pub(crate) struct InnerCommit {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    pub(crate) beside: Beside,
    /// The uppermost of those that go.
    pub(crate) top: PathBuf,
    /// The image that takes what they hold.
    pub(crate) base: PathBuf,
    /// How the image upon them is to name it; by its whole path where nothing is said.
    pub(crate) backing_file: Option<String>,
    /// What becomes of the job where it meets an error.
    pub(crate) on_errors: OnErrors,
}

/// The images that it is about: how many lie upon each.
struct Found {
    below: Vec<Layer>,
    /// The topmost of those that go.
    top: u32,
    /// The one that stays.
    base: u32,
    stays: Stays,
}

impl Found {
    fn layer(&self, above: u32) -> &Layer {
        &self.below[above as usize - 1]
    }

    /// How many images there are from that one on.
    fn left(&self, above: u32) -> u32 {
        self.below.len() as u32 + 1 - above
    }
}

impl InnerCommit {
    fn failed(&self, why: impl Into<String>) -> Error {
        Error::Commit { path: self.disk.path.clone(), why: why.into() }
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
        let gone = || self.failed("the images below it are others now");
        let at = |path: &Path| position(&below, path).ok_or_else(gone);
        let (top, base) = (at(&self.top)? + 1, at(&self.base)? + 1);
        if top >= base {
            return Err(gone());
        }
        // Those upon the ones that go are opened anew.
        let formats = std::iter::once(image.info().format);
        let upon = formats.chain(below.iter().map(|layer| layer.format.name())).take(top);
        if let Some(format) = upon.into_iter().find(|format| *format != Format::Qcow2.name()) {
            return Err(self.failed(format!(
                "a {format} image lies upon those that are to go, and only qcow2 is made to lie upon another while it is served"
            )));
        }
        let sizes = std::iter::once(image.info().size).chain(below.iter().map(|one| one.size));
        let sizes: Vec<u64> = sizes.collect();
        let (over, own, under) = (sizes[top - 1], sizes[top], sizes[base]);
        if over > own && under > own {
            return Err(self.failed(format!(
                "{} has {own} bytes, and hides what {} holds behind these: that would be seen again",
                below[top - 1].path.display(),
                below[base - 1].path.display()
            )));
        }
        let overlay = if top == 1 { &self.disk.path } else { &below[top - 2].path };
        let backing = Backing::of(&below[base - 1], self.backing_file.as_deref(), overlay);
        let backing = backing.map_err(|why| self.failed(why))?;
        let (top, base) = (top as u32, base as u32);
        Ok(Found { top, base, stays: Stays { above: base, backing }, below })
    }

    /// Do it, on this thread.
    pub(crate) fn run(self, job: &Job) -> Result<(), Error> {
        let image = self.top()?;
        let found = self.find(&*image)?;
        let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
        let (io, job) = (tasks.io().clone(), job.clone());
        let driven = |source| Error::Process { tried: "drive the io_uring", source };
        let work = async move {
            let read = nth(&*image, found.base).ok_or_else(|| self.failed("it has gone"))?;
            let copied = Box::pin(self.copy(&io, &job, &*image, read, &found)).await;
            read.let_write(false);
            copied?;
            let switch = Switch {
                disk: &self.disk,
                vbd: &self.vbd,
                beside: &self.beside,
                top: found.top,
                stays: Some(&found.stays),
                failed: &|why| self.failed(why),
            };
            Box::pin(switch.run(&io, &job)).await
        };
        tasks.block_on(work).map_err(driven)?
    }

    /// Have the image below hold what those that go do; it is closed, and stable, when this returns.
    async fn copy(
        &self,
        io: &Io,
        job: &Job,
        image: &dyn Image,
        read: &dyn Image,
        found: &Found,
    ) -> Result<(), Error> {
        let wrong = |error: ringtap_image::Error| self.failed(error.to_string());
        // A snapshot may have left images below that are not stable: what follows flushes other handles of them.
        self.vbd.fork().flush(io).await.map_err(wrong)?;
        read.let_write(true);
        let base = found.layer(found.base);
        // What is written to it from now on is no sign that somebody put it back.
        let before = record::successor(&base.path);
        let next = before.clone().unwrap_or_else(|| self.disk.path.clone());
        self.record(record::set_successor(&base.path, &next))?;
        let place = read.place().ok_or_else(|| self.failed("an image below it has no file"));
        let end = match place.and_then(|place| checkpoints::forget_below(&self.vbd, &place)) {
            Ok(()) => self.copy_recorded(io, job, image, read, found).await,
            Err(error) => Err(error),
        };
        if before.is_none() {
            // As it was before: an image that others may lie upon, which nobody but the operator knows.
            self.record(record::forget_successor(&base.path))?;
        } else if end.is_err() {
            seal(&base.path);
        }
        end
    }

    async fn copy_recorded(
        &self,
        io: &Io,
        job: &Job,
        image: &dyn Image,
        read: &dyn Image,
        found: &Found,
    ) -> Result<(), Error> {
        let top = nth(image, found.top).ok_or_else(|| self.failed("it has gone"))?;
        let from = Vbd::new(top.fork(), self.disk.options.cache);
        from.share_device();
        let (base, size) = (found.layer(found.base), from.size());
        let place = read.place().ok_or_else(|| self.failed("an image below it has no file"))?;
        let options = options_of(&self.disk, base.format, found.left(found.base));
        // Else tables are written that those upon it read.
        let hides = read.below().is_some_and(|below| below.info().size > base.size);
        if base.format == Format::Qcow2 && !hides && base.size < size {
            larger(io, &place, &options, size).await.map_err(|why| self.failed(why))?;
        }
        let opened = open_on(io, &place, &options).await?;
        opened.read_beside(true);
        let to = Vbd::new(opened, self.disk.options.cache);
        let fits = to.size() >= size || to.disk().grow(size).is_ok();
        let copied = if fits {
            let scope = Scope::Above(found.base - found.top);
            let on_errors = self.on_errors;
            let mirror = Mirror { scope, on_errors, ..Mirror::new(from, to.disk().clone()) };
            let nothing = async || Ok::<_, std::convert::Infallible>(());
            let end = mirror.run(io, job, Ending::Copy, nothing).await;
            end.map(drop).map_err(|error| error.to_string())
        } else {
            Err(format!(
                "{} has {} bytes, what is to go {size}, and its format is not made larger while it is used",
                base.path.display(),
                to.size()
            ))
        };
        let closed = close(io, to.disk(), &base.path).await;
        if let Ok(image) = to.disk().image() {
            image.stop_writing();
            image.let_write(true);
        }
        match (copied, closed) {
            (Err(why), Err(error)) => Err(self.failed(format!("{why}; and {error}"))),
            (copied, closed) => copied.and(closed).map_err(|why| self.failed(why)),
        }
    }

    fn record<T>(&self, end: std::io::Result<T>) -> Result<T, Error> {
        end.map_err(|error| self.failed(format!("cannot write down where it goes on: {error}")))
    }
}
