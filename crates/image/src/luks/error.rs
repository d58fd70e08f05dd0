//! What can be wrong with a LUKS header, a secret, or a wish for a new container.

use std::io;

use crate::Error as IoError;

/// Why a LUKS header cannot be used, or made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No header where one was looked for.
    #[error(
        "no LUKS header: it begins with {found}, not with \"LUKS\\xba\\xbe\"; is it raw, or is its header detached?"
    )]
    Magic {
        /// The first bytes.
        found: String,
    },
    /// A version of the format that does not exist yet.
    #[error("LUKS version {found}: known are 1 and 2")]
    Version {
        /// As the header says.
        found: u16,
    },
    /// The file ends too early.
    #[error("{what} ends at byte {need}, and the file at byte {have}: it is cut short")]
    Short {
        /// What lies there.
        what: &'static str,
        /// Where it should end.
        need: u64,
        /// Where the file ends.
        have: u64,
    },
    /// A number that cannot be.
    #[error("the header's {what} is {found}; it must be {wanted}")]
    Field {
        /// Which.
        what: &'static str,
        /// As the header says.
        found: u64,
        /// What it may be.
        wanted: &'static str,
    },
    /// Neither copy of a LUKS2 header is whole.
    #[error(
        "neither copy of the LUKS2 header is whole (the first: {first}; the second: {second}): \
         restore it with cryptsetup luksHeaderRestore"
    )]
    Copies {
        /// What is wrong with the first.
        first: String,
        /// What is wrong with the second.
        second: String,
    },
    /// The metadata of a LUKS2 header is not what the format says.
    #[error("the LUKS2 metadata is not valid: {0}")]
    Json(String),
    /// A cipher that is not supported.
    #[error(
        "the cipher {found} is not supported: known are aes, serpent and twofish in -xts or -cbc with -plain64 or -plain, and \
         aes-cbc-essiv:sha256"
    )]
    Cipher {
        /// Its name.
        found: String,
    },
    /// A hash that is not supported.
    #[error("the hash {found} is not supported: known are sha1, sha224, sha256, sha384 and sha512")]
    Hash {
        /// Its name.
        found: String,
    },
    /// A kind of LUKS2 object that is not supported.
    #[error("{what} {found} is not supported{hint}")]
    Unknown {
        /// Which object.
        what: &'static str,
        /// The kind found.
        found: String,
        /// What to do, with the mark that joins it.
        hint: &'static str,
    },
    /// A keyslot that would take absurdly much time or memory to try.
    #[error(
        "keyslot {slot} asks for {what} of {found}, and no more than {limit} is spent on one: if that \
         is meant so, make it cheaper with cryptsetup luksConvertKey"
    )]
    Cost {
        /// Which keyslot; the digest of the key counts as the slot that it is checked for.
        slot: u32,
        /// Of what.
        what: &'static str,
        /// How much.
        found: u64,
        /// What is allowed.
        limit: u64,
    },
    /// No keyslot can be tried.
    #[error("no keyslot is in use: nothing can open this container")]
    NoKeyslot,
    /// A keyslot that is named holds a secret already.
    #[error("keyslot {index} is in use: name another, or add --force to overwrite it")]
    KeyslotInUse {
        /// Its number.
        index: u32,
    },
    /// All are in use.
    #[error("every keyslot is in use: erase one first")]
    NoFreeKeyslot,
    /// One that is to be overwritten is all that the secret opens, and there is none to go by meanwhile.
    #[error(
        "keyslot {index} is the only one that the secret opens, and the others are in use: a power cut would leave none that it or \
         the new one opens; erase another first"
    )]
    NoSpareKeyslot {
        /// Its number.
        index: u32,
    },
    /// Nothing would open the container any more.
    #[error(
        "no keyslot would be left, and nobody could open it any more: add --force if that is wanted"
    )]
    LastKeyslot,
    /// It is another header than the one that was looked at.
    #[error("its header has changed meanwhile: try again")]
    Changed,
    /// The secret fits no keyslot.
    #[error("the secret opens none of the {tried} keyslots in use{hint}")]
    WrongSecret {
        /// How many were tried.
        tried: usize,
        /// What to do, with the mark that joins it.
        hint: &'static str,
    },
    /// No secret was given.
    #[error("it is encrypted: name its secret with --secret file:PATH, fd:N or credential:NAME")]
    NoSecret,
    /// Memory could not be had.
    #[error("cannot get memory for keys: {0}")]
    Memory(io::Error),
    /// The system gives no random bytes.
    #[error("cannot get random bytes: {0}")]
    Random(getrandom::Error),
    /// Argon2 found its parameters wrong.
    #[error("keyslot {slot}: {found}")]
    Argon2 {
        /// Which keyslot.
        slot: u32,
        /// What is wrong.
        found: String,
    },
    /// Reading or writing failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: IoError,
    },
}
