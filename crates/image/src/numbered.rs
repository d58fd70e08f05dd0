//! Maps by number for what is in flight: few keys at a time, looked up with every request. The guest may
//! choose the numbers, but not have more of them at once than it has requests.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type Numbered<T> = HashMap<u64, T, BuildHasherDefault<Mixer>>;
pub(crate) type Numbers = HashSet<u64, BuildHasherDefault<Mixer>>;

/// Mixes a number in some cycles, where the usual hasher takes many.
#[derive(Default)]
pub(crate) struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_differ_in_few_bits_fall_apart() {
        for shift in 0..56 {
            let low: HashSet<u64> = (0..256u64)
                .map(|number| {
                    let mut mixer = Mixer::default();
                    mixer.write_u64(number << shift);
                    mixer.finish() & 1023
                })
                .collect();
            assert!(low.len() > 150, "shifted by {shift}: {} of 256", low.len());
        }
    }
}
