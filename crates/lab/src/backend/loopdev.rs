//! Loop devices of the host.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Access, Backend, Context, Entry, File, Part, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process;
use crate::sample::Stage;
use crate::stop::Stop;

/// A loop device on the disk's file.
#[derive(Debug)]
pub struct Loop {
    /// Past the page cache of the host (`--direct-io=on`), or through it.
    pub direct: bool,
}

impl Backend for Loop {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.loop_devices()
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let device = LoopDevice::attach(context.disk, self.direct)?;
        context.stop.check()?;
        let path = device.path().to_owned();
        if self.direct && !is_direct(&path) {
            // Dropping `device` detaches it.
            return Err(Error::Program {
                program: "losetup".into(),
                what: format!(
                    "--direct-io=on was not taken by {}: its file system refuses O_DIRECT",
                    path.display()
                ),
                said: String::new(),
            });
        }
        Ok(Served { above: vec![Box::new(device)], ..Served::reached(Access::Block(path)) })
    }

    fn cached(&self) -> bool {
        !self.direct
    }

    fn remark(&self) -> Option<&'static str> {
        Some(
            "the kernel's loop threads do the serving: no server CPU can be told apart; machine CPU has it",
        )
    }
}

fn is_direct(device: &Path) -> bool {
    let Some(name) = device.file_name() else { return false };
    let file = PathBuf::from("/sys/block").join(name).join("loop/dio");
    std::fs::read_to_string(file).is_ok_and(|text| text.trim() == "1")
}

/// An attached loop device; detached when it is dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: Option<PathBuf>,
}

impl LoopDevice {
    /// Attaches a loop device to `file`.
    pub fn attach(file: &Path, direct: bool) -> Result<LoopDevice> {
        let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", direct]).arg(file);
        // Not interruptible: an attached device whose name was not read could not be detached.
        let output = process::run(command, std::time::Duration::from_secs(60), &Stop::default())?;
        Ok(LoopDevice { path: Some(PathBuf::from(output.stdout.trim())) })
    }

    /// Its node.
    pub fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new(""))
    }

    /// Detaches it and says when that fails.
    pub fn detach(mut self) -> Result<()> {
        match self.path.take() {
            Some(path) => process::run_short(
                "losetup",
                [std::ffi::OsStr::new("-d"), path.as_os_str()],
                &Stop::default(),
            )
            .map(drop),
            None => Ok(()),
        }
    }
}

impl Part for LoopDevice {
    fn end(self: Box<Self>) -> Result<()> {
        self.detach()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = process::run_short(
                "losetup",
                [std::ffi::OsStr::new("-d"), path.as_os_str()],
                &Stop::default(),
            );
        }
    }
}

pub(super) const THROUGH_CACHE: Loop = Loop { direct: false };
pub(super) const DIRECT: Loop = Loop { direct: true };

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Host,
            20,
            "loop",
            "loop device on the file, through the page cache",
            &THROUGH_CACHE,
        ),
        Entry::usual(
            Stage::Host,
            30,
            "loop-direct",
            "loop device on the file, direct-io=on",
            &DIRECT,
        ),
        Entry::usual(
            Stage::Two,
            20,
            "loop",
            "loop device on the file, through the page cache",
            &THROUGH_CACHE,
        ),
        Entry::usual(
            Stage::Two,
            30,
            "loop-direct",
            "loop device on the file, direct-io=on",
            &DIRECT,
        ),
    ],
    labels: &[("loop", "loop device"), ("loop-direct", "loop device, direct I/O")],
    peers: &[],
};
