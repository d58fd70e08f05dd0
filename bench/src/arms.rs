//! The ways of serving that are set side by side.

use ringtap_lab::process::find;
use ringtap_lab::process::launch::Launch;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What kind of server an arm is; goals name kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Ourselves.
    Ringtap,
    /// Ourselves on a raw image.
    Raw,
    /// Ourselves in a way that is shown beside the others and measured against none.
    Other,
    /// No server: io_uring on the file.
    Native,
    /// QEMU's servers with O_DIRECT (or a no-op image).
    Qemu,
    /// Another server with O_DIRECT, or QEMU's in a special arrangement.
    Direct,
    /// A server on the page cache.
    PageCache,
}

/// One arm of the experiment.
#[derive(Clone, Debug)]
pub struct Arm {
    /// For people and for `--servers`.
    pub name: String,
    /// What kind it is.
    pub kind: Kind,
    /// The Ringtap arm it is compared with.
    pub rival: &'static str,
    /// How the server starts; none for [`Kind::Native`].
    pub launch: Option<Launch>,
    /// Where the server listens.
    pub socket: PathBuf,
    /// The image; none for a no-op device.
    pub image: Option<PathBuf>,
    /// Queues that a load client over vhost-user uses, with a thread and the depth each.
    pub queues: usize,
    /// Seconds of load before the measurement, where it needs more than others.
    pub ramp: Option<f64>,
    /// What makes its image anew before each measurement, in this order.
    pub prepare: Vec<Launch>,
    /// Why it cannot run here.
    pub missing: Option<String>,
}

impl Arm {
    /// A server on `image`.
    pub fn server(
        name: &str,
        kind: Kind,
        rival: &'static str,
        socket: &Path,
        launch: Launch,
    ) -> Arm {
        let missing = (find(&launch.program.to_string_lossy()).is_none()
            && !launch.program.is_file())
        .then(|| format!("{} is not installed", launch.program.display()));
        Arm {
            name: name.into(),
            kind,
            rival,
            launch: Some(launch),
            socket: socket.into(),
            image: None,
            queues: 1,
            ramp: None,
            prepare: Vec::new(),
            missing,
        }
    }

    /// The same on `image`.
    pub fn on(mut self, image: &Path) -> Arm {
        self.image = Some(image.into());
        self
    }

    /// The same, with its image made anew before each measurement.
    pub fn after(mut self, prepare: Vec<Launch>) -> Arm {
        self.prepare = prepare;
        self
    }

    /// io_uring straight on `image`.
    pub fn native(rival: &'static str, image: &Path) -> Arm {
        Arm {
            name: "native io_uring".into(),
            kind: Kind::Native,
            rival,
            launch: None,
            socket: PathBuf::new(),
            image: Some(image.into()),
            queues: 1,
            ramp: None,
            prepare: Vec::new(),
            missing: None,
        }
    }
}

/// The Ringtap to measure: the one asked for, the one built beside this program, or PATH's.
pub fn ringtap_program(asked: Option<&Path>) -> PathBuf {
    if let Some(path) = asked {
        return path.to_path_buf();
    }
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("ringtap"));
    beside
        .filter(|path| path.is_file())
        .or_else(|| find("ringtap"))
        .unwrap_or_else(|| "ringtap".into())
}
