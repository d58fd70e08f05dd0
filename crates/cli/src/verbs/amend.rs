//! `ringtap amend`: what an image says of itself, changed where it is.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{self, Amendment, CreateOptions};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, SecretSource, on_a_ring, probe,
    record,
};

use super::keyslots::Keyslots;
use super::offline::{self, Writing};
use super::source::{DataFiles, Force, read_secret};
use crate::{names, secret};

/// What `ringtap amend` is told.
#[derive(Debug, Args)]
pub(crate) struct AmendArgs {
    /// The image; nobody may use it
    #[arg(value_name = "FILE", required_unless_present = "options")]
    file: Option<PathBuf>,

    /// Format of the image [default: as written down]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// What to change, as key=value,key=value; `-o help` lists what can be
    #[arg(
        short,
        long,
        value_name = "OPTIONS",
        required_unless_present_any = ["record_format", "forget_successor"]
    )]
    options: Vec<String>,

    /// Write down that the image is of this format, and change nothing in it: where the record was lost
    /// (by cp, say), is wrong, or was never made
    #[arg(
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true,
        conflicts_with_all = ["options", "format"]
    )]
    record_format: Option<Format>,

    /// Let its disk go on in this image again, and give up what was written since a snapshot of it: the overlay that holds
    /// that stays, and is of no use once this image is written to
    #[arg(long, conflicts_with_all = ["options", "format", "record_format"])]
    forget_successor: bool,

    /// Where a secret is that opens the image, to give it another: file:PATH, fd:N or credential:NAME
    #[arg(long, value_name = "SOURCE", value_parser = secret::source)]
    secret: Option<SecretSource>,

    /// Overwrite a keyslot in use, or erase the last one
    #[arg(long)]
    force: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    write: Force,

    #[command(flatten)]
    data: DataFiles,
}

const HELP: &str = "What can be changed of qcow2, with -o:
  compat=1.1              version 3
  lazy_refcounts=on|off   refcounts may lag behind while in use
and with encrypt. before it, what can be changed of luks, version 1:
  state=active|inactive   fill a keyslot, or erase it
  new-secret=SOURCE       what is to open the image too; needs --secret
  keyslot=N               which keyslot, from 0 [to be filled: a free one]
  old-secret=SOURCE       to be erased: every keyslot that this opens
  iter-time=MS            work of the key derivation, in milliseconds [2000]
";

pub(crate) fn run(args: &AmendArgs) -> anyhow::Result<ExitCode> {
    if names::asks_for_help(&args.options) {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let Some(file) = &args.file else {
        return Err(Fault::Usage("name the FILE to change".into()).into());
    };
    if let Some(format) = args.record_format {
        return record_format(args, file, format);
    }
    if args.forget_successor {
        return forget_successor(args, file);
    }
    let format = offline::format(file, args.format, true)?;
    let writing = Writing::new(format, &args.write, &args.data);
    let prefix = match format {
        Format::Qcow2 => "encrypt.",
        Format::Luks => "",
        _ => return Err(offline::cannot(file, format, "have nothing that could be amended")),
    };
    let mut keyslots = Keyslots::default();
    let (mut of_keyslots, mut others) = (false, vec![]);
    for (key, value) in names::pairs(&args.options).map_err(Fault::Usage)? {
        match key.strip_prefix(prefix) {
            Some(own) if keyslots.set(own, &value)? => of_keyslots = true,
            _ if format == Format::Luks => {
                let why =
                    format!("{key} of a LUKS container cannot be changed: -o help lists what can");
                return Err(Fault::Usage(why).into());
            }
            _ => others.push((key, value)),
        }
    }
    let amendment = amendment(&others)?;
    if format == Format::Qcow2 && (!others.is_empty() || !of_keyslots) {
        let container = offline::settled(file, writing)?;
        let changed = container.clone();
        on_a_ring(file, |io| async move { qcow2::amend(&io, &container, &amendment).await })??;
        changed.confirm_format(format);
    }
    if of_keyslots {
        let opener = read_secret(args.secret.as_ref(), &OnceCell::new())?;
        for slot in keyslots.apply(file, writing, opener, args.force)? {
            if !args.quiet {
                println!("keyslot {slot} changed");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Let the image be written to again though its disk goes on in another.
fn forget_successor(args: &AmendArgs, file: &Path) -> anyhow::Result<ExitCode> {
    let failed = |source| OpenError::Os { what: "open", path: file.to_owned(), source };
    let place = Place::hold(file).map_err(failed)?;
    let successor = record::successor(&place.at());
    // Who serves an overlay on it has it for reading.
    let options =
        OpenOptions { cache: CacheMode::Writeback, succeeded: true, ..OpenOptions::default() };
    let _container = Container::open(&place, &options)?;
    record::forget_successor(&place.at())
        .with_context(|| format!("cannot change the record of {}", file.display()))?;
    if !args.quiet {
        match successor {
            Some(other) => {
                println!("{} goes on by itself, not in {}", file.display(), other.display());
            }
            None => println!("{} goes on by itself", file.display()),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Write the image's format down. It must look like it, unless it is raw, as which any is taken.
fn record_format(args: &AmendArgs, file: &Path, format: Format) -> anyhow::Result<ExitCode> {
    let failed = |source| OpenError::Os { what: "open", path: file.to_owned(), source };
    let place = Place::hold(file).map_err(failed)?;
    // Whoever has it for writing goes on as what it was.
    let options = OpenOptions { cache: CacheMode::Writeback, ..OpenOptions::default() };
    let _container = Container::open(&place, &options)?;
    let looks_like = probe::mark(&place.at())
        .with_context(|| format!("cannot read {}", file.display()))?
        .unwrap_or("raw");
    if looks_like != format.name() && format != Format::Raw && !args.write.force_format {
        let why = format!(
            "{} does not bear the signature of {format}, but looks like {looks_like}: record that, or \
             add --force-format",
            file.display()
        );
        return Err(Fault::Usage(why).into());
    }
    record::set_format(&place.at(), format)
        .with_context(|| format!("cannot write down that {} is {format}", file.display()))?;
    if looks_like != format.name() {
        eprintln!(
            "ringtap: note: {} bears the signature of {looks_like}; as {format}, a guest sees that \
             file's bytes as its disk",
            file.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn amendment(options: &[(String, String)]) -> Result<Amendment, Fault> {
    let mut wanted = CreateOptions::default();
    let mut amendment = Amendment::default();
    for (key, value) in options {
        let refused = |instead: String| {
            Err(Fault::Usage(format!("{key} of an image that is there: {instead}")))
        };
        match key.as_str() {
            "compat" => {
                wanted.set(key, value).map_err(Fault::Usage)?;
                amendment.version = Some(wanted.version);
            }
            "lazy_refcounts" => {
                wanted.set(key, value).map_err(Fault::Usage)?;
                amendment.lazy_refcounts = Some(wanted.lazy_refcounts);
            }
            "backing_file" | "backing_fmt" => return refused("use ringtap rebase -u".into()),
            "size" => return refused("use ringtap resize".into()),
            "data_file" => return refused("convert it, with -o data_file=FILE".into()),
            _ => {
                wanted.set(key, value).map_err(Fault::Usage)?;
                return refused(format!("convert it with -o {key}={value}"));
            }
        }
    }
    Ok(amendment)
}
