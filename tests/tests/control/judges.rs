//! QEMU's own storage daemon beside this server: both are told the same.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{Control, ok, patience, ringtap};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Empty;

/// A `qemu-storage-daemon`; killed when dropped.
pub(crate) struct Daemon {
    pub(crate) dir: TempDir,
    child: Child,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    pub(crate) fn start() -> (Daemon, Control) {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let path = dir.path().join("control");
        let chardev = format!("socket,id=c,path={},server=on,wait=off", path.display());
        let mut daemon = Command::new("qemu-storage-daemon");
        daemon.args(["--chardev", &chardev, "--monitor", "chardev=c"]);
        // Written when all is set up: who connects before that is greeted twice.
        let pid_file = dir.path().join("pid");
        daemon.arg("--pidfile").arg(&pid_file);
        let child = daemon.spawn().expect("apt-get install qemu-system-common");
        let end = Instant::now() + patience();
        while !pid_file.exists() {
            assert!(Instant::now() < end, "qemu-storage-daemon does not come");
            std::thread::sleep(Duration::from_millis(5));
        }
        (Daemon { dir, child }, Control::open(&path))
    }
}

/// What clients do, from the first disk to the last; paths are in FOLDER.
fn session() -> Vec<(&'static str, Value)> {
    let file = |name: &str| json!({"driver": "file", "filename": format!("FOLDER/{name}")});
    let unix = |name: &str| json!({"type": "unix", "path": format!("FOLDER/{name}")});
    let raw = json!({"driver": "raw", "node-name": "drive", "discard": "unmap", "file": {"driver": "file", "filename": "FOLDER/a.raw", "node-name": "file", "auto-read-only": true, "aio": "threads"}});
    let with = |mut value: Value, key: &str, more: Value| {
        value[key] = more;
        value
    };
    let vhost = json!({"type": "vhost-user-blk", "id": "vhost", "node-name": "drive", "addr": unix("v"), "num-queues": 2, "writable": true});
    let nbd = json!({"type": "nbd", "id": "nbd", "node-name": "drive"});
    let server = json!({"addr": {"type": "unix", "data": {"path": "FOLDER/n"}}});
    vec![
        ("qmp_capabilities", json!({})),
        ("no-such-command", json!({})),
        ("query-version", json!({"x": 1})),
        ("blockdev-add", json!({})),
        ("blockdev-add", json!({"driver": "raw"})),
        ("blockdev-add", with(raw.clone(), "driver", json!("nope"))),
        ("blockdev-add", with(raw.clone(), "driver", json!(1))),
        ("blockdev-add", with(raw.clone(), "nope", json!(1))),
        ("blockdev-add", with(raw.clone(), "file", with(file("a.raw"), "nope", json!(1)))),
        ("blockdev-add", with(raw.clone(), "read-only", json!("yes"))),
        ("blockdev-add", raw.clone()),
        ("blockdev-add", with(raw, "file", file("a.raw"))),
        ("block_resize", json!({"node-name": "drive"})),
        ("block_resize", json!({"node-name": "drive", "size": "1"})),
        ("block_resize", json!({"node-name": "drive", "size": -1})),
        ("block_resize", json!({"node-name": "nope", "size": 1})),
        ("block_resize", json!({"node-name": "drive", "size": 2 << 20})),
        ("nbd-server-stop", json!({})),
        ("block-export-add", nbd.clone()),
        ("block-export-add", with(vhost.clone(), "num-queues", json!(0))),
        ("block-export-add", with(vhost.clone(), "type", json!("nope"))),
        ("block-export-add", with(vhost.clone(), "addr", json!({"type": "unix"}))),
        ("block-export-add", with(vhost.clone(), "node-name", json!("nope"))),
        ("block-export-add", vhost.clone()),
        ("block-export-add", vhost),
        ("nbd-server-start", json!({"addr": {"type": "unix", "path": "FOLDER/n"}})),
        ("nbd-server-start", server.clone()),
        ("nbd-server-start", server),
        ("block-export-add", nbd.clone()),
        ("block-export-add", with(nbd.clone(), "id", json!("other"))),
        ("block-export-add", with(with(nbd, "id", json!("other")), "name", json!("named"))),
        ("blockdev-del", json!({"node-name": "nope"})),
        ("blockdev-del", json!({"node-name": "drive"})),
        ("block-export-del", json!({"id": "nope"})),
        ("block-export-del", json!({"id": "nbd", "mode": "nope"})),
        ("block-export-del", json!({"id": "nbd"})),
        ("nbd-server-stop", json!({})),
        ("block-export-del", json!({"id": "vhost"})),
        ("blockdev-del", json!({"node-name": "drive"})),
        ("blockdev-del", json!({"node-name": "drive"})),
    ]
}

/// What is said to the whole session: results and errors as they are, events by the way.
fn told(control: &mut Control, folder: &Path) -> Vec<String> {
    let disk = std::fs::File::create(folder.join("a.raw")).expect("an image");
    disk.set_len(1 << 20).expect("its size");
    let mut all = vec![];
    for (command, arguments) in session() {
        let text = arguments.to_string().replace("FOLDER", &folder.display().to_string());
        let arguments: Value = serde_json::from_str(&text).expect("JSON");
        all.push(format!("{command} {:?}", control.call(command, arguments)));
    }
    // nbd-server-stop takes the other NBD export with it.
    let mut gone: Vec<String> = (0..3).map(|_| control.event().1["id"].to_string()).collect();
    gone.sort();
    all.extend(gone);
    all
}

#[test]
fn clients_of_qemus_storage_daemon_hear_what_they_are_used_to() {
    let (daemon, mut theirs) = Daemon::start();
    let mut empty = Empty::new();
    let wanted = told(&mut theirs, daemon.dir.path());
    let folder = empty.dir.path().to_owned();
    let found = told(&mut empty.control, &folder);
    assert!(wanted.len() > 30);
    // Where a text differs it says more here.
    let same = |text: &str| match text.split_once("Node 'drive' is in use: ") {
        Some((before, after)) => {
            let rest = after.split_once('"').map_or("", |(_, rest)| rest);
            format!("{before}Node drive is in use\"{rest}")
        }
        None => text.to_owned(),
    };
    for (wanted, found) in wanted.iter().zip(&found) {
        assert_eq!(*wanted, same(found));
    }
    assert_eq!(wanted.len(), found.len());
    theirs.ok("quit", json!({}));
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}

/// A command line of QEMU's storage daemon, given to this server.
fn as_qemus() -> Command {
    let mut program = Command::new("python3");
    let shim = Path::new(env!("CARGO_MANIFEST_DIR")).join("judges/qemu-storage-daemon");
    program.arg(shim).env("RINGTAP", ringtap());
    program
}

#[test]
fn it_is_started_as_qemus_storage_daemon_is() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| dir.path().join(name).display().to_string();
    let (base, top, socket) = (text("base"), text("top"), text("nbd"));
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &base, "4M"]);
    ok(
        "qemu-img",
        "qemu-utils",
        &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &top],
    );
    let mut program = as_qemus();
    program.args(["--chardev", "stdio,id=stdio", "--monitor", "chardev=stdio"]);
    program.args(["--object", "iothread,id=thread"]);
    for (driver, name, more) in [
        ("file", "file_base", format!("filename={base}")),
        ("qcow2", "fmt_base", "file=file_base".to_owned()),
        ("file", "file_top", format!("filename={top}")),
        ("qcow2", "fmt_top", "file=file_top,backing=fmt_base".to_owned()),
    ] {
        program.args(["--blockdev", &format!("driver={driver},node-name={name},{more}")]);
    }
    program.arg(format!("--nbd-server=addr.type=unix,addr.path={socket}"));
    program.args(["--export", "nbd,id=export,node-name=fmt_base,writable=on,iothread=thread"]);
    program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = program.spawn().expect("python3");
    // What its guest writes to is not to be read for a job.
    let commands = [
        json!({ "execute": "qmp_capabilities" }),
        json!({ "execute": "block-stream", "arguments": { "device": "fmt_top", "job-id": "j" } }),
        json!({ "execute": "quit" }),
    ];
    let commands = commands.map(|one| one.to_string()).join("\n");
    let mut stdin = child.stdin.take().expect("its input");
    stdin.write_all(commands.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8(output.stdout).expect("text");
    let said: Vec<Value> =
        said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(said[0]["QMP"].is_object(), "{said:?}");
    assert_eq!(
        (&said[1], &said[5]),
        (&json!({ "return": {} }), &json!({ "return": {} })),
        "{said:?}"
    );
    for (at, status) in [(2, "created"), (3, "null")] {
        assert_eq!(said[at]["data"], json!({ "id": "j", "status": status }), "{said:?}");
    }
    let refused = said[4]["error"]["desc"].as_str().expect("a refusal");
    assert!(refused.starts_with("Permission conflict on node 'fmt_base': permissions 'write'"));
    // The export goes with the server, and its clients are told.
    assert_eq!(said[6]["event"], "BLOCK_EXPORT_DELETED", "{said:?}");
    assert_eq!(said.len(), 7, "{said:?}");
    let refused = as_qemus().args(["--export", "fuse"]).output().expect("python3");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Parameter 'id' is missing"));
}

/// What commands say of chains of images that they cannot do: of three nodes, each upon the one before.
fn chain_session(folder: &Path) -> Vec<(&'static str, Value)> {
    let path = |name: &str| folder.join(name).display().to_string();
    let names = ["base", "mid", "top"];
    for (at, name) in names.iter().enumerate() {
        let mut args =
            vec!["create".to_owned(), "-q".to_owned(), "-f".to_owned(), "qcow2".to_owned()];
        if let Some(below) = at.checked_sub(1) {
            args.extend(["-F".to_owned(), "qcow2".to_owned(), "-b".to_owned(), path(names[below])]);
        }
        args.extend([path(name), "4M".to_owned()]);
        ok("qemu-img", "qemu-utils", &args.iter().map(String::as_str).collect::<Vec<_>>());
    }
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "raw", &path("lone"), "4M"]);
    let file = |name: &str| json!({"driver": "file", "filename": path(name)});
    let mut all = vec![("qmp_capabilities", json!({}))];
    for (at, name) in names.iter().enumerate() {
        let mut node =
            json!({"driver": "qcow2", "node-name": name, "file": file(name), "read-only": at < 2});
        node["backing"] = at.checked_sub(1).map_or(Value::Null, |below| names[below].into());
        all.push(("blockdev-add", node));
    }
    all.push(("blockdev-add", json!({"driver": "raw", "node-name": "lone", "file": file("lone")})));
    let with = |more: Value| {
        let mut all = json!({"device": "top", "job-id": "j"});
        more.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        all
    };
    for more in [
        json!({"device": "nobody"}),
        json!({"top": "x", "top-node": "mid"}),
        json!({"base": "x", "base-node": "base"}),
        json!({"top-node": "nobody"}),
        json!({"base-node": "nobody"}),
        json!({"top-node": "lone"}),
        json!({"base-node": "lone"}),
        json!({"top-node": "mid", "base-node": "top"}),
        json!({"top-node": "mid", "base-node": "mid"}),
        json!({"top-node": "base"}),
        json!({"top": "/nowhere"}),
        json!({"base": "/nowhere"}),
        json!({"top-node": "mid", "base": "/nowhere"}),
        json!({"backing-file": "x"}),
        json!({"on-error": "nope"}),
    ] {
        all.push(("block-commit", with(more)));
    }
    for more in [
        json!({"base": "x", "base-node": "base"}),
        json!({"base": "x", "bottom": "mid"}),
        json!({"base-node": "base", "bottom": "mid"}),
        json!({"base-node": "nobody"}),
        json!({"base-node": "top"}),
        json!({"base-node": "lone"}),
        json!({"base": "/nowhere"}),
        json!({"bottom": "nobody"}),
        json!({"bottom": "lone"}),
        json!({"backing-file": "x"}),
        json!({"backing-file": "x", "bottom": "base"}),
    ] {
        all.push(("block-stream", with(more)));
    }
    let keep = |more: Value| {
        let mut all = json!({"driver": "copy-before-write", "node-name": "cbw", "file": "top", "target": "lone"});
        more.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        all
    };
    for more in [
        json!({"file": "nobody"}),
        json!({"target": "nobody"}),
        json!({"on-cbw-error": "nope"}),
        json!({"nope": 1}),
    ] {
        all.push(("blockdev-add", keep(more)));
    }
    all.extend([
        ("blockdev-add", json!({"driver": "snapshot-access", "node-name": "s"})),
        ("blockdev-add", json!({"driver": "snapshot-access", "node-name": "s", "file": "nobody"})),
    ]);
    all
}

#[test]
fn what_cannot_be_done_to_chains_is_said_as_qemu_says_it() {
    let say = |control: &mut Control, folder: &Path| -> Vec<String> {
        let all = chain_session(folder).into_iter();
        let said = all.map(|(command, arguments)| {
            let end = control.call(command, arguments.clone());
            format!("{command} {arguments} {end:?}")
                .replace(&folder.display().to_string(), "FOLDER")
        });
        said.collect()
    };
    let (theirs, mut control) = Daemon::start();
    let theirs = say(&mut control, theirs.dir.path());
    let mut empty = Empty::new();
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let ours = say(&mut empty.control, folder.path());
    let differ: Vec<_> = theirs.iter().zip(&ours).filter(|(theirs, ours)| theirs != ours).collect();
    assert!(differ.is_empty(), "{differ:#?}");
}

/// QEMU's own library for clients, as PyPI has it; none where that cannot be had.
pub(crate) fn library() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qemu.qmp");
    if !folder.join("qemu/qmp").is_dir() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "-q", "--no-input", "--target"]).arg(&folder);
        let made = pip.arg("qemu.qmp==0.0.3").output().ok()?;
        made.status.success().then_some(())?;
    }
    Some(folder)
}

/// What its client does here: greeted, it negotiates, waits for events, and hears of errors.
const SESSION: &str = r#"
import asyncio, sys
from qemu.qmp import QMPClient, ExecuteError

async def main():
    client = QMPClient('test')
    await client.connect(sys.argv[1])
    with client.listener() as events:
        await client.execute('blockdev-create', {'job-id': 'j', 'options': {
            'driver': 'file', 'filename': sys.argv[2], 'size': 1 << 20}})
        async for event in events:
            if event['data'].get('status') == 'concluded':
                break
        await client.execute('job-dismiss', {'id': 'j'})
    await client.execute('blockdev-add', {'driver': 'file', 'node-name': 'f', 'filename': sys.argv[2]})
    await client.execute('blockdev-add', {'driver': 'raw', 'node-name': 'd', 'file': 'f'})
    nodes = await client.execute('query-named-block-nodes', {'flat': True})
    print(sorted(node['node-name'] for node in nodes))
    try:
        await client.execute('blockdev-del', {'node-name': 'f'})
    except ExecuteError as error:
        print(error.error_class)
    schema = await client.execute('query-qmp-schema')
    commands = await client.execute('query-commands')
    known = {one['name'] for one in schema if one['meta-type'] == 'command'}
    print(known == {one['name'] for one in commands})
    await client.disconnect()

asyncio.run(main())
"#;

#[test]
fn qemus_own_client_is_at_home() {
    let Some(library) = library() else {
        println!("skipped: pip cannot install qemu.qmp here");
        return;
    };
    let mut empty = Empty::new();
    let mut python = Command::new("python3");
    python.args(["-c", SESSION, &empty.text("control"), &empty.text("image")]);
    let output = python.env("PYTHONPATH", library).output().expect("python3");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said, "['d', 'f']\nGenericError\nTrue\n");
    empty.control.ok("quit", json!({}));
    empty.server.ends();
}
