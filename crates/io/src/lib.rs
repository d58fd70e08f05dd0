//! Operations as data, the reactor that carries them out, and the loop of tasks that waits for them.
//!
//! A task asks [`Io`] for an operation and awaits it. The [`Tasks`] loop gathers what all tasks
//! asked for and hands the whole list to a [`Reactor`] once per turn. [`Ring`] is the reactor on
//! io_uring, [`Threads`] that of a host where io_uring is forbidden; the simulated disk of `ringtap-sim` is a
//! third, and everything above runs unchanged on all.
#![deny(unsafe_op_in_unsafe_fn)]

mod again;
mod alarm;
mod clock;
mod counts;
mod elsewhere;
mod engine;
mod event;
mod file;
mod handle;
mod inherited;
mod io;
mod kept;
mod locked;
mod mem;
mod op;
mod panic;
mod patience;
mod pool;
pub mod probes;
mod ring;
mod sessions;
mod shared;
mod signal;
mod socket;
pub mod sync;
mod task;
mod threads;
mod waiting;
mod wake;
mod watched;
mod witness;

pub use alarm::Alarm;
pub use counts::Elsewhere;
pub use elsewhere::{Ender, Errand, OpenRemote, Remote};
pub use engine::{Engine, Forbidden, engine, reactor, use_engine};
pub use event::{Event, Listener};
pub use file::{File, Nature, OpenFile};
pub use handle::FileHandle;
pub use inherited::duplicate_fd;
pub use io::{BoxedTransfer, Io, OpFuture, Session, is_all};
pub use kept::{keeping_a_reactor, passing_reactor};
pub use locked::{Locked, LockedBytes};
pub use mem::{Mem, Piece};
pub use op::{Holds, Key, Op, Reactor, Time};
pub use panic::Panic;
pub use pool::{Buffer, PAGE};
pub use ring::{Ring, restricted, rings_to_be_given};
pub use shared::SharedWords;
pub use signal::Signal;
pub use socket::{Part, receive_now, send_now};
pub use task::Tasks;
pub use threads::Threads;
pub use witness::{Lent, Testimony, Wall, Watch, Witness, Words, coarse_wall, wall};
