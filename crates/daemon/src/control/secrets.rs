//! Objects: secrets of encrypted images, which are named by files and never said on the socket, throttle groups, and
//! certificates.

use std::collections::btree_map::Entry;
use std::time::Duration;

use ringtap_image::luks::Effort;
use ringtap_image::{Secret, SecretSource};

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, choice};
use super::throttle::{GroupOptions, duplicate};
use super::tls::TlsOptions;
use crate::running::{Running, Then};

arguments! {
    /// A secret: all bytes of a file.
    struct SecretOptions { "file" file: String }
}

arguments! {
    /// What opens an encrypted image.
    struct LuksKey {
        /// The secret, by its id.
        "key-secret" key_secret: String,
    }
}

choice! {
    /// How a qcow2 image's data is encrypted.
    struct Qcow2Encryption {}
    "format" enum Qcow2EncryptionFormat { "luks" Luks(LuksKey) }
}

arguments! {
    /// How a new LUKS header is made.
    struct LuksNew {
        /// The secret that is to open it, by its id.
        "key-secret" key_secret: String,
        /// For how many milliseconds a secret is worked on; two seconds where it is not said.
        "iter-time" iter_time: Option<u32>,
    }
}

choice! {
    /// How a new qcow2 image's data is to be encrypted.
    struct NewQcow2Encryption {}
    "format" enum NewQcow2EncryptionFormat { "luks" Luks(LuksNew) }
}

impl LuksNew {
    /// What is to open it, and how much work that is to be.
    pub(super) fn found(&self, running: &Running) -> Result<(Secret, Effort), Refusal> {
        let effort = match self.iter_time {
            None => Effort::default(),
            Some(0) => return Err(Refusal::new("'iter-time' is at least 1 ms")),
            Some(time) => Effort::Time(Duration::from_millis(time.into())),
        };
        Ok((running.secret(&self.key_secret)?, effort))
    }
}

impl Qcow2Encryption {
    /// The id of what opens it.
    pub(super) fn key_secret(&self) -> &str {
        let Qcow2EncryptionFormat::Luks(key) = &self.of;
        &key.key_secret
    }
}

impl Running {
    /// The secret with that id.
    pub(super) fn secret(&self, id: &str) -> Result<Secret, Refusal> {
        let secret = self.secrets.get(id).cloned();
        secret.ok_or_else(|| Refusal::new(format!("No secret with id '{id}'")))
    }
}

choice! {
    /// `object-add`
    struct AddObject { "id" id: String }
    "qom-type" enum ObjectType {
        "secret" Secret(SecretOptions),
        "throttle-group" Group(GroupOptions),
        "tls-creds-x509" Tls(TlsOptions),
    }
}

/// Read a secret, and log what its owner should know of it.
fn read(id: &str, source: &SecretSource) -> Result<Secret, Refusal> {
    if let Some(warning) = source.warning() {
        tracing::warn!("{id}: {warning}");
    }
    source.read().map_err(|error| Refusal::new(error.to_string()))
}

impl Command for AddObject {
    const NAME: &'static str = "object-add";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let (id, file) = match self.of {
            ObjectType::Group(of) => return reply.give(running.add_group(self.id, &of)),
            ObjectType::Tls(of) => return running.add_tls(self.id, of, reply),
            ObjectType::Secret(SecretOptions { file }) => (self.id, file),
        };
        let begun = running.in_time("secret", move || -> Then {
            let source = SecretSource::File(std::path::absolute(&file).unwrap_or(file.into()));
            let found = read(&id, &source);
            Box::new(move |running| {
                let taken_else = running.has_object(&id) && !running.secrets.contains_key(&id);
                reply.give(found.and_then(|secret| match running.secrets.entry(id) {
                    taken if taken_else => Err(duplicate(taken.key())),
                    Entry::Vacant(place) => {
                        running.secret_sources.insert(place.key().clone(), source.to_string());
                        place.insert(secret);
                        Ok(Done {})
                    }
                    Entry::Occupied(taken) => Err(duplicate(taken.key())),
                }));
            })
        });
        if let Err(error) = begun {
            tracing::error!("cannot read a secret: {error}");
        }
    }
}

arguments! {
    /// `object-del`
    struct DeleteObject { "id" id: String }
}

impl Command for DeleteObject {
    const NAME: &'static str = "object-del";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        if let Some(removed) = running.remove_group(&self.id) {
            return reply.give(removed);
        }
        // Servers and images that were opened with it have what they need.
        if running.tls_creds.remove(&self.id).is_some() {
            return reply.give(Ok(Done {}));
        }
        running.secret_sources.remove(&self.id);
        reply.give(match running.secrets.remove(&self.id) {
            Some(_) => Ok(Done {}),
            None => Err(Refusal::new(format!("object '{}' not found", self.id))),
        });
    }
}
