//! Mounting one file over another, and taking it off again whoever left it there.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use ringtap_sandbox::{ask, open_without_links};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, mknodat, open};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{getegid, geteuid};

use super::table::{Entry, mounts, mounts_on};
use super::wire::{self, Head, IN_HEADER, Init, op};
use super::{BACKGROUND, Error, MOST, Options, helper};

const DEVICE: &str = "/dev/fuse";
/// How mounts of ours are known: `fuse.` and this.
const SUBTYPE: &str = "ringtap";
/// _IOR(229, 0, u32): make this descriptor another of a mounted one.
const CLONE: libc::Ioctl = 0x8004_e500_u32 as libc::Ioctl;
/// The kernel says INIT as soon as it has mounted.
const INIT_WITHIN: Duration = Duration::from_secs(10);
/// Stale mounts that may lie on one another.
const MOST_STALE: usize = 64;

/// A mounted file that nobody serves yet. Dropping it unmounts.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    /// What is shown, to look at: a path may lead to another file by then, or to this mount.
    image: Option<OwnedFd>,
    device: Option<OwnedFd>,
    /// Whether the file under it was made here.
    made: bool,
    /// That file, where it was made by this process.
    own: Option<(u64, u64)>,
    /// Which of all mounts it is, whatever becomes of the path.
    number: Option<Number>,
    mounted: bool,
}

/// The number of a mount's device, which no other has as long as it is there.
pub(crate) type Number = (u32, u32);

/// Whether mounts are another process's, and stay when this one ends.
static STAY: AtomicBool = AtomicBool::new(false);

/// From now on mounts stay where they are when this process ends; or they do not.
pub fn keep_mounts(stay: bool) {
    STAY.store(stay, SeqCst);
}

/// A mounted file that goes on in another process.
#[derive(Debug)]
pub struct Passed {
    /// What the kernel's requests come by.
    pub device: OwnedFd,
    /// Whether the file under it is removed at the end.
    pub made: bool,
}

impl Mount {
    /// Mount over `path`, a regular file or nothing yet. `image` is what is shown as the source, and
    /// must not be that very file.
    pub fn new(path: &Path, image: &Path, options: &Options) -> Result<Mount, Error> {
        let path = resolve(path)?;
        // What is shown in the table of mounts is to be of use from any folder.
        let image = &std::path::absolute(image).unwrap_or_else(|_| image.to_owned());
        remove_stale(&path)?;
        let made = prepare(&path, image)?;
        let own = made.then(|| identity(&path)).flatten();
        let shown = open(image, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
        let (device, number, mounted) = (None, None, false);
        let mut mount = Mount { path, image: shown, device, made, own, number, mounted };
        let device = match ask::mount(&mount.path, image, options.read_only) {
            None => mount_here(&mount.path, image, options.read_only)?,
            Some(asked) => asked.map_err(|source| match source.raw_os_error() {
                None => Error::Helper { path: mount.path.clone(), why: source.to_string() },
                Some(_) => not_mounted(&mount.path, source),
            })?,
        };
        mount.mounted = true;
        mount.number = topmost(&mount.path);
        greet(&device, &mount.path)?;
        mount.device = Some(device);
        Ok(mount)
    }

    /// Go on with what another process has mounted at `path`; `image` is what it shows.
    pub fn adopt(path: &Path, image: &Path, passed: Passed) -> Mount {
        let shown = open(image, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
        let Passed { device, made } = passed;
        let (device, own, number, mounted) = (Some(device), None, topmost(path), true);
        Mount { path: path.to_owned(), image: shown, device, made, own, number, mounted }
    }

    /// Whether the file under it was made here, or for it.
    pub(crate) fn is_made(&self) -> bool {
        self.made
    }

    /// Which of all mounts it is.
    pub(crate) fn number(&self) -> Option<Number> {
        self.number
    }

    /// Serve it again by that descriptor.
    pub(crate) fn give_back(&mut self, device: OwnedFd) {
        self.device = Some(device);
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it shows, where that is a file.
    pub(crate) fn image(&self) -> Option<OwnedFd> {
        self.image.as_ref().and_then(|image| image.try_clone().ok())
    }

    /// The descriptors to serve it by, `count` of them, or fewer where the kernel gives fewer.
    pub(crate) fn take_devices(&mut self, count: usize) -> Result<Vec<OwnedFd>, Error> {
        let mut devices: Vec<OwnedFd> = self.device.take().into_iter().collect();
        while devices.len() < count {
            let (device, first) = (open_device()?, devices.first());
            let Some(mut fd) = first.map(|first| first.as_raw_fd() as u32) else { break };
            // SAFETY: the ioctl reads one u32 at that address.
            let cloned = unsafe { libc::ioctl(device.as_raw_fd(), CLONE, &raw mut fd) };
            if cloned != 0 {
                let error = io::Error::last_os_error();
                tracing::warn!("one queue for {}: {error}", self.path.display());
                break;
            }
            devices.push(device);
        }
        Ok(devices)
    }

    /// Take it off. In use it is taken out of sight at least; its users get errors once its
    /// descriptors are closed. Whether it was in use.
    pub(crate) fn unmount(&mut self) -> io::Result<bool> {
        if !std::mem::take(&mut self.mounted) {
            return Ok(false);
        }
        // Whoever moves a folder moves the mounts in it, and another may be where this one was.
        let Some(place) = place_of(&self.path, self.number)? else { return Ok(false) };
        self.path = place;
        let busy = match take_off(&self.path, false) {
            // Somebody else has taken it off.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(false),
            Err(_) => true,
            Ok(()) => false,
        };
        if busy {
            take_off(&self.path, true)?;
        }
        Ok(busy)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if STAY.load(SeqCst) {
            return;
        }
        // Without a server nothing that asks the file may be waited for: the connection goes first.
        self.device = None;
        if let Err(error) = self.unmount() {
            tracing::warn!("cannot unmount {}: {error}", self.path.display());
        }
        if self.made {
            remove_made(&self.path, self.own);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Which mount of ours is there, on top of all else.
fn topmost(path: &Path) -> Option<Number> {
    let entry = mounts_on(path).ok()?.pop()?;
    (entry.kind == format!("fuse.{SUBTYPE}")).then_some(entry.device)
}

/// Where that mount is now; nothing where it is nowhere, as far as this process sees. One that is not known is where it was.
fn place_of(path: &Path, number: Option<Number>) -> io::Result<Option<PathBuf>> {
    let Some(number) = number else { return Ok(Some(path.to_owned())) };
    let mut places: Vec<_> =
        mounts()?.into_iter().filter(|entry| entry.device == number).map(|it| it.place).collect();
    let usual = places.iter().position(|place| place == path);
    let Some(place) = usual.map(|at| places.swap_remove(at)).or_else(|| places.pop()) else {
        return Ok(None);
    };
    match topmost(&place) {
        Some(top) if top == number => Ok(Some(place)),
        // It would be the other that is taken off.
        _ => Err(Errno::BUSY.into()),
    }
}

/// Remove the file that was made to be mounted over; no other, and none that is mounted over.
fn remove_made(path: &Path, own: Option<(u64, u64)>) {
    if !mounts_on(path).is_ok_and(|mounts| mounts.is_empty()) {
        return;
    }
    if own.is_some() && identity(path) != own {
        return;
    }
    if fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == 0) {
        // What cannot be removed is an empty file, and does no harm.
        let _ = fs::remove_file(path);
    }
}

/// Leave nothing of a mount whose server does not end: whoever uses it gets errors once the process has ended.
pub(crate) fn leave_nothing(path: &Path, number: Option<Number>, made: bool) {
    let place = match place_of(path, number) {
        Ok(Some(place)) => place,
        // Its own thread has taken it off, and may not come to the rest.
        Ok(None) if made => return remove_made(path, None),
        Ok(None) => return,
        Err(error) => return tracing::warn!("cannot unmount {}: {error}", path.display()),
    };
    let path = &*place;
    match take_off(path, true) {
        Ok(()) => {}
        // It has been taken off before, as far as others see.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        // Nobody would answer who looks at it.
        Err(error) => return tracing::warn!("cannot unmount {}: {error}", path.display()),
    }
    if made {
        remove_made(path, None);
    }
}

/// As [`mount_here`], over that regular file and nothing that a link there, or in a folder on the way, leads to.
pub(crate) fn mount_on_file(path: &Path, image: &Path, read_only: bool) -> Result<OwnedFd, Error> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = open_without_links(path, flags);
    let found = found.map_err(|error| failed("find", path, error.into()))?;
    let facts = fstat(&found).map_err(|error| failed("look at", path, error.into()))?;
    if !FileType::from_raw_mode(facts.st_mode).is_file() {
        return Err(failed("mount over", path, Errno::LOOP.into()));
    }
    // The helper looks for itself, with the rights of this user.
    let held = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    mount_here(if geteuid().is_root() { &held } else { path }, image, read_only)
}

/// Mount a disk over a file, as this user can.
pub(crate) fn mount_here(path: &Path, image: &Path, read_only: bool) -> Result<OwnedFd, Error> {
    if geteuid().is_root() {
        return by_system_call(path, image, read_only);
    }
    // Whether others may use it too is the administrator's choice (/etc/fuse.conf).
    helper::mount(path, &mount_options(image, read_only, true))
        .or_else(|_| helper::mount(path, &mount_options(image, read_only, false)))
}

fn by_system_call(path: &Path, image: &Path, read_only: bool) -> Result<OwnedFd, Error> {
    let device = open_device()?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if read_only {
        flags |= MountFlags::RDONLY;
    }
    let data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},max_read={MOST},default_permissions,allow_other\0",
        device.as_raw_fd(),
        libc::S_IFREG,
        geteuid().as_raw(),
        getegid().as_raw(),
    );
    let data = std::ffi::CStr::from_bytes_with_nul(data.as_bytes()).ok();
    let kind = format!("fuse.{SUBTYPE}");
    let mounted = mount(image, path, kind, flags, data);
    mounted.map_err(|source| not_mounted(path, source.into()))?;
    Ok(device)
}

fn not_mounted(path: &Path, source: io::Error) -> Error {
    let hint = "; mounting takes CAP_SYS_ADMIN, which containers often lack";
    Error::Os { tried: "mount over", path: path.to_owned(), source, hint }
}

fn failed(tried: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Os { tried, path: path.to_owned(), source, hint: "" }
}

/// The path without symbolic links, though what is mounted there may be dead: two that are the same then
/// are the same file.
pub fn resolve(path: &Path) -> Result<PathBuf, Error> {
    let absolute = std::path::absolute(path).map_err(|error| failed("find", path, error))?;
    let (Some(folder), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        return Err(Error::Kind { path: absolute, found: "directory" });
    };
    let folder = folder.canonicalize().map_err(|source| {
        let hint = match source.kind() {
            io::ErrorKind::NotFound => "; make it first, or choose another place for --fuse",
            _ => "",
        };
        Error::Os { tried: "find the folder", path: folder.to_owned(), source, hint }
    })?;
    let resolved = folder.join(name);
    match resolved.read_link() {
        Ok(_) => resolved.canonicalize().map_err(|error| failed("find", path, error)),
        Err(_) => Ok(resolved),
    }
}

/// A server that was killed leaves its mount behind: every access fails with ENOTCONN, and with
/// ECONNABORTED where it began while the kernel was still closing the server's descriptors.
fn is_stale(path: &Path) -> bool {
    let seen = fs::metadata(path);
    let dead = [Some(libc::ENOTCONN), Some(libc::ECONNABORTED)];
    seen.is_err_and(|error| dead.contains(&error.raw_os_error()))
}

fn remove_stale(path: &Path) -> Result<(), Error> {
    for _ in 0..MOST_STALE {
        let mounts = mounts_on(path).map_err(|error| failed("list the mounts on", path, error))?;
        let Some(Entry { kind, source, .. }) = mounts.last() else { return Ok(()) };
        let stale = is_stale(path);
        if *kind != format!("fuse.{SUBTYPE}") || !stale {
            let dead = if stale { ", whose server is gone" } else { "" };
            let found = format!("{source} ({kind}{dead})");
            return Err(Error::Busy { path: path.to_owned(), found });
        }
        tracing::info!("{}: unmounting what a killed server left", path.display());
        take_off(path, true).map_err(|error| failed("unmount the stale", path, error))?;
    }
    Ok(())
}

fn take_off(path: &Path, lazily: bool) -> io::Result<()> {
    ask::unmount(path, lazily).unwrap_or_else(|| take_off_here(path, lazily))
}

/// Whether what is mounted there, on top of all else, is a disk that Ringtap shows. It is not looked at itself: nobody may
/// answer any more.
fn is_ours(path: &Path) -> io::Result<()> {
    match mounts_on(path)?.last() {
        Some(entry) if entry.kind == format!("fuse.{SUBTYPE}") => Ok(()),
        Some(_) => Err(Errno::PERM.into()),
        // As the kernel says it.
        None => Err(Errno::INVAL.into()),
    }
}

/// Take off the disk that is mounted there, and nothing else, as this user can.
pub fn take_off_here(path: &Path, lazily: bool) -> io::Result<()> {
    is_ours(path)?;
    if !geteuid().is_root() {
        return helper::unmount(path, lazily);
    }
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    Ok(unmount(path, flags | UnmountFlags::NOFOLLOW)?)
}

/// Make sure that there is a regular file to mount over; whether it was made.
fn prepare(path: &Path, image: &Path) -> Result<bool, Error> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Err(Error::Kind { path: path.to_owned(), found: "directory" }),
        Ok(meta) if !meta.is_file() => {
            Err(Error::Kind { path: path.to_owned(), found: "special file" })
        }
        Ok(meta) => match fs::metadata(image) {
            Ok(image) if (image.dev(), image.ino()) == (meta.dev(), meta.ino()) => {
                Err(Error::Image { path: path.to_owned() })
            }
            _ => Ok(false),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Made and not opened: a server that is confined may make a file there, and write to none.
            let (kind, mode) = (FileType::RegularFile, Mode::RUSR | Mode::WUSR);
            let made = mknodat(CWD, path, kind, mode, 0);
            made.map_err(|error| failed("make the file", path, error.into()))?;
            Ok(true)
        }
        Err(error) => Err(failed("look at", path, error)),
    }
}

/// What the mount helper is told; `helper` knows the rest by itself.
fn mount_options(image: &Path, read_only: bool, everybody: bool) -> String {
    let name = image.display().to_string().replace('\\', "\\\\").replace(',', "\\,");
    let access = if read_only { "ro" } else { "rw" };
    let others = if everybody { ",allow_other" } else { "" };
    format!(
        "{access},nosuid,nodev,fsname={name},subtype={SUBTYPE},max_read={MOST},default_permissions{others}"
    )
}

fn open_device() -> Result<OwnedFd, Error> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    open(DEVICE, flags, Mode::empty()).map_err(|source| Error::Os {
        tried: "open",
        path: DEVICE.into(),
        source: source.into(),
        hint: "; it takes the kernel's module fuse, and in a container the device",
    })
}

/// Answer the kernel's INIT.
fn greet(device: &OwnedFd, path: &Path) -> Result<(), Error> {
    let failed = |why: String| Error::Init { path: path.to_owned(), why };
    let mut fds = [PollFd::new(device, PollFlags::IN)];
    let wait = Timespec { tv_sec: INIT_WITHIN.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut fds, Some(&wait)) {
        Ok(0) => return Err(failed("it said nothing".into())),
        Ok(_) => {}
        Err(error) => return Err(failed(error.to_string())),
    }
    let mut message = vec![0; MOST + wire::WRITE_HEADER];
    let read = rustix::io::read(device, &mut message).map_err(|error| failed(error.to_string()))?;
    let message = &message[..read];
    let head = Head::parse(message).filter(|head| head.opcode == op::INIT);
    let init = message.get(IN_HEADER..).and_then(Init::parse);
    let (Some(head), Some(init)) = (head, init) else {
        return Err(failed("its first message is no INIT".into()));
    };
    if init.major != wire::MAJOR || init.minor < wire::OLDEST_MINOR {
        let (major, minor) = (init.major, init.minor);
        return Err(failed(format!("it speaks version {major}.{minor}, and 7.24 is needed")));
    }
    let answer = init.answer(BACKGROUND, MOST as u32);
    let header = wire::answer_header(head.unique, 0, answer.len());
    rustix::io::write(device.as_fd(), &[&header[..], &answer].concat())
        .map_err(|error| failed(error.to_string()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_taken_off_that_is_not_ours() {
        let errno = |path: &Path| is_ours(path).err().and_then(|error| error.raw_os_error());
        assert_eq!(errno(Path::new("/")), Some(libc::EPERM));
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(errno(dir.path()), Some(libc::EINVAL));
    }

    /// A mount of no server's, as it is where one has been killed: taking it off asks nobody.
    fn mounted(path: &Path) -> Option<Mount> {
        fs::write(path, "").expect("a file");
        let device = match mount_here(path, Path::new("none"), true) {
            Ok(device) => Some(device),
            Err(error) => {
                eprintln!("no mounts here: {error}");
                return None;
            }
        };
        let (own, number) = (None, topmost(path));
        assert!(number.is_some());
        let path = path.to_owned();
        Some(Mount { path, image: None, device, made: false, own, number, mounted: true })
    }

    #[test]
    fn a_mount_is_taken_off_where_it_is_and_no_other() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().canonicalize().expect("it");
        let (file, moved) = (root.join("q/f"), root.join("q2/f"));
        fs::create_dir(root.join("q")).expect("a folder");
        let Some(first) = mounted(&file) else { return };
        // Out of sight but in use, and its place taken by another.
        let user = open(&file, OFlags::PATH, Mode::empty()).expect("its user");
        take_off(&file, true).expect("taken off");
        let second = mounted(&file).expect("another");
        let number = second.number;
        drop((first, user));
        assert_eq!(topmost(&file), number, "the other's was taken off");
        // With its folder elsewhere, and its place taken by a third.
        fs::rename(root.join("q"), root.join("q2")).expect("moved");
        fs::create_dir(root.join("q")).expect("a folder");
        let third = mounted(&file).expect("a third");
        drop(second);
        assert_eq!((topmost(&moved), topmost(&file)), (None, third.number));
        leave_nothing(&moved, third.number, false);
        assert_eq!(topmost(&file), None, "it was at another place");
    }

    #[test]
    fn no_file_is_removed_but_the_one_that_was_made() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().canonicalize().expect("it").join("file");
        assert!(prepare(&file, Path::new("none")).expect("made"));
        let own = identity(&file);
        assert!(own.is_some());
        // Kept, so that its number is not given again.
        fs::rename(&file, dir.path().join("kept")).expect("moved");
        fs::write(&file, "").expect("another's");
        remove_made(&file, own);
        assert!(file.exists(), "another's file was removed");
        fs::rename(dir.path().join("kept"), &file).expect("back");
        remove_made(&file, own);
        assert!(!file.exists());
    }

    #[test]
    fn no_link_is_mounted_over() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().canonicalize().expect("it");
        fs::create_dir(root.join("real")).expect("a folder");
        fs::write(root.join("real/file"), "").expect("a file");
        std::os::unix::fs::symlink("real", root.join("folder")).expect("a link");
        std::os::unix::fs::symlink("real/file", root.join("link")).expect("a link");
        for (name, errno) in
            [("link", libc::ELOOP), ("folder/file", libc::ELOOP), ("real", libc::ELOOP)]
        {
            let end = mount_on_file(&root.join(name), Path::new("none"), true);
            let Err(Error::Os { source, .. }) = end else { panic!("{name}: {end:?}") };
            assert_eq!(source.raw_os_error(), Some(errno), "{name}");
        }
    }
}
