//! `ringtap amend`: what an image says of itself, changed where it is.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{self, Amendment, CreateOptions};
use ringtap_image::{
    CacheMode, Container, Format, OpenError, OpenOptions, Place, Role, on_a_ring, probe, record,
};

use super::convert::same_file;
use super::keyslots::Keyslots;
use super::offline::{self, Writing};
use super::source::{Force, Sources, backing, read_secret};
use super::target::find_backing;
use super::{chain, resize};
use crate::names;

/// What `ringtap amend` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
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

    /// Overwrite a keyslot in use, or erase the last one
    #[arg(long)]
    force: bool,

    /// Taken for the sake of qemu-img: nothing that takes long is done to data
    #[arg(short, long, hide = true)]
    progress: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    write: Force,

    #[command(flatten)]
    sources: Sources,
}

const HELP: &str = "What can be changed of qcow2, with -o:
  backing_file=FILE       image below, as ringtap rebase -u; what is read is up to you
  backing_fmt=FORMAT      its format
  compat=0.10|1.1         version 2 or 3
  data_file=FILE          where its external data file is
  data_file_raw=off       that file is no longer a raw image by itself
  lazy_refcounts=on|off   refcounts may lag behind while in use
  size=SIZE               virtual size, as ringtap resize
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
    let writing = Writing::new(format, &args.write, &args.sources.names.data);
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
    let wanted = wanted(&others)?;
    if format == Format::Qcow2 && (!others.is_empty() || !of_keyslots) {
        change(args, file, writing, wanted)?;
    }
    if of_keyslots {
        let opener = read_secret(args.sources.secret.as_ref(), &args.sources.known)?;
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

/// What is to be changed, each by its own tool.
#[derive(Default)]
struct Wanted {
    header: Amendment,
    backing: Option<String>,
    backing_format: Option<Format>,
    size: Option<u64>,
}

fn change(
    args: &AmendArgs,
    file: &Path,
    writing: Writing<'_>,
    wanted: Wanted,
) -> anyhow::Result<()> {
    let container = offline::settled(file, writing)?;
    let (changed, image) = (container.clone(), Place::from(file));
    let own = container.clone();
    let header = on_a_ring(file, |io| async move { qcow2::Header::read(&io, &own).await })??;
    let below = match (&wanted.backing, wanted.backing_format) {
        (None, None) => None,
        (Some(name), _) if name.is_empty() => Some(None),
        (name, format) => {
            let own = header.backing_file.as_deref().map(std::str::from_utf8);
            let own = own.transpose().map_err(|_| {
                Fault::Usage("backing_fmt: the name of its backing file is not UTF-8: give backing_file= too".into())
            })?;
            let name = name.clone().or_else(|| own.map(str::to_owned));
            let name =
                name.ok_or_else(|| Fault::Usage("backing_fmt: it has no backing file".into()))?;
            let known = header.backing_format().and_then(|name| std::str::from_utf8(name).ok());
            let backing =
                find_backing(file, name, format.or(known.and_then(|name| name.parse().ok())))?;
            if same_file(file, &backing.path) {
                return Err(Fault::Usage("an image cannot lie below itself".into()).into());
            }
            Some(Some(backing))
        }
    };
    // A name that the image has had is not followed because its format is said.
    let names = wanted.backing.is_some();
    if let Some(name) = &wanted.header.data_file {
        let path = chain::beside(file, Path::new(name));
        record::may_own(&image, &(&path).into(), true)?;
        chain::also_allow(&image, Role::DataFile, &path);
    }
    if let Some(Some(backing)) = below.as_ref().filter(|_| names) {
        chain::also_allow(&image, Role::Backing, &backing.path);
    }
    let (header, new) = (
        wanted.header.clone(),
        below.as_ref().map(|below| below.as_ref().map(|it| (it.name.clone(), it.format))),
    );
    on_a_ring(file, |io| async move {
        qcow2::amend(&io, &container, &header).await?;
        match &new {
            Some(new) => {
                let new = new.as_ref().map(|(name, format)| (name.as_str(), *format));
                qcow2::set_backing(&io, &container, new).await
            }
            None => Ok(()),
        }
    })??;
    if let Some(below) = below.as_ref().filter(|_| names) {
        chain::record(&image, Role::Backing, below.as_ref().map(|it| it.path.as_path()));
    }
    if let Some(name) = &wanted.header.data_file {
        let path = chain::beside(file, Path::new(name));
        chain::record(&image, Role::DataFile, Some(&path));
        record::set_owner(&image, &(&path).into())
            .with_context(|| format!("cannot write down whose data file {} is", path.display()))?;
    }
    changed.confirm_format(Format::Qcow2);
    drop(changed);
    match wanted.size {
        Some(size) => resize::set(&image, writing, size, &args.sources),
        None => Ok(()),
    }
}

fn wanted(options: &[(String, String)]) -> Result<Wanted, Fault> {
    let mut taken = CreateOptions::default();
    let mut wanted = Wanted::default();
    for (key, value) in options {
        let refused = |instead: String| {
            Err(Fault::Usage(format!("{key} of an image that is there: {instead}")))
        };
        let format = |text: &str| text.parse().map_err(|error| Fault::Usage(format!("{error}")));
        match key.as_str() {
            "backing_file" => wanted.backing = Some(value.clone()),
            "backing_fmt" => wanted.backing_format = Some(format(value)?),
            "data_file" => wanted.header.data_file = Some(value.clone()),
            _ => {
                taken.set(key, value).map_err(Fault::Usage)?;
                match key.as_str() {
                    "compat" => wanted.header.version = Some(taken.version),
                    "lazy_refcounts" => wanted.header.lazy_refcounts = Some(taken.lazy_refcounts),
                    "data_file_raw" => wanted.header.data_file_raw = Some(taken.data_file_raw),
                    "size" => wanted.size = Some(taken.size),
                    _ => return refused(format!("convert it with -o {key}={value}")),
                }
            }
        }
    }
    Ok(wanted)
}
