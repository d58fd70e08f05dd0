//! What a check finds, and what it repairs.

/// What to repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing: the image is only read.
    #[default]
    Nothing,
    /// Clusters that are marked used and that nothing refers to.
    Leaks,
    /// Refcounts and flags too; what can be.
    All,
}

/// What was found. The numbers are those of `qemu-img check`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Contradictions there are (left, after a repair).
    pub corruptions: u64,
    /// Clusters that are marked used and that nothing refers to (left, after a repair).
    pub leaks: u64,
    /// Contradictions repaired.
    pub corruptions_fixed: u64,
    /// Leaks repaired.
    pub leaks_fixed: u64,
    /// Where the last used cluster ends, in bytes.
    pub image_end: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those that are in the image.
    pub allocated_clusters: u64,
    /// Those that do not follow their predecessor.
    pub fragmented_clusters: u64,
    /// Those that are compressed.
    pub compressed_clusters: u64,
    /// What is wrong, the first of it, a sentence each.
    pub messages: Vec<String>,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0
    }
}
