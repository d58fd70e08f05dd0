//! How host caching is used.

/// How host caching is used, with QEMU's meanings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// O_DIRECT; the guest's flushes are carried out.
    #[default]
    None,
    /// The host's page cache; the guest's flushes are carried out.
    Writeback,
    /// The host's page cache for reads; every write is stable before it is acknowledged.
    Writethrough,
    /// O_DIRECT, and every write is stable before it is acknowledged.
    DirectSync,
    /// The host's page cache, and flushes are not carried out: a power cut may lose anything.
    Unsafe,
}

impl CacheMode {
    /// Whether the image's file is opened with O_DIRECT.
    pub fn direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::DirectSync)
    }

    /// Whether each write is stable before it is acknowledged, so that the guest sees no write cache.
    pub fn writethrough(self) -> bool {
        matches!(self, CacheMode::Writethrough | CacheMode::DirectSync)
    }

    /// Whether flushes are carried out.
    pub fn flushes(self) -> bool {
        self != CacheMode::Unsafe
    }
}
