//! A device to be served: a new one, or one whose server was killed.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringtap_sandbox::DeviceAct;
use ringtap_vbd::{Disk, WriteThrough};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;

use super::control::{self, Control, Target, ask_of, served_by};
use super::wire::{DeviceInfo, State, feature, params};
use super::{Error, Options, record};

/// Requests a queue may have.
const DEPTH: u16 = 64;
/// Bytes of one request, at most. Memory for all of a queue's is held from the start: 16 MiB.
const MOST: u32 = 256 << 10;
/// The same where no memory of the server's is filled by it.
const MOST_UNCOPIED: u32 = 1 << 20;
/// Formats whose images hold a disk's bytes as they are, for the most part.
const AS_THEY_ARE: [&str; 3] = ["raw", "qcow2", "vpc"];
/// A server's death is noticed at once, but where it had all requests of a queue in hand (before Linux
/// 6.15): then by the block layer, which lets a request take 30 s.
pub(crate) const SETTLES: Duration = Duration::from_secs(70);
/// The dead one's files are closed, and udev makes a device's file, in much less.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
/// The same of one that lets go of a device while its disk stands still.
const HANDED: Duration = Duration::from_millis(1);
/// How long the driver may take to see that a device is let go of.
const LEFT: Duration = Duration::from_secs(8);

/// A device that nobody serves yet. Dropping a new one deletes it; one that was taken over goes on
/// waiting.
pub struct Device {
    pub(crate) control: Control,
    pub(crate) info: DeviceInfo,
    /// The file it is served by.
    pub(crate) file: Option<OwnedFd>,
    /// Bytes, where it is taken over.
    pub(crate) taken_over: Option<u64>,
    /// Whether it is taken over from one that lets go of it, and is there to go on where that fails.
    pub(crate) handed: bool,
    /// Whether the driver bears it that a device is let go of while requests come.
    pub(crate) can_be_left: bool,
    /// Whether dropping it is to leave no trace.
    pub(crate) fresh: bool,
    /// Kept as long as the device is served.
    _through: WriteThrough,
}

/// Whether the process that served a device is there, as far as can be seen from here. One that nobody
/// has buried yet is not.
pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, which may be anything, ends with the last parenthesis; the state follows.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    pid > 0 && state.is_some_and(|state| !"ZX".contains(state))
}

impl Device {
    /// The device of `image`: a new one, or the one that a killed server of that image left. `id`
    /// chooses one by its number.
    pub fn open(
        image: &Path,
        id: Option<u32>,
        vbd: &Disk,
        options: &Options,
    ) -> Result<Device, Error> {
        let mut control = Control::of(image).map_err(Error::control)?;
        let features = control.features().map_err(|source| match source.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV | libc::EPERM) => Error::Old,
            _ => Error::Os { tried: "ask for the features of", path: CONTROL.into(), source },
        })?;
        if features & feature::IOCTL_ENCODE == 0 {
            return Err(Error::Old);
        }
        let mark = record::mark(image);
        let left = find(&mut control, id, mark)?;
        let mut device = match left {
            Some(info) => left_by_another(control, info, vbd)?,
            None => add(control, id, mark, features, vbd, options)?,
        };
        device.can_be_left = can_be_left(features);
        record::write(device.info.id, mark, image);
        Ok(device)
    }

    /// The device of that number, which the server of `image` that this one is to follow serves still.
    pub fn of_server_before(image: &Path, id: u32, vbd: &Disk) -> Result<Device, Error> {
        let mut control = Control::of(image).map_err(Error::control)?;
        let path = control::block_device(id);
        let failed = |source| Error::Os { tried: "look at", path: path.clone(), source };
        let (info, features) =
            control.info(id).and_then(|info| Ok((info, control.features()?))).map_err(failed)?;
        let info = info.filter(|info| record::is_ours(info.mark) && info.state != State::Dead);
        let info = info.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let mut device = left_by_another(control, info, vbd)?;
        (device.handed, device.can_be_left) = (true, can_be_left(features));
        Ok(device)
    }

    /// Take it over where another has left it, and open the file it is served by. The driver's older
    /// versions let nobody take it over any more where this one ends before every queue is fetching:
    /// whatever may fail has to be done before.
    pub(crate) fn claim(&mut self) -> Result<OwnedFd, Error> {
        if self.taken_over.is_some() {
            self.take_over()?;
        }
        match self.file.take() {
            Some(file) => Ok(file),
            None => open_file(&self.control, self.info.id),
        }
    }

    fn take_over(&mut self) -> Result<(), Error> {
        let (path, id, target) = (self.path(), self.info.id, self.target());
        if !self.handed {
            tracing::info!("{}: taking over from the server before", path.display());
        }
        let pause = if self.handed { HANDED } else { PAUSE };
        let end = Instant::now() + PATIENCE;
        loop {
            let Err(source) = self.control.start_recovery(target) else { return Ok(()) };
            match source.raw_os_error() {
                // The dead server's files are not all closed yet.
                Some(libc::EBUSY) if Instant::now() < end => std::thread::sleep(pause),
                // That was done before (Linux 6.12), by one that got no further.
                Some(libc::EINVAL) if self.is_waiting() => return Ok(()),
                _ => return Err(Error::Recover { path, id, source }),
            }
        }
    }

    fn is_waiting(&mut self) -> bool {
        self.state() == Some(State::Waiting)
    }

    fn state(&mut self) -> Option<State> {
        Some(self.control.info(self.info.id).ok()??.state)
    }

    /// It is not served here any more: wait until the driver has seen that, and has it wait for the next server. What it is
    /// then.
    pub(crate) fn wait_until_left(&mut self) -> Option<State> {
        (self.fresh, self.handed) = (false, true);
        let end = Instant::now() + LEFT;
        loop {
            match self.state() {
                Some(State::Live) if Instant::now() < end => std::thread::sleep(HANDED),
                state => return state,
            }
        }
    }

    /// Have it taken over, by who has let go of it, as it was.
    pub(crate) fn take_back(&mut self, size: u64) {
        (self.taken_over, self.handed) = (Some(size), true);
    }

    /// The block device's path.
    pub fn path(&self) -> PathBuf {
        control::block_device(self.info.id)
    }

    pub(crate) fn target(&self) -> Target {
        Target::of(&self.info)
    }

    /// Stop and delete it. Its file must be closed.
    pub(crate) fn delete(&mut self) -> io::Result<()> {
        (self.fresh, self.file) = (false, None);
        if !self.control.delete(self.target())? {
            let path = self.path();
            tracing::warn!("{} lingers until its last user lets go of it", path.display());
        }
        // What is left is a note about a device that is gone, which its readers expect.
        let _ = record::remove(self.info.id);
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.file = None;
        if self.fresh {
            if let Err(error) = self.delete() {
                tracing::warn!("cannot delete the ublk device {}: {error}", self.info.id);
            }
        }
    }
}

const CONTROL: &str = "/dev/ublk-control";

/// From Linux 6.7 to 6.14 the driver ends a slot's command, as its ring is closed, though a request has just been given to it:
/// that is lost then, the device never comes to rest, and the kernel uses memory that it has freed. The first release that
/// names what it can do by this bit has that cured, and sees that a queue is left whatever its slots do.
fn can_be_left(features: u64) -> bool {
    features & feature::QUIESCE != 0
}

/// The device to take over, if there is one: that of the number asked for, or any that shows the
/// same image and whose server is gone. Devices that died before they were born are deleted.
fn find(control: &mut Control, id: Option<u32>, mark: u64) -> Result<Option<DeviceInfo>, Error> {
    let failed =
        |source| Error::Os { tried: "look at the devices of", path: CONTROL.into(), source };
    let numbers = match id {
        Some(id) => vec![id],
        None => control::all().map_err(failed)?,
    };
    for number in numbers {
        let wanted = |info: &DeviceInfo| id.is_some() || info.mark == mark;
        let known = match settled(control, number, wanted) {
            Ok(known) => known,
            // Another user's: none of our business, unless it was asked for.
            Err(_) if id.is_none() => continue,
            Err(source) => {
                return Err(Error::Os { tried: "look at", path: served_by(number), source });
            }
        };
        let Some(info) = known else { continue };
        let ours = record::is_ours(info.mark);
        let served = is_served(&info);
        if ours && !served && info.state == State::Dead {
            tracing::info!("deleting {}, which a killed server left", served_by(number).display());
            control.remove(&info).map_err(failed)?;
            continue;
        }
        if info.mark == mark && !served {
            return Ok(Some(info));
        }
        // A second device of one image beside one whose server is dead, or so it seems, would have its
        // writes undone by what is handed to whoever takes that one over.
        if id.is_some() || (info.mark == mark && info.state == State::Live) {
            let image = record::read(number, info.mark);
            return Err(Error::Taken { id: number, pid: info.pid, served, ours, image });
        }
    }
    Ok(None)
}

/// The facts of a device. Where its server seems to be gone and the driver has not noticed yet, and it is
/// `wanted`, they are waited for.
pub(crate) fn settled(
    control: &mut Control,
    id: u32,
    wanted: impl Fn(&DeviceInfo) -> bool,
) -> io::Result<Option<DeviceInfo>> {
    let end = Instant::now() + SETTLES;
    loop {
        let info = control.info(id)?;
        let dying = |info: &DeviceInfo| info.state == State::Live && !is_alive(info.pid);
        if !info.as_ref().is_some_and(|info| dying(info) && wanted(info)) || Instant::now() > end {
            return Ok(info);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether somebody serves a device, or is about to. Its process may be one that cannot be seen from
/// here, in another container.
pub(crate) fn is_served(info: &DeviceInfo) -> bool {
    match info.state {
        State::Live => true,
        State::Waiting => false,
        State::Dead => is_alive(info.pid) || is_held(info.id),
    }
}

/// Whether somebody has the file by which a device is served.
fn is_held(id: u32) -> bool {
    ask_of(DeviceAct::IsHeld, id, || Ok(is_held_here(id))).unwrap_or(false)
}

pub(crate) fn is_held_here(id: u32) -> bool {
    let opened = open(served_by(id), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    opened.is_err_and(|error| error == rustix::io::Errno::BUSY)
}

/// A device that waits for a server, if this disk can be shown by it.
fn left_by_another(mut control: Control, info: DeviceInfo, vbd: &Disk) -> Result<Device, Error> {
    let (id, path) = (info.id, control::block_device(info.id));
    let shown = control.params(Target::of(&info)).map_err(|source| Error::Os {
        tried: "ask for the looks of",
        path: path.clone(),
        source,
    })?;
    if vbd.info().read_only && !shown.read_only {
        return Err(Error::Writable { path, id });
    }
    let mut through = vbd.write_through();
    if !shown.write_cache && !vbd.cache().writethrough() {
        // Nobody would ever ask for a flush.
        tracing::info!("{}: written through, as it was made", path.display());
        through.set(true);
    }
    let taken_over = Some(shown.size);
    let (file, handed, can_be_left, fresh) = (None, false, false, false);
    Ok(Device { control, info, file, taken_over, handed, can_be_left, fresh, _through: through })
}

fn add(
    mut control: Control,
    id: Option<u32>,
    mark: u64,
    features: u64,
    vbd: &Disk,
    options: &Options,
) -> Result<Device, Error> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut wanted = feature::RECOVERY | feature::IOCTL_ENCODE | feature::UPDATE_SIZE;
    if !geteuid().is_root() {
        wanted |= feature::UNPRIVILEGED;
    } else if features & feature::ZERO_COPY == feature::ZERO_COPY
        && AS_THEY_ARE.contains(&vbd.info().format)
    {
        wanted |= feature::ZERO_COPY;
    }
    let wanted = DeviceInfo {
        queues: options.queues.clamp(1, u16::try_from(cpus).unwrap_or(u16::MAX)),
        depth: DEPTH,
        state: State::Dead,
        most_bytes: if wanted & feature::ZERO_COPY == 0 { MOST } else { MOST_UNCOPIED },
        id: id.unwrap_or(u32::MAX),
        pid: std::process::id() as i32,
        features: wanted & features,
        mark,
    };
    let info = control.add(&wanted).map_err(|source| Error::Add { id, source })?;
    let _through = vbd.write_through();
    let (file, taken_over, handed, can_be_left, fresh) = (None, None, false, false, true);
    let mut device =
        Device { control, info, file, taken_over, handed, can_be_left, fresh, _through };
    // An ordinary user may say nothing more before the file is his.
    device.file = Some(open_file(&device.control, info.id)?);
    let mut params = params(vbd.info(), vbd.size(), !vbd.cache().writethrough(), &info);
    let target = device.target();
    let set = device.control.set_params(target, &mut params);
    set.map_err(|source| Error::Os { tried: "describe the disk to", path: device.path(), source })?;
    Ok(device)
}

/// The device's file, once it is there and ours to open: udev may take a moment.
fn open_file(control: &Control, id: u32) -> Result<OwnedFd, Error> {
    let path = served_by(id);
    let end = Instant::now() + PATIENCE;
    loop {
        let error = match control.open_device(id) {
            Ok(file) => return Ok(file),
            Err(error) => error,
        };
        let passing = [libc::ENOENT, libc::EACCES, libc::EBUSY, libc::ENXIO];
        if !error.raw_os_error().is_some_and(|errno| passing.contains(&errno))
            || Instant::now() > end
        {
            return Err(Error::Os { tried: "open", path, source: error });
        }
        std::thread::sleep(PAUSE);
    }
}
