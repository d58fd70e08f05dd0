//! nbdinfo, nbdcopy, qemu-img, qemu-io, fio.

use std::fs;

use serde_json::Value;

use crate::harness::{How, assert_same, direct, file, pattern, run, sparse, try_run};

const MIB: usize = 1 << 20;

#[test]
fn nbdinfo_sees_what_is_offered() {
    let served = sparse(10 << 20, How::default());
    let text = run("nbdinfo", &["--json", &served.uri()]);
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["protocol"], "newstyle-fixed");
    assert_eq!(json["structured"], true);
    let export = &json["exports"][0];
    assert_eq!(export["export-name"], "disk");
    assert_eq!(export["description"], "the export disk");
    assert_eq!(export["export-size"], 10 << 20);
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    for can in ["cache", "df", "fast_zero", "flush", "fua", "multi_conn", "trim", "zero"] {
        assert_eq!(export[format!("can_{can}")], true, "{can}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 << 20);
}

#[test]
fn nbdinfo_lists_every_export_and_tells_read_only_ones() {
    let served = file(&[7; 4096], How { read_only: true, ..direct() });
    let text = run("nbdinfo", &["--list", "--json", &served.uri()]);
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let names: Vec<_> = json["exports"].as_array().expect("a list").iter().collect();
    assert_eq!(names.len(), 2);
    assert_eq!(names[0]["export-name"], "disk");
    assert_eq!(names[1]["export-name"], "same");
    assert_eq!(names[1]["is_read_only"], true);
    assert_eq!(names[1]["can_trim"], false);
    let uri = served.uri().replace("///?", "///nothing?");
    let refused = try_run("nbdinfo", &[&uri], "");
    assert!(!refused.status.success());
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("for export: nothing"), "{why}");
}

#[test]
fn the_map_shows_holes_and_data() {
    let mut content = vec![0; 8 * MIB];
    content[2 * MIB..3 * MIB].fill(5);
    let served = sparse(8 << 20, How::default());
    let source = served.dir.path().join("source");
    fs::write(&source, &content).expect("written");
    run("qemu-img", &["convert", "-n", "-Oraw", "-fraw", path(&source), &served.uri()]);
    let text = run("nbdinfo", &["--map", "--json", &served.uri()]);
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let map: Vec<_> = json
        .as_array()
        .expect("a list")
        .iter()
        .map(|extent| {
            (extent["offset"].as_u64(), extent["length"].as_u64(), extent["type"].as_u64())
        })
        .collect();
    let mib = |n: u64| Some(n << 20);
    assert_eq!(
        map,
        [(mib(0), mib(2), Some(3)), (mib(2), mib(1), Some(0)), (mib(3), mib(5), Some(3))]
    );
    let text = run("qemu-img", &["map", "--output=json", "-fraw", &served.uri()]);
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json[1]["start"], 2 << 20);
    assert_eq!(json[1]["zero"], false);
    assert_eq!(json[2]["zero"], true);
}

#[test]
fn nbdcopy_both_ways() {
    for how in [How::default(), direct()] {
        let content = pattern(12 * MIB, 1);
        let served = sparse(content.len() as u64, how);
        let (source, back) = (served.dir.path().join("source"), served.dir.path().join("back"));
        fs::write(&source, &content).expect("written");
        let many = ["--connections=4", "--requests=32", "--flush"];
        run("nbdcopy", &[many[0], many[1], many[2], path(&source), &served.uri()]);
        assert_same(&served.content(), &content);
        run("nbdcopy", &[many[0], many[1], &served.uri(), path(&back)]);
        assert_same(&fs::read(&back).expect("read"), &content);
        // Whole megabytes at a time, and one synchronous connection.
        run("nbdcopy", &["--request-size=8388608", &served.uri(), path(&back)]);
        assert_same(&fs::read(&back).expect("read"), &content);
        run("nbdcopy", &["--synchronous", &served.uri(), path(&back)]);
        assert_same(&fs::read(&back).expect("read"), &content);
    }
}

#[test]
fn tcp_serves_the_same() {
    let content = pattern(6 * MIB, 7);
    let served = sparse(content.len() as u64, How::default());
    let source = served.dir.path().join("source");
    fs::write(&source, &content).expect("written");
    let uri = format!("nbd://127.0.0.1:{}/same", served.port);
    run("nbdcopy", &["--connections=4", path(&source), &uri]);
    assert_same(&served.content(), &content);
    run("qemu-img", &["compare", "-fraw", "-Fraw", path(&source), &uri]);
    run("qemu-img", &["compare", "-fraw", "-Fraw", &served.uri(), &uri]);
}

#[test]
fn qemu_img_converts_and_compares() {
    for how in [How::default(), direct()] {
        let content = pattern(9 * MIB, 2);
        let served = sparse(content.len() as u64, how);
        let (source, back) = (served.dir.path().join("source"), served.dir.path().join("back"));
        fs::write(&source, &content).expect("written");
        run("qemu-img", &["convert", "-n", "-W", "-Oraw", "-fraw", path(&source), &served.uri()]);
        assert_same(&served.content(), &content);
        run("qemu-img", &["compare", "-fraw", "-Fraw", path(&source), &served.uri()]);
        run("qemu-img", &["convert", "-fraw", "-Oraw", &served.uri(), path(&back)]);
        assert_same(&fs::read(&back).expect("read"), &content);
        let mut other = content.clone();
        other[7 * MIB + 77] ^= 1;
        fs::write(&source, &other).expect("written");
        let compared =
            try_run("qemu-img", &["compare", "-fraw", "-Fraw", path(&source), &served.uri()], "");
        assert_eq!(compared.status.code(), Some(1));
    }
}

#[test]
fn qemu_io_finds_its_patterns_again() {
    for how in [How::default(), direct()] {
        let served = sparse(8 << 20, how);
        let script = "
            write -P 0xab 0 64k
            write -P 0xcd 1000 3000
            write -f -P 0xef 1M 512
            aio_write -P 0x11 2M 1M
            aio_write -P 0x22 3M 1M
            aio_flush
            write -z 2M 64k
            write -z -u 3M 128k
            discard 4M 1M
            flush
            read -P 0xab 0 1000
            read -P 0xcd 1000 3000
            read -P 0xab 4000 60k
            read -P 0xef 1M 512
            read -P 0 1049088 1000
            read -P 0 2M 64k
            read -P 0x11 2162688 512
            read -P 0 3M 128k
            read -P 0x22 3276800 512
            readv -P 0x22 3538944 512 4096 511
            quit
        ";
        let output = try_run("qemu-io", &["-fraw", &served.uri()], script);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}{errors}");
        for bad in ["failed", "verification", "error", "Error"] {
            assert!(!text.contains(bad) && !errors.contains(bad), "{text}{errors}");
        }
        // What a wrong pattern looks like, so that its absence means something.
        let output = try_run("qemu-io", &["-fraw", "-c", "read -P 1 0 512", &served.uri()], "");
        assert!(String::from_utf8_lossy(&output.stdout).contains("verification failed"));
    }
}

#[test]
fn fio_verifies_what_it_wrote() {
    for how in [How::default(), direct()] {
        let served = sparse(32 << 20, how);
        let uri = format!("--uri={}", served.uri());
        run(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                "--rw=randrw",
                "--bsrange=512-128k",
                "--bs_unaligned=1",
                "--iodepth=32",
                "--size=32M",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--output-format=json",
            ],
        );
        let stats = served.vbd.stats();
        assert!(stats.write.ended > 100 && stats.read.ended > 100, "{stats:?}");
        assert_eq!(stats.write.failed + stats.read.failed, 0);
    }
}

fn path(path: &std::path::Path) -> &str {
    path.to_str().expect("UTF-8")
}
