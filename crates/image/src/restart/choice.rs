//! What the operator may say of a restart log.

/// What the operator wants done with a log of which it cannot be told whether it belongs to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartChoice {
    /// Take it up.
    Use,
    /// Drop it.
    Drop,
    /// Decide as where nobody chose, and write to the image also where no log can be kept.
    Optional,
}
