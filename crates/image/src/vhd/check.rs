//! Looking a VHD through, and mending its footers.

use ringtap_io::Io;

use super::footer::{Footer, FooterError, Kind, SECTOR};
use super::header::UNUSED;
use super::layout::{Footers, Sparse};
use super::sabotage::{Sabotage, asked};
use super::{bad, end_with_footer, os};
use crate::qcow2::{self, ToolError};
use crate::{Boxed, Container, OnlineCheck, OpenError};

/// The most problems that are told one by one.
const MOST: usize = 1000;

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What contradicts itself, with its place. Nothing of it is repaired, nor anything else beside it:
    /// whose bytes are whose cannot be told.
    pub corruptions: Vec<String>,
    /// Footers that were missing or bad, where the other one is good.
    pub footers: Vec<String>,
    /// How many of those, and of leaks, are no more.
    pub repaired: usize,
    /// Bytes at the file's end that no structure or block uses; a repair cuts them off.
    pub leaked: u64,
    /// Blocks that have room, and all there are.
    pub blocks: (u64, u64),
}

impl Report {
    /// The same as checks of all formats tell it, of a file of so many bytes before.
    pub fn into_report(self, image_end: u64) -> qcow2::Report {
        let (footers, leaks) = (self.footers.len() as u64, u64::from(self.leaked > 0));
        let mended = self.repaired > 0;
        let left = |count: u64| if mended { 0 } else { count };
        let corruptions = self.corruptions.len() as u64 + left(footers);
        let mut messages = self.corruptions;
        messages.extend(self.footers.iter().map(|footer| format!("footer: {footer}")));
        if self.leaked > 0 {
            messages
                .push(format!("{} bytes at the end of the file belong to nothing", self.leaked));
        }
        qcow2::Report {
            corruptions,
            leaks: left(leaks),
            corruptions_fixed: footers - left(footers),
            leaks_fixed: leaks - left(leaks),
            messages,
            image_end: image_end - if mended { self.leaked } else { 0 },
            allocated_clusters: self.blocks.0,
            total_clusters: self.blocks.1,
            ..qcow2::Report::default()
        }
    }
}

/// Of one that is served; `grows`: and is written to, so that its table gets entries meanwhile. None ever changes or goes.
pub(super) struct Served {
    pub(super) container: Container,
    pub(super) grows: bool,
}

impl OnlineCheck for Served {
    fn run<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<qcow2::Report, ToolError>> {
        Box::pin(async move {
            let container = &self.container;
            let found = match self.grows {
                true => check_growing(io, container).await?,
                false => check(io, container, false).await?,
            };
            Ok(found.into_report(container.len()))
        })
    }
}

/// As [`check`] of a dynamic image that is written to: its file is made longer ahead of need, and the footer at its end moves
/// along, so that neither is looked at.
async fn check_growing(io: &Io, container: &Container) -> Result<Report, OpenError> {
    let mut report = Report::default();
    let mut bytes = [0; SECTOR as usize];
    let failed = |error| os(container, "read a VHD's footer from", error);
    container.read(io, 0, &mut bytes).await.map_err(failed)?;
    let footer = match Footer::parse(&bytes) {
        Ok(footer) => footer,
        Err(error) => {
            report.footers.push(told("the copy at byte 0", &error));
            return Ok(report);
        }
    };
    let size = footer.disk_size();
    let sparse = Sparse::read_unchecked(io, container, &footer, size, true).await?;
    // Where the file ends is found out after its table was read, for whose last blocks it may just have been made longer.
    report.look_at(&sparse, &footer, container.len());
    Ok(report)
}

fn told(what: &str, error: &FooterError) -> String {
    format!("{what}: {error}")
}

impl Report {
    fn look_at(&mut self, sparse: &Sparse, footer: &Footer, len: u64) {
        let problems = sparse.problems(footer.header_at, len, MOST).into_iter();
        self.corruptions
            .extend(problems.map(|problem| format!("at {}: {}", problem.at, problem.found)));
        let used = sparse.table.iter().filter(|entry| **entry != UNUSED).count() as u64;
        self.blocks = (used, sparse.table.len() as u64);
    }
}

/// Look an image through; with `repair`, write a footer that is missing from the other one. An error
/// where not even one footer, the header and the table's place can be made out.
pub async fn check(io: &Io, container: &Container, repair: bool) -> Result<Report, OpenError> {
    let mut report = Report::default();
    let footers = Footers::read(io, container).await?;
    let head_error = footers.head.as_ref().err().cloned();
    let tail_error = footers.tail.as_ref().err().cloned();
    let differ = matches!((&footers.head, &footers.tail), (Ok(head), Ok(tail)) if head != tail);
    let (footer, ..) = footers.choose(container)?;
    let (size, len) = (footer.disk_size(), container.len());
    if footer.kind == Kind::Fixed {
        if size > len - SECTOR {
            let told = format!("the file has {len} bytes, too few for a fixed disk of {size}");
            report.corruptions.push(told);
        }
        report.leaked = (len - SECTOR).saturating_sub(size);
        return Ok(report);
    }
    if size == 0 || size > super::MOST {
        let found = format!("the disk has {size} bytes");
        return Err(bad(container, 48, found, "a VHD's disk has up to 2040 GiB"));
    }
    let head = head_error.is_none();
    let sparse = Sparse::read_unchecked(io, container, &footer, size, head).await?;
    report.look_at(&sparse, &footer, len);
    if container.traits().regular {
        report.leaked = len.saturating_sub(sparse.data_end + SECTOR);
    }
    report.footers.extend(head_error.iter().map(|error| told("the copy at byte 0", error)));
    report.footers.extend(tail_error.iter().map(|error| told("the one at the end", error)));
    if differ && report.footers.is_empty() {
        report.footers.push("the one at the end is not as its copy at byte 0".to_owned());
    }
    if repair && report.corruptions.is_empty() {
        let failed = |error| os(container, "write a footer of", error);
        if !head && !asked(Sabotage::CopyLate) {
            container.write(io, 0, footer.bytes()).await.map_err(failed)?;
            container.sync(io).await.map_err(failed)?;
        }
        let misplaced = tail_error.is_some() || differ || report.leaked > 0;
        if misplaced && container.traits().regular {
            end_with_footer(io, container, &footer, sparse.data_end).await.map_err(failed)?;
        } else if misplaced {
            container.write(io, len - SECTOR, footer.bytes()).await.map_err(failed)?;
            container.sync(io).await.map_err(failed)?;
        }
        report.repaired = report.footers.len() + usize::from(report.leaked > 0);
    }
    Ok(report)
}
