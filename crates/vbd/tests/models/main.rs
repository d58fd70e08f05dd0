//! Models of queue threads that share an image: whole disks on the simulated one, in every order of steps that
//! a seed chooses. With the feature `shuttle` only; `make models` runs them.
//!
//! What power cuts and kills would leave is taken while the threads run, and looked at when they have ended:
//! those are no steps of theirs.
#![cfg(feature = "shuttle")]

mod races;
mod stable;
mod waits;
mod world;
