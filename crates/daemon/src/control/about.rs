//! What the server says of itself, and the word that ends it.

use serde_json::Value;

use super::outgoing::Reply;
use super::shape::{Done, answer, arguments};
use super::table::{self, Command};
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

answer! {
    /// One command.
    struct CommandInfo { "name" name: String }
}

arguments! {
    /// `query-commands`
    struct QueryCommands {}
}

impl Command for QueryCommands {
    const NAME: &'static str = "query-commands";
    type Answer = Vec<CommandInfo>;

    fn run(self, _: &mut Running, reply: Reply<Self::Answer>) {
        reply.give(Ok(table::names().map(|name| CommandInfo { name: name.to_owned() }).collect()));
    }
}

arguments! {
    /// `query-qmp-schema`
    struct QuerySchema {}
}

impl Command for QuerySchema {
    const NAME: &'static str = "query-qmp-schema";
    type Answer = Vec<Value>;

    fn run(self, _: &mut Running, reply: Reply<Self::Answer>) {
        reply.give(Ok(table::schema()));
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
