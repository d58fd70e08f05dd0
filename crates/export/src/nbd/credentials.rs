//! Certificates of a server, from a folder laid out as QEMU's tls-creds-x509 and nbdkit's
//! --tls-certificates have it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

const CA: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";
const CERTIFICATE: &str = "server-cert.pem";
const KEY: &str = "server-key.pem";

/// Whether a listening socket speaks TLS.
#[derive(Clone, Debug, Default)]
pub enum Tls {
    /// It does not.
    #[default]
    Off,
    /// Where the client asks for it.
    On(Credentials),
    /// With everybody: before it a client learns nothing.
    Require(Credentials),
}

/// What a server shows to its clients, and which of them it believes.
#[derive(Clone, Debug)]
pub struct Credentials {
    folder: PathBuf,
    verify_peer: bool,
    current: Arc<RwLock<Arc<ServerConfig>>>,
}

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file is not there, or not what it should be.
    #[error("cannot take {} for TLS: {why}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// They do not fit together.
    #[error("cannot use the certificates in {} for TLS: {why}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

fn bad(path: &Path, error: &pem::Error, wanted: &str) -> CredentialsError {
    let why = match error {
        pem::Error::NoItemsFound => format!("there is no {wanted} in it, in PEM"),
        pem::Error::Io(error) => error.to_string(),
        other => format!("it is no PEM: {other}"),
    };
    CredentialsError::File { path: path.to_owned(), why }
}

fn all<T: PemObject>(path: &Path, wanted: &str) -> Result<Vec<T>, CredentialsError> {
    let items = T::pem_file_iter(path).map_err(|error| bad(path, &error, wanted))?;
    let items: Result<Vec<T>, _> = items.collect();
    let items = items.map_err(|error| bad(path, &error, wanted))?;
    if items.is_empty() { Err(bad(path, &pem::Error::NoItemsFound, wanted)) } else { Ok(items) }
}

impl Credentials {
    /// Those of a folder. Clients show a certificate of its authority, unless they are not to be
    /// verified.
    pub fn load(folder: &Path, verify_peer: bool) -> Result<Credentials, CredentialsError> {
        let current = Arc::new(RwLock::new(read(folder, verify_peer)?));
        Ok(Credentials { folder: folder.to_owned(), verify_peer, current })
    }

    /// Read them again, for clients to come; those that are there stay. On failure nothing changes.
    pub fn reload(&self) -> Result<(), CredentialsError> {
        let new = read(&self.folder, self.verify_peer)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn read(folder: &Path, verify_peer: bool) -> Result<Arc<ServerConfig>, CredentialsError> {
    let unfit = |why: String| CredentialsError::Folder { path: folder.to_owned(), why };
    let chain: Vec<CertificateDer<'static>> = all(&folder.join(CERTIFICATE), "certificate")?;
    let path = folder.join(KEY);
    let key = PrivateKeyDer::from_pem_file(&path)
        .map_err(|error| bad(&path, &error, "unencrypted private key"))?;
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| unfit(error.to_string()))?;
    let builder = if verify_peer {
        let mut roots = RootCertStore::empty();
        let path = folder.join(CA);
        for authority in all::<CertificateDer<'static>>(&path, "certificate")? {
            roots.add(authority).map_err(|error| CredentialsError::File {
                path: path.clone(),
                why: format!("it holds no certificate of an authority: {error}"),
            })?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        let revoked = folder.join(REVOKED);
        let verifier = if revoked.exists() {
            let lists = all::<CertificateRevocationListDer<'static>>(&revoked, "X509 CRL")?;
            verifier.with_crls(lists).only_check_end_entity_revocation()
        } else {
            verifier
        };
        builder.with_client_cert_verifier(verifier.build().map_err(|e| unfit(e.to_string()))?)
    } else {
        builder.with_no_client_auth()
    };
    let mut config =
        builder.with_single_cert(chain, key).map_err(|error| unfit(error.to_string()))?;
    // Every client shows its certificate anew.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
