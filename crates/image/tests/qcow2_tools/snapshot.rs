use ringtap_image::qcow2::{
    ToolError, apply_snapshot, create_snapshot, delete_snapshot, list_snapshots,
};

use crate::oracle::{Folder, with};

#[derive(Clone, Copy)]
enum Deed {
    Create(&'static str),
    Apply(&'static str),
    Delete(&'static str),
}

fn deed(folder: &Folder, deed: Deed) -> Result<(), ToolError> {
    with(&folder.path("image"), move |io, container| async move {
        match deed {
            Deed::Create(name) => {
                create_snapshot(&io, &container, name, (1_700_000_000, 0)).await.map(drop)
            }
            Deed::Apply(name) => apply_snapshot(&io, &container, name).await,
            Deed::Delete(name) => delete_snapshot(&io, &container, name).await,
        }
    })
}

fn names(folder: &Folder) -> Vec<String> {
    with(&folder.path("image"), |io, container| async move {
        let snapshots = list_snapshots(&io, &container).await.expect("listed");
        snapshots.into_iter().map(|snapshot| snapshot.name).collect()
    })
}

fn live(options: &str) {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", "20M"]);
    let is = |pattern: &str| {
        folder.assert_clean("image");
        folder.io("image", &[&format!("read -P {pattern} 1M 2M"), "read -P 0 4M 1M"]);
    };
    folder.io("image", &["write -P 1 1M 2M", "write -P 5 12M 100k"]);
    deed(&folder, Deed::Create("one")).expect("made");
    is("1");
    folder.io("image", &["write -P 2 1M 2M", "write -z 12M 64k", "write -P 6 18M 1M"]);
    deed(&folder, Deed::Create("two")).expect("made");
    is("2");
    // QEMU takes one in between.
    folder.io("image", &["write -P 3 1M 2M", "discard 18M 1M"]);
    folder.img(&["snapshot", "-c", "three", "image"]);
    is("3");
    folder.io("image", &["write -P 4 1M 2M"]);
    assert_eq!(names(&folder), ["one", "two", "three"]);
    let listed = folder.img(&["snapshot", "-l", "image"]);
    for (id, name) in [("1", "one"), ("2", "two"), ("3", "three")] {
        assert!(
            listed.lines().any(|line| {
                let mut words = line.split_whitespace();
                words.next() == Some(id) && words.next() == Some(name)
            }),
            "{listed}"
        );
    }
    // What each holds, as QEMU reads it.
    for (name, pattern) in [("one", "1"), ("two", "2"), ("three", "3")] {
        folder.img(&["convert", "-l", name, "-O", "qcow2", "image", "copy"]);
        folder.io("copy", &[&format!("read -P {pattern} 1M 2M")]);
    }
    deed(&folder, Deed::Apply("one")).expect("applied");
    is("1");
    folder.io("image", &["read -P 5 12M 100k", "read -P 0 18M 1M", "write -P 9 1M 1M"]);
    deed(&folder, Deed::Apply("three")).expect("applied");
    is("3");
    deed(&folder, Deed::Delete("1")).expect("deleted by its ID");
    is("3");
    folder.img(&["snapshot", "-a", "two", "image"]);
    is("2");
    folder.img(&["snapshot", "-d", "two", "image"]);
    is("2");
    folder.io("image", &["write -P 2 1M 2M"]);
    deed(&folder, Deed::Delete("three")).expect("deleted");
    is("2");
    assert_eq!(names(&folder), [""; 0]);
    folder.io("image", &["write -P 7 0 20M"]);
    folder.assert_clean("image");
    let error = deed(&folder, Deed::Apply("one")).expect_err("it is gone").to_string();
    assert!(error.contains("no snapshot \"one\""), "{error}");
}

#[test]
fn snapshots_hold_what_they_held() {
    live("cluster_size=64k");
}

#[test]
fn snapshots_of_version_2() {
    live("compat=0.10,cluster_size=4k");
}

#[test]
fn snapshots_with_subclusters_and_wide_refcounts() {
    live("extended_l2=on,cluster_size=32k,refcount_bits=64");
}

#[test]
fn a_snapshot_too_many_for_the_refcounts_is_refused() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "-o", "refcount_bits=2", "image", "1M"]);
    folder.io("image", &["write -P 1 0 1M"]);
    deed(&folder, Deed::Create("one")).expect("made");
    deed(&folder, Deed::Create("two")).expect("made");
    let before = std::fs::read(folder.path("image")).expect("read");
    let error = deed(&folder, Deed::Create("three")).expect_err("too many").to_string();
    assert!(error.contains("refcount_bits"), "{error}");
    let after = std::fs::read(folder.path("image")).expect("read");
    assert_eq!(before, after[..before.len()]);
    folder.assert_clean("image");
    let error = deed(&folder, Deed::Create("two")).expect_err("there").to_string();
    assert!(error.contains("has a snapshot"), "{error}");
}

/// Snapshots remember the size the disk had.
#[test]
fn sizes_come_back() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "image", "1M"]);
    folder.io("image", &["write -P 1 0 1M"]);
    deed(&folder, Deed::Create("small")).expect("made");
    folder.img(&["resize", "-q", "image", "9M"]);
    folder.io("image", &["write -P 2 8M 1M"]);
    deed(&folder, Deed::Create("large")).expect("made");
    deed(&folder, Deed::Apply("small")).expect("applied");
    folder.assert_clean("image");
    assert_eq!(folder.info("image")["virtual-size"].as_u64(), Some(1 << 20));
    folder.io("image", &["read -P 1 0 1M"]);
    deed(&folder, Deed::Apply("large")).expect("applied");
    folder.assert_clean("image");
    folder.io("image", &["read -P 1 0 1M", "read -P 2 8M 1M"]);
}
