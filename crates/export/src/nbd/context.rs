//! Metadata contexts: what block status may be asked about (proto.md: "Metadata querying";
//! docs/interop/nbd of QEMU: the `qemu` namespace).

use std::iter;

/// What is allocated, and what reads as zeros.
const ALLOCATION: &str = "base:allocation";
/// Before a bitmap's name.
const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// Before the words of what an export lies in: nobody else's context begins so.
pub(super) const LIES_IN: &str = ringtap_stores::nbd::handshake::LIES_IN;

/// Dirty bitmaps that an export may show.
pub const MAX_BITMAPS: usize = 63;

/// The names of an export's contexts, by number: that of allocation first, then those of its bitmaps.
pub(super) fn names<'a>(bitmaps: impl Iterator<Item = &'a str>) -> Vec<String> {
    let bitmaps = bitmaps.take(MAX_BITMAPS).map(|name| format!("{DIRTY_BITMAP}{name}"));
    iter::once(ALLOCATION.to_owned()).chain(bitmaps).collect()
}

/// Whether a query is about a context. Only who lists may ask about many at once.
pub(super) fn is_about(query: &[u8], name: &str, list: bool) -> bool {
    let many = [b"".as_slice(), b"base:", b"qemu:", DIRTY_BITMAP.as_bytes()];
    query == name.as_bytes() || list && many.contains(&query) && name.as_bytes().starts_with(query)
}

/// The number of the context that goes by an id.
pub(super) fn number(id: u32) -> Option<usize> {
    (1..=64).contains(&id).then(|| id as usize - 1)
}

/// What a context goes by in replies.
pub(super) fn id(number: usize) -> u32 {
    number as u32 + 1
}

/// Contexts that a client selected, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts(u64);

impl Contexts {
    /// Those whose bits are set.
    pub(super) fn of_bits(bits: u64) -> Contexts {
        Contexts(bits)
    }

    /// A bit for each.
    pub(super) fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn add(&mut self, number: usize) {
        self.0 |= 1u64.checked_shl(number as u32).unwrap_or(0);
    }

    /// Whether it is one of them.
    pub(super) fn has(self, number: usize) -> bool {
        self.0 >> number & 1 == 1
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    pub(super) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Their numbers, in order.
    pub fn numbers(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |number| self.0 >> number & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let names = names(["a", "a:b"].into_iter());
        assert_eq!(names, ["base:allocation", "qemu:dirty-bitmap:a", "qemu:dirty-bitmap:a:b"]);
        let found = |query: &str, list| -> Vec<usize> {
            let numbers = names.iter().enumerate();
            numbers.filter(|(_, n)| is_about(query.as_bytes(), n, list)).map(|(n, _)| n).collect()
        };
        for (query, listed, set) in [
            ("", vec![0, 1, 2], vec![]),
            ("base:", vec![0], vec![]),
            ("base:allocation", vec![0], vec![0]),
            ("qemu:", vec![1, 2], vec![]),
            ("qemu:dirty-bitmap:", vec![1, 2], vec![]),
            ("qemu:dirty-bitmap:a", vec![1], vec![1]),
            ("qemu:dirty-bitmap:a:", vec![], vec![]),
            ("qemu:dirty-bitmap:a:b", vec![2], vec![2]),
            ("qemu:dirty-bitmap:c", vec![], vec![]),
            ("qemu:dirty", vec![], vec![]),
        ] {
            assert_eq!((found(query, true), found(query, false)), (listed, set), "{query}");
        }
    }

    #[test]
    fn numbers_come_back() {
        let mut contexts = Contexts::default();
        for number in [5, 0, 63, 64, 5] {
            contexts.add(number);
        }
        assert_eq!(contexts.numbers().collect::<Vec<_>>(), [0, 5, 63]);
        assert_eq!((contexts.len(), contexts.is_empty()), (3, false));
    }
}
