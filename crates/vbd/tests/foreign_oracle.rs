//! VHDX and VMDK as QEMU makes them, read by us.

use std::path::Path;
use std::process::Command;

use ringtap_image::{CacheMode, Error, Format, OpenError, OpenOptions, on_a_ring, open_on};
use ringtap_vbd::{Kind, Request, Vbd};

const SIZE: u64 = 35 << 20;

fn run(args: &[&str]) -> std::process::Output {
    Command::new("timeout").arg("60").args(args).output().expect("timeout runs")
}

fn tool(args: &[&str]) {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn options(format: Format, cache: CacheMode) -> OpenOptions {
    OpenOptions { format: Some(format), cache, read_only: true, ..OpenOptions::default() }
}

/// All of the disk, in requests of odd lengths, and whether status tells its holes.
fn read_all(path: &Path, format: Format, cache: CacheMode) -> Result<Vec<u8>, OpenError> {
    let owned = path.to_owned();
    on_a_ring(path, |io| async move {
        let vbd = Vbd::new(open_on(&io, &owned, &options(format, cache)).await?, cache);
        let mut all = Vec::new();
        let step = 5 << 20 | 512;
        let buffer = io.buffer(step).expect("memory");
        while (all.len() as u64) < vbd.size() {
            let offset = all.len() as u64;
            let len = (step as u64).min(vbd.size() - offset);
            let mem = buffer.mem().window(0, len as usize);
            let request = Request { kind: Kind::Read, offset, len, mem, fua: false };
            vbd.serve(&io, request).await.expect("served");
            all.extend_from_slice(&buffer.bytes()[..len as usize]);
        }
        let zeros = vec![0; all.len()];
        let mut offset = 0;
        while offset < vbd.size() {
            let status = vbd.status(&io, offset, vbd.size() - offset).await.expect("a status");
            let part = &all[offset as usize..(offset + status.len) as usize];
            assert!(!status.zero || part == &zeros[..part.len()], "{offset}: {status:?}");
            offset += status.len;
        }
        let request = Request {
            kind: Kind::Write,
            offset: 0,
            len: 512,
            mem: buffer.mem().window(0, 512),
            fua: false,
        };
        assert_eq!(vbd.serve(&io, request).await, Err(Error::ReadOnly));
        Ok(all)
    })
    .expect("a ring")
}

fn noise(seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut disk = vec![0; SIZE as usize];
    for _ in 0..60 {
        let len = rng.usize(1..200 << 10);
        let at = rng.usize(0..disk.len() - len);
        let kind = rng.u8(0..3);
        for byte in &mut disk[at..at + len] {
            *byte = if kind == 0 { rng.u8(..) } else { kind };
        }
    }
    disk
}

fn same(read: &[u8], disk: &[u8], context: &str) {
    assert_eq!(read.len(), disk.len(), "{context}");
    for (number, (read, disk)) in read.chunks(4096).zip(disk.chunks(4096)).enumerate() {
        assert!(read == disk, "{context}: they differ at page {number}");
    }
}

fn usable(path: &Path, format: Format) -> CacheMode {
    match ringtap_image::Container::open(path, &options(format, CacheMode::None)) {
        Ok(_) => CacheMode::None,
        Err(_) => CacheMode::Writeback,
    }
}

#[test]
fn images_of_every_kind_read_as_qemu_wrote_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let (raw, disk) = (folder.path().join("raw"), noise(1));
    std::fs::write(&raw, &disk).expect("written");
    for (number, (name, format, made)) in [
        ("vmdk", Format::Vmdk, "subformat=monolithicSparse"),
        ("vmdk", Format::Vmdk, "subformat=monolithicSparse,zeroed_grain=on"),
        ("vmdk", Format::Vmdk, "subformat=monolithicFlat"),
        ("vmdk", Format::Vmdk, "subformat=twoGbMaxExtentSparse"),
        ("vmdk", Format::Vmdk, "subformat=twoGbMaxExtentFlat"),
        ("vmdk", Format::Vmdk, "subformat=streamOptimized"),
        ("vhdx", Format::Vhdx, "subformat=dynamic"),
        ("vhdx", Format::Vhdx, "subformat=dynamic,block_size=1M"),
        ("vhdx", Format::Vhdx, "subformat=fixed"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path().join(format!("disk {number}.{name}"));
        tool(&[
            "qemu-img",
            "convert",
            "-f",
            "raw",
            "-O",
            name,
            "-o",
            made,
            text(&raw),
            text(&path),
        ]);
        for cache in [usable(&path, format), CacheMode::Writeback] {
            let read =
                read_all(&path, format, cache).unwrap_or_else(|error| panic!("{made}: {error}"));
            same(&read, &disk, made);
        }
        let writable = OpenOptions { read_only: false, ..options(format, CacheMode::Writeback) };
        let error = ringtap_image::open(&path, &writable).err().expect("refused").to_string();
        assert!(error.contains("read-only"), "{error}");
    }
}

#[test]
fn extents_are_found_only_where_they_may_lie() {
    let folder = tempfile::tempdir().expect("a folder");
    let (here, there) = (folder.path().join("here"), folder.path().join("there"));
    for dir in [&here, &there] {
        std::fs::create_dir(dir).expect("made");
    }
    let path = here.join("disk.vmdk");
    tool(&[
        "qemu-img",
        "create",
        "-q",
        "-f",
        "vmdk",
        "-o",
        "subformat=monolithicFlat",
        text(&path),
        "1M",
    ]);
    std::fs::rename(here.join("disk-flat.vmdk"), there.join("secret")).expect("moved");
    let descriptor = std::fs::read_to_string(&path).expect("read");
    for name in ["../there/secret", text(&there.join("secret"))] {
        std::fs::write(&path, descriptor.replace("disk-flat.vmdk", name)).expect("written");
        let error = read_all(&path, Format::Vmdk, CacheMode::Writeback).expect_err("refused");
        assert!(error.to_string().contains("--backing"), "{error}");
        let mut options = options(Format::Vmdk, CacheMode::Writeback);
        options.allow_backing.push(there.clone());
        assert!(ringtap_image::open(&path, &options).is_ok());
    }
    std::fs::write(&path, descriptor.replace("parentCID=ffffffff", "parentCID=12345678"))
        .expect("written");
    let error = read_all(&path, Format::Vmdk, CacheMode::Writeback).expect_err("refused");
    assert!(error.to_string().contains("parent"), "{error}");
}

/// A VHDX as it is when its writer dies after the log and before the table.
#[test]
fn the_log_of_a_vhdx_is_carried_out_in_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.vhdx");
    tool(&["qemu-img", "create", "-q", "-f", "vhdx", "-o", "block_size=1M", text(&path), "35M"]);
    let mut disk = vec![0; SIZE as usize];
    let mut args = vec!["qemu-io".to_owned(), "-f".to_owned(), "vhdx".to_owned()];
    for number in 1..=20u64 {
        let (at, len) = (number * 1_650_176, 65536);
        disk[at as usize..at as usize + len].fill(number as u8);
        args.extend(["-c".to_owned(), format!("write -P {number} {at} {len}")]);
    }
    args.push(text(&path).to_owned());
    tool(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let read = || read_all(&path, Format::Vhdx, CacheMode::Writeback);
    same(&read().expect("read"), &disk, "as QEMU left it");

    // QEMU carries each entry out at once. The last one is still there: announce it, and undo it.
    let mut bytes = std::fs::read(&path).expect("read");
    let long = |bytes: &[u8], at: usize| {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
    };
    let header = [65536, 131_072].into_iter().max_by_key(|at| long(&bytes, at + 8)).expect("two");
    let (log, len) = (long(&bytes, header + 72) as usize, long(&bytes, header + 64) >> 32);
    let entries =
        (log..log + len as usize).step_by(4096).filter(|at| &bytes[*at..at + 4] == b"loge");
    let entry = entries.max_by_key(|at| long(&bytes, at + 16)).expect("an entry");
    bytes.copy_within(entry + 32..entry + 48, header + 48);
    bytes[header + 4..header + 8].fill(0);
    let sum = crc32c::crc32c(&bytes[header..header + 4096]);
    bytes[header + 4..header + 8].copy_from_slice(&sum.to_le_bytes());
    let table = long(&bytes, entry + 64 + 16) as usize;
    bytes[table..table + 4096].fill(0);
    std::fs::write(&path, &bytes).expect("written");
    same(&read().expect("read"), &disk, "from the log");
    assert!(std::fs::read(&path).expect("read") == bytes, "the file was changed");
    // A log that is damaged is no reason to guess.
    bytes[entry + 4096 + 100] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    let error = read().expect_err("refused").to_string();
    assert!(error.contains("log"), "{error}");
}
