//! What a check finds and puts right, beside qemu-img.

use std::os::unix::fs::FileExt;

use super::bench::Bench;

/// QEMU opens no such image, and does not repair it.
#[test]
fn a_table_of_no_snapshots_that_lies_astray_is_found_and_put_right() {
    let bench = Bench::new();
    bench.ok("ringtap create -q -f qcow2 a.qcow2 1M");
    bench.qemu_io("-f qcow2 a.qcow2", &["write -q -P 5 0 128k".into()]);
    bench.ok("ringtap convert -f qcow2 -O raw a.qcow2 was.raw");
    let file = std::fs::File::options().write(true).open(bench.path("a.qcow2")).expect("opened");
    file.write_all_at(&0x123u64.to_be_bytes(), 64).expect("written");
    bench.ends("qemu-img check -f qcow2 a.qcow2", 1);
    let said = bench.ends("ringtap check -f qcow2 a.qcow2", 2);
    assert!(said.contains("the table of no snapshots is at 0x123"), "{said}");
    let said = bench.ok("ringtap check -f qcow2 -r all a.qcow2");
    assert!(said.contains("0 leaked clusters, 1 error"), "{said}");
    bench.same("was.raw", "a.qcow2");
    // One that begins with a cluster is as good as none, for both.
    file.write_all_at(&0x50_0000u64.to_be_bytes(), 64).expect("written");
    bench.same("was.raw", "a.qcow2");
}

/// A name that is no UTF-8 is refused by what it is, and where it was given.
#[test]
fn a_backing_file_whose_name_is_no_utf_8_is_refused_by_its_option() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let bench = Bench::new();
    bench.ok("ringtap create -q -f qcow2 over.qcow2 1M");
    let name = OsStr::from_bytes(b"b\xff.raw");
    std::fs::write(bench.path("").join(name), [0; 4096]).expect("a file");
    for line in [
        "create -q -f qcow2 new.qcow2 -F raw -b",
        "rebase -u -f qcow2 over.qcow2 -F raw -b",
        "convert -O qcow2 -f qcow2 over.qcow2 new.qcow2 -F raw -B",
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ringtap"));
        command.args(line.split(' ')).arg(name).current_dir(bench.path(""));
        let output = command.output().expect("ringtap");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains("is no UTF-8") && said.contains("link"), "{line}: {said}");
        assert!(!bench.path("new.qcow2").exists(), "{line}");
    }
    bench.ok("qemu-img check -q over.qcow2");
}
