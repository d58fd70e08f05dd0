//! A device to be served: a new one, or one whose server was killed.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringtap_vbd::Vbd;
use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;

use super::control::{self, Control, Target, served_by};
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
/// The driver notices a server's death, and udev makes a device's file, in much less.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);

/// A device that nobody serves yet. Dropping a new one deletes it; one that was taken over goes on
/// waiting.
pub struct Device {
    pub(crate) control: Control,
    pub(crate) info: DeviceInfo,
    /// The file it is served by.
    pub(crate) file: Option<OwnedFd>,
    pub(crate) taken_over: bool,
    /// Whether dropping it is to leave no trace.
    pub(crate) fresh: bool,
}

/// Whether the process that served a device is there. One that nobody has buried yet is not.
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
        vbd: &Vbd,
        options: &Options,
    ) -> Result<Device, Error> {
        let mut control = Control::open().map_err(Error::control)?;
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
            Some(info) => take_over(control, info)?,
            None => add(control, id, mark, features, vbd, options)?,
        };
        if device.file.is_none() {
            device.file = Some(open_file(device.info.id)?);
        }
        record::write(device.info.id, image);
        Ok(device)
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
        self.fresh = false;
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
        let known = match control.info(number) {
            Ok(known) => known,
            // Another user's: none of our business, unless it was asked for.
            Err(_) if id.is_none() => continue,
            Err(source) => {
                return Err(Error::Os { tried: "look at", path: served_by(number), source });
            }
        };
        let Some(info) = known else { continue };
        let ours = record::is_ours(info.mark);
        let served = info.state != State::Waiting && is_alive(info.pid);
        if ours && !served && info.state == State::Dead {
            tracing::info!("deleting {}, which a killed server left", served_by(number).display());
            control.remove(&info).map_err(failed)?;
            continue;
        }
        if info.mark == mark && !served {
            return Ok(Some(info));
        }
        if id.is_some() {
            let image = record::read(number, info.mark);
            return Err(Error::Taken { id: number, pid: info.pid, served, ours, image });
        }
    }
    Ok(None)
}

fn take_over(mut control: Control, info: DeviceInfo) -> Result<Device, Error> {
    let path = control::block_device(info.id);
    tracing::info!("{}: taking over from a server that was killed", path.display());
    let failed = |source| Error::Recover { path: path.clone(), id: info.id, source };
    let end = Instant::now() + PATIENCE;
    // EBUSY: the dead server's files are not all closed yet.
    while let Err(error) = control.start_recovery(Target::of(&info)) {
        if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > end {
            return Err(failed(error));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(Device { control, info, file: None, taken_over: true, fresh: false })
}

fn add(
    mut control: Control,
    id: Option<u32>,
    mark: u64,
    features: u64,
    vbd: &Vbd,
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
    let mut device = Device { control, info, file: None, taken_over: false, fresh: true };
    // An ordinary user may say nothing more before the file is his.
    device.file = Some(open_file(info.id)?);
    let mut params = params(vbd.info(), vbd.size(), vbd.write_cache(), &info);
    let target = device.target();
    let set = device.control.set_params(target, &mut params);
    set.map_err(|source| Error::Os { tried: "describe the disk to", path: device.path(), source })?;
    Ok(device)
}

/// The device's file, once it is there and ours to open: udev may take a moment.
fn open_file(id: u32) -> Result<OwnedFd, Error> {
    let path = served_by(id);
    let end = Instant::now() + PATIENCE;
    loop {
        let error = match open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => return Ok(file),
            Err(error) => io::Error::from(error),
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
