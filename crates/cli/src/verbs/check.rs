//! `ringtap check`: whether an image contradicts itself, and repair.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use ringtap_image::Format;
use ringtap_image_tools::LazySecret;
use ringtap_image_tools::check::{Check, Repair, Report, check};
use serde_json::json;

use super::bar::Talk;
use super::source::{DataFiles, Force};
use super::watch;
use crate::manual::section::Section;
use crate::names::RestartLogName;
use crate::output::{Output, pretty};
use crate::{names, outcome, secret};

/// What `ringtap check` is told.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// An image that nobody writes to
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the image [default: as recorded; without --repair also by its signature]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Repair what is found
    #[arg(short, long, value_enum, value_name = "WHAT")]
    repair: Option<RepairName>,

    /// Take up or drop what a killed process left, and then look at the image: where it cannot be told
    /// whether it belongs to the image as it is now, someone must say
    #[arg(long, value_parser = RestartLogName::decision(), value_name = "WHAT", conflicts_with = "force_share")]
    restart_log: Option<RestartLogName>,

    /// How to print it; json has the fields of `qemu-img check`
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    /// Look at the image though another program may be writing to it; what is found may be wrong
    #[arg(short = 'U', long)]
    force_share: bool,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    data: DataFiles,

    /// Taken and not looked at: no key is needed to look at an encrypted image, and qemu-img asks for one
    #[arg(long, value_name = "SOURCE", value_parser = secret::lazy, hide = true)]
    secret: Vec<LazySecret>,
}

/// What to repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RepairName {
    /// Clusters that are marked used and that nothing refers to.
    Leaks,
    /// Refcounts and flags too: all that can be.
    All,
}

impl CheckArgs {
    fn repair(&self) -> Repair {
        match self.repair {
            None => Repair::Nothing,
            Some(RepairName::Leaks) => Repair::Leaks,
            Some(RepairName::All) => Repair::All,
        }
    }
}

/// Exit status as `qemu-img check`: 0 sound, 1 not looked at, 2 corrupt, 3 leaks only, 63 no checks.
pub(crate) fn run(args: &CheckArgs) -> ExitCode {
    let _not_needed = &args.secret;
    let job = Check {
        path: &args.file,
        format: args.format,
        repair: args.repair(),
        restart_log: args.restart_log.map(Into::into),
        force_share: args.force_share,
        force_format: args.force.force_format,
        data_files: &args.data.data_file,
    };
    let talk = Talk { quiet: args.quiet, ..Talk::default() };
    let end = watch::show(talk, || check(&job));
    match end {
        Ok((format, report)) => {
            let file = args.file.display().to_string();
            say(&file, format.name(), report.as_ref(), args.output, args.quiet)
        }
        Err(error) => {
            outcome::failed(&error.into());
            ExitCode::from(1)
        }
    }
}

/// Say what was found in an image, or that images of its format have nothing to check; the exit status that says the same.
pub(crate) fn say(
    file: &str,
    format: &str,
    found: Option<&Report>,
    output: Output,
    quiet: bool,
) -> ExitCode {
    let Some(report) = found else {
        tell!("ringtap: {file}: this format has nothing to check");
        return ExitCode::from(63);
    };
    match output {
        Output::Json => print_json(file, format, report),
        Output::Text => print(report, quiet),
    }
    match () {
        () if report.corruptions > 0 => ExitCode::from(2),
        () if report.leaks > 0 => ExitCode::from(3),
        () => ExitCode::SUCCESS,
    }
}

fn print_json(file: &str, format: &str, report: &Report) {
    let mut facts = json!({
        "filename": file,
        "format": format,
        "check-errors": 0,
        "image-end-offset": report.image_end,
        "total-clusters": report.total_clusters,
        "allocated-clusters": report.allocated_clusters,
    });
    for (name, count) in [
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if count > 0 {
            facts[name] = count.into();
        }
    }
    if !report.messages.is_empty() {
        facts["messages"] = report.messages.clone().into();
    }
    say!("{}", pretty(&facts).unwrap_or_default());
}

fn print(report: &Report, quiet: bool) {
    for message in &report.messages {
        tell!("{message}");
    }
    if quiet {
        return;
    }
    if report.corruptions_fixed + report.leaks_fixed > 0 {
        say!(
            "repaired: {} leaked clusters, {} errors",
            report.leaks_fixed,
            report.corruptions_fixed
        );
    }
    if report.is_clean() {
        say!("No errors were found on the image.");
    }
    if report.corruptions > 0 {
        say!(
            "{} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.",
            report.corruptions
        );
    }
    if report.leaks > 0 {
        say!(
            "{} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.",
            report.leaks
        );
    }
    let percent = |part: u64, of: u64| part as f64 * 100.0 / of.max(1) as f64;
    let (all, used) = (report.total_clusters, report.allocated_clusters);
    if all > 0 && used > 0 {
        say!(
            "{used}/{all} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(used, all),
            percent(report.fragmented_clusters, used),
            percent(report.compressed_clusters, used)
        );
    }
    if report.image_end > 0 {
        say!("Image end offset: {}", report.image_end);
    }
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap check vm.qcow2", "look"),
            (
                "ringtap check -f qcow2 --repair leaks vm.qcow2",
                "free what is marked used and is not; harmless",
            ),
            ("ringtap check -f qcow2 --repair all vm.qcow2", "repair all that can be"),
        ],
    ),
    (
        "Exit status",
        &[
            ("0", "the image is sound (after the repair, if one was asked for)"),
            ("1", "it could not be looked at, or the command line makes no sense"),
            ("2", "it is corrupt"),
            ("3", "clusters are leaked, and nothing else is wrong"),
            ("63", "images of this format have nothing to check"),
        ],
    ),
];
