//! Disks whose image becomes another while they are served.

mod access;
mod backups;
mod bench;
mod checkpoints;
mod errors;
mod inner;
mod inner_stream;
mod jobs;
mod larger;
mod ledger;
mod many;
mod moment;
mod pulled;
mod resting;
mod room;
mod scratch;
mod slow;
mod stable;
mod steps;
mod stream;
mod taken;
mod tampered;
mod together;
mod told;
mod verbs;
mod whole;
