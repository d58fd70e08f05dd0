//! Sockets that are made for a server: bound, listened at and connected.

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::call::FILES;
use crate::user::{Owner, made_for};
use crate::walk::open_without_links;

/// Where in a folder that is held, so that nobody puts another in its place meanwhile: the folder, and a path by it.
fn held(place: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let (Some(folder), Some(name)) = (place.parent(), place.file_name()) else {
        return Err(Errno::INVAL.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let held = open_without_links(folder, flags)?;
    let by = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join(name);
    Ok((held, by))
}

/// A UNIX socket that is bound there by who may not be led elsewhere meanwhile: `place` is where `said` has led, with no link
/// on the way. The kernel binds by a name, and the socket is called by that; so the folders on the way are watched, and
/// where one was moved or removed in between nobody gets what was bound. `meanwhile` is before that. It has that mode, and is
/// the owner's.
pub(crate) fn bind_in_place(
    said: &Path,
    place: &Path,
    mode: u32,
    owner: Option<Owner>,
    meanwhile: impl FnOnce(),
) -> io::Result<OwnedFd> {
    let by_name = std::path::absolute(said).is_ok_and(|said| said == place);
    let name = if by_name { said } else { place };
    let watched = SocketAddrUnix::new(name).and_then(|_| Watched::begin(place));
    meanwhile();
    let Ok(watch) = watched else {
        // Too long a name, or no watch to be had: by the folder itself, whatever it is called then.
        let (_held, by) = held(place)?;
        return bind_for(&by, mode, owner);
    };
    let socket = bind_for(name, mode, owner)?;
    if watch.have_gone() { Err(Errno::AGAIN.into()) } else { Ok(socket) }
}

/// Who tells of folders that are moved or removed. One for all: to close it takes the kernel ten milliseconds.
static WATCH: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// The folders on the way to a place, as long as this is there.
struct Watched {
    watch: MutexGuard<'static, Option<OwnedFd>>,
    folders: Vec<i32>,
}

impl Watched {
    fn begin(place: &Path) -> Result<Watched, Errno> {
        let mut watch = WATCH.lock().unwrap_or_else(PoisonError::into_inner);
        if watch.is_none() {
            *watch = Some(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?);
        }
        let mut watched = Watched { watch, folders: vec![] };
        let gone = WatchFlags::MOVE_SELF | WatchFlags::DELETE_SELF;
        let these = WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        // What has come of those before.
        while watched.take().is_ok() {}
        for folder in place.ancestors().skip(1) {
            let added = inotify::add_watch(watched.fd()?, folder, gone | these)?;
            watched.folders.push(added);
        }
        Ok(watched)
    }

    fn fd(&self) -> Result<&OwnedFd, Errno> {
        self.watch.as_ref().ok_or(Errno::BADF)
    }

    /// Take what there is to be told.
    fn take(&self) -> Result<(), Errno> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 512];
        Reader::new(self.fd()?, &mut events).next().map(drop)
    }

    /// Whether one of them was moved or removed, as far as can be told.
    fn have_gone(&self) -> bool {
        self.take() != Err(Errno::AGAIN)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        for folder in &self.folders {
            // One that was removed is watched no more.
            let _gone = self.fd().and_then(|watch| inotify::remove_watch(watch, *folder));
        }
    }
}

/// As [`bind_at`]: it is the owner's, and has just that mode. Nobody else in this process makes a file meanwhile.
fn bind_for(path: &Path, mode: u32, owner: Option<Owner>) -> io::Result<OwnedFd> {
    let before = rustix::process::umask(Mode::empty());
    let socket = made_for(owner, || bind_at(path, mode));
    rustix::process::umask(before);
    socket
}

/// A UNIX socket that is bound there, with what the mask of this process leaves of that mode.
pub(crate) fn bind_at(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = stream()?;
    // What the socket has before it is bound its file has from its first moment.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode & 0o777))?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct There {
    /// The device of its file system.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Whether it is a socket.
    pub is_socket: bool,
}

#[allow(clippy::unnecessary_cast)] // their widths differ between machines
fn there(facts: &rustix::fs::Stat) -> There {
    There {
        device: facts.st_dev as u64,
        inode: facts.st_ino as u64,
        is_socket: FileType::from_raw_mode(facts.st_mode).is_socket(),
    }
}

/// What is there, which is not followed where it is a link.
pub(crate) fn look_at(path: &Path) -> io::Result<There> {
    Ok(there(&rustix::fs::lstat(path)?))
}

/// The same of a place that has no link on the way.
pub(crate) fn look(place: &Path) -> io::Result<There> {
    let (_held, by) = held(place)?;
    look_at(&by)
}

/// Remove a socket, where it is that one still, and that user's or a dead server's.
pub(crate) fn remove(place: &Path, device: u64, inode: u64, user: u32) -> io::Result<()> {
    let (folder, by) = held(place)?;
    let facts = rustix::fs::lstat(&by)?;
    let is_dead = || connect(place, false).err().and_then(|it| it.raw_os_error());
    let refused = Errno::CONNREFUSED.raw_os_error();
    if there(&facts) != (There { device, inode, is_socket: true })
        || facts.st_uid != user && is_dead() != Some(refused)
    {
        return Err(Errno::PERM.into());
    }
    let name = place.file_name().ok_or(Errno::INVAL)?;
    Ok(rustix::fs::unlinkat(&folder, name, AtFlags::empty())?)
}

pub(crate) fn connect(place: &Path, waits: bool) -> io::Result<OwnedFd> {
    // A link would lead to another socket than the one that was compared.
    let (_held, by) = held(place)?;
    let socket =
        rustix::fs::open(&by, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode);
    if kind.is_symlink() {
        return Err(Errno::LOOP.into());
    }
    connect_at(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd())), waits)
}

/// A UNIX socket that is connected to the one there; where it may not wait, it is of the kind that does not, either.
pub(crate) fn connect_at(path: &Path, waits: bool) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = stream()?;
    rustix::io::ioctl_fionbio(&socket, !waits)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

fn stream() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// Sockets on a port of every address that the host's name stands for.
pub(crate) fn listen(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let (mut listeners, mut missing) = (vec![], None);
    for address in (host, port).to_socket_addrs()?.take(FILES) {
        match TcpListener::bind(address) {
            Ok(listener) => listeners.push(listener),
            // A name often stands for an IPv6 address too, on hosts that have none.
            Err(error)
                if error.kind() == io::ErrorKind::AddrNotAvailable
                    || error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) =>
            {
                missing = Some(error);
            }
            Err(error) => return Err(error),
        }
        if port == 0 && !listeners.is_empty() {
            break;
        }
    }
    match listeners.is_empty() {
        true => Err(missing.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into())),
        false => Ok(listeners),
    }
}

/// A connection to the first address of the host that takes it.
pub(crate) fn dial(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + limit;
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in (host, port).to_socket_addrs()? {
        let left = end.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Say what has become of an upgrade to who has made the abstract socket of that server for it.
pub(crate) fn tell_asker(server: u32, text: &[u8]) -> io::Result<()> {
    let name = format!("ringtap-upgrade-{server}");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::net::sendto(&socket, text, rustix::net::SendFlags::empty(), &address)?;
    Ok(())
}
