//! `ringtap amend`: what an image says of itself, changed where it is.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::qcow2::{self, Amendment, CreateOptions};
use ringtap_image::{Format, on_a_ring};

use super::offline;
use crate::names;

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

    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

const HELP: &str = "What can be changed of qcow2, with -o:
  compat=1.1              version 3
  lazy_refcounts=on|off   refcounts may lag behind while in use
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
    if format != Format::Qcow2 {
        return Err(offline::cannot(file, format, "have nothing that could be amended"));
    }
    let amendment = amendment(&args.options)?;
    let container = offline::settled(file)?;
    on_a_ring(file, |io| async move { qcow2::amend(&io, &container, &amendment).await })??;
    Ok(ExitCode::SUCCESS)
}

fn amendment(options: &[String]) -> Result<Amendment, Fault> {
    let mut wanted = CreateOptions::default();
    let mut amendment = Amendment::default();
    for (key, value) in names::pairs(options).map_err(Fault::Usage)? {
        wanted.set(&key, &value).map_err(Fault::Usage)?;
        let instead = match key.as_str() {
            "compat" => {
                amendment.version = Some(wanted.version);
                continue;
            }
            "lazy_refcounts" => {
                amendment.lazy_refcounts = Some(wanted.lazy_refcounts);
                continue;
            }
            "backing_file" | "backing_fmt" => "use ringtap rebase -u".to_owned(),
            "size" => "use ringtap resize".to_owned(),
            _ => format!("convert it with -o {key}={value}"),
        };
        return Err(Fault::Usage(format!("{key} of an image that is there: {instead}")));
    }
    Ok(amendment)
}
