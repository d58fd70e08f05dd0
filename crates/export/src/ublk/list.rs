//! The ublk devices of this host, and giving up those whose server will not come back.

use std::path::PathBuf;

use super::control::{self, Control, block_device, served_by};
use super::device::{is_alive, is_served, settled};
use super::wire::State;
use super::{Error, record};

/// One device.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its number.
    pub id: u32,
    /// The block device, where it has one.
    pub path: PathBuf,
    /// What it does.
    pub state: State,
    /// Its server's process, while there is one.
    pub pid: Option<u32>,
    /// Bytes.
    pub size: u64,
    /// Queues.
    pub queues: u16,
    /// Whether requests' pages go to the image uncopied.
    pub zero_copy: bool,
    /// Whether Ringtap made it.
    pub ours: bool,
    /// The image it shows, where Ringtap made it and that was noted.
    pub image: Option<PathBuf>,
}

/// All devices that this user may see. None where the kernel has no ublk.
pub fn list() -> Result<Vec<Listed>, Error> {
    let mut control = match Control::open().map_err(Error::control) {
        Ok(control) => control,
        Err(Error::Missing(_)) => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    let mut listed = vec![];
    for id in numbers()? {
        // It may be gone by now, or another user's.
        let Ok(Some(info)) = control.info(id) else { continue };
        let sectors = std::fs::read_to_string(format!("/sys/block/ublkb{id}/size"));
        let sectors: u64 = sectors.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let alive = info.state != State::Waiting && is_alive(info.pid);
        listed.push(Listed {
            id,
            path: block_device(id),
            state: info.state,
            pid: u32::try_from(info.pid).ok().filter(|_| alive),
            size: sectors * 512,
            queues: info.queues,
            zero_copy: info.is_zero_copy(),
            ours: record::is_ours(info.mark),
            image: record::read(id, info.mark),
        });
    }
    Ok(listed)
}

fn numbers() -> Result<Vec<u32>, Error> {
    let failed = |source| Error::Os {
        tried: "list the devices of",
        path: "/sys/class/ublk-char".into(),
        source,
    };
    control::all().map_err(failed)
}

/// Delete the devices of Ringtap whose server is gone, or the one of that number. Who still uses
/// one gets errors. Gives what was deleted.
pub fn reap(only: Option<u32>) -> Result<Vec<PathBuf>, Error> {
    let mut control = Control::open().map_err(Error::control)?;
    let mut reaped = vec![];
    for id in only.map_or_else(numbers, |id| Ok(vec![id]))? {
        let failed = |tried, source| Error::Os { tried, path: served_by(id), source };
        let info = match settled(&mut control, id, |info| record::is_ours(info.mark)) {
            Ok(Some(info)) => info,
            Ok(None) if only.is_none() => continue,
            Ok(None) => return Err(failed("find", std::io::ErrorKind::NotFound.into())),
            Err(_) if only.is_none() => continue,
            Err(source) => return Err(failed("look at", source)),
        };
        let ours = record::is_ours(info.mark);
        let served = is_served(&info);
        if served || !ours {
            if only.is_some() {
                let image = record::read(id, info.mark);
                return Err(Error::Taken { id, pid: info.pid, served, ours, image });
            }
            continue;
        }
        control.remove(&info).map_err(|source| failed("delete", source))?;
        // What is left is a note about a device that is gone, which its readers expect.
        let _ = record::remove(id);
        reaped.push(block_device(id));
    }
    Ok(reaped)
}
