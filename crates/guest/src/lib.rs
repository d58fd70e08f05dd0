//! Real guests in seconds, without root: an [`Appliance`] made of the distribution's kernel,
//! busybox and programs of the host, booted by User-Mode Linux ([`Uml`]) or QEMU ([`Qemu`]) as a
//! [`Guest`] that takes any number of commands.
//!
//! ```no_run
//! use std::time::Duration;
//! use ringtap_guest::{Appliance, Machine, Uml, verify::FioVerify};
//!
//! # fn main() -> ringtap_guest::Result<()> {
//! let appliance = Appliance::builder(Machine::Uml)
//!     .programs(["fio", "dd"])
//!     .build(&Appliance::default_cache())?;
//! let guest = Uml::new(&appliance).vhost_user("/run/tap.sock").boot()?;
//! let minute = Duration::from_secs(60);
//! let dd = guest.exec("dd if=/dev/zero of=/dev/vda bs=1M count=64 oflag=direct", minute)?;
//! println!("{} took {:?}", dd.success()?.stderr, guest.boot_time());
//! FioVerify::new("/dev/vda").run(&guest, minute)?;
//! # Ok(())
//! # }
//! ```
//!
//! # How it works
//!
//! The initramfs is written by this crate (newc, uncompressed: unpacking costs a guest more than
//! reading) and kept under a hash of its inputs. Its `init.sh` loads the modules and then obeys
//! the host over one byte stream, a console line in User-Mode Linux and a virtio port in QEMU.
//! Commands run in a root of their own: the host's root read-only ([`Root::Host`]: hostfs in
//! User-Mode Linux, 9p in QEMU) or the packed programs ([`Root::Packed`]), either with a tmpfs over
//! it. In User-Mode Linux the host's root is as good as free: fio with its hundred megabytes of
//! libraries starts in 0.3 s and nothing is copied. Under TCG that start takes 8 s over 9p and
//! 0.6 s packed, for 90 MB of initramfs.
//!
//! A guest cannot outlive its owner: it runs in a process group of its own that is killed on drop,
//! and when the owner dies without dropping it, the stream ends and the guest switches itself off;
//! the next guest removes the directory it left.
//!
//! Times of commands are taken on the host, when the agent says that a command began and ended;
//! the start of a shell, some 25 ms in User-Mode Linux, is among them.
//!
//! Boot times, on two busy cores: User-Mode Linux 1.5 s, QEMU under TCG 10 s to 30 s.
//!
//! # Processors
//!
//! A User-Mode Linux guest has one processor, and is kept on one of the host's, each guest of a process on the next. Left
//! to the host's scheduler its processes are spread over several for minutes at a time, and then wait for idle processors
//! to wake in each system call: 4 KiB I/O at depth 32 was seen at 11k as at 33k IOPS, by the same server.
//!
//! # Processors with AMX
//!
//! User-Mode Linux before 6.13 kills every guest process on a processor whose register state is
//! larger than 2696 bytes (Intel from Sapphire Rapids on). A library of a few kilobytes, built with
//! this crate and preloaded into `linux.uml`, puts that right; `shim/xstate.rs` says how.
//!
//! # When a vhost-user server dies
//!
//! Seen with Debian 12's packages (User-Mode Linux 6.1.176, QEMU 7.2) and read in their sources.
//!
//! **User-Mode Linux** never connects again. Of the protocol features it takes up REPLY_ACK,
//! BACKEND_REQ, CONFIG and, where offered, INBAND_NOTIFICATIONS (a server had better not offer
//! these); not MQ, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS or STATUS. It has one queue of 256
//! descriptors, with indirect descriptors and EVENT_IDX, call descriptors that are pipes, and one
//! memory region (two with high memory). It learns of the server's death by the end of file on
//! the BACKEND_REQ pipe; then it marks the device broken and removes it: the device node is gone
//! within a second, requests in flight are never answered (their processes sleep until the guest
//! ends), later ones have no device to go to. The rest of the guest lives on. There is no way to
//! attach the disk again but a new boot. Where BACKEND_REQ was not negotiated it notices nothing
//! and every request hangs. So a User-Mode Linux guest can judge what was durable after a server's
//! death, from a second boot, but not whether the same guest carries on.
//!
//! **QEMU** connects again once a second (`reconnect=1`; `reconnect-ms` from 9.2 on) for as long as
//! it runs, and the guest sees nothing but requests that take longer. It takes up every protocol
//! feature it is offered whether or not it has a use for it, so a server should offer only what it
//! means. Offered INFLIGHT_SHMFD, it asks for a region with GET_INFLIGHT_FD (number of queues and
//! queue size, 128 unless told otherwise) before the rings start, keeps the descriptor itself, and
//! hands the same region to the next server with SET_INFLIGHT_FD; the server finds in it which
//! requests it had taken and not answered. Without the feature QEMU lets the next server start at
//! the used index, so a request that was in flight may be lost (qemu-storage-daemon 7.2 offers
//! none, and fio at depth 1 hung after such a kill) or done twice.

mod appliance;
mod apt;
mod channel;
mod cpio;
mod elf;
mod error;
pub mod fio;
mod guest;
mod kernel;
mod kvm;
mod migrate;
mod modules;
mod pc;
pub mod process;
mod processor;
mod qemu;
mod rundir;
mod setup;
pub mod standby;
mod uml;
pub mod verify;
mod xen;

pub use appliance::{Appliance, Builder, Root};
pub use error::{Error, Result};
pub use guest::{Guest, Job, Output};
pub use kernel::{Kernel, Machine};
pub use kvm::NoKvm;
pub use migrate::Migrated;
pub use qemu::{Aio, Cache, Drive, FORWARD_HOST, FORWARD_PORT, Qemu};
pub use uml::Uml;
pub use xen::{Domain, Host, Xen};
