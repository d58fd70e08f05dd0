//! Disks on Ceph: a cluster of one monitor and one OSD that keeps all in memory, judged by Ceph's own tools and QEMU's driver.

mod cluster;
mod gateway;
mod locks;
mod memory;
mod moves;
mod served;
mod stands;
mod targets;
mod verbs;
