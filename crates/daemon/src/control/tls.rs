//! Certificates that clients name: QEMU's `tls-creds-x509`, for the NBD server that they start and for exports of others.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, words};
use super::throttle::duplicate;
use crate::node::is_name;
use crate::running::{Running, Then};
use crate::tls::NamedCredentials;

words! {
    /// Which end of a connection they are for.
    enum TlsEndpoint { "client" Client, "server" Server }
}

arguments! {
    /// Certificates.
    struct TlsOptions {
        /// The folder that they are in; it must be said.
        "dir" dir: Option<String>,
        "endpoint" endpoint: Option<TlsEndpoint>,
        /// Whether the other end must show one of the same authority.
        "verify-peer" verify_peer: Option<bool>,
    }
}

impl Running {
    /// Whether there is an object of that id.
    pub(super) fn has_object(&self, id: &str) -> bool {
        self.groups.contains_key(id)
            || self.secrets.contains_key(id)
            || self.tls_creds.contains_key(id)
    }

    /// Read certificates, and have them under that id.
    pub(super) fn add_tls(&mut self, id: String, of: TlsOptions, reply: Reply<Done>) {
        let refuse = |text: String| Err(Refusal::new(text));
        if !is_name(&id) {
            let text = format!(
                "Parameter 'id' expects an identifier: a letter, then up to 30 letters, digits, '-', '.' and '_', not '{id}'"
            );
            return reply.give(refuse(text));
        }
        let Some(dir) = of.dir.filter(|dir| !dir.is_empty()) else {
            return reply.give(refuse("Missing 'dir' property value".into()));
        };
        let folder = std::path::absolute(&dir).unwrap_or(PathBuf::from(dir));
        let verify_peer = of.verify_peer.unwrap_or(true);
        let is_server = of.endpoint == Some(TlsEndpoint::Server);
        if !is_server && !verify_peer {
            let why = "'verify-peer' false of a client is not offered: without it any server could be the one meant";
            return reply.give(refuse(why.into()));
        }
        let begun = self.in_time("certificates", move || -> Then {
            let read = match is_server {
                true => NamedCredentials::of_server(&folder, verify_peer).map_err(Refusal::from),
                false => NamedCredentials::of_client(&folder).map_err(Refusal::new),
            };
            Box::new(move |running| {
                reply.give(read.and_then(|read| {
                    if running.has_object(&id) {
                        return Err(duplicate(&id));
                    }
                    running.tls_creds.insert(id, read);
                    Ok(Done {})
                }));
            })
        });
        if let Err(error) = begun {
            tracing::error!("cannot read certificates: {error}");
        }
    }

    fn tls(&self, id: &str, server: bool) -> Result<&NamedCredentials, Refusal> {
        let Some(found) = self.tls_creds.get(id) else {
            return Err(Refusal::new(match self.has_object(id) {
                true => format!("Object with id '{id}' is not TLS credentials"),
                false => format!("No TLS credentials with id '{id}'"),
            }));
        };
        if found.server.is_some() != server {
            let end = if server { "server" } else { "client" };
            return Err(Refusal::new(format!("Expected TLS credentials for a {end} endpoint")));
        }
        Ok(found)
    }

    /// Those of that id, for a server.
    pub(super) fn tls_of_server(&self, id: &str) -> Result<NamedCredentials, Refusal> {
        self.tls(id, true).cloned()
    }

    /// The folder of those of that id, for a connection to a server.
    pub(super) fn tls_of_client(&self, id: &str) -> Result<PathBuf, Refusal> {
        self.tls(id, false).map(|found| found.folder.clone())
    }
}

/// As an export remembers those of the server that it is of.
pub(super) fn noted(id: &str, of: &NamedCredentials) -> Value {
    json!({ "id": id, "dir": of.folder.to_string_lossy(), "verify-peer": of.verify_peer })
}
