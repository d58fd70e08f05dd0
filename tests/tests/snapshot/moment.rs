//! A disk whose moment is kept in `copy` and pulled from there by NBD: what tests of both ways to keep one begin with.

use ringtap_tests::{Control, Server, ok, program};
use serde_json::json;

use crate::bench::Bench;
use crate::checkpoints::add_copy;
use crate::jobs::make;

/// The disk `a` with a checkpoint `old` and two writes since, the node `copy`, and an NBD server.
pub fn served(bench: &Bench, format: &str) -> (Server, Control) {
    make(bench, "a.img", format, &[]);
    make(bench, "copy", "qcow2", &[]);
    let server = bench.serve(&["a.img"], &["-f", format]);
    let mut control = bench.control();
    bench.io("a", &["write -P 1 0 16M"]);
    let old = json!({ "node": "a", "name": "old", "persistent": true });
    control.ok("block-dirty-bitmap-add", old);
    bench.io("a", &["write -P 2 1M 64k", "write -P 3 32M 128k"]);
    add_copy(&mut control, bench, "qcow2");
    let data = json!({ "path": bench.text("pull") });
    control.ok("nbd-server-start", json!({ "addr": { "type": "unix", "data": data } }));
    (server, control)
}

/// What the disk holds now, as a file.
pub fn now(bench: &Bench) -> String {
    let (uri, file) = (bench.uri("a"), bench.text("then.raw"));
    ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", &uri, &file]);
    file
}

/// Where an export of that server is found.
pub fn uri(bench: &Bench, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", bench.text("pull"))
}

/// Whether the moment at `uri` is read, which holds what nobody has written to since.
pub fn is_read(uri: &str) -> bool {
    let args = ["-r", "-f", "raw", "-c", "read -P 1 8M 64k", uri];
    let output = program("qemu-io", "qemu-utils", args);
    output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
}

/// Clients pull what is shown at `uri`, which is that file.
pub fn is_pulled(bench: &Bench, uri: &str, then: &str) {
    let copies = ["by-nbdcopy.raw", "by-qemu.raw"].map(|name| bench.text(name));
    ok("nbdcopy", "libnbd-bin", &[uri, &copies[0]]);
    ok("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "raw", uri, &copies[1]]);
    for copy in &copies {
        ok("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", then, copy]);
    }
}
