//! A simulated disk: volatile cache, any completion order, torn sectors, errors, power cuts; all
//! from a seed.
//!
//! [`Sim`] is a [`ringtap_io::Reactor`] on a [`Disk`]. A disk keeps for each sector the stable bytes
//! and every version written since; [`Disk::after_power_cut`] chooses among them. [`Model`] watches
//! a virtual disk from the guest's side and says what each of its sectors may hold. A [`RemoteDisk`] is
//! on another host, and reached as a store is.
//!
//! A test of power cuts and kills has a [`Bench`]: the disk, what of the server outlives it, and how it is opened. A [`Run`]
//! puts a [`Guest`] on it, or one task, or hands out queues for more. [`Ends`] look at what each turn of a run would leave;
//! [`Bench::ends`] ends a server at the turn where the power goes ([`Disk::cut_power_at_turn`]), opens what is left and asks
//! the guest whether that may be. Trials have their seeds from [`seeds`]; [`caught`] has what is done wrong on purpose seen.
//!
//! The power goes at a turn:
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
mod bench;
mod disk;
mod end;
mod guest;
mod history;
mod medium;
mod model;
mod pipe;
mod queues;
mod reactor;
mod remote;
mod run;
mod stamp;
#[cfg(feature = "shuttle")]
pub mod threads;
mod trials;
mod versions;
mod walk;
mod watched;

pub use bench::{Bench, Ends};
pub use disk::{Disk, Fault, Refuses};
pub use end::End;
pub use guest::{Ask, Device, Failure, Guest, Promise, Wrong, random_asks};
pub use history::{Token, Violation};
pub use medium::Lacks;
pub use model::Model;
pub use queues::{hear_of_cut, queues, read_all, turn_all};
pub use reactor::{Chances, Lie, PowerCut, Sim, Stuck, is_power_cut, is_stuck};
pub use remote::{Befell, Lapse, RemoteDisk, Weather};
pub use run::{Run, alone};
pub use stamp::{Garbled, SECTOR, stamp, stamps};
pub use trials::{all_well, caught, seeds};
pub use walk::{Logged, Look, Seen, walk};
pub use watched::Saved;
