use ringtap_image::qcow2::header::{COPIED, incompatible};
use ringtap_image::qcow2::{Header, Repair, Report, check, extension};

use crate::guest::{be64, content, header, l2_entry_at, put64};
use crate::oracle::{Folder, with};

pub fn run(folder: &Folder, image: &str, repair: Repair) -> Report {
    with(&folder.path(image), move |io, container| async move {
        check(&io, &container, repair).await.expect("it can be looked at")
    })
}

/// An image with data in some clusters, made by QEMU.
fn make(folder: &Folder, options: &str) -> Vec<u8> {
    folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", "8M"]);
    folder.io("image", &["write -P 1 0 256k", "write -P 2 1M 100k", "write -z 2M 64k", "flush"]);
    folder.io("image", &["write -P 3 5M 70k", "write -P 4 300k 4k"]);
    std::fs::read(folder.path("image")).expect("the image")
}

fn refcount_at(image: &[u8], cluster: u64) -> u64 {
    let header = header(image);
    let block =
        be64(image, header.refcount_table_offset + cluster / header.refcount_block_entries() * 8);
    block + cluster % header.refcount_block_entries() * 2
}

/// The host cluster of a guest cluster.
fn host(image: &[u8], cluster: u64) -> u64 {
    (be64(image, l2_entry_at(image, cluster)) & !COPIED) >> header(image).cluster_bits
}

fn edit_header(image: &mut [u8], change: impl FnOnce(&mut Header)) {
    let mut header = header(image);
    change(&mut header);
    let bytes = header.to_bytes().expect("it fits");
    image[..bytes.len()].copy_from_slice(&bytes);
}

type Damage = (&'static str, fn(&mut Vec<u8>));

/// Damage that leaves what the guest sees.
const DAMAGES: [Damage; 17] = [
    ("nothing", |_| ()),
    ("a used cluster is marked free", |image| {
        let at = refcount_at(image, host(image, 0)) as usize;
        image[at..at + 2].fill(0);
    }),
    ("a used cluster has refcount 5", |image| {
        let at = refcount_at(image, host(image, 1)) as usize;
        image[at + 1] = 5;
    }),
    ("free clusters are marked used", |image| {
        let cluster = header(image).cluster_size() as usize;
        let end = image.len().next_multiple_of(cluster);
        image.resize(end + 8 * cluster, 0x77);
        let at = refcount_at(image, (end / cluster) as u64 + 3) as usize;
        image[at + 1] = 1;
        image[at + 3] = 7;
    }),
    ("a data flag is gone", |image| {
        let at = l2_entry_at(image, 0) as usize;
        image[at] &= 0x7f;
    }),
    ("a table flag is gone", |image| {
        let at = header(image).l1_offset as usize;
        image[at] &= 0x7f;
    }),
    ("the refcount block is forgotten", |image| {
        let at = header(image).refcount_table_offset;
        put64(image, at, 0);
    }),
    ("the refcount block is unaligned", |image| {
        let at = header(image).refcount_table_offset;
        let block = be64(image, at);
        put64(image, at, block + 512);
    }),
    ("the refcount block lies past the end", |image| {
        let at = header(image).refcount_table_offset;
        let end = (image.len() as u64).next_multiple_of(header(image).cluster_size());
        let wild = end + 3 * header(image).cluster_size();
        put64(image, at, wild);
    }),
    ("the refcount block is the L1 table", |image| {
        let at = header(image).refcount_table_offset;
        let l1 = header(image).l1_offset;
        put64(image, at, l1);
    }),
    ("refcount blocks are one and the same", |image| {
        let at = header(image).refcount_table_offset;
        let block = be64(image, at);
        put64(image, at + 8, block);
    }),
    ("the refcount table lies nowhere", |image| {
        edit_header(image, |header| header.refcount_table_offset = 0);
    }),
    ("the refcount table has no clusters", |image| {
        edit_header(image, |header| header.refcount_table_clusters = 0);
    }),
    ("the refcount table is data", |image| {
        let data = host(image, 0) << header(image).cluster_bits;
        edit_header(image, |header| header.refcount_table_offset = data);
    }),
    ("all refcounts are 0", |image| {
        let at = refcount_at(image, 0) as usize;
        let cluster = header(image).cluster_size() as usize;
        image[at..at + cluster].fill(0);
    }),
    ("it is marked dirty, and a refcount is wrong", |image| {
        let at = refcount_at(image, host(image, 0)) as usize;
        image[at..at + 2].fill(0);
        edit_header(image, |header| header.incompatible |= incompatible::DIRTY);
    }),
    ("it is marked corrupt", |image| {
        edit_header(image, |header| header.incompatible |= incompatible::CORRUPT);
    }),
];

fn try_damages(options: &str, damages: &[Damage]) {
    let folder = Folder::new();
    let good = make(&folder, options);
    let seen = content(&good);
    for (what, damage) in damages {
        let mut image = good.clone();
        damage(&mut image);
        std::fs::write(folder.path("image"), &image).expect("written");
        let ours = run(&folder, "image", Repair::Nothing);
        assert_eq!(std::fs::read(folder.path("image")).expect("read"), image, "{what}: only read");
        let no_table = what.starts_with("the refcount table");
        if !no_table {
            let theirs = folder.check("image");
            let count = |name: &str| theirs[name].as_u64().unwrap_or(0);
            // QEMU does not look at refcounts past the file's end.
            let all = what.ends_with("the L1 table") || what.ends_with("one and the same");
            assert!(all || ours.leaks == count("leaks"), "{what}: {ours:?} {theirs}");
            assert_eq!(ours.corruptions > 0, count("corruptions") > 0, "{what}: {ours:?} {theirs}");
            assert_eq!(ours.allocated_clusters, count("allocated-clusters"), "{what}: {theirs}");
            assert_eq!(ours.fragmented_clusters, count("fragmented-clusters"), "{what}: {theirs}");
            assert_eq!(ours.total_clusters, count("total-clusters"), "{what}: {theirs}");
        }
        let repaired = run(&folder, "image", Repair::All);
        assert!(repaired.is_clean(), "{what}: {repaired:?}");
        assert_eq!(repaired.corruptions_fixed, ours.corruptions, "{what}");
        assert_eq!(repaired.leaks_fixed, ours.leaks, "{what}");
        folder.assert_clean("image");
        let after = std::fs::read(folder.path("image")).expect("read");
        assert!(content(&after) == seen, "{what}: the disk's content");
        folder.io("image", &["write -P 9 0 3M", "discard 4M 2M", "read -P 9 0 3M"]);
        folder.assert_clean("image");
    }
}

#[test]
fn damage_is_found_and_repaired() {
    try_damages("cluster_size=64k", &DAMAGES[..9]);
}

#[test]
fn worse_damage_is_found_and_repaired() {
    try_damages("cluster_size=4k,lazy_refcounts=on", &DAMAGES[9..]);
}

#[test]
fn subclusters_are_looked_at_too() {
    let some: Vec<Damage> = DAMAGES.into_iter().step_by(3).collect();
    try_damages("cluster_size=16k,extended_l2=on", &some);
}

/// Only leaks are repaired where that is asked; their bytes stay.
#[test]
fn leaks_alone_are_repaired() {
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new();
    let mut image = make(&folder, "cluster_size=64k");
    let end = image.len().next_multiple_of(65536);
    image.resize(end + (4 << 20), 0xee);
    for cluster in 0..64 {
        let at = refcount_at(&image, end as u64 / 65536 + cluster) as usize;
        image[at + 1] = 1;
    }
    std::fs::write(folder.path("image"), &image).expect("written");
    let blocks = || std::fs::metadata(folder.path("image")).expect("there").blocks() * 512;
    let before = blocks();
    let report = run(&folder, "image", Repair::Leaks);
    assert_eq!((report.leaks, report.leaks_fixed, report.corruptions), (0, 64, 0));
    folder.assert_clean("image");
    assert!(blocks() >= before, "{} of {before}", blocks());

    let mut image = make(&folder, "cluster_size=64k");
    let at = refcount_at(&image, host(&image, 0)) as usize;
    image[at..at + 2].fill(0);
    std::fs::write(folder.path("image"), &image).expect("written");
    assert_ne!(run(&folder, "image", Repair::Leaks).corruptions, 0);
    assert_eq!(std::fs::read(folder.path("image")).expect("read"), image);
}

/// Two guest clusters in one: neither is lost, and a write to one leaves the other.
#[test]
fn overlaps_are_made_safe() {
    let folder = Folder::new();
    let mut image = make(&folder, "cluster_size=64k");
    let (one, other) = (l2_entry_at(&image, 0), l2_entry_at(&image, 16));
    let entry = be64(&image, other);
    put64(&mut image, one, entry);
    std::fs::write(folder.path("image"), &image).expect("written");
    assert_ne!(run(&folder, "image", Repair::Nothing).corruptions, 0);
    let report = run(&folder, "image", Repair::All);
    assert!(report.is_clean(), "{report:?}");
    folder.assert_clean("image");
    folder.io("image", &["write -P 8 0 64k", "read -P 2 1M 64k", "read -P 8 0 64k"]);

    // Data where a table lies: the table moves, or is no longer written in place.
    for target in 0..4 {
        let mut image = make(&folder, "cluster_size=64k");
        let facts = header(&image);
        let table = match target {
            0 => facts.l1_offset,
            1 => facts.refcount_table_offset,
            2 => be64(&image, facts.refcount_table_offset),
            _ => be64(&image, facts.l1_offset) & !COPIED,
        };
        let at = l2_entry_at(&image, 0);
        put64(&mut image, at, table | COPIED);
        std::fs::write(folder.path("image"), &image).expect("written");
        let held = content(&image)[..65536].to_vec();
        let report = run(&folder, "image", Repair::All);
        assert!(report.is_clean(), "{target}: {report:?}");
        folder.assert_clean("image");
        let after = std::fs::read(folder.path("image")).expect("read");
        if target < 3 {
            assert_eq!(content(&after)[..65536], held, "{target}");
        }
        folder.io("image", &["write -P 8 0 64k", "write -P 7 6M 64k", "read -P 2 1M 64k"]);
        folder.assert_clean("image");
    }
}

/// Nothing else is wrong than that data lies in the refcount block.
#[test]
fn data_in_the_refcount_block_is_made_safe() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "64M"]);
    folder.io("image", &["write 0 64k"]);
    let mut image = std::fs::read(folder.path("image")).expect("the image");
    let unused = refcount_at(&image, host(&image, 0)) as usize;
    image[unused..unused + 2].fill(0);
    let block = be64(&image, header(&image).refcount_table_offset);
    let at = l2_entry_at(&image, 0);
    put64(&mut image, at, block | COPIED);
    std::fs::write(folder.path("image"), &image).expect("written");
    // QEMU counts the cluster and the block.
    assert_eq!(run(&folder, "image", Repair::Nothing).corruptions, 2);
    assert_eq!(folder.check("image")["corruptions"].as_u64(), Some(2));
    let report = run(&folder, "image", Repair::All);
    assert!(report.is_clean(), "{report:?}");
    folder.assert_clean("image");
    folder.io("image", &["write -P 8 0 64k", "write -P 7 6M 64k", "read -P 8 0 64k"]);
    folder.assert_clean("image");
}

/// What a pointer led to cannot be known: it stays, and nothing is put where it leads.
#[test]
fn pointers_to_nowhere_are_told_and_left() {
    let folder = Folder::new();
    let good = make(&folder, "cluster_size=64k");
    let end = (good.len() as u64).next_multiple_of(65536);
    for wild in [end, end + 65536, end + (1 << 40), 0x11200, (1 << 55) + 512] {
        let mut image = good.clone();
        let at = l2_entry_at(&image, 0);
        put64(&mut image, at, wild | COPIED);
        // Something to repair beside it.
        let refcount = refcount_at(&image, host(&image, 1)) as usize;
        image[refcount..refcount + 2].fill(0);
        std::fs::write(folder.path("image"), &image).expect("written");
        assert!(run(&folder, "image", Repair::Nothing).corruptions >= 2, "{wild:#x}");
        let repaired = with(&folder.path("image"), async move |io, container| {
            check(&io, &container, Repair::All).await
        });
        // The file does not grow over what was perhaps cut off, which would read as zeros.
        match repaired {
            Err(error) if wild <= end + 65536 => {
                assert!(error.to_string().contains("bring the rest back"), "{wild:#x}: {error}");
            }
            repaired => {
                let report = repaired.unwrap_or_else(|error| panic!("{wild:#x}: {error}"));
                assert!(matches!(report.corruptions, 1 | 2), "{wild:#x}: {report:?}");
                assert!(wild != end && wild != end + 65536, "{wild:#x}: {report:?}");
            }
        }
        let after = std::fs::read(folder.path("image")).expect("read");
        assert_eq!(be64(&after, l2_entry_at(&after, 0)), wild | COPIED);
        assert_ne!(folder.check("image")["corruptions"].as_u64(), None);
    }
}

/// One flipped bit of an L1 entry: all that lies below looks like leaks, and is there again with the bit.
#[test]
fn what_a_damaged_pointer_led_to_is_not_lost() {
    let folder = Folder::new();
    let good = make(&folder, "cluster_size=64k");
    let seen = content(&good);
    let path = folder.path("image");
    let l1 = header(&good).l1_offset;
    let entry = be64(&good, l1);
    let damaged = |flags: u64| {
        let mut image = good.clone();
        edit_header(&mut image, |header| header.incompatible |= flags);
        put64(&mut image, l1, entry | 0x200);
        std::fs::write(&path, &image).expect("written");
        image
    };
    let now = || std::fs::read(&path).expect("read");

    let image = damaged(0);
    let report = run(&folder, "image", Repair::Leaks);
    assert!(report.corruptions > 0 && report.leaks > 4 && report.leaks_fixed == 0, "{report:?}");
    assert!(report.messages[0].contains("no cluster is freed"), "{report:?}");
    assert!(now() == image, "it was only read");

    // Whoever opens it did not ask for a repair.
    let image = damaged(incompatible::DIRTY);
    let options = ringtap_image::OpenOptions {
        format: Some(ringtap_image::Format::Qcow2),
        cache: ringtap_image::CacheMode::Writeback,
        no_restart_log: true,
        ..ringtap_image::OpenOptions::default()
    };
    let error = ringtap_image::open(&path, &options).err().expect("it needs a repair").to_string();
    assert!(error.contains("cannot be repaired"), "{error}");
    assert!(now() == image, "it was only read");

    // Nor is it freed on request.
    damaged(0);
    let report = run(&folder, "image", Repair::All);
    assert!(report.leaks > 4 && report.leaks_fixed == 0, "{report:?}");
    assert!(report.messages[0].contains("no cluster is freed"), "{report:?}");
    let mut after = now();
    let at = header(&after).l1_offset;
    put64(&mut after, at, entry);
    assert!(content(&after) == seen);
}

/// However often it is repaired, and whatever a guest then writes: with the bit put right everything is there again.
#[test]
fn what_a_damaged_pointer_led_to_outlives_repairs_and_writes() {
    let folder = Folder::new();
    let good = make(&folder, "cluster_size=64k");
    let seen = content(&good);
    let path = folder.path("image");
    let now = || std::fs::read(&path).expect("read");
    let entry = be64(&good, l2_entry_at(&good, 0));
    for lost in [false, true] {
        let mut image = good.clone();
        let at = l2_entry_at(&image, 0);
        put64(&mut image, at, entry | 0x200);
        // Something to repair beside it; and the cluster that is lost to sight is not even said to be used.
        let mut free = vec![host(&image, 1)];
        free.extend(lost.then_some((entry & !COPIED) >> 16));
        for cluster in free {
            let refcount = refcount_at(&image, cluster) as usize;
            image[refcount..refcount + 2].fill(0);
        }
        std::fs::write(&path, &image).expect("written");
        for _ in 0..3 {
            let report = run(&folder, "image", Repair::All);
            assert!(report.corruptions > 0 && report.leaks_fixed == 0, "{report:?}");
        }
        if !lost {
            folder.io("image", &["write -P 9 6M 1M"]);
        }
        let mut after = now();
        let at = l2_entry_at(&after, 0);
        put64(&mut after, at, entry);
        assert!(content(&after)[..6 << 20] == seen[..6 << 20], "{lost}");
    }
}

/// Where the refcounts are lost as well, nobody knows which cluster a pointer led to that leads nowhere.
#[test]
fn nothing_is_repaired_where_what_a_pointer_led_to_would_look_free() {
    let folder = Folder::new();
    let mut image = make(&folder, "cluster_size=64k");
    let (table, data) = (header(&image).refcount_table_offset, l2_entry_at(&image, 0));
    for at in [table, data] {
        let entry = be64(&image, at);
        put64(&mut image, at, entry | 0x200);
    }
    let path = folder.path("image");
    std::fs::write(&path, &image).expect("written");
    assert!(run(&folder, "image", Repair::Nothing).corruptions >= 2);
    let report = run(&folder, "image", Repair::All);
    let said = &report.messages[0];
    assert!(said.contains("would look free") && said.contains("new image"), "{report:?}");
    assert!(report.corruptions >= 2 && report.corruptions_fixed == 0, "{report:?}");
    assert!(std::fs::read(&path).expect("read") == image);
}

/// What a snapshot holds is not known then: what looks like leaks may be its tables and data.
#[test]
fn nothing_is_repaired_where_the_table_of_a_snapshot_cannot_be() {
    let folder = Folder::new();
    make(&folder, "cluster_size=64k");
    folder.img(&["snapshot", "-c", "one", "image"]);
    folder.io("image", &["write -P 5 0 256k"]);
    let mut image = std::fs::read(folder.path("image")).expect("the image");
    let first = header(&image).snapshots_offset;
    let l1 = be64(&image, first);
    let path = folder.path("image");
    for offset in [l1 + 512, 1 << 40] {
        put64(&mut image, first, offset);
        std::fs::write(&path, &image).expect("written");
        let found = run(&folder, "image", Repair::Nothing);
        assert!(found.corruptions == 1 && found.leaks > 0, "{found:?}");
        for repair in [Repair::Leaks, Repair::All] {
            let report = run(&folder, "image", repair);
            assert!(report.messages[0].contains("nothing is repaired"), "{report:?}");
            let counts = [report.corruptions, report.leaks, report.corruptions_fixed];
            assert_eq!((counts, report.leaks_fixed), ([1, found.leaks, 0], 0), "{report:?}");
            assert!(std::fs::read(&path).expect("read") == image, "{offset:#x}");
        }
    }
}

/// A few bytes in a sparse file claim a header that it would take hours to count.
#[test]
fn a_luks_header_without_end_is_refused() {
    let folder = Folder::new();
    let mut image = make(&folder, "cluster_size=4k");
    let place = [4096u64, (16 << 20) + 1].map(u64::to_be_bytes).concat();
    edit_header(&mut image, |header| header.set_extension(extension::ENCRYPTION, Some(place)));
    let path = folder.path("image");
    std::fs::write(&path, &image).expect("written");
    let file = std::fs::File::options().write(true).open(&path).expect("opened");
    file.set_len(1 << 40).expect("its length");
    let error = with(&path, |io, container| async move {
        check(&io, &container, Repair::Nothing).await.expect_err("no header is so long")
    });
    assert!(error.to_string().contains("longer than 16 MiB"), "{error}");
}

/// Images with compressed clusters, made by QEMU: each cluster decodes, and all are counted.
#[test]
fn compressed_images_are_read_and_clean() {
    let folder = Folder::new();
    let mut rng = fastrand::Rng::with_seed(4);
    let mut disk: Vec<u8> = (0..1u32 << 20).map(|at| (at >> 9) as u8 ^ (at as u8 & 3)).collect();
    // Some that does not get smaller, and some that is zeros.
    disk[300_000..500_000].iter_mut().for_each(|byte| *byte = rng.u8(..));
    disk[700_000..900_000].fill(0);
    std::fs::write(folder.path("disk"), &disk).expect("written");
    for options in [
        "cluster_size=64k",
        "cluster_size=512,compat=0.10",
        "cluster_size=2M,compression_type=zstd",
        "cluster_size=4k,compression_type=zstd",
        "cluster_size=16k,extended_l2=on",
    ] {
        let args = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "disk", "image"];
        folder.img(&args);
        let image = std::fs::read(folder.path("image")).expect("read");
        assert!(content(&image) == disk, "{options}");
        let (ours, theirs) = (run(&folder, "image", Repair::Nothing), folder.check("image"));
        assert!(ours.is_clean(), "{options}: {ours:?}");
        for (number, name) in [
            (ours.allocated_clusters, "allocated-clusters"),
            (ours.compressed_clusters, "compressed-clusters"),
            (ours.fragmented_clusters, "fragmented-clusters"),
            (ours.total_clusters, "total-clusters"),
            (ours.image_end, "image-end-offset"),
        ] {
            assert_eq!(number, theirs[name].as_u64().unwrap_or(0), "{options}: {name}");
        }
    }
}

/// What other tools put into an image is known to be in use.
#[test]
fn everything_in_an_image_is_counted() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "1G"]);
    folder.img(&["bitmap", "--add", "image", "one"]);
    folder.img(&["bitmap", "--add", "-g", "512", "image", "two"]);
    folder.io("image", &["write 1M 64k", "write 900M 512", "write 10M 20M"]);
    folder.img(&["snapshot", "-c", "here", "image"]);
    let before = std::fs::read(folder.path("image")).expect("read");
    let report = run(&folder, "image", Repair::All);
    assert!(report.is_clean() && report.leaks_fixed == 0, "{report:?}");
    assert!(std::fs::read(folder.path("image")).expect("read") == before);
}

/// Bitmaps that nobody kept up to date are leaks, and nothing points to them after a repair; the
/// bits of unknown features that a writer must clear are cleared.
#[test]
fn what_is_out_of_date_goes() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "1G"]);
    folder.img(&["bitmap", "--add", "image", "one"]);
    folder.io("image", &["write 1M 64k"]);
    let mut image = std::fs::read(folder.path("image")).expect("read");
    edit_header(&mut image, |header| header.autoclear = 1 << 40);
    std::fs::write(folder.path("image"), &image).expect("written");
    let report = run(&folder, "image", Repair::Leaks);
    assert!(report.is_clean() && report.leaks_fixed >= 3, "{report:?}");
    folder.assert_clean("image");
    let after = header(&std::fs::read(folder.path("image")).expect("read"));
    assert_eq!((after.autoclear, after.extension(extension::BITMAPS)), (0, None));
}
