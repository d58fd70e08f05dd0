//! Live upgrade: a server hands all it has to another process, and no client sees more than a pause.
//!
//! The server starts the next (`giving`), and passes its state (`state`): disks, groups, sockets that listen. The next
//! prepares all that while guests go on (`taking`): it opens each image only to look at it, without a lock, so that what it
//! holds is in memory. Then the server sees that all storage answers (`storage`), stops taking requests, ends those in
//! flight (`still`), closes its images (`closing`), and passes the connections. The next opens the images, and says that it has
//! all: that is the commit point. Before it any failure has this server kill the next, open its images again and go on; after it this process ends and touches
//! nothing more.

mod bitmaps;
mod channel;
mod closing;
mod come;
mod giving;
mod left;
mod names;
mod nbd_comes;
mod state;
mod still;
mod storage;
mod taking;
#[doc(hidden)]
pub mod testing;
mod waited_for;

pub(crate) use channel::CHANNEL;
pub(crate) use come::{
    control_clients, device, front_end, inherited, inherited_at, leaves_all, modified, mount, note,
    sessions, told_to_end,
};
pub(crate) use giving::{Wish, begin, note_program, tell_asker};
pub(crate) use nbd_comes::NbdComes;
pub(crate) use state::{CopyState, EndedState, JobState, SaveState};
pub use taking::takes_over;
pub(crate) use taking::{Taking, left_out};
pub(crate) use waited_for::Closing;
