//! A running server controlled by QMP.

mod behind;
mod check;
mod clients;
mod copies;
mod dial;
mod disks;
mod encrypted;
mod ended;
mod folder;
mod graph;
mod hung;
mod judges;
mod kept_jobs;
mod limits;
mod line;
mod load;
mod many;
mod metrics;
mod older;
mod pause;
mod protocol;
mod refused;
mod reopen_words;
mod reopened;
mod reopened_served;
mod targets;
mod tls;
mod top;
mod verbs;
mod within;
mod written;

use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_tests::{Control, Server, program};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder with a server that began with nothing, and a client of it.
struct Empty {
    dir: TempDir,
    server: Server,
    control: Control,
}

impl Empty {
    fn new() -> Empty {
        // Not in /tmp, which may be a tmpfs: disks under O_DIRECT are what is meant.
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let path = dir.path().join("control");
        let server = Server::daemon(["--control", &format!("unix:{}", path.display())]);
        let control = Control::open(&path);
        Empty { dir, server, control }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Make an image, and have it opened as a node of its name.
    fn add(&mut self, name: &str, format: &str, size: &str) {
        let path = self.path(name);
        let mut make = Command::new("qemu-img");
        ok(make.args(["create", "-q", "-f", format]).arg(&path).arg(size));
        self.control.ok("blockdev-add", node(name, format, &path));
    }

    /// Begin the NBD server; where its exports are.
    fn nbd(&mut self) -> impl Fn(&str) -> String + use<> {
        let socket = self.text("nbd");
        let addr = json!({"type": "unix", "data": {"path": socket}});
        self.control.ok("nbd-server-start", json!({"addr": addr}));
        move |name| format!("nbd+unix:///{name}?socket={socket}")
    }

    fn export(&mut self, id: &str, node: &str, kind: &str, more: Value) {
        let mut options = json!({"id": id, "node-name": node, "type": kind, "writable": true});
        for (key, value) in more.as_object().expect("options") {
            options[key] = value.clone();
        }
        self.control.ok("block-export-add", options);
    }

    /// The ids of the exports there are.
    fn exports(&mut self) -> Vec<String> {
        let all = self.control.ok("query-block-exports", json!({}));
        let all = all.as_array().expect("a list").iter();
        all.map(|one| one["id"].as_str().expect("an id").to_owned()).collect()
    }
}

/// Run a program that must succeed.
fn ok(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
}

fn node(name: &str, format: &str, path: &Path) -> Value {
    json!({
        "node-name": name,
        "driver": format,
        "file": {"driver": "file", "filename": path, "cache": {"direct": true}},
    })
}

fn vhost(path: &Path) -> Value {
    json!({"addr": {"type": "unix", "path": path}})
}

/// What qemu-io says, where all it was told to do was done.
fn qemu_io(uri: &str, commands: &[&str]) -> Result<String, String> {
    let options = format!("driver=nbd,{}", options(uri));
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let args = ["--image-opts", &options].into_iter().chain(commands);
    let output = program("qemu-io", "qemu-utils", args);
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    match output.status.success() && !said.contains("failed") && !said.contains("rror") {
        true => Ok(said),
        false => Err(said),
    }
}

fn options(uri: &str) -> String {
    let (name, socket) =
        uri.strip_prefix("nbd+unix:///").and_then(|it| it.split_once("?socket=")).expect("a URI");
    format!("server.type=unix,server.path={socket},export={name}")
}

fn nbd_size(uri: &str) -> Result<u64, String> {
    let output = program("nbdinfo", "libnbd-bin", ["--size", uri]);
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
}
