//! Exports that come and go.

use std::path::PathBuf;
use std::time::Duration;

use ringtap_export::{fuse, nbd, ublk, vhost_user};

use serde_json::{Map, Value, json};

use super::command::Command;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, choice, words};
use crate::QUEUES;
use crate::chain::hides_none;
use crate::ids::DiskId;
use crate::pending::ComingExport;
use crate::running::{Export, Running, Then};
use crate::socket::{self, SocketFile};
use crate::start::Lone;
use crate::transports::Transport;
use crate::{Error, handover, sandbox};

/// How long a client waits for the end of an export that it had taken away; it goes on after that, and is told by the
/// event.
pub(super) const WAITED_FOR: Duration = Duration::from_secs(2);
/// How long an NBD client that has left may take to be gone.
const LEAVING: Duration = Duration::from_millis(500);
/// The longest name of an NBD export, and its longest description. Source: the NBD protocol, "Values / string".
const NAME_LEN: usize = 4096;
/// The longest serial number of a virtio disk. Source: virtio 1.2, 5.2.6.
const SERIAL_LEN: usize = 20;
/// Sector sizes that every guest can use.
const SECTORS: [u64; 4] = [512, 1024, 2048, 4096];

arguments! {
    /// A UNIX socket.
    struct UnixAddress { "path" path: String }
}

choice! {
    /// Where a vhost-user front-end connects.
    struct VhostAddress {}
    "type" enum VhostAddressType { "unix" Unix(UnixAddress) }
}

arguments! {
    /// An NBD export.
    struct NbdOptions {
        "name" name: Option<String>,
        "description" description: Option<String>,
        "bitmaps" bitmaps: Option<Vec<String>>,
    }
}

arguments! {
    /// A vhost-user-blk export.
    struct VhostOptions {
        "addr" addr: VhostAddress,
        "logical-block-size" logical_block_size: Option<u64>,
        "num-queues" num_queues: Option<u16>,
        /// What the guest reads as the disk's serial number.
        "__ringtap_serial" serial: Option<String>,
    }
}

arguments! {
    /// A file, by FUSE.
    struct FuseOptions {
        "mountpoint" mountpoint: String,
        "growable" growable: Option<bool>,
        "allow-other" allow_other: Option<AllowOther>,
    }
}

words! {
    /// Whether others than the server's own user may have the file: those whom the mode of sockets lets in; else nobody.
    enum AllowOther { "off" Off, "on" On, "auto" Auto }
}

arguments! {
    /// A block device of this host, by ublk.
    struct UblkOptions {
        /// The N of /dev/ublkbN; the next that is free where it is not said.
        "number" number: Option<u32>,
        "num-queues" num_queues: Option<u16>,
        "logical-block-size" logical_block_size: Option<u64>,
    }
}

choice! {
    /// `block-export-add`
    struct AddExport {
        "id" id: String,
        "node-name" node_name: String,
        "writable" writable: Option<bool>,
        "writethrough" writethrough: Option<bool>,
        /// Whether the node may be inactive, until a guest begins that comes by it.
        "allow-inactive" allow_inactive: Option<bool>,
    }
    "type" enum ExportType {
        "nbd" Nbd(NbdOptions),
        "vhost-user-blk" Vhost(VhostOptions),
        "fuse" Fuse(FuseOptions),
        "__ringtap_ublk" Ublk(UblkOptions),
    }
}

/// A transport that is ready to be served, and the files that are removed with it.
type Made = (Transport, Vec<SocketFile>);

/// What all kinds of exports have.
struct Common {
    id: String,
    disk: DiskId,
    vbd: ringtap_vbd::Disk,
    writethrough: bool,
    /// What is written down of it.
    wanted: Value,
}

impl VhostOptions {
    /// Where its socket is.
    pub(super) fn path(&self) -> &str {
        let VhostAddressType::Unix(UnixAddress { path }) = &self.addr.of;
        path
    }

    /// What guests see as the disk's serial number: where nothing is said the node's name, if there is room for it.
    pub(super) fn serial(&self, node: &str) -> String {
        let short = || Some(node.to_owned()).filter(|name| name.len() <= SERIAL_LEN);
        self.serial.clone().or_else(short).unwrap_or_default()
    }
}

impl AddExport {
    fn common(&self, running: &Running, sectors: Option<u64>) -> Result<Common, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let (id, node) = (self.id.clone(), &self.node_name);
        if running.has_export(&id) {
            return refuse(format!("Block export id '{id}' is already in use"));
        }
        if id.is_empty() || id.len() > NAME_LEN {
            return refuse("Invalid block export id".into());
        }
        let disk = running.shown_by(node)?;
        let Some(served) = running.disks.get(&disk) else {
            return refuse(format!("Node '{node}' is gone"));
        };
        let comes_by_it = matches!(self.of, ExportType::Vhost(_));
        if running.pending.away.contains(&disk)
            && !(comes_by_it && self.allow_inactive.unwrap_or(true))
        {
            return refuse(format!(
                "Node '{node}' is inactive: blockdev-set-active has its image opened here; until then vhost-user-blk \
                 exports show it, for a guest that comes"
            ));
        }
        if running.pending.reopened.contains(&disk) {
            return refuse(format!("Node '{node}' is being changed"));
        }
        let writable = self.writable.unwrap_or(false);
        let conflict = |node: &str, user: &str| {
            refuse(format!(
                "Permission conflict on node '{node}': it would be written to, and '{user}' lies upon it"
            ))
        };
        if let Some(below) = running.written_below(disk) {
            return conflict(below, node);
        }
        if let Some(user) = running.reader_of(disk).filter(|_| writable) {
            return conflict(node, user);
        }
        // But the moment of a backup may be read, below.
        if running.pending.targets.contains(&disk) && served.moment.is_none() {
            return refuse(format!("Node '{node}' is in use: a job writes to it"));
        }
        let is_kept =
            running.pending.targets.contains(&disk) || running.moment_is_passed_on(disk, true);
        if served.moment.is_some() && !is_kept {
            return refuse(format!(
                "Node '{node}' kept the moment of a backup that has broken, and has a part of it: take it away \
                 (blockdev-del), and begin again with an empty image"
            ));
        }
        if let Some(user) =
            running.user_of_disk(disk).filter(|_| running.pending.changing.contains(&disk))
        {
            return refuse(format!(
                "Node '{node}' is busy: a job of '{user}' changes images that it has, too"
            ));
        }
        if writable && served.vbd.is_read_only() {
            return refuse(format!(
                "Node '{node}' is read-only: it has no export that is writable"
            ));
        }
        if let Some(failure) = served.vbd.health().failure() {
            return refuse(format!("Node '{node}' is stopped: {failure}"));
        }
        if sectors.is_some_and(|bytes| !SECTORS.contains(&bytes)) {
            return refuse("logical-block-size must be 512, 1024, 2048 or 4096".into());
        }
        if sectors.is_some_and(|bytes| served.vbd.size() % bytes != 0) {
            return refuse("the disk's size is no multiple of logical-block-size".into());
        }
        // As long as a backup keeps a moment by it, it shows that.
        let shown = served.moment.as_ref().unwrap_or(&served.vbd);
        if writable && served.moment.is_some() {
            return refuse(format!(
                "Node '{node}' shows the moment of a backup, which is read-only"
            ));
        }
        let vbd = shown.shown(!writable, sectors.map(|bytes| bytes as u32));
        let writethrough = self.writethrough.unwrap_or(false);
        Ok(Common { id, disk, vbd, writethrough, wanted: wanted(self) })
    }
}

impl Command for AddExport {
    const NAME: &'static str = "block-export-add";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let sectors = match &self.of {
            ExportType::Vhost(of) => of.logical_block_size,
            ExportType::Ublk(of) => of.logical_block_size,
            _ => None,
        };
        let common = match self.common(running, sectors) {
            Ok(common) => common,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let grows = matches!(&self.of, ExportType::Fuse(of) if of.growable == Some(true));
        if running.grows(common.disk) || grows && running.is_shown(common.disk) {
            return reply.give(Err(Refusal::new(format!(
                "Node '{}' would have a growable FUSE export and another: their clients would not hear of a new size, so that a \
                 growable one has no other export beside it",
                self.node_name
            ))));
        }
        match self.of {
            ExportType::Nbd(of) => reply.give(running.add_nbd(common, of, &self.node_name)),
            ExportType::Vhost(of) => running.add_vhost(common, of, &self.node_name, reply),
            ExportType::Fuse(of) => running.add_fuse(common, of, reply),
            ExportType::Ublk(of) => running.add_ublk(common, of, reply),
        }
    }
}

impl Running {
    /// Whether clients of an export that there is, or that is being made, make a disk larger.
    fn grows(&self, disk: DiskId) -> bool {
        let serves = |export: &Export| {
            self.servers.get(&export.server).is_some_and(|serving| serving.transport.grows())
        };
        let mut coming = self.pending.exports.iter();
        coming.any(|one| one.disk == disk && one.grows)
            || self.exports.iter().any(|one| one.disk == disk && serves(one))
    }

    fn add_nbd(&mut self, common: Common, of: NbdOptions, node: &str) -> Result<Done, Refusal> {
        let server = self.nbd_server()?;
        let name = of.name.unwrap_or_else(|| node.to_owned());
        let description = of.description.unwrap_or_default();
        if name.len() > NAME_LEN || description.len() > NAME_LEN {
            return Err(Refusal::new(format!(
                "name and description have room for {NAME_LEN} bytes"
            )));
        }
        let set = common.vbd.bitmaps();
        let shown = |name: &String| {
            set.as_ref().is_some_and(|set| set.shown().iter().any(|(shown, _)| shown == name))
        };
        if let Some(missing) = of.bitmaps.unwrap_or_default().iter().find(|name| !shown(name)) {
            return Err(Refusal::new(format!(
                "Bitmap '{missing}' is not found: name it in __ringtap_bitmaps of blockdev-add, or in --bitmap"
            )));
        }
        let Some(serving) = self.servers.get(&server) else {
            return Err(Refusal::new("no server"));
        };
        let Transport::Nbd { server: nbd, .. } = &*serving.transport else {
            return Err(Refusal::new("no server"));
        };
        if nbd.exports().iter().any(|export| export.name == name) {
            return Err(Refusal::new(format!("NBD server already has export named '{name}'")));
        }
        nbd.add(nbd::NamedExport { name: name.clone(), description, vbd: common.vbd.clone() });
        self.add_export(Some(common.id.clone()), common.disk, server, &name);
        self.came(&common);
        Ok(Done {})
    }

    fn add_vhost(&mut self, common: Common, of: VhostOptions, node: &str, reply: Reply<Done>) {
        let serial = of.serial(node);
        let VhostAddressType::Unix(UnixAddress { path }) = of.addr.of;
        // As in QEMU where nothing is said.
        let queues = of.num_queues.unwrap_or(1);
        if queues == 0 {
            return reply.give(Err(Refusal::new("num-queues must be greater than 0")));
        }
        let printable = serial.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if serial.len() > SERIAL_LEN || !printable {
            let why = "__ringtap_serial has room for 20 printable ASCII characters";
            return reply.give(Err(Refusal::new(why)));
        }
        let (path, mode) = (PathBuf::from(path), self.config.socket_mode);
        let options = vhost_user::Options { queues, serial };
        let Some(residence) = self.residence_of(common.disk) else { return };
        self.add_in_time(common, false, reply, move |common| {
            let (listener, file) = socket::unix(&path, mode)?;
            let transport = Transport::vhost_user(listener, common.vbd.clone(), options, residence);
            Ok((transport, vec![file]))
        });
    }

    fn start_added(
        &mut self,
        common: &Common,
        transport: Transport,
        files: Vec<SocketFile>,
    ) -> Result<(), Error> {
        let (id, disk) = (Some(common.id.clone()), common.disk);
        self.start_one(Lone { id, disk, transport, files, added: true })?;
        self.came(common);
        Ok(())
    }

    fn came(&mut self, common: &Common) {
        let export = self.exports.iter_mut().find(|export| export.id == common.id);
        if let Some(export) = export {
            tracing::info!("the export {} is open", export.id);
            export.writable = !common.vbd.is_read_only();
            if common.writethrough {
                let mut wanted = common.vbd.write_through();
                wanted.set(true);
                export.write_through = Some(wanted);
            }
            self.note_export(common.disk, common.wanted.clone());
        }
    }

    /// Make what an export needs where that takes time, then start it.
    fn add_in_time(
        &mut self,
        common: Common,
        grows: bool,
        reply: Reply<Done>,
        make: impl FnOnce(&Common) -> Result<Made, Refusal> + Send + 'static,
    ) {
        let writable = !common.vbd.is_read_only();
        let coming = ComingExport { id: common.id.clone(), disk: common.disk, writable, grows };
        self.pending.exports.push(coming);
        let taken = common.id.clone();
        let begun = self.in_time("export", move || -> Then {
            let made = make(&common);
            Box::new(move |running| {
                running.pending.exports.retain(|one| one.id != common.id);
                reply.give(made.and_then(|(transport, files)| {
                    running.start_added(&common, transport, files)?;
                    Ok(Done {})
                }));
            })
        });
        if let Err(error) = begun {
            self.pending.exports.retain(|one| one.id != taken);
            tracing::error!("cannot make the export {taken}: {error}");
        }
    }

    fn add_fuse(&mut self, common: Common, of: FuseOptions, reply: Reply<Done>) {
        let growable = of.growable.unwrap_or(false);
        let read_only = common.vbd.is_read_only();
        let everybody = self.config.socket_mode;
        let alone = of.allow_other == Some(AllowOther::Off);
        let mode = if alone { everybody & 0o700 } else { everybody };
        let options = fuse::Options { read_only, growable, mode, queues: QUEUES };
        let image = self.disks.get(&common.disk).map(|served| served.disk.path.clone());
        let image = image.unwrap_or_default();
        self.add_in_time(common, growable, reply, move |common| {
            if growable && (read_only || common.vbd.grow(common.vbd.size()).is_err()) {
                return Err(Refusal::new(
                    "growable takes a raw image in a regular file, and an export that is writable",
                ));
            }
            let path = PathBuf::from(of.mountpoint);
            let fits = || hides_none(&common.vbd, &path);
            let mount = handover::mount(&path, &image, &options, fits);
            let mount = mount.map_err(Error::from)?;
            Ok((Transport::fuse(mount, common.vbd.clone(), options), vec![]))
        });
    }

    fn add_ublk(&mut self, common: Common, of: UblkOptions, reply: Reply<Done>) {
        if let Some(why) = sandbox::makes_no_devices() {
            return reply.give(Err(Refusal::new(why)));
        }
        let options = ublk::Options { queues: of.num_queues.unwrap_or(QUEUES).max(1) };
        let shown = self.disks.get(&common.disk);
        let shown = shown.map(|served| (served.node().to_owned(), served.disk.path.clone()));
        let (disk, image) = shown.unwrap_or_default();
        self.add_in_time(common, false, reply, move |common| {
            let made = handover::device(&disk, (&image, of.number), &common.vbd, &options);
            Ok((Transport::Ublk(made.map_err(Error::from)?), vec![]))
        });
    }
}

words! {
    /// Whether those who use an export are minded.
    enum RemoveMode { "safe" Safe, "hard" Hard }
}

arguments! {
    /// `block-export-del`
    struct DeleteExport { "id" id: String, "mode" mode: Option<RemoveMode> }
}

impl Command for DeleteExport {
    const NAME: &'static str = "block-export-del";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        let used = running.exports.iter().find(|export| export.id == self.id);
        let used = used.filter(|export| !export.closing && running.is_used(export));
        let (Some(export), false) = (used, self.is_hard()) else { return self.end(running, reply) };
        // Clients that have left are still counted for a moment.
        let Some(serving) = running.servers.get(&export.server) else { return };
        let (transport, name) = (serving.transport.clone(), export.name.clone());
        let begun = running.in_time("nbd unused", move || -> Then {
            if let Transport::Nbd { server, .. } = &*transport {
                server.wait_until_unused(&name, LEAVING);
            }
            Box::new(move |running| self.end(running, reply))
        });
        if let Err(error) = begun {
            tracing::error!("cannot see whether an export is used: {error}");
        }
    }
}

impl DeleteExport {
    fn is_hard(&self) -> bool {
        self.mode == Some(RemoveMode::Hard)
    }

    fn end(self, running: &mut Running, reply: Reply<Done>) {
        let id = &self.id;
        let found = running.exports.iter().find(|export| export.id == *id);
        let refusal = match found {
            None => format!("Export '{id}' is not found"),
            Some(export) if export.closing => format!("Export '{id}' is already shutting down"),
            Some(export) if running.is_xens(export) => format!(
                "Export '{id}' is a guest's of Xen, which its toolstack takes away: xl block-detach"
            ),
            Some(export) if !self.is_hard() && running.is_used(export) => {
                format!("export '{id}' still in use")
            }
            Some(_) => {
                running.forget_export(id);
                reply.give_after(WAITED_FOR, Done {});
                return running.close_export(id, Box::new(|_| reply.give(Ok(Done {}))));
            }
        };
        reply.give(Err(Refusal::new(refusal)));
    }
}

impl Running {
    fn is_xens(&self, export: &Export) -> bool {
        let serving = self.servers.get(&export.server);
        serving.is_some_and(|serving| matches!(&*serving.transport, Transport::Xen { .. }))
    }

    /// Whether clients have an export that they would miss: as QEMU counts, of NBD alone.
    fn is_used(&self, export: &Export) -> bool {
        let transport = self.servers.get(&export.server).map(|serving| &*serving.transport);
        matches!(transport, Some(Transport::Nbd { server, .. }) if server.users(&export.name) > 0)
    }
}

/// An export as it may be added again, but for its node.
fn wanted(export: &AddExport) -> Value {
    let mut all = Map::new();
    let mut put = |key: &str, value: Option<Value>| {
        all.extend(value.filter(|value| !value.is_null()).map(|value| (key.to_owned(), value)));
    };
    put("id", Some(export.id.clone().into()));
    put("writable", export.writable.map(Value::from));
    put("writethrough", export.writethrough.map(Value::from));
    match &export.of {
        ExportType::Nbd(of) => {
            put("type", Some("nbd".into()));
            // The node may be called otherwise by the time that it is added again, and clients go by this.
            put("name", Some(of.name.as_ref().unwrap_or(&export.node_name).clone().into()));
            put("description", of.description.clone().map(Value::from));
            put("bitmaps", of.bitmaps.clone().map(Value::from));
        }
        ExportType::Vhost(of) => {
            put("type", Some("vhost-user-blk".into()));
            put("addr", Some(json!({ "type": "unix", "path": of.path() })));
            put("logical-block-size", of.logical_block_size.map(Value::from));
            put("num-queues", of.num_queues.map(Value::from));
            put("__ringtap_serial", Some(of.serial(&export.node_name).into()));
        }
        ExportType::Fuse(of) => {
            put("type", Some("fuse".into()));
            put("mountpoint", Some(of.mountpoint.clone().into()));
            put("growable", of.growable.map(Value::from));
            put("allow-other", of.allow_other.map(|who| who.word().into()));
        }
        ExportType::Ublk(of) => {
            put("type", Some("__ringtap_ublk".into()));
            put("number", of.number.map(Value::from));
            put("num-queues", of.num_queues.map(Value::from));
            put("logical-block-size", of.logical_block_size.map(Value::from));
        }
    }
    all.into()
}
