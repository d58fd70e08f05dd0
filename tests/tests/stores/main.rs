//! Disks on NBD servers, other than Ringtap's and its own.

mod bench;
mod few;
mod formats;
mod lost;
mod migrate;
mod netem;
mod served;
mod silent;
mod status;
mod verbs;
