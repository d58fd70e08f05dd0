//! What headers of both versions come down to, and the way from a secret to the volume's key.

use ringtap_io::LockedBytes;
use subtle::ConstantTimeEq;

use super::kdf::Spent;
use super::{Encryption, Error, Hash, Kdf, Keyed, af};
use crate::{Secret, SectorCipher};

/// The most that the stripes of one key take: 4000 of the longest key are a quarter of it.
const MATERIAL: usize = 1 << 20;
/// The sector size of key material.
const SECTOR: usize = 512;

/// A LUKS header: all that is needed to open its payload.
#[derive(Clone, Debug)]
pub struct Header {
    /// 1 or 2.
    pub version: u16,
    /// As the header spells it.
    pub uuid: String,
    /// Only of LUKS2, and often empty.
    pub label: String,
    /// Bytes from the beginning of the file to the payload.
    pub payload_offset: u64,
    /// Bytes of the payload; where there is none, it goes to the end of the file.
    pub payload_len: Option<u64>,
    /// How the payload is enciphered.
    pub encryption: Encryption,
    /// Bytes of an enciphered sector: 512 to 4096.
    pub sector_size: usize,
    /// The number of the payload's first sector, counted in 512 bytes.
    pub first_sector: u64,
    /// The keyslots that can be tried, in the order in which to do so.
    pub keyslots: Vec<Keyslot>,
    /// Keyslots of LUKS1 that are not in use: their numbers, and where their key material would lie.
    pub unused: Vec<(u32, u64)>,
    /// Whether the header itself asks that discards are passed on (LUKS2's flag).
    pub allow_discards: bool,
}

/// One way to the volume's key.
#[derive(Clone, Debug)]
pub struct Keyslot {
    /// Its number.
    pub index: u32,
    /// From the secret to the key of the key material.
    pub kdf: Kdf,
    /// How the key material is enciphered.
    pub encryption: Encryption,
    /// Where the key material lies, in bytes from the beginning of the file.
    pub offset: u64,
    /// Into how many stripes the key is split.
    pub stripes: usize,
    /// The hash of the splitter.
    pub hash: Hash,
    /// Bytes of the volume's key.
    pub key_len: usize,
    /// Tells the right key.
    pub digest: KeyDigest,
}

/// A digest of the volume's key: PBKDF2 again.
#[derive(Clone, Debug)]
pub struct KeyDigest {
    /// Of its HMAC.
    pub hash: Hash,
    /// How many.
    pub iterations: u32,
    /// At most 1 KiB.
    pub salt: Vec<u8>,
    /// 16 to 1024 bytes; 20 in LUKS1.
    pub digest: Vec<u8>,
}

impl KeyDigest {
    fn fits(&self, key: &[u8]) -> bool {
        let mut digest = vec![0; self.digest.len()];
        self.hash.pbkdf2(key, &self.salt, self.iterations, &mut digest);
        digest.ct_eq(&self.digest).into()
    }
}

impl Keyslot {
    /// Bytes of the key material; [`Error::Field`] where that is out of all proportion.
    pub fn material_len(&self) -> Result<usize, Error> {
        self.key_len.checked_mul(self.stripes).filter(|len| *len > 0 && *len <= MATERIAL).ok_or(
            Error::Field {
                what: "number of stripes",
                found: self.stripes as u64,
                wanted: "4000, as cryptsetup makes it",
            },
        )
    }

    /// The same, in whole sectors.
    pub(crate) fn area_len(&self) -> Result<usize, Error> {
        Ok(self.material_len()?.next_multiple_of(SECTOR))
    }

    /// Try the secret, with the key material as it lies in the file. Nothing where it does not fit.
    pub(crate) fn open(
        &self,
        spent: &mut Spent,
        secret: &Secret,
        material: &mut [u8],
    ) -> Result<Option<LockedBytes>, Error> {
        spent.spend(self.index, &self.kdf)?;
        spent.spend_on_digest(self.index, self.digest.iterations)?;
        let len = self.material_len()?;
        let key = self.kdf.derive(self.index, secret.bytes(), self.encryption.key_len())?;
        self.encryption.with_key(&key, SECTOR, 0)?.decrypt(0, material);
        let mut volume_key = LockedBytes::zeroed(self.key_len).map_err(Error::Memory)?;
        af::merge(material.get(..len).unwrap_or_default(), self.hash, &mut volume_key);
        Ok(self.digest.fits(&volume_key).then_some(volume_key))
    }

    /// The key material that hides the volume's key behind the secret.
    pub(crate) fn fill(&self, secret: &Secret, volume_key: &[u8]) -> Result<LockedBytes, Error> {
        let mut material = LockedBytes::zeroed(self.area_len()?).map_err(Error::Memory)?;
        getrandom::fill(&mut material).map_err(Error::Random)?;
        let len = self.material_len()?;
        af::split(volume_key, self.hash, material.get_mut(..len).unwrap_or_default());
        let key = self.kdf.derive(self.index, secret.bytes(), self.encryption.key_len())?;
        self.encryption.with_key(&key, SECTOR, 0)?.encrypt(0, &mut material);
        Ok(material)
    }
}

impl Header {
    /// The payload's cipher.
    pub(crate) fn cipher(&self, volume_key: &[u8]) -> Result<Keyed, Error> {
        self.encryption.with_key(volume_key, self.sector_size, self.first_sector)
    }

    /// What to say where no keyslot fits.
    pub(crate) fn refused(&self, secret: &Secret) -> Error {
        if self.keyslots.is_empty() {
            return Error::NoKeyslot;
        }
        let hint = if secret.bytes().ends_with(b"\n") {
            "; it ends with a newline, which counts: write it with printf, not with echo"
        } else {
            ""
        };
        Error::WrongSecret { tried: self.keyslots.len(), hint }
    }
}
