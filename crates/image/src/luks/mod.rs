//! LUKS1 and LUKS2: encrypted disks as cryptsetup makes them, on files, on block devices and inside
//! qcow2. Ciphers: AES, Serpent and Twofish, in XTS and CBC. Headers lie in front of the payload; detached ones are not supported.
//!
//! Sources: LUKS1 On-Disk Format Specification 1.2.3, LUKS2 On-Disk Format Specification 1.1.1.

mod af;
mod cbc;
mod cipher;
mod copies;
mod create;
mod error;
mod hash;
mod header;
mod image;
mod json;
mod kdf;
mod keyslots;
mod sectors;
mod shown;
#[cfg(test)]
mod tests;
mod unlock;
mod v1;
mod v2;
mod xts;

pub use cipher::{Encryption, Keyed};
pub use create::{CreateOptions, Derivation, Version, create, create_header, front_len};
pub use error::Error;
pub use hash::Hash;
pub use header::{Header, KeyDigest, Keyslot};
pub use image::Luks;
pub use kdf::{Argon2Kind, Effort, Kdf};
pub use keyslots::{HeaderPlace, KeyslotChange, KeyslotPlan, change_keyslots, plan_keyslots};
use shown::{MAGIC, first_bytes, shown};
pub use unlock::{parse, read_header, read_header_at, unlock_header};
