//! Jobs that end for the next server to go on with: what of them does not stand in the ledger. Where no other process takes
//! over the same server goes on with them, by the same.

use ringtap_vbd::{Backup, IoStatus, Job, Moment, Unfinished, Wishes};

use crate::control::JobType;
use crate::entry::Entry;
use crate::handover::{CopyState, JobState, SaveState};
use crate::ids::DiskId;
use crate::moment::shown;
use crate::passed::{Left, Passing};
use crate::running::Running;

impl JobType {
    /// Whether a job of this kind goes on only where it was left: begun anew it would be another one.
    pub(crate) fn leaves_some(self) -> bool {
        matches!(self, JobType::Mirror | JobType::Backup)
    }
}

const PAUSED: [(&str, IoStatus); 3] =
    [("ok", IoStatus::Ok), ("failed", IoStatus::Failed), ("no-space", IoStatus::NoSpace)];

impl Passing {
    pub(crate) fn of(entry: &Entry) -> Passing {
        let mut wishes = entry.job.wishes(entry.pends);
        // Those that do not wait for `job-complete` were not told to complete.
        wishes.completes &= entry.waits;
        let (meets_errors, has_checkpoint) =
            (entry.entered.meets_errors(), entry.entered.has_checkpoint());
        let disks = entry.disks.clone();
        Passing { disks, wishes, meets_errors, has_checkpoint, dealt_with: 0, left: None }
    }

    /// What the next server is told, where the ledger does not say it all.
    fn state(&self, id: &str, nodes: [String; 2]) -> Option<JobState> {
        if self.left.is_none() && self.wishes == Wishes::default() {
            return None;
        }
        let word = |status: IoStatus| PAUSED.iter().find(|(_, of)| *of == status);
        let paused = self.wishes.paused.and_then(word).map(|(word, _)| (*word).to_owned());
        let Wishes { completes, leaves, finalized, .. } = self.wishes;
        let (mut copied, mut saved, [disk, target]) = (None, None, nodes);
        match &self.left {
            Some(Left::Copy(left)) => copied = Some(CopyState::of(left.left())),
            Some(Left::Save(moment)) => saved = Some(SaveState::of(target, moment.left())),
            None => {}
        }
        let id = id.to_owned();
        Some(JobState { id, disk, paused, completes, leaves, finalized, copied, saved })
    }
}

impl Running {
    /// What another process could not be told: what of moments lies in scratch, for their targets do not take it.
    pub(crate) fn scratch_is_empty(&self) -> Result<(), String> {
        for (id, passing) in &self.pending.passing {
            let Some(Left::Save(moment)) = &passing.left else { continue };
            let bytes = moment.set_aside();
            if bytes > 0 {
                return Err(format!(
                    "the target of the job {id} does not take what guests have changed since its moment ({bytes} bytes in \
                     scratch): see to the target, or cancel the job"
                ));
            }
        }
        Ok(())
    }

    /// Whether a backup that keeps the moment which a disk shows has ended for the next server to go on with; or does so, where
    /// jobs are about to end.
    pub(crate) fn moment_is_passed_on(&self, disk: DiskId, jobs_end: bool) -> bool {
        let is_moment = |one: &&Passing| matches!(one.left, Some(Left::Save(_)));
        jobs_end && self.at_work().any(|(_, job)| job.disks.contains(&disk))
            || self.pending.passing.values().filter(is_moment).any(|one| one.disks.contains(&disk))
    }

    /// Moments that are passed on are read no more: all who do have ended.
    pub(crate) fn moments_rest(&self) {
        for passing in self.pending.passing.values() {
            if let Some(Left::Save(moment)) = &passing.left {
                moment.rest();
            }
        }
    }

    /// Jobs of which the next server has to know more than what stands in the ledger.
    pub(crate) fn jobs_passed(&self) -> Vec<JobState> {
        let state = |(id, passing): (&String, &Passing)| {
            let served = |at: usize| passing.disks.get(at).and_then(|disk| self.disks.get(disk));
            let node = |at: usize| served(at).map(|one| one.node().to_owned()).unwrap_or_default();
            let mut state = passing.state(id, [node(0), node(1)])?;
            if let Some(shown) = served(1).and_then(|served| served.moment.as_ref()) {
                state.saved = state.saved.map(|saved| saved.showing(shown.shown_marks()));
            }
            Some(state)
        };
        self.pending.passing.iter().filter_map(state).collect()
    }

    /// Those that an older program would begin again without what is to become of errors.
    pub(crate) fn jobs_that_meet_errors(&self) -> Vec<String> {
        let all = self.pending.passing.iter().filter(|(_, passing)| passing.meets_errors);
        all.map(|(id, _)| id.clone()).collect()
    }

    /// Those that an older program would know no checkpoint of.
    pub(crate) fn jobs_with_checkpoints(&self) -> Vec<String> {
        let all = self.pending.passing.iter().filter(|(_, passing)| passing.has_checkpoint);
        all.map(|(id, _)| id.clone()).collect()
    }

    /// A job that the server before this one had. From now on what changes of its disk is noted, which nobody is served yet.
    pub(crate) fn job_comes(&mut self, state: JobState) -> Result<(), String> {
        let JobState { id, disk, paused, completes, leaves, finalized, copied, saved } = state;
        let found = |node: &str| {
            let found = self.disks.iter().find(|(_, served)| served.node() == node);
            found.ok_or_else(|| format!("its state has no disk {node} for the job {id}"))
        };
        let wrong = || format!("what is left of the job {id} cannot be read");
        let (number, served) = found(&disk)?;
        let (mut disks, mut shows) = (vec![*number], None);
        let left = match (copied, saved) {
            (Some(copied), _) => {
                let left = copied.left().ok_or_else(wrong)?;
                Some(Left::Copy(Unfinished::of(&served.vbd, &left)))
            }
            (None, Some(saved)) => {
                let (number, to) = found(&saved.target)?;
                disks.push(*number);
                let left = saved.left().ok_or_else(wrong)?;
                let backup = Backup::new(served.vbd.clone(), to.vbd.clone());
                let moment = backup.go_on(&left);
                let moment = moment.map_err(|error| format!("the job {id}: {error}"))?;
                let marks = saved.shown().ok_or_else(wrong)?;
                shows = marks.map(|marks| (*number, shown(&moment, &marks)));
                Some(Left::Save(moment))
            }
            (None, None) => None,
        };
        let status = |word: String| {
            let known = PAUSED.iter().find(|(of, _)| *of == word);
            // It was not asked for, whatever it was.
            known.map_or(IoStatus::Failed, |(_, status)| *status)
        };
        let wishes = Wishes { paused: paused.map(status), completes, leaves, finalized };
        let (meets_errors, has_checkpoint, dealt_with) = (false, false, 0);
        let passing = Passing { disks, wishes, meets_errors, has_checkpoint, dealt_with, left };
        self.pending.passing.insert(id, passing);
        if let Some((target, moment)) = shows {
            // Before anybody is shown it.
            self.disks.get_mut(&target).into_iter().for_each(|to| to.moment = Some(moment.clone()));
        }
        Ok(())
    }

    /// Whether it is known where a job is to go on that is being begun.
    pub(crate) fn goes_on_where_left(&self, id: &str) -> bool {
        let passing = self.pending.passing.get(id);
        self.pending.resuming.as_deref() == Some(id)
            && passing.is_some_and(|one| one.left.is_some())
    }

    /// The moment that a backup is to go on with that is being begun.
    pub(crate) fn moment_left(&mut self, id: &str) -> Option<Moment> {
        if !self.goes_on_where_left(id) {
            return None;
        }
        let passing = self.pending.passing.get_mut(id)?;
        match passing.left.take() {
            Some(Left::Save(moment)) => {
                passing.dealt_with = moment.dealt_with();
                Some(moment)
            }
            left => {
                passing.left = left;
                None
            }
        }
    }

    /// Have a job begin where the one before it was left, if there was one; why it pauses, where it does.
    pub(crate) fn begins_where_left(&mut self, id: &str, job: &Job) -> Option<IoStatus> {
        if self.pending.resuming.as_deref() != Some(id) {
            return None;
        }
        let Passing { wishes, dealt_with, left, .. } = self.pending.passing.remove(id)?;
        job.has_dealt_with(dealt_with);
        job.wish(wishes);
        if let Some(Left::Copy(left)) = left {
            job.go_on_from(left);
        }
        wishes.paused
    }
}
