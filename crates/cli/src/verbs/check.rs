//! `ringtap check`: whether an image contradicts itself, and repair.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::{Args, ValueEnum};
use ringtap_image::qcow2::{self, Repair, Report};
use ringtap_image::{
    Container, Format, LeftBehind, OpenError, OpenOptions, Standing, on_a_ring, vhd,
};
use serde_json::json;

use super::offline::{self, Writing};
use super::source::{DataFiles, Force};
use crate::args::{Output, pretty};
use crate::names::RestartLogName;
use crate::{names, outcome};

/// What `ringtap check` is told.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// An image that nobody writes to
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the image [default: as written down; without --repair also by its mark]
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

    /// Take up or drop what a killed server left, and then look at the image: where it cannot be told
    /// whether it belongs to the image as it is now, someone must say
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "force_share")]
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
    fn writing(&self, format: Format) -> Writing<'_> {
        let restart_log = self.restart_log.map(Into::into);
        Writing { restart_log, ..Writing::new(format, &self.force, &self.data) }
    }

    /// Whether the image is changed.
    fn changes(&self) -> bool {
        self.repair.is_some() || self.restart_log.is_some()
    }

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
    let end =
        offline::format(&args.file, args.format, args.changes()).and_then(|format| match format {
            Format::Qcow2 => check_qcow2(args).map(|report| Some((format, report))),
            Format::Vhd => check_vhd(args).map(|report| Some((format, report))),
            _ => Ok(None),
        });
    match end {
        Ok(Some((format, report))) => {
            print(args, format, &report);
            match () {
                () if report.corruptions > 0 => ExitCode::from(2),
                () if report.leaks > 0 => ExitCode::from(3),
                () => ExitCode::SUCCESS,
            }
        }
        Ok(None) => {
            eprintln!("ringtap: {}: this format has nothing to check", args.file.display());
            ExitCode::from(63)
        }
        Err(error) => {
            outcome::failed(&error);
            ExitCode::from(1)
        }
    }
}

fn check_qcow2(args: &CheckArgs) -> anyhow::Result<Report> {
    let container = match args.changes() {
        true => match offline::settled(&args.file, args.writing(Format::Qcow2)) {
            Ok(container) => container,
            Err(error) if matches!(error.downcast_ref(), Some(OpenError::Locked { .. })) => {
                return Err(error);
            }
            Err(error) if may_be_taken_up_later(&error, &args.file) => {
                return Err(error.context(
                    "a killed server left changes that are not in the image yet, and to repair it now \
                     would lose them: serve it once, which takes them up",
                ));
            }
            // One whose tables are so that nobody can take them up is repaired without.
            Err(_) => offline::to_change(&args.file, args.writing(Format::Qcow2))?,
        },
        false => at_rest(args, Format::Qcow2)?,
    };
    let (repair, looked_at) = (args.repair(), container.clone());
    let report =
        on_a_ring(&args.file, |io| async move { qcow2::check(&io, &container, repair).await })??;
    if args.changes() {
        looked_at.confirm_format(Format::Qcow2);
    }
    Ok(report)
}

/// The image to be looked at. Without what a killed server left its tables are not those that its guest
/// knows.
fn at_rest(args: &CheckArgs, format: Format) -> anyhow::Result<Container> {
    let container = offline::container(&args.file, args.force_share)?;
    if args.force_share {
        return Ok(container);
    }
    let left = if format == Format::Vhd {
        vhd::left(&container)?
    } else {
        let own = container.clone();
        let options = OpenOptions { read_only: true, ..args.writing(format).options() };
        on_a_ring(&args.file, |io| async move {
            let header = qcow2::Header::read(&io, &own).await?;
            qcow2::left(&own, &header, &options)
        })??
    };
    match left {
        None | Some(LeftBehind { standing: Some(Standing::Other(_)), .. }) => Ok(container),
        Some(left) => bail!(
            "{}: {} that are not in the image: add --restart-log use to take them up, or \
             --restart-log drop to leave the image as it is",
            args.file.display(),
            left.told()
        ),
    }
}

/// Whether it is not for the image's own tables that what a killed server left could not be taken up.
fn may_be_taken_up_later(error: &anyhow::Error, image: &Path) -> bool {
    match error.downcast_ref() {
        Some(OpenError::Os { path, .. }) => path != image,
        Some(
            OpenError::RestartLog { .. }
            | OpenError::RestartLogInDoubt { .. }
            | OpenError::RestartLogMissing { .. }
            | OpenError::Backing { .. }
            | OpenError::Name { .. }
            | OpenError::Luks { .. },
        ) => true,
        _ => false,
    }
}

/// What a VHD's check finds, in the words of qcow2's.
fn check_vhd(args: &CheckArgs) -> anyhow::Result<Report> {
    let container = match args.changes() {
        true => {
            let writing = args.writing(Format::Vhd);
            match offline::settled_vhd(&args.file, writing) {
                Err(error) if may_be_taken_up_later(&error, &args.file) => return Err(error),
                Err(_) => offline::to_change(&args.file, writing)?,
                Ok(container) => container,
            }
        }
        false => at_rest(args, Format::Vhd)?,
    };
    let (wanted, looked_at) = (args.repair, container.clone());
    let image_end = container.len();
    let found = on_a_ring(&args.file, |io| async move {
        let found = vhd::check(&io, &container, false).await?;
        match wanted {
            Some(RepairName::Leaks) if !found.footers.is_empty() => Ok(found),
            Some(_) => vhd::check(&io, &container, true).await,
            None => Ok(found),
        }
    })??;
    if wanted.is_some() {
        looked_at.confirm_format(Format::Vhd);
    }
    let (footers, leaks) = (found.footers.len() as u64, u64::from(found.leaked > 0));
    let mended = found.repaired > 0;
    let left = |count: u64| if mended { 0 } else { count };
    let mut messages = found.corruptions.clone();
    messages.extend(found.footers.iter().map(|footer| format!("footer: {footer}")));
    if found.leaked > 0 {
        messages.push(format!("{} bytes at the end of the file belong to nothing", found.leaked));
    }
    Ok(Report {
        corruptions: found.corruptions.len() as u64 + left(footers),
        leaks: left(leaks),
        corruptions_fixed: footers - left(footers),
        leaks_fixed: leaks - left(leaks),
        messages,
        image_end: image_end - if mended { found.leaked } else { 0 },
        allocated_clusters: found.blocks.0,
        total_clusters: found.blocks.1,
        ..Report::default()
    })
}

fn print(args: &CheckArgs, format: Format, report: &Report) {
    if args.output == Output::Json {
        let mut facts = json!({
            "filename": args.file.display().to_string(),
            "format": format.name(),
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
        println!("{}", pretty(&facts).unwrap_or_default());
        return;
    }
    for message in &report.messages {
        eprintln!("{message}");
    }
    if args.quiet {
        return;
    }
    if report.corruptions_fixed + report.leaks_fixed > 0 {
        println!(
            "repaired: {} leaked clusters, {} errors",
            report.leaks_fixed, report.corruptions_fixed
        );
    }
    if report.is_clean() {
        println!("No errors were found on the image.");
    }
    if report.corruptions > 0 {
        println!(
            "{} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.",
            report.corruptions
        );
    }
    if report.leaks > 0 {
        println!(
            "{} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.",
            report.leaks
        );
    }
    let percent = |part: u64, of: u64| part as f64 * 100.0 / of.max(1) as f64;
    let (all, used) = (report.total_clusters, report.allocated_clusters);
    if all > 0 {
        println!(
            "{used}/{all} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(used, all),
            percent(report.fragmented_clusters, used),
            percent(report.compressed_clusters, used)
        );
    }
    println!("Image end offset: {}", report.image_end);
}
