//! Ways of being broken, for tests that must notice.

use super::dynamic::Shared;

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A flush writes entries of the table before what they point to is stable.
    NoBarrier,
    /// A flush writes bits of older blocks before their sectors are stable.
    BitsFirst,
    /// Room on a device is taken for zeros.
    RoomIsZeros,
}

#[cfg(feature = "sabotage")]
thread_local! {
    static NEXT: std::cell::Cell<Option<Sabotage>> = const { std::cell::Cell::new(None) };
}

/// Images that this thread opens from now on are broken so.
#[cfg(feature = "sabotage")]
pub fn sabotage(how: Option<Sabotage>) {
    NEXT.set(how);
}

#[cfg(feature = "sabotage")]
pub(super) fn of_thread() -> Option<Sabotage> {
    NEXT.get()
}

impl Shared {
    #[cfg(feature = "sabotage")]
    pub(super) fn sabotaged(&self, how: Sabotage) -> bool {
        self.sabotage == Some(how)
    }

    #[cfg(not(feature = "sabotage"))]
    pub(super) fn sabotaged(&self, _: Sabotage) -> bool {
        false
    }
}
