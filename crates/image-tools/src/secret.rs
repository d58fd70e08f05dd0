//! Secrets that are read when they are needed first.

use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image::{Secret, SecretError, SecretSource};

/// A secret by its source, read at first use and then kept: a descriptor gives it only once. Clones share it. It may be one of
/// several, of which each image is opened by whichever fits.
#[derive(Clone, Debug)]
pub struct LazySecret {
    source: SecretSource,
    known: Arc<Mutex<Option<Secret>>>,
    or: Option<Box<LazySecret>>,
}

impl From<SecretSource> for LazySecret {
    fn from(source: SecretSource) -> LazySecret {
        LazySecret { source, known: Arc::default(), or: None }
    }
}

impl LazySecret {
    /// Whichever of these fits.
    pub fn any(of: Vec<LazySecret>) -> Option<LazySecret> {
        of.into_iter().reduce(LazySecret::or)
    }

    /// This one, or where it does not fit another.
    fn or(self, other: LazySecret) -> LazySecret {
        let or = match self.or {
            Some(next) => next.or(other),
            None => other,
        };
        LazySecret { or: Some(Box::new(or)), ..self }
    }

    /// The secret. What the user should know about it goes to the log.
    pub fn read(&self) -> Result<Secret, SecretError> {
        let own = self.read_own()?;
        match &self.or {
            Some(or) => Ok(own.or(or.read()?)),
            None => Ok(own),
        }
    }

    fn read_own(&self) -> Result<Secret, SecretError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(secret) = &*known {
            return Ok(secret.clone());
        }
        let secret = read_secret(&self.source, |text| tracing::warn!("{text}"))?;
        Ok(known.insert(secret).clone())
    }
}

/// Read a secret, and tell `warn` what the user should know about it.
pub fn read_secret(
    source: &SecretSource,
    mut warn: impl FnMut(String),
) -> Result<Secret, SecretError> {
    if let Some(text) = source.warning() {
        warn(text);
    }
    let secret = source.read()?;
    if !secret.is_locked() {
        warn(
            "the kernel does not lock the secret in memory, so that it may be swapped out: \
              raise RLIMIT_MEMLOCK (LimitMEMLOCK= in a systemd unit)"
                .into(),
        );
    }
    Ok(secret)
}
