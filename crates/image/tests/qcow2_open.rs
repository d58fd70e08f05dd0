//! Which qcow2 images open, and which are refused and why.

use std::fs;
use std::path::{Path, PathBuf};

use ringtap_image::qcow2::{CreateOptions, create};
use ringtap_image::{
    CacheMode, Container, Extent, Format, Image, OpenOptions, RestartLog, on_a_ring, open,
};

fn options(read_only: bool) -> OpenOptions {
    let (format, cache) = (Some(Format::Qcow2), CacheMode::Writeback);
    OpenOptions { format, cache, read_only, ..OpenOptions::default() }
}

fn make(path: &Path, backing: Option<(&str, Option<&str>)>) {
    fs::write(path, "").expect("a file");
    let text = |name: &str| name.to_owned();
    let wanted = CreateOptions {
        size: 1 << 20,
        backing_file: backing.map(|(name, _)| text(name)),
        backing_format: backing.and_then(|(_, format)| format.map(text)),
        ..CreateOptions::default()
    };
    let container = Container::open(path, &options(false)).expect("opened");
    let made = on_a_ring(path, |io| async move { create(&io, &container, None, &wanted).await });
    made.expect("a ring").expect("created");
}

fn refusal(path: &Path, options: &OpenOptions) -> String {
    open(path, options).err().expect("refused").to_string()
}

fn patch(path: &Path, at: usize, byte: u8) {
    let mut bytes = fs::read(path).expect("a file");
    bytes[at] = byte;
    fs::write(path, bytes).expect("a file");
}

#[test]
fn a_chain_opens_in_its_own_folder_only() {
    let (dir, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("one"));
    let below = other.path().join("below");
    fs::write(&below, vec![7; 1 << 20]).expect("a file");
    let image = dir.path().join("image");
    make(&image, Some((&below.display().to_string(), Some("raw"))));
    let message = refusal(&image, &options(false));
    assert!(message.contains("--backing"), "{message}");
    let mut allowed = options(false);
    allowed.allow_backing = vec![other.path().to_owned()];
    open(&image, &allowed).expect("opened");
    // A link is not a way out of the folder.
    std::os::unix::fs::symlink(&below, dir.path().join("link")).expect("a link");
    make(&image, Some(("link", Some("raw"))));
    assert!(refusal(&image, &options(false)).contains("--backing"));
    fs::copy(&below, dir.path().join("here")).expect("copied");
    for format in [Some("raw"), None] {
        make(&image, Some(("here", format)));
        open(&image, &options(false)).expect("opened");
    }
    for (name, said) in [
        ("nbd://host/disk", "lies on a server"),
        ("json:{\"driver\":\"raw\"}", "json: names are not read"),
        ("vm:disk", "only a file's path"),
    ] {
        make(&image, Some((name, Some("raw"))));
        let message = refusal(&image, &options(false));
        assert!(message.contains(said), "{message}");
    }
    make(&image, Some(("here", Some("qed"))));
    assert!(refusal(&image, &options(false)).contains("format that is not known"));
}

#[test]
fn circles_and_towers_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    make(&path("a"), Some(("b", Some("qcow2"))));
    // A mark alone is not believed: the guest of a raw disk may have written it.
    make(&path("b"), Some(("a", None)));
    assert!(refusal(&path("a"), &options(true)).contains("does not say of which format"));
    make(&path("b"), Some(("a", Some("qcow2"))));
    let message = refusal(&path("a"), &options(true));
    assert!(message.contains("its own backing file"), "{message}");
    for number in 0..202 {
        let below = format!("{}", number + 1);
        make(&path(&number.to_string()), Some((&below, Some("qcow2"))));
    }
    make(&path("202"), None);
    let message = refusal(&path("0"), &options(true));
    assert!(message.contains("more than 200"), "{message}");
    // The deepest that opens is served, too, on a thread's ordinary stack.
    let image = open(&path("3"), &options(true)).expect("opened");
    assert!(matches!(image.map(0, 512), Extent::Zero { len: 512, .. }));
    let status = on_a_ring(&path("3"), |io| async move {
        image.load(&io, 0).await?;
        image.status(&io, 0, 512).await
    });
    let status = status.expect("a ring").expect("a status");
    assert_eq!((status.depth, status.present), (200, false));
}

#[test]
fn images_marked_dirty_or_corrupt() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("image");
    make(&image, None);
    // The last byte of the incompatible features.
    patch(&image, 79, 2);
    assert!(refusal(&image, &options(false)).contains("marked corrupt"));
    open(&image, &options(true)).expect("opened");
    patch(&image, 79, 1);
    open(&image, &options(true)).expect("opened");
    assert_eq!(fs::read(&image).expect("a file")[79], 1);
    open(&image, &options(false)).expect("repaired and opened");
    assert_eq!(fs::read(&image).expect("a file")[79], 0);
    patch(&image, 78, 0x80);
    assert!(refusal(&image, &options(true)).contains("bit 15"));
}

#[test]
fn autoclear_features_are_cleared_by_writers_only() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("image");
    make(&image, None);
    patch(&image, 95, 0x80);
    let open_as =
        |read_only| -> Box<dyn Image> { open(&image, &options(read_only)).expect("opened") };
    drop(open_as(true));
    assert_eq!(fs::read(&image).expect("a file")[95], 0x80);
    drop(open_as(false));
    assert_eq!(fs::read(&image).expect("a file")[95], 0);
}

/// Whoever only reads an image sees what a killed server left, and writes nothing of it.
#[test]
fn what_a_killed_server_left_is_seen_by_who_only_reads() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    make(&path, None);
    let left = || {
        let container = Container::open(&path, &options(true)).expect("opened");
        let log = RestartLog::to_read(&container, 1 << 16).expect("looked for");
        let left = log.and_then(|log| log.left()).map(|left| left.records.len());
        left.filter(|count| *count > 0)
    };
    assert_eq!(left(), None);
    let image = open(&path, &options(false)).expect("opened");
    let written = on_a_ring(&path, |io| async move {
        // In a table that is not there yet.
        let room = image.allocate(&io, 0, 65536).await.expect("allocated").expect("room");
        image.commit(room, true);
        // Dropped as by a kill: not closed.
    });
    written.expect("a ring");
    assert_eq!(left(), Some(1));
    let before = fs::read(&path).expect("a file");
    for _ in 0..2 {
        let image = open(&path, &options(true)).expect("opened");
        assert!(matches!(image.map(0, 1), Extent::Data { .. }));
        assert!(matches!(image.map(1 << 16, 1), Extent::NotLoaded | Extent::Zero { .. }));
        drop(image);
        assert!(fs::read(&path).expect("a file") == before);
    }
    let image = open(&path, &options(false)).expect("opened");
    assert!(matches!(image.map(0, 1), Extent::Data { .. }));
    let closed = on_a_ring(&path, |io| async move { image.close(&io).await });
    closed.expect("a ring").expect("closed");
    assert_eq!(left(), None);
}

/// Whoever saw a compressed cluster, and then somebody wrote to it, is not given the one below.
#[test]
fn what_lies_below_is_not_decoded_where_something_hides_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let (below, path) = (dir.path().join("below"), dir.path().join("image"));
    make(&below, None);
    let image = open(&below, &options(false)).expect("opened");
    let packed = on_a_ring(&below, |io| async move {
        image.compress(&io, 0, &[7; 2 << 16]).await?;
        image.close(&io).await
    });
    packed.expect("a ring").expect("compressed");
    make(&path, Some(("below", Some("qcow2"))));
    let image = open(&path, &options(false)).expect("opened");
    let moved = on_a_ring(&path, |io| async move {
        let room = image.allocate(&io, 0, 1 << 16).await.expect("allocated").expect("room");
        image.commit(room, true);
        let mut moved = Vec::new();
        for offset in [0, 1 << 16] {
            image.load(&io, offset).await.expect("loaded");
            let buffer = io.buffer(512).expect("memory");
            moved.push(image.decompress(&io, offset, buffer.mem()).await.expect("looked at"));
        }
        image.close(&io).await.expect("closed");
        moved
    });
    assert_eq!(moved.expect("a ring"), [0, 512]);
}
