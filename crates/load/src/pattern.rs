//! Which block comes next.

/// A small fast generator of random numbers (splitmix64); good enough to scatter blocks.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A seed that differs from run to run.
    pub fn fresh_seed() -> u64 {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(std::process::id())
    }

    /// The next 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// Visits the blocks `0..count`, in order or at random.
#[derive(Debug)]
pub struct Blocks {
    count: u64,
    next: Option<u64>,
    random: Random,
}

impl Blocks {
    /// `count` must not be 0.
    pub fn new(count: u64, sequential: bool, seed: u64) -> Blocks {
        Blocks { count, next: sequential.then_some(0), random: Random::new(seed) }
    }

    /// The block to visit next.
    pub fn next(&mut self) -> u64 {
        match &mut self.next {
            Some(next) => {
                let block = *next;
                *next = (block + 1) % self.count;
                block
            }
            None => self.random.below(self.count),
        }
    }

    /// True or false with equal chance.
    pub fn coin(&mut self) -> bool {
        self.random.next() >> 63 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_wraps() {
        let mut blocks = Blocks::new(3, true, 1);
        let seen: Vec<u64> = (0..7).map(|_| blocks.next()).collect();
        assert_eq!(seen, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn random_covers_evenly() {
        let mut blocks = Blocks::new(10, false, 7);
        let mut hits = [0u32; 10];
        for _ in 0..100_000 {
            hits[blocks.next() as usize] += 1;
        }
        assert!(hits.iter().all(|&h| (9_000..11_000).contains(&h)), "{hits:?}");
    }
}
