//! Secrets named on the command line, never written there.

use ringtap_image::{Secret, SecretError, SecretSource};

/// What `--secret` takes.
pub(crate) fn source(text: &str) -> Result<SecretSource, String> {
    text.parse().map_err(|error: SecretError| error.to_string())
}

/// Read the secret, and tell `warn` what the user should know about it.
pub(crate) fn read(
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
