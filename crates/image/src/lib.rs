//! Disk images: where the bytes of a virtual disk are.
