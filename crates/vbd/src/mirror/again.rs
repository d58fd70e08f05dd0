//! What could not be copied, tried again where that is wanted.

use ringtap_image::Error;
use ringtap_io::Io;

use super::error::MirrorError;
use super::target::Target;
use crate::job::{Job, Pace};
use crate::trouble::{Action, OnErrors, Trouble};

impl Target {
    /// Why it could not be made stable, by the error with which flushes began to fail, where they end well again once all that may
    /// be lost is written anew.
    pub(crate) fn known(&self, why: MirrorError) -> MirrorError {
        match why {
            MirrorError::Flush { error: Error::Lost } => {
                let by = self.disk.image().ok().and_then(|image| image.lost_by());
                MirrorError::Flush { error: by.unwrap_or(Error::Lost) }
            }
            other => other,
        }
    }

    /// Whoever has taken what may be lost writes it again, from now on.
    pub(crate) fn is_written_anew(&self) {
        if let Ok(image) = self.disk.image() {
            image.is_written_anew();
        }
    }
}

impl OnErrors {
    /// What is done about that; none where it is the end in any case.
    pub(crate) fn action(&self, why: &MirrorError) -> Option<(Trouble, Action)> {
        let (write, error) = why.of_request()?;
        let on = if write { self.target } else { self.source };
        // No flush of such an image is believed again, for its tables may be lost, too: it would be copied for ever.
        let action = if error == Error::Lost { Action::Report } else { on.action(error) };
        Some((Trouble { write, error, action }, action))
    }

    /// Whether it is tried again.
    pub(crate) fn try_again(&self, why: &MirrorError) -> bool {
        self.action(why).is_some_and(|(_, action)| action != Action::Report)
    }
}

/// Something that a job tries.
pub(crate) struct Attempt<'a> {
    job: &'a Job,
    target: &'a Target,
    on: OnErrors,
    /// How often the job had been resumed when it began.
    resumed: u64,
}

impl<'a> Attempt<'a> {
    pub(crate) fn begin(job: &'a Job, target: &'a Target, on: OnErrors) -> Attempt<'a> {
        Attempt { job, target, on, resumed: job.resumed() }
    }

    /// It has failed: have that heard.
    ///
    /// # Errors
    /// That error, where it is the end.
    pub(crate) fn meets(self, why: MirrorError) -> Result<(), MirrorError> {
        let Attempt { job, target, on, resumed } = self;
        // Who asks a target that has failed is told nothing more.
        let Some((trouble, action)) = on.action(&why).filter(|_| !target.has_failed()) else {
            return Err(why);
        };
        // One that stops the job tells of it for all that meet the same.
        let is_told = job.progress().paused || job.resumed() != resumed;
        if action != Action::Stop || !is_told {
            job.meets(trouble);
        }
        match action {
            Action::Report => Err(why),
            Action::Ignore | Action::Stop => Ok(()),
        }
    }

    /// The same; wait until it is to be tried again.
    ///
    /// # Errors
    /// That error, where it is the end; the job was cancelled.
    pub(crate) async fn failed(
        self,
        io: &Io,
        pace: &Pace,
        why: MirrorError,
    ) -> Result<(), MirrorError> {
        self.meets(why)?;
        Ok(pace.nap(io).await?)
    }
}
