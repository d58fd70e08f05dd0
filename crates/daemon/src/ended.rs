//! Jobs that have ended and wait to be dismissed: another process shows them as this one did, until somebody has read how they
//! have ended.

use ringtap_vbd::Job;

use crate::control::JobType;
use crate::entry::{Entry, State};
use crate::handover::EndedState;
use crate::ledger::Entered;
use crate::running::Running;

impl Running {
    /// Those that there are.
    pub(crate) fn ended_jobs(&self) -> Vec<EndedState> {
        let ended = self.jobs.iter().filter(|(_, entry)| entry.has_ended());
        let state = |(id, entry): (&String, &Entry)| {
            let progress = entry.job.progress();
            EndedState {
                id: id.clone(),
                kind: entry.kind.word().to_owned(),
                error: entry.error(),
                offset: progress.offset,
                total: progress.total,
                speed: entry.speed,
                pends: entry.pends,
                pause: progress.stillness,
            }
        };
        ended.map(state).collect()
    }

    /// The server before this one has those.
    pub(crate) fn ended_jobs_come(&mut self, all: &[EndedState]) -> Result<(), String> {
        for ended in all {
            let EndedState { id, kind, error, offset, total, speed, pends, pause } = ended;
            let kind = JobType::of(kind)
                .ok_or_else(|| format!("its state has the job {id}, which is a {kind}"))?;
            let (job, state) = (Job::new(), State::default());
            job.set_rate(Some(*speed).filter(|speed| *speed > 0));
            job.has_ended(error.is_none(), (*offset, *total), *pause);
            state.with(|known| {
                known.concluded = true;
                known.error.clone_from(error);
            });
            let entry = Entry {
                kind,
                job,
                speed: *speed,
                stays: true,
                pends: *pends,
                waits: false,
                copies: false,
                cancelled: false,
                entered: Entered::default(),
                disks: vec![],
                state,
            };
            self.jobs.insert(id.clone(), entry);
        }
        Ok(())
    }
}
