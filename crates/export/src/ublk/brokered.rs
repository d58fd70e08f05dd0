//! What a confined server has its broker do with the driver: the broker has the rights, and judges each wish.
//!
//! A device is the server's where it was made for it, or taken over from a server of the same image that is gone: by what
//! the driver says, not the server. Any other it may look at, and no more.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use ringtap_sandbox::{DeviceAct, DeviceDone, DeviceWish, Devices};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::control::{Here, block_device, served_by};
use super::device::{is_held_here, is_served};
use super::record;
use super::wire::{DeviceInfo, State, control};

/// Carry out what a server wants, if it may have it.
pub fn for_server(wish: &DeviceWish, devices: &Devices) -> io::Result<DeviceDone> {
    let byte = |said: bool| Ok((vec![u8::from(said)], None));
    match wish.act {
        DeviceAct::Reach => Here::open().map(|_| (vec![], None)),
        DeviceAct::Command { code, inline, by_path } => {
            let mut data = wish.data.clone();
            command(wish, (code, inline, by_path), devices, &mut data)?;
            Ok((data, None))
        }
        DeviceAct::Open => {
            devices.must_have(wish.id)?;
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let file = rustix::fs::open(served_by(wish.id), flags, Mode::empty())?;
            Ok((vec![], Some(file)))
        }
        DeviceAct::IsHeld => byte(is_held_here(wish.id)),
        DeviceAct::WriteBack => {
            devices.must_have(wish.id)?;
            byte(write_back(&block_device(wish.id))?)
        }
    }
}

fn command(
    wish: &DeviceWish,
    (code, inline, by_path): (u32, u64, bool),
    devices: &Devices,
    data: &mut [u8],
) -> io::Result<()> {
    let mut driver = Here::open()?;
    let (id, refused) = (wish.id, || Err(io::Error::from(Errno::PERM)));
    let mut inline = inline;
    match code {
        control::FEATURES | control::INFO | control::GET_PARAMS => {}
        control::ADD if !devices.may_show || !is_of(described(data)?, wish) => return refused(),
        control::ADD => {}
        control::START_RECOVERY => {
            let left = driver.info(id)?.ok_or(Errno::NODEV)?;
            let its = devices.may_show && is_of(left, wish) && !is_served(&left);
            if !devices.has(id) && !its {
                return refused();
            }
        }
        // A server may start what is its own, as itself.
        control::START | control::END_RECOVERY if inline != u64::from(devices.server) => {
            return refused();
        }
        control::START | control::END_RECOVERY => {
            devices.must_have(id)?;
            // Since Linux 6.16 the driver takes that of who has opened the device's file; this process ends with the server.
            inline = std::process::id().into();
        }
        control::SET_PARAMS => devices.must_have(id)?,
        control::STOP | control::UPDATE_SIZE => devices.must_have(id)?,
        control::DELETE | control::DELETE_ASYNC if devices.has(id) => {}
        // One that died before it was born is in everybody's way.
        control::DELETE | control::DELETE_ASYNC => {
            let left = driver.info(id)?.ok_or(Errno::NODEV)?;
            let dead = record::is_ours(left.mark) && left.state == State::Dead;
            if !dead || is_served(&left) {
                return refused();
            }
        }
        _ => return refused(),
    }
    let end = driver.run(code, id, by_path, data, inline);
    if matches!(code, control::DELETE | control::DELETE_ASYNC)
        && end.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV))
    {
        devices.gave_up(id);
    }
    end?;
    match code {
        control::START_RECOVERY => devices.took(id),
        control::ADD => devices.took(described(data)?.id),
        control::DELETE | control::DELETE_ASYNC => devices.gave_up(id),
        _ => {}
    }
    Ok(())
}

fn described(data: &[u8]) -> io::Result<DeviceInfo> {
    Ok(DeviceInfo::decode(data.try_into().map_err(|_| Errno::INVAL)?))
}

/// Whether a device is one of Ringtap's that shows the wish's image.
fn is_of(info: DeviceInfo, wish: &DeviceWish) -> bool {
    info.mark == record::mark(&wish.image)
}

/// Have the kernel write what it keeps of a block device; whether somebody has taken it for himself. One that is gone keeps
/// nothing.
pub(crate) fn write_back(device: &Path) -> io::Result<bool> {
    let alone = File::options().read(true).custom_flags(libc::O_EXCL).open(device);
    let in_use = alone.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY));
    match File::open(device).and_then(|device| device.sync_all()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(in_use),
        end => end.map(|()| in_use),
    }
}
