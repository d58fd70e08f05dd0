//! `ringtap serve`, started and waited for.

use std::path::Path;
use std::process::Command;

use ringtap_tests::ringtap;
use rustix::process::Signal;
use serde_json::Value;

use crate::program::{Output, Running};

/// A `ringtap serve` that listens.
#[derive(Debug)]
pub(crate) struct Server {
    running: Running,
    /// What it said when it was ready.
    pub(crate) facts: Value,
}

impl Server {
    /// Start it in a folder with the given words, and wait until every socket listens.
    #[track_caller]
    pub(crate) fn start(folder: &Path, words: &str) -> Server {
        Server::started(command(folder, words))
    }

    /// The same for a command made elsewhere, which must print its facts as JSON.
    #[track_caller]
    pub(crate) fn started(command: Command) -> Server {
        let mut running = Running::start(command);
        let facts = running.until("ready line", |it| serde_json::from_str(&it.stdout()).ok());
        Server { running, facts }
    }

    /// The process.
    pub(crate) fn process(&mut self) -> &mut Running {
        &mut self.running
    }

    /// The NBD URI of a disk, by its place on the command line.
    pub(crate) fn uri(&self, disk: usize) -> String {
        let uri = &self.facts["disks"][disk]["nbd"][0]["uri"];
        uri.as_str().expect("an NBD address").to_owned()
    }

    /// Wait for its end.
    #[track_caller]
    pub(crate) fn wait(self) -> Output {
        self.running.wait()
    }

    /// Ask it to stop, and wait for its end.
    #[track_caller]
    pub(crate) fn stop(self) -> Output {
        self.running.signal(Signal::TERM);
        self.running.wait()
    }

    /// Kill it and wait for its end.
    #[track_caller]
    pub(crate) fn kill(self) {
        self.running.signal(Signal::KILL);
        self.running.wait();
    }
}

/// `ringtap serve` in a folder, with its facts as JSON.
pub(crate) fn command(folder: &Path, words: &str) -> Command {
    let mut command = Command::new(ringtap());
    command.current_dir(folder).env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
    command.args(["serve", "--output", "json"]).args(words.split_whitespace());
    command
}
