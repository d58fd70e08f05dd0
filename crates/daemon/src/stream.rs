//! What lies below a disk's topmost image, brought into it while the disk is served, so that the disk needs nothing below, or
//! only what lies below one of them.
//!
//! Stopped anywhere, the disk is as it was: the topmost image names what lay below it until it has all of that, stable. It
//! is closed then, as an image at rest names what stays, and is opened upon that, while the disk stands still.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringtap_image::qcow2::{self, Crypt};
use ringtap_image::{Container, Format, Image, OpenOptions, Place, Role, record};
use ringtap_io::{Io, Tasks};
use ringtap_vbd::{Busy, Job, OnError, Phase, Quiesced, Stream as Bring, Vbd};

use crate::opened::identity;
use crate::reopen::{Anew, as_it_is, reopen};
use crate::snapshot::{header, is_encrypted};
use crate::{Disk, Error};

/// How long requests in flight may take before the disk is tried again, and how often it is.
const STILL: u64 = Duration::from_secs(1).as_nanos() as u64;
const TRIES: u32 = 10;

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

/// One of the images below.
struct Layer {
    path: PathBuf,
    format: Format,
}

/// Images below, by their paths.
struct Names {
    /// Those that the disk does not need any more.
    gone: Vec<PathBuf>,
    /// All.
    below: Vec<PathBuf>,
}

/// What stays below.
struct Stays {
    /// How many lie upon it.
    above: u32,
    name: String,
    path: PathBuf,
    format: Format,
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
        self.check_top(&*top, go)?;
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
        let wanted = identity(base);
        let found = below.iter().position(|layer| {
            layer.path == base || wanted.is_some() && identity(&layer.path) == wanted
        });
        let Some((at, layer)) = found.and_then(|at| Some((at, below.get(at)?))) else {
            return Err(Error::Job(format!(
                "Can't find '{}' in the backing chain",
                base.display()
            )));
        };
        let name = match &self.backing_file {
            Some(name) => {
                let folder = self.disk.path.parent().unwrap_or(Path::new("/"));
                let named = fs::canonicalize(folder.join(OsStr::from_bytes(name.as_bytes())));
                if named.ok().and_then(|named| identity(&named)) != identity(&layer.path) {
                    let base = layer.path.display();
                    return Err(self.failed(format!(
                        "{name:?} does not lead to {base}, which is to stay below: it could not be opened again"
                    )));
                }
                name.clone()
            }
            None => {
                let path = layer.path.to_str();
                path.ok_or_else(|| self.failed("the path of what stays is not UTF-8"))?.to_owned()
            }
        };
        let above = u32::try_from(at + 1).unwrap_or(u32::MAX);
        Ok(Stays { above, name, path: layer.path.clone(), format: layer.format })
    }

    /// Whether the topmost image may take what lies below it.
    fn check_top(&self, top: &dyn Image, go: &[Layer]) -> Result<(), Error> {
        if top.info().format != Format::Qcow2.name() {
            let format = top.info().format;
            return Err(self.failed(format!("it is a {format} image, and only qcow2 takes it")));
        }
        if !self.disk.options.bitmaps.is_empty() {
            return Err(self.failed("it shows dirty bitmaps, whose clients would not follow"));
        }
        let own = header(&self.disk.path)?;
        if own.snapshots > 0 {
            return Err(self.failed(
                "it holds snapshots of its own, which would lose what lies below: delete those first",
            ));
        }
        for layer in go.iter().filter(|_| own.crypt == Crypt::None) {
            if is_encrypted(&layer.path, layer.format)? {
                let below = layer.path.display();
                return Err(self.failed(format!("{below} is encrypted, and it is not")));
            }
        }
        Ok(())
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
        let vbd = self.vbd.fork();
        let still = self.stand_still(io, &vbd).await?;
        let (put, options) = (|still: &Quiesced<'_>, image| still.larger(image).map(drop), {
            as_it_is(&self.disk, Format::Qcow2)
        });
        let anew = Anew { options: options.clone(), below: upon };
        let change = async |place: &Place| self.rename(io, place, &options, stays.as_ref()).await;
        let failed = |why: String| self.failed(why);
        Box::pin(reopen(io, &vbd, &still, &failed, anew, change, put)).await?;
        drop(still);
        self.lead(&names);
        Ok(())
    }

    async fn stand_still<'a>(&self, io: &Io, vbd: &'a Vbd) -> Result<Quiesced<'a>, Error> {
        let mut left = TRIES;
        loop {
            left -= 1;
            match vbd.quiesce(io, STILL).await {
                Err(Busy::Late) if left > 0 => {}
                end => return end.map_err(|busy| self.failed(busy.to_string())),
            }
        }
    }

    /// Have the topmost image, at rest, name what stays.
    async fn rename(
        &self,
        io: &Io,
        place: &Place,
        options: &OpenOptions,
        stays: Option<&Stays>,
    ) -> Result<(), Error> {
        let container = Container::open(place, options)?;
        let unsaid = |error| {
            // It is opened upon that all the same; next time --backing has to say so.
            tracing::warn!(
                "cannot write down what {} lies upon: {error}",
                self.disk.path.display()
            );
        };
        if let Some(stays) = stays {
            record::also_allow(&place.at(), Role::Backing, &stays.path).unwrap_or_else(unsaid);
        }
        let backing = stays.map(|stays| (&*stays.name, stays.format));
        let end = qcow2::set_backing(io, &container, backing).await;
        end.map_err(|error| self.failed(error.to_string()))?;
        let path = stays.map(|stays| &*stays.path);
        record::set_allowed(&place.at(), Role::Backing, path).unwrap_or_else(unsaid);
        Ok(())
    }

    /// Whoever has a name of the disk from before finds it without those that are not needed any more.
    fn lead(&self, names: &Names) {
        let gone: Vec<_> = names.gone.iter().filter_map(|path| identity(path)).collect();
        for path in &names.below {
            let next = record::successor(path).and_then(|next| identity(&next));
            // Another disk may go on from the same image.
            if !next.is_some_and(|next| gone.contains(&next)) {
                continue;
            }
            let unsealed = record::is_unsealed(path);
            let led = record::set_successor(path, &self.disk.path);
            let led = led.and_then(|()| if unsealed { Ok(()) } else { record::seal(path) });
            if let Err(error) = led {
                let path = path.display();
                tracing::warn!("cannot write down where the disk of {path} goes on: {error}");
            }
        }
    }
}

/// The images below, the next one first; those without files have no names.
fn layers(top: &dyn Image) -> Vec<Layer> {
    let of = |image: &dyn Image| {
        let path = image
            .place()
            .map(|place| fs::canonicalize(place.at()).unwrap_or_else(|_| place.path().to_owned()));
        let format = image.info().format.parse().unwrap_or(Format::Raw);
        Layer { path: path.unwrap_or_default(), format }
    };
    std::iter::successors(top.below(), |image| image.below()).map(of).collect()
}

/// The image with so many above it.
fn nth(top: &dyn Image, above: u32) -> Option<&dyn Image> {
    (0..above).try_fold(top, |image, _| image.below())
}
