//! Listening sockets: made, cleared of a dead server's remains, and removed at the end.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use ringtap_sandbox::ask::{self, There};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::{Address, Error, handover};

const BACKLOG: i32 = 128;

/// A socket file of ours, removed when this drops, if it is still ours.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    there: There,
}

impl SocketFile {
    /// The one that is there.
    fn at(path: &Path) -> Result<SocketFile, Error> {
        let there = ask::look(path).map_err(errno).map_err(failed("bind", path))?;
        Ok(SocketFile { path: path.to_owned(), there })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if handover::leaves_all() {
            return;
        }
        if ask::look(&self.path).is_ok_and(|found| found == self.there) {
            if let Err(error) = ask::remove(&self.path, self.there) {
                tracing::warn!("cannot remove {}: {error}", self.path.display());
            }
        }
    }
}

fn failed(tried: &'static str, path: &Path) -> impl FnOnce(Errno) -> Error {
    let address = Address::Unix(path.to_owned()).to_string();
    move |errno| {
        let hint = match errno {
            Errno::NAMETOOLONG => "; a socket's path has room for 107 bytes: choose a shorter one",
            Errno::NOENT => "; create its folder first",
            Errno::ACCESS | Errno::PERM => "; choose a folder where this user may write",
            _ => "",
        };
        Error::Socket { tried, address, source: errno.into(), hint }
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

/// Listen at `path` with these permissions. The socket of a dead server is replaced.
pub(crate) fn unix(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), Error> {
    SocketAddrUnix::new(path).map_err(failed("bind", path))?;
    if let Some(socket) = handover::inherited_at(path) {
        return Ok((noted(socket, path), SocketFile::at(path)?));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder.unwrap_or(Path::new(".")), flags, Mode::empty());
    // Two servers that find the same dead socket must not remove each other's new one. Without the
    // lock (a folder that may not be read) there is only that race.
    let _one_at_a_time = folder
        .ok()
        .filter(|folder| rustix::fs::flock(folder, FlockOperation::LockExclusive).is_ok());
    let socket = match ask::bind(path, mode) {
        Err(error) if error.raw_os_error() == Some(Errno::ADDRINUSE.raw_os_error()) => {
            remove_dead(path)?;
            ask::bind(path, mode)
        }
        end => end,
    };
    let socket = socket.map_err(errno).map_err(failed("bind", path))?;
    let file = SocketFile::at(path)?;
    // Nobody can connect before it listens, so nobody slips in under other permissions. A broker has set them.
    if !ringtap_sandbox::is_there() {
        rustix::fs::chmod(path, Mode::from_raw_mode(mode))
            .map_err(failed("set the permissions of", path))?;
    }
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listen on", path))?;
    Ok((noted(socket, path), file))
}

/// The socket, which the next server asks for by this path, though its name may be where a link of it leads.
fn noted(socket: OwnedFd, path: &Path) -> UnixListener {
    let listener = UnixListener::from(socket);
    handover::note(&Address::Unix(unix_path(&listener)), &Address::Unix(path.to_owned()));
    listener
}

fn remove_dead(path: &Path) -> Result<(), Error> {
    let found = ask::look(path);
    if found.as_ref().is_ok_and(|found| !found.is_socket) {
        return Err(Error::NoSocket { path: path.to_owned() });
    }
    // A live server with a full backlog must not make us wait for it.
    match ask::connect(path, false).map_err(errno) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!("replacing the socket of a dead server: {}", path.display());
            found
                .and_then(|found| ask::remove(path, found))
                .or_else(
                    |error| {
                        if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
                    },
                )
                .map_err(|source| Error::Socket {
                    tried: "remove the dead socket",
                    address: path.display().to_string(),
                    source,
                    hint: "; remove it by hand",
                })
        }
        Err(Errno::NOENT) => Ok(()),
        Ok(probe) => Err(Error::Busy { path: path.to_owned(), holder: listener(&probe) }),
        Err(Errno::AGAIN) => {
            Err(Error::Busy { path: path.to_owned(), holder: "another program".into() })
        }
        // Another type of socket lives there.
        Err(Errno::PROTOTYPE) => {
            Err(Error::Busy { path: path.to_owned(), holder: "another program".into() })
        }
        Err(errno) => Err(failed("probe", path)(errno)),
    }
}

/// Who listens at the other end.
fn listener(probe: impl AsFd) -> String {
    match rustix::net::sockopt::socket_peercred(probe) {
        Ok(peer) => {
            let pid = peer.pid.as_raw_nonzero();
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim())
        }
        Err(_) => "another program".into(),
    }
}

/// Listen on a TCP port of every address that the host's name stands for.
pub(crate) fn tcp(host: &str, port: u16) -> Result<Vec<TcpListener>, Error> {
    let failed = |tried, source: io::Error| {
        let hint = match source.kind() {
            io::ErrorKind::AddrInUse => "; stop the program that has it, or choose another port",
            io::ErrorKind::PermissionDenied => "; ports below 1024 are for root: choose another",
            io::ErrorKind::AddrNotAvailable => "; no interface of this host has that address",
            _ => "",
        };
        let address = Address::Tcp { host: host.to_owned(), port }.to_string();
        Error::Socket { tried, address, source, hint }
    };
    let asked = Address::Tcp { host: host.to_owned(), port };
    let inherited = handover::inherited(&asked);
    let listeners: Vec<TcpListener> = match inherited.is_empty() {
        false => inherited.into_iter().map(TcpListener::from).collect(),
        true => ask::listen(host, port).map_err(|error| failed("listen on", error))?,
    };
    for bound in listeners.iter().filter_map(|listener| listener.local_addr().ok()) {
        let place = Address::Tcp { host: bound.ip().to_string(), port: bound.port() };
        handover::note(&place, &asked);
    }
    Ok(listeners)
}

/// The path a listener is bound to; empty where it has none.
pub(crate) fn unix_path(listener: &UnixListener) -> PathBuf {
    let bound = listener.local_addr().ok();
    let path = bound.and_then(|bound| bound.as_pathname().map(PathBuf::from));
    // A relative path is of use to nobody but us.
    path.map(|path| std::path::absolute(&path).unwrap_or(path)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_dead_socket_is_replaced_and_ours_removed_at_the_end() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).expect("a socket"));
        assert!(path.exists(), "the remains of a dead server");
        let (listener, file) = unix(&path, 0o640).expect("a socket in its place");
        let mode = fs::metadata(&path).expect("the socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        UnixStream::connect(&path).expect("it listens");
        drop((listener, file));
        assert!(!path.exists());
    }

    #[test]
    fn a_live_socket_is_left_alone_and_its_server_named() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("s");
        let live = UnixListener::bind(&path).expect("a socket");
        let message = unix(&path, 0o600).expect_err("in use").to_string();
        assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
        UnixStream::connect(&path).expect("it listens still");
        drop(live);
    }

    #[test]
    fn what_is_no_socket_stays() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("s");
        fs::write(&path, "precious").expect("a file");
        let message = unix(&path, 0o600).expect_err("a file is there").to_string();
        assert!(message.contains("not a socket"), "{message}");
        assert_eq!(fs::read(&path).expect("the file"), b"precious");
    }

    #[test]
    fn a_socket_of_someone_else_is_not_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("s");
        let ours = unix(&path, 0o600).expect("a socket");
        fs::rename(&path, dir.path().join("old")).expect("moved away");
        let _theirs = UnixListener::bind(&path).expect("another socket");
        drop(ours);
        assert!(path.exists());
    }

    #[test]
    fn long_paths_and_missing_folders_are_explained() {
        let message = unix(Path::new(&"x".repeat(200)), 0o600).expect_err("too long").to_string();
        assert!(message.contains("107"), "{message}");
        let message = unix(Path::new("/nowhere/x"), 0o600).expect_err("no folder").to_string();
        assert!(message.contains("create its folder"), "{message}");
    }

    #[test]
    fn a_taken_port_is_told() {
        let first = tcp("127.0.0.1", 0).expect("a port");
        let port = first[0].local_addr().expect("its address").port();
        let message = tcp("127.0.0.1", port).expect_err("taken").to_string();
        assert!(message.contains("choose another port"), "{message}");
    }
}
