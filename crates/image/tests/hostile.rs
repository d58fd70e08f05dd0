//! What images take that claim to be as large as they may: little memory, whatever is done with them.
//! One test, for it is the whole process's memory that is looked at.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ringtap_image::qcow2::{Repair, Report, check, list_bitmaps, list_snapshots};
use ringtap_image::vhd::{self, CreateOptions, Kind};
use ringtap_image::{CacheMode, Container, Extent, Format, Image, OpenOptions, on_a_ring, open};

const MIB: u64 = 1 << 20;
/// The most that opening one may take.
const MOST: u64 = 64 * MIB;
/// Of L1 tables, and of snapshots.
const LONGEST_L1: u64 = 32 * MIB;
const MOST_SNAPSHOTS: u32 = 65536;
const COPIED: u64 = 1 << 63;
const BITMAPS: u32 = 0x2385_2875;

/// A header of version 3 with tables in clusters of their own, and room for extensions behind it.
struct Header {
    cluster_bits: u32,
    size: u64,
    l1: (u64, u32),
    refcounts: (u64, u32),
    snapshots: (u64, u32),
    autoclear: u64,
}

impl Header {
    fn write(&self, file: &File, extensions: &[u8]) {
        let mut bytes = b"QFI\xfb\0\0\0\x03".to_vec();
        bytes.extend([0; 12]);
        bytes.extend(self.cluster_bits.to_be_bytes());
        bytes.extend(self.size.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.l1.1.to_be_bytes());
        bytes.extend(self.l1.0.to_be_bytes());
        bytes.extend(self.refcounts.0.to_be_bytes());
        bytes.extend(self.refcounts.1.to_be_bytes());
        bytes.extend(self.snapshots.1.to_be_bytes());
        bytes.extend(self.snapshots.0.to_be_bytes());
        bytes.extend([0; 16]);
        bytes.extend(self.autoclear.to_be_bytes());
        bytes.extend(4u32.to_be_bytes());
        bytes.extend(104u32.to_be_bytes());
        bytes.extend(extensions);
        file.write_all_at(&bytes, 0).expect("written");
    }
}

fn options(read_only: bool) -> OpenOptions {
    let (format, cache) = (Some(Format::Qcow2), CacheMode::Writeback);
    OpenOptions { format, cache, read_only, ..OpenOptions::default() }
}

fn table(entries: impl Iterator<Item = u64>) -> Vec<u8> {
    entries.flat_map(u64::to_be_bytes).collect()
}

/// The most memory this process had at once since [`forget_peak`], in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("our own status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn forget_peak() {
    fs::write("/proc/self/clear_refs", "5").expect("forgotten");
}

fn takes_little(what: &str, deed: impl FnOnce()) {
    forget_peak();
    let before = peak();
    deed();
    let taken = peak() - before;
    assert!(taken < MOST, "{what} takes {} MiB", taken >> 20);
}

/// What [`check`] says, and soon: reading all that such an image claims to have takes hours.
fn checked(path: &Path) -> Report {
    let own = container(path);
    let start = Instant::now();
    let report = on_a_ring(path, |io| async move { check(&io, &own, Repair::Nothing).await });
    assert!(start.elapsed() < Duration::from_secs(20), "it took {:?}", start.elapsed());
    report.expect("a ring").expect("looked at")
}

fn container(path: &Path) -> Container {
    Container::open(path, &options(true)).expect("opened")
}

/// So many tables of the largest clusters, all of them holes; gives the disk's size.
fn wide(path: &Path, tables: u64) -> u64 {
    let (bits, l1_at, refcounts_at) = (21, 2 * MIB, 34 * MIB);
    let size = tables << (bits + bits - 3);
    let file = File::create(path).expect("a file");
    let first = 64 * MIB;
    let header = Header {
        cluster_bits: bits,
        size,
        l1: (l1_at, tables as u32),
        refcounts: (refcounts_at, 4),
        snapshots: (0, 0),
        autoclear: 0,
    };
    header.write(&file, &[]);
    let place = |index: u64| first + (index << bits);
    file.write_all_at(&table((0..tables).map(|index| place(index) | COPIED)), l1_at).expect("L1");
    file.write_all_at(&table((0..MIB).map(place)), refcounts_at).expect("refcounts");
    file.set_len(place(tables)).expect("a hole");
    size
}

/// Clusters of [`far_apart`].
const FAR_APART: u64 = 4096;
/// Clusters of [`scattered`].
const SCATTERED: u64 = 32 << 10;

/// Clusters of 4 KiB, 4 MiB of file between each two.
fn scattered(path: &Path) {
    let (bits, l1_at, refcounts_at, first) = (12, 4096, 8192, 4 * MIB);
    let tables = SCATTERED / 512;
    let header = Header {
        cluster_bits: bits,
        size: SCATTERED << bits,
        l1: (l1_at, tables as u32),
        refcounts: (refcounts_at, 1),
        snapshots: (0, 0),
        autoclear: 0,
    };
    let file = File::create(path).expect("a file");
    header.write(&file, &[]);
    let place = |index: u64| (first + (index << bits)) | COPIED;
    file.write_all_at(&table((0..tables).map(place)), l1_at).expect("L1");
    let clusters = (2..2 + SCATTERED).map(|index| (index * 4 * MIB) | COPIED);
    file.write_all_at(&table(clusters), first).expect("tables");
    file.set_len((2 + SCATTERED + 1) * 4 * MIB).expect("a hole");
}

/// As many snapshots as there may be, with names of so many bytes and one L1 table of so many entries for
/// all of them.
fn many_snapshots(path: &Path, name: u16, l1_entries: u32) {
    let file = File::create(path).expect("a file");
    let at = 4 * MIB;
    let header = Header {
        cluster_bits: 16,
        size: MIB,
        l1: (65536, 1),
        refcounts: (2 * 65536, 1),
        snapshots: (at, MOST_SNAPSHOTS),
        autoclear: 0,
    };
    header.write(&file, &[]);
    let mut entry = 65536u64.to_be_bytes().to_vec();
    entry.extend(l1_entries.to_be_bytes());
    entry.extend([0; 2]);
    entry.extend(name.to_be_bytes());
    entry.resize(36, 0);
    entry.extend(40u32.to_be_bytes());
    entry.resize(80, 0);
    entry.resize(80 + usize::from(name), b'n');
    file.write_all_at(&entry.repeat(MOST_SNAPSHOTS as usize), at).expect("written");
}

/// Snapshots, as many as there may be, that all have the disk's L1 table of 32 MiB, in a file of more than
/// 2 TiB. Each of its entries points to a table of its own, in a hole, where `tables` says so; else to one.
fn one_l1_for_all(path: &Path, tables: u64) {
    let file = File::create(path).expect("a file");
    let (l1_at, snapshots_at, first) = (65536, 64 * MIB, 128 * MIB);
    let entries = LONGEST_L1 / 8;
    let header = Header {
        cluster_bits: 16,
        size: entries << (16 + 13),
        l1: (l1_at, entries as u32),
        refcounts: (60 * MIB, 1),
        snapshots: (snapshots_at, MOST_SNAPSHOTS),
        autoclear: 0,
    };
    header.write(&file, &[]);
    let l1 = table((0..entries).map(|index| first + ((index % tables) << 19)));
    file.write_all_at(&l1, l1_at).expect("written");
    let mut entry = l1_at.to_be_bytes().to_vec();
    entry.extend((entries as u32).to_be_bytes());
    entry.extend([0; 4]);
    entry.resize(36, 0);
    entry.extend(16u32.to_be_bytes());
    entry.resize(56, 0);
    file.write_all_at(&entry.repeat(MOST_SNAPSHOTS as usize), snapshots_at).expect("written");
    file.set_len(u64::from(MOST_SNAPSHOTS) * LONGEST_L1 + first).expect("longer");
}

/// So many tables of 64 KiB with an entry each, to a cluster of its own far from the others, whose refcount is in
/// a block of its own.
fn far_apart(path: &Path, tables: u64) {
    let file = File::create(path).expect("a file");
    let (bits, l1_at, table_at) = (16, 2 * MIB, 4 * MIB);
    let place = |index: u64| 8 * MIB + (index << bits);
    // A block of 16-bit refcounts tells of 2 GiB.
    let cluster = |index: u64| (index + 1) << (bits + 15);
    let block = |index: u64| place(tables + index);
    let header = Header {
        cluster_bits: bits,
        size: tables << (bits + bits - 3),
        l1: (l1_at, tables as u32),
        refcounts: (table_at, 1),
        snapshots: (0, 0),
        autoclear: 0,
    };
    header.write(&file, &[]);
    file.write_all_at(&table((0..tables).map(|index| place(index) | COPIED)), l1_at).expect("L1");
    file.write_all_at(&table((0..=tables).map(block)), table_at).expect("refcounts");
    for index in 0..tables {
        let entry = (cluster(index) | COPIED).to_be_bytes();
        file.write_all_at(&entry, place(index)).expect("a table");
        file.write_all_at(&[0, 1], block(index + 1)).expect("a refcount");
    }
    file.set_len(cluster(tables)).expect("longer");
}

/// `count` bitmaps in a directory of `len` bytes, with one table of so many entries for all of them.
fn long_bitmaps(path: &Path, table_entries: u32, (count, len): (u32, u64)) {
    let file = File::create(path).expect("a file");
    let at = 64 * MIB;
    let header = Header {
        cluster_bits: 9,
        size: 1 << 30,
        l1: (512, 1 << 15),
        refcounts: (MIB, 1),
        snapshots: (0, 0),
        autoclear: 1,
    };
    let mut extension = BITMAPS.to_be_bytes().to_vec();
    extension.extend(24u32.to_be_bytes());
    extension.extend(count.to_be_bytes());
    extension.extend([0; 4]);
    extension.extend(len.to_be_bytes());
    extension.extend(at.to_be_bytes());
    header.write(&file, &extension);
    let name = len / u64::from(count) - 24;
    let mut entries = vec![];
    for number in 0..count {
        entries.extend((2 * MIB).to_be_bytes());
        entries.extend(table_entries.to_be_bytes());
        entries.extend([0; 4]);
        entries.extend([1, 9]);
        entries.extend((name as u16).to_be_bytes());
        entries.extend([0; 4]);
        entries.extend(format!("{number:0width$}", width = name as usize).bytes());
    }
    file.write_all_at(&entries, at).expect("written");
    file.set_len(at + len.next_multiple_of(512)).expect("longer");
}

/// A dynamic VHD as large as can be of the largest blocks, all there and all holes; gives the blocks.
fn full_of_holes(path: &Path) -> u64 {
    let (size, block) = (vhd::MOST, 256 * MIB);
    File::create(path).expect("a file");
    let options = CreateOptions {
        size,
        kind: Kind::Dynamic,
        force_size: true,
        block_size: Some(block as u32),
        parent: None,
        id: None,
    };
    let own = Container::open(path, &OpenOptions { format: None, ..self::options(false) });
    let own = own.expect("opened");
    let made = on_a_ring(path, |io| async move { vhd::create(&io, &own, &options).await });
    made.expect("a ring").expect("made");
    let file = File::options().read(true).write(true).open(path).expect("opened");
    let (mut footer, mut table) = ([0; 512], [0; 8]);
    file.read_exact_at(&mut footer, 0).expect("a footer");
    file.read_exact_at(&mut table, 512 + 16).expect("a header");
    let blocks = size / block;
    // Each begins with a bit for each of its sectors.
    let place = |index: u64| MIB + index * (block + block / 512 / 8);
    let entries = (0..blocks).flat_map(|index| ((place(index) / 512) as u32).to_be_bytes());
    let entries: Vec<u8> = entries.collect();
    file.write_all_at(&entries, u64::from_be_bytes(table)).expect("written");
    file.write_all_at(&footer, place(blocks)).expect("written");
    blocks
}

/// A VHDX whose log is one entry of `len` bytes, with a sector of changes for each of its sectors.
fn long_log(path: &Path, len: u32) {
    let file = File::create(path).expect("a file");
    let sealed = |mut bytes: Vec<u8>| {
        let sum = crc32c::crc32c(&bytes);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    };
    let put = |bytes: &mut [u8], at: usize, field: &[u8]| {
        bytes[at..at + field.len()].copy_from_slice(field);
    };
    file.write_all_at(b"vhdxfile", 0).expect("written");
    let mut header = vec![0; 4096];
    put(&mut header, 0, b"head");
    put(&mut header, 48, &[9; 16]);
    put(&mut header, 66, &[1, 0]);
    put(&mut header, 68, &len.to_le_bytes());
    put(&mut header, 72, &MIB.to_le_bytes());
    file.write_all_at(&sealed(header), 65536).expect("written");
    // Descriptors of 32 bytes, 128 to a sector, and behind them their data.
    let sectors = u64::from(len) / 4096;
    let count = (sectors - 1) * 128 / 129 - 1;
    let mut entry = vec![0; len as usize];
    put(&mut entry, 0, b"loge");
    put(&mut entry, 8, &len.to_le_bytes());
    put(&mut entry, 16, &7u64.to_le_bytes());
    put(&mut entry, 24, &(count as u32).to_le_bytes());
    put(&mut entry, 32, &[9; 16]);
    let data = (64 + 32 * count).next_multiple_of(4096);
    for number in 0..count {
        let at = (64 + 32 * number) as usize;
        put(&mut entry, at, b"desc");
        put(&mut entry, at + 16, &(64 * MIB + 4096 * number).to_le_bytes());
        put(&mut entry, at + 24, &7u64.to_le_bytes());
        let at = (data + 4096 * number) as usize;
        put(&mut entry, at, b"data");
        put(&mut entry, at + 4092, &7u32.to_le_bytes());
    }
    file.write_all_at(&sealed(entry), MIB).expect("written");
    file.set_len(128 * MIB).expect("longer");
}

/// Bring to memory what tells of these places, of which each is a hole.
fn load(path: &Path, image: &dyn Image, offsets: Vec<u64>) {
    let (asked, places) = (image.fork(), offsets.clone());
    let loaded = on_a_ring(path, |io| async move {
        for offset in places {
            asked.load(&io, offset).await?;
        }
        Ok::<(), ringtap_image::Error>(())
    });
    loaded.expect("a ring").expect("loaded");
    for offset in offsets {
        assert!(matches!(image.map(offset, 512), Extent::Zero { .. }), "{offset}");
    }
}

#[test]
fn what_claims_to_be_large_takes_little_memory() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    let size = wide(&path, LONGEST_L1 / 8);
    for read_only in [true, false] {
        takes_little("an L1 table of 32 MiB", || {
            let image = open(&path, &options(read_only)).expect("opened");
            let offsets = (0..64).map(|part| part * (size / 64)).chain([size - 512]);
            load(&path, &*image, offsets.collect());
        });
    }

    // Half a terabyte of tables, none of which is there.
    wide(&path, 1 << 18);
    let own = container(&path);
    let report = on_a_ring(&path, |io| async move { check(&io, &own, Repair::Nothing).await });
    assert_eq!(report.expect("a ring").expect("looked at").allocated_clusters, 0);

    scattered(&path);
    takes_little("references that each have a page of counts for themselves", || {
        let own = container(&path);
        let report = on_a_ring(&path, |io| async move { check(&io, &own, Repair::Nothing).await });
        let report = report.expect("a ring").expect("looked at");
        assert_eq!(report.allocated_clusters, SCATTERED);
    });

    for (tables, why) in [(LONGEST_L1 / 8, "L2 tables lie in holes"), (1, "references 65537")] {
        one_l1_for_all(&path, tables);
        takes_little("65536 snapshots with L1 tables of 32 MiB", || {
            let report = checked(&path);
            let said = &report.messages;
            assert!(said.iter().any(|said| said.contains(why)), "{:?}", said.last());
        });
    }

    far_apart(&path, FAR_APART);
    takes_little("tables, refcounts and clusters each in a place of its own", || {
        let report = checked(&path);
        assert_eq!(report.allocated_clusters, FAR_APART);
        // Nothing but the clusters of data has a refcount, and no flag of the L1 table is right.
        let metadata = 3 + FAR_APART + FAR_APART + 1;
        assert_eq!((report.corruptions, report.leaks), (metadata + FAR_APART, 0));
    });

    many_snapshots(&path, 944, 0);
    takes_little("a snapshot table of 64 MiB", || {
        let own = container(&path);
        let listed = on_a_ring(&path, |io| async move { list_snapshots(&io, &own).await });
        assert_eq!(listed.expect("a ring").expect("listed").len(), MOST_SNAPSHOTS as usize);
        assert_eq!(checked(&path).allocated_clusters, 0);
    });
    many_snapshots(&path, 16, 4 << 20);
    takes_little("L1 tables of 2 TiB", || {
        let own = container(&path);
        let listed = on_a_ring(&path, |io| async move { list_snapshots(&io, &own).await });
        let refused = listed.expect("a ring").map(drop).expect_err("too much");
        assert!(refused.to_string().contains("more than the file"), "{refused}");
    });

    let all = 65535;
    for (what, entries, each) in
        [("a directory of 62 MiB", 0, 1000), ("tables of 2 TiB", 4 << 20, 32)]
    {
        long_bitmaps(&path, entries, (all, u64::from(all) * each));
        takes_little(what, || {
            let own = container(&path);
            let listed = on_a_ring(&path, |io| async move { list_bitmaps(&io, &own).await });
            assert!(listed.expect("a ring").is_err(), "{what}");
            let own = container(&path);
            let report =
                on_a_ring(&path, |io| async move { check(&io, &own, Repair::Nothing).await });
            let report = report.expect("a ring").expect("looked at");
            assert!(
                report.messages.iter().any(|said| said.contains("the bitmap directory at")),
                "{report:?}"
            );
        });
    }

    let blocks = full_of_holes(&path);
    takes_little("2 TiB of a VHD's bitmaps", || {
        let options = OpenOptions { format: Some(Format::Vhd), ..options(true) };
        let image = open(&path, &options).expect("opened");
        load(&path, &*image, (0..blocks).map(|block| block * 256 * MIB).collect());
    });

    for len in [16 * MIB, 32 * MIB] {
        long_log(&path, len as u32);
        takes_little("the log of a VHDX", || {
            let options = OpenOptions { format: Some(Format::Vhdx), ..options(true) };
            let refused = open(&path, &options).err().expect("no regions").to_string();
            let wanted = if len > 16 * MIB { "a log of" } else { "no region table" };
            assert!(refused.contains(wanted), "{refused}");
        });
    }
}
