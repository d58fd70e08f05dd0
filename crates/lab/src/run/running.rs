//! An arm while it runs.

use crate::backend::Entry;
use crate::workload::Workload;

/// An arm that runs: a backend under a name.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its name in samples.
    pub name: String,
    /// The backend.
    pub entry: &'static Entry,
    /// The workloads that fit it.
    pub workloads: Vec<&'static dyn Workload>,
}

impl Running {
    /// The workloads of each round; the durability check is made once, before.
    pub fn rounds(&self) -> impl Iterator<Item = &'static dyn Workload> + '_ {
        self.workloads.iter().copied().filter(|workload| !workload.is_check())
    }

    /// Whether it gets a rated load, whose rate depends on what all carry.
    pub fn is_rated(&self) -> bool {
        self.workloads.iter().any(|workload| workload.is_rated())
    }
}
