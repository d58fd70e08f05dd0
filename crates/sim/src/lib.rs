//! A simulated disk: volatile cache, any completion order, torn sectors, errors, power cuts; all
//! from a seed.
//!
//! [`Sim`] is a [`ringtap_io::Reactor`] on a [`Disk`]. A disk keeps for each sector the stable bytes
//! and every version written since; [`Disk::after_power_cut`] chooses among them. [`Model`] watches
//! a virtual disk from the guest's side and says what each of its sectors may hold. A [`RemoteDisk`] is
//! on another host, and reached as a store is.
//!
//! A test of power cuts has [`queues`] of a disk, puts a [`Guest`] on them ([`Guest::spawn_on`]), turns them ([`turn_all`],
//! [`hear_of_cut`]), opens what is left ([`alone`], [`read_all`]), and asks the guest whether that may be
//! ([`Guest::after_power_cut`], after a kill [`Guest::may_find`]).
//!
//! To try a power cut at every turn of a run, either let it run and look at what a cut would leave
//! with [`Sim::at_every_turn`], or let the power go with [`Disk::cut_power_at_turn`]:
//!
//! ```
//! use ringtap_io::Tasks;
//! use ringtap_sim::{Disk, Sim, is_power_cut};
//!
//! let disk = Disk::new(512);
//! let file = disk.add_file(4096, 1);
//! disk.cut_power_at_turn(2);
//! let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 7)));
//! let io = tasks.io().clone();
//! tasks.spawn(async move {
//!     let mut buffer = io.buffer(4096).unwrap();
//!     buffer.bytes_mut().fill(1);
//!     while io.write(file, 0, buffer.mem(), false).await.is_ok() {}
//! });
//! assert!(is_power_cut(&tasks.run().unwrap_err()));
//! drop(tasks);
//! let mut sector = [0; 512];
//! disk.after_power_cut(1).peek(file, 512, &mut sector);
//! assert!(sector == [0; 512] || sector == [1; 512]);
//! ```
#![forbid(unsafe_code)]

mod begin;
mod disk;
mod guest;
mod history;
mod medium;
mod model;
mod pipe;
mod queues;
mod reactor;
mod remote;
mod seeds;
mod stamp;
#[cfg(feature = "shuttle")]
pub mod threads;
mod versions;
mod watched;

pub use disk::{Disk, Fault, Refuses};
pub use guest::{Ask, Device, Failure, Guest, Promise, Wrong, random_asks};
pub use history::{Token, Violation};
pub use medium::Lacks;
pub use model::Model;
pub use queues::{alone, hear_of_cut, queues, read_all, turn_all};
pub use reactor::{Chances, Lie, PowerCut, Sim, Stuck, is_power_cut, is_stuck};
pub use remote::{Befell, Lapse, RemoteDisk, Weather};
pub use seeds::seeds;
pub use stamp::{Garbled, SECTOR, stamp, stamps};
pub use watched::Saved;
