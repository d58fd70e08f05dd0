//! qcow2 under a VBD, on the simulated disk: power cuts, failing operations, sabotage.
//! `RINGTAP_SEEDS` sets how many seeds are tried; a failure names its seed.

mod bench;
mod beside;
mod bitmap_oracle;
mod bitmaps;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/container.rs"]
mod container;
mod epoch;
mod faults;
mod kill;
mod large;
mod online;
mod oracle;
mod packs;
mod panics;
mod power_cut;
mod sabotage;
mod slow;
mod walk;
