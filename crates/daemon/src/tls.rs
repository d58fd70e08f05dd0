//! Which NBD sockets speak TLS, and with which certificates.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ringtap_export::nbd::{Credentials, CredentialsError, Tls};

use crate::{Address, Error};

/// Whether an NBD socket speaks TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// It does not.
    Off,
    /// Where the client asks for it.
    On,
    /// With everybody.
    Require,
}

/// TLS of the NBD sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdTls {
    /// Where the certificates are.
    pub folder: PathBuf,
    /// Whether clients must show one, too.
    pub verify_peer: bool,
    /// What holds for sockets of which nothing is said.
    pub mode: TlsMode,
    /// What is said of some.
    pub of: Vec<(Address, TlsMode)>,
}

impl NbdTls {
    /// What holds for a socket.
    pub(crate) fn mode_of(&self, address: &Address) -> TlsMode {
        let said = |wanted: &Address| self.of.iter().find(|(known, _)| known == wanted);
        let bare = match address {
            // A lone `systemd` has been given the name of its disk meanwhile.
            Address::Systemd(Some(_)) => said(&Address::Systemd(None)),
            _ => None,
        };
        said(address).or(bare).map_or(self.mode, |(_, mode)| *mode)
    }

    /// Refuse two words on one socket.
    pub(crate) fn check(&self) -> Result<(), Error> {
        for (i, (address, mode)) in self.of.iter().enumerate() {
            if self.of[..i].iter().any(|(known, other)| known == address && other != mode) {
                return Err(Error::Usage(format!(
                    "{address} has two different --tls: give it one"
                )));
            }
        }
        Ok(())
    }

    /// The credentials.
    pub(crate) fn load(&self) -> Result<Credentials, Error> {
        Ok(Credentials::load(&self.folder, self.verify_peer)?)
    }
}

/// Certificates that a client of the control socket has named.
#[derive(Clone, Debug)]
pub(crate) struct NamedCredentials {
    pub(crate) folder: PathBuf,
    pub(crate) verify_peer: bool,
    /// What a server shows by them; none: they are for connections to other servers.
    pub(crate) server: Option<Credentials>,
}

impl NamedCredentials {
    /// Read what a server shows.
    pub(crate) fn of_server(folder: &Path, verify_peer: bool) -> Result<Self, Error> {
        let server = Some(Credentials::load(folder, verify_peer)?);
        Ok(NamedCredentials { folder: folder.to_owned(), verify_peer, server })
    }

    /// See that what a client shows and believes is there: who connects reads it.
    pub(crate) fn of_client(folder: &Path) -> Result<Self, String> {
        ringtap_stores::check_certificates(folder)?;
        Ok(NamedCredentials { folder: folder.to_owned(), verify_peer: true, server: None })
    }
}

/// What there is to add where a file that is to be read again may not be opened: a server that is confined reads what was there as it
/// began, and links may lead elsewhere since.
pub(crate) fn led_away(error: &CredentialsError, confined: bool) -> &'static str {
    let CredentialsError::File { path, .. } = error else { return "" };
    let opened = File::open(path).map_err(|error| error.kind());
    match opened {
        Err(ErrorKind::PermissionDenied) if confined => {
            "; a confined server reads the folder that was named as it began, and no other to which a link leads: have links lead to \
             what lies within it (..data), or have `ringtap upgrade` or a new start read the new ones"
        }
        _ => "",
    }
}

impl TlsMode {
    /// The same with credentials.
    pub(crate) fn with(self, credentials: Option<&Credentials>) -> Tls {
        match (self, credentials) {
            (TlsMode::Off, _) | (_, None) => Tls::Off,
            (TlsMode::On, Some(credentials)) => Tls::On(credentials.clone()),
            (TlsMode::Require, Some(credentials)) => Tls::Require(credentials.clone()),
        }
    }
}
