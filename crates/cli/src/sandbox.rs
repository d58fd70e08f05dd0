//! `--sandbox` of the verbs that serve.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ringtap_daemon::{Error, Sandbox, User, end_broker, start_broker};
use ringtap_image::is_store;

/// Whether the server is confined, and to what.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    /// Confine the server: it opens no file, makes no socket and starts no program but what its disks need; auto: but for
    /// what this kernel lacks, and without any with --ublk, which the log says; on: or serve nothing
    #[arg(
        long,
        value_enum,
        value_name = "auto|on|off",
        default_value = "auto",
        hide_possible_values = true
    )]
    sandbox: Mode,

    /// File or folder of disks and sockets that come later, by --control or SIGHUP, or store that they lie in (rbd:, s3://,
    /// https://); repeatable [default: all files but in the system's own folders]
    #[arg(long, value_name = "FILE|DIR|STORE")]
    allow: Vec<PathBuf>,

    /// Once it is confined the server is that user and root no more; sockets are made by its broker, which stays root, and
    /// belong to the user; images, and what is made beside them, must be such as the user may open and make. Without a
    /// group: those of the user
    #[arg(long, value_name = "NAME|UID[:GROUP|GID]")]
    user: Option<User>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Auto,
    On,
    Off,
}

/// The broker, where there is one: it ends when this is dropped.
pub(crate) struct Broker;

impl Drop for Broker {
    fn drop(&mut self) {
        end_broker();
    }
}

impl SandboxArgs {
    /// Make the broker, while this process has nothing that it should not have, too.
    pub(crate) fn start(&self) -> Result<Broker, Error> {
        if self.user.is_some() {
            self.may_become_user()?;
        }
        if self.sandbox == Mode::Off {
            return Ok(Broker);
        }
        for path in self.allow.iter().filter(|path| !is_store(path)) {
            if let Err(error) = path.metadata() {
                return Err(Error::Usage(format!("--allow {}: {error}", path.display())));
            }
        }
        match (self.sandbox, start_broker()) {
            // It says so once it logs.
            (Mode::Auto, _) if self.user.is_none() => Ok(Broker),
            (_, end) => end.map(|()| Broker),
        }
    }

    /// Whether there can be a server of another user.
    fn may_become_user(&self) -> Result<(), Error> {
        let why = match self.sandbox {
            Mode::Off => {
                "--user takes a server that is confined, whose broker makes its sockets: leave out --sandbox off, or start \
                 ringtap as that user (User= of a unit, setpriv)"
            }
            _ if !rustix::process::geteuid().is_root() => {
                "--user is for root: leave it out, and the server is who starts it"
            }
            _ => return Ok(()),
        };
        Err(Error::Usage(why.to_owned()))
    }

    pub(crate) fn sandbox(&self) -> Sandbox {
        let (allow, user) = (&self.allow, &self.user);
        let on = |must| Sandbox::On { allow: allow.clone(), must, user: user.clone() };
        match self.sandbox {
            Mode::Off => Sandbox::Off,
            Mode::Auto => on(false),
            Mode::On => on(true),
        }
    }
}
