//! What becomes of a job that cannot read or write what it has to.

use ringtap_image::Error;
use serde::Serialize;

/// What is done about an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The job fails.
    #[default]
    Report,
    /// It goes on, and fails at the end.
    Ignore,
    /// It pauses, and tries again when it is resumed.
    Stop,
    /// That where there is no space left, else it fails.
    StopWhereFull,
}

/// What is done about errors of a job that copies one disk to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnErrors {
    /// In reading what is copied. One that is ignored is tried again for as long as it is there.
    pub source: OnError,
    /// In writing the copy. One that is ignored is tried again, too.
    pub target: OnError,
}

/// What was done about one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The job fails.
    Report,
    /// It goes on.
    Ignore,
    /// It pauses.
    Stop,
}

/// What keeps a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoStatus {
    /// Nothing.
    #[default]
    Ok,
    /// An error.
    Failed,
    /// There is no space left.
    NoSpace,
}

/// An error that a job has met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Whether it was in writing.
    pub write: bool,
    /// What it was.
    pub error: Error,
    /// What is done about it.
    pub action: Action,
}

impl OnError {
    /// What is done about an error.
    pub(crate) fn action(self, error: Error) -> Action {
        match self {
            OnError::Ignore => Action::Ignore,
            OnError::Stop => Action::Stop,
            OnError::StopWhereFull if error == Error::Full => Action::Stop,
            OnError::Report | OnError::StopWhereFull => Action::Report,
        }
    }
}

impl Trouble {
    /// What it does to the job.
    pub(crate) fn io_status(&self) -> IoStatus {
        if self.error == Error::Full { IoStatus::NoSpace } else { IoStatus::Failed }
    }
}
