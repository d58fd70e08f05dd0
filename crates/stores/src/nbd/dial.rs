//! A connection to a server, from the address to what was agreed on.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringtap_sandbox::ask;
use rustix::net::sockopt::{self, Timeout};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

use super::channel::Channel;
use super::handshake::{self, Agreed, Error};
use super::uri::{Server, Uri};

/// For how long all of it may take, however slowly the server says it.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

const SILENT: &str = "the server took the connection and has said nothing more in time (20 s at most): it may let in fewer clients than there are";

/// Questions without an answer after which a server is gone.
const PROBES: u32 = 3;

/// A connection that requests may be sent on.
pub(super) struct Connection {
    pub(super) channel: Channel,
    pub(super) agreed: Agreed,
    /// What the server says that the export lies in.
    pub(super) lies_in: Vec<String>,
    /// The same socket, for who ends it from another thread.
    pub(super) socket: OwnedFd,
}

/// A stream of either kind.
trait Socket: Read + Write + AsFd {}
impl Socket for UnixStream {}
impl Socket for TcpStream {}

/// A stream that ends at a moment.
struct Until {
    stream: Box<dyn Socket>,
    end: Instant,
}

impl Until {
    fn left(&self, which: Timeout) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        // Which would mean for ever below one microsecond.
        let left = left.max(Duration::from_millis(1));
        Ok(sockopt::set_socket_timeout(&self.stream, which, Some(left))?)
    }
}

impl Read for Until {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.left(Timeout::Recv)?;
        self.stream.read(buffer).map_err(|error| match error.kind() {
            // The kernel's word for a timeout of a socket.
            io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, SILENT),
            _ => error,
        })
    }
}

impl Write for Until {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.left(Timeout::Send)?;
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Connect, and agree on the export and on the context that tells what it holds.
pub(super) fn dial(
    uri: &Uri,
    tls: Option<&Arc<ClientConfig>>,
    status: &str,
    limit: Duration,
) -> Result<Connection, Error> {
    let end = Instant::now() + limit;
    let mut stream = Until { stream: connect(&uri.server, end, uri.reconnect)?, end };
    handshake::greet(&mut stream)?;
    let ((agreed, lies_in), session) = match tls {
        None => (handshake::agree(&mut stream, &uri.export, status)?, None),
        Some(config) => {
            handshake::start_tls(&mut stream)?;
            let mut session = ClientConnection::new(config.clone(), name_of(uri)?)
                .map_err(|error| Error::Refused(format!("TLS: {error}")))?;
            let mut sealed = Stream::new(&mut session, &mut stream);
            let agreed = handshake::agree(&mut sealed, &uri.export, status);
            let agreed = agreed.map_err(|error| match error {
                Error::Os(error) => Error::Refused(format!("TLS with the server failed: {error}")),
                other => other,
            })?;
            (agreed, Some(session))
        }
    };
    let socket = stream.stream.as_fd().try_clone_to_owned()?;
    for which in [Timeout::Recv, Timeout::Send] {
        sockopt::set_socket_timeout(&socket, which, None).map_err(io::Error::from)?;
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(io::Error::from)?;
    Ok(Connection { channel: Channel::new(socket.try_clone()?, session), agreed, lies_in, socket })
}

fn connect(
    server: &Server,
    end: Instant,
    patience: Option<Duration>,
) -> Result<Box<dyn Socket>, Error> {
    match server {
        Server::Unix(path) => {
            let stream = ask::connect(path, true).map_err(|error| nobody(error, path.display()))?;
            let stream = UnixStream::from(stream);
            Ok(Box::new(stream))
        }
        Server::Tcp(host, port) => {
            let shown = format!("{host}:{port}");
            let left = end.saturating_duration_since(Instant::now());
            let stream = ask::dial(host, *port, left.max(Duration::from_millis(1)))
                .map_err(|error| nobody(error, &shown))?;
            stream.set_nodelay(true)?;
            watch(&stream, patience).map_err(io::Error::from)?;
            Ok(Box::new(stream))
        }
    }
}

/// Have the kernel notice a server that is gone without a word, whether it owes an answer or a request is on its way: in about
/// the time that requests wait for another connection. Where they wait for none it is left its two hours.
fn watch(stream: &TcpStream, patience: Option<Duration>) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    let Some(patience) = patience else { return Ok(()) };
    let idle = (patience / 3).clamp(Duration::from_secs(1), Duration::from_secs(10));
    let between = (idle / 3).max(Duration::from_secs(1));
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, between)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_user_timeout(stream, (idle + between * PROBES).as_millis() as u32)
}

fn nobody(error: io::Error, place: impl std::fmt::Display) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => ": is the server running?",
        _ => "",
    };
    Error::Refused(format!("cannot connect to {place}: {error}{advice}"))
}

fn name_of(uri: &Uri) -> Result<ServerName<'static>, Error> {
    let name = match (&uri.hostname, &uri.server) {
        (Some(name), _) => name.clone(),
        (None, Server::Tcp(host, _)) => host.clone(),
        (None, Server::Unix(_)) => {
            let why = "the server at a UNIX socket has no host name: add tls-hostname=NAME, that of its certificate";
            return Err(Error::Refused(why.into()));
        }
    };
    ServerName::try_from(name.clone())
        .map_err(|_| Error::Refused(format!("{name:?} is no name that a certificate could have")))
}

/// What a client shows and believes.
pub(super) fn credentials(uri: &Uri) -> Result<Option<Arc<ClientConfig>>, Error> {
    if !uri.tls {
        return Ok(None);
    }
    let Some(folder) = &uri.certificates else {
        let why = "nbds:// takes certificates: add ?tls-certificates=DIR, with ca-cert.pem in it";
        return Err(Error::Refused(why.into()));
    };
    config_of(folder).map(|config| Some(Arc::new(config)))
}

/// The same of a folder.
pub(super) fn config_of(folder: &Path) -> Result<ClientConfig, Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Refused(format!("TLS: {error}")))?;
    let mut roots = RootCertStore::empty();
    let path = folder.join("ca-cert.pem");
    for authority in certificates(&path)? {
        roots.add(authority).map_err(|error| unfit(&path, error))?;
    }
    if roots.is_empty() {
        return Err(unfit(&path, "there is no certificate in it, in PEM"));
    }
    let builder = builder.with_root_certificates(roots);
    let (chain, key) = (folder.join("client-cert.pem"), folder.join("client-key.pem"));
    if !chain.exists() {
        return Ok(builder.with_no_client_auth());
    }
    let secret = PrivateKeyDer::from_pem_file(&key).map_err(|error| unfit(&key, error))?;
    let config = builder.with_client_auth_cert(certificates(&chain)?, secret);
    config.map_err(|error| unfit(&chain, error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let items = CertificateDer::pem_file_iter(path).map_err(|error| unfit(path, error))?;
    items.collect::<Result<Vec<_>, _>>().map_err(|error| unfit(path, error))
}

fn unfit(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Refused(format!("cannot take {} for TLS: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_server_that_dribbles_is_given_up_in_time() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let dribbles = thread::spawn(move || {
            while far.write_all(&[0]).is_ok() {
                thread::sleep(Duration::from_millis(5));
            }
        });
        let end = Instant::now() + Duration::from_millis(200);
        let mut stream = Until { stream: Box::new(near), end };
        let found = stream.read_exact(&mut [0; 4000]).expect_err("it takes 20 s");
        let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
        assert!(kinds.contains(&found.kind()), "{found}");
        drop(stream);
        dribbles.join().expect("it ends");
    }
}
