//! The NBD export against the programs that speak NBD on Debian, and against clients that break it.

mod extended;
mod harness;
mod hostile;
mod lent;
mod lifetime;
mod limits;
mod newer;
mod panic;
mod programs;
mod python;
mod raw;
mod tls;
