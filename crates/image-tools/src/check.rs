//! Whether an image contradicts itself, and repair.

use std::path::{Path, PathBuf};

pub use ringtap_image::qcow2::{Repair, Report};

use ringtap_image::{
    Container, Format, OpenError, OpenOptions, Place, RestartChoice, on_a_ring, open_place, qcow2,
    vhd, vhdx,
};

use crate::opening::{self, Writing};
use crate::{Doing, Error, Names, chain, waits_for_nothing};

/// What is looked at, and what is done about it.
#[derive(Clone, Debug)]
pub struct Check<'a> {
    /// The image.
    pub path: &'a Path,
    /// The format, if that is named; else recorded, and where nothing is changed also told by the signature.
    pub format: Option<Format>,
    /// What is repaired.
    pub repair: Repair,
    /// What becomes of a restart log, before the image is looked at.
    pub restart_log: Option<RestartChoice>,
    /// Look though another program may be writing; what is found may be wrong.
    pub force_share: bool,
    /// Write to it though it is recorded as of another format.
    pub force_format: bool,
    /// What it may name for its data.
    pub data_files: &'a [PathBuf],
}

impl Check<'_> {
    fn writing(&self, format: Format) -> Writing<'_> {
        let own = Writing::new(format, self.force_format, self.data_files);
        Writing { restart_log: self.restart_log, ..own }
    }

    /// Whether the image is changed.
    fn changes(&self) -> bool {
        self.repair != Repair::Nothing || self.restart_log.is_some()
    }
}

/// Look at an image, and repair what is asked for. Gives its format, and what was found, as far as images of that format have
/// anything to check: in clusters of qcow2, or in blocks of a VHD or VHDX; of a VMDK, which is not repaired, only that all of it
/// can be found.
///
/// # Errors
///
/// It cannot be opened, read or written, or a killed server left changes that are not in it.
pub fn check(job: &Check<'_>) -> Result<(Format, Option<Report>), Error> {
    let format = opening::format(job.path, job.format, job.changes())?;
    chain::warn_of_mixture(job.path, Some(format), &Names::default());
    let report = match format {
        Format::Qcow2 => Some(check_qcow2(job)?),
        Format::Vhd => Some(check_vhd(job)?),
        Format::Vhdx => Some(check_vhdx(job)?),
        Format::Vmdk if job.repair == Repair::Nothing => Some(look_at_all(job, format)?),
        _ => None,
    };
    Ok((format, report))
}

fn check_qcow2(job: &Check<'_>) -> Result<Report, Error> {
    let writing = job.writing(Format::Qcow2);
    let container = match job.changes() {
        true => match writing.settled(job.path) {
            Ok(container) => container,
            Err(error) if matches!(error.cause(), Error::Open(OpenError::Locked { .. })) => {
                return Err(error);
            }
            Err(error) if may_be_taken_up_later(&error, job.path) => {
                return Err(error).doing(|| {
                    "a killed process left changes that are not in the image yet, and to repair it now \
                     would lose them: serve it once, which takes them up"
                        .into()
                });
            }
            // One whose tables are so that nobody can take them up is repaired without.
            Err(_) => writing.open(job.path)?,
        },
        false => at_rest(job, Format::Qcow2)?,
    };
    let (repair, looked_at) = (job.repair, container.clone());
    let report =
        on_a_ring(job.path, |io| async move { qcow2::check(&io, &container, repair).await })??;
    if job.changes() {
        looked_at.confirm_format(Format::Qcow2);
    }
    Ok(report)
}

/// The image to be looked at.
fn at_rest(job: &Check<'_>, format: Format) -> Result<Container, Error> {
    let container = opening::container(job.path, job.force_share)?;
    if !job.force_share || container.writer().is_none() {
        waits_for_nothing(
            &container,
            format,
            job.writing(format).options(),
            "add --restart-log use to take them up, or --restart-log drop to leave the image as it is",
        )?;
    }
    Ok(container)
}

/// Whether it is not for the image's own tables that what a killed server left could not be taken up.
fn may_be_taken_up_later(error: &Error, image: &Path) -> bool {
    match error.cause() {
        Error::Open(OpenError::Os { path, .. }) => path != image,
        Error::Open(
            OpenError::RestartLog { .. }
            | OpenError::RestartLogInDoubt { .. }
            | OpenError::RestartLogOfAnother { .. }
            | OpenError::RestartLogMissing { .. }
            | OpenError::Backing { .. }
            | OpenError::Name { .. }
            | OpenError::Luks { .. },
        ) => true,
        _ => false,
    }
}

/// Find every part of an image, of which what is wrong is an error.
fn look_at_all(job: &Check<'_>, format: Format) -> Result<Report, Error> {
    let options = OpenOptions {
        read_only: true,
        force_share: job.force_share,
        ..job.writing(format).options()
    };
    let image = open_place(&Place::from(job.path), &options)?;
    let path = job.path.to_owned();
    on_a_ring(job.path, |io| async move {
        let (mut at, end) = (0, image.info().size);
        while at < end {
            let status = image.status(&io, at, end - at).await;
            at += status.doing(|| format!("{}: what lies at {at}", path.display()))?.len.max(1);
        }
        Ok::<_, Error>(())
    })??;
    Ok(Report::default())
}

/// What a VHDX's check finds, in the words of qcow2's.
fn check_vhdx(job: &Check<'_>) -> Result<Report, Error> {
    let container = opening::container(job.path, job.force_share)?;
    let image_end = container.len();
    let found = on_a_ring(job.path, |io| async move { vhdx::check(&io, &container).await })??;
    Ok(found.into_report(image_end))
}

/// What a VHD's check finds, in the words of qcow2's.
fn check_vhd(job: &Check<'_>) -> Result<Report, Error> {
    let container = match job.changes() {
        true => {
            let writing = job.writing(Format::Vhd);
            match writing.settled_vhd(job.path) {
                Err(error) if may_be_taken_up_later(&error, job.path) => return Err(error),
                Err(_) => writing.open(job.path)?,
                Ok(container) => container,
            }
        }
        false => at_rest(job, Format::Vhd)?,
    };
    let (wanted, looked_at) = (job.repair, container.clone());
    let image_end = container.len();
    let found = on_a_ring(job.path, |io| async move {
        let found = vhd::check(&io, &container, false).await?;
        match wanted {
            Repair::Leaks if !found.footers.is_empty() => Ok(found),
            Repair::Leaks | Repair::All => vhd::check(&io, &container, true).await,
            Repair::Nothing => Ok(found),
        }
    })??;
    if wanted != Repair::Nothing {
        looked_at.confirm_format(Format::Vhd);
    }
    Ok(found.into_report(image_end))
}
