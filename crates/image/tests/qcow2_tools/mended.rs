//! Entries of L2 tables that contradict themselves, of which is known all the same what the disk holds.

use ringtap_image::qcow2::header::{COPIED, ZERO};
use ringtap_image::qcow2::{Repair, check};

use crate::check::run;
use crate::guest::{be64, content, header, l2_entry_at, put64};
use crate::oracle::Folder;
use crate::power::{small, try_cuts};

/// Zeros that are said to lie where nothing can be.
fn nowhere(image: &mut [u8], cluster: u64, offset: u64) {
    let at = l2_entry_at(image, cluster);
    put64(image, at, offset | COPIED | ZERO);
}

#[test]
fn zeros_need_no_place() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "8M"]);
    folder.io("image", &["write -P 1 0 64k", "write -z 64k 64k", "write -P 2 128k 64k"]);
    // A snapshot has its own table.
    folder.img(&["snapshot", "-c", "one", "image"]);
    folder.io("image", &["write -P 3 128k 64k"]);
    let good = std::fs::read(folder.path("image")).expect("the image");
    for offset in [0x2a00, 0x52a00, 1 << 40] {
        let mut image = good.clone();
        nowhere(&mut image, 1, offset);
        std::fs::write(folder.path("image"), &image).expect("written");
        let found = run(&folder, "image", Repair::Nothing);
        assert_eq!(found.corruptions, 1, "{offset:#x}: {found:?}");
        let report = run(&folder, "image", Repair::All);
        assert!(report.is_clean() && report.corruptions_fixed == 1, "{offset:#x}: {report:?}");
        folder.assert_clean("image");
        let after = std::fs::read(folder.path("image")).expect("read");
        assert_eq!(be64(&after, l2_entry_at(&after, 1)), ZERO);
        folder.io("image", &["read -P 0 64k 64k", "read -P 3 128k 64k", "write -P 4 64k 64k"]);
        folder.img(&["snapshot", "-a", "one", "image"]);
        folder.io("image", &["read -P 1 0 64k", "read -P 0 64k 64k", "read -P 2 128k 64k"]);
        folder.assert_clean("image");
    }
}

#[test]
fn zeros_need_no_place_whenever_the_power_is_cut() {
    let folder = Folder::new();
    let mut image = small(&folder, "cluster_size=1k");
    nowhere(&mut image, 2, 0x2a00);
    nowhere(&mut image, 3, 1 << 40);
    // And a refcount is wrong.
    let block = be64(&image, header(&image).refcount_table_offset) as usize;
    image[block + 8..block + 12].fill(3);
    try_cuts(&image, true, |io, container| async move {
        let report = check(&io, &container, Repair::All).await.expect("repaired");
        assert!(report.is_clean(), "{report:?}");
    });
}

/// The bitmap of a guest cluster.
fn bitmap_at(image: &[u8], cluster: u64) -> u64 {
    l2_entry_at(image, cluster) + 8
}

#[test]
fn subclusters_that_are_data_and_zeros_are_zeros() {
    let folder = Folder::new();
    let options = "extended_l2=on,cluster_size=64k";
    folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", "1M"]);
    folder.io("image", &["write -P 1 0 128k"]);
    let good = std::fs::read(folder.path("image")).expect("the image");
    for damage in 0..3 {
        let mut image = good.clone();
        let (entry, bitmap) = (l2_entry_at(&image, 1), bitmap_at(&image, 1));
        match damage {
            // The first subcluster of the second cluster is both; the others hold what they held.
            0 => put64(&mut image, bitmap, 1 << 32 | 0xffff_ffff),
            // Data without a place.
            1 => {
                let unused = l2_entry_at(&image, 4);
                put64(&mut image, unused + 8, 1 << 33 | 1);
            }
            // Zeros in a place that cannot be.
            _ => {
                let place = be64(&image, entry);
                put64(&mut image, entry, place | 0x200);
                put64(&mut image, bitmap, 0xffff_ffff << 32);
            }
        }
        std::fs::write(folder.path("image"), &image).expect("written");
        assert_ne!(run(&folder, "image", Repair::Nothing).corruptions, 0, "{damage}");
        assert_ne!(folder.check("image")["corruptions"].as_u64(), None, "{damage}");
        let report = run(&folder, "image", Repair::All);
        assert!(report.is_clean(), "{damage}: {report:?}");
        folder.assert_clean("image");
        match damage {
            0 => folder.io("image", &["read -P 0 64k 2k", "read -P 1 66k 62k"]),
            1 => folder.io("image", &["read -P 1 0 128k", "read -P 0 256k 64k"]),
            _ => folder.io("image", &["read -P 1 0 64k", "read -P 0 64k 64k"]),
        }
        let after = std::fs::read(folder.path("image")).expect("read");
        assert!(content(&after)[..64 << 10].iter().all(|byte| *byte == 1));
    }
}
