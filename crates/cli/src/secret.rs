//! Secrets named on the command line, never written there.

use ringtap_image::{SecretError, SecretSource};
use ringtap_image_tools::LazySecret;
pub(crate) use ringtap_image_tools::read_secret as read;

/// What `--secret` takes.
pub(crate) fn source(text: &str) -> Result<SecretSource, String> {
    text.parse().map_err(|error: SecretError| error.to_string())
}

/// The same, read when it is needed first.
pub(crate) fn lazy(text: &str) -> Result<LazySecret, String> {
    source(text).map(LazySecret::from)
}
