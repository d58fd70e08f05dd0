//! The NBD export against the programs that speak NBD on Debian, and against clients that break it.

mod harness;
mod hostile;
mod lent;
mod lifetime;
mod limits;
mod programs;
mod python;
mod raw;
mod tls;
