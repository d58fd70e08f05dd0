//! `ringtap amend`: what an image says of itself, changed where it is.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{self, Amendment, CreateOptions};
use ringtap_image::{Format, SecretSource, on_a_ring};

use super::keyslots::Keyslots;
use super::offline;
use super::source::read_secret;
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
    #[arg(short, long, value_name = "OPTIONS", required = true)]
    options: Vec<String>,

    /// Where a secret is that opens the image, to give it another: file:PATH, fd:N or credential:NAME
    #[arg(long, value_name = "SOURCE", value_parser = secret::source)]
    secret: Option<SecretSource>,

    /// Overwrite a keyslot in use, or erase the last one
    #[arg(long)]
    force: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,
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
    let format = offline::format(file, args.format, true)?;
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
        let container = offline::settled(file)?;
        on_a_ring(file, |io| async move { qcow2::amend(&io, &container, &amendment).await })??;
    }
    if of_keyslots {
        let opener = read_secret(args.secret.as_ref(), &OnceCell::new())?;
        for slot in keyslots.apply(file, format, opener, args.force)? {
            if !args.quiet {
                println!("keyslot {slot} changed");
            }
        }
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
