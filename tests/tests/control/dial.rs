//! A client that listens, and that the server connects to.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use ringtap_tests::{Control, Server, ringtap};
use serde_json::json;
use tempfile::TempDir;

use crate::judges::library;

fn dialled(path: &Path) -> String {
    format!("connect:{}", path.display())
}

#[test]
fn a_client_that_listens_is_connected_to_and_again_where_it_has_gone() {
    let dir = TempDir::new().expect("a folder");
    let (path, own) = (dir.path().join("client"), dir.path().join("control"));
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = Server::start([
        "null:1M",
        "--node-name",
        "d",
        "--control",
        &dialled(&path),
        "--control",
        &format!("unix:{}", own.display()),
    ]);
    let mut client = Control::accept(&listener);
    client.ok("blockdev-add", json!({"driver": "null-co", "node-name": "e", "size": 1 << 20}));
    // What is told is told to it, too.
    let mut other = Control::open(&own);
    let addr = json!({"type": "unix", "data": {"path": dir.path().join("nbd")}});
    other.ok("nbd-server-start", json!({"addr": addr}));
    other.ok("block-export-add", json!({"id": "x", "type": "nbd", "node-name": "e"}));
    client.ok("block-export-del", json!({"id": "x"}));
    assert_eq!(client.event(), ("BLOCK_EXPORT_DELETED".into(), json!({"id": "x"})));
    for _ in 0..3 {
        drop(client);
        client = Control::accept(&listener);
    }
    // One that greets nobody for a while, and one in whose place another comes.
    drop(client);
    drop(listener);
    std::fs::remove_file(&path).expect("the socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    let mut client = Control::accept(&listener);
    client.ok("query-version", json!({}));
    client.ok("quit", json!({}));
    server.ends();
    assert!(path.exists(), "the socket is the client's");
}

#[test]
fn a_client_may_come_after_the_server_and_the_server_end_before_it() {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("client");
    let disks = dir.path().join("disks").display().to_string();
    let args = ["--control", &dialled(&path), "--disks", &disks];
    let server = Server::daemon(args);
    let said = server.stop();
    assert!(said.contains("cannot connect to the control client"), "{said}");
    let server = Server::daemon(args);
    let listener = UnixListener::bind(&path).expect("a socket");
    let mut client = Control::accept(&listener);
    assert_eq!(client.ok("query-block-exports", json!({})), json!([]));
    server.stop();
    assert!(client.hear().is_none(), "it is closed");
}

/// What QEMU's client does where it listens.
const SESSION: &str = r#"
import asyncio, sys
from qemu.qmp import QMPClient

async def main():
    for _ in range(2):
        client = QMPClient('test')
        await client.start_server(sys.argv[1])
        print('listens', flush=True)
        await client.accept()
        print((await client.execute('query-version'))['package'].split()[0], flush=True)
        await client.disconnect()

asyncio.run(main())
"#;

#[test]
fn qemus_own_client_that_listens_is_at_home() {
    let Some(library) = library() else {
        println!("skipped: pip cannot install qemu.qmp here");
        return;
    };
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("client");
    let disks = dir.path().join("disks").display().to_string();
    let server = Server::daemon(["--control", &dialled(&path), "--disks", &disks]);
    let mut python = Command::new("timeout");
    python.args(["60", "python3", "-c", SESSION]).arg(&path).env("PYTHONPATH", library);
    let output = python.stdin(Stdio::null()).output().expect("python3");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said, "listens\nringtap\nlistens\nringtap\n");
    server.stop();
}

#[test]
fn what_is_no_way_to_a_client_is_refused() {
    for wrong in ["/run/x", "connect:", "unix:", "tcp:h:1"] {
        let mut serve = Command::new(ringtap());
        let output =
            serve.args(["serve", "null:1M", "--control", wrong]).output().expect("ringtap");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("connect:PATH"), "{wrong}: {said}");
    }
}
