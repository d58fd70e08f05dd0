//! `ringtap list`: the block devices of this host that are served by ublk.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::ublk::{self, Listed, State};
use serde::Serialize;

use crate::output::Output;

/// What `ringtap list` is told.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Delete the devices of Ringtap whose server is gone, or the one of this number; what their
    /// users had not flushed is lost
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true)]
    reap: Option<Option<u32>>,

    /// How to print it
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,
}

#[derive(Debug, Serialize)]
struct Device {
    device: String,
    state: &'static str,
    pid: Option<u32>,
    size: u64,
    queues: u16,
    zero_copy: bool,
    ringtap: bool,
    disk: Option<String>,
}

impl From<Listed> for Device {
    fn from(listed: Listed) -> Device {
        Device {
            device: listed.path.display().to_string(),
            state: match listed.state {
                State::Dead => "dead",
                State::Live => "live",
                State::Waiting => "waiting",
            },
            pid: listed.pid,
            size: listed.size,
            queues: listed.queues,
            zero_copy: listed.zero_copy,
            ringtap: listed.ours,
            disk: listed.image.map(|image| image.display().to_string()),
        }
    }
}

/// Delete what is to be deleted, then list what there is.
pub(crate) fn run(args: &ListArgs) -> anyhow::Result<ExitCode> {
    if let Some(only) = args.reap {
        for path in ublk::reap(only)? {
            tell!("ringtap: deleted {}", path.display());
        }
    }
    let devices: Vec<Device> = ublk::list()?.into_iter().map(Device::from).collect();
    let mut out = std::io::stdout().lock();
    match args.output {
        Output::Json => writeln!(out, "{}", serde_json::to_string(&devices)?)?,
        Output::Text => {
            for device in devices {
                let Device { device, state, pid, size, queues, zero_copy, ringtap, disk } = device;
                let how = if zero_copy { ", zero copy" } else { "" };
                let pid = pid.map_or("no server".into(), |pid| format!("process {pid}"));
                let unknown = if ringtap { "a disk not noted" } else { "not Ringtap's" };
                let disk = disk.unwrap_or_else(|| unknown.into());
                writeln!(
                    out,
                    "{device}: {state}, {size} bytes, {queues} queue(s){how}, {pid}, {disk}"
                )?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
