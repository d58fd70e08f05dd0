//! New images: what one is to be, and how it is made.

use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ringtap_image::qcow2::{self, CreateOptions};
use ringtap_image::{
    CacheMode, Container, Format, OpenOptions, Place, RestartLog, Role, Secret, UnknownFormat,
    is_store, limit_of_length, luks, on_a_ring, probe, record, vhd,
};
use ringtap_io::Io;
use ringtap_stores::rbd;

use crate::error::Tried;
use crate::files::{beside, understood};
use crate::held::{Content, write};
use crate::{
    Doing, Error, LazySecret, Progress, Reading, Watcher, chain, format_of, info, opening,
};

/// What is noted as being at work on an image until it is made.
const VERB: &str = "create";

/// An image that is to be made.
#[derive(Clone, Debug)]
pub struct NewImage {
    /// Bytes of its disk, rounded up to 512; none: those of the backing file.
    pub size: Option<u64>,
    /// The image below: it holds only what differs from that.
    pub backing: Option<BackingFile>,
    /// Its format, and what belongs to that.
    pub options: FormatOptions,
    /// What is to open it, if it is to be encrypted.
    pub secret: Option<LazySecret>,
}

/// The image below another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// As it is to be written in the image.
    pub name: String,
    /// Where that is.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The name of that, as it is to be written in the image.
    pub format_name: &'static str,
}

/// A format by one of its names, which is written down as it was said: `host_device` is raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedFormat {
    /// The format.
    pub format: Format,
    /// What it was called.
    pub name: &'static str,
}

impl From<Format> for NamedFormat {
    fn from(format: Format) -> NamedFormat {
        NamedFormat { format, name: format.name() }
    }
}

impl FromStr for NamedFormat {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<NamedFormat, UnknownFormat> {
        let format: Format = text.parse()?;
        // Of those that are QEMU's too; it does not know vhd.
        let name = if text == "host_device" { "host_device" } else { format.name() };
        Ok(NamedFormat { format, name })
    }
}

/// What is made of a format.
#[derive(Clone, Debug)]
pub enum FormatOptions {
    /// The disk's bytes as they are.
    Raw(Space),
    /// qcow2.
    Qcow2 {
        /// All but the size, the backing file, subclusters and the LUKS header.
        own: Box<CreateOptions>,
        /// Subclusters; none: where there is a backing file, so that a write copies nothing of it.
        extended_l2: Option<bool>,
        /// How it is encrypted.
        encrypt: Option<luks::CreateOptions>,
    },
    /// VHD.
    Vhd {
        /// All blocks at once, and not on demand; none over another VHD is so.
        fixed: bool,
        /// Keep the size as it is, as Azure wants.
        force_size: bool,
    },
    /// A LUKS container.
    Luks {
        /// Its cipher, key and the rest.
        own: luks::CreateOptions,
        /// What becomes of the room that its payload takes.
        space: Space,
    },
}

/// What becomes of the bytes that nothing is written to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Space {
    /// A hole.
    #[default]
    Off,
    /// Space is reserved.
    Falloc,
    /// Zeros are written.
    Full,
}

impl FormatOptions {
    /// Those of a format that nobody has said anything of.
    ///
    /// # Errors
    ///
    /// Images of that format are only read.
    pub fn usual(format: Format) -> Result<FormatOptions, Error> {
        Ok(match format {
            Format::Raw => FormatOptions::Raw(Space::Off),
            Format::Qcow2 => {
                FormatOptions::Qcow2 { own: Box::default(), extended_l2: None, encrypt: None }
            }
            Format::Vhd => FormatOptions::Vhd { fixed: false, force_size: false },
            Format::Luks => {
                FormatOptions::Luks { own: luks::CreateOptions::default(), space: Space::Off }
            }
            other => {
                let why =
                    format!("{other} images cannot be made here: use raw, qcow2, vpc or luks");
                return Err(Error::Usage(why));
            }
        })
    }

    /// The format.
    pub fn format(&self) -> Format {
        match self {
            FormatOptions::Raw(_) => Format::Raw,
            FormatOptions::Qcow2 { .. } => Format::Qcow2,
            FormatOptions::Vhd { .. } => Format::Vhd,
            FormatOptions::Luks { .. } => Format::Luks,
        }
    }
}

impl BackingFile {
    /// The image that `name` means within `image`; its format must be known, by being named or recorded.
    pub fn find(
        image: &Path,
        name: String,
        format: Option<NamedFormat>,
    ) -> Result<BackingFile, Error> {
        let path = beside(image, Path::new(&name));
        understood("backing file", &name)?;
        let known = format.or_else(|| record::format(&path).map(NamedFormat::from));
        let Some(NamedFormat { format, name: format_name }) = known else {
            let looks = match format_of(&path, None) {
                Ok((format, _)) => format!(" (it looks like {format})"),
                Err(_) => String::new(),
            };
            let why = format!(
                "name the format of the backing file {} with -F{looks}: it is recorded in the image, \
                 for it must not be guessed later",
                path.display()
            );
            return Err(Error::Usage(why));
        };
        Ok(BackingFile { name, path, format, format_name })
    }

    /// That an image of a format may lie over it.
    pub fn fits_below(&self, above: Format) -> Result<(), Error> {
        match above {
            Format::Qcow2 => Ok(()),
            Format::Vhd if self.format == Format::Vhd => Ok(()),
            Format::Vhd => Err(Error::Usage(format!(
                "a VHD lies over another VHD only, and {} is {}: use -f qcow2",
                self.path.display(),
                self.format
            ))),
            _ => {
                let why = format!("{above} images have no backing file here: use -f qcow2");
                Err(Error::Usage(why))
            }
        }
    }
}

/// Make an image; what was there is lost. With `blindly` nobody looks at the backing file, and the size must be said.
/// Gives the bytes of its disk.
///
/// # Errors
///
/// What is asked for does not go together, the backing file cannot be read, or the files cannot be made or written. Those
/// that were not there before are not there then either.
pub fn create(
    path: &Path,
    new: &NewImage,
    blindly: bool,
    reading: &Reading,
    watch: &Watcher,
) -> Result<u64, Error> {
    if let Some(backing) = &new.backing {
        backing.fits_below(new.options.format())?;
    }
    let mut new = new.clone();
    new.spares_what_lies_below(path, reading)?;
    let size = new.settle_size(reading, blindly, watch)?;
    let secret = new.secret.as_ref().map(LazySecret::read).transpose()?;
    new.make(path, secret.as_ref())?;
    finished(path)?;
    Ok(size)
}

/// What was made is whole.
fn finished(path: &Path) -> Result<(), Error> {
    probe::finished(path).tried(|| format!("cannot change {}", path.display()))
}

/// Have the cluster make an image of Ceph that is a clone of a snapshot there, which writes nothing. Gives the bytes of its
/// disk, `size` where that is said.
pub fn clone_of_snapshot(of: &str, path: &Path, size: Option<u64>) -> Result<u64, Error> {
    use crate::rbd::snapshots;
    let (name, text) = (path.display(), path.to_string_lossy());
    let failed = |why: String| Error::Refused(format!("cannot create {name}: {why}"));
    snapshots::clone(of, &text).map_err(failed)?;
    let own = snapshots::size(&text).map_err(failed)?;
    let Some(wanted) = size.filter(|wanted| *wanted != own) else { return Ok(own) };
    let container = opened(path)?;
    on_a_ring(path, |io| async move { container.set_len(&io, wanted).await })?
        .doing(|| format!("cannot make {name} {wanted} bytes long"))?;
    Ok(wanted)
}

/// The files of an image that were not there before.
#[derive(Debug, Default)]
pub(crate) struct Made(Vec<PathBuf>);

impl Made {
    fn find_or_create(&mut self, path: &Path, size: u64) -> Result<(), Error> {
        if let Some(name) = path.to_str().filter(|name| rbd::is_rbd(name)) {
            let failed = |why| Error::Refused(format!("cannot create {}: {why}", path.display()));
            rbd::make(name, size).map_err(failed)?;
            self.0.push(path.to_owned());
            return Ok(());
        }
        match fs::File::create_new(path) {
            Ok(_) => self.0.push(path.to_owned()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(error).tried(|| format!("cannot create {}", path.display()));
            }
        }
        Ok(())
    }

    /// Remove them, for nothing came of it; whether the image itself was one of them and is gone.
    pub(crate) fn remove(&self, image: &Path) -> bool {
        let mut gone = false;
        for path in &self.0 {
            let removed = match path.to_str().filter(|name| rbd::is_rbd(name)) {
                Some(name) => rbd::remove(name).is_ok(),
                None => fs::remove_file(path).is_ok(),
            };
            gone |= removed && path == image;
        }
        gone
    }
}

/// Whether somebody's secret is missing, and nothing else.
fn wants_secret(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(luks::Error::NoSecret) = error.downcast_ref() {
            return true;
        }
        next = error.source();
    }
    false
}

impl NewImage {
    /// Refuse what does not go together with compressed clusters.
    pub(crate) fn can_be_compressed(&self) -> Result<(), Error> {
        let FormatOptions::Qcow2 { own, encrypt, .. } = &self.options else { return Ok(()) };
        let against = if let Some(name) = &own.data_file {
            format!("data_file={name}")
        } else if encrypt.is_some() {
            "encrypt.format=luks".into()
        } else {
            match own.preallocation {
                qcow2::Preallocation::Off => return Ok(()),
                qcow2::Preallocation::Metadata => "preallocation=metadata".into(),
                qcow2::Preallocation::Falloc => "preallocation=falloc".into(),
                qcow2::Preallocation::Full => "preallocation=full".into(),
            }
        };
        let why = format!("-c and {against} do not go together: leave one of them out");
        Err(Error::Usage(why))
    }

    /// The size, from the backing file where none is given.
    pub(crate) fn settle_size(
        &mut self,
        reading: &Reading,
        blindly: bool,
        watch: &Watcher,
    ) -> Result<u64, Error> {
        if let (Some(backing), false) = (&self.backing, blindly && self.size.is_some()) {
            let opened =
                reading.open(&backing.path, Some(backing.format), CacheMode::Writeback, watch);
            let size = match opened {
                Ok(vbd) => Ok(vbd.size()),
                // How large an encrypted disk is its header says, without a key.
                Err(error) if wants_secret(&error) => {
                    info::chain(&backing.path, Some(backing.format), reading)
                        .map(|chain| chain.first().map_or(0, |top| top.size))
                }
                Err(error) => Err(error),
            };
            self.size.get_or_insert(size.doing(|| "the backing file".into())?);
        }
        let none = || Error::usage("name a size, such as 10G");
        let size = self.size.ok_or_else(none)?;
        let too_large = || Error::usage("the size is too large");
        let size = size.checked_next_multiple_of(512).ok_or_else(too_large)?;
        Ok(*self.size.insert(size))
    }

    /// Make the image; what was there is lost. Its size must be known. Gives the files that are new; they
    /// are removed again where this fails. It says that it is not finished until [`probe::finished`]: who fills it goes on
    /// from there, so that a kill at no moment leaves an empty image that looks whole.
    pub(crate) fn make(&self, path: &Path, secret: Option<&Secret>) -> Result<Made, Error> {
        if is_store(path) && !rbd::is_path_of_rbd(path) {
            return Err(Error::Usage(format!(
                "{} lies on a server, where nothing is made: copy to an export that is there by ringtap convert -n, \
                 upload an image by ringtap publish",
                path.display()
            )));
        }
        let mut made = Made::default();
        let format = self.options.format();
        // Formats make it as long as they need it.
        let len = if format == Format::Raw { self.size.unwrap_or(0) } else { 0 };
        made.find_or_create(path, len)?;
        if let Err(error) = self.write(path, secret, &mut made) {
            let removed = made.remove(path);
            if !removed && probe::unfinished_work(path).as_deref() == Some(VERB) {
                let _ = probe::finished(path);
            }
            return Err(error);
        }
        record::confirm_format(path, format);
        self.record_names(path);
        Ok(made)
    }

    /// Record which files the image names, that it may have them.
    fn record_names(&self, path: &Path) {
        let data = match &self.options {
            FormatOptions::Qcow2 { own, .. } => own.data_file.as_ref(),
            _ => None,
        };
        let data = data.map(|name| beside(path, Path::new(name)));
        let image = Place::from(path);
        let backing = self.backing.as_ref().map(|it| it.path.as_path());
        chain::record(&image, Role::Backing, backing);
        if let Some(backing) = &self.backing {
            chain::record_format_below(&image, &backing.path, backing.format);
        }
        chain::record(&image, Role::DataFile, data.as_deref());
        if let Some(Err(error)) = data.map(|data| record::set_owner(&image, &(&data).into())) {
            tracing::warn!(
                "cannot write down whose the data file of {} is: {error}",
                path.display()
            );
        }
    }

    /// What a qcow2 image is to be, if it is to be one. Its size must be known.
    pub(crate) fn qcow2_options(
        &self,
        secret: Option<&Secret>,
    ) -> Result<Option<CreateOptions>, Error> {
        let FormatOptions::Qcow2 { own, extended_l2, encrypt } = &self.options else {
            return Ok(None);
        };
        let mut options = CreateOptions {
            size: self.size.unwrap_or(0),
            backing_file: self.backing.as_ref().map(|it| it.name.clone()),
            backing_format: self.backing.as_ref().map(|it| it.format_name.to_owned()),
            ..CreateOptions::clone(own)
        };
        options.luks = match (encrypt, secret) {
            (None, _) => None,
            (Some(own), Some(secret)) => Some(luks::create_header(own, secret)?.0),
            (Some(_), None) => return Err(no_secret()),
        };
        let possible = options.version > 2 && options.cluster_size >= 16 << 10;
        options.extended_l2 = extended_l2.unwrap_or(self.backing.is_some() && possible);
        Ok(Some(options))
    }

    fn write(&self, path: &Path, secret: Option<&Secret>, made: &mut Made) -> Result<(), Error> {
        let size = self.size.unwrap_or(0);
        match &self.options {
            FormatOptions::Raw(space) => make_raw(path, size, *space),
            FormatOptions::Qcow2 { .. } => match self.qcow2_options(secret)? {
                Some(options) => make_qcow2(path, options, made),
                None => Ok(()),
            },
            FormatOptions::Vhd { fixed, force_size } => {
                let kind = if *fixed { vhd::Kind::Fixed } else { vhd::Kind::Dynamic };
                let force_size = *force_size;
                let mut options = vhd::CreateOptions {
                    size,
                    kind,
                    force_size,
                    block_size: None,
                    parent: None,
                    id: None,
                };
                if let Some(backing) = &self.backing {
                    options.kind = vhd::Kind::Differencing;
                    options.parent = Some(vhd_parent(&backing.path)?);
                }
                write(path, container(path)?, None, Content::Vhd(options.into()))
            }
            FormatOptions::Luks { own, space } => {
                let (own, space) = (own.clone(), *space);
                let secret = secret.ok_or_else(no_secret)?.clone();
                let size = size.next_multiple_of(own.sector_size.into());
                let from = luks::front_len(&own);
                let file = container(path)?;
                let content = Content::Luks { size, options: own.into(), secret };
                write(path, file.clone(), None, content)?;
                if !file.traits().regular {
                    return Ok(());
                }
                on_a_ring(path, |io| async move {
                    let unwatched = Progress::default();
                    reserve(&io, &file, from..from + size, space, &unwatched).await
                })?
                .doing(|| format!("cannot reserve {size} bytes in {}", path.display()))
            }
        }
    }
}

fn vhd_parent(path: &Path) -> Result<vhd::Parent, Error> {
    let file = opening::container(path, false)?;
    Ok(on_a_ring(path, |io| async move { vhd::Parent::read(&io, &file).await })??)
}

fn no_secret() -> Error {
    Error::usage("an encrypted image needs a secret: add --target-secret file:PATH")
}

/// Open a file to be overwritten.
fn opened(path: &Path) -> Result<Container, Error> {
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    Ok(Container::open(path, &options)?)
}

/// Open the file of the new image.
fn container(path: &Path) -> Result<Container, Error> {
    let container = opened(path)?;
    RestartLog::forget(&container);
    probe::unfinished(path, VERB);
    Ok(container)
}

fn make_raw(path: &Path, size: u64, space: Space) -> Result<(), Error> {
    let container = container(path)?;
    if !container.traits().regular {
        if container.len() < size {
            let (name, has) = (path.display(), container.len());
            return Err(Error::Refused(format!("{name} has {has} bytes, and {size} are needed")));
        }
        return Ok(());
    }
    on_a_ring(path, |io| async move {
        // One that was made so long holds nothing yet.
        if !rbd::is_path_of_rbd(container.path()) {
            container.set_len(&io, 0).await?;
            container.set_len(&io, size).await?;
        }
        reserve(&io, &container, 0..size, space, &Progress::default()).await
    })?
    .map_err(|error| or_limit(error, path, size))
    .doing(|| format!("cannot extend {} to {size} bytes", path.display()))
}

/// Have a part of a file, which holds nothing, take its space. Ends early where `progress` is stopped.
pub(crate) async fn reserve(
    io: &Io,
    file: &Container,
    part: Range<u64>,
    space: Space,
    progress: &Progress,
) -> Result<(), ringtap_image::Error> {
    match space {
        Space::Off => Ok(()),
        Space::Falloc => file.allocate(io, part.start, part.end - part.start).await,
        Space::Full => {
            let zeros = vec![0; 1 << 20];
            let mut at = part.start;
            while at < part.end && !progress.stopped() {
                let len = (part.end - at).min(zeros.len() as u64);
                file.write(io, at, &zeros[..len as usize]).await?;
                at += len;
                progress.set(at - part.start);
            }
            file.sync(io).await
        }
    }
}

fn make_qcow2(path: &Path, options: CreateOptions, made: &mut Made) -> Result<(), Error> {
    let file = container(path)?;
    let data = match &options.data_file {
        Some(name) => {
            let place = beside(path, Path::new(name));
            made.find_or_create(&place, 0)?;
            // What another image has there would be lost.
            record::may_own(&path.into(), &(&place).into(), true)?;
            Some(opened(&place)?)
        }
        None => None,
    };
    write(path, file, data, Content::Qcow2(options.into()))
}

/// Why a file cannot be so long: a limit says more than that there is no room.
pub(crate) fn or_limit(error: ringtap_image::Error, path: &Path, len: u64) -> Error {
    match limit_of_length(path, len).filter(|_| error == ringtap_image::Error::Full) {
        Some(limit) => Error::Refused(limit),
        None => error.into(),
    }
}
