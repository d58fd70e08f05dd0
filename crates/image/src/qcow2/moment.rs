//! An image's tables as they were at the end of a flush, for a check while the image is served.
//!
//! Only flushes change tables that are in use, so what a flush is about to write over is read and kept first, in pages, once for
//! each; who looks at a moment reads the file, and then takes what was kept. Clusters of tables that are freed meanwhile are not
//! used again before the moment is gone. Requests are not held up by any of that, only flushes by what they keep.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_io::Io;

use super::together::together;
use super::{Header, Sabotage, Shared, State, ToolError};
use crate::{Container, Error};

/// The most bytes that are kept.
const MOST: usize = 64 << 20;
/// What is kept at once.
const PAGE: u64 = 4096;
/// The most that is read at once to be kept.
const LARGEST_READ: u64 = 1 << 20;

/// What the tables were.
pub(super) struct Moment {
    pub(super) header: Header,
    /// Bytes of the file.
    pub(super) len: u64,
    /// Clusters that the tables do not refer to any more and that are still counted, one for each reference.
    pub(super) retired: Vec<u64>,
    most: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Pages that were written over since, by number, as they were.
    pages: BTreeMap<u64, Vec<u8>>,
    /// Why it cannot be told any more what they were.
    lost: Option<String>,
}

impl Moment {
    pub(super) fn new(header: Header, len: u64, retired: Vec<u64>, most: usize) -> Moment {
        Moment { header, len, retired, most, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lose(&self, why: impl Into<String>) {
        let mut kept = self.kept();
        kept.lost.get_or_insert(why.into());
        kept.pages.clear();
    }

    /// Why what was read may be of another moment, if it may.
    pub(super) fn lost(&self) -> Option<String> {
        self.kept().lost.clone()
    }

    /// Have bytes that were read from the file be what they were then.
    pub(super) fn put_back(&self, offset: u64, bytes: &mut [u8]) -> Result<(), String> {
        let kept = self.kept();
        if let Some(why) = &kept.lost {
            return Err(why.clone());
        }
        let end = offset + bytes.len() as u64;
        for (number, page) in kept.pages.range(offset / PAGE..end.div_ceil(PAGE)) {
            let at = number * PAGE;
            let (from, to) = (at.max(offset), (at + PAGE).min(end));
            let part = bytes.get_mut((from - offset) as usize..(to - offset) as usize);
            let old = page.get((from - at) as usize..(to - at) as usize);
            if let (Some(part), Some(old)) = (part, old) {
                part.copy_from_slice(old);
            }
        }
        Ok(())
    }

    /// Keep what lies at these places of the file, which are about to be written to. Where that cannot be, the moment is lost.
    pub(super) async fn keep(
        &self,
        io: &Io,
        container: &Container,
        places: impl IntoIterator<Item = Range<u64>>,
    ) {
        let pages: BTreeSet<u64> = {
            let kept = self.kept();
            if kept.lost.is_some() {
                return;
            }
            let pages = places.into_iter().flat_map(|at| at.start / PAGE..at.end.div_ceil(PAGE));
            let old = pages.filter(|page| page * PAGE < self.len);
            let new: BTreeSet<u64> = old.filter(|page| !kept.pages.contains_key(page)).collect();
            if (kept.pages.len() + new.len()) * PAGE as usize <= self.most {
                new
            } else {
                drop(kept);
                let most = self.most >> 20;
                return self.lose(format!(
                    "more of its tables was changed meanwhile than is kept, {most} MiB: check it when less is written to it"
                ));
            }
        };
        let reads = runs(&pages).map(|run| self.keep_run(io, container, run));
        if let Err(error) = together(reads).await {
            self.lose(format!("its tables cannot be read: {error}"));
        }
    }

    async fn keep_run(&self, io: &Io, container: &Container, run: Range<u64>) -> Result<(), Error> {
        let mut bytes = vec![0; ((run.end - run.start) * PAGE) as usize];
        container.read(io, run.start * PAGE, &mut bytes).await?;
        let mut kept = self.kept();
        if kept.lost.is_none() {
            let pages = run.zip(bytes.chunks(PAGE as usize).map(<[u8]>::to_vec));
            kept.pages.extend(pages);
        }
        Ok(())
    }
}

/// Numbers that follow one another, in runs that are read at once.
fn runs(pages: &BTreeSet<u64>) -> impl Iterator<Item = Range<u64>> + use<'_> {
    let mut pages = pages.iter().copied().peekable();
    std::iter::from_fn(move || {
        let first = pages.next()?;
        let mut end = first + 1;
        while end - first < LARGEST_READ / PAGE && pages.next_if_eq(&end).is_some() {
            end += 1;
        }
        Some(first..end)
    })
}

impl State {
    /// What a check looks at, where there is one.
    pub(super) fn moment(&self) -> Option<Arc<Moment>> {
        self.moment.upgrade()
    }

    /// Of clusters that are free now, those that a moment's tables lie in are to stay as they are; with no moment, so are
    /// those no longer that had to.
    pub(super) fn hold_tables(&mut self, freed: &mut Vec<u64>, moment: Option<&Arc<Moment>>) {
        if moment.is_none() {
            return freed.append(&mut self.held);
        }
        let (tables, rest) =
            std::mem::take(freed).into_iter().partition(|cluster| self.may_be_structure(*cluster));
        *freed = rest;
        self.held.append(&mut { tables });
    }
}

impl Shared {
    /// Make the tables stable, and keep what they are then.
    pub(super) async fn moment(&self, io: &Io) -> Result<Arc<Moment>, ToolError> {
        let path = || self.container.path().to_owned();
        let (end, _last) = self.flush_and_stay(io).await;
        match end {
            // What contradicts itself is what is looked for, and takes no more writes.
            Ok(()) | Err(Error::Corrupt) => {}
            Err(source) => {
                return Err(ToolError::Io {
                    what: "write the tables of",
                    path: path(),
                    offset: 0,
                    source,
                });
            }
        }
        let header = Header::read(io, &self.container).await?;
        let mut state = self.state();
        if state.moment().is_some() {
            return Err(ToolError::Refused {
                path: path(),
                why: "it is being checked already".into(),
            });
        }
        let known = state.retired.iter().filter(|_| !self.does(Sabotage::MomentMiscounted));
        let retired = known.map(|released| released.cluster).collect();
        let moment = Arc::new(Moment::new(header, self.container.len(), retired, MOST));
        state.moment = Arc::downgrade(&moment);
        Ok(moment)
    }
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use ringtap_io::Tasks;
    use ringtap_sim::{Disk, Sim};

    use super::*;
    use crate::Traits;
    use crate::qcow2::{CreateOptions, create};

    const LEN: u64 = 10 * PAGE;

    /// A file of bytes that each are the number of their page.
    async fn file(io: &Io, disk: &Disk) -> Container {
        let container = Container::simulated(disk.add_file(LEN, 1), LEN, Traits::FILE);
        for page in 0..LEN / PAGE {
            let bytes = [page as u8; PAGE as usize];
            container.write(io, page * PAGE, &bytes).await.expect("written");
        }
        container
    }

    async fn header(io: &Io, disk: &Disk) -> Header {
        let container = Container::simulated(disk.add_file(0, 1), 0, Traits::FILE);
        let options = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        create(io, &container, None, &options).await.expect("an image");
        Header::read(io, &container).await.expect("its header")
    }

    #[test]
    fn what_was_written_over_reads_as_it_was() {
        let disk = Disk::new(512);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1)));
        let io = tasks.io().clone();
        let end = tasks.block_on(async move {
            let container = file(&io, &disk).await;
            let moment = Moment::new(header(&io, &disk).await, LEN, vec![], 4 * PAGE as usize);
            let at = PAGE + 100..3 * PAGE + 1;
            moment.keep(&io, &container, [at.clone(), LEN..LEN + PAGE]).await;
            let new = vec![0xee; (at.end - at.start) as usize];
            container.write(&io, at.start, &new).await.expect("written");
            // Kept once: what is there now is not what was.
            moment.keep(&io, &container, [at.clone()]).await;
            let mut found = vec![0; (4 * PAGE) as usize];
            container.read(&io, 50, &mut found).await.expect("read");
            assert!(found.contains(&0xee));
            moment.put_back(50, &mut found).expect("it is known");
            let was = (50..).map(|offset: u64| (offset / PAGE) as u8);
            assert!(was.zip(&found).all(|(was, found)| was == *found));
            // Three pages are kept, and there is room for one more.
            moment.keep(&io, &container, once(5 * PAGE..6 * PAGE)).await;
            assert_eq!(moment.lost(), None);
            moment.keep(&io, &container, once(7 * PAGE..7 * PAGE + 1)).await;
            let why = moment.put_back(0, &mut found).expect_err("too much");
            assert!(why.contains("more of its tables was changed"), "{why}");
        });
        end.expect("the simulation runs");
    }

    #[test]
    fn clusters_of_tables_stay_as_they_are_while_a_moment_is_looked_at() {
        let disk = Disk::new(512);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1)));
        let io = tasks.io().clone();
        let end = tasks.block_on(async move {
            let moment = Arc::new(Moment::new(header(&io, &disk).await, LEN, vec![], 0));
            let mut state = State::new();
            state.add_structure(5);
            let mut freed = vec![4, 5, 6];
            state.hold_tables(&mut freed, Some(&moment));
            assert_eq!((freed, &*state.held), (vec![4, 6], &[5][..]));
            let mut freed = vec![7];
            state.hold_tables(&mut freed, None);
            assert_eq!((freed, state.held.len()), (vec![7, 5], 0));
        });
        end.expect("the simulation runs");
    }

    #[test]
    fn pages_are_read_in_runs() {
        let pages: BTreeSet<u64> = (0..300).chain([400, 402, 403]).collect();
        let all: Vec<_> = runs(&pages).collect();
        assert_eq!(all, [0..256, 256..300, 400..401, 402..404]);
    }
}
