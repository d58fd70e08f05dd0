//! What is wrong with a VHDX.

use std::fmt::Display;

use crate::container::malformed;
use crate::{Container, OpenError};

pub(super) fn bad(
    container: &Container,
    at: u64,
    found: impl Display,
    advice: &'static str,
) -> OpenError {
    malformed("VHDX", container, at, found, advice)
}
