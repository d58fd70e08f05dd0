//! Options about images that the verbs open.

use std::path::PathBuf;

use clap::Args;
use ringtap_image::OpenError;
use ringtap_image_tools::{Error, LazySecret, Names as NamesAllowed, Reading};

use crate::secret;

/// Options of the verbs that read images.
#[derive(Debug, Args)]
pub(crate) struct Sources {
    /// Look at the image though another program may be writing to it; what is read may contradict itself
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,

    #[command(flatten)]
    pub(crate) names: Names,

    /// Where the secret of an encrypted image that is read is: file:PATH, fd:N or credential:NAME; repeatable, and an
    /// image and what lies below it are each opened by one that fits
    #[arg(long, value_name = "SOURCE", value_parser = secret::lazy)]
    pub(crate) secret: Vec<LazySecret>,
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
    let cause = error.downcast_mut::<Error>().map(Error::cause_mut);
    if let Some(Error::Open(OpenError::Name { source })) = cause {
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
        Reading {
            force_share: self.force_share,
            names,
            secret: LazySecret::any(self.secret.clone()),
        }
    }
}
