//! The tools for qcow2 images at rest, judged by qemu-img.

mod create;
mod oracle;
