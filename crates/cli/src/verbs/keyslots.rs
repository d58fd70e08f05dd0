//! The keyslots of a LUKS1 header, alone or inside qcow2, as `amend -o` names them.

use std::time::Duration;

use ringtap_daemon::Error as Fault;
use ringtap_image::SecretSource;
use ringtap_image_tools::keyslots::{Effort, KeyslotChange};

use crate::secret;

/// What `-o` says of keyslots.
#[derive(Debug, Default)]
pub(crate) struct Keyslots {
    /// To be in use, or not.
    state: Option<bool>,
    slot: Option<u32>,
    new: Option<SecretSource>,
    old: Option<SecretSource>,
    effort: Effort,
}

impl Keyslots {
    /// Take an option, without the `encrypt.` of qcow2. False where it is none of keyslots.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool, Fault> {
        let wrong = |want: &str| Fault::Usage(format!("{key}={value}: write {want}"));
        let number = |want| value.parse::<u32>().map_err(|_| wrong(want));
        match key {
            "state" => {
                self.state = match value {
                    "active" => Some(true),
                    "inactive" => Some(false),
                    _ => return Err(wrong("active or inactive")),
                }
            }
            "keyslot" => self.slot = Some(number("the number of a keyslot, from 0")?),
            "new-secret" => self.new = Some(secret::source(value).map_err(Fault::Usage)?),
            "old-secret" => self.old = Some(secret::source(value).map_err(Fault::Usage)?),
            "iter-time" => {
                let time = number("milliseconds")?;
                self.effort = Effort::Time(Duration::from_millis(time.into()));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What is to be changed.
    pub(crate) fn change(self) -> anyhow::Result<KeyslotChange> {
        let usage = |why: &str| Err(Fault::Usage(why.to_owned()));
        let read = |source: Option<SecretSource>| {
            let read = |source| secret::read(&source, |text| tracing::warn!("{text}"));
            source.map(read).transpose()
        };
        let (new, old) = (read(self.new)?, read(self.old)?);
        Ok(match (self.state, self.slot, new, old) {
            (Some(true), slot, Some(secret), None) => {
                KeyslotChange::Fill { secret, slot, effort: self.effort }
            }
            (Some(true), _, None, _) => usage("state=active: add new-secret=file:PATH")?,
            (Some(false), Some(slot), None, None) => KeyslotChange::Erase { slot },
            (Some(false), None, None, Some(secret)) => KeyslotChange::EraseFor { secret },
            (Some(false), None, None, None) => usage(
                "state=inactive: name what to take away, by keyslot=N or old-secret=file:PATH",
            )?,
            (None, ..) => usage("keyslots: add state=active or state=inactive")?,
            _ => usage(
                "state=active takes new-secret and keyslot; state=inactive takes either keyslot or \
                 old-secret",
            )?,
        })
    }
}
