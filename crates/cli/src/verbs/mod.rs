//! The verbs that make, look at and change images, with the habits of qemu-img.

mod bar;
mod chain;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod info;
pub(crate) mod map;
mod source;
mod target;
