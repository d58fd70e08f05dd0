//! The tools for qcow2 images at rest, judged by qemu-img.

mod amend;
mod bitmap;
mod check;
mod create;
mod guest;
mod mended;
mod names;
mod oracle;
mod power;
mod resize;
mod snapshot;
mod snapshot_tables;
