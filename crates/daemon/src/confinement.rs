//! Whether a server is to be confined.

use std::path::PathBuf;

use ringtap_sandbox::User;

/// Whether a server is confined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sandbox {
    /// It is not.
    #[default]
    Off,
    /// It is.
    On {
        /// Files and folders of disks that come later, and stores that they lie in; no file: anywhere but in the system's own
        /// folders.
        allow: Vec<PathBuf>,
        /// Whether it serves nothing where this kernel lacks a wall. Else it does without, and without any where its
        /// transport needs what they forbid.
        must: bool,
        /// Whom it becomes, where root starts it: its broker stays root. None: whoever starts it.
        user: Option<User>,
    },
}
