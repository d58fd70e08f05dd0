//! qcow2 images (source: docs/interop/qcow2 of QEMU).

pub mod bytes;
pub mod extension;
pub mod header;

pub use header::{Compression, Crypt, Header, HeaderError};
