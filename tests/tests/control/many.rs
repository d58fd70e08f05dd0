//! A thousand disks in one server.

use std::fs::{self, File};
use std::time::Instant;

use ringtap_tests::{Control, Server};
use serde_json::json;

use crate::qemu_io;

const DISKS: usize = 1000;

/// How long that takes is printed, and no bar: other things run on the machine.
#[test]
fn a_thousand_disks_begin_and_one_more_comes_beside_them() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::create_dir(at("disks")).expect("a folder");
    for number in 0..DISKS {
        let image = at(&format!("{number}.raw"));
        File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
        let text = format!(
            "image = '{image}'\nformat = 'raw'\nvhost-user = '{}'\nnbd = 'unix:{}'\nname = 'd{number}'\n",
            at(&format!("{number}.sock")),
            at("nbd")
        );
        fs::write(at(&format!("disks/d{number}.toml")), text).expect("a file");
    }
    let began = Instant::now();
    let control = format!("unix:{}", at("control"));
    let server = Server::daemon(["--strict", "--control", &control, "--disks", &at("disks")]);
    println!("{DISKS} disks are served after {:.0?}", began.elapsed());
    let mut control = Control::open(&dir.path().join("control"));
    let exports = control.ok("query-block-exports", json!({}));
    assert_eq!(exports.as_array().map(Vec::len), Some(2 * DISKS));
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", at("nbd"));
    // Each is its own.
    for number in [0, 499, DISKS - 1] {
        let write = format!("write -P {} 0 4k", 1 + number % 255);
        qemu_io(&uri(&format!("d{number}")), &[&write]).expect("it is served");
    }
    for number in [0, 499, DISKS - 1] {
        let read = format!("read -P {} 0 4k", 1 + number % 255);
        qemu_io(&uri(&format!("d{number}")), &[&read]).expect("it is served");
        let found = fs::read(at(&format!("{number}.raw"))).expect("the image");
        assert!(found[..4096].iter().all(|byte| usize::from(*byte) == 1 + number % 255));
    }
    File::create(at("new.raw")).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let began = Instant::now();
    let file = json!({"driver": "file", "filename": at("new.raw"), "cache": {"direct": true}});
    control.ok("blockdev-add", json!({"driver": "raw", "node-name": "new", "file": file}));
    let addr = json!({"type": "unix", "path": at("new.sock")});
    let export = json!({"id": "new", "node-name": "new", "type": "vhost-user-blk", "addr": addr});
    control.ok("block-export-add", export);
    println!("one more comes in {:.1?}", began.elapsed());
    assert!(dir.path().join("new.sock").exists());
    let began = Instant::now();
    server.stop();
    println!("all have ended after {:.0?}", began.elapsed());
}
