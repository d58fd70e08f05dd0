//! Whole-program tests against independent tools and real guests.
#![allow(clippy::missing_panics_doc)] // tests panic where a test fails

mod control;
mod listens;
mod load;
pub mod replacements;
mod server;
mod set_up;
pub mod targets;

pub use control::Control;
pub use listens::listens;
pub use load::{is_served, is_well, lab_of, load, ringtap_of};
pub use server::{Server, lab, patience, program, ringtap};
pub use set_up::{SetUp, file_system, file_system_of, ok, plain};
