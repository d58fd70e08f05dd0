//! Disks that come, grow and go.

use std::path::PathBuf;

use ringtap_image::{CacheMode, Format, OpenOptions, Place, RestartChoice};

use super::access::{CopyBeforeWriteOptions, SnapshotAccessOptions};
use super::opening::{DEVICE, FileWish, Wish};
use super::refs::{Backing, NodeOr};
use super::refusal::Refusal;
use super::remote::{RemoteNbd, RemoteRbd};
use super::secrets::Qcow2Encryption;
use super::shape::{arguments, choice, words};
use super::throttle::ThrottleLimits;
use crate::identity::Identity;
use crate::ids::DiskId;
use crate::node::is_name;
use crate::running::{Running, Served};
use crate::{Disk, OnError};

words! {
    /// What becomes of discards.
    enum Discard { "unmap" Unmap, "ignore" Ignore }
}

words! {
    /// Whether zeros that are written are looked for.
    enum DetectZeroes { "off" Off, "on" On, "unmap" Unmap }
}

words! {
    /// How operations are carried out: the server decides, whatever is said.
    enum Aio { "threads" Threads, "native" Native, "io_uring" IoUring }
}

words! {
    /// Whether its file is locked: it is, as far as the file system can.
    enum Locking { "auto" Auto, "on" On }
}

words! {
    /// What becomes of requests that find no room where the image lies.
    enum ErrorChoice { "report" Report, "hold" Hold }
}

words! {
    /// What becomes of a restart log that is in doubt.
    enum LogChoice { "use" Use, "drop" Drop, "optional" Optional }
}

arguments! {
    /// How the host's page cache is used.
    struct CacheOptions { "direct" direct: Option<bool>, "no-flush" no_flush: Option<bool> }
}

arguments! {
    /// A file or a block device.
    struct FileOptions {
        "filename" filename: String,
        /// Where it lies in an image's options: what it is called then.
        "node-name" node_name: Option<String>,
        "locking" _locking: Option<Locking>,
        "aio" _aio: Option<Aio>,
        /// It is opened as `read-only` says.
        "auto-read-only" _auto_read_only: Option<bool>,
    }
}

choice! {
    /// Where an image is.
    struct FileRef {
        "read-only" read_only: Option<bool>,
        "cache" cache: Option<CacheOptions>,
        "discard" discard: Option<Discard>,
        "detect-zeroes" _detect_zeroes: Option<DetectZeroes>,
    }
    "driver" enum FileDriver {
        "file" File(FileOptions),
        "host_device" Device(FileOptions),
        "nbd" Nbd(RemoteNbd),
        "rbd" Rbd(RemoteRbd),
    }
}

arguments! {
    /// An image of which only the file is said.
    struct PlainOptions {
        "file" file: NodeOr<FileRef>,
        /// Write to it as this format though it is known to be another.
        "__ringtap_force-format" force_format: Option<bool>,
        "__ringtap_restart-log" restart_log: Option<LogChoice>,
        /// Files, and folders with such, that it may name as what lies below it.
        "__ringtap_backing" backing: Option<Vec<String>>,
    }
}

arguments! {
    /// A qcow2 image.
    struct Qcow2Options {
        "file" file: NodeOr<FileRef>,
        /// What lies below: what the image names, by the rules for that, where nothing is said.
        "backing" below: Option<Backing<Add>>,
        /// What opens it, and those below that it names, where they are encrypted.
        "encrypt" encrypt: Option<Qcow2Encryption>,
        "l2-cache-size" l2_cache_size: Option<u64>,
        "__ringtap_force-format" force_format: Option<bool>,
        "__ringtap_restart-log" restart_log: Option<LogChoice>,
        "__ringtap_backing" backing: Option<Vec<String>>,
        /// Files that it may name as its external data file.
        "__ringtap_data-files" data_files: Option<Vec<String>>,
        /// Dirty bitmaps of it that may be shown to NBD clients.
        "__ringtap_bitmaps" bitmaps: Option<Vec<String>>,
    }
}

arguments! {
    /// An encrypted image.
    struct LuksOptions {
        "file" file: NodeOr<FileRef>,
        /// The secret, by its id.
        "key-secret" key_secret: String,
        "__ringtap_force-format" force_format: Option<bool>,
        "__ringtap_restart-log" restart_log: Option<LogChoice>,
        /// Pass discards on, which shows others which parts of the disk are in use.
        "__ringtap_allow-discards" allow_discards: Option<bool>,
    }
}

arguments! {
    /// A disk whose group has limits.
    struct ThrottleOptions {
        "throttle-group" group: String,
        /// The disk itself; there is one node of both.
        "file" file: Box<Add>,
    }
}

arguments! {
    /// A disk that holds nothing.
    struct NullOptions {
        "size" size: Option<u64>,
        /// It reads as zeros, whatever is said.
        "read-zeroes" _read_zeroes: Option<bool>,
    }
}

choice! {
    /// `blockdev-add`
    struct Add {
        "node-name" node_name: Option<String>,
        "read-only" read_only: Option<bool>,
        "cache" cache: Option<CacheOptions>,
        "discard" discard: Option<Discard>,
        "detect-zeroes" _detect_zeroes: Option<DetectZeroes>,
        /// False: another server has the image, until its guest begins here.
        "active" active: Option<bool>,
        /// What becomes of requests that find no room.
        "__ringtap_on-error" on_error: Option<ErrorChoice>,
        "__ringtap_limits" limits: Option<ThrottleLimits>,
        "__ringtap_throttle-group" group: Option<String>,
        /// False: no file describes it to the next server, though others' are kept.
        "__ringtap_persist" persist: Option<bool>,
    }
    "driver" enum Driver {
        "file" File(FileOptions),
        "host_device" Device(FileOptions),
        "nbd" Nbd(RemoteNbd),
        "rbd" Rbd(RemoteRbd),
        "raw" Raw(PlainOptions),
        "qcow2" Qcow2(Qcow2Options),
        "vpc" Vpc(PlainOptions),
        "luks" Luks(LuksOptions),
        "vhdx" Vhdx(PlainOptions),
        "vmdk" Vmdk(PlainOptions),
        "null-co" Null(NullOptions),
        "throttle" Throttle(ThrottleOptions),
        "copy-before-write" CopyBeforeWrite(CopyBeforeWriteOptions),
        "snapshot-access" SnapshotAccess(SnapshotAccessOptions),
    }
}

/// Host caching of an image, where its file or itself says something.
pub(super) fn cache_of(options: Option<&CacheOptions>) -> Result<Option<CacheMode>, Refusal> {
    let Some(options) = options else { return Ok(None) };
    match (options.direct.unwrap_or(false), options.no_flush.unwrap_or(false)) {
        (true, false) => Ok(Some(CacheMode::None)),
        (false, false) => Ok(Some(CacheMode::Writeback)),
        (false, true) => Ok(Some(CacheMode::Unsafe)),
        (true, true) => Err(Refusal::new("cache.direct and cache.no-flush exclude each other")),
    }
}

fn paths(texts: Option<Vec<String>>) -> Vec<PathBuf> {
    texts.unwrap_or_default().into_iter().map(PathBuf::from).collect()
}

fn log_choice(choice: Option<LogChoice>) -> Option<RestartChoice> {
    choice.map(|choice| match choice {
        LogChoice::Use => RestartChoice::Use,
        LogChoice::Drop => RestartChoice::Drop,
        LogChoice::Optional => RestartChoice::Optional,
    })
}

/// What `blockdev-add` asks for.
pub(super) enum Asked {
    Disk(Box<Wish>),
    File(String, FileWish),
    /// A moment is to be kept.
    Keep(String, CopyBeforeWriteOptions),
    /// One that is kept is to be shown.
    Show(String, SnapshotAccessOptions),
}

impl Driver {
    /// The id of the secret that opens it.
    fn key_secret(&self) -> Option<&str> {
        match self {
            Driver::Luks(of) => Some(&of.key_secret),
            Driver::Qcow2(of) => of.encrypt.as_ref().map(Qcow2Encryption::key_secret),
            _ => None,
        }
    }
}

impl Add {
    /// What is asked for.
    pub(super) fn asked(mut self, running: &Running) -> Result<Asked, Refusal> {
        let (limits, group) = (self.limits.take(), self.group.take());
        let keeps_space = self.discard == Some(Discard::Ignore);
        let (incoming, passes) = (self.active == Some(false), self.persist == Some(false));
        let secret = self.of.key_secret().and_then(|id| running.secret_sources.get(id).cloned());
        let mut asked = self.unlimited(running)?;
        if let Asked::Disk(wish) = &mut asked {
            let disk = &mut wish.disk;
            disk.keeping.secret = secret.or(disk.keeping.secret.take());
            disk.keeping.passes |= passes;
            running.check_limits(disk, limits.as_ref(), group)?;
            disk.incoming |= incoming;
            disk.keeps_space |= keeps_space;
            if disk.incoming
                && (disk.options.read_only || disk.is_null() || wish.ties.upon.is_some())
            {
                return Err(Refusal::new(
                    "'active' false is for an image by itself, opened for writing: others can be open in both places",
                ));
            }
        }
        Ok(asked)
    }

    fn unlimited(self, running: &Running) -> Result<Asked, Refusal> {
        let Some(node_name) = self.node_name else {
            return Err(Refusal::new("'node-name' must be specified for the root node"));
        };
        if !is_name(&node_name) {
            return Err(Refusal::new(format!("Invalid node-name: '{node_name}'")));
        }
        let plain = |format, of: PlainOptions| {
            let options = OpenOptions {
                format: Some(format),
                force_format: of.force_format.unwrap_or(false),
                restart_log: log_choice(of.restart_log),
                allow_backing: paths(of.backing),
                ..OpenOptions::default()
            };
            (of.file, options)
        };
        let own = cache_of(self.cache.as_ref())?;
        let read_only = self.read_only.unwrap_or(false);
        let keeps_space = self.discard == Some(Discard::Ignore);
        let file = |name, driver, path: PathBuf| {
            let wish = FileWish { path, read_only, cache: own, keeps_space, driver };
            Ok(Asked::File(name, wish))
        };
        let secret = self.of.key_secret().map(|id| running.secret(id)).transpose()?;
        let mut backing = None;
        let (file, mut options) = match self.of {
            Driver::File(of) | Driver::Device(of) if of.node_name.is_some() => {
                return Err(Refusal::new("'node-name' is given twice"));
            }
            Driver::Nbd(RemoteNbd { node_name: Some(_), .. })
            | Driver::Rbd(RemoteRbd { node_name: Some(_), .. }) => {
                return Err(Refusal::new("'node-name' is given twice"));
            }
            Driver::File(of) => return file(node_name, "file", of.filename.into()),
            Driver::Device(of) => return file(node_name, DEVICE, of.filename.into()),
            Driver::Nbd(of) => return file(node_name, "nbd", of.path(running)?),
            Driver::Rbd(of) => return file(node_name, "rbd", of.path()),
            Driver::Raw(of) => plain(Format::Raw, of),
            Driver::Vpc(of) => plain(Format::Vhd, of),
            Driver::Vhdx(of) => plain(Format::Vhdx, of),
            Driver::Vmdk(of) => plain(Format::Vmdk, of),
            Driver::Qcow2(of) => {
                let options = OpenOptions {
                    format: Some(Format::Qcow2),
                    secret,
                    table_memory: of.l2_cache_size,
                    force_format: of.force_format.unwrap_or(false),
                    restart_log: log_choice(of.restart_log),
                    allow_backing: paths(of.backing),
                    data_files: paths(of.data_files),
                    bitmaps: of.bitmaps.unwrap_or_default(),
                    ..OpenOptions::default()
                };
                backing = of.below;
                (of.file, options)
            }
            Driver::Luks(of) => {
                let options = OpenOptions {
                    format: Some(Format::Luks),
                    secret,
                    force_format: of.force_format.unwrap_or(false),
                    restart_log: log_choice(of.restart_log),
                    allow_discards: of.allow_discards.unwrap_or(false),
                    ..OpenOptions::default()
                };
                (of.file, options)
            }
            Driver::CopyBeforeWrite(of) => return Ok(Asked::Keep(node_name, of)),
            Driver::SnapshotAccess(of) => return Ok(Asked::Show(node_name, of)),
            Driver::Throttle(of) => {
                let mut inner = *of.file;
                inner.node_name = Some(node_name);
                if self.read_only == Some(true) {
                    inner.read_only = Some(true);
                }
                let mut asked = inner.asked(running)?;
                let Asked::Disk(wish) = &mut asked else {
                    let why = "a disk is throttled: of a file the 'raw' upon it, of a moment the disk itself";
                    return Err(Refusal::new(why));
                };
                running.check_limits(&mut wish.disk, None, Some(of.group))?;
                return Ok(asked);
            }
            Driver::Null(of) => {
                // As QEMU has it where nothing is said.
                let path = format!("null:{}", of.size.unwrap_or(1 << 30));
                let options = OpenOptions {
                    read_only,
                    cache: own.unwrap_or_default(),
                    ..OpenOptions::default()
                };
                return Ok(Asked::Disk(Wish::of(disk(path.into(), options, node_name))));
            }
        };
        let file = found(file, running, Some(&node_name))?;
        options.cache = file.cache.or(own).unwrap_or_default();
        options.read_only = read_only || file.read_only;
        let on_error = self.on_error.map(|choice| match choice {
            ErrorChoice::Report => OnError::Report,
            ErrorChoice::Hold => OnError::Hold,
        });
        let keeps_space = keeps_space || file.keeps_space;
        let by_image = file.name.is_some() || backing.is_some();
        let mut wish =
            Wish::of(Disk { on_error, keeps_space, ..disk(file.path, options, node_name) });
        wish.ties.by_image = by_image;
        wish.ties.in_file = file.name;
        (wish.place, wish.named_with_it) = (file.place, file.driver);
        wish.is_device = file.is_device;
        wish.lies_upon(backing, running)?;
        Ok(Asked::Disk(wish))
    }
}

/// The file that an image lies in.
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) place: Option<Place>,
    /// What it is called, and what it is, where it is named with the image.
    name: Option<String>,
    driver: Option<&'static str>,
    is_device: bool,
    cache: Option<CacheMode>,
    pub(super) read_only: bool,
    /// Whether discards free nothing of it.
    keeps_space: bool,
}

/// Find it; `own` may be in it already.
pub(super) fn found(
    file: NodeOr<FileRef>,
    running: &Running,
    own: Option<&str>,
) -> Result<Found, Refusal> {
    let refuse = |text: String| Err(Refusal::new(text));
    match file {
        NodeOr::Node(name) => {
            let Some(node) = running.graph.files.get(&name) else {
                return match running.is_taken(&name) {
                    true => refuse(format!("Node '{name}' is no file: formats lie in files here")),
                    false => refuse(format!("Cannot find device='{name}' nor node-name='{name}'")),
                };
            };
            if let Some(user) = running.user_of(&name).filter(|user| own != Some(user)) {
                return refuse(format!("Node '{name}' is in use: '{user}' lies in it"));
            }
            Ok(Found {
                path: node.path.clone(),
                place: Some(node.place.clone()),
                name: Some(name),
                driver: None,
                is_device: false,
                cache: node.cache,
                read_only: node.read_only,
                keeps_space: node.keeps_space,
            })
        }
        NodeOr::Of(file) => {
            let cache = cache_of(file.cache.as_ref())?;
            let (path, node_name, driver) = match file.of {
                FileDriver::File(of) => (of.filename.into(), of.node_name, "file"),
                FileDriver::Device(of) => (of.filename.into(), of.node_name, DEVICE),
                FileDriver::Nbd(of) => (of.path(running)?, of.node_name, "nbd"),
                FileDriver::Rbd(of) => (of.path(), of.node_name, "rbd"),
            };
            if let Some(name) = &node_name {
                if !is_name(name) {
                    return refuse(format!("Invalid node-name: '{name}'"));
                }
                let is_own = own.is_some() && running.user_of(name) == own;
                if running.is_taken(name) && !is_own {
                    return refuse(format!("Duplicate nodes with node-name='{name}'"));
                }
            }
            Ok(Found {
                path,
                place: None,
                driver: node_name.is_some().then_some(driver),
                is_device: driver == DEVICE,
                name: node_name,
                cache,
                read_only: file.read_only.unwrap_or(false),
                keeps_space: file.discard == Some(Discard::Ignore),
            })
        }
    }
}

fn disk(path: PathBuf, options: OpenOptions, node_name: String) -> Disk {
    Disk { node_name: Some(node_name), ..Disk::new(path, options) }
}

impl Running {
    /// The disk of that name.
    pub(super) fn node(&self, name: &str) -> Option<DiskId> {
        let found = self.disks.iter().find(|(_, served)| served.node() == name);
        found.map(|(id, _)| *id)
    }

    /// The disk of that name, or what QEMU says where there is none.
    pub(super) fn named_node(&self, name: &str) -> Result<DiskId, Refusal> {
        if self.graph.files.contains_key(name) {
            return Err(Refusal::new(format!(
                "Node '{name}' is a file: add a node of the driver 'raw', or of its format, upon it"
            )));
        }
        if self.graph.lower.contains_key(name) {
            return Err(Refusal::new(format!("Node '{name}' is an image that lies below a disk")));
        }
        if self.graph.kept.contains_key(name) {
            return Err(Refusal::new(format!(
                "Node '{name}' keeps a moment: name the disk itself, or a node of the driver 'snapshot-access' upon it"
            )));
        }
        let found = self.node(name);
        found.ok_or_else(|| Refusal::new(format!("Cannot find device='' nor node-name='{name}'")))
    }

    /// The disk that an export of that node shows: of one that keeps a moment, the disk that it is of.
    pub(super) fn shown_by(&self, name: &str) -> Result<DiskId, Refusal> {
        let kept = self.graph.kept.get(name).map(|kept| kept.disk);
        kept.map_or_else(|| self.named_node(name), Ok)
    }

    /// The file of the image of that name, or what QEMU says where there is none.
    pub(super) fn path_of_node(&self, name: &str) -> Result<PathBuf, Refusal> {
        let found = self.path_of(name);
        found.ok_or_else(|| Refusal::new(format!("Cannot find device='' nor node-name='{name}'")))
    }

    /// The files that are images of disks, who has each, and whether it is only read.
    pub(super) fn images(&self) -> Vec<(Identity, bool, String)> {
        let of = |served: &Served| {
            Some((served.file?, served.disk.options.read_only, served.node().to_owned()))
        };
        self.disks.values().filter_map(of).collect()
    }
}

impl Running {
    /// The disk that a client means by one of the two names.
    pub(super) fn one_of(
        &self,
        device: Option<&str>,
        node_name: Option<&str>,
    ) -> Result<DiskId, Refusal> {
        match (device, node_name) {
            (Some(name), None) => self.node(name).ok_or_else(|| {
                Refusal::no_device(format!("Cannot find device='{name}' nor node-name=''"))
            }),
            (None, Some(name)) => self.named_node(name),
            (None, None) => Err(Refusal::new("Cannot find device='' nor node-name=''")),
            (Some(_), Some(_)) => {
                Err(Refusal::new("'device' and 'node-name' name the same: give one of them"))
            }
        }
    }

    /// Whether a disk has that name, or is about to.
    pub(super) fn is_taken(&self, name: &str) -> bool {
        self.node(name).is_some() || self.is_named(name) || self.pending.nodes.contains(name)
    }
}
