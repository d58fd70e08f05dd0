use std::path::Path;
use std::process::Command;

use super::*;
use crate::qcow2::extension::our_feature_names;

fn some_header() -> Header {
    Header {
        version: 3,
        cluster_bits: 16,
        size: 1 << 30,
        crypt: Crypt::None,
        l1_size: 2,
        l1_offset: 3 << 16,
        refcount_table_offset: 1 << 16,
        refcount_table_clusters: 1,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: 0,
        compatible: 0,
        autoclear: 0,
        refcount_order: 4,
        compression: Compression::Deflate,
        further: Vec::new(),
        extensions: vec![
            Extension { kind: 0x1234_5678, data: b"unknown".to_vec() },
            our_feature_names(),
            Extension { kind: extension::BACKING_FORMAT, data: b"raw".to_vec() },
        ],
        backing_file: Some(b"base.raw".to_vec()),
    }
}

#[test]
fn a_header_comes_back_as_it_was_written() {
    let mut header = some_header();
    for change in 0..5 {
        match change {
            1 => header.further = vec![7; 16],
            2 => header.backing_file = None,
            3 => {
                header.incompatible = incompatible::COMPRESSION | incompatible::EXTENDED_L2;
                header.compression = Compression::Zstd;
            }
            4 => {
                let encryption = Encryption { offset: 5 << 16, len: 1 << 20 };
                header.set_extension(extension::ENCRYPTION, Some(encryption.to_bytes()));
                header.crypt = Crypt::Luks;
                let bitmaps = Bitmaps { count: 3, directory_size: 72, directory_offset: 9 << 16 };
                header.set_extension(extension::BITMAPS, Some(bitmaps.to_bytes()));
                header.autoclear = autoclear::BITMAPS;
                assert_eq!(header.bitmaps(), Some(bitmaps));
                assert_eq!(header.encryption(), Some(encryption));
            }
            _ => {}
        }
        let bytes = header.to_bytes().expect("it fits");
        assert_eq!(Header::parse(&bytes), Ok(header.clone()), "change {change}");
    }
    assert_eq!(header.backing_format(), Some(&b"raw"[..]));
    some_header().check_tables(4 << 16).expect("sane tables");
}

#[test]
fn version_2_has_no_features() {
    let header = Header { version: 2, ..some_header() };
    let bytes = header.to_bytes().expect("it fits");
    assert_eq!(be32(&bytes, 72), Some(0x1234_5678));
    assert_eq!(Header::parse(&bytes), Ok(header));
}

/// A header with some bytes changed, and a word of the refusal.
#[test]
fn what_is_wrong_is_named() {
    let good = some_header().to_bytes().expect("it fits");
    let refusals: [(usize, &[u8], &str); 11] = [
        (0, b"CONN", "name its real format"),
        (7, &[4], "version is 0x4"),
        (20, &[0, 0, 0, 22], "cluster_bits is 0x16"),
        (35, &[3], "crypt_method is 0x3"),
        (99, &[7], "refcount_order is 0x7"),
        (103, &[105], "header_length is 0x69"),
        (104, &[1], "compression_type is 0x1"),
        (79, &[0x20], "bit 5"),
        (116, &[0xff; 4], "header extension 0x12345678 at byte 112 says it has 4294967295 bytes"),
        (8, &[0, 0, 0, 0, 0, 1], "backing_file_offset"),
        (16, &[0, 0, 4, 0], "backing_file_size is 0x400"),
    ];
    for (at, change, word) in refusals {
        let mut bytes = good.clone();
        bytes[at..at + change.len()].copy_from_slice(change);
        let message = Header::parse(&bytes).expect_err(word).to_string();
        assert!(message.contains(word), "{message}");
    }
    for len in [0, 3, 23, 71, 103, 111] {
        let message = Header::parse(&good[..len]).expect_err("cut off").to_string();
        assert!(message.contains("cut off"), "{message}");
    }
}

/// QEMU's programs take the last name of a backing format, and so they write no second one.
#[test]
fn of_two_backing_formats_the_last_counts() {
    let mut header = some_header();
    let twice = extension::Extension { kind: extension::BACKING_FORMAT, data: b"foo".to_vec() };
    header.extensions.push(twice);
    let parsed = Header::parse(&header.to_bytes().expect("it fits")).expect("it is read");
    assert_eq!(parsed.backing_format(), Some(&b"foo"[..]));
    let formats = parsed.extensions.iter().filter(|it| it.kind == extension::BACKING_FORMAT);
    assert_eq!(formats.count(), 1);
}

#[test]
fn an_unknown_feature_is_refused_by_its_own_name() {
    let mut header = Header { incompatible: 1 << 13, ..some_header() };
    let mut entry = vec![0, 13];
    entry.extend_from_slice(b"holographic clusters");
    entry.resize(48, 0);
    header.set_extension(extension::FEATURE_NAMES, Some(entry));
    let error = Header::parse(&header.to_bytes().expect("it fits")).expect_err("refused");
    assert!(error.to_string().contains("\"holographic clusters\" (bit 13)"), "{error}");
}

#[test]
fn tables_that_cannot_be_are_refused() {
    let len = 1 << 20;
    type Change = fn(&mut Header);
    let refusals: [(Change, &str); 9] = [
        (|header| header.l1_offset = 512, "l1_table_offset is 0x200"),
        (|header| header.l1_offset = 1 << 20, "l1_table_offset is 0x100000"),
        (|header| header.l1_size = 1, "l1_size is 0x1"),
        (|header| header.l1_size = (4 << 20) + 1, "32 MiB"),
        (|header| header.refcount_table_offset = 0, "refcount_table_offset is 0x0"),
        (|header| header.refcount_table_clusters = 0, "check --repair all"),
        (|header| header.refcount_table_clusters = 129, "8 MiB"),
        (|header| header.size = u64::MAX, "size is 0xff"),
        (|header| (header.snapshots, header.snapshots_offset) = (1, 1), "snapshots_offset is 0x1"),
    ];
    for (change, word) in refusals {
        let mut header = some_header();
        change(&mut header);
        let message = header.check_tables(len).expect_err(word).to_string();
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn a_header_larger_than_a_cluster_is_refused() {
    let mut header = Header { cluster_bits: 9, size: 4096, l1_size: 1, ..some_header() };
    header.to_bytes().expect_err("the names do not fit");
    header.extensions.retain(|extension| extension.kind != extension::FEATURE_NAMES);
    header.to_bytes().expect("now they do");
}

#[test]
fn compressed_entries_come_back() {
    for cluster_bits in CLUSTER_BITS {
        let header = Header { cluster_bits, ..some_header() };
        for (offset, len) in [(0, 1), (511, 2), (0x1_0000_0123, header.cluster_size() / 2 + 1)] {
            let entry = header.compressed_entry(offset, len).expect("it fits");
            let (at, bytes) = header.compressed_extent(entry);
            assert_eq!(at, offset);
            assert!((len..len + 512).contains(&bytes));
            assert_eq!((at + bytes) % 512, 0);
        }
        assert_eq!(header.compressed_entry(1 << 60, 1), None);
    }
}

/// What qemu-img makes is read, and what is written of it is the same, byte by byte.
#[test]
fn headers_of_qemu_img_are_kept() {
    let dir = tempfile::tempdir().expect("a folder");
    let base = dir.path().join("base.raw");
    std::fs::write(&base, vec![0; 1 << 20]).expect("a file");
    let options = [
        "compat=0.10",
        "compat=1.1,lazy_refcounts=on,refcount_bits=1",
        "extended_l2=on,cluster_size=2M",
        "compression_type=zstd,cluster_size=64K",
        "data_file=data.raw,data_file_raw=on",
    ];
    for (number, option) in options.iter().enumerate() {
        let image = dir.path().join(format!("{number}.qcow2"));
        let mut command = Command::new("timeout");
        command.args(["20", "qemu-img", "create", "-q", "-f", "qcow2", "-o", option]);
        if !option.contains("data_file") {
            command.args(["-b", "base.raw", "-F", "raw"]);
        }
        let status = command.arg(&image).arg("1M").current_dir(dir.path()).status();
        assert!(status.expect("qemu-img").success());
        let bytes = std::fs::read(Path::new(&image)).expect("the image");
        let header = Header::parse(&bytes).expect(option);
        header.check_tables(bytes.len() as u64).expect(option);
        let data_file = option.contains("data_file");
        assert_eq!(header.data_file(), data_file.then_some(&b"data.raw"[..]));
        assert_eq!(header.backing_file.as_deref(), (!data_file).then_some(&b"base.raw"[..]));
        let again = header.to_bytes().expect(option);
        assert_eq!(again, bytes[..again.len()], "{option}");
    }
}
