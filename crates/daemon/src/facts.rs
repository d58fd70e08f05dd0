//! What is told about the disks: where they are served.

use std::io::Write as _;
use std::path::PathBuf;

use ringtap_image::CacheMode;
use ringtap_stores::percent::encoded;
use serde::Serialize;

use crate::left_out::LeftOut;
use crate::{Address, Announce, Disk};

/// One disk as it is served.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DiskFacts {
    disk: String,
    name: String,
    format: &'static str,
    size: u64,
    read_only: bool,
    cache: &'static str,
    logical_block_size: u32,
    request_alignment: u64,
    nbd: Vec<Nbd>,
    vhost_user: Vec<String>,
    fuse: Vec<String>,
    ublk: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
struct Nbd {
    address: String,
    uri: String,
}

/// What the `ready` line says in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Ready<'a> {
    ready: bool,
    pid: u32,
    version: &'static str,
    disks: &'a [DiskFacts],
    not_served: &'a [NotServed],
}

/// A disk that could not be served, or a file of the folder of disks that describes none.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NotServed {
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    error: String,
}

impl NotServed {
    pub(crate) fn new(LeftOut { disk, error, .. }: &LeftOut) -> NotServed {
        let (path, name) = (disk.path.display().to_string(), disk.name.clone());
        NotServed { disk: Some(path), name: Some(name), file: None, error: error.to_string() }
    }

    pub(crate) fn of_file((file, what): (&PathBuf, &String)) -> NotServed {
        let (file, error) = (Some(file.display().to_string()), what.clone());
        NotServed { disk: None, name: None, file, error }
    }
}

impl DiskFacts {
    pub(crate) fn new(disk: &Disk, vbd: &ringtap_vbd::Disk) -> DiskFacts {
        let info = vbd.info();
        DiskFacts {
            disk: disk.path.display().to_string(),
            name: disk.name.clone(),
            format: info.format,
            size: vbd.size(),
            read_only: info.read_only,
            cache: cache_name(vbd.cache()),
            logical_block_size: info.logical_block_size,
            request_alignment: info.request_alignment,
            nbd: vec![],
            vhost_user: vec![],
            fuse: vec![],
            ublk: None,
        }
    }

    /// The disk goes on in another image.
    pub(crate) fn goes_on(&mut self, disk: &Disk, vbd: &ringtap_vbd::Disk) {
        self.disk = disk.path.display().to_string();
        (self.read_only, self.cache) = (vbd.is_read_only(), cache_name(vbd.cache()));
        if let Ok(image) = vbd.image() {
            self.format = image.info().format;
        }
    }

    pub(crate) fn add_nbd(&mut self, address: &Address, tls: bool) {
        let uri = nbd_uri(address, &self.name, tls);
        self.nbd.push(Nbd { address: address.to_string(), uri });
    }

    pub(crate) fn add_vhost_user(&mut self, path: String) {
        self.vhost_user.push(path);
    }

    pub(crate) fn add_fuse(&mut self, path: String) {
        self.fuse.push(path);
    }

    pub(crate) fn set_ublk(&mut self, path: String) {
        self.ublk = Some(path);
    }

    /// One line for the log.
    pub(crate) fn line(&self) -> String {
        let places: Vec<&str> = self
            .nbd
            .iter()
            .map(|nbd| nbd.uri.as_str())
            .chain(self.vhost_user.iter().chain(&self.fuse).chain(&self.ublk).map(String::as_str))
            .collect();
        let Self { disk, format, size, cache, .. } = self;
        let mode = if self.read_only { "read-only" } else { "writable" };
        let at = if places.is_empty() { "" } else { ", at " };
        format!("{disk}: {format}, {size} bytes, {mode}, cache={cache}{at}{}", places.join(", "))
    }
}

impl<'a> Ready<'a> {
    pub(crate) fn new(disks: &'a [DiskFacts], not_served: &'a [NotServed]) -> Ready<'a> {
        let (pid, version) = (std::process::id(), env!("CARGO_PKG_VERSION"));
        Ready { ready: true, pid, version, disks, not_served }
    }
}

/// Print the word that everything is served, for whoever waits for it.
pub(crate) fn say_ready(announce: Announce, disks: &[DiskFacts], not_served: &[NotServed]) {
    let line = match announce {
        Announce::Text => "ready".to_owned(),
        Announce::Json => serde_json::to_string(&Ready::new(disks, not_served)).unwrap_or_default(),
    };
    let mut out = std::io::stdout().lock();
    // Nobody reads our stdout: then nobody waits for the word.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The mode as users name it.
pub(crate) fn cache_name(mode: CacheMode) -> &'static str {
    match mode {
        CacheMode::None => "none",
        CacheMode::Writeback => "writeback",
        CacheMode::Writethrough => "writethrough",
        CacheMode::DirectSync => "directsync",
        CacheMode::Unsafe => "unsafe",
    }
}

/// Source: the NBD URI specification, doc/uri.md of the NetworkBlockDevice project.
pub(crate) fn nbd_uri(address: &Address, name: &str, tls: bool) -> String {
    let name = encoded(name);
    let nbd = if tls { "nbds" } else { "nbd" };
    match address {
        Address::Unix(path) => {
            format!("{nbd}+unix:///{name}?socket={}", encoded(&*path.to_string_lossy()))
        }
        Address::Tcp { host, port } if host.contains(':') => {
            format!("{nbd}://[{host}]:{port}/{name}")
        }
        Address::Tcp { host, port } => format!("{nbd}://{host}:{port}/{name}"),
        Address::Systemd(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_what_clients_take() {
        let unix = Address::Unix("/run/a b.sock".into());
        assert_eq!(nbd_uri(&unix, "x&y", false), "nbd+unix:///x%26y?socket=/run/a%20b.sock");
        let tcp = |host: &str| Address::Tcp { host: host.into(), port: 10809 };
        assert_eq!(nbd_uri(&tcp("::1"), "", false), "nbd://[::1]:10809/");
        assert_eq!(nbd_uri(&tcp("127.0.0.1"), "a", true), "nbds://127.0.0.1:10809/a");
    }
}
