use std::sync::Arc;

use ringtap_image::qcow2::{
    BitmapChange, BitmapSet, Bits, ToolError, change_bitmaps, list_bitmaps, load_bitmap,
};
use serde_json::Value;

use crate::oracle::{Folder, with};
use crate::power::{small, try_cuts};

fn change(folder: &Folder, changes: Vec<BitmapChange>) -> Result<(), ToolError> {
    with(&folder.path("image"), |io, container| async move {
        change_bitmaps(&io, &container, &changes).await
    })
}

fn load(folder: &Folder, name: &'static str) -> Bits {
    with(&folder.path("image"), move |io, container| async move {
        load_bitmap(&io, &container, name).await.expect("loaded")
    })
}

fn add(name: &str, granularity: Option<u64>) -> BitmapChange {
    BitmapChange::Add { name: name.to_owned(), granularity }
}

/// What QEMU says of the bitmaps: name, granularity, flags.
fn told(folder: &Folder) -> Vec<(String, u64, Vec<String>)> {
    let info = folder.info("image");
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
    let tell = |bitmap: Value| {
        let flags = bitmap["flags"].as_array().expect("flags").iter();
        let flags = flags.map(|flag| flag.as_str().expect("a word").to_owned()).collect();
        let granularity = bitmap["granularity"].as_u64().expect("a number");
        (bitmap["name"].as_str().expect("a name").to_owned(), granularity, flags)
    };
    bitmaps.unwrap_or_default().into_iter().map(tell).collect()
}

/// The dirty ranges as QEMU shows them over NBD.
fn over_nbd(folder: &Folder, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let args =
        ["--json", &map, "--", "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, "image", "]"];
    let map: Vec<Value> = serde_json::from_str(&folder.run("nbdinfo", &args)).expect("json");
    let number = |extent: &Value, name: &str| extent[name].as_u64().expect("a number");
    let dirty = map.iter().filter(|extent| number(extent, "type") == 1);
    dirty.map(|extent| (number(extent, "offset"), number(extent, "length"))).collect()
}

#[test]
fn bitmaps_are_those_qemu_knows() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "image", "200M"]);
    change(&folder, vec![add("one", None), add("two", Some(65536))]).expect("added");
    folder.assert_clean("image");
    let auto = || vec!["auto".to_owned()];
    assert_eq!(told(&folder), [("one".into(), 4096, auto()), ("two".into(), 65536, auto())]);

    // QEMU notes writes in them; we read what it noted.
    folder.io("image", &["write 1M 10k", "write 150M 3M"]);
    folder.assert_clean("image");
    let one: Vec<_> = load(&folder, "one").runs().collect();
    assert_eq!(one, [(1 << 20, 12288), (150 << 20, 3 << 20)]);
    assert_eq!(one, over_nbd(&folder, "one"));
    change(&folder, vec![BitmapChange::Disable("one".into()), add("three", Some(1 << 20))])
        .expect("changed");
    folder.io("image", &["write 80M 1M"]);
    assert_eq!(one, load(&folder, "one").runs().collect::<Vec<_>>());
    assert_eq!(over_nbd(&folder, "three"), [(80 << 20, 1 << 20)]);

    // Merged by us and by QEMU.
    let from = Arc::new(load(&folder, "two"));
    change(
        &folder,
        vec![
            BitmapChange::Merge { into: "three".into(), from },
            BitmapChange::Enable("one".into()),
        ],
    )
    .expect("merged");
    folder.assert_clean("image");
    let three = [(1 << 20, 1 << 20), (80 << 20, 1 << 20), (150 << 20, 3 << 20)];
    assert_eq!(over_nbd(&folder, "three"), three);
    folder.img(&["bitmap", "--merge", "three", "image", "one"]);
    assert_eq!(load(&folder, "one").runs().collect::<Vec<_>>(), three);
    folder.img(&["bitmap", "--clear", "image", "three"]);
    assert_eq!(load(&folder, "three").count(), 0);

    // One that was not saved can only be removed.
    change(&folder, vec![BitmapChange::Clear("one".into())]).expect("cleared");
    assert_eq!(over_nbd(&folder, "one"), []);
    let error = change(&folder, vec![add("two", None)]).expect_err("it is there").to_string();
    assert!(error.contains("bitmap \"two\" already"), "{error}");
    let all = ["one", "two", "three"].map(|name| BitmapChange::Remove(name.to_owned()));
    change(&folder, all.to_vec()).expect("removed");
    assert_eq!(told(&folder), []);
    folder.assert_clean("image");
}

/// Writes noted while the image is in use.
#[test]
fn a_set_in_use_is_not_believed_before_it_is_stored() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "1G"]);
    change(&folder, vec![add("on", None), add("off", None), BitmapChange::Disable("off".into())])
        .expect("added");
    let path = folder.path("image");
    let set = with(&path, |io, container| async move {
        BitmapSet::open(&io, &container).await.expect("opened")
    });
    assert_eq!(set.names().collect::<Vec<_>>(), ["on"]);
    let flags =
        |name: &str| told(&folder).into_iter().find(|bitmap| bitmap.0 == name).expect("there").2;
    assert_eq!((flags("on"), flags("off")), (vec!["in-use".into(), "auto".into()], vec![]));
    let error = change(&folder, vec![BitmapChange::Clear("on".into())]).expect_err("in use");
    assert!(error.to_string().contains("can only be removed"), "{error}");
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let set = &set;
            scope.spawn(move || {
                (0..100).for_each(|at| set.note((at * 4 + thread) << 20, 1000));
            });
        }
    });
    let noted: Vec<_> = set.get("on").expect("there").runs().collect();
    assert_eq!(noted.len(), 200);
    with(&path, |io, container| async move {
        set.store(&io, &container).await.expect("stored");
        let entries = list_bitmaps(&io, &container).await.expect("listed");
        assert!(entries.iter().all(|entry| entry.is_usable()));
    });
    assert_eq!(over_nbd(&folder, "on").len(), 100 * 2);
    assert_eq!(load(&folder, "on").runs().collect::<Vec<_>>(), noted);
    folder.assert_clean("image");
}

/// What lacks writes is merged into nothing, as QEMU has it.
#[test]
fn a_bitmap_that_was_not_saved_is_no_source() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "1G"]);
    change(&folder, vec![add("lost", None), add("into", None)]).expect("added");
    let path = folder.path("image");
    // Killed before it stored what it had noted.
    drop(with(&path, |io, container| async move {
        BitmapSet::open(&io, &container).await.expect("opened")
    }));
    change(&folder, vec![BitmapChange::Remove("into".into()), add("into", None)]).expect("anew");
    let output = std::process::Command::new("qemu-img")
        .args(["bitmap", "--merge", "lost", "-f", "qcow2"])
        .args([path.as_os_str(), "into".as_ref()])
        .output()
        .expect("qemu-img runs");
    let theirs = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && theirs.contains("inconsistent"), "{theirs}");
    let ours = with(&path, |io, container| async move {
        load_bitmap(&io, &container, "lost").await.expect_err("it was not saved")
    });
    assert!(ours.to_string().contains("\"lost\" was not saved"), "{ours}");
}

/// Memory is bounded, whatever the image says; what is disabled takes none.
#[test]
fn more_than_fits_in_memory_is_refused() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "256G"]);
    let open = || {
        with(&folder.path("image"), |io, container| async move {
            BitmapSet::open(&io, &container).await.map_err(|error| error.to_string())
        })
    };
    change(&folder, vec![add("fine", Some(512))]).expect("added");
    let error = open().expect_err("too much");
    assert!(error.contains("65 MiB") && error.contains("--disable"), "{error}");
    change(&folder, vec![BitmapChange::Disable("fine".into())]).expect("disabled");
    assert!(open().expect("opened").is_empty());
    let many = (0..65).map(|number| add(&number.to_string(), Some(1 << 30)));
    change(&folder, many.collect()).expect("added");
    let error = open().expect_err("too many");
    assert!(error.contains("65 enabled bitmaps"), "{error}");
    change(&folder, vec![BitmapChange::Disable("64".into())]).expect("disabled");
    assert_eq!(open().expect("opened").names().count(), 64);
}

#[test]
fn a_power_cut_leaves_all_bitmaps_or_none_of_the_change() {
    let folder = Folder::new();
    for options in ["cluster_size=512", "cluster_size=4k"] {
        let image = small(&folder, options);
        let bench = try_cuts(&image, false, |io, container| async move {
            let changes = [add("one", Some(512)), add("two", None)];
            change_bitmaps(&io, &container, &changes).await.expect("added");
        });
        let bytes = bench.bytes();
        let bench = try_cuts(&bytes, false, |io, container| async move {
            let set = BitmapSet::open(&io, &container).await.expect("opened");
            set.note(5000, 70_000);
            set.store(&io, &container).await.expect("stored");
        });
        let bytes = bench.bytes();
        try_cuts(&bytes, false, |io, container| async move {
            let before = list_bitmaps(&io, &container).await.expect("listed");
            assert_eq!(before.len(), 2);
            let remove = [BitmapChange::Remove("one".to_owned())];
            change_bitmaps(&io, &container, &remove).await.expect("removed");
        });
    }
}
