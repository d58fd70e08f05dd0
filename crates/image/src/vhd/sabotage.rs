//! Ways of being broken, for tests that must notice.

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A flush writes entries of the table before what they point to is stable.
    NoBarrier,
    /// A flush writes bits of older blocks before their sectors are stable.
    BitsFirst,
    /// Room on a device is taken for zeros.
    RoomIsZeros,
    /// A resize names its new table before that is stable.
    TableLate,
    /// A repair moves the footer at the end while the copy at the beginning may be bad.
    CopyLate,
}

#[cfg(feature = "sabotage")]
thread_local! {
    static NEXT: std::cell::Cell<Option<Sabotage>> = const { std::cell::Cell::new(None) };
}

/// Images that this thread opens from now on are broken so, and the tools it uses. Gives how they
/// were before.
#[cfg(feature = "sabotage")]
pub fn sabotage(how: Option<Sabotage>) -> Option<Sabotage> {
    NEXT.replace(how)
}

#[cfg(feature = "sabotage")]
pub(super) fn of_thread() -> Option<Sabotage> {
    NEXT.get()
}

/// Whether a tool that this thread uses is to be broken so.
#[cfg(feature = "sabotage")]
pub(super) fn asked(how: Sabotage) -> bool {
    of_thread() == Some(how)
}

#[cfg(not(feature = "sabotage"))]
pub(super) fn asked(_: Sabotage) -> bool {
    false
}
