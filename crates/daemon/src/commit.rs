//! What the topmost images of a disk hold, brought into one of those below it, which the disk goes on in then: while it is
//! served.
//!
//! The image below is opened once more, for writing. The topmost images go on reading it by the handle they have: what is
//! written to it lies below what they hold, so that they never look there, and room that is freed in it stays as it is as
//! long as they do. Stopped anywhere, the disk is as it was: the record of the image below says where it goes on until the
//! moment at which it has all.

use std::path::{Path, PathBuf};

use ringtap_image::qcow2::{self, ResizeOptions, There};
use ringtap_image::{Format, Image, OpenOptions, Place, open_place, record};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Ending, Job, Mirror, OnErrors, Scope, Vbd};

use crate::carried::{self, Both, carry};
use crate::identity::identity;
use crate::{Disk, Error, checkpoints};

/// What is brought where.
pub(crate) struct Commit {
    pub(crate) disk: Disk,
    pub(crate) vbd: ringtap_vbd::Disk,
    /// The image below; the deepest where none is named.
    pub(crate) base: Option<PathBuf>,
    /// The image of another disk that it was opened upon, whatever it names.
    pub(crate) upon: Option<Box<dyn Image>>,
    /// By how many percent guests may be slowed.
    pub(crate) max_slowdown: u32,
    /// What becomes of the job where it meets an error.
    pub(crate) on_errors: OnErrors,
}

/// Where the disk goes on.
pub(crate) struct Moved {
    pub(crate) path: PathBuf,
    pub(crate) format: Option<Format>,
    /// How that image was opened, and where its secret is, where both are its own.
    pub(crate) opened: Option<(OpenOptions, Option<String>)>,
}

/// The image below, as those upon it have it.
struct Below {
    /// How many lie upon it.
    above: u32,
    /// How many it and those below it are.
    depth: u32,
    place: Place,
    path: PathBuf,
    format: Format,
    size: u64,
    /// Whether it may be made larger: those upon it have its first table in memory, and see it as long as it was.
    can_grow: bool,
}

impl Commit {
    /// Do it, on this thread; none where the job was told to leave the disk where it is.
    pub(crate) fn run(self, job: &Job) -> Result<Option<Moved>, Error> {
        let top = self.vbd.image().map_err(|error| self.failed(error.to_string()))?;
        let below = self.find(&*top)?;
        let read = handle(&*top, below.above).ok_or_else(|| self.failed("it has gone"))?;
        read.let_write(true);
        let end = self.bring(job, &below);
        // Nobody writes to it any more where it stays below.
        if !matches!(end, Ok(Some(_))) {
            read.let_write(false);
        }
        end
    }

    /// The image below, wherever it was named; none where there is no such.
    pub(crate) fn base(&self) -> Option<PathBuf> {
        let top = self.vbd.image().ok()?;
        self.find(&*top).ok().map(|below| below.path)
    }

    fn failed(&self, why: impl Into<String>) -> Error {
        Error::Commit { path: self.disk.path.clone(), why: why.into() }
    }

    /// Which of the images below it is.
    fn find(&self, top: &dyn Image) -> Result<Below, Error> {
        let wanted = self.base.as_deref().map(|path| (path, identity(path)));
        let (mut found, mut above, mut next) = (None, 0, top.below());
        while let Some(image) = next {
            above += 1;
            let place =
                image.place().ok_or_else(|| self.failed("an image below it has no file"))?;
            let is_it = wanted.is_none_or(|(_, wanted)| wanted == identity(&place.at()));
            if is_it {
                found = Some((above, place, image));
            }
            next = image.below();
        }
        let Some((above, place, image)) = found else {
            return Err(self.failed(match wanted {
                Some((path, _)) => format!("{} does not lie below it", path.display()),
                None => "nothing lies below it".to_owned(),
            }));
        };
        let info = image.info();
        let format = info.format.parse().map_err(|_| self.failed("its format is unknown"))?;
        // Else tables are written that those upon it read.
        let hides = image.below().is_some_and(|below| below.info().size > info.size);
        let can_grow = format == Format::Qcow2 && !hides;
        let path = std::fs::canonicalize(place.at()).unwrap_or_else(|_| place.path().to_owned());
        let depth = std::iter::successors(Some(image), |image| image.below()).count() as u32;
        Ok(Below { above, depth, place, path, format, size: info.size, can_grow })
    }

    /// Bring it there.
    fn bring(&self, job: &Job, below: &Below) -> Result<Option<Moved>, Error> {
        let own = &self.disk.options;
        let options = OpenOptions {
            format: Some(below.format),
            force_format: false,
            succeeded: true,
            // As many as lie there, not as many as the disk was first opened with.
            layers: own.layers.and(Some(below.depth)),
            ..own.clone()
        };
        // Whoever names the disk as before says the other's format.
        record::confirm_format(&below.place, below.format);
        // What is written to it from now on is no sign that somebody put it back.
        let before = record::successor(&below.path);
        let next = before.clone().unwrap_or_else(|| self.disk.path.clone());
        self.record(record::set_successor(&below.path, &next))?;
        let forgotten = checkpoints::forget_below(&self.vbd, &below.place);
        let end = forgotten.and_then(|()| self.bring_recorded(job, below, &options));
        if before.is_none() && !matches!(end, Ok(Some(_))) {
            // As it was before: an image that others may lie upon, which nobody but the operator knows.
            self.record(record::forget_successor(&below.path))?;
        } else if end.is_err() {
            seal(&below.path);
        }
        end
    }

    fn bring_recorded(
        &self,
        job: &Job,
        below: &Below,
        options: &OpenOptions,
    ) -> Result<Option<Moved>, Error> {
        let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
        let io = tasks.io().clone();
        let driven = |source| Error::Process { tried: "drive the io_uring", source };
        let size = self.vbd.size();
        if below.can_grow && below.size < size {
            let (io, place, options) = (io.clone(), below.place.clone(), options.clone());
            tasks
                .block_on(async move { larger(&io, &place, &options, size).await })
                .map_err(driven)?
                .map_err(|why| self.failed(why))?;
        }
        let bitmaps =
            carried::of(&*self.vbd.image().map_err(|error| self.failed(error.to_string()))?);
        carry(&self.disk, &below.place, below.format, &bitmaps, There::Stays)
            .map_err(|why| self.failed(why))?;
        let image = match self.upon.as_ref().map(|image| image.fork()) {
            None => open_place(&below.place, options)?,
            Some(upon) => {
                let (io, place, options) = (io.clone(), below.place.clone(), options.clone());
                let opened = async move { qcow2::open_upon(&io, &place, &options, upon).await };
                tasks.block_on(opened).map_err(driven)??
            }
        };
        image.read_beside(true);
        let to = Vbd::new(image, self.disk.options.cache);
        if to.size() < size && to.disk().grow(size).is_err() {
            let (path, has) = (below.path.display(), to.size());
            return Err(self.failed(format!(
                "{path} has {has} bytes, the disk {size}, and its format is not made larger while it is used: `ringtap commit` does it when the disk is not served"
            )));
        }
        let (to, from, job) = (to.disk().clone(), self.vbd.clone(), job.clone());
        let (path, former, above) = (below.path.clone(), self.disk.path.clone(), below.above);
        let (max_slowdown, on_errors) = (Some(self.max_slowdown), self.on_errors);
        let end = tasks
            .block_on(async move {
                if let Ok(image) = to.image() {
                    checkpoints::moves(&io, &from, &*image).await;
                }
                let scope = Scope::Above(above);
                let mirror = Mirror {
                    scope,
                    max_slowdown,
                    on_errors,
                    ..Mirror::new(from.clone(), to.clone())
                };
                let both = match (from.image(), to.image()) {
                    (Ok(from), Ok(to)) => Both::of(&*from, &*to),
                    _ => None,
                };
                let still = async || {
                    moved(&former, &path)?;
                    both.iter().for_each(Both::go_on);
                    Ok::<(), String>(())
                };
                let end = mirror.run(&io, &job, Ending::Pivot, still).await;
                let end = end.map_err(|error| error.to_string());
                match end {
                    Ok(Some(upper)) => {
                        checkpoints::moved(&io, &from).await;
                        left(&io, &former, &*upper).await;
                        if let Ok(image) = to.image() {
                            image.read_beside(false);
                        }
                        Ok(true)
                    }
                    Ok(None) => {
                        checkpoints::stays(&from);
                        close(&io, &to, &path).await.map(|()| false)
                    }
                    Err(why) => {
                        checkpoints::stays(&from);
                        let closed = close(&io, &to, &path).await;
                        Err(closed
                            .map_or_else(|error| format!("{why}; and {error}"), |()| why.clone()))
                    }
                }
            })
            .map_err(driven)?;
        match end {
            Ok(true) => {
                let (path, format) = (below.path.clone(), Some(below.format));
                Ok(Some(Moved { path, format, opened: None }))
            }
            Ok(false) => Ok(None),
            Err(why) => Err(self.failed(why)),
        }
    }

    fn record<T>(&self, end: std::io::Result<T>) -> Result<T, Error> {
        end.map_err(|error| self.failed(format!("cannot write down where it goes on: {error}")))
    }
}

/// Make a qcow2 image as large as the disk, as one that nobody writes to.
pub(crate) async fn larger(
    io: &Io,
    place: &Place,
    options: &OpenOptions,
    size: u64,
) -> Result<(), String> {
    let opened = qcow2::open_to_resize(io, place, options).await;
    let (container, data) = opened.map_err(|error| error.to_string())?;
    let wanted = ResizeOptions { size, gains_zeros: true, ..ResizeOptions::default() };
    let end = qcow2::resize(io, &container, data.as_ref(), &wanted).await;
    end.map_err(|error| error.to_string())
}

/// The handle that the images upon it have of an image.
fn handle(top: &dyn Image, depth: u32) -> Option<&dyn Image> {
    (0..depth).try_fold(top, |image, _| image.below())
}

/// While the disk stands still: from now on it is found in `path`, whichever of the two it is named by. Where that cannot be
/// written down it is found where it was.
pub(crate) fn moved(former: &Path, path: &Path) -> Result<(), String> {
    let before = record::successor(path);
    // Killed between the two, they lead to one another, and what was written last holds.
    let end = record::set_successor(former, path).and_then(|()| record::forget_successor(path));
    let Err(error) = end else { return Ok(()) };
    // A part of it may be written.
    let undone = record::forget_successor(former);
    let led = before.map_or(Ok(()), |before| record::set_successor(path, &before));
    if let Err(error) = undone.and(led) {
        let (path, former) = (path.display(), former.display());
        tracing::error!(
            "the disk stays in {former}, and that cannot be written down, either: {error}; before another server begins \
             run ringtap amend --forget-successor {former}, and serve it by that name, not as {path}"
        );
    }
    Err(format!("cannot write down where it goes on: {error}"))
}

/// Close the image that the disk has left.
pub(crate) async fn left(io: &Io, path: &Path, image: &dyn Image) {
    if let Err(error) = image.close(io).await {
        // It holds nothing that is not in the other.
        tracing::warn!(
            "{}, which the disk has left, is not closed in order: {error}",
            path.display()
        );
        return;
    }
    image.stop_writing();
    image.let_write(true);
    seal(path);
}

/// Nobody writes to an image any more that the disk has gone on from: one that is put back in its place is told from it.
pub(crate) fn seal(path: &Path) {
    if let Err(error) = record::seal(path) {
        tracing::warn!("cannot write down when {} was last written to: {error}", path.display());
    }
}

/// Leave an image below as it is, closed.
pub(crate) async fn close(io: &Io, to: &ringtap_vbd::Disk, path: &Path) -> Result<(), String> {
    let failed = |error: String| format!("{} is not closed in order: {error}", path.display());
    to.close(io).await.map_err(|error| failed(error.to_string()))?;
    record::seal(path).map_err(|error| failed(error.to_string()))
}
