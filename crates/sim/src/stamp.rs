//! Sectors that say who wrote them: a value, and where it belongs.

/// Bytes of a guest's sector.
pub const SECTOR: usize = 512;

const HEADER: usize = 16;

/// A sector that no single write has left: torn inside, or of another place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sector {sector} holds bytes that nobody wrote there; it begins {begins:02x?}")]
pub struct Garbled {
    /// The sector.
    pub sector: u64,
    /// Its first bytes.
    pub begins: [u8; HEADER],
}

/// Fill whole sectors, the first of which is number `first`, with `value`; 0 makes them all zeros.
pub fn stamp(bytes: &mut [u8], first: u64, value: u64) {
    for (number, sector) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
        if value == 0 {
            sector.fill(0);
            continue;
        }
        sector[..8].copy_from_slice(&value.to_le_bytes());
        sector[8..HEADER].copy_from_slice(&number.to_le_bytes());
        let mut filled = HEADER;
        while filled < SECTOR {
            sector.copy_within(..filled.min(SECTOR - filled), filled);
            filled *= 2;
        }
    }
}

/// The values that whole sectors were stamped with, the first being number `first`.
pub fn stamps(bytes: &[u8], first: u64) -> Result<Vec<u64>, Garbled> {
    (first..)
        .zip(bytes.chunks_exact(SECTOR))
        .map(|(number, sector)| value(sector, number))
        .collect()
}

fn value(sector: &[u8], number: u64) -> Result<u64, Garbled> {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&sector[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let (value, place) = (word(0), word(8));
    let repeats = sector[HEADER..] == sector[..SECTOR - HEADER];
    let at_home = if value == 0 { place == 0 } else { place == number };
    if repeats && at_home {
        return Ok(value);
    }
    let mut begins = [0; HEADER];
    begins.copy_from_slice(&sector[..HEADER]);
    Err(Garbled { sector: number, begins })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_tells_value_and_place() {
        let mut bytes = [0xee; 3 * SECTOR];
        assert!(stamps(&bytes, 0).is_err());
        stamp(&mut bytes, 5, 77);
        assert_eq!(stamps(&bytes, 5), Ok(vec![77; 3]));
        assert_eq!(stamps(&bytes, 6).map_err(|garbled| garbled.sector), Err(6));
        stamp(&mut bytes[SECTOR..2 * SECTOR], 6, 0);
        assert_eq!(stamps(&bytes, 5), Ok(vec![77, 0, 77]));
        bytes[2 * SECTOR + 300] ^= 1;
        assert_eq!(stamps(&bytes, 5).map_err(|garbled| garbled.sector), Err(7));
        bytes[SECTOR + 511] = 1;
        assert_eq!(stamps(&bytes, 5).map_err(|garbled| garbled.sector), Err(6));
    }
}
