//! Images opened by the verbs, with their formats found.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use ringtap_daemon::Error;
use ringtap_image::{
    CacheMode, Format, OpenError, OpenOptions, Place, Secret, SecretSource, open_place, probe,
    record,
};
use ringtap_image_tools::{Error as ToolsError, LazySecret, Names as NamesAllowed, Reading};
use ringtap_vbd::Vbd;

use crate::secret;

/// How an image's format came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// The user named it, or the image that has it as its backing file.
    Named,
    /// Ringtap wrote it down when it made the image.
    Recorded,
    /// The image bears its mark, or none: raw.
    Probed,
}

/// Options of the verbs that read images.
#[derive(Debug, Args)]
pub(crate) struct Sources {
    /// Look at the image though another program may be writing to it; what is read may contradict itself
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    #[command(flatten)]
    pub(crate) names: Names,

    /// Where the secret of an encrypted image that is read is: file:PATH, fd:N or credential:NAME
    #[arg(long, value_name = "SOURCE", value_parser = secret::source)]
    pub(crate) secret: Option<SecretSource>,

    /// That secret, once it is read: a descriptor gives it only once.
    #[arg(skip)]
    pub(crate) known: OnceCell<Secret>,
}

/// What an image may name.
#[derive(Debug, Default, Args)]
pub(crate) struct Names {
    /// File that an image may name as its backing file, parent or extent, or folder with such; needed where
    /// Ringtap has not recorded it, and image and folder are not your own; repeatable
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) allow_backing: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) data: DataFiles,
}

/// What an image may name for its data.
#[derive(Debug, Default, Args)]
pub(crate) struct DataFiles {
    /// File that an image may name as its external data file; needed where Ringtap has not recorded it,
    /// and image and folder are not your own; repeatable
    #[arg(long, value_name = "FILE")]
    pub(crate) data_file: Vec<PathBuf>,
}

/// `--backing`, where that is nothing else.
pub(crate) fn backing(arg: clap::Arg) -> clap::Arg {
    arg.long("backing").alias("allow-backing")
}

/// Where `--backing` names what is to lie below a new image, an error tells of `--allow-backing`.
pub(crate) fn backing_is_another(mut error: anyhow::Error) -> anyhow::Error {
    let tools = error.downcast_mut::<ToolsError>().map(ToolsError::cause_mut);
    if let Some(ToolsError::Open(OpenError::Name { source })) = tools {
        source.set_option("--allow-backing");
    } else if let Some(OpenError::Name { source }) = error.downcast_mut::<OpenError>() {
        source.set_option("--allow-backing");
    }
    error
}

/// The option of verbs that write to an image.
#[derive(Debug, Default, Args)]
pub(crate) struct Force {
    /// Write to the image as the format named by -f though it is recorded as another, or bears another's
    /// signature: what it held is lost
    #[arg(long)]
    pub(crate) force_format: bool,
}

impl Sources {
    /// How the images are opened.
    pub(crate) fn reading(&self) -> Reading {
        let names = NamesAllowed {
            backing: self.names.allow_backing.clone(),
            data_files: self.names.data.data_file.clone(),
        };
        let secret = self.secret.clone().map(LazySecret::from);
        Reading { force_share: self.force_share, names, secret }
    }

    /// Options to open an image with, of a format and for reading unless they are changed.
    pub(crate) fn options(&self, format: Format, cache: CacheMode) -> anyhow::Result<OpenOptions> {
        Ok(OpenOptions {
            format: Some(format),
            cache,
            read_only: true,
            force_share: self.force_share,
            allow_backing: self.names.allow_backing.clone(),
            data_files: self.names.data.data_file.clone(),
            secret: read_secret(self.secret.as_ref(), &self.known)?,
            ..OpenOptions::default()
        })
    }
}

/// The secret that is named, read at first use.
pub(crate) fn read_secret(
    source: Option<&SecretSource>,
    known: &OnceCell<Secret>,
) -> anyhow::Result<Option<Secret>> {
    let Some(source) = source else { return Ok(None) };
    if let Some(secret) = known.get() {
        return Ok(Some(secret.clone()));
    }
    let secret = secret::read(source, |text| tracing::warn!("{text}"))?;
    Ok(Some(known.get_or_init(|| secret).clone()))
}

/// The format of an image that is only read: named, else written down, else by its mark.
pub(crate) fn format_of(
    place: impl Into<Place>,
    named: Option<Format>,
) -> anyhow::Result<(Format, How)> {
    let place = place.into();
    let (path, at) = (place.path(), place.at());
    if let Some(format) = named {
        return Ok((format, How::Named));
    }
    if is_null(path) {
        return Ok((Format::Raw, How::Named));
    }
    if let Some(format) = record::format(&at) {
        return Ok((format, How::Recorded));
    }
    let mark = probe::mark(&at).with_context(|| format!("cannot read {}", path.display()))?;
    let Some(name) = mark else { return Ok((Format::Raw, How::Probed)) };
    match name.parse() {
        Ok(format) => Ok((format, How::Probed)),
        Err(_) => bail!(
            "{} bears the mark of {name}, which is not read here; \
             add -f raw to take it for a raw disk all the same",
            path.display()
        ),
    }
}

/// The format of an image that is to be written: named or written down. What the bytes look like does
/// not count, for a guest may have written them; but where they look like nothing, that is said.
pub(crate) fn format_to_write(path: &Path, named: Option<Format>) -> anyhow::Result<Format> {
    if let Some(format) = named.or_else(|| record::format(path)) {
        return Ok(format);
    }
    let mark = probe::mark(path).with_context(|| format!("cannot read {}", path.display()))?;
    let looks = mark.map(|name| format!("; it looks like {name}")).unwrap_or_default();
    Err(Error::Usage(format!(
        "the format of {} is not known: name it with -f{looks} \
         (it is not guessed where an image is written, for a guest may have put any mark there)",
        path.display()
    ))
    .into())
}

/// Open an image to read; where its format was guessed from a mark, say so.
pub(crate) fn open_source(
    place: impl Into<Place>,
    named: Option<Format>,
    cache: CacheMode,
    sources: &Sources,
) -> anyhow::Result<Vbd> {
    let place = place.into();
    let path = place.path();
    let (format, how) = format_of(&place, named)?;
    if how == How::Probed && format != Format::Raw {
        eprintln!(
            "ringtap: note: {} bears the mark of {format} and is taken for it; -f says it for certain",
            path.display()
        );
    }
    let options = sources.options(format, cache)?;
    Ok(Vbd::new(open_place(&place, &options)?, cache))
}

/// Whether this is no file but `null:SIZE`.
pub(crate) fn is_null(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("null:"))
}
