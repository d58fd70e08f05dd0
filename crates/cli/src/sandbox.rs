//! `--sandbox` of the verbs that serve.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ringtap_daemon::{Error, Sandbox, start_broker};

/// Whether the server is confined, and to what.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    /// Confine the server: it opens no file, makes no socket and starts no program but what its disks need
    #[arg(
        long,
        value_enum,
        value_name = "on|off",
        default_value = "off",
        hide_possible_values = true
    )]
    sandbox: OnOff,

    /// File or folder of disks and sockets that come later, by --control or SIGHUP; repeatable [default: all but the
    /// system's own folders]
    #[arg(long, value_name = "FILE|DIR")]
    allow: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnOff {
    On,
    Off,
}

impl SandboxArgs {
    /// Make the broker, while this process has nothing that it should not have, too.
    pub(crate) fn start(&self) -> Result<(), Error> {
        if self.sandbox == OnOff::Off {
            return Ok(());
        }
        for path in &self.allow {
            if let Err(error) = path.metadata() {
                return Err(Error::Usage(format!("--allow {}: {error}", path.display())));
            }
        }
        start_broker()
    }

    pub(crate) fn sandbox(&self) -> Sandbox {
        match self.sandbox {
            OnOff::Off => Sandbox::Off,
            OnOff::On => Sandbox::On { allow: self.allow.clone() },
        }
    }
}
