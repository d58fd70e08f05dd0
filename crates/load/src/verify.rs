//! Knowing what every block must hold.

use crate::pattern::Random;
use serde::{Deserialize, Serialize};

/// After a failed write the block may hold the old or the new content.
const UNKNOWN: u32 = u32::MAX;

/// What reading back found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Blocks compared, during the run and after it.
    pub blocks: u64,
    /// Blocks that held something else than was written last.
    pub mismatches: u64,
    /// Byte offset on the disk of the first difference.
    pub first_mismatch: Option<u64>,
}

impl Verified {
    pub(crate) fn and(self, other: Verified) -> Verified {
        Verified {
            blocks: self.blocks + other.blocks,
            mismatches: self.mismatches + other.mismatches,
            first_mismatch: self.first_mismatch.or(other.first_mismatch),
        }
    }
}

/// The content of each block of one queue's part of the disk, as this run left it.
///
/// A block is stamped from its byte offset on the disk, the count of writes to it and a seed of
/// this run, so a block that is stale, torn, misplaced or left over from another run is told apart.
pub struct Ledger {
    seed: u64,
    first: u64,
    bs: u64,
    versions: Vec<u32>,
    busy: Vec<bool>,
    expected: Vec<u64>,
    /// What was found so far.
    pub found: Verified,
}

impl Ledger {
    /// A ledger of `blocks` blocks of `bs` bytes, the first at byte `first` of the disk.
    pub fn new(seed: u64, first: u64, bs: u64, blocks: u64) -> Ledger {
        Ledger {
            seed,
            first,
            bs,
            versions: vec![0; blocks as usize],
            busy: vec![false; blocks as usize],
            expected: vec![0; bs as usize / 8],
            found: Verified::default(),
        }
    }

    /// Claims a block for one request; false if a request for it is in flight, whose order against
    /// this one nobody could tell.
    pub fn claim(&mut self, block: u64) -> bool {
        !std::mem::replace(&mut self.busy[block as usize], true)
    }

    /// Writes the block's next content into `buffer`.
    pub fn stamp(&mut self, block: u64, buffer: &mut [u8]) {
        let version = match self.versions[block as usize] {
            UNKNOWN => 1,
            version => version + 1,
        };
        self.expect(block, version);
        for (bytes, word) in buffer.chunks_exact_mut(8).zip(&self.expected) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The write that was stamped has ended.
    pub fn wrote(&mut self, block: u64, ok: bool) {
        let version = &mut self.versions[block as usize];
        *version = match (ok, *version) {
            (false, _) => UNKNOWN,
            (true, UNKNOWN) => 1,
            (true, version) => version + 1,
        };
        self.busy[block as usize] = false;
    }

    /// The read of a claimed block has ended with `buffer`, or failed.
    pub fn read(&mut self, block: u64, buffer: Option<&[u8]>) {
        self.busy[block as usize] = false;
        let version = self.versions[block as usize];
        let Some(buffer) = buffer else { return };
        if version == 0 || version == UNKNOWN {
            return;
        }
        self.expect(block, version);
        self.found.blocks += 1;
        let differs = |(bytes, word): (&[u8], &u64)| bytes != word.to_le_bytes();
        if let Some(at) = buffer.chunks_exact(8).zip(&self.expected).position(differs) {
            self.found.mismatches += 1;
            let offset = self.first + block * self.bs + at as u64 * 8;
            self.found.first_mismatch.get_or_insert(offset);
        }
    }

    /// Blocks this run wrote and knows the content of.
    pub fn written(&self) -> Vec<u64> {
        let known = |(block, version): (usize, &u32)| {
            (*version != 0 && *version != UNKNOWN).then_some(block as u64)
        };
        self.versions.iter().enumerate().filter_map(known).collect()
    }

    fn expect(&mut self, block: u64, version: u32) {
        let offset = self.first + block * self.bs;
        for (sector, words) in self.expected.chunks_mut(64).enumerate() {
            let offset = offset + sector as u64 * 512;
            let mut random = Random::new(self.seed ^ offset.rotate_left(20) ^ u64::from(version));
            words[0] = offset;
            words[1..].fill_with(|| random.next());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(ledger: &mut Ledger, block: u64) -> Vec<u8> {
        let mut buffer = vec![0; 4096];
        assert!(ledger.claim(block));
        ledger.stamp(block, &mut buffer);
        ledger.wrote(block, true);
        buffer
    }

    fn mismatches_after_reading(ledger: &mut Ledger, block: u64, buffer: &[u8]) -> u64 {
        assert!(ledger.claim(block));
        ledger.read(block, Some(buffer));
        ledger.found.mismatches
    }

    #[test]
    fn tells_stale_torn_and_misplaced_blocks() {
        let mut ledger = Ledger::new(5, 1 << 20, 4096, 8);
        let old = written(&mut ledger, 3);
        let new = written(&mut ledger, 3);
        let other = written(&mut ledger, 4);
        assert_eq!(mismatches_after_reading(&mut ledger, 3, &new), 0);
        assert_eq!(mismatches_after_reading(&mut ledger, 3, &old), 1);
        assert_eq!(ledger.found.first_mismatch, Some((1 << 20) + 3 * 4096 + 8));
        let torn = [&new[..2048], &old[2048..]].concat();
        assert_eq!(mismatches_after_reading(&mut ledger, 3, &torn), 2);
        assert_eq!(mismatches_after_reading(&mut ledger, 3, &other), 3);
        let mut another_run = Ledger::new(6, 1 << 20, 4096, 8);
        written(&mut another_run, 3);
        written(&mut another_run, 3);
        assert_eq!(mismatches_after_reading(&mut another_run, 3, &new), 1);
        assert_eq!(ledger.written(), [3, 4]);
    }

    #[test]
    fn failed_writes_are_not_judged() {
        let mut ledger = Ledger::new(5, 0, 512, 2);
        let mut buffer = vec![0; 512];
        assert!(ledger.claim(0));
        assert!(!ledger.claim(0), "two requests for one block");
        ledger.stamp(0, &mut buffer);
        ledger.wrote(0, false);
        assert_eq!(mismatches_after_reading(&mut ledger, 0, &[9; 512]), 0);
        assert!(ledger.written().is_empty());
    }
}
