//! Ways of being broken, for tests that must notice. A program has none of them.

/// What an image does wrong on purpose, for tests that have to notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// L2 tables are written before the data they point to is stable.
    TablesFirst,
    /// L1 is written before the L2 tables it points to are stable.
    L1First,
    /// L2 tables are stable before the refcounts of what they point to are.
    RefcountsLate,
    /// Clusters are used again before it is stable that nothing refers to them.
    EarlyReuse,
    /// Clusters are used again while older requests may still use them.
    NoGrace,
    /// Recycled room is taken for zeros.
    StaleIsFresh,
    /// What the restart log holds is not taken up.
    RestartLogIgnored,
    /// A flush drops what was noted while it was in flight, too.
    RestartLogDropped,
    /// Entries of compressed clusters are set before those are written.
    PackedLate,
    /// Compressed clusters in a host cluster that others are in are not counted.
    SharedUncounted,
    /// Bitmaps in use are not marked in the image as such.
    BitmapsNotMarked,
    /// Writes are not noted in bitmaps.
    BitmapsNotNoted,
    /// The bits that a killed server left are not taken up.
    BitmapsForgotten,
    /// What tables were is not kept for a check.
    MomentNotKept,
    /// References that are gone and still counted are not known to a check.
    MomentMiscounted,
}

/// In which of these ways an image is broken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Broken {
    #[cfg(feature = "sabotage")]
    pub(super) how: Option<Sabotage>,
}

impl Broken {
    #[cfg(feature = "sabotage")]
    pub(super) fn does(self, how: Sabotage) -> bool {
        self.how == Some(how)
    }

    #[cfg(not(feature = "sabotage"))]
    pub(super) fn does(self, _: Sabotage) -> bool {
        false
    }
}
