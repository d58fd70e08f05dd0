//! What ends the sleep of a reactor.

/// Ends the sleep of a reactor.
pub trait Alarm: Send + Sync {
    /// Have the turn end that waits, or else the next one that would.
    fn ring(&self);
}

/// That of a reactor whose tasks nobody else wakes.
pub(crate) struct Silent;

impl Alarm for Silent {
    fn ring(&self) {}
}
