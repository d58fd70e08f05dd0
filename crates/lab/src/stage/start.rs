//! A guest's start from an image behind HTTP: the clock runs from when nothing of it is on this machine until the last read of the
//! start has come.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::backend::Access;
use crate::backend::origin::Start;
use crate::backend::ringtap::nbd_access;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::process::{self, Server};
use crate::stop::Stop;
use crate::workload::{Measured, Settings, start};

/// How long a start, or a download, may take.
const LIMIT: Duration = Duration::from_secs(900);

/// Where a start comes from, and what it may use.
pub struct Source<'a> {
    /// The image.
    pub url: &'a str,
    /// How it comes.
    pub start: Start,
    /// A folder for sockets.
    pub sockets: &'a Path,
    /// A folder on the disks' file system.
    pub scratch: &'a Path,
}

/// Starts once.
pub fn run(from: &Source<'_>, settings: &Settings, env: &Env, stop: &Stop) -> Result<Measured> {
    let list = from.scratch.join("start.list");
    if from.start == Start::BootList && !list.exists() {
        // As an earlier start has read it.
        let record = ["--record".into(), list.clone().into_os_string()];
        once(from, &record, settings, env, stop)?;
    }
    let mut more: Vec<std::ffi::OsString> = vec![];
    match from.start {
        Start::BootList => more.extend(["--boot-list".into(), list.into_os_string()]),
        Start::Fill => more.push("--fill".into()),
        Start::Download | Start::Lazy => {}
    }
    let (text, seconds) = once(from, &more, settings, env, stop)?;
    start::parse(&text, seconds)
}

/// What fio printed, and the seconds that all took.
fn once(
    from: &Source<'_>,
    more: &[std::ffi::OsString],
    settings: &Settings,
    env: &Env,
    stop: &Stop,
) -> Result<(String, f64)> {
    let folder = tempfile::Builder::new()
        .prefix("start-")
        .tempdir_in(from.scratch)
        .map_err(Error::file("make a folder in", from.scratch))?;
    let socket: PathBuf = from.sockets.join("start.nbd");
    let mut serve = Command::new(&env.ringtap);
    serve.arg("serve");
    let clock = Instant::now();
    if from.start == Start::Download {
        let file = folder.path().join("disk.raw");
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--fail", "-o"]).arg(&file).arg(from.url);
        process::run(curl, LIMIT, stop)?;
        serve.arg(file);
    } else {
        serve.arg(from.url).arg("--cache-dir").arg(folder.path().join("cache"));
    }
    serve.args(["-f", "raw", "--read-only", "--nbd"]);
    serve.arg(format!("unix:{}", socket.display())).args(more);
    let mut server = Server::start(serve, &folder.path().join("log"))?;
    server.wait_for_socket(&socket, LIMIT, stop)?;
    let Access::Nbd { uri, .. } = nbd_access(&socket) else {
        return Err(Error::Plan("an export has a URI".into()));
    };
    let mut fio = Command::new("fio");
    fio.args(start::args(&uri, settings));
    let text = process::run(fio, LIMIT, stop)?.stdout;
    let seconds = clock.elapsed().as_secs_f64();
    server.stop()?;
    Ok((text, seconds))
}
