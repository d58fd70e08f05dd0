//! Block devices of this host (ublk), whose driver takes more rights than a server has: what it may have done for it.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use crate::call::{Answer, Call, What, as_path};
use crate::client::ask;

/// What is wanted of the driver, or of a device's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAct {
    /// To know whether there is a driver.
    Reach,
    /// A command of its: its code, the number that goes with it, and whether it names the device by its file, too.
    Command {
        /// The code.
        code: u32,
        /// The number.
        inline: u64,
        /// Whether the device's file is named.
        by_path: bool,
    },
    /// The file by which a device is served.
    Open,
    /// Whether somebody has that file: one byte.
    IsHeld,
    /// What the kernel keeps of a device written: one byte, whether somebody uses it.
    WriteBack,
}

/// What a server asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceWish {
    /// What.
    pub act: DeviceAct,
    /// Of which device.
    pub id: u32,
    /// The image that it shows, as the operator names it.
    pub image: PathBuf,
    /// What the driver reads, and what it writes over.
    pub data: Vec<u8>,
}

/// What comes of it: bytes, and a file.
pub type DeviceDone = (Vec<u8>, Option<OwnedFd>);

impl DeviceWish {
    /// Have the broker do it; nothing where there is none.
    pub fn ask(&self) -> Option<io::Result<DeviceDone>> {
        let (kind, code, inline, by_path) = match self.act {
            DeviceAct::Reach => (0, 0, 0, false),
            DeviceAct::Command { code, inline, by_path } => (1, code, inline, by_path),
            DeviceAct::Open => (2, 0, 0, false),
            DeviceAct::IsHeld => (3, 0, 0, false),
            DeviceAct::WriteBack => (4, 0, 0, false),
        };
        let numbers = [kind | u64::from(code) << 32, self.id.into(), inline, by_path.into()];
        let first = self.image.as_os_str().as_bytes();
        let answer = ask(&Call { what: What::Device, numbers, first, second: &self.data })?;
        Some(answer.map(|Answer { text, files, .. }| (text, files.into_iter().next())))
    }

    pub(crate) fn of(call: &Call<'_>) -> Option<DeviceWish> {
        let [what, id, inline, by_path] = call.numbers;
        let code = (what >> 32) as u32;
        let act = match what as u32 {
            0 => DeviceAct::Reach,
            1 => DeviceAct::Command { code, inline, by_path: by_path != 0 },
            2 => DeviceAct::Open,
            3 => DeviceAct::IsHeld,
            4 => DeviceAct::WriteBack,
            _ => return None,
        };
        let (image, data) = (as_path(call.first).to_owned(), call.second.to_vec());
        Some(DeviceWish { act, id: u32::try_from(id).ok()?, image, data })
    }
}

/// What a server may have of the driver: known to the broker, and not the server's to say.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The server's process.
    pub server: u32,
    /// Whether the operator has the wish's image shown as a device.
    pub may_show: bool,
    ours: Arc<Mutex<BTreeSet<u32>>>,
}

impl Devices {
    pub(crate) fn new(server: u32) -> Devices {
        Devices { server, may_show: false, ours: Arc::default() }
    }

    /// The same for a wish of that image.
    pub(crate) fn of(&self, may_show: bool) -> Devices {
        Devices { may_show, ..self.clone() }
    }

    /// An error unless the device was made by this server, or taken over by it.
    pub fn must_have(&self, id: u32) -> io::Result<()> {
        match self.has(id) {
            true => Ok(()),
            false => Err(Errno::PERM.into()),
        }
    }

    /// Whether it was.
    pub fn has(&self, id: u32) -> bool {
        self.ours.lock().unwrap_or_else(PoisonError::into_inner).contains(&id)
    }

    /// It is the server's from now on.
    pub fn took(&self, id: u32) {
        self.ours.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }

    /// It is not any more.
    pub fn gave_up(&self, id: u32) {
        self.ours.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}

/// Have what is mounted there let go of by the namespace that server and broker have; nothing where there is no broker.
pub fn let_go(place: &Path) -> Option<io::Result<()>> {
    ask(&Call::path(What::LetGo, place)).map(|answer| answer.map(drop))
}
