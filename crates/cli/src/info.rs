//! `ringtap info`: what an image is, and who uses it.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use ringtap_image::{CacheMode, Format, OpenError, OpenOptions, open};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use serde::Serialize;

use crate::args::Output;
use crate::serve::FormatName;

const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// What `ringtap info` is told.
#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// An image (a file or a block device), or null:SIZE
    disk: PathBuf,

    /// Format of the image
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "raw")]
    format: FormatName,

    /// How to print it
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,
}

#[derive(Debug, Serialize)]
struct Facts {
    disk: String,
    format: &'static str,
    /// Bytes the guest sees.
    virtual_size: u64,
    /// Bytes taken where the image lies; none for a block device.
    disk_size: Option<u64>,
    block_sizes: Option<BlockSizes>,
    /// What O_DIRECT asks for; none where the file system does not do it.
    direct_io: Option<Alignment>,
    lock: Lock,
    /// The format whose mark the image begins (or ends) with.
    looks_like: Option<&'static str>,
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
    /// Another program has it.
    Held { by: String, what: &'static str },
}

pub(crate) fn run(args: &InfoArgs) -> anyhow::Result<ExitCode> {
    let facts = look(&args.disk, args.format.into())?;
    let text = match args.output {
        Output::Json => serde_json::to_string_pretty(&facts)?,
        Output::Text => facts.text(),
    };
    writeln!(io::stdout(), "{text}")?;
    Ok(ExitCode::SUCCESS)
}

fn look(disk: &Path, format: Format) -> anyhow::Result<Facts> {
    let mut options = OpenOptions {
        format: Some(format),
        cache: CacheMode::None,
        read_only: true,
        ..OpenOptions::default()
    };
    let mut direct = true;
    let mut image = open(disk, &options);
    if matches!(&image, Err(OpenError::Os { source, .. }) if source.kind() == io::ErrorKind::InvalidInput)
    {
        direct = false;
        options.cache = CacheMode::Writeback;
        image = open(disk, &options);
    }
    let mut facts = match image {
        Ok(image) => {
            let info = image.info();
            Facts {
                disk: disk.display().to_string(),
                format: info.format,
                virtual_size: info.size,
                disk_size: None,
                block_sizes: Some(BlockSizes {
                    logical: info.logical_block_size,
                    physical: info.physical_block_size,
                }),
                direct_io: direct.then_some(Alignment {
                    offset: info.request_alignment,
                    memory: info.memory_alignment as u64,
                }),
                lock: Lock::Free,
                looks_like: None,
            }
        }
        // It is in use; what can be known without a right to it is told all the same.
        Err(OpenError::Locked { held, holder, .. }) => Facts {
            disk: disk.display().to_string(),
            format: "raw",
            virtual_size: end_of(disk)?.next_multiple_of(512),
            disk_size: None,
            block_sizes: None,
            direct_io: known_alignment(disk),
            lock: Lock::Held { by: holder, what: held },
            looks_like: None,
        },
        Err(error) => return Err(error.into()),
    };
    if let Ok(found) = fs::metadata(disk).map(|it| (it.is_file(), it.blocks() * 512)) {
        facts.disk_size = found.0.then_some(found.1);
        facts.looks_like = mark(disk).unwrap_or_default();
    }
    Ok(facts)
}

fn end_of(path: &Path) -> anyhow::Result<u64> {
    let end = File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0)));
    end.with_context(|| format!("cannot find the size of {}", path.display()))
}

/// What the kernel says that O_DIRECT asks for (Linux 6.1; not every file system tells).
fn known_alignment(path: &Path) -> Option<Alignment> {
    let facts = rustix::fs::statx(CWD, path, AtFlags::empty(), STATX_DIOALIGN).ok()?;
    let told = facts.stx_mask & STATX_DIOALIGN.bits() != 0 && facts.stx_dio_offset_align != 0;
    told.then(|| Alignment {
        offset: facts.stx_dio_offset_align.into(),
        memory: facts.stx_dio_mem_align.into(),
    })
}

/// The format whose mark stands at the beginning, or for VHD at the end. A raw disk may hold any of
/// them as its guest's data, so this is told and never acted on.
fn mark(path: &Path) -> io::Result<Option<&'static str>> {
    let mut file = File::open(path)?;
    let mut head = [0; 68];
    let read = file.read(&mut head)?;
    let marks: [(&[u8], usize, &str); 7] = [
        (b"QFI\xfb", 0, "qcow2"),
        (b"QED\0", 0, "qed"),
        (b"KDMV", 0, "vmdk"),
        (b"vhdxfile", 0, "vhdx"),
        (b"conectix", 0, "vhd"),
        (b"LUKS\xba\xbe", 0, "luks"),
        (b"\x7f\x10\xda\xbe", 64, "vdi"),
    ];
    let begins =
        |mark: &[u8], at: usize| head[..read].get(at..).is_some_and(|it| it.starts_with(mark));
    if let Some((.., name)) = marks.iter().find(|(mark, at, _)| begins(mark, *at)) {
        return Ok(Some(name));
    }
    let mut tail = [0; 8];
    if file.seek(SeekFrom::End(-512)).is_ok() && file.read_exact(&mut tail).is_ok() {
        return Ok((&tail == b"conectix").then_some("vhd"));
    }
    Ok(None)
}

impl Facts {
    fn text(&self) -> String {
        let mut lines = vec![
            format!("image: {}", self.disk),
            format!("format: {}", self.format),
            format!("virtual size: {} ({} bytes)", human(self.virtual_size), self.virtual_size),
        ];
        if let Some(size) = self.disk_size {
            lines.push(format!("disk size: {}", human(size)));
        }
        if let Some(BlockSizes { logical, physical }) = self.block_sizes {
            lines.push(format!("block size: {logical} logical, {physical} physical"));
        }
        if self.format == "null" {
            return lines.join("\n");
        }
        lines.push(match &self.direct_io {
            Some(Alignment { offset, memory }) => {
                format!("O_DIRECT alignment: {offset} for offsets, {memory} for memory")
            }
            None if self.lock == Lock::Free => {
                "O_DIRECT: not on this file system; serve it with --cache writeback".into()
            }
            None => "O_DIRECT alignment: not known while it is in use".into(),
        });
        lines.push(match &self.lock {
            Lock::Free => "lock: free, nobody writes to it".into(),
            Lock::Held { by, what } => format!("lock: {by} holds {what}"),
        });
        if let Some(format) = self.looks_like {
            lines.push(format!(
                "note: it bears the mark of {format}; as raw, a guest sees that file's bytes as its disk"
            ));
        }
        lines.join("\n")
    }
}

fn human(bytes: u64) -> String {
    let mut unit = 0;
    let mut size = bytes as f64;
    while size >= 1024.0 && unit < 6 {
        size /= 1024.0;
        unit += 1;
    }
    let name = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit];
    let digits = if size.fract() == 0.0 { 0 } else { 2 };
    format!("{size:.digits$} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_in_round_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.50 KiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn marks_of_other_formats_are_seen() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("disk");
        let found = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("a file");
            mark(&path).expect("read")
        };
        assert_eq!(found(b""), None);
        assert_eq!(found(&[0; 4096]), None);
        assert_eq!(found(b"QFI\xfb\0\0\0\x03"), Some("qcow2"));
        let mut vhd = [0; 2048];
        vhd[1536..1544].copy_from_slice(b"conectix");
        assert_eq!(found(&vhd), Some("vhd"));
        let mut vdi = [0; 512];
        vdi[64..68].copy_from_slice(b"\x7f\x10\xda\xbe");
        assert_eq!(found(&vdi), Some("vdi"));
    }

    #[test]
    fn a_sparse_image_takes_less_than_it_shows() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("disk");
        File::create(&path).and_then(|file| file.set_len((1 << 30) + 7)).expect("a sparse file");
        let facts = look(&path, Format::Raw).expect("facts");
        assert_eq!(facts.virtual_size, (1 << 30) + 512);
        assert!(facts.disk_size.expect("a file") < 1 << 20);
        assert_eq!(facts.lock, Lock::Free);
    }
}
