//! Looking a VHD through, and mending its footers.

use ringtap_io::Io;

use super::footer::{FooterError, Kind, SECTOR};
use super::header::UNUSED;
use super::layout::{Footers, Sparse};
use super::sabotage::{Sabotage, asked};
use super::{bad, end_with_footer, os};
use crate::{Container, OpenError};

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
    let problems = sparse.problems(footer.header_at, len, MOST);
    let told = problems.into_iter().map(|problem| format!("at {}: {}", problem.at, problem.found));
    report.corruptions.extend(told);
    let used = sparse.table.iter().filter(|entry| **entry != UNUSED).count() as u64;
    report.blocks = (used, sparse.table.len() as u64);
    if container.traits().regular {
        report.leaked = len.saturating_sub(sparse.data_end + SECTOR);
    }
    let told = |what: &str, error: &FooterError| format!("{what}: {error}");
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
