//! Ringtap, as `ringtap serve --ublk`: a block device of this host.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Access, Backend, Context, Entry, File, Reach, Served, ringtap};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process::{self, Server};
use crate::sample::Stage;
use crate::stop::Stop;

const CONTROL: &str = "/dev/ublk-control";
/// Numbers below are left to others.
const NUMBERS: std::ops::Range<u32> = 100..200;
/// How long deleting a device may take.
const REAPED: Duration = Duration::from_secs(60);

/// Over ublk.
#[derive(Debug)]
pub struct Ublk;

impl Backend for Ublk {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        if !Path::new(CONTROL).exists() {
            let remedy = "modprobe ublk_drv (Linux 6.5); compare ringtap-nbd meanwhile";
            return Some(Missing::new("this kernel has no ublk driver", remedy));
        }
        env.ringtap_serve()
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let free = |id: &u32| !Path::new(&character_device(*id)).exists();
        let id = NUMBERS.clone().find(free).ok_or_else(|| Error::Program {
            program: "ringtap".into(),
            what: format!("found no free number in {NUMBERS:?} for its device"),
            said: String::new(),
        })?;
        let node = PathBuf::from(format!("/dev/ublkb{id}"));
        let mut command = Command::new(&context.env.ringtap);
        command.arg("serve").arg(context.disk).args(["-f", "raw", "--cache", "none"]);
        command.arg(format!("--ublk={id}"));
        // Dropped after the server, should this fail.
        let device = Device { id, ringtap: context.env.ringtap.clone() };
        let mut server = Server::start(command, &context.log)?;
        let there = || node.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
        server.wait_until(&node, ringtap::READY, context.stop, there)?;
        Ok(Served { behind: vec![Box::new(device)], ..Served::by(server, Access::Block(node)) })
    }
}

/// A ublk device that a server makes. One that was killed leaves it waiting for the next, and whoever uses it with it:
/// deleted when this is dropped and the server has not done it.
#[derive(Debug)]
pub struct Device {
    id: u32,
    ringtap: PathBuf,
}

impl Drop for Device {
    fn drop(&mut self) {
        if Path::new(&character_device(self.id)).exists() {
            let mut command = Command::new(&self.ringtap);
            command.arg("list").arg(format!("--reap={}", self.id));
            // One that is another's by now is refused.
            let _ = process::run(command, REAPED, &Stop::default());
        }
    }
}

fn character_device(id: u32) -> String {
    format!("/dev/ublkc{id}")
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(Stage::Host, 230, "ublk", "ringtap serve --ublk, cache=none", &Ublk),
        Entry::usual(Stage::Two, 70, "ublk", "ringtap serve --ublk, cache=none", &Ublk),
    ],
    labels: &[("ublk", "Ringtap, ublk")],
    peers: &[],
};
