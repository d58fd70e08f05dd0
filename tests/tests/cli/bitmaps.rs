//! Dirty bitmaps over NBD, with QEMU's server as the other witness.

use std::path::Path;

use serde_json::Value;

use crate::program::{Running, program, python};
use crate::served::Server;
use crate::{folder, nbdinfo, qemu_io, run};

/// Extents of a context: offset, length, flags.
type Map = Vec<(u64, u64, u64)>;

fn extents(said: &str) -> Map {
    let map: Vec<Value> = serde_json::from_str(said).expect("JSON");
    let number = |extent: &Value, key: &str| extent[key].as_u64().expect("a number");
    let keys = ["offset", "length", "type"];
    map.iter().map(|extent| keys.map(|key| number(extent, key)).into()).collect()
}

fn map(uri: &str, context: &str) -> Map {
    extents(&nbdinfo(&["--json", &format!("--map={context}"), uri]).ok())
}

fn dirty(uri: &str, name: &str) -> Map {
    map(uri, &format!("qemu:dirty-bitmap:{name}"))
}

/// What qemu-nbd shows of an image at rest.
fn by_qemu(folder: &Path, name: &str) -> Map {
    let mut command = program("nbdinfo", "libnbd-bin");
    command.current_dir(folder).arg("--json").arg(format!("--map=qemu:dirty-bitmap:{name}"));
    command.args(["--", "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, "a.qcow2", "]"]);
    extents(&Running::start(command).wait().ok())
}

fn qemu_img(folder: &Path, words: &str) -> String {
    let mut command = program("qemu-img", "qemu-utils");
    command.current_dir(folder).args(words.split_whitespace());
    Running::start(command).wait().ok()
}

const SERVE: &str = "a.qcow2 -f qcow2 --cache writeback --nbd unix:s --bitmap one --bitmap off";

fn image(folder: &Path) {
    qemu_img(folder, "create -q -f qcow2 a.qcow2 64M");
    qemu_img(folder, "bitmap --add -g 4k a.qcow2 one");
    qemu_img(folder, "bitmap --add a.qcow2 off");
    let mut write = program("qemu-io", "qemu-utils");
    write.current_dir(folder).args(["-f", "qcow2", "-c", "write 32M 8k", "a.qcow2"]);
    Running::start(write).wait().ok();
    qemu_img(folder, "bitmap --disable a.qcow2 off");
}

#[test]
fn bitmaps_are_shown_while_they_grow_and_outlive_a_kill() {
    let dir = folder();
    image(dir.path());
    let mut server = Server::start(dir.path(), SERVE);
    let uri = server.uri(0);
    let list: Value =
        serde_json::from_str(&nbdinfo(&["--json", "--list", &uri]).ok()).expect("JSON");
    let contexts = ["base:allocation", "qemu:dirty-bitmap:one", "qemu:dirty-bitmap:off"];
    assert_eq!(list["exports"][0]["contexts"], Value::from(contexts.to_vec()));
    let clean = |from: u64, to: u64| (from, to - from, 0);
    let (mib, end) = (1 << 20, 64 << 20);
    let before = vec![clean(0, 32 * mib), (32 * mib, 8192, 1), clean(32 * mib + 8192, end)];
    assert_eq!(dirty(&uri, "one"), before);
    let off = dirty(&uri, "off");
    for order in ["write 1M 5k", "write -z 4M 1M", "discard 8M 1M"] {
        qemu_io(dir.path(), &uri, order).wait().ok();
    }
    let after = vec![
        clean(0, mib),
        (mib, 8192, 1),
        clean(mib + 8192, 4 * mib),
        (4 * mib, mib, 1),
        clean(5 * mib, 8 * mib),
        (8 * mib, mib, 1),
        clean(9 * mib, 32 * mib),
        (32 * mib, 8192, 1),
        clean(32 * mib + 8192, end),
    ];
    assert_eq!(dirty(&uri, "one"), after);
    server.kill();

    server = Server::start(dir.path(), SERVE);
    assert_eq!((dirty(&uri, "one"), dirty(&uri, "off")), (after.clone(), off.clone()));
    server.stop().ok();
    assert_eq!((by_qemu(dir.path(), "one"), by_qemu(dir.path(), "off")), (after.clone(), off));
    qemu_img(dir.path(), "check -q a.qcow2");

    // Only looked at: nothing is marked, and the file stays as it is.
    let bytes = std::fs::read(dir.path().join("a.qcow2")).expect("the image");
    let reader = Server::start(dir.path(), &format!("{SERVE} --read-only"));
    assert_eq!(dirty(&uri, "one"), after);
    reader.stop().ok();
    assert!(bytes == std::fs::read(dir.path().join("a.qcow2")).expect("the image"));
    let said = run(dir.path(), &format!("serve {SERVE} --bitmap two")).failed(1);
    assert!(said.contains(r#"no bitmap "two""#) && said.contains(r#"["one", "off"]"#), "{said}");
    let said = run(dir.path(), "serve null:1M --nbd unix:s --bitmap two").failed(1);
    assert!(said.contains("only qcow2"), "{said}");
}

/// Both contexts in one request, as a backup asks, and one extent each where one is asked for.
#[test]
fn a_client_asks_for_allocation_and_dirt_at_once() {
    let dir = folder();
    image(dir.path());
    let server = Server::start(dir.path(), SERVE);
    let text = "import nbd, sys\n\
        h = nbd.NBD()\n\
        h.add_meta_context('qemu:dirty-bitmap:one')\n\
        h.add_meta_context('base:allocation')\n\
        h.add_meta_context('qemu:dirty-bitmap:none')\n\
        h.connect_uri(sys.argv[1])\n\
        print(h.can_meta_context('qemu:dirty-bitmap:none'))\n\
        def f(context, offset, entries, error): print(context, offset, entries)\n\
        h.block_status(2 << 20, 31 << 20, f)\n\
        h.block_status(2 << 20, 31 << 20, f, nbd.CMD_FLAG_REQ_ONE)\n";
    let client = Running::start(python(text, &[&server.uri(0)]));
    let said = client.wait().ok();
    let mib = 1 << 20;
    let at = 31 * mib;
    let expected = [
        "False".to_owned(),
        format!("base:allocation {at} [{mib}, 3, 65536, 0, {}, 3]", mib - 65536),
        format!("qemu:dirty-bitmap:one {at} [{mib}, 0, 8192, 1, {}, 0]", mib - 8192),
        format!("base:allocation {at} [{mib}, 3]"),
        format!("qemu:dirty-bitmap:one {at} [{mib}, 0]"),
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
    let mut qemu = program("qemu-img", "qemu-utils");
    let socket = dir.path().join("s").display().to_string();
    let options = format!(
        "driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:one"
    );
    qemu.args(["map", "--output=json", "--image-opts", &options]);
    let text = Running::start(qemu).wait().ok();
    let words = format!("map --output=json --image-opts {options}");
    let own = run(dir.path(), &words).ok().replace(", \"compressed\": false", "");
    assert_eq!(own, text.replace(", \"compressed\": false", ""));
    run(dir.path(), &format!("info --image-opts {options}")).failed(2);
    let none = format!("map --context qemu:dirty-bitmap:none {}", server.uri(0));
    let said = run(dir.path(), &none).failed(1);
    assert!(said.contains("no context"), "{said}");
    let told: Value = serde_json::from_str(&text).expect("JSON");
    // QEMU's client shows what is dirty as what holds no data.
    let shown: Vec<&Value> =
        told.as_array().expect("a list").iter().filter(|extent| extent["data"] == false).collect();
    assert_eq!(shown.len(), 1, "{told}");
    assert_eq!((&shown[0]["start"], &shown[0]["length"]), (&(32 * mib).into(), &8192.into()));
    server.stop().ok();
}
