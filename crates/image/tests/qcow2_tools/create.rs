use std::os::unix::fs::FileExt;

use ringtap_image::qcow2::{CreateOptions, Repair, ResizeOptions, create, resize};
use ringtap_image::{CacheMode, Format, OpenOptions};
use serde_json::Value;

use crate::oracle::{Folder, open, with};

/// Options as in `-o`; those of the whole matrix.
fn options(text: &str, size: u64) -> CreateOptions {
    let mut options = CreateOptions { size, ..CreateOptions::default() };
    for word in text.split(',').filter(|word| !word.is_empty()) {
        let (name, value) = word.split_once('=').expect("name=value");
        options.set(name, value).expect(word);
    }
    options
}

fn make(folder: &Folder, image: &str, options: &CreateOptions) -> Result<(), String> {
    let path = folder.path(image);
    // What was there before is lost.
    std::fs::write(&path, vec![0xaa; 300_000]).expect("a file");
    let data = options.data_file.as_ref().map(|name| {
        let path = folder.path(name);
        std::fs::File::create(&path).expect("a file");
        open(&path)
    });
    let options = options.clone();
    with(&path, |io, container| async move {
        let made = create(&io, &container, data.as_ref(), &options).await;
        made.map(drop).map_err(|error| error.to_string())
    })
}

const MATRIX: [&str; 18] = [
    "",
    "compat=0.10",
    "compat=0.10,cluster_size=512,preallocation=metadata",
    "cluster_size=512",
    "cluster_size=2M,extended_l2=on",
    "refcount_bits=1,preallocation=metadata",
    "refcount_bits=2,preallocation=full",
    "refcount_bits=4,preallocation=falloc,cluster_size=1K",
    "refcount_bits=8,preallocation=metadata,cluster_size=512",
    "refcount_bits=64,preallocation=metadata,cluster_size=512",
    "refcount_bits=32,lazy_refcounts=on",
    "compression_type=zstd,extended_l2=on,cluster_size=16K,preallocation=metadata",
    "backing_file=base.raw,backing_fmt=raw",
    "backing_file=base.raw,backing_fmt=raw,extended_l2=on,preallocation=falloc",
    "backing_file=base.raw,backing_fmt=raw,cluster_size=512,compat=0.10",
    "data_file=data.bin",
    "data_file=data.bin,data_file_raw=on",
    "data_file=data.bin,extended_l2=on,preallocation=full",
];

#[test]
fn images_are_what_qemu_img_would_make() {
    compare_with_qemu_img(&MATRIX[..9]);
}

#[test]
fn images_are_what_qemu_img_would_make_also_with_odder_options() {
    compare_with_qemu_img(&MATRIX[9..]);
}

fn compare_with_qemu_img(matrix: &[&str]) {
    let folder = Folder::new();
    let base: Vec<u8> = (0..1_000_000u32).map(|at| (at / 1000) as u8).collect();
    std::fs::write(folder.path("base.raw"), base).expect("a file");
    for (text, size) in matrix.iter().zip([3_000_320, 33 << 20].into_iter().cycle()) {
        let options = options(text, size);
        make(&folder, "ours.qcow2", &options).expect(text);
        folder.assert_clean("ours.qcow2");
        let theirs_text = text.replace("data.bin", "theirs.bin");
        let size_text = size.to_string();
        let mut args = vec!["create", "-q", "-f", "qcow2", "theirs.qcow2", &size_text];
        if !text.is_empty() {
            args.extend(["-o", &theirs_text]);
        }
        folder.img(&args);
        let facts = |image: &str| {
            let info = folder.info(image);
            let mut data = info["format-specific"]["data"].clone();
            if let Some(name) = data.get_mut("data-file") {
                *name = Value::Null;
            }
            let pick = |name: &str| info.get(name).cloned();
            (
                data,
                pick("virtual-size"),
                pick("cluster-size"),
                pick("backing-filename"),
                pick("backing-filename-format"),
            )
        };
        assert_eq!(facts("ours.qcow2"), facts("theirs.qcow2"), "{text}");
        folder.assert_same("ours.qcow2", "theirs.qcow2");
        // Both say the same of every cluster.
        let map = |image| {
            let map = folder.img(&["map", "--output", "json", image]);
            let mut map: Vec<Value> = serde_json::from_str(&map).expect("json");
            for extent in &mut map {
                extent.as_object_mut().expect("an extent").remove("offset");
            }
            map
        };
        if !text.contains("prealloc") {
            assert_eq!(map("ours.qcow2"), map("theirs.qcow2"), "{text}");
        }
        folder
            .io("ours.qcow2", &["write -P 7 100k 300k", "write -z 1M 64k", "read -P 7 100k 300k"]);
        folder.assert_clean("ours.qcow2");
    }
}

#[test]
fn space_is_reserved_as_asked() {
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new();
    let blocks = |text: &str| {
        make(&folder, "image", &options(text, 16 << 20)).expect(text);
        std::fs::metadata(folder.path("image")).expect("it is there").blocks() * 512
    };
    assert!(blocks("preallocation=metadata") < 2 << 20);
    assert!(blocks("preallocation=falloc") >= 16 << 20);
    assert!(blocks("preallocation=full") >= 16 << 20);
}

#[test]
fn a_raw_data_file_keeps_its_content() {
    let folder = Folder::new();
    let content: Vec<u8> = (0..2 << 20).map(|at: u32| (at >> 8) as u8).collect();
    std::fs::write(folder.path("data.raw"), &content).expect("a file");
    std::fs::write(folder.path("copy.raw"), &content).expect("a file");
    std::fs::write(folder.path("image"), b"").expect("a file");
    let options = options("data_file=data.raw,data_file_raw=on", 2 << 20);
    let data = open(&folder.path("data.raw"));
    with(&folder.path("image"), |io, container| async move {
        create(&io, &container, Some(&data), &options).await.expect("made");
    });
    folder.assert_clean("image");
    folder.img(&["compare", "-f", "qcow2", "-F", "raw", "image", "copy.raw"]);
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = Folder::new();
    let refusals = [
        ("cluster_size=1000", "power of two"),
        ("cluster_size=4M", "512 to 2M"),
        ("refcount_bits=3", "refcount_bits must be"),
        ("compat=0.10,refcount_bits=8", "need compat=1.1"),
        ("compat=v2,extended_l2=on", "need compat=1.1"),
        ("cluster_size=8K,extended_l2=on", "at least 16K"),
        ("data_file_raw=on", "needs data_file"),
        ("backing_fmt=raw", "needs backing_file"),
        ("backing_file=b,data_file=data.bin,data_file_raw=on", "no backing file"),
        ("backing_file=b,preallocation=full", "hide the backing file"),
        ("size=1P,cluster_size=512", "use a larger cluster_size"),
    ];
    for (text, word) in refusals {
        let message = make(&folder, "image", &options(text, 1 << 20)).expect_err(text);
        assert!(message.contains(word), "{text}: {message}");
        // What was there is still there.
        assert_eq!(std::fs::metadata(folder.path("image")).expect("there").len(), 300_000);
    }
    let mut options = CreateOptions::default();
    for (name, value) in
        [("no_such", "1"), ("compat", "2"), ("extended_l2", "maybe"), ("cluster_size", "big")]
    {
        let message = options.set(name, value).expect_err("refused");
        assert!(message.contains(name), "{message}");
    }
}

/// QEMU makes larger ones, and its assertions fail where one is written to.
#[test]
fn a_data_file_is_no_larger_than_entries_can_say() {
    let folder = Folder::new();
    let (most, more) = (1u64 << 56, (1u64 << 56) + (1 << 21));
    let with_size = |size| options("cluster_size=2M,data_file=data.bin", size);
    let error = make(&folder, "image", &with_size(more)).expect_err("too large");
    assert!(error.contains("64 PiB"), "{error}");
    make(&folder, "image", &with_size(most)).expect("made");
    folder.assert_clean("image");
    let (path, data) = (folder.path("image"), open(&folder.path("data.bin")));
    let resized = with(&path, move |io, container| async move {
        let options = ResizeOptions { size: more, ..ResizeOptions::default() };
        resize(&io, &container, Some(&data), &options).await.map_err(|error| error.to_string())
    });
    let error = resized.expect_err("too large");
    assert!(error.contains("64 PiB"), "{error}");
    let look = |read_only| {
        let (format, cache) = (Some(Format::Qcow2), CacheMode::Writeback);
        let options = OpenOptions { format, cache, read_only, ..OpenOptions::default() };
        let opened = ringtap_image::open(&path, &options);
        opened.map(drop).map_err(|error| error.to_string())
    };
    look(false).expect("opened");
    // As QEMU makes it: its size, and an L1 table for that.
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("opened");
    file.write_all_at(&more.to_be_bytes(), 24).expect("written");
    file.write_all_at(&((1u32 << 17) + 1).to_be_bytes(), 36).expect("written");
    folder.assert_clean("image");
    let error = look(false).expect_err("refused");
    assert!(error.contains("64 PiB") && error.contains("read-only"), "{error}");
    look(true).expect("opened to be read");
    let data = open(&folder.path("data.bin"));
    with(&path, move |io, container| async move {
        let options = ResizeOptions { size: most, shrink: true, ..ResizeOptions::default() };
        resize(&io, &container, Some(&data), &options).await.expect("made smaller");
    });
    look(false).expect("opened");
}

/// Room for a LUKS header of any length, found again and known to be in use.
#[test]
fn an_encryption_header_has_its_place() {
    let folder = Folder::new();
    for len in [512, 65536, 200_000] {
        let header = vec![0x4c; len];
        let options = CreateOptions { luks: Some(header.clone()), ..options("", 1 << 20) };
        make(&folder, "image", &options).expect("made");
        let image = std::fs::read(folder.path("image")).expect("read");
        let found = crate::guest::header(&image).encryption().expect("it says where");
        assert_eq!(image[found.offset as usize..][..found.len as usize], header);
        assert!(crate::check::run(&folder, "image", Repair::Nothing).is_clean());
    }
}
