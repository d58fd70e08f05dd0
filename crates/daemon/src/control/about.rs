//! What the server says of itself, and the word that ends it.

use super::command::Command;
use super::outgoing::Reply;
use super::shape::{Done, answer, arguments};
use crate::running::Running;

answer! {
    /// The release of QEMU whose words for commands these are.
    struct QemuVersion { "major" major: i64, "minor" minor: i64, "micro" micro: i64 }
}

answer! {
    /// What answers.
    struct Version { "qemu" qemu: QemuVersion, "package" package: String }
}

/// What answers here: Ringtap, with the commands as the storage daemon of that release has them, to which it is
/// compared in tests.
pub(super) fn version() -> Version {
    let package = concat!("ringtap ", env!("CARGO_PKG_VERSION")).to_owned();
    Version { qemu: QemuVersion { major: 7, minor: 2, micro: 0 }, package }
}

arguments! {
    /// `query-version`
    struct QueryVersion {}
}

impl Command for QueryVersion {
    const NAME: &'static str = "query-version";
    type Answer = Version;

    fn run(self, _: &mut Running, reply: Reply<Version>) {
        reply.give(Ok(version()));
    }
}

arguments! {
    /// `quit`
    struct Quit {}
}

impl Command for Quit {
    const NAME: &'static str = "quit";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        running.quit = true;
        reply.give(Ok(Done {}));
    }
}
