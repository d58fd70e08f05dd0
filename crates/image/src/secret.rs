//! Secrets that open encrypted images.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use ringtap_io::{LockedBytes, duplicate_fd};

/// The longest secret, as cryptsetup's longest key file.
const LONGEST: usize = 8 << 20;
const FIRST_PIECE: usize = 4096;

/// A passphrase or the content of a key file: locked in memory, wiped at the end, never shown. Clones
/// share it. It may be one of several, of which an image is opened by whichever fits.
#[derive(Clone)]
pub struct Secret {
    bytes: Arc<LockedBytes>,
    or: Option<Arc<Secret>>,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why there is no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// Not one of the ways to name a secret.
    #[error("{text:?} does not say where a secret is: write file:PATH, fd:N or credential:NAME")]
    Text {
        /// What was written.
        text: String,
    },
    /// It cannot be read.
    #[error("cannot read the secret from {from}: {source}")]
    Read {
        /// Where it is.
        from: SecretSource,
        /// What the system said.
        source: io::Error,
    },
    /// systemd handed nothing over.
    #[error(
        "there is no credential {name:?}: $CREDENTIALS_DIRECTORY is not set; is this started by a \
         systemd unit with LoadCredential= or SetCredentialEncrypted=?"
    )]
    NoCredentials {
        /// The name wanted.
        name: String,
    },
    /// It is empty.
    #[error("the secret from {from} is empty")]
    Empty {
        /// Where it is.
        from: SecretSource,
    },
    /// It has no end.
    #[error("the secret from {from} is longer than 8 MiB")]
    Long {
        /// Where it is.
        from: SecretSource,
    },
    /// There is no memory for it.
    #[error("cannot get memory for a secret: {0}")]
    Memory(io::Error),
}

impl Secret {
    /// A secret that is in memory already; the caller wipes its own copy.
    pub fn new(bytes: &[u8]) -> io::Result<Secret> {
        let mut locked = LockedBytes::zeroed(bytes.len())?;
        locked.copy_from_slice(bytes);
        Ok(Secret { bytes: Arc::new(locked), or: None })
    }

    /// This one, or else another.
    pub fn or(self, other: Secret) -> Secret {
        let or = match self.or {
            Some(second) => Arc::unwrap_or_clone(second).or(other),
            None => other,
        };
        Secret { bytes: self.bytes, or: Some(Arc::new(or)) }
    }

    /// This one and those that may be tried in its place, each by itself.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Secret> {
        std::iter::successors(Some(self), |one| one.or.as_deref())
    }

    /// Its bytes, every one of them: a newline at the end counts, as for the key files of cryptsetup
    /// and for QEMU's secrets.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether the kernel keeps it in memory, which RLIMIT_MEMLOCK may forbid.
    pub fn is_locked(&self) -> bool {
        self.bytes.is_locked()
    }
}

/// Where a secret is. Never on the command line or in the environment, where others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    /// All of a file.
    File(PathBuf),
    /// All that can be read from a descriptor this process was started with.
    Fd(RawFd),
    /// What systemd put into `$CREDENTIALS_DIRECTORY` under that name.
    Credential(String),
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretSource::File(path) => write!(f, "file:{}", path.display()),
            SecretSource::Fd(fd) => write!(f, "fd:{fd}"),
            SecretSource::Credential(name) => write!(f, "credential:{name}"),
        }
    }
}

impl FromStr for SecretSource {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<SecretSource, SecretError> {
        let a_name = |name: &str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        let source = match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Some(SecretSource::File(path.into())),
            Some(("fd", number)) => number.parse().ok().filter(|fd| *fd >= 0).map(SecretSource::Fd),
            Some(("credential", name)) if a_name(name) => {
                Some(SecretSource::Credential(name.to_owned()))
            }
            _ => None,
        };
        // What stands before no colon may be the secret itself: it is not repeated.
        source.ok_or_else(|| SecretError::Text {
            text: text.split_once(':').map_or("(no prefix)", |(prefix, _)| prefix).to_owned(),
        })
    }
}

impl SecretSource {
    /// Read it. A descriptor has nothing to give a second time.
    pub fn read(&self) -> Result<Secret, SecretError> {
        let failed = |source| SecretError::Read { from: self.clone(), source };
        let opened = match self {
            SecretSource::File(path) => File::open(path),
            SecretSource::Fd(fd) => duplicate_fd(*fd).map(File::from),
            SecretSource::Credential(name) => {
                let Some(dir) = std::env::var_os("CREDENTIALS_DIRECTORY") else {
                    return Err(SecretError::NoCredentials { name: name.clone() });
                };
                File::open(Path::new(&dir).join(name))
            }
        };
        self.read_all(opened.map_err(failed)?)
    }

    fn read_all(&self, mut file: impl Read) -> Result<Secret, SecretError> {
        let mut bytes = LockedBytes::zeroed(FIRST_PIECE).map_err(SecretError::Memory)?;
        let mut len = 0;
        loop {
            if len == bytes.len() {
                if len >= LONGEST {
                    return Err(SecretError::Long { from: self.clone() });
                }
                let mut larger = LockedBytes::zeroed(2 * len).map_err(SecretError::Memory)?;
                larger[..len].copy_from_slice(&bytes);
                bytes = larger;
            }
            match file.read(&mut bytes[len..]) {
                Ok(0) if len == 0 => return Err(SecretError::Empty { from: self.clone() }),
                Ok(0) => break,
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(SecretError::Read { from: self.clone(), source }),
            }
        }
        bytes.truncate(len);
        Ok(Secret { bytes: Arc::new(bytes), or: None })
    }

    /// What the user should know: that others may read the file.
    pub fn warning(&self) -> Option<String> {
        let SecretSource::File(path) = self else { return None };
        let facts = std::fs::metadata(path).ok()?;
        let readable = facts.is_file() && facts.mode() & 0o007 != 0;
        readable.then(|| {
            format!(
                "the secret {} can be read or changed by every user (mode {:o}): chmod 600 it",
                path.display(),
                facts.mode() & 0o777
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn sources_are_named() {
        for text in ["file:/etc/key", "file:with:colon", "fd:0", "fd:12", "credential:disk"] {
            assert_eq!(text.parse::<SecretSource>().expect(text).to_string(), text);
        }
        for text in
            ["file:", "fd:-1", "fd:x", "credential:", "credential:../x", "credential:..", "pass:x"]
        {
            assert!(text.parse::<SecretSource>().is_err(), "{text}");
        }
        let error = "correct horse".parse::<SecretSource>().expect_err("no source").to_string();
        assert!(!error.contains("horse"), "{error}");
    }

    #[test]
    fn each_byte_of_a_file_counts() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("key");
        let source = SecretSource::File(path.clone());
        for len in [1, 4095, 4096, 4097, 100_000] {
            let mut bytes: Vec<u8> = (0..len).map(|i| (i * 31) as u8).collect();
            bytes.push(b'\n');
            fs::write(&path, &bytes).expect("a file");
            let secret = source.read().expect("a secret");
            assert_eq!(secret.bytes(), bytes);
        }
        fs::write(&path, b"").expect("a file");
        assert!(matches!(source.read(), Err(SecretError::Empty { .. })));
        fs::File::create(&path).and_then(|file| file.set_len(20 << 20)).expect("a file");
        assert!(matches!(source.read(), Err(SecretError::Long { .. })));
        assert!(SecretSource::File("/dev/zero".into()).read().is_err());
        assert!(SecretSource::File(dir.path().join("none")).read().is_err());
    }

    #[test]
    fn a_descriptor_is_read_to_its_end() {
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        rustix::io::write(&write, b"hunter2").expect("written");
        drop(write);
        let secret = SecretSource::Fd(read.as_raw_fd()).read().expect("a secret");
        assert_eq!(secret.bytes(), b"hunter2");
        assert!(SecretSource::Fd(1 << 30).read().is_err());
    }

    #[test]
    fn one_may_take_the_place_of_another() {
        let secret = |text: &str| Secret::new(text.as_bytes()).expect("memory");
        let all = secret("a").or(secret("b").or(secret("c"))).or(secret("d"));
        let found: Vec<&[u8]> = all.each().map(Secret::bytes).collect();
        assert_eq!(found, [b"a", b"b", b"c", b"d"]);
        assert_eq!(all.bytes(), b"a");
    }

    #[test]
    fn debug_shows_nothing() {
        let secret = Secret::new(b"hunter2").expect("memory");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn a_file_for_everyone_is_warned_of() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("key");
        fs::write(&path, b"x").expect("a file");
        let source = SecretSource::File(path.clone());
        for (mode, warned) in [(0o600, false), (0o640, false), (0o644, true), (0o602, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
            assert_eq!(source.warning().is_some(), warned, "{mode:o}");
        }
        assert_eq!(SecretSource::Fd(0).warning(), None);
    }
}
