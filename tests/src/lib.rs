//! Whole-program tests against independent tools and real guests.
#![allow(clippy::missing_panics_doc)] // tests panic where a test fails

mod listens;
mod server;
mod set_up;

pub use listens::listens;
pub use server::{Server, patience, program, ringtap};
pub use set_up::{SetUp, file_system, file_system_of, ok, plain};
