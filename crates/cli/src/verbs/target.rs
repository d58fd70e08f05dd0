//! Making images: the formats, and their options as `-o` takes them.

use std::cell::OnceCell;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{self, CreateOptions};
use ringtap_image::{
    CacheMode, Container, Format, OpenOptions, Place, Role, Secret, SecretSource, is_store,
    limit_of_length, luks, on_a_ring, parse_size, probe, record, vhd,
};
use ringtap_stores::rbd;

use super::source::{Sources, format_of, open_source, read_secret};
use super::{chain, offline};
use crate::{names, secret};

/// What is noted as being at work on an image until it is made.
const VERB: &str = "create";

/// Options of the verbs that make an image.
#[derive(Debug, Args)]
pub(crate) struct NewImage {
    /// Options of the format, as key=value,key=value; `-o help` lists them
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// Format of the backing file [default: as written down when Ringtap made it]
    #[arg(
        short = 'F',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    backing_format: Option<Format>,

    /// Where the secret that is to open the new image is, if it is to be encrypted
    #[arg(long, value_name = "SOURCE", value_parser = secret::source)]
    target_secret: Option<SecretSource>,

    /// That secret, once it is read: a descriptor gives it only once.
    #[arg(skip)]
    known: OnceCell<Secret>,
}

/// What an image is to be.
pub(crate) struct Recipe {
    pub(crate) format: Format,
    pub(crate) size: Option<u64>,
    pub(crate) backing: Option<Backing>,
    /// Pairs of `-o` that are the format's own.
    options: Vec<(String, String)>,
}

/// The image below a new one.
pub(crate) struct Backing {
    /// As it is to be written in the image.
    pub(crate) name: String,
    /// Where that is.
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
}

/// The options of a format, for people.
pub(crate) fn help(format: Format) -> Option<&'static str> {
    Some(match format {
        Format::Raw => {
            "  preallocation=off|falloc|full   space reserved, or zeros written [off]\n  \
               size=SIZE                       virtual size\n"
        }
        Format::Qcow2 => {
            "  backing_file=FILE               image below, as -b\n  \
               backing_fmt=FORMAT              its format, as -F\n  \
               cluster_size=SIZE               512 to 2M [64k]\n  \
               compat=0.10|1.1                 version 2 or 3 [1.1]\n  \
               compression_type=zlib|zstd      how compressed clusters are compressed [zlib]\n  \
               data_file=FILE                  where guest data goes instead of the image\n  \
               data_file_raw=on|off            that file is a raw image by itself [off]\n  \
               extended_l2=on|off              subclusters [on with a backing file, else off]\n  \
               lazy_refcounts=on|off           refcounts may lag behind while in use [off]\n  \
               preallocation=off|metadata|falloc|full  what exists from the beginning [off]\n  \
               refcount_bits=N                 1 to 64 [16]\n  \
               size=SIZE                       virtual size\n  \
               encrypt.format=luks             encrypt guest data; needs --target-secret\n  \
               encrypt.cipher-alg, encrypt.hash-alg, encrypt.iter-time  as those of luks\n"
        }
        Format::Vhd => {
            "  subformat=dynamic|fixed         blocks on demand, or all at once [dynamic]\n  \
               force_size=on|off               keep the size as it is, as Azure wants [off]\n  \
               size=SIZE                       virtual size\n"
        }
        Format::Luks => {
            "  version=1|2                     version of the format; QEMU reads 1 [2]\n  \
               cipher-alg=aes-256|aes-128      cipher, in XTS mode [aes-256]\n  \
               hash-alg=sha256|sha512|sha1     hash of PBKDF2 and of the digest [sha256]\n  \
               iter-time=MS                    work of the key derivation, in milliseconds [2000]\n  \
               key_size=256|512                bits of the key [512]\n  \
               sector_size=512|1024|2048|4096  version 2 only [512]\n  \
               label=TEXT                      version 2 only\n  \
               size=SIZE                       virtual size\n"
        }
        _ => return None,
    })
}

impl NewImage {
    /// The secret of the image to be made, if one is named.
    pub(crate) fn secret(&self) -> anyhow::Result<Option<Secret>> {
        read_secret(self.target_secret.as_ref(), &self.known)
    }

    /// Print the options of the format, if that is what is asked.
    pub(crate) fn help_wanted(&self, format: Format) -> Option<String> {
        names::asks_for_help(&self.options).then(|| match help(format) {
            Some(text) => format!("Options of {format}, for -o:\n{text}"),
            None => format!("{format} has no options"),
        })
    }

    /// What is to be made at `path`. `backing` is what `-b` names.
    pub(crate) fn recipe(
        &self,
        path: &Path,
        format: Option<Format>,
        backing: Option<&str>,
    ) -> anyhow::Result<Recipe> {
        let mut name = backing.map(str::to_owned);
        let mut backing_format = self.backing_format;
        let mut size = None;
        let mut options = vec![];
        for (key, value) in names::pairs(&self.options).map_err(Fault::Usage)? {
            match key.as_str() {
                "size" => size = Some(parse_size(&value).ok_or_else(|| wrong_size(&value))?),
                "backing_file" => name = Some(value),
                "backing_fmt" => {
                    backing_format =
                        Some(value.parse().map_err(|error| Fault::Usage(format!("{error}")))?);
                }
                // Hints about the file, which QEMU's programs give the file system.
                "extent_size_hint" | "nocow" => {}
                _ => options.push((key, value)),
            }
        }
        let format = format.unwrap_or(if name.is_some() { Format::Qcow2 } else { Format::Raw });
        let backing = match name.filter(|name| !name.is_empty()) {
            Some(name) => Some(find_backing(path, name, backing_format)?),
            None => None,
        };
        if let Some(backing) = &backing {
            let why = match format {
                Format::Qcow2 => None,
                Format::Vhd if backing.format == Format::Vhd => None,
                Format::Vhd => Some(format!(
                    "a VHD lies over another VHD only, and {} is {}: use -f qcow2",
                    backing.path.display(),
                    backing.format
                )),
                _ => Some(format!("{format} images have no backing file here: use -f qcow2")),
            };
            if let Some(why) = why {
                return Err(Fault::Usage(why).into());
            }
        }
        Ok(Recipe { format, size, backing, options })
    }
}

fn wrong_size(text: &str) -> Fault {
    Fault::Usage(format!("size={text}: write a size like 10G"))
}

/// The image that `name` means within `image`, and its format, which must be known.
pub(crate) fn find_backing(
    image: &Path,
    name: String,
    format: Option<Format>,
) -> anyhow::Result<Backing> {
    let path = chain::beside(image, Path::new(&name));
    let known = format.or_else(|| record::format(&path));
    let Some(format) = known else {
        let looks = match format_of(&path, None) {
            Ok((format, _)) => format!(" (it looks like {format})"),
            Err(_) => String::new(),
        };
        let why = format!(
            "name the format of the backing file {} with -F{looks}: it is recorded in the image, \
             for it must not be guessed later",
            path.display()
        );
        return Err(Fault::Usage(why).into());
    };
    Ok(Backing { name, path, format })
}

/// The files of an image that were not there before.
#[derive(Default)]
pub(crate) struct Made(Vec<PathBuf>);

impl Made {
    fn find_or_create(&mut self, path: &Path, size: u64) -> anyhow::Result<()> {
        if let Some(name) = path.to_str().filter(|name| rbd::is_rbd(name)) {
            rbd::make(name, size)
                .map_err(|why| anyhow!("cannot create {}: {why}", path.display()))?;
            self.0.push(path.to_owned());
            return Ok(());
        }
        match fs::File::create_new(path) {
            Ok(_) => self.0.push(path.to_owned()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot create {}", path.display()));
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

impl Recipe {
    /// Refuse what does not go together with compressed clusters.
    pub(crate) fn can_be_compressed(&self) -> anyhow::Result<()> {
        let mut given = self.options.iter();
        let against = given.find(|(key, value)| {
            let key = key.as_str();
            key == "data_file"
                || ["encrypt.format", "preallocation"].contains(&key) && value != "off"
        });
        let Some((key, value)) = against else { return Ok(()) };
        let why = format!("-c and {key}={value} do not go together: leave one of them out");
        Err(Fault::Usage(why).into())
    }

    /// The size, from the backing file where none is given.
    pub(crate) fn settle_size(&mut self, sources: &Sources, unsafely: bool) -> anyhow::Result<u64> {
        if let (Some(backing), false) = (&self.backing, unsafely && self.size.is_some()) {
            let vbd =
                open_source(&backing.path, Some(backing.format), CacheMode::Writeback, sources)
                    .context("the backing file")?;
            self.size.get_or_insert(vbd.size());
        }
        let none = || Fault::Usage("name a size, such as 10G".into());
        let size = self.size.ok_or_else(none)?;
        Ok(*self.size.insert(size.next_multiple_of(512)))
    }

    /// Make the image; what was there is lost. Its size must be known. Gives the files that are new; they
    /// are removed again where this fails.
    pub(crate) fn make(&self, path: &Path, secret: Option<&Secret>) -> anyhow::Result<Made> {
        if is_store(path) && !rbd::is_path_of_rbd(path) {
            return Err(Fault::Usage(format!(
                "{} lies on a server, where nothing is made: copy to an export that is there by ringtap convert -n, \
                 upload an image by ringtap publish",
                path.display()
            ))
            .into());
        }
        let mut made = Made::default();
        // Formats make it as long as they need it.
        let len = if self.format == Format::Raw { self.size.unwrap_or(0) } else { 0 };
        made.find_or_create(path, len)?;
        if let Err(error) = self.write(path, secret, &mut made) {
            let removed = made.remove(path);
            if !removed && probe::unfinished_work(path).as_deref() == Some(VERB) {
                let _ = probe::finished(path);
            }
            return Err(error);
        }
        probe::finished(path).with_context(|| format!("cannot change {}", path.display()))?;
        record::confirm_format(path, self.format);
        self.record_names(path);
        Ok(made)
    }

    /// Write down which files the image names, that it may have them.
    fn record_names(&self, path: &Path) {
        let data = self.options.iter().rev().find(|(key, _)| key == "data_file");
        let data = data.filter(|_| self.format == Format::Qcow2);
        let data = data.map(|(_, name)| chain::beside(path, Path::new(name)));
        let image = Place::from(path);
        let backing = self.backing.as_ref().map(|it| it.path.as_path());
        chain::record(&image, Role::Backing, backing);
        chain::record(&image, Role::DataFile, data.as_deref());
        if let Some(Err(error)) = data.map(|data| record::set_owner(&image, &(&data).into())) {
            tracing::warn!(
                "cannot write down whose the data file of {} is: {error}",
                path.display()
            );
        }
    }

    /// What a qcow2 image is to be. Its size must be known.
    pub(crate) fn qcow2_options(&self, secret: Option<&Secret>) -> anyhow::Result<CreateOptions> {
        let mut options = CreateOptions {
            size: self.size.unwrap_or(0),
            backing_file: self.backing.as_ref().map(|it| it.name.clone()),
            backing_format: self.backing.as_ref().map(|it| it.format.name().to_owned()),
            // A write to an overlay then copies nothing of the image below.
            extended_l2: self.backing.is_some(),
            ..CreateOptions::default()
        };
        let mut cipher = "off";
        // LUKS1: QEMU reads nothing else inside qcow2.
        let mut own =
            luks::CreateOptions { version: luks::Version::Luks1, ..luks::CreateOptions::default() };
        for (key, value) in &self.options {
            match key.strip_prefix("encrypt.") {
                Some("format") => cipher = value,
                Some(inner) => set_qemu_luks(&mut own, inner, value).map_err(Fault::Usage)?,
                None => options.set(key, value).map_err(Fault::Usage)?,
            }
        }
        match (cipher, secret) {
            ("off", _) => {}
            ("luks", Some(secret)) => {
                options.luks = Some(luks::create_header(&own, secret)?.0);
            }
            ("luks", None) => return Err(no_secret()),
            (other, _) => {
                let why = format!("encrypt.format={other}: only luks is possible");
                return Err(Fault::Usage(why).into());
            }
        }
        let own_choice = self.options.iter().any(|(key, _)| key == "extended_l2");
        if !own_choice && (options.version == 2 || options.cluster_size < 16 << 10) {
            options.extended_l2 = false;
        }
        Ok(options)
    }

    /// What a LUKS container is to be.
    pub(crate) fn luks_options(&self) -> Result<luks::CreateOptions, Fault> {
        let mut options = luks::CreateOptions::default();
        for (key, value) in &self.options {
            set_luks(&mut options, key, value).map_err(Fault::Usage)?;
        }
        Ok(options)
    }

    fn write(&self, path: &Path, secret: Option<&Secret>, made: &mut Made) -> anyhow::Result<()> {
        let size = self.size.unwrap_or(0);
        let none_left = |left: &[(String, String)]| match left.first() {
            Some((key, _)) => Err(Fault::Usage(format!(
                "{key} is no option of {}: -o help lists them",
                self.format
            ))),
            None => Ok(()),
        };
        match self.format {
            Format::Raw => {
                let (own, rest): (Vec<_>, Vec<_>) =
                    self.options.iter().cloned().partition(|(key, _)| key == "preallocation");
                none_left(&rest)?;
                let how = own.last().map_or("off", |(_, value)| value);
                make_raw(path, size, how)?;
            }
            Format::Qcow2 => {
                make_qcow2(path, self.qcow2_options(secret)?, made)?;
            }
            Format::Vhd => {
                let mut options = vhd::CreateOptions {
                    size,
                    kind: vhd::Kind::Dynamic,
                    force_size: false,
                    block_size: None,
                    parent: None,
                    id: None,
                };
                for (key, value) in &self.options {
                    match (key.as_str(), value.as_str()) {
                        ("subformat", "fixed") if self.backing.is_none() => {
                            options.kind = vhd::Kind::Fixed;
                        }
                        ("subformat", "dynamic") if self.backing.is_none() => {
                            options.kind = vhd::Kind::Dynamic;
                        }
                        ("force_size", text) => {
                            options.force_size =
                                names::switch("force_size", text).map_err(Fault::Usage)?;
                        }
                        _ => none_left(&[(format!("{key}={value}"), String::new())])?,
                    }
                }
                if let Some(backing) = &self.backing {
                    options.kind = vhd::Kind::Differencing;
                    options.parent = Some(vhd_parent(&backing.path)?);
                }
                let file = container(path)?;
                on_a_ring(path, |io| async move { vhd::create(&io, &file, &options).await })??;
            }
            Format::Luks => {
                let options = self.luks_options()?;
                let secret = secret.ok_or_else(no_secret)?.clone();
                let file = container(path)?;
                let size = size.next_multiple_of(options.sector_size.into());
                on_a_ring(path, |io| async move {
                    luks::create(&io, &file, size, &options, &secret).await
                })??;
            }
            other => {
                let why =
                    format!("{other} images cannot be made here: use raw, qcow2, vpc or luks");
                return Err(Fault::Usage(why).into());
            }
        }
        Ok(())
    }
}

fn vhd_parent(path: &Path) -> anyhow::Result<vhd::Parent> {
    let file = offline::container(path, false)?;
    Ok(on_a_ring(path, |io| async move { vhd::Parent::read(&io, &file).await })??)
}

fn no_secret() -> anyhow::Error {
    let why = "an encrypted image needs a secret: add --target-secret file:PATH";
    Fault::Usage(why.into()).into()
}

fn set_luks(options: &mut luks::CreateOptions, key: &str, value: &str) -> Result<(), String> {
    let number =
        |want: &str| value.parse::<u32>().map_err(|_| format!("{key}={value}: write {want}"));
    match key {
        "version" => {
            options.version = match value {
                "1" => luks::Version::Luks1,
                "2" => luks::Version::Luks2,
                _ => return Err(format!("version={value}: write 1 or 2")),
            }
        }
        "key_size" => options.key_bits = number("256 or 512")?,
        "sector_size" => options.sector_size = number("512, 1024, 2048 or 4096")?,
        "label" => value.clone_into(&mut options.label),
        _ => return set_qemu_luks(options, key, value),
    }
    Ok(())
}

/// The options that qemu-img has too.
fn set_qemu_luks(options: &mut luks::CreateOptions, key: &str, value: &str) -> Result<(), String> {
    match (key, value) {
        ("cipher-alg", "aes-256") => options.key_bits = 512,
        ("cipher-alg", "aes-128") => options.key_bits = 256,
        ("cipher-alg", _) => return Err(format!("cipher-alg={value}: write aes-256 or aes-128")),
        ("cipher-mode", "xts") | ("ivgen-alg", "plain64") => {}
        ("cipher-mode", _) => return Err(format!("cipher-mode={value}: only xts is possible")),
        ("ivgen-alg", _) => return Err(format!("ivgen-alg={value}: only plain64 is possible")),
        ("hash-alg", _) => {
            options.hash = luks::Hash::parse(value).map_err(|error| error.to_string())?;
        }
        ("iter-time", _) => {
            let time: u32 = value
                .parse()
                .map_err(|_| format!("iter-time={value}: write milliseconds, such as 2000"))?;
            options.effort = luks::Effort::Time(Duration::from_millis(time.into()));
        }
        ("key-secret", _) => {
            return Err(
                "key-secret names an object of QEMU: write --target-secret file:PATH".into()
            );
        }
        _ => return Err(format!("{key} is no option of luks: -o help lists them")),
    }
    Ok(())
}

/// Open a file to be overwritten.
fn opened(path: &Path) -> anyhow::Result<Container> {
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    Ok(Container::open(path, &options)?)
}

/// Open the file of the new image.
fn container(path: &Path) -> anyhow::Result<Container> {
    let container = opened(path)?;
    probe::unfinished(path, VERB);
    Ok(container)
}

fn make_raw(path: &Path, size: u64, preallocation: &str) -> anyhow::Result<()> {
    let preallocation = preallocation.to_owned();
    if !["off", "falloc", "full"].contains(&preallocation.as_str()) {
        let why = format!("preallocation={preallocation}: write off, falloc or full");
        return Err(Fault::Usage(why).into());
    }
    let container = container(path)?;
    let failed = |what: &str| format!("cannot {what} {} to {size} bytes", path.display());
    if !container.traits().regular {
        anyhow::ensure!(
            container.len() >= size,
            "{} has {} bytes, and {size} are needed",
            path.display(),
            container.len()
        );
        return Ok(());
    }
    let extend = failed("extend");
    on_a_ring(path, |io| async move {
        // One that was made so long holds nothing yet.
        if !rbd::is_path_of_rbd(container.path()) {
            container.set_len(&io, 0).await?;
            container.set_len(&io, size).await?;
        }
        match preallocation.as_str() {
            "falloc" => container.allocate(&io, 0, size).await?,
            "full" => {
                let zeros = vec![0; 1 << 20];
                let mut at = 0;
                while at < size {
                    let len = (size - at).min(zeros.len() as u64);
                    container.write(&io, at, &zeros[..len as usize]).await?;
                    at += len;
                }
                container.sync(&io).await?;
            }
            _ => {}
        }
        Ok::<_, ringtap_image::Error>(())
    })?
    .map_err(|error| or_limit(error, path, size))
    .context(extend)
}

fn make_qcow2(path: &Path, options: CreateOptions, made: &mut Made) -> anyhow::Result<()> {
    let file = container(path)?;
    let data = match &options.data_file {
        Some(name) => {
            let place = chain::beside(path, Path::new(name));
            made.find_or_create(&place, 0)?;
            // What another image has there would be lost.
            record::may_own(&path.into(), &(&place).into(), true)?;
            Some(opened(&place)?)
        }
        None => None,
    };
    on_a_ring(path, |io| async move { qcow2::create(&io, &file, data.as_ref(), &options).await })??;
    Ok(())
}

/// Why a file cannot be so long: a limit says more than that there is no room.
pub(crate) fn or_limit(error: ringtap_image::Error, path: &Path, len: u64) -> anyhow::Error {
    match limit_of_length(path, len).filter(|_| error == ringtap_image::Error::Full) {
        Some(limit) => anyhow!(limit),
        None => error.into(),
    }
}
