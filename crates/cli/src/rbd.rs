//! Images of Ceph: what the verbs do with them and with no other image.

use std::path::Path;

#[cfg(feature = "rbd")]
pub(crate) use ringtap_rbd::snapshots;

/// Have this process open them.
pub(crate) fn start() {
    #[cfg(feature = "rbd")]
    ringtap_rbd::start();
}

/// The name of an image of Ceph.
pub(crate) fn name(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| ringtap_stores::rbd::is_rbd(name))
}

/// What there is of it in a program without.
#[cfg(not(feature = "rbd"))]
pub(crate) mod snapshots {
    const NONE: &str = "this ringtap was built without RBD: build it with --features rbd";

    pub(crate) struct Snapshot {
        pub(crate) id: u64,
        pub(crate) name: String,
        pub(crate) size: u64,
        pub(crate) taken: u64,
    }

    pub(crate) struct Change {
        pub(crate) offset: u64,
        pub(crate) len: u64,
        pub(crate) zero: bool,
    }

    pub(crate) fn list(_: &str) -> Result<Vec<Snapshot>, String> {
        Err(NONE.into())
    }

    pub(crate) fn create(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub(crate) fn delete(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub(crate) fn apply(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub(crate) fn is_snapshot(_: &str) -> bool {
        false
    }

    pub(crate) fn clone(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub(crate) fn size(_: &str) -> Result<u64, String> {
        Err(NONE.into())
    }

    pub(crate) fn changes(_: &str, _: &str) -> Result<Vec<Change>, String> {
        Err(NONE.into())
    }
}
