//! Images of Ceph: what the tools do with them and with no other image.

use std::path::Path;

#[cfg(feature = "rbd")]
pub use ringtap_rbd::snapshots;

/// The name of an image of Ceph.
pub fn name(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| ringtap_stores::rbd::is_rbd(name))
}

/// As [`name`], of a snapshot of one.
pub fn snapshot_name(path: &Path) -> Option<&str> {
    name(path).filter(|name| snapshots::is_snapshot(name))
}

/// What there is of it in a program without.
#[cfg(not(feature = "rbd"))]
#[allow(missing_docs)] // those of `ringtap_rbd`
pub mod snapshots {
    const NONE: &str = "this ringtap was built without RBD: build it with --features rbd";

    pub struct Snapshot {
        pub id: u64,
        pub name: String,
        pub size: u64,
        pub taken: u64,
    }

    pub struct Change {
        pub offset: u64,
        pub len: u64,
        pub zero: bool,
    }

    pub fn list(_: &str) -> Result<Vec<Snapshot>, String> {
        Err(NONE.into())
    }

    pub fn create(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub fn delete(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub fn apply(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub fn is_snapshot(_: &str) -> bool {
        false
    }

    pub fn clone(_: &str, _: &str) -> Result<(), String> {
        Err(NONE.into())
    }

    pub fn size(_: &str) -> Result<u64, String> {
        Err(NONE.into())
    }

    pub fn changes(_: &str, _: &str) -> Result<Vec<Change>, String> {
        Err(NONE.into())
    }
}
