//! Keyslots of LUKS1 headers, filled and erased as `cryptsetup luksAddKey` and `luksKillSlot` do it.
//!
//! Whenever the power is cut, every secret that is not being taken away opens the container; where one takes the place of
//! another, one of the two does.

use ringtap_io::{Io, LockedBytes};

use super::kdf::Effort;
use super::unlock::{read, version, volume_key_at};
use super::v1::{self, SlotPlace};
use super::{Error, Keyslot};
use crate::{Container, Error as IoError, Secret};

const SALT: usize = 32;

/// What to do with keyslots.
pub enum KeyslotChange {
    /// Let a secret open the container, too.
    Fill {
        /// The secret.
        secret: Secret,
        /// The keyslot; a free one where none is named. One in use is overwritten only by force.
        slot: Option<u32>,
        /// How much work the derivation of its key is to be.
        effort: Effort,
    },
    /// Take a keyslot away.
    Erase {
        /// Its number.
        slot: u32,
    },
    /// Take away every keyslot that a secret opens.
    EraseFor {
        /// The secret.
        secret: Secret,
    },
}

/// Where a header lies in a container.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeaderPlace {
    /// Where it begins.
    pub offset: u64,
    /// Its bytes, where it is not in front of its payload.
    pub len: Option<u64>,
}

/// A change of keyslots that can be made: secrets were tried, keys derived, and nothing is written yet.
pub struct KeyslotPlan {
    place: HeaderPlace,
    /// The header that it was made of.
    header: Vec<u8>,
    steps: Steps,
}

enum Steps {
    Fill(Box<Fill>),
    Erase(Vec<Keyslot>),
}

struct Fill {
    keyslot: Keyslot,
    material: LockedBytes,
    /// The keyslot that the secret opens meanwhile, with its material.
    beside: Option<(Keyslot, LockedBytes)>,
    /// What is in the keyslot goes.
    overwrites: bool,
}

/// Change the keyslots of a container that nobody uses; gives the numbers of those changed. See [`plan_keyslots`].
pub async fn change_keyslots(
    io: &Io,
    container: &Container,
    place: HeaderPlace,
    change: KeyslotChange,
    secret: Option<&Secret>,
    force: bool,
) -> Result<Vec<u32>, Error> {
    plan_keyslots(io, container, place, change, secret, force).await?.carry_out(io, container).await
}

/// Whether keyslots of a container can be changed so, with all that is needed for it. `secret` is
/// one that opens it, needed to fill a keyslot. The last one in use is erased only by `force`.
pub async fn plan_keyslots(
    io: &Io,
    container: &Container,
    place: HeaderPlace,
    change: KeyslotChange,
    secret: Option<&Secret>,
    force: bool,
) -> Result<KeyslotPlan, Error> {
    let bytes = read(io, container, place.offset, v1::LEN).await?;
    if version(&bytes)? == 2 {
        return Err(Error::Unknown {
            what: "changing keyslots of version",
            found: "2".into(),
            hint: ": use cryptsetup luksAddKey or luksKillSlot",
        });
    }
    let header = super::parse(&bytes)?;
    let table = Table { io, container, place, slots: v1::slots(&bytes) };
    let end = place.len.unwrap_or(header.payload_offset);
    let in_use = |index: u32| header.keyslots.iter().any(|slot| slot.index == index);
    let named = |index: u32| {
        table.slots.get(index as usize).copied().ok_or(Error::Field {
            what: "number of keyslots, where one is named that there is not,",
            found: table.slots.len() as u64,
            wanted: "more than the number of the keyslot, which counts from 0",
        })
    };
    let erased = |found: Vec<Keyslot>| {
        if !found.is_empty() && found.len() == header.keyslots.len() && !force {
            return Err(Error::LastKeyslot);
        }
        found.iter().try_for_each(|keyslot| table.check(keyslot, end))?;
        Ok(Steps::Erase(found))
    };
    let steps = match change {
        KeyslotChange::Fill { secret: new, slot, effort } => {
            let secret = secret.ok_or(Error::NoSecret)?;
            let index = match slot {
                Some(index) if in_use(index) && !force => {
                    return Err(Error::KeyslotInUse { index });
                }
                Some(index) => index,
                None => (0..)
                    .take(table.slots.len())
                    .find(|index| !in_use(*index))
                    .ok_or(Error::NoFreeKeyslot)?,
            };
            named(index)?;
            let volume_key = volume_key_at(io, container, place.offset, &header, secret).await?;
            let Some(model) = header.keyslots.first() else { return Err(Error::NoKeyslot) };
            let mut salt = vec![0; SALT];
            getrandom::fill(&mut salt).map_err(Error::Random)?;
            let kdf = effort.pbkdf2(model.hash, salt, header.encryption.key_len());
            let at = |index: u32| {
                let SlotPlace { offset, stripes } = named(index)?;
                let keyslot = Keyslot { index, kdf: kdf.clone(), offset, stripes, ..model.clone() };
                table.check(&keyslot, end).map(|()| keyslot)
            };
            let (keyslot, overwrites) = (at(index)?, in_use(index));
            // While one in use opens nothing, the new secret opens by another.
            let mut free =
                (0..).take(table.slots.len()).filter(|index| overwrites && !in_use(*index));
            let beside = match free.find_map(|index| at(index).ok()) {
                Some(beside) => {
                    let material = beside.fill(&new, &volume_key)?;
                    Some((beside, material))
                }
                None if overwrites => {
                    let mut others = header.clone();
                    others.keyslots.retain(|keyslot| keyslot.index != index);
                    match volume_key_at(io, container, place.offset, &others, secret).await {
                        Ok(_) => None,
                        Err(Error::WrongSecret { .. } | Error::NoKeyslot) => {
                            return Err(Error::NoSpareKeyslot { index });
                        }
                        Err(error) => return Err(error),
                    }
                }
                None => None,
            };
            let material = keyslot.fill(&new, &volume_key)?;
            Steps::Fill(Box::new(Fill { keyslot, material, beside, overwrites }))
        }
        KeyslotChange::Erase { slot } => {
            named(slot)?;
            let found = header.keyslots.iter().filter(|keyslot| keyslot.index == slot);
            erased(found.cloned().collect())?
        }
        KeyslotChange::EraseFor { secret } => {
            let mut found = vec![];
            for keyslot in &header.keyslots {
                let mut only = header.clone();
                only.keyslots = vec![keyslot.clone()];
                match volume_key_at(io, container, place.offset, &only, &secret).await {
                    Ok(_) => found.push(keyslot.clone()),
                    Err(Error::WrongSecret { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            if found.is_empty() {
                return Err(header.refused(&secret));
            }
            erased(found)?
        }
    };
    Ok(KeyslotPlan { place, header: bytes, steps })
}

impl KeyslotPlan {
    /// Make the change; gives the numbers of the keyslots.
    ///
    /// # Errors
    ///
    /// The header is another by now, or cannot be read or written.
    pub async fn carry_out(self, io: &Io, container: &Container) -> Result<Vec<u32>, Error> {
        let now = read(io, container, self.place.offset, v1::LEN).await?;
        if now != self.header {
            return Err(Error::Changed);
        }
        let table = Table { io, container, place: self.place, slots: v1::slots(&now) };
        match self.steps {
            Steps::Fill(fill) => {
                let Fill { keyslot, material, beside, overwrites } = *fill;
                if let Some((beside, material)) = &beside {
                    table.fill(beside, material).await?;
                }
                if overwrites {
                    table.disable(keyslot.index).await?;
                }
                table.fill(&keyslot, &material).await?;
                if let Some((beside, _)) = beside {
                    table.erase(&[beside]).await?;
                }
                Ok(vec![keyslot.index])
            }
            Steps::Erase(keyslots) => table.erase(&keyslots).await,
        }
    }
}

struct Table<'a> {
    io: &'a Io,
    container: &'a Container,
    place: HeaderPlace,
    slots: Vec<SlotPlace>,
}

impl Table<'_> {
    /// Whether the key material lies between the header and what follows, over no other's.
    fn check(&self, keyslot: &Keyslot, end: u64) -> Result<(), Error> {
        let len = keyslot.area_len()? as u64;
        let (from, to) = (keyslot.offset, keyslot.offset.saturating_add(len));
        let others = self.slots.iter().zip(0..).filter(|(_, index)| *index != keyslot.index);
        let mut others = others.map(|(slot, _)| slot.offset);
        if from < v1::LEN as u64
            || to > end
            || others.any(|other| other < to && from < other.saturating_add(len))
        {
            return Err(Error::Field {
                what: "key material's offset",
                found: from,
                wanted: "between the header and the payload, over no other keyslot's",
            });
        }
        Ok(())
    }

    /// Write, and see that it is stable.
    async fn write(&self, at: u64, bytes: &[u8], what: &'static str) -> Result<(), Error> {
        let failed = |source: IoError| Error::Io { what, source };
        self.container.write(self.io, self.place.offset + at, bytes).await.map_err(failed)?;
        self.container.sync(self.io).await.map_err(failed)
    }

    /// Let a keyslot that is not in use open the container.
    async fn fill(&self, keyslot: &Keyslot, material: &[u8]) -> Result<(), Error> {
        self.write(keyslot.offset, material, "write key material").await?;
        self.enable(keyslot).await
    }

    async fn enable(&self, keyslot: &Keyslot) -> Result<(), Error> {
        let at = v1::slot_at(keyslot.index);
        let entry = v1::slot_bytes(keyslot)?;
        let (mark, rest) = entry.split_at(4);
        // The mark alone, last: a sector's border may lie in the entry.
        self.write(at + 4, rest, "write a keyslot").await?;
        self.write(at, mark, "write a keyslot").await
    }

    async fn disable(&self, index: u32) -> Result<(), Error> {
        let at = v1::slot_at(index);
        self.write(at, &v1::DISABLED.to_be_bytes(), "write a keyslot").await?;
        // Iterations and salt.
        self.write(at + 4, &[0; 4 + SALT], "write a keyslot").await
    }

    async fn erase(&self, keyslots: &[Keyslot]) -> Result<Vec<u32>, Error> {
        for keyslot in keyslots {
            let mut noise = vec![0; keyslot.area_len()?];
            getrandom::fill(&mut noise).map_err(Error::Random)?;
            self.write(keyslot.offset, &noise, "erase key material").await?;
            self.disable(keyslot.index).await?;
        }
        Ok(keyslots.iter().map(|keyslot| keyslot.index).collect())
    }
}
