//! qcow2 images (source: docs/interop/qcow2 of QEMU).

pub mod bytes;
mod create;
pub mod extension;
pub mod header;
mod tool;

pub use create::{CreateOptions, Preallocation, create};
pub use header::{Compression, Crypt, Header, HeaderError};
pub use tool::ToolError;
