//! Disks whose image becomes another while they are served.

mod backups;
mod bench;
mod checkpoints;
mod jobs;
mod larger;
mod ledger;
mod many;
mod pulled;
mod room;
mod stream;
mod taken;
mod verbs;
