//! Sectors, and what tells one from others.

/// The unit that dm-crypt numbers sectors in, whatever their size.
pub(super) const NUMBERED: u64 = 512;
pub(super) const BLOCK: usize = 16;

/// How a sector's number becomes what tells it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    /// All 64 bits.
    Plain64,
    /// Its low 32 bits.
    Plain,
    /// All bits, enciphered by AES-256 with the SHA-256 of the key: of AES only, for others do that by themselves.
    Essiv,
}

/// Some sectors in a row, and the number of the first.
pub(super) struct Sectors<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) size: usize,
    pub(super) number: Number,
    pub(super) first: u64,
}

impl Sectors<'_> {
    /// What tells a sector from others, as a block.
    pub(super) fn number(&self, sector: usize) -> [u8; BLOCK] {
        let more = (sector * self.size) as u64 / NUMBERED;
        let number = match (self.number, self.first.wrapping_add(more)) {
            (Number::Plain, number) => number & u64::from(u32::MAX),
            (_, number) => number,
        };
        u128::from(number).to_le_bytes()
    }
}
