//! Whole-program tests against independent tools and real guests.
#![allow(clippy::missing_panics_doc)] // tests panic where a test fails

mod listens;
mod server;

pub use listens::listens;
pub use server::{Server, patience, program, ringtap};
