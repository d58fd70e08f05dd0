//! Ways of serving a disk that the user adds: a disk that is there already, or a server that the lab starts on its own
//! disk. `ringtap compare --device`, `--image`, `--nbd-uri`, `--vhost-user`, `--qemu`, and `--catalogue FILE`.

mod arguments;

use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_guest::{Aio, Cache, Drive};
use serde::{Deserialize, Serialize};

use arguments::{may_be_read_only, qemu_words, read_only, words};

use super::catalogue::add as add_to_catalogue;
use super::ringtap::{READY, nbd_access};
use super::{Access, Backend, Context, Entry, Reach, Served, vm};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process::{self, Server};
use crate::sample::Stage;
use crate::workload::Workload;

/// A way of the user's. In TOML a table of `[[backend]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Own {
    /// Its name in the report.
    pub name: String,
    /// What it is, in a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Where it runs, where not on every stage that can reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<Vec<Stage>>,
    /// It goes through a page cache: it is not ranked with those that go to the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cached: bool,
    /// A disk that exists may be written to; what is on it is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,
    /// A raw image that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// A block device that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<PathBuf>,
    /// An NBD export that is served already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd_uri: Option<String>,
    /// The socket of a vhost-user-blk server that runs already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<PathBuf>,
    /// QEMU's own: options of `-drive`, or whole arguments that name `{id}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu: Option<String>,
    /// A command that serves `{disk}` (raw) on the UNIX socket `{socket}` in the foreground, over NBD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serve_nbd: Option<String>,
    /// The same over vhost-user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serve_vhost_user: Option<String>,
}

/// How the disk of an own backend comes to be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    Path(PathBuf),
    Nbd(String),
    VhostUser(PathBuf),
    Qemu(String),
    Serve { line: String, nbd: bool },
}

impl Own {
    /// A way without a name, for the flags.
    pub fn named(name: String) -> Own {
        Own {
            name,
            title: None,
            stages: None,
            cached: false,
            overwrite: false,
            image: None,
            device: None,
            nbd_uri: None,
            vhost_user: None,
            qemu: None,
            serve_nbd: None,
            serve_vhost_user: None,
        }
    }

    fn way(&self) -> Result<Way> {
        let line = |line: &String, nbd| Way::Serve { line: line.clone(), nbd };
        let ways: Vec<Way> = [
            self.image.clone().map(Way::Path),
            self.device.clone().map(Way::Path),
            self.nbd_uri.clone().map(Way::Nbd),
            self.vhost_user.clone().map(Way::VhostUser),
            self.qemu.clone().map(Way::Qemu),
            self.serve_nbd.as_ref().map(|l| line(l, true)),
            self.serve_vhost_user.as_ref().map(|l| line(l, false)),
        ]
        .into_iter()
        .flatten()
        .collect();
        match <[Way; 1]>::try_from(ways) {
            Ok([way]) => Ok(way),
            Err(ways) => Err(Error::Plan(format!(
                "backend {:?} says {} ways to reach its disk: give one of image, device, nbd_uri, vhost_user, qemu, serve_nbd, \
                 serve_vhost_user",
                self.name,
                ways.len()
            ))),
        }
    }

    /// What is wrong with it, before anything starts. `size`: bytes that the loads use.
    pub fn check(&self, size: u64) -> Result<()> {
        let refuse = |text: String| Err(Error::Plan(format!("backend {:?}: {text}", self.name)));
        let named = |name: &str| super::all().any(|entry| entry.name == name);
        let letter = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty() || !self.name.chars().all(letter) || named(&self.name) {
            return refuse(
                "its name must be letters, digits, - and _, and none of the lab's own: give another".into(),
            );
        }
        match self.way()? {
            Way::Path(path) => {
                let bytes = bytes_of(&path)?;
                if bytes < size {
                    return refuse(format!(
                        "{} has {bytes} bytes and the loads use {size}: give --size {}M or less",
                        path.display(),
                        bytes >> 20
                    ));
                }
            }
            Way::Nbd(uri) if !uri.starts_with("nbd") => {
                return refuse(format!(
                    "{uri:?} is no NBD URI: write nbd://HOST/NAME or nbd+unix:///NAME?socket=PATH"
                ));
            }
            Way::Serve { line, .. } => {
                for word in ["{disk}", "{socket}"] {
                    if !line.contains(word) {
                        return refuse(format!("its command {line:?} does not name {word}"));
                    }
                }
                words(&line)?;
            }
            Way::Qemu(text) => {
                qemu_words(&text, "d0")?;
                if !self.overwrite && !may_be_read_only(&text)? {
                    return refuse(format!(
                        "QEMU would open {text:?} for writing, and its disk is only to be read: write read-only=on there, or give \
                         --overwrite if nothing on it is needed"
                    ));
                }
            }
            Way::Nbd(_) | Way::VhostUser(_) => {}
        }
        if let Some(stages) = &self.stages {
            let reached = self.reached();
            if let Some(stage) = stages.iter().find(|stage| !reached.contains(stage)) {
                let list: Vec<&str> = reached.iter().map(|stage| stage.name()).collect();
                return refuse(format!(
                    "stage {stage} does not reach it; these do: {}",
                    list.join(", ")
                ));
            }
        }
        Ok(())
    }

    /// The stages that can reach it.
    fn reached(&self) -> Vec<Stage> {
        match self.way() {
            Ok(Way::Qemu(_)) => vec![Stage::Vm],
            Ok(Way::Nbd(uri)) if socket_of(&uri).is_none() => vec![Stage::Host],
            Ok(_) => vec![Stage::Host, Stage::Vm],
            Err(_) => Vec::new(),
        }
    }

    /// Where it runs.
    pub fn stages(&self) -> Vec<Stage> {
        self.stages.clone().unwrap_or_else(|| self.reached())
    }

    /// The backend of Ringtap's that it is set beside on a stage: with the same load generator.
    pub fn rival(&self, stage: Stage) -> &'static str {
        match (stage, self.way()) {
            (Stage::Host, Ok(Way::Nbd(_) | Way::Serve { nbd: true, .. })) => "ringtap-nbd",
            (Stage::Host, Ok(Way::Path(_))) => "native",
            _ => "ringtap-vhost",
        }
    }
}

/// The file of a catalogue.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalogue {
    backend: Vec<Own>,
}

/// Reads a catalogue.
pub fn read(path: &Path) -> Result<Vec<Own>> {
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let file: Catalogue = toml::from_str(&text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text[..at].lines().count().max(1);
        Error::Plan(format!("catalogue {} line {line}: {}", path.display(), error.message()))
    })?;
    Ok(file.backend)
}

fn bytes_of(path: &Path) -> Result<u64> {
    use std::io::{Seek, SeekFrom};
    use std::os::unix::fs::FileTypeExt;
    // Looked at before it is opened: a pipe would hold who opens it.
    let kind = std::fs::metadata(path).map_err(Error::file("look at", path))?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(Error::Plan(format!(
            "{} is no file and no block device: name a raw image or a device",
            path.display()
        )));
    }
    let mut file = std::fs::File::open(path).map_err(Error::file("open", path))?;
    file.seek(SeekFrom::End(0)).map_err(Error::file("find the size of", path))
}

/// The UNIX socket of an NBD URI.
fn socket_of(uri: &str) -> Option<PathBuf> {
    let (_, query) = uri.strip_prefix("nbd+unix://")?.split_once('?')?;
    query.split('&').find_map(|pair| pair.strip_prefix("socket=")).map(PathBuf::from)
}

struct Added(Own, Way);

impl Backend for Added {
    fn reach(&self) -> Reach {
        match &self.1 {
            Way::Path(path) => match path.metadata() {
                Ok(meta) if !meta.is_file() => Reach::Block,
                _ => Reach::File,
            },
            Way::Nbd(_) | Way::Serve { nbd: true, .. } => Reach::Nbd,
            Way::VhostUser(_) | Way::Serve { nbd: false, .. } => Reach::VhostUser,
            Way::Qemu(_) => Reach::Inside,
        }
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        match &self.1 {
            Way::Serve { line, .. } => {
                let program = words(line).ok()?.into_iter().next()?;
                let there = Path::new(&program).is_file() || process::find(&program).is_some();
                (!there).then(|| {
                    Missing::new(
                        format!("no program {program}"),
                        "install it, or give its whole path",
                    )
                })
            }
            Way::VhostUser(socket) => (!socket.exists()).then(|| {
                Missing::new(format!("no socket {}", socket.display()), "start the server first")
            }),
            Way::Qemu(_) => env.program("qemu-system-x86_64", "qemu-system-x86"),
            Way::Path(_) | Way::Nbd(_) => None,
        }
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let (line, nbd) = match &self.1 {
            Way::Path(path) => return Ok(Served::reached(self.at(path))),
            Way::Nbd(uri) => {
                let socket = socket_of(uri).unwrap_or_default();
                return Ok(Served::reached(Access::Nbd { uri: uri.clone(), socket }));
            }
            Way::VhostUser(socket) => {
                return Ok(Served::reached(Access::VhostUser { socket: socket.clone() }));
            }
            Way::Qemu(text) => {
                // The guest gives it its place.
                let mut text = text.clone();
                if !self.0.overwrite && read_only(&text)?.is_none() {
                    text += ",read-only=on";
                }
                let words = qemu_words(&text, "{id}")?;
                return Ok(Served::reached(Access::QemuOwn(words)));
            }
            Way::Serve { line, nbd } => (line, *nbd),
        };
        let socket = context.sockets.join("own.sock");
        let place = |word: String| {
            word.replace("{disk}", &context.disk.to_string_lossy())
                .replace("{socket}", &socket.to_string_lossy())
        };
        let mut words = words(line)?.into_iter().map(place);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        let mut server = Server::start(command, &context.log)?;
        if nbd {
            server.wait_for_socket(&socket, READY, context.stop)?;
            return Ok(Served::by(server, nbd_access(&socket)));
        }
        server.wait_for_socket_file(&socket, READY, context.stop)?;
        Ok(Served::by(server, Access::VhostUser { socket }))
    }

    fn cached(&self) -> bool {
        self.0.cached
    }

    fn only_read(&self) -> bool {
        !self.0.overwrite && !matches!(self.1, Way::Serve { .. })
    }

    fn remark(&self) -> Option<&'static str> {
        matches!(self.1, Way::Serve { .. })
            .then_some("yours")
            .or(Some("yours: its server is not the lab's to watch, and its CPU is not counted"))
    }

    fn refuses(&self, workload: &dyn Workload) -> Option<Missing> {
        if matches!(self.1, Way::Serve { .. }) {
            return None;
        }
        if workload.is_check() {
            return Some(Missing::new(
                "the flushes of a disk that is there already cannot be counted",
                "serve_nbd or serve_vhost_user in a catalogue start your server on the lab's disk",
            ));
        }
        (workload.writes() && !self.0.overwrite).then(|| {
            Missing::new("it would overwrite your disk", "--overwrite, if nothing on it is needed")
        })
    }
}

impl Added {
    fn at(&self, path: &Path) -> Access {
        // Which of the two it is for the host; a guest is given it by QEMU.
        match self.reach() {
            Reach::Block => Access::Block(path.to_owned()),
            _ => Access::File(path.to_owned()),
        }
    }
}

/// In a guest QEMU opens what is a file or device of the host.
pub fn in_guest(access: Access, only_read: bool) -> Access {
    match access {
        Access::File(path) | Access::Block(path) => {
            let drive = Drive::raw(path).cache(Cache::None).aio(Aio::Native);
            let drive = if only_read { drive.read_only() } else { drive };
            Access::Qemu { attach: vm::Attach::Virtio, drive }
        }
        other => other,
    }
}

/// Adds a way of the user's to the backends, on each of its stages.
pub fn add(own: &Own) -> Result<()> {
    let way = own.way()?;
    let name: &'static str = Box::leak(own.name.clone().into_boxed_str());
    let title = own.title.clone().unwrap_or_else(|| match &way {
        Way::Path(path) | Way::VhostUser(path) => format!("yours: {}", path.display()),
        Way::Nbd(text) | Way::Qemu(text) | Way::Serve { line: text, .. } => {
            format!("yours: {text}")
        }
    });
    let title: &'static str = Box::leak(title.into_boxed_str());
    let backend: &'static dyn Backend = Box::leak(Box::new(Added(own.clone(), way)));
    let entry = |stage| Entry::usual(stage, u16::MAX, name, title, backend);
    add_to_catalogue(name, own.stages().into_iter().map(entry));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toml(text: &str) -> Own {
        toml::from_str::<Catalogue>(&format!("[[backend]]\n{text}")).unwrap().backend.remove(0)
    }

    #[test]
    fn a_server_of_the_users_has_a_disk_and_a_socket() {
        let own = toml("name = \"mine\"\nserve_nbd = \"my-server --unix {socket} {disk}\"");
        assert!(own.check(1 << 20).is_ok());
        assert_eq!(own.stages(), [Stage::Host, Stage::Vm]);
        assert_eq!(own.rival(Stage::Host), "ringtap-nbd");
        let lost = toml("name = \"mine\"\nserve_nbd = \"my-server {disk}\"");
        assert!(lost.check(1).unwrap_err().to_string().contains("does not name {socket}"));
        let quote = toml("name = \"mine\"\nserve_nbd = \"my 'server {disk} {socket}\"");
        assert!(quote.check(1).unwrap_err().to_string().contains("quote"));
    }

    #[test]
    fn names_and_ways_are_checked() {
        let two = toml("name = \"x\"\nimage = \"/a\"\ndevice = \"/b\"");
        assert!(two.check(1).unwrap_err().to_string().contains("2 ways"));
        let none = toml("name = \"x\"");
        assert!(none.check(1).unwrap_err().to_string().contains("0 ways"));
        let taken = toml("name = \"native\"\nnbd_uri = \"nbd://h\"");
        assert!(taken.check(1).unwrap_err().to_string().contains("name must be"));
        let tcp = toml("name = \"x\"\nnbd_uri = \"nbd://h/e\"\nstages = [\"vm\"]");
        assert!(tcp.check(1).unwrap_err().to_string().contains("does not reach"));
        assert!(toml::from_str::<Catalogue>("[[backend]]\nname = \"x\"\nfoo = 1").is_err());
    }

    #[test]
    fn a_disk_smaller_than_the_loads_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let own = Own { image: Some(file.path().into()), ..Own::named("x".into()) };
        assert!(own.check(1 << 20).is_ok());
        assert!(own.check(2 << 20).unwrap_err().to_string().contains("--size 1M"));
    }

    #[test]
    fn what_is_no_image_and_no_device_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        for path in [dir.path(), &pipe, Path::new("/dev/zero")] {
            let own = Own { image: Some(path.into()), ..Own::named("x".into()) };
            let (ended, end) = std::sync::mpsc::channel();
            std::thread::spawn(move || ended.send(own.check(0).map_err(|e| e.to_string())));
            let refused = end.recv_timeout(std::time::Duration::from_secs(60));
            let error = refused.expect("it waits for a pipe").unwrap_err();
            assert!(error.contains("no file and no block device"), "{error}");
        }
    }

    #[test]
    fn what_exists_is_read_unless_it_may_be_lost() {
        let own = |overwrite| Own {
            overwrite,
            device: Some("/dev/null".into()),
            ..Own::named("x".into())
        };
        let added = |overwrite| Added(own(overwrite), own(overwrite).way().unwrap());
        let of = |name| crate::workload::find(name).unwrap();
        assert!(added(false).refuses(of("randread-4k-qd1")).is_none());
        let refused = added(false).refuses(of("randwrite-4k-qd32")).unwrap();
        assert!(refused.remedy.contains("--overwrite"));
        assert!(added(true).refuses(of("randwrite-4k-qd32")).is_none());
        assert!(added(true).refuses(of("durability")).is_some());
    }

    #[test]
    fn qemu_opens_for_reading_what_may_not_be_lost() {
        let own = |text: &str, overwrite| {
            let qemu = Some(text.into());
            Own { overwrite, qemu, ..Own::named("x".into()) }
        };
        let words = |text: &str, overwrite| {
            let own = own(text, overwrite);
            let dir = Path::new("/nonexistent");
            let (env, stop) = (Env::new(dir.into(), dir.into()), crate::stop::Stop::default());
            let log = dir.into();
            let context = Context { env: &env, disk: dir, sockets: dir, log, stop: &stop };
            match Added(own.clone(), own.way().unwrap()).start(&context).unwrap().access {
                Access::QemuOwn(words) => words.join(" "),
                other => panic!("{other:?}"),
            }
        };
        assert!(words("file=/x,format=raw", false).ends_with("format=raw,read-only=on"));
        assert!(words("file=/x,readonly=on", false).ends_with("file=/x,readonly=on"));
        assert!(!words("file=/x", true).contains("read-only"));
        let file = "-drive if=none,id={id},file=/x";
        for text in [
            file,
            "file=/x,readonly=off",
            "-drive if=none,id={id},file=/x,,readonly=on",
            "-drive if=none,id={id},file=/x -drive if=none,id=other,file=/y,read-only=on",
            "-drive if=none,id={id},file=/x,read-only=on -blockdev driver=raw,node-name={id},file=f",
            "-blockdev '{\"node-name\":\"{id}\", \"read-only\": false}'",
            "-blockdev '{\"file\": {\"filename\": \"/x\", \"read-only\": true}, \"node-name\": \"{id}\"}'",
        ] {
            let error = own(text, false).check(1).expect_err(text).to_string();
            assert!(error.contains("read-only=on") && error.contains("--overwrite"), "{error}");
            assert!(own(text, true).check(1).is_ok(), "{text}");
        }
        for text in [
            "-drive if=none,id={id},file=/x,read-only=on",
            "-blockdev driver=file,filename=/x,node-name=f --blockdev driver=raw,file=f,node-name={id},read-only=on",
            "-blockdev '{\"node-name\":\"{id}\", \"read-only\": true}'",
            "-blockdev '{\"file\": {\"filename\": \"/x\", \"read-only\": false}, \"read-only\" : true, \"node-name\": \"{id}\"}'",
        ] {
            assert!(own(text, false).check(1).is_ok(), "{text}");
        }
        // What QEMU would not read either.
        for text in [
            "-blockdev {\"node-name\":\"{id}\",\"read-only\":true}",
            "-blockdev '{\"node-name\":\"{id}\",\"read-only\":\"true\"}'",
            "-blockdev '{\"node-name\":\"{id}\",\"read-only\":true,\"read-only\":false}'",
        ] {
            let error = own(text, false).check(1).expect_err(text).to_string();
            assert!(error.contains("no JSON object of a node"), "{error}");
        }
        // An image and a device are given to QEMU by the lab.
        let drive = |only_read| match in_guest(Access::File("/x".into()), only_read) {
            Access::Qemu { drive, .. } => format!("{drive:?}"),
            other => panic!("{other:?}"),
        };
        assert_ne!(drive(true), drive(false));
        assert!(drive(true).contains("read_only: true"));
        let image = Own { image: Some("/x".into()), ..Own::named("x".into()) };
        let only_read = |own: &Own| Added(own.clone(), own.way().unwrap()).only_read();
        assert!(only_read(&image) && !only_read(&Own { overwrite: true, ..image }));
    }
}
