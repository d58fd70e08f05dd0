//! Ratios against peers, measured in one run.
//!
//! Each program starts the servers one after the other on the same image, loads each with the same
//! client, and does so in rounds whose order rotates, so that a slow minute of the machine falls on
//! all. What counts is the ratio inside a round; absolute numbers belong to the machine. Programs are run, medians are
//! taken and fio is read by the lab, whose plans `nbd`, `vhost-user` and `remote` compare the same servers without bars
//! that must be reached.
//!
//! - `vhost_user`: Ringtap, qemu-storage-daemon and ubiblk over vhost-user-blk, and io_uring alone;
//! - `nbd`: Ringtap, QEMU, nbdkit and nbd-server over NBD, and io_uring alone;
//! - `formats`: qcow2, overlays, VHD and LUKS, allocated and fresh, over vhost-user-blk;
//! - `convert`: `ringtap convert`, `qemu-img convert` and nbdcopy, from format to format;
//! - `ublk`: block devices of one host, inside a guest: Ringtap, loop, rublk, the kernel's NBD client;
//! - `remote`: disks that are elsewhere, by Ringtap and by QEMU: on NBD servers, and images of Ceph where a cluster is named;
//! - `idle`: what a server costs that nobody uses.

pub mod arms;
pub mod client;
pub mod copies;
pub mod cpu;
pub mod devices;
pub mod experiment;
pub mod formats;
pub mod goals;
pub mod guard;
pub mod idle;
pub mod image;
pub mod interrupt;
pub mod lines;
pub mod memory;
pub mod nbd;
pub mod options;
pub mod qemu10;
pub mod remote;
pub mod report;
pub mod scatter;
pub mod suite;
pub mod vhost_user;
