//! `ringtap info`: what an image is, what lies below it, and who uses it. The JSON has the fields of
//! `qemu-img info` where that has them, and some more.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_image::qcow2::bitmap_directory::flag;
use ringtap_image::qcow2::header::{
    Compression, Crypt, Header, autoclear, compatible, incompatible,
};
use ringtap_image::qcow2::{BitmapEntry, Snapshot};
use ringtap_image::{Format, LeftBehind, Standing, luks, vmdk};
use ringtap_image_tools::Known;
use ringtap_image_tools::info::{self, Info, Specific};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::described::described;
use super::snapshot;
use super::source::{Sources, backing};
use crate::manual::section::{EXIT, Section};
use crate::names;
use crate::output::{Output, human, pretty};

/// What `ringtap info` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct InfoArgs {
    /// An image (a file or a block device), or null:SIZE
    #[arg(value_name = "DISK")]
    disk: PathBuf,

    /// Format of the image [default: as recorded, else by its signature]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Tell of every image below it too, as a list
    #[arg(short = 'b', long)]
    backing_chain: bool,

    /// How to print it; json has the fields of `qemu-img info`
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten)]
    sources: Sources,
}

/// The facts of one file. The first fields are those of QEMU's ImageInfo.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Facts {
    filename: String,
    format: &'static str,
    /// Bytes the guest sees.
    virtual_size: u64,
    /// Bytes taken where the image lies; none for a block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    actual_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted: Option<bool>,
    dirty_flag: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    full_backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename_format: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[serde(serialize_with = "snapshots")]
    snapshots: Vec<Snapshot>,
    /// The files that it consists of.
    children: Vec<Child>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format_specific: Option<Value>,
    /// How the format is known: named, recorded (when Ringtap made the image), or probed.
    format_known: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_sizes: Option<BlockSizes>,
    /// What O_DIRECT asks for; none where the file system does not do it.
    #[serde(skip_serializing_if = "Option::is_none")]
    direct_io: Option<Alignment>,
    lock: Lock,
    /// What a killed server left, that is not in the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    restart_log: Option<Value>,
    /// That in words.
    #[serde(skip)]
    restart_log_told: Option<String>,
    /// The verb that began to write the image and has not finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    unfinished: Option<String>,
    /// The image in which its disk goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    successor: Option<String>,
    /// The format whose signature the file bears, where that is not its format.
    #[serde(skip_serializing_if = "Option::is_none")]
    looks_like: Option<&'static str>,
}

/// A file that an image consists of, as QEMU's BlockChildInfo.
#[derive(Debug, Serialize)]
struct Child {
    name: String,
    info: File,
}

/// The facts of such a file, as those of an image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    children: [Value; 0],
    filename: String,
    format: String,
    virtual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    actual_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format_specific: Option<Value>,
    dirty_flag: bool,
}

impl From<&info::Child> for Child {
    fn from(child: &info::Child) -> Child {
        let driver = child.driver();
        let file = File {
            children: [],
            filename: child.path.display().to_string(),
            format: driver.to_owned(),
            virtual_size: child.len,
            actual_size: child.taken,
            format_specific: (driver == "file").then(|| json!({ "type": "file", "data": {} })),
            dirty_flag: false,
        };
        Child { name: child.name.clone(), info: file }
    }
}

impl Child {
    fn text(&self) -> Vec<String> {
        let file = &self.info;
        let size = file.actual_size.map(|size| format!("    disk size: {}", human(size)));
        let lines = [
            format!("Child node '/{}':", self.name),
            format!("    filename: {}", file.filename),
            format!("    protocol type: {}", file.format),
            format!("    file length: {} ({} bytes)", human(file.virtual_size), file.virtual_size),
        ];
        lines.into_iter().chain(size).collect()
    }
}

#[derive(Debug, Serialize)]
struct BlockSizes {
    logical: u32,
    physical: u32,
}

#[derive(Debug, PartialEq, Serialize)]
struct Alignment {
    offset: u64,
    memory: u64,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
enum Lock {
    /// No program writes to it.
    Free,
    /// It lies on a server, which does not tell.
    Unknown,
    /// Another program has it.
    Held { by: String, what: &'static str },
}

pub(crate) fn run(args: &InfoArgs) -> anyhow::Result<ExitCode> {
    let reading = args.sources.reading();
    let found = match args.backing_chain {
        true => info::chain(&args.disk, args.format, &reading)?,
        false => vec![info::info(&args.disk, args.format, &reading)?],
    };
    let facts: Vec<Facts> = found.into_iter().map(Facts::from).collect();
    let text = match (args.output, &facts[..]) {
        (Output::Json, [one]) if !args.backing_chain => pretty(one)?,
        (Output::Json, all) => pretty(all)?,
        (Output::Text, all) => all.iter().map(Facts::text).collect::<Vec<_>>().join("\n\n"),
    };
    writeln!(io::stdout(), "{text}")?;
    Ok(ExitCode::SUCCESS)
}

impl From<Info> for Facts {
    fn from(info: Info) -> Facts {
        let below = info.backing.as_ref();
        let specific = match &info.specific {
            Specific::None => None,
            Specific::Qcow2(header) => {
                Some(of_qcow2(header, info.inside.as_deref(), &info.bitmaps))
            }
            Specific::Luks(header) => Some(json!({ "type": "luks", "data": of_luks(header) })),
            Specific::Vmdk(facts) => Some(json!({ "type": "vmdk", "data": of_vmdk(facts) })),
        };
        Facts {
            filename: info.path.display().to_string(),
            format: if info.is_null() { "null" } else { info.format.name() },
            virtual_size: info.size,
            actual_size: info.taken,
            cluster_size: info.cluster_size,
            encrypted: info.encrypted.then_some(true),
            dirty_flag: info.dirty,
            backing_filename: below.map(|it| it.name.clone()),
            full_backing_filename: below.map(|it| it.path.display().to_string()),
            backing_filename_format: below.and_then(|it| it.format.clone()),
            children: info.children.iter().map(Child::from).collect(),
            format_specific: specific,
            format_known: match info.known {
                Known::Named => "named",
                Known::Recorded => "recorded",
                Known::Probed => "probed",
            },
            block_sizes: info
                .block_sizes
                .map(|(logical, physical)| BlockSizes { logical, physical }),
            direct_io: info.direct_io.map(|it| Alignment { offset: it.offset, memory: it.memory }),
            lock: match info.lock {
                info::Lock::Free => Lock::Free,
                info::Lock::Unknown => Lock::Unknown,
                info::Lock::Held { by, what } => Lock::Held { by, what },
            },
            restart_log: info.restart_log.as_ref().map(restart_log),
            restart_log_told: info.restart_log.as_ref().map(LeftBehind::told),
            unfinished: info.unfinished,
            successor: info.successor.map(|other| other.display().to_string()),
            looks_like: info.looks_like,
            snapshots: info.snapshots,
        }
    }
}

fn restart_log(left: &LeftBehind) -> Value {
    let (state, why) = match &left.standing {
        None => ("missing", None),
        Some(Standing::Same) => ("waiting", None),
        Some(Standing::Other(why)) => ("void", Some(why)),
        Some(Standing::Unknown(why)) => ("in-doubt", Some(why)),
    };
    let mut told = json!({ "changes": left.changes, "state": state });
    if let Some(why) = why {
        told["why"] = why.clone().into();
    }
    told
}

fn of_luks(header: &luks::Header) -> Value {
    let mut name = header.encryption.name().splitn(3, '-');
    let (cipher, mode) = (name.next().unwrap_or_default(), name.next());
    let mut numbers = name.next().unwrap_or_default().split(':');
    let used = header.keyslots.iter().map(|slot| (slot.index, keyslot(slot)));
    let unused = header.unused.iter().map(|(index, offset)| {
        (*index, json!({ "slot": index, "active": false, "key-offset": offset }))
    });
    let mut slots: Vec<_> = used.chain(unused).collect();
    slots.sort_by_key(|(index, _)| *index);
    let slots: Vec<_> = slots.into_iter().map(|(_, facts)| facts).collect();
    let mut data = json!({
        "version": header.version,
        "uuid": header.uuid,
        "cipher-alg": format!("{cipher}-{}", header.encryption.bits()),
        "cipher-mode": mode,
        "ivgen-alg": numbers.next(),
        "sector-size": header.sector_size,
        "payload-offset": header.payload_offset,
        "slots": slots,
    });
    if let (1, Some(first)) = (header.version, header.keyslots.first()) {
        data["hash-alg"] = first.hash.name().into();
        data["master-key-iters"] = first.digest.iterations.into();
        data["detached-header"] = false.into();
    }
    if let Some(hash) = numbers.next() {
        data["ivgen-hash-alg"] = hash.into();
    }
    if !header.label.is_empty() {
        data["label"] = header.label.clone().into();
    }
    data
}

/// With the fields of QEMU's ImageInfoSpecificVmdk; nothing lies below it.
fn of_vmdk(facts: &vmdk::Facts) -> Value {
    let extents = facts.extents.iter().map(|it| {
        let mut extent = json!({
            "virtual-size": it.size,
            "filename": it.path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
            "format": it.kind.unwrap_or_default(),
        });
        if let Some(grain) = it.grain {
            extent["cluster-size"] = grain.into();
        }
        if it.compressed {
            extent["compressed"] = true.into();
        }
        extent
    });
    json!({
        "cid": facts.cid,
        "parent-cid": u32::MAX,
        "create-type": facts.create_type,
        "extents": extents.collect::<Value>(),
    })
}

fn of_qcow2(header: &Header, inside: Option<&luks::Header>, bitmaps: &[BitmapEntry]) -> Value {
    let mut data = json!({
        "compat": if header.version == 2 { "0.10" } else { "1.1" },
        "compression-type": match header.compression {
            Compression::Deflate => "zlib",
            Compression::Zstd => "zstd",
        },
        "refcount-bits": header.refcount_bits(),
    });
    if header.version > 2 {
        data["lazy-refcounts"] = (header.compatible & compatible::LAZY_REFCOUNTS != 0).into();
        data["corrupt"] = header.has(incompatible::CORRUPT).into();
        data["extended-l2"] = header.extended_l2().into();
    }
    if !bitmaps.is_empty() {
        data["bitmaps"] = bitmaps.iter().map(bitmap).collect();
    }
    if let Some(name) = header.data_file() {
        data["data-file"] = String::from_utf8_lossy(name).into();
        data["data-file-raw"] = (header.autoclear & autoclear::DATA_FILE_RAW != 0).into();
    }
    if header.crypt != Crypt::None {
        let format = if header.crypt == Crypt::Luks { "luks" } else { "aes" };
        data["encrypt"] = inside.map_or_else(|| json!({}), of_luks);
        data["encrypt"]["format"] = format.into();
    }
    json!({ "type": "qcow2", "data": data })
}

impl Facts {
    fn text(&self) -> String {
        let mut lines = vec![
            format!("image: {}", self.filename),
            format!("file format: {}", self.format),
            format!("virtual size: {} ({} bytes)", human(self.virtual_size), self.virtual_size),
        ];
        let mut add = |line: String| lines.push(line);
        if let Some(size) = self.actual_size {
            add(format!("disk size: {}", human(size)));
        }
        if let Some(true) = self.encrypted {
            add("encrypted: yes".into());
        }
        if let Some(size) = self.cluster_size {
            add(format!("cluster_size: {size}"));
        }
        if self.dirty_flag {
            add("cleanly shut down: no".into());
        }
        if let (Some(name), Some(full)) = (&self.backing_filename, &self.full_backing_filename) {
            let actual =
                if name == full { String::new() } else { format!(" (actual path: {full})") };
            add(format!("backing file: {name}{actual}"));
        }
        if let Some(format) = &self.backing_filename_format {
            add(format!("backing file format: {format}"));
        }
        if let Some(BlockSizes { logical, physical }) = self.block_sizes {
            add(format!("block size: {logical} logical, {physical} physical"));
        }
        if self.format == "null" {
            return lines.join("\n");
        }
        if !self.snapshots.is_empty() {
            add(snapshot::table(&self.snapshots));
        }
        if let Some(data) = self.format_specific.as_ref().and_then(|it| it.get("data")) {
            add("Format specific information:".into());
            lines.extend(described(data, 4));
        }
        lines.extend(self.children.iter().flat_map(Child::text));
        lines.push(match &self.direct_io {
            Some(Alignment { offset, memory }) => {
                format!("O_DIRECT alignment: {offset} for offsets, {memory} for memory")
            }
            None if self.lock == Lock::Free && self.block_sizes.is_some() => {
                "O_DIRECT: not on this file system; serve it with --cache writeback".into()
            }
            None => "O_DIRECT alignment: not known".into(),
        });
        lines.push(match &self.lock {
            Lock::Free => "lock: free, nobody writes to it".into(),
            Lock::Unknown => "lock: not known, for it lies on a server".into(),
            Lock::Held { by, what } => format!("lock: {by} {what}"),
        });
        lines.extend(self.notes());
        lines.join("\n")
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![];
        if let Some(verb) = &self.unfinished {
            notes.push(format!("note: it is not whole: ringtap {verb} did not finish"));
        }
        if let Some(other) = &self.successor {
            notes.push(format!(
                "note: its disk goes on in {other}, and this image is not written to"
            ));
        }
        if let Some(told) = &self.restart_log_told {
            notes.push(format!("note: {told}"));
        }
        if let Some(format) = self.looks_like {
            notes.push(format!(
                "note: it bears the signature of {format}; as {}, a guest sees that file's bytes as its disk",
                self.format
            ));
        } else if self.format_known == "probed" && self.format != "raw" {
            notes.push(format!(
                "note: taken for {} by its signature; to serve it writable, name the format with -f",
                self.format
            ));
        }
        notes
    }
}

/// A keyslot with the fields of QEMU's QCryptoBlockInfoLUKSSlot, and its number.
fn keyslot(slot: &luks::Keyslot) -> Value {
    let mut facts = json!({
        "slot": slot.index,
        "active": true,
        "key-offset": slot.offset,
        "stripes": slot.stripes,
        "hash-alg": slot.hash.name(),
    });
    match &slot.kdf {
        luks::Kdf::Pbkdf2 { iterations, .. } => facts["iters"] = (*iterations).into(),
        luks::Kdf::Argon2 { kind, time, memory, cpus, .. } => {
            let name = match kind {
                luks::Argon2Kind::I => "argon2i",
                luks::Argon2Kind::Id => "argon2id",
            };
            facts["kdf"] =
                json!({ "type": name, "time": time, "memory-kib": memory, "cpus": cpus });
        }
    }
    facts
}

/// A bitmap with the fields of QEMU's Qcow2BitmapInfo.
fn bitmap(entry: &BitmapEntry) -> Value {
    let named = [(flag::IN_USE, "in-use"), (flag::AUTO, "auto")];
    let flags: Vec<_> =
        named.iter().filter(|(bit, _)| entry.flags & bit != 0).map(|(_, name)| *name).collect();
    json!({
        "name": entry.name,
        "granularity": 1u64.checked_shl(entry.granularity_bits.into()).unwrap_or(0),
        "flags": flags,
    })
}

fn snapshots<S: Serializer>(list: &[Snapshot], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(list.iter().map(snapshot::facts))
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
    (
        "Examples",
        &[
            ("ringtap info vm.raw", "sizes, alignment, and who uses it"),
            ("ringtap info vm.qcow2 --backing-chain", "that image and all below it"),
            ("ringtap info vm.raw --output json", "the same for programs"),
        ],
    ),
    EXIT,
];
