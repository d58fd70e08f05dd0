//! Images of Ceph (RBD): read and written by librbd, which is loaded when the first of them is wanted.
//!
//! `ffi` has all that is unsafe: the functions of librados and librbd, connections, images, and requests in flight. An
//! image has one handle, used by all threads (`image`): each has a session (`session`) whose operations become librbd's
//! requests, and a callback on one of librbd's threads tells the task's own thread of the end. Reads go straight to where
//! they belong; of what is written librbd is given a copy, for it computes checksums of it and may send it twice. What
//! librbd has no asynchronous call for (what a range holds, another length) a thread of the image does (`helper`); one thread of
//! the process, which waits for no cluster, looks for how long requests wait (`watch`). What opens and closes images (`open`) has a thread with
//! more stack than a server's (`roomy`). One who writes has the exclusive lock first (`lock`), and keeps it.
//!
//! Source: librbd.h and librados.h of Ceph 16.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod ffi;
mod helper;
mod holds;
mod image;
mod lock;
mod name;
mod open;
mod pools;
mod roomy;
mod session;
pub mod snapshots;
mod task;
mod waits;
mod watch;

pub use name::Name;
use roomy::tried;

/// From now on this process opens images of Ceph by their names. The first who says so decides.
pub fn start() {
    ringtap_stores::rbd::open_by(ringtap_stores::rbd::Driver {
        load: || tried(|| ffi::api().map(drop)),
        open: |name, options| tried(|| open::open(&Name::parse(name)?, options)),
        make: |name, len| tried(|| image::make(&Name::parse(name)?, len)),
        remove: |name| tried(|| image::remove(&Name::parse(name)?)),
        files: |name| {
            let own = Name::parse(name).map_or(vec![], |name| name.files());
            [name::usual_files(), own].concat()
        },
    });
}
