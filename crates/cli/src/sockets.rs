//! Sockets that options name, and where the control socket usually is.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use ringtap_daemon::{Address, ControlAt};

/// Where the control socket is where nothing is said.
pub(crate) const CONTROL: &str = "unix:/run/ringtap/control.sock";

pub(crate) fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "write permissions in octal, such as 660".to_owned())
}

/// Where metrics are told.
pub(crate) fn metrics(text: &str) -> Result<Address, String> {
    let named = if text.starts_with("unix:") { text.to_owned() } else { format!("tcp:{text}") };
    let port = text.starts_with("unix:")
        || text.rsplit(':').next().is_some_and(|it| it.parse::<u16>().is_ok());
    let address = Address::nbd(&named).ok().filter(|_| port && text.contains(':'));
    address.ok_or_else(|| "write HOST:PORT or unix:PATH".to_owned())
}

/// Where clients are found.
pub(crate) fn control_at(text: &str) -> Result<ControlAt, String> {
    match text.strip_prefix("connect:").filter(|path| !path.is_empty()) {
        Some(path) => Ok(ControlAt::Dial(path.into())),
        None => control(text)
            .map(ControlAt::Listen)
            .map_err(|_| "write unix:PATH, or connect:PATH of a client that listens".to_owned()),
    }
}

/// The UNIX socket of an address.
pub(crate) fn control(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => Ok(path.into()),
        _ => Err("write unix:PATH".to_owned()),
    }
}

/// Make the folder of the usual socket, as restart logs have it: /run begins empty.
pub(crate) fn make_folder(control: &ControlAt) -> anyhow::Result<()> {
    let ControlAt::Listen(socket) = control else { return Ok(()) };
    if CONTROL.strip_prefix("unix:").map(Path::new) != Some(socket) {
        return Ok(());
    }
    let Some(folder) = socket.parent() else { return Ok(()) };
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error).with_context(|| {
            format!("cannot create {}: choose another place by --control", folder.display())
        }),
        _ => Ok(()),
    }
}
