//! What `ringtap serve` lets NBD clients do.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args, ValueEnum};
use ringtap_daemon::{Address, Error, NbdLimits, NbdTls, TlsMode};

use crate::names;

/// TLS, and limits of all NBD sockets of the process. A peer is a user of a UNIX socket, or a host.
#[derive(Debug, Args)]
pub(crate) struct NbdArgs {
    /// Speak TLS, with the certificates in this folder: server-cert.pem, server-key.pem, ca-cert.pem and,
    /// where there is one, ca-crl.pem, as for QEMU and nbdkit
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,

    /// Whether the --nbd before it speaks TLS, or all others, before the first --nbd; with --tls-dir only
    /// [default with --tls-dir: require]
    #[arg(long, value_enum, value_name = "MODE")]
    tls: Vec<TlsName>,

    /// Whether NBD clients must show a certificate that ca-cert.pem has signed
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_value = "true",
        default_missing_value = "true",
        hide_possible_values = true,
        action = clap::ArgAction::Set
    )]
    tls_verify_peer: bool,

    /// The most connections to one NBD socket
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count)]
    nbd_connections: usize,

    /// The most of them of one user (UNIX) or one host (TCP; of IPv6 one /64)
    #[arg(long, value_name = "N", default_value = "256", value_parser = count)]
    nbd_peer_connections: usize,

    /// The most memory for the requests of one NBD connection in flight; at least 32M
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = memory)]
    nbd_client_memory: usize,

    /// The most memory for the requests of all NBD connections in flight, beyond 1M that each has for
    /// itself; half of it at most is one user's or host's; at least 64M
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = memory_of_all)]
    nbd_memory: usize,

    /// Close an NBD connection that has not chosen its export after so long
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    nbd_handshake_timeout: Duration,

    /// Close an NBD connection that has been idle for so long, or does not take its replies or send its
    /// data; 0: never
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds)]
    nbd_idle_timeout: Duration,
}

/// Whether a socket speaks TLS, on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TlsName {
    /// It does not.
    Off,
    /// With clients that ask for it.
    On,
    /// With everybody, before all else.
    Require,
}

impl From<TlsName> for TlsMode {
    fn from(name: TlsName) -> TlsMode {
        match name {
            TlsName::Off => TlsMode::Off,
            TlsName::On => TlsMode::On,
            TlsName::Require => TlsMode::Require,
        }
    }
}

impl NbdArgs {
    /// Which of the sockets, in the order in which they stand on the command line, speak TLS.
    pub(crate) fn tls(
        &self,
        matches: &ArgMatches,
        nbd: &[Address],
    ) -> Result<Option<NbdTls>, Error> {
        let Some(folder) = &self.tls_dir else {
            return match self.tls.iter().all(|mode| *mode == TlsName::Off) {
                true => Ok(None),
                false => Err(Error::Usage("--tls on and require want --tls-dir DIR".into())),
            };
        };
        // Where there is no such option, clap does not know its name.
        let known = |id| matches.try_contains_id(id).is_ok();
        let indices = |id| if known(id) { matches.indices_of(id) } else { None };
        let places = |id| indices(id).into_iter().flatten();
        let mut tls = NbdTls {
            folder: folder.clone(),
            verify_peer: self.tls_verify_peer,
            mode: TlsMode::Require,
            of: vec![],
        };
        for (mode, place) in self.tls.iter().zip(places("tls")) {
            let before = places("nbd").zip(nbd).take_while(|(nbd, _)| *nbd < place).last();
            match before {
                Some((_, address)) => tls.of.push((address.clone(), (*mode).into())),
                None => tls.mode = (*mode).into(),
            }
        }
        Ok(Some(tls))
    }

    pub(crate) fn limits(&self) -> NbdLimits {
        NbdLimits {
            connections: self.nbd_connections,
            peer_connections: self.nbd_peer_connections,
            memory: self.nbd_client_memory,
            memory_of_all: self.nbd_memory,
            // A handshake that may take no time lets nobody in.
            handshake: self.nbd_handshake_timeout.max(Duration::from_secs(1)),
            idle: Some(self.nbd_idle_timeout).filter(|idle| !idle.is_zero()),
            ..NbdLimits::default()
        }
    }
}

fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "give at least 1".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "write whole seconds, such as 30".to_owned())?;
    // A timer of the kernel takes no more than a few centuries.
    let most = 100 * 365 * 24 * 3600;
    if seconds > most {
        Err("that is more than a century".into())
    } else {
        Ok(Duration::from_secs(seconds))
    }
}

fn memory(text: &str) -> Result<usize, String> {
    at_least(text, NbdLimits::LEAST_MEMORY, "32M: what the largest request takes")
}

fn memory_of_all(text: &str) -> Result<usize, String> {
    at_least(text, NbdLimits::LEAST_MEMORY_OF_ALL, "64M: two of the largest requests")
}

fn at_least(text: &str, least: usize, named: &str) -> Result<usize, String> {
    let size = usize::try_from(names::size(text)?).map_err(|_| "that is too much".to_owned())?;
    if size < least { Err(format!("give at least {named}")) } else { Ok(size) }
}
