use ringtap_image::qcow2::{
    BitmapChange, Preallocation, ResizeOptions, change_bitmaps, create_snapshot, load_bitmap,
    resize,
};

use crate::oracle::{Folder, open, with};
use crate::power::{small, try_cuts};

fn size(folder: &Folder, image: &str, options: ResizeOptions) -> Result<(), String> {
    with(&folder.path(image), move |io, container| async move {
        resize(&io, &container, None, &options).await.map_err(|error| error.to_string())
    })
}

fn grow(size: u64) -> ResizeOptions {
    ResizeOptions { size, ..ResizeOptions::default() }
}

fn shrink(size: u64) -> ResizeOptions {
    ResizeOptions { size, shrink: true, ..ResizeOptions::default() }
}

/// The same sizes by us and by QEMU, with data at the ends.
#[test]
fn disks_grow_and_shrink_as_with_qemu_img() {
    let folder = Folder::new();
    for options in [
        "cluster_size=512",
        "cluster_size=64k",
        "cluster_size=16k,extended_l2=on,refcount_bits=1",
        "compat=0.10,cluster_size=4k",
    ] {
        folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "ours", "5M"]);
        folder.io("ours", &["write -P 1 0 5M"]);
        std::fs::copy(folder.path("ours"), folder.path("theirs")).expect("copied");
        let mut old: u64 = 5 << 20;
        for step in [
            shrink((3 << 20) + 512),
            grow(40 << 20),
            grow((40 << 20) + 5 * 512),
            shrink(100 * 512),
            grow(8 << 20),
            shrink(512),
            grow(1 << 20),
        ] {
            if step.shrink {
                let error = size(&folder, "ours", grow(step.size)).expect_err("guarded");
                assert!(error.contains("--shrink"), "{error}");
            }
            size(&folder, "ours", step).expect(options);
            let text = step.size.to_string();
            let mut args = vec!["resize", "-q", "theirs", &text];
            if step.shrink {
                args.insert(1, "--shrink");
            }
            folder.img(&args);
            folder.assert_clean("ours");
            let cluster_end = old.next_multiple_of(65536).min(step.size);
            if cluster_end > old {
                // QEMU shows again what the last cluster held before it was shrunk.
                folder.io("theirs", &[&format!("write -z {old} {}", cluster_end - old)]);
            }
            old = step.size;
            folder.assert_same("ours", "theirs");
            if step.size > 1 << 20 {
                let last = format!("write -P 9 {} 512", step.size - 512);
                folder.io("ours", &[&last]);
                folder.io("theirs", &[&last]);
            }
        }
        folder.assert_clean("ours");
    }
}

/// What the backing file holds past the disk's old end stays hidden.
#[test]
fn a_longer_backing_file_does_not_show() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "base", "8M"]);
    folder.io("base", &["write -P 7 0 8M"]);
    for options in ["cluster_size=64k", "extended_l2=on,cluster_size=64k"] {
        let args = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "-o", options];
        folder.img(&[&args[..], &["top", "2M"]].concat());
        folder.io("top", &["write -P 1 1M 512k"]);
        let options = ResizeOptions { backing_size: Some(8 << 20), ..grow(12 << 20) };
        size(&folder, "top", options).expect("grown");
        folder.assert_clean("top");
        folder.io("top", &["read -P 7 0 1M", "read -P 1 1M 512k", "read -P 0 2M 10M"]);
    }
    let args = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top", "2097664"];
    folder.img(&args);
    let options = ResizeOptions { backing_size: Some(8 << 20), ..grow(12 << 20) };
    let error = size(&folder, "top", options).expect_err("its last cluster shows the base");
    assert!(error.contains("write to the disk's last sector first"), "{error}");
    folder.io("top", &["write -P 3 2M 512"]);
    size(&folder, "top", options).expect("grown");
    folder.io("top", &["read -P 3 2M 512", "read -P 0 2097664 9M"]);
    folder.assert_clean("top");
}

#[test]
fn snapshots_bitmaps_and_compressed_ends_follow() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "plain", "1000448"]);
    folder.io("plain", &["write -P 1 0 1000448"]);
    folder.img(&["convert", "-c", "-O", "qcow2", "plain", "image"]);
    with(&folder.path("image"), |io, container| async move {
        let add = BitmapChange::Add { name: "b".to_owned(), granularity: None };
        change_bitmaps(&io, &container, &[add]).await.expect("added");
        create_snapshot(&io, &container, "full", (0, 0)).await.expect("made");
    });
    folder.io("image", &["write -P 2 0 512"]);
    size(&folder, "image", shrink(65536 * 3 + 512)).expect("shrunk");
    folder.assert_clean("image");
    size(&folder, "image", grow(4 << 20)).expect("grown");
    folder.assert_clean("image");
    folder.io("image", &["read -P 1 64k 131584", "read -P 0 197120 2M"]);
    let dirty = with(&folder.path("image"), |io, container| async move {
        load_bitmap(&io, &container, "b").await.expect("loaded").runs().collect::<Vec<_>>()
    });
    // What is new has changed.
    assert_eq!(dirty, [(0, 65536), (196_608, (4 << 20) - 196_608)]);
    folder.img(&["bitmap", "--remove", "image", "b"]);
    folder.img(&["snapshot", "-a", "full", "image"]);
    folder.io("image", &["read -P 1 0 1000448"]);
    folder.assert_clean("image");
}

#[test]
fn an_external_data_file_follows() {
    let folder = Folder::new();
    for raw in ["on", "off"] {
        let options = format!("data_file=data,data_file_raw={raw}");
        folder.img(&["create", "-q", "-f", "qcow2", "-o", &options, "image", "1000448"]);
        folder.io("image", &["write -P 1 0 1000448"]);
        for step in [shrink(300_032), grow(2 << 20)] {
            let data = open(&folder.path("data"));
            with(&folder.path("image"), |io, container| async move {
                resize(&io, &container, Some(&data), &step).await.expect("resized");
            });
            folder.assert_clean("image");
        }
        folder.io("image", &["read -P 1 0 300032", "read -P 0 300032 1M", "write -P 4 1M 1M"]);
        if raw == "on" {
            folder.img(&["compare", "-f", "qcow2", "-F", "raw", "image", "data"]);
        }
        folder.assert_clean("image");
    }
}

/// What a disk gains has its place: no write there makes the file longer, or takes room where that was reserved.
#[test]
fn what_is_new_is_preallocated() {
    use Preallocation::{Falloc, Full, Metadata};
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new();
    let (old, new) = (1_024_512u64, (3u64 << 20) + 1024);
    for options in
        ["cluster_size=512", "cluster_size=64k", "cluster_size=16k,extended_l2=on", "compat=0.10"]
    {
        for how in [Metadata, Falloc, Full] {
            folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", &old.to_string()]);
            folder.io("image", &["write -P 1 0 500k"]);
            size(&folder, "image", ResizeOptions { preallocation: how, ..grow(new) })
                .expect(options);
            folder.assert_clean("image");
            let facts = || std::fs::metadata(folder.path("image")).expect("there");
            let (len, room) = (facts().len(), facts().blocks());
            let part = format!("{old} {}", new - old);
            folder.io("image", &["read -P 1 0 500k", &format!("read -P 0 {part}")]);
            folder.io(
                "image",
                &[&format!("write -P 5 {part}"), &format!("read -P 5 {part}"), "read -P 1 0 500k"],
            );
            assert_eq!(facts().len(), len, "{options} {how:?}");
            assert!(how == Metadata || facts().blocks() <= room, "{options} {how:?}: {room}");
            folder.assert_clean("image");
        }
    }
}

#[test]
fn what_an_external_data_file_held_where_nothing_was_written_does_not_show() {
    let folder = Folder::new();
    for how in [Preallocation::Metadata, Preallocation::Falloc] {
        let options = "data_file=data,data_file_raw=off";
        folder.img(&["create", "-q", "-f", "qcow2", "-o", options, "image", "1000448"]);
        std::fs::write(folder.path("data"), vec![7; 1 << 20]).expect("written");
        let data = open(&folder.path("data"));
        with(&folder.path("image"), move |io, container| async move {
            let options = ResizeOptions { preallocation: how, ..grow(3 << 20) };
            resize(&io, &container, Some(&data), &options).await.expect("resized");
        });
        folder.assert_clean("image");
        folder.io("image", &["read -P 0 0 3M"]);
    }
}

#[test]
fn what_is_new_is_preallocated_in_an_external_data_file() {
    let folder = Folder::new();
    for raw in ["on", "off"] {
        for how in [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc] {
            let options = format!("data_file=data,data_file_raw={raw}");
            folder.img(&["create", "-q", "-f", "qcow2", "-o", &options, "image", "1000448"]);
            folder.io("image", &["write -P 1 0 1000448"]);
            let data = open(&folder.path("data"));
            with(&folder.path("image"), move |io, container| async move {
                let options = ResizeOptions { preallocation: how, ..grow(3 << 20) };
                resize(&io, &container, Some(&data), &options).await.expect("resized");
            });
            folder.assert_clean("image");
            folder.io("image", &["read -P 1 0 1000448", "read -P 0 1000448 2M"]);
            let placed = folder.check("image")["allocated-clusters"].as_u64();
            let all = raw == "on" || how != Preallocation::Off;
            assert_eq!(placed, Some(if all { 48 } else { 16 }), "{raw} {how:?}");
            assert_eq!(
                std::fs::metadata(folder.path("data")).expect("there").len() == 3 << 20,
                all
            );
        }
    }
}

#[test]
fn power_cuts_leave_one_size_or_the_other() {
    let folder = Folder::new();
    for options in ["cluster_size=512", "cluster_size=16k,extended_l2=on"] {
        let image = small(&folder, options);
        let placed = ResizeOptions { preallocation: Preallocation::Metadata, ..grow(400 << 10) };
        for step in [shrink(10_240), grow(3 << 20), placed] {
            try_cuts(&image, false, move |io, container| async move {
                resize(&io, &container, None, &step).await.expect("resized");
            });
        }
    }
}
