//! From a secret to the key of a keyslot, at a bounded price.

use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use argon2::{Algorithm, Argon2, Block, Params, Version};
use ringtap_io::LockedBytes;
use zeroize::Zeroize;

use super::{Error, Hash};

/// The most iterations of PBKDF2: half a minute to two, by the hash. cryptsetup's default is what
/// two seconds give, some 10 million at most.
const ITERATIONS: u64 = 1 << 27;
/// The most memory of Argon2, KiB: cryptsetup's own default limit.
const MEMORY: u64 = 1 << 20;
/// The most passes of Argon2 times its KiB: a minute.
const PASSES: u64 = 64 << 20;
const LANES: u64 = 64;
/// All keyslots of a header together may cost so many of the dearest that is allowed.
const ALL_SLOTS: f64 = 3.0;

/// A key derivation function with its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kdf {
    /// PBKDF2.
    Pbkdf2 {
        /// Of its HMAC.
        hash: Hash,
        /// How many.
        iterations: u32,
        /// At most 1 KiB.
        salt: Vec<u8>,
    },
    /// Argon2, version 1.3.
    Argon2 {
        /// The variant.
        kind: Argon2Kind,
        /// Passes over the memory.
        time: u32,
        /// KiB.
        memory: u32,
        /// Lanes.
        cpus: u32,
        /// At most 1 KiB.
        salt: Vec<u8>,
    },
}

/// The variants that LUKS2 knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argon2Kind {
    /// Argon2i.
    I,
    /// Argon2id.
    Id,
}

/// What the keyslots tried so far have cost, in the dearest that is allowed.
#[derive(Default)]
pub(crate) struct Spent(f64);

impl Spent {
    /// Count one more derivation for `slot`; refused where it, or all of them, would cost too much.
    pub(crate) fn spend(&mut self, slot: u32, kdf: &Kdf) -> Result<(), Error> {
        match *kdf {
            Kdf::Pbkdf2 { iterations, .. } => {
                self.count(slot, "PBKDF2 iterations, all in all,", iterations.into(), ITERATIONS)
            }
            Kdf::Argon2 { time, memory, cpus, .. } => {
                let (time, memory, cpus) = (u64::from(time), u64::from(memory), u64::from(cpus));
                for (what, found, limit) in
                    [("Argon2 memory in KiB", memory, MEMORY), ("Argon2 lanes", cpus, LANES)]
                {
                    if found > limit {
                        return Err(Error::Cost { slot, what, found, limit });
                    }
                }
                let all = "Argon2 passes times KiB, all in all,";
                self.count(slot, all, time * memory, PASSES)
            }
        }
    }

    /// Count the iterations of the digest that tells whether a key is right.
    pub(crate) fn spend_on_digest(&mut self, slot: u32, iterations: u32) -> Result<(), Error> {
        self.count(slot, "digest iterations", iterations.into(), ITERATIONS)
    }

    fn count(
        &mut self,
        slot: u32,
        what: &'static str,
        found: u64,
        limit: u64,
    ) -> Result<(), Error> {
        self.0 += found as f64 / limit as f64;
        if found > limit || self.0 > ALL_SLOTS {
            return Err(Error::Cost { slot, what, found, limit });
        }
        Ok(())
    }
}

impl Kdf {
    /// The key of `slot` from the secret. Call [`Spent::spend`] before.
    pub(crate) fn derive(
        &self,
        slot: u32,
        secret: &[u8],
        len: usize,
    ) -> Result<LockedBytes, Error> {
        let mut key = LockedBytes::zeroed(len).map_err(Error::Memory)?;
        match self {
            Kdf::Pbkdf2 { hash, iterations, salt } => {
                hash.pbkdf2(secret, salt, *iterations, &mut key);
            }
            Kdf::Argon2 { kind, time, memory, cpus, salt } => {
                let failed =
                    |error: argon2::Error| Error::Argon2 { slot, found: error.to_string() };
                let algorithm = match kind {
                    Argon2Kind::I => Algorithm::Argon2i,
                    Argon2Kind::Id => Algorithm::Argon2id,
                };
                let params = Params::new(*memory, *time, *cpus, Some(len)).map_err(failed)?;
                let mut blocks: Vec<Block> = vec![];
                blocks.try_reserve_exact(params.block_count()).map_err(|_| out_of_memory())?;
                blocks.resize(params.block_count(), Block::default());
                let end = Argon2::new(algorithm, Version::V0x13, params)
                    .hash_password_into_with_memory(secret, salt, &mut key, &mut blocks);
                blocks.iter_mut().for_each(Zeroize::zeroize);
                end.map_err(failed)?;
            }
        }
        Ok(key)
    }
}

fn out_of_memory() -> Error {
    Error::Memory(std::io::ErrorKind::OutOfMemory.into())
}

/// How much work a new keyslot's derivation is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// As much as this machine does in so long.
    Time(Duration),
    /// PBKDF2 iterations, or Argon2 passes over so many KiB with so many lanes. For tests, or where a
    /// slower machine has to open it.
    Exactly {
        /// Iterations of PBKDF2, passes of Argon2.
        iterations: u32,
        /// KiB, of Argon2.
        memory: u32,
        /// Lanes, of Argon2.
        cpus: u32,
    },
}

impl Default for Effort {
    /// Two seconds, as cryptsetup.
    fn default() -> Effort {
        Effort::Time(Duration::from_secs(2))
    }
}

impl Effort {
    /// PBKDF2 of this effort. At least 1000 iterations, as RFC 8018 asks.
    pub(crate) fn pbkdf2(self, hash: Hash, salt: Vec<u8>, key_len: usize) -> Kdf {
        let iterations = match self {
            Effort::Exactly { iterations, .. } => iterations,
            Effort::Time(time) => {
                // A block of the output costs all the iterations again.
                let per_second = pbkdf2_speed(hash) / key_len.div_ceil(hash.digest_len()) as f64;
                (time.as_secs_f64() * per_second).min(ITERATIONS as f64 / 2.0) as u32
            }
        };
        Kdf::Pbkdf2 { hash, iterations: iterations.max(1000), salt }
    }

    /// Argon2id of this effort: memory first, as cryptsetup goes about it, up to 1 GiB or half of the
    /// machine's; then passes, at least 4.
    pub(crate) fn argon2id(self, salt: Vec<u8>) -> Result<Kdf, Error> {
        let id = |time, memory, cpus, salt| Kdf::Argon2 {
            kind: Argon2Kind::Id,
            time,
            memory,
            cpus,
            salt,
        };
        let wanted = match self {
            Effort::Exactly { iterations, memory, cpus } => {
                return Ok(id(iterations, memory, cpus, salt));
            }
            Effort::Time(wanted) => wanted.as_secs_f64(),
        };
        let cpus = thread::available_parallelism().map_or(1, NonZero::get).min(4) as u32;
        let most = (memory_of_machine() / 2).clamp(MEMORY / 16, MEMORY) as f64;
        let least = MEMORY / 16;
        let began = Instant::now();
        drop(id(4, least as u32, cpus, salt.clone()).derive(0, b"how fast is it", 32)?);
        let speed = 4.0 * least as f64 / began.elapsed().as_secs_f64().max(1e-6);
        let memory = (wanted * speed / 4.0).clamp(64.0 * f64::from(cpus), most);
        let time = (wanted * speed / memory).clamp(4.0, PASSES as f64 / 2.0 / memory);
        Ok(id(time as u32, memory as u32, cpus, salt))
    }
}

/// Iterations a second.
fn pbkdf2_speed(hash: Hash) -> f64 {
    let mut out = [0; 20];
    let mut iterations = 1 << 12;
    loop {
        let began = Instant::now();
        hash.pbkdf2(b"how fast is it", b"salt", iterations, &mut out);
        let took = began.elapsed().as_secs_f64();
        if took > 0.05 || iterations >= 1 << 26 {
            return f64::from(iterations) / took.max(1e-6);
        }
        iterations *= 4;
    }
}

/// KiB.
fn memory_of_machine() -> u64 {
    let told = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let number = total.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
    number.unwrap_or(MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_prices_are_refused_by_name() {
        let argon2 = |time, memory, cpus| Kdf::Argon2 {
            kind: Argon2Kind::Id,
            time,
            memory,
            cpus,
            salt: vec![0; 32],
        };
        let pbkdf2 = |iterations| Kdf::Pbkdf2 { hash: Hash::Sha1, iterations, salt: vec![] };
        for (kdf, said) in [
            (argon2(4, 1 << 22, 4), "Argon2 memory in KiB of 4194304"),
            (argon2(u32::MAX, 1 << 20, 4), "Argon2 passes"),
            (argon2(4, 1 << 10, 1 << 20), "Argon2 lanes"),
            (pbkdf2(u32::MAX), "PBKDF2 iterations"),
        ] {
            let error = Spent::default().spend(7, &kdf).expect_err(said).to_string();
            assert!(error.contains(said) && error.contains("keyslot 7"), "{error}");
        }
        let mut spent = Spent::default();
        for kdf in [argon2(4, 1 << 20, 4), pbkdf2(20_000_000)] {
            spent.spend(0, &kdf).expect("cryptsetup's defaults");
        }
        let all = (0..32).try_for_each(|slot| spent.spend(slot, &pbkdf2(ITERATIONS as u32)));
        assert!(all.is_err(), "thirty-two dear keyslots are too dear together");
    }

    /// RFC 9106, section 5.3 has a secret and associated data, which LUKS has not: this is what the
    /// reference implementation's own tests expect.
    #[test]
    fn argon2id_is_that_of_the_reference() {
        let kdf = Kdf::Argon2 {
            kind: Argon2Kind::Id,
            time: 2,
            memory: 256,
            cpus: 1,
            salt: b"somesalt".to_vec(),
        };
        let key = kdf.derive(0, b"password", 32).expect("a key");
        assert_eq!(
            hex::encode(&key[..]),
            "9dfeb910e80bad0311fee20f9c0e2b12c17987b4cac90c2ef54d5b3021c68bfe"
        );
    }

    #[test]
    fn effort_is_measured_in_time() {
        let short = Effort::Time(Duration::from_millis(40));
        let Kdf::Pbkdf2 { iterations, .. } = short.pbkdf2(Hash::Sha256, vec![0; 32], 64) else {
            panic!("another function");
        };
        assert!((1000..ITERATIONS as u32).contains(&iterations), "{iterations}");
        let kdf = short.argon2id(vec![0; 32]).expect("parameters");
        let Kdf::Argon2 { time, memory, .. } = kdf else { panic!("another function") };
        assert!(time >= 4 && (64..=MEMORY as u32).contains(&memory), "{time} passes, {memory} KiB");
    }
}
