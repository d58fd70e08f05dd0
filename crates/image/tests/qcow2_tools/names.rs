//! Names that are no text, as `qemu-img` takes them from any shell.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use ringtap_image::qcow2::{
    BitmapSet, create_snapshot, delete_snapshot, list_bitmaps, list_snapshots,
};

use crate::oracle::{Folder, with};

/// Text in Latin-1.
const ODD: &[u8] = b"\xe9\xe8\xe0\xe9\xe8\xe0\xe9\xe8";
const SHOWN: &str = r"\xE9\xE8\xE0\xE9\xE8\xE0\xE9\xE8";

/// qemu-img with a word of bytes, and it must succeed.
fn img(folder: &Folder, before: &[&str], name: &[u8], image: &[&str]) {
    let mut command = Command::new("timeout");
    command.args(["60", "qemu-img"]).args(before).arg(OsStr::from_bytes(name)).args(image);
    let output = command.current_dir(folder.path("")).output().expect("it is installed");
    assert!(output.status.success(), "{before:?}: {output:?}");
}

#[test]
fn a_bitmap_keeps_a_name_that_is_no_text() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "1M"]);
    img(&folder, &["bitmap", "--add", "image"], ODD, &[]);
    img(&folder, &["bitmap", "--add", "image"], b"\xe0", &[]);
    let before = fs::read(folder.path("image")).expect("read");
    let set = with(&folder.path("image"), |io, container| async move {
        BitmapSet::open(&io, &container).await.expect("opened")
    });
    // Of the image only the two bitmaps' flags differ.
    let marked = fs::read(folder.path("image")).expect("read");
    assert_eq!(marked.len(), before.len());
    assert_eq!(before.iter().zip(&marked).filter(|(one, other)| one != other).count(), 2);
    assert_eq!(set.names().collect::<Vec<_>>(), [SHOWN, r"\xE0"]);

    set.note(0, 65536);
    with(&folder.path("image"), |io, container| async move {
        set.store(&io, &container).await.expect("stored");
        let entries = list_bitmaps(&io, &container).await.expect("listed");
        assert!(entries.iter().all(|entry| entry.is_usable()));
    });
    folder.assert_clean("image");
    img(&folder, &["bitmap", "--remove", "image"], ODD, &[]);
    img(&folder, &["bitmap", "--remove", "image"], b"\xe0", &[]);
}

#[test]
fn a_snapshot_keeps_a_name_that_is_no_text() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "1M"]);
    for name in [ODD, b"\xe0"] {
        img(&folder, &["snapshot", "-c"], name, &["image"]);
    }
    with(&folder.path("image"), |io, container| async move {
        create_snapshot(&io, &container, "two", (1_700_000_000, 0)).await.expect("taken");
        let list = list_snapshots(&io, &container).await.expect("listed");
        let names: Vec<&str> = list.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, [SHOWN, r"\xE0", "two"]);
        delete_snapshot(&io, &container, r"\xE0").await.expect("deleted as it is shown");
    });
    img(&folder, &["snapshot", "-d"], ODD, &["image"]);
    let left = folder.info("image")["snapshots"].clone();
    assert_eq!(left.as_array().map(Vec::len), Some(1), "{left}");
    folder.assert_clean("image");
}
