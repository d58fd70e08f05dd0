//! What a server asks its broker; where it has none, each is done here and now.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::call::{Answer, Call, What};
use crate::client::{ask, ask_with, is_there};
use crate::holder::{self, Holder, Locked};
use crate::maps;
pub use crate::sockets::There;
use crate::sockets::{
    bind_at, connect_at, dial as dial_here, listen as listen_here, look_at,
    tell_asker as tell_asker_here,
};
use crate::walls;

fn one(answer: io::Result<Answer>) -> io::Result<OwnedFd> {
    answer?.files.pop().ok_or_else(|| Errno::IO.into())
}

/// A UNIX socket bound to a path, with that mode. Where there is no broker the mask of this process is heeded, too.
pub fn bind(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let call = Call::path(What::Bind, path).number(mode.into());
    ask(&call).map_or_else(|| bind_at(path, mode), one)
}

/// What is at the path of a socket.
pub fn look(path: &Path) -> io::Result<There> {
    or_ask(look_at(path), || {
        let answer = ask(&Call::path(What::Look, path))?;
        Some(answer.and_then(|answer| {
            let text = String::from_utf8_lossy(&answer.text);
            let mut words = text.split(' ');
            let mut number = || words.next()?.parse().ok();
            let (device, inode) = number().zip(number()).ok_or(Errno::IO)?;
            Ok(There { device, inode, is_socket: words.next() == Some("true") })
        }))
    })
}

/// Remove the socket there, where it is that one.
pub fn remove(path: &Path, socket: There) -> io::Result<()> {
    or_ask(std::fs::remove_file(path), || {
        let There { device, inode, .. } = socket;
        let call = Call::path(What::Remove, path);
        let answer = ask(&Call { numbers: [device, inode, 0, 0], ..call })?;
        Some(answer.map(drop))
    })
}

/// What this process could do itself, or else, where it may not, the broker's answer.
fn or_ask<T>(here: io::Result<T>, ask: impl FnOnce() -> Option<io::Result<T>>) -> io::Result<T> {
    match here {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            ask().unwrap_or(Err(error))
        }
        end => end,
    }
}

/// A UNIX socket connected to the one there. Where it may not wait for a server that takes nobody, it blocks nowhere.
pub fn connect(path: &Path, waits: bool) -> io::Result<OwnedFd> {
    let call = Call::path(What::Connect, path).number(u64::from(waits));
    ask(&call).map_or_else(|| connect_at(path, waits), one)
}

/// Sockets that listen on a port of every address that the host's name stands for.
pub fn listen(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let call = Call { first: host.as_bytes(), ..Call::new(What::Listen) }.number(port.into());
    match ask(&call) {
        None => listen_here(host, port),
        Some(answer) => Ok(answer?.files.into_iter().map(TcpListener::from).collect()),
    }
}

/// A connection to the first address of the host that takes it within that time.
pub fn dial(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let call = Call { first: host.as_bytes(), ..Call::new(What::Dial) };
    let call = Call { numbers: [port.into(), millis, 0, 0], ..call };
    ask(&call).map_or_else(|| dial_here(host, port, limit), |answer| one(answer).map(Into::into))
}

/// A disk mounted over a file by FUSE; nothing where there is no broker.
pub fn mount(path: &Path, source: &Path, read_only: bool) -> Option<io::Result<OwnedFd>> {
    let call = Call::path(What::Mount, path).number(read_only.into());
    ask(&Call { second: source.as_os_str().as_bytes(), ..call }).map(one)
}

/// What is mounted there taken off; nothing where there is no broker.
pub fn unmount(path: &Path, lazily: bool) -> Option<io::Result<()>> {
    let call = Call::path(What::Unmount, path).number(lazily.into());
    ask(&call).map(|answer| answer.map(drop))
}

/// Whether there is a broker that may do more than this process.
fn has_rights() -> bool {
    is_there() && walls::are_up()
}

/// What Ringtap has written down of a file where only root can; nothing where there is no broker, or no need of it yet.
pub fn attribute(path: &Path, name: &str) -> Option<io::Result<Vec<u8>>> {
    has_rights().then(|| {
        let file = open(path, OFlags::RDONLY)?;
        let call = Call { first: name.as_bytes(), ..Call::new(What::Attribute) };
        Ok(ask_with(&call, &[file.as_fd()]).ok_or(Errno::IO)??.text)
    })
}

/// Write that down, or forget it. Who is confined does neither itself.
pub fn set_attribute(path: &Path, name: &str, value: Option<&[u8]>) -> io::Result<()> {
    if has_rights() {
        // Only those have attributes that anybody may set; and a device that is closed is looked at by the host.
        if name.starts_with("user.") && !file_type(path)?.is_file() {
            return Err(Errno::PERM.into());
        }
        let file = open(path, OFlags::RDWR)?;
        let call = Call { first: name.as_bytes(), ..Call::new(What::SetAttribute) };
        let call =
            Call { second: value.unwrap_or_default(), ..call }.number(value.is_some().into());
        return ask_with(&call, &[file.as_fd()]).ok_or(Errno::IO)?.map(drop);
    }
    match value {
        Some(value) => rustix::fs::setxattr(path, name, value, XattrFlags::empty())?,
        None => rustix::fs::removexattr(path, name)?,
    }
    Ok(())
}

fn file_type(path: &Path) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(rustix::fs::stat(path)?.st_mode))
}

/// Say what has become of an upgrade to who waits for that.
pub fn tell_asker(text: &str) -> io::Result<()> {
    let call = Call { second: text.as_bytes(), ..Call::new(What::Tell) };
    ask(&call)
        .map_or_else(|| tell_asker_here(std::process::id(), text.as_bytes()), |end| end.map(drop))
}

/// Tell the service manager; nothing where there is no broker, or no need of it yet.
pub fn notify(text: &str) -> Option<io::Result<()>> {
    let call = Call { second: text.as_bytes(), ..Call::new(What::Notify) };
    has_rights().then(|| ask(&call).ok_or(Errno::IO)?.map(drop))
}

/// Whether a process has mapped a file at an address so that it sees no change of others, nor they one of its own. A broker
/// looks at files without a name alone, as the memory of guests is.
pub fn keeps_private(process: u32, file: BorrowedFd<'_>, address: u64) -> bool {
    let call = Call { numbers: [process.into(), address, 0, 0], ..Call::new(What::Private) };
    match ask_with(&call, &[file]) {
        None => maps::is_private(process, file, address),
        Some(answer) => answer.is_ok_and(|answer| answer.text == [1]),
    }
}

fn open(path: &Path, access: OFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, access | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?)
}

/// Who has a byte of a file locked, but by the descriptor `but` of this process.
pub fn holder(device: (u32, u32), inode: u64, byte: i64, but: i32) -> Option<Holder> {
    let number = u64::from(device.0) << 32 | u64::from(device.1);
    let call = Call::new(What::Holder);
    match ask(&Call { numbers: [number, inode, byte as u64, but as u64], ..call }) {
        None => holder::find(&Locked { device, inode, byte, but: (std::process::id(), but) }),
        Some(answer) => {
            let text = String::from_utf8(answer.ok()?.text).ok()?;
            let (id, name) = text.split_once(' ')?;
            Some(Holder { id: id.parse().ok()?, name: name.to_owned() })
        }
    }
}
