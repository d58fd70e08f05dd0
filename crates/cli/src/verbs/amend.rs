//! `ringtap amend`: what an image says of itself, changed where it is.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::Format;
use ringtap_image::qcow2::CreateOptions;
use ringtap_image_tools::amend::{self, Changes};
use ringtap_image_tools::opening::cannot;
use ringtap_image_tools::{LazySecret, Writing, format_to_write, keyslots};

use super::bar::Talk;
use super::keyslots::Keyslots;
use super::source::{Force, Sources, backing};
use super::watch;
use crate::manual::section::{EXIT, Section};
use crate::names;

/// What `ringtap amend` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct AmendArgs {
    /// The image; nobody may use it
    #[arg(value_name = "FILE", required_unless_present = "options")]
    file: Option<PathBuf>,

    /// Format of the image [default: as recorded]
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

    /// Record that the image is of this format, and change nothing in it: where the record was lost
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

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    write: Force,

    #[command(flatten)]
    sources: Sources,
}

const HELP: &str = "What can be changed of qcow2, with -o:
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
        crate::say::out(HELP);
        return Ok(ExitCode::SUCCESS);
    }
    let Some(file) = &args.file else {
        return Err(Fault::Usage("name the FILE to change".into()).into());
    };
    if let Some(format) = args.record_format {
        amend::record_format(file, format, args.write.force_format, &watch::notes())?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.forget_successor {
        let successor = amend::forget_successor(file)?;
        if !args.talk.quiet {
            let not = successor.map(|other| format!(", not in {}", other.display()));
            say!("{} goes on by itself{}", file.display(), not.unwrap_or_default());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let reading = args.sources.reading();
    let format = format_to_write(file, args.format)?;
    let data_files = &reading.names.data_files;
    let writing = Writing::new(format, args.write.force_format, data_files);
    let prefix = match format {
        Format::Qcow2 => "encrypt.",
        Format::Luks => "",
        _ => return Err(cannot(file, format, "have nothing that could be amended").into()),
    };
    let mut own = Keyslots::default();
    let (mut of_keyslots, mut others) = (false, vec![]);
    for (key, value) in names::pairs(&args.options).map_err(Fault::Usage)? {
        match key.strip_prefix(prefix) {
            Some(inner) if own.set(inner, &value)? => of_keyslots = true,
            _ if format == Format::Luks => {
                let why =
                    format!("{key} of a LUKS container cannot be changed: -o help lists what can");
                return Err(Fault::Usage(why).into());
            }
            _ => others.push((key, value)),
        }
    }
    let wanted = wanted(&others)?;
    let keyslots = match of_keyslots {
        true => Some((own.change()?, reading.secret.as_ref().map(LazySecret::read).transpose()?)),
        false => None,
    };
    // Keys that are derived take long.
    watch::show(args.talk, || {
        // What can be wrong with it is, before anything is changed: a secret that opens nothing, too.
        let plan = |(change, opener)| keyslots::plan(file, writing, change, opener, args.force);
        let keyslots = keyslots.map(plan).transpose()?;
        if format == Format::Qcow2 && (!others.is_empty() || !of_keyslots) {
            amend::amend(file, writing, &wanted, &reading)?;
        }
        keyslots.map(|plan| plan.carry_out(file, writing)).transpose()
    })?;
    Ok(ExitCode::SUCCESS)
}

fn wanted(options: &[(String, String)]) -> Result<Changes, Fault> {
    let mut taken = CreateOptions::default();
    let mut wanted = Changes::default();
    for (key, value) in options {
        let refused = |instead: String| {
            Err(Fault::Usage(format!("{key} of an image that is there: {instead}")))
        };
        match key.as_str() {
            "backing_file" => wanted.backing = Some(value.clone()),
            "backing_fmt" => wanted.backing_format = Some(value.clone()),
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

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap amend -o compat=1.1 old.qcow2", "version 2 becomes 3"),
            ("ringtap amend -o lazy_refcounts=off vm.qcow2", "exact refcounts again"),
            (
                "ringtap amend --record-format qcow2 copy.qcow2",
                "what cp has lost: the record of what it is",
            ),
            (
                "ringtap amend --secret file:old -o state=active,new-secret=file:new vm.luks",
                "another secret opens it, too; encrypt.state= and so on inside qcow2",
            ),
            (
                "ringtap amend -o state=inactive,old-secret=file:old vm.luks",
                "the old one does no more",
            ),
        ],
    ),
    EXIT,
];
