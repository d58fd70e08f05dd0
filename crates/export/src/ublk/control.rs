//! /dev/ublk-control: devices made, started, taken over, stopped and deleted.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use ringtap_sandbox::{DeviceAct, DeviceWish};
use rustix::fs::{Mode, OFlags, open};

use super::wire::{Described, DeviceInfo, PARAMS, State, control, control_command, feature};

const DEVICE: &str = "/dev/ublk-control";
/// Starting reads partitions and stopping waits for what is in flight: no longer than this.
const WITHIN: Duration = Duration::from_secs(120);
/// How long to wait for those who have a deleted device open.
const LET_GO: Duration = Duration::from_secs(3);

/// The driver, for who serves an image: its commands are the broker's to give where there is one.
pub(crate) struct Control {
    way: Way,
    image: PathBuf,
}

enum Way {
    Here(Box<Here>),
    Brokers,
}

/// A ring of its own: commands of this file are larger than a queue's.
pub(crate) struct Here {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    device: OwnedFd,
    /// Commands given so far: one that was not waited for to its end may answer yet.
    commands: u64,
}

/// A device that commands are for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) id: u32,
    /// Whether an ordinary user made it: then each command proves its right by the device's path.
    pub(crate) unprivileged: bool,
}

impl Target {
    pub(crate) fn of(info: &DeviceInfo) -> Target {
        Target { id: info.id, unprivileged: info.features & feature::UNPRIVILEGED != 0 }
    }
}

/// The file by which a device is served.
pub(crate) fn served_by(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// The block device.
pub(crate) fn block_device(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

pub(crate) fn wish(act: DeviceAct, id: u32, image: &Path) -> DeviceWish {
    DeviceWish { act, id, image: image.to_owned(), data: vec![] }
}

/// What may be said in a byte of a device.
pub(crate) fn ask_of(
    act: DeviceAct,
    id: u32,
    here: impl FnOnce() -> io::Result<bool>,
) -> io::Result<bool> {
    match wish(act, id, Path::new("")).ask() {
        None => here(),
        Some(end) => end.map(|(said, _)| said == [1]),
    }
}

/// The numbers of all devices there are.
pub(crate) fn all() -> io::Result<Vec<u32>> {
    let entries = match fs::read_dir("/sys/class/ublk-char") {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    let number =
        |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
    let mut all: Vec<u32> = entries.flatten().filter_map(number).collect();
    all.sort_unstable();
    Ok(all)
}

impl Here {
    pub(crate) fn open() -> io::Result<Here> {
        let device = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(4)?;
        Ok(Here { ring, device, commands: 0 })
    }

    /// One command to its end. The device's path, where it is wanted, and `data` are what the driver reads and writes.
    pub(crate) fn run(
        &mut self,
        command: u32,
        id: u32,
        by_path: bool,
        data: &mut [u8],
        inline: u64,
    ) -> io::Result<()> {
        let path = by_path.then(|| served_by(id).display().to_string());
        let path = path.unwrap_or_default().into_bytes();
        // Owned, for the driver may come to it later than we care to wait.
        let mut buffer = [&path[..], data].concat();
        let sizes = (u16::try_from(buffer.len()), u16::try_from(path.len()));
        let (Ok(len), Ok(path_len)) = sizes else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let address = if buffer.is_empty() { 0 } else { buffer.as_mut_ptr() as u64 };
        let payload = control_command(id, address, len, path_len, inline);
        self.commands += 1;
        let number = self.commands;
        let entry = opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), command).cmd(payload);
        let entry = entry.build().user_data(number);
        // SAFETY: the buffer lives until the completion, or for ever where that does not come.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::other("the control ring is full"))?;
        let time = Timespec::new().sec(WITHIN.as_secs());
        let args = SubmitArgs::new().timespec(&time);
        let result = loop {
            match self.ring.submitter().submit_with_args(1, &args) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => {
                    std::mem::forget(buffer);
                    return Err(error);
                }
            }
            if let Some(end) = self.ring.completion().find(|end| end.user_data() == number) {
                break end.result();
            }
        };
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        data.copy_from_slice(&buffer[path.len()..]);
        Ok(())
    }

    /// The facts of a device; none where there is no such device.
    pub(crate) fn info(&mut self, id: u32) -> io::Result<Option<DeviceInfo>> {
        info(|data| self.run(control::INFO, id, true, data, 0))
    }
}

fn info(ask: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<Option<DeviceInfo>> {
    let mut bytes = [0; DeviceInfo::LEN];
    match ask(&mut bytes) {
        Ok(()) => Ok(Some(DeviceInfo::decode(&bytes))),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENODEV | libc::ENOENT) => Ok(None),
            _ => Err(error),
        },
    }
}

impl Control {
    /// For who serves no image.
    pub(crate) fn open() -> io::Result<Control> {
        Control::of(Path::new(""))
    }

    pub(crate) fn of(image: &Path) -> io::Result<Control> {
        let image = image.to_owned();
        let way = match wish(DeviceAct::Reach, u32::MAX, &image).ask() {
            None => Way::Here(Box::new(Here::open()?)),
            Some(end) => end.map(|_| Way::Brokers)?,
        };
        Ok(Control { way, image })
    }

    fn run(
        &mut self,
        code: u32,
        id: u32,
        by_path: bool,
        data: &mut [u8],
        inline: u64,
    ) -> io::Result<()> {
        let driver = match &mut self.way {
            Way::Here(driver) => driver,
            Way::Brokers => {
                let act = DeviceAct::Command { code, inline, by_path };
                let wish = DeviceWish { data: data.to_vec(), ..wish(act, id, &self.image) };
                let (answer, _) = wish.ask().ok_or(rustix::io::Errno::PIPE)??;
                if answer.len() != data.len() {
                    return Err(rustix::io::Errno::IO.into());
                }
                data.copy_from_slice(&answer);
                return Ok(());
            }
        };
        driver.run(code, id, by_path, data, inline)
    }

    fn command(&mut self, command: u32, target: Target, inline: u64) -> io::Result<()> {
        self.run(command, target.id, target.unprivileged, &mut [], inline)
    }

    /// What this kernel's driver can do. Linux 6.5.
    pub(crate) fn features(&mut self) -> io::Result<u64> {
        let mut features = [0; 8];
        self.run(control::FEATURES, u32::MAX, false, &mut features, 0)?;
        Ok(u64::from_ne_bytes(features))
    }

    /// The facts of a device; none where there is no such device.
    pub(crate) fn info(&mut self, id: u32) -> io::Result<Option<DeviceInfo>> {
        info(|data| self.run(control::INFO, id, true, data, 0))
    }

    /// Make a device; what became of the wishes.
    pub(crate) fn add(&mut self, wanted: &DeviceInfo) -> io::Result<DeviceInfo> {
        let mut bytes = wanted.encode();
        self.run(control::ADD, wanted.id, false, &mut bytes, 0)?;
        Ok(DeviceInfo::decode(&bytes))
    }

    /// What a device was said to be.
    pub(crate) fn params(&mut self, target: Target) -> io::Result<Described> {
        let mut params = [0; PARAMS];
        params[..4].copy_from_slice(&(PARAMS as u32).to_ne_bytes());
        self.run(control::GET_PARAMS, target.id, target.unprivileged, &mut params, 0)?;
        Ok(Described::decode(&params))
    }

    pub(crate) fn set_params(&mut self, target: Target, params: &mut [u8]) -> io::Result<()> {
        self.run(control::SET_PARAMS, target.id, target.unprivileged, params, 0)
    }

    /// Make it a block device. Every slot of every queue must be fetching, or will soon.
    pub(crate) fn start(&mut self, target: Target) -> io::Result<()> {
        self.command(control::START, target, std::process::id().into())
    }

    /// Begin to take over a device that waits for a server.
    pub(crate) fn start_recovery(&mut self, target: Target) -> io::Result<()> {
        self.command(control::START_RECOVERY, target, 0)
    }

    /// As [`Control::start`], for a device taken over.
    pub(crate) fn end_recovery(&mut self, target: Target) -> io::Result<()> {
        self.command(control::END_RECOVERY, target, std::process::id().into())
    }

    /// Make it no block device any more; what is fetched ends.
    pub(crate) fn stop(&mut self, target: Target) -> io::Result<()> {
        self.command(control::STOP, target, 0)
    }

    /// Delete it. What is left of it goes when its last user lets go: true where that is soon.
    pub(crate) fn delete(&mut self, target: Target) -> io::Result<bool> {
        match self.command(control::DELETE_ASYNC, target, 0) {
            Ok(()) => {}
            // Linux before 6.7 has only the command that waits, and 6.12 lets ordinary users have no
            // other.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
                return self.command(control::DELETE, target, 0).map(|()| true);
            }
            Err(error) => return Err(error),
        }
        let end = Instant::now() + LET_GO;
        // Its file is gone, so whoever proves by it to be its owner can no longer ask: gone, too.
        while matches!(self.info(target.id), Ok(Some(_))) {
            if Instant::now() > end {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    /// Change its size, in bytes. Linux 6.16.
    pub(crate) fn resize(&mut self, target: Target, size: u64) -> io::Result<()> {
        self.command(control::UPDATE_SIZE, target, size / 512)
    }

    /// The file by which a device is served.
    pub(crate) fn open_device(&self, id: u32) -> io::Result<OwnedFd> {
        match wish(DeviceAct::Open, id, &self.image).ask() {
            None => Ok(open(served_by(id), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?),
            Some(end) => end?.1.ok_or_else(|| rustix::io::Errno::IO.into()),
        }
    }

    /// Stop and delete a device whose server is gone, unless it is gone, too.
    pub(crate) fn remove(&mut self, info: &DeviceInfo) -> io::Result<()> {
        let target = Target::of(info);
        let stopped = match info.state {
            State::Dead => Ok(()),
            _ => self.stop(target),
        };
        match stopped.and_then(|()| self.delete(target).map(drop)) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            end => end,
        }
    }
}
