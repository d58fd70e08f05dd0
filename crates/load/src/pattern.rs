//! Which block comes next.

/// Random numbers that scatter blocks: the same ones for the same seed.
#[derive(Clone, Debug)]
pub struct Random(fastrand::Rng);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    /// A seed that differs from run to run.
    pub fn fresh_seed() -> u64 {
        fastrand::u64(..)
    }

    /// The next 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
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
