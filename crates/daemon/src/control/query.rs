//! What is served, and how: disks as block nodes, and their exports.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ringtap_image::{CacheMode, LayerState};
use ringtap_vbd::{Counts, Limits, Share};
use serde_json::{Value, json};

use super::bitmaps::{BitmapInfo, bitmaps};
use super::command::Command;
use super::outgoing::{Reply, Told};
use super::shape::{answer, arguments};
use super::throttle;
use crate::ids::DiskId;
use crate::running::{Export, Running, Served};
use crate::stats::DiskStats;

answer! {
    /// How the host's page cache is used.
    struct CacheInfo {
        "writeback" writeback: bool,
        "direct" direct: bool,
        "no-flush" no_flush: bool,
    }
}

answer! {
    /// An image.
    struct ImageInfo {
        "filename" filename: String,
        "format" format: String,
        "virtual-size" virtual_size: u64,
        /// Bytes that it takes; none where it is no file, or has none.
        "actual-size" actual_size: Option<u64>,
        "backing-filename" backing_filename: Option<String>,
        "backing-image" backing: Option<Box<ImageInfo>>,
    }
}

answer! {
    /// A disk, as a block node.
    struct DeviceInfo {
        "file" file: String,
        "node-name" node_name: String,
        "ro" ro: bool,
        "drv" drv: String,
        "backing_file" backing_file: Option<String>,
        "backing_file_depth" backing_file_depth: u64,
        "active" active: bool,
        "encrypted" encrypted: bool,
        "detect_zeroes" detect_zeroes: String,
        "bps" bps: u64,
        "bps_rd" bps_rd: u64,
        "bps_wr" bps_wr: u64,
        "iops" iops: u64,
        "iops_rd" iops_rd: u64,
        "iops_wr" iops_wr: u64,
        "write_threshold" write_threshold: u64,
        "cache" cache: CacheInfo,
        "image" image: ImageInfo,
        "dirty-bitmaps" bitmaps: Option<Vec<BitmapInfo>>,
        "group" group: Option<String>,
        /// All of its own, by the names that throttle groups have for them.
        "__ringtap_limits" limits: Value,
        /// True: its requests wait until somebody has them go on.
        "__ringtap_paused" paused: Option<bool>,
        /// So many of its requests wait until there is room where its image lies.
        "__ringtap_waiting-for-room" waiting_for_room: Option<u64>,
    }
}

/// What QEMU calls a format.
pub(super) fn driver(format: &str) -> &str {
    match format {
        "vhd" => "vpc",
        "null" => "null-co",
        "moment" => "snapshot-access",
        other => other,
    }
}

fn cache(mode: CacheMode) -> CacheInfo {
    let writeback = !matches!(mode, CacheMode::Writethrough | CacheMode::DirectSync);
    let direct = matches!(mode, CacheMode::None | CacheMode::DirectSync);
    CacheInfo { writeback, direct, no_flush: mode == CacheMode::Unsafe }
}

/// The image and those below it, as they are in memory.
fn image(layer: LayerState, path: &str) -> ImageInfo {
    let below = layer.below.map(|below| Box::new(image(*below, "")));
    ImageInfo {
        filename: layer.path.unwrap_or_else(|| path.to_owned()),
        format: driver(layer.format).to_owned(),
        virtual_size: layer.size,
        actual_size: None,
        backing_filename: below.as_ref().map(|below| below.filename.clone()),
        backing: below,
    }
}

/// Ask the files what they take: it may last as long as they are far away.
fn ask_files(image: &mut ImageInfo) {
    let found = std::fs::metadata(Path::new(&image.filename)).ok();
    let found = found.filter(|found| found.is_file());
    if image.format == "file" {
        image.virtual_size = found.as_ref().map_or(0, |found| found.len());
    }
    image.actual_size = found.map(|found| found.blocks() * 512);
    image.backing.iter_mut().for_each(|below| ask_files(below));
}

fn depth(image: &ImageInfo) -> u64 {
    image.backing.as_ref().map_or(0, |below| 1 + depth(below))
}

/// What is known of a disk without asking its file.
pub(super) fn device(served: &Served) -> DeviceInfo {
    let layers = served.vbd.inspect().layers;
    let encrypted = layers.encrypted || layers.format == "luks";
    let mut image = image(layers, &served.disk.path.display().to_string());
    image.virtual_size = served.vbd.size();
    let Limits { iops, bps, .. } = served.disk.limits;
    DeviceInfo {
        file: image.filename.clone(),
        node_name: served.node().to_owned(),
        ro: served.vbd.is_read_only(),
        drv: image.format.clone(),
        backing_file: image.backing_filename.clone(),
        backing_file_depth: depth(&image),
        // Else another server has its image.
        active: !served.disk.incoming,
        encrypted,
        detect_zeroes: "off".to_owned(),
        bps: bps.total.average,
        bps_rd: bps.read.average,
        bps_wr: bps.write.average,
        iops: iops.total.average,
        iops_rd: iops.read.average,
        iops_wr: iops.write.average,
        write_threshold: 0,
        cache: cache(served.vbd.cache()),
        image,
        bitmaps: None,
        group: served.disk.group.clone(),
        limits: throttle::told(&served.disk.limits, &served.disk.share),
        paused: served.vbd.is_paused().then_some(true),
        waiting_for_room: Some(served.vbd.waiting_for_room() as u64).filter(|many| *many > 0),
    }
}

/// The disks, or that of this node.
fn devices(running: &Running, node: Option<&str>) -> Vec<DeviceInfo> {
    let is_asked = |(_, served): &(&DiskId, &Served)| node.is_none_or(|node| node == served.node());
    let with_bitmaps = |(id, served): (&DiskId, &Served)| DeviceInfo {
        bitmaps: bitmaps(running, *id),
        ..device(served)
    };
    running.disks.iter().filter(is_asked).map(with_bitmaps).collect()
}

/// A node that is no disk.
struct Other {
    path: String,
    driver: String,
    size: u64,
    read_only: bool,
    mode: CacheMode,
}

fn other(name: &str, of: Other) -> DeviceInfo {
    let Other { path, driver, size, read_only, mode } = of;
    let image = ImageInfo {
        filename: path.clone(),
        format: driver.clone(),
        virtual_size: size,
        actual_size: None,
        backing_filename: None,
        backing: None,
    };
    DeviceInfo {
        file: path,
        node_name: name.to_owned(),
        ro: read_only,
        encrypted: driver == "luks",
        drv: driver,
        backing_file: None,
        backing_file_depth: 0,
        active: true,
        detect_zeroes: "off".to_owned(),
        bps: 0,
        bps_rd: 0,
        bps_wr: 0,
        iops: 0,
        iops_rd: 0,
        iops_wr: 0,
        write_threshold: 0,
        limits: throttle::told(&Limits::default(), &Share::default()),
        paused: None,
        waiting_for_room: None,
        group: None,
        cache: cache(mode),
        image,
        bitmaps: None,
    }
}

/// Files and images that have names, and are no disks.
fn others(running: &Running) -> Vec<DeviceInfo> {
    let lower = running.graph.lower.iter().map(|(name, lower)| {
        let of = Other {
            path: lower.path.display().to_string(),
            driver: driver(&lower.format).to_owned(),
            size: lower.size,
            read_only: true,
            mode: CacheMode::default(),
        };
        other(name, of)
    });
    let files = running.graph.files.iter().map(|(name, file)| {
        let of = Other {
            path: file.path.display().to_string(),
            driver: file.driver.to_owned(),
            size: 0,
            read_only: file.read_only,
            mode: file.cache.unwrap_or_default(),
        };
        other(name, of)
    });
    let kept = running.graph.kept.iter().filter_map(|(name, kept)| {
        let served = running.disks.get(&kept.disk)?;
        let of = Other {
            path: served.disk.path.display().to_string(),
            driver: "copy-before-write".to_owned(),
            size: served.vbd.size(),
            read_only: served.vbd.is_read_only(),
            mode: served.vbd.cache(),
        };
        Some(other(name, of))
    });
    lower.chain(files).chain(kept).collect()
}

arguments! {
    /// `query-named-block-nodes`
    struct QueryNodes {
        "flat" flat: Option<bool>,
        /// This one alone, if it is there.
        "__ringtap_node-name" node: Option<String>,
    }
}

impl Command for QueryNodes {
    const NAME: &'static str = "query-named-block-nodes";
    type Answer = Vec<DeviceInfo>;

    fn run(self, running: &mut Running, reply: Reply<Self::Answer>) {
        let node = self.node.as_deref();
        let mut devices = devices(running, node);
        let is_asked = |other: &DeviceInfo| node.is_none_or(|node| node == other.node_name);
        devices.extend(others(running).into_iter().filter(is_asked));
        if self.flat == Some(true) {
            devices.iter_mut().for_each(|device| device.image.backing = None);
        }
        running.aside("query", reply, move || {
            devices.iter_mut().for_each(|device| ask_files(&mut device.image));
            Ok(devices)
        });
    }
}

answer! {
    /// A disk, as a drive.
    struct BlockInfo {
        "device" device: String,
        "type" of: String,
        "removable" removable: bool,
        "locked" locked: bool,
        "inserted" inserted: DeviceInfo,
    }
}

arguments! {
    /// `query-block`
    struct QueryBlock {}
}

impl Command for QueryBlock {
    const NAME: &'static str = "query-block";
    type Answer = Vec<BlockInfo>;

    fn run(self, running: &mut Running, reply: Reply<Self::Answer>) {
        let mut devices = devices(running, None);
        running.aside("query", reply, move || {
            devices.iter_mut().for_each(|device| ask_files(&mut device.image));
            let block = |inserted: DeviceInfo| BlockInfo {
                device: inserted.node_name.clone(),
                of: "unknown".to_owned(),
                removable: false,
                locked: false,
                inserted,
            };
            Ok(devices.into_iter().map(block).collect())
        });
    }
}

answer! {
    /// What a disk has served.
    struct DeviceStats {
        "rd_bytes" rd_bytes: u64,
        "wr_bytes" wr_bytes: u64,
        "unmap_bytes" unmap_bytes: u64,
        "rd_operations" rd_operations: u64,
        "wr_operations" wr_operations: u64,
        "flush_operations" flush_operations: u64,
        "unmap_operations" unmap_operations: u64,
        "rd_merged" rd_merged: u64,
        "wr_merged" wr_merged: u64,
        "unmap_merged" unmap_merged: u64,
        "failed_rd_operations" failed_rd_operations: u64,
        "failed_wr_operations" failed_wr_operations: u64,
        "failed_flush_operations" failed_flush_operations: u64,
        "failed_unmap_operations" failed_unmap_operations: u64,
        "invalid_rd_operations" invalid_rd_operations: u64,
        "invalid_wr_operations" invalid_wr_operations: u64,
        "invalid_flush_operations" invalid_flush_operations: u64,
        "invalid_unmap_operations" invalid_unmap_operations: u64,
        "account_invalid" account_invalid: bool,
        "account_failed" account_failed: bool,
        "timed_stats" timed_stats: Vec<Value>,
    }
}

answer! {
    /// A disk, and what it has served.
    struct BlockStats {
        "device" device: String,
        "node-name" node_name: String,
        "stats" stats: DeviceStats,
        /// How many requests took how long: pairs of nanoseconds and a count, for each kind.
        "__ringtap_latency" latency: Value,
        /// What SIGUSR1 prints of it.
        "__ringtap_state" state: Value,
    }
}

fn stats(served: &Served) -> BlockStats {
    let all = served.vbd.stats();
    let [read, write, flush, ..] = served.vbd.latencies();
    // As QEMU counts: zeros are written, too.
    let both = |of: fn(&Counts) -> u64| of(&all.write) + of(&all.write_zeroes);
    BlockStats {
        device: served.node().to_owned(),
        node_name: served.node().to_owned(),
        stats: DeviceStats {
            rd_bytes: all.read.bytes,
            wr_bytes: both(|counts| counts.bytes),
            unmap_bytes: all.discard.bytes,
            rd_operations: all.read.ended,
            wr_operations: both(|counts| counts.ended),
            flush_operations: all.flush.ended,
            unmap_operations: all.discard.ended,
            rd_merged: 0,
            wr_merged: 0,
            unmap_merged: 0,
            failed_rd_operations: all.read.failed,
            failed_wr_operations: both(|counts| counts.failed),
            failed_flush_operations: all.flush.failed,
            failed_unmap_operations: all.discard.failed,
            invalid_rd_operations: 0,
            invalid_wr_operations: 0,
            invalid_flush_operations: 0,
            invalid_unmap_operations: 0,
            account_invalid: false,
            account_failed: false,
            timed_stats: vec![],
        },
        latency: json!({ "read": read, "write": write, "flush": flush }),
        state: serde_json::to_value(DiskStats::of(served)).unwrap_or_default(),
    }
}

arguments! {
    /// `query-blockstats`
    struct QueryStats {
        /// Disks and nodes are the same here.
        "query-nodes" _nodes: Option<bool>,
    }
}

impl Command for QueryStats {
    const NAME: &'static str = "query-blockstats";
    type Answer = Vec<BlockStats>;

    fn run(self, running: &mut Running, reply: Reply<Self::Answer>) {
        reply.give(Ok(running.disks.values().map(stats).collect()));
    }
}

answer! {
    /// An export.
    struct ExportInfo {
        "id" id: String,
        "type" of: String,
        "node-name" node_name: String,
        "shutting-down" shutting_down: bool,
        /// Where clients find it.
        "__ringtap_places" places: Vec<String>,
    }
}

arguments! {
    /// `query-block-exports`
    struct QueryExports {
        /// Those of this disk alone.
        "__ringtap_node-name" node: Option<String>,
    }
}

impl Command for QueryExports {
    const NAME: &'static str = "query-block-exports";
    type Answer = Vec<ExportInfo>;

    fn run(self, running: &mut Running, reply: Reply<Self::Answer>) {
        let info = |export: &Export| {
            let served = running.disks.get(&export.disk)?;
            if self.node.as_deref().is_some_and(|node| node != served.node()) {
                return None;
            }
            let transport = &running.servers.get(&export.server)?.transport;
            Some(ExportInfo {
                id: export.id.clone(),
                of: export.kind.to_owned(),
                node_name: served.node().to_owned(),
                shutting_down: export.closing,
                places: transport.places(&export.name),
            })
        };
        reply.give(Ok(running.exports.iter().filter_map(info).collect()));
    }
}

answer! {
    /// An export is gone, and its id free.
    struct ExportDeleted { "id" id: String }
}

impl Told for ExportDeleted {
    const NAME: &'static str = "BLOCK_EXPORT_DELETED";
}
