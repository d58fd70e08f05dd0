//! Ringtap, as `ringtap serve --ublk`: a block device of this host.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::{Access, Backend, Context, Reach, Served, ringtap};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process::Server;

const CONTROL: &str = "/dev/ublk-control";
/// Numbers below are left to others.
const NUMBERS: std::ops::Range<u32> = 100..200;
const PAUSE: Duration = Duration::from_millis(10);

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
        let failed = |what: String| Error::Program {
            program: "ringtap".into(),
            what,
            said: std::fs::read_to_string(&context.log).unwrap_or_default(),
        };
        let free = |id: &u32| !Path::new(&format!("/dev/ublkc{id}")).exists();
        let Some(id) = NUMBERS.clone().find(free) else {
            return Err(failed(format!("found no free number in {NUMBERS:?} for its device")));
        };
        let device = PathBuf::from(format!("/dev/ublkb{id}"));
        let mut command = Command::new(&context.env.ringtap);
        command.arg("serve").arg(context.disk).args(["-f", "raw", "--cache", "none"]);
        command.arg(format!("--ublk={id}"));
        let server = Server::start(command, &context.log)?;
        let until = Instant::now() + ringtap::READY;
        let there = || device.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
        while !there() {
            context.stop.check()?;
            if Instant::now() > until {
                return Err(failed(format!("did not make {}", device.display())));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(Served::by(server, Access::Block(device)))
    }
}
