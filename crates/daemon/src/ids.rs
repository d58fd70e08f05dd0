//! What disks and servers that run are known by.

/// A disk that is running, as long as it is; no other is known by it afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DiskId(pub(crate) u64);

#[cfg(test)]
impl DiskId {
    pub(crate) fn of_test(number: u64) -> DiskId {
        DiskId(number)
    }
}

/// A server that is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ServerId(pub(crate) u64);

#[cfg(test)]
impl ServerId {
    pub(crate) fn of_test(number: u64) -> ServerId {
        ServerId(number)
    }
}
