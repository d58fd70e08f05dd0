//! Jobs that end for the next server to go on with: what of them does not stand in the ledger. Where no other process takes
//! over the same server goes on with them, by the same.

use ringtap_vbd::{IoStatus, Job, LeftToCopy, Unfinished, Wishes};

use crate::control::JobType;
use crate::handover::{CopyState, JobState, PageState};
use crate::jobs::Entry;
use crate::running::{DiskId, Running};

/// A job that has ended, or is about to.
pub(crate) struct Passing {
    /// The disk that it is at work on.
    disk: Option<DiskId>,
    wishes: Wishes,
    /// Where it is to go on, if not at its beginning.
    pub(crate) left: Option<Unfinished>,
}

impl JobType {
    /// Whether a job of this kind goes on only where it was left: begun anew it would be another one.
    pub(crate) fn leaves_some(self) -> bool {
        matches!(self, JobType::Mirror)
    }
}

const PAUSED: [(&str, IoStatus); 3] =
    [("ok", IoStatus::Ok), ("failed", IoStatus::Failed), ("no-space", IoStatus::NoSpace)];

impl Passing {
    pub(crate) fn of(entry: &Entry) -> Passing {
        let mut wishes = entry.job.wishes(entry.pends);
        // Those that do not wait for `job-complete` were not told to complete.
        wishes.completes &= entry.waits;
        Passing { disk: entry.disks.first().copied(), wishes, left: None }
    }

    /// What the next server is told, where the ledger does not say it all.
    fn state(&self, id: &str, node: &str) -> Option<JobState> {
        if self.left.is_none() && self.wishes == Wishes::default() {
            return None;
        }
        let word = |status: IoStatus| PAUSED.iter().find(|(_, of)| *of == status);
        let paused = self.wishes.paused.and_then(word).map(|(word, _)| (*word).to_owned());
        let Wishes { completes, leaves, finalized, .. } = self.wishes;
        let copied = self.left.as_ref().map(|left| {
            let LeftToCopy { granularity, from, size, was_ready, is_pending, offset, marks } =
                left.left();
            let page = |(number, words): (u64, Vec<u64>)| PageState::new(number, &words);
            let marks = marks.into_iter().map(page).collect();
            CopyState { granularity, from, size, was_ready, is_pending, offset, marks }
        });
        let (id, disk) = (id.to_owned(), node.to_owned());
        Some(JobState { id, disk, paused, completes, leaves, finalized, copied })
    }
}

impl Running {
    /// Jobs of which the next server has to know more than what stands in the ledger.
    pub(crate) fn jobs_passed(&self) -> Vec<JobState> {
        let state = |(id, passing): (&String, &Passing)| {
            let node = passing.disk.and_then(|disk| Some(self.disks.get(&disk)?.node()));
            passing.state(id, node.unwrap_or_default())
        };
        self.pending.passing.iter().filter_map(state).collect()
    }

    /// A job that the server before this one had. From now on what changes of its disk is noted, which nobody is served yet.
    pub(crate) fn job_comes(&mut self, state: JobState) -> Result<(), String> {
        let JobState { id, disk, paused, completes, leaves, finalized, copied } = state;
        let found = self.disks.iter().find(|(_, served)| served.node() == disk);
        let (number, served) =
            found.ok_or_else(|| format!("its state has no disk {disk} for the job {id}"))?;
        let left = copied.map(|copied| -> Option<Unfinished> {
            let CopyState { granularity, from, size, was_ready, is_pending, offset, marks } =
                copied;
            let marks = marks.iter().map(PageState::words).collect::<Option<Vec<_>>>()?;
            let left = LeftToCopy { granularity, from, size, was_ready, is_pending, offset, marks };
            Some(Unfinished::of(&served.vbd, &left))
        });
        let left = match left {
            Some(None) => return Err(format!("what is left of the job {id} cannot be read")),
            left => left.flatten(),
        };
        let status = |word: String| {
            let known = PAUSED.iter().find(|(of, _)| *of == word);
            // It was not asked for, whatever it was.
            known.map_or(IoStatus::Failed, |(_, status)| *status)
        };
        let wishes = Wishes { paused: paused.map(status), completes, leaves, finalized };
        self.pending.passing.insert(id, Passing { disk: Some(*number), wishes, left });
        Ok(())
    }

    /// Whether it is known where a job is to go on that is being begun.
    pub(crate) fn goes_on_where_left(&self, id: &str) -> bool {
        let passing = self.pending.passing.get(id);
        self.pending.resuming.as_deref() == Some(id)
            && passing.is_some_and(|one| one.left.is_some())
    }

    /// Have a job begin where the one before it was left, if there was one; whether it pauses.
    pub(crate) fn begins_where_left(&mut self, id: &str, job: &Job) -> bool {
        if self.pending.resuming.as_deref() != Some(id) {
            return false;
        }
        let Some(Passing { wishes, left, .. }) = self.pending.passing.remove(id) else {
            return false;
        };
        job.wish(wishes);
        left.into_iter().for_each(|left| job.go_on_from(left));
        wishes.paused.is_some()
    }
}
