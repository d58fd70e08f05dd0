//! The verbs that make, look at and change images, with the habits of qemu-img.

pub(crate) mod amend;
pub(crate) mod bar;
pub(crate) mod bench;
pub(crate) mod bitmap;
pub(crate) mod check;
pub(crate) mod commit;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod dd;
mod described;
pub(crate) mod detach;
pub(crate) mod info;
mod keyslots;
pub(crate) mod map;
pub(crate) mod measure;
#[cfg(feature = "object")]
pub(crate) mod publish;
pub(crate) mod rebase;
pub(crate) mod resize;
pub(crate) mod snapshot;
pub(crate) mod source;
pub(crate) mod stop;
mod target;
mod watch;
