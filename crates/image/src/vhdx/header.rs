//! The header of a VHDX that counts.

/// What a header says.
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) log_id: [u8; 16],
    pub(super) log_len: u32,
    pub(super) log_at: u64,
}
