//! Certificates that clients name, for the NBD server and for exports of others; QEMU at the other end.

use std::path::{Path, PathBuf};

use ringtap_tests::{Control, Server, ok, program};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::judges::Daemon;
use crate::{Empty, node, options};

/// A folder with certificates of several kinds in folders of it.
fn certificates() -> TempDir {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let script = include_str!("../../../crates/export/tests/nbd/certificates.py");
    let place = dir.path().display().to_string();
    ok("/usr/bin/python3", "python3-cryptography", &["-c", script, &place]);
    dir
}

fn creds(id: &str, endpoint: &str, dir: &Path) -> Value {
    json!({"qom-type": "tls-creds-x509", "id": id, "endpoint": endpoint, "dir": dir})
}

fn unix(path: &Path) -> Value {
    json!({"type": "unix", "data": {"path": path}})
}

/// What qemu-io says that connects with these certificates, or with none, and reads.
fn reads(uri: &str, of: Option<PathBuf>) -> Result<String, String> {
    let image = format!("driver=nbd,{}", options(uri));
    let mut args = vec!["-r".to_owned()];
    let image = match of {
        None => image,
        Some(dir) => {
            let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", dir.display());
            args.extend(["--object".to_owned(), object]);
            format!("{image},tls-creds=t,tls-hostname=localhost")
        }
    };
    args.extend(["--image-opts", &image, "-c", "read -P 7 0 4k"].map(str::to_owned));
    let output = program("qemu-io", "qemu-utils", args);
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    match output.status.success() && said.contains("read 4096/4096") && !said.contains("failed") {
        true => Ok(said),
        false => Err(said),
    }
}

#[test]
fn the_nbd_server_speaks_tls_with_certificates_that_a_client_names() {
    let dir = certificates();
    let of = |name: &str| dir.path().join(name);
    let disks = dir.path().join("disks");
    std::fs::create_dir(&disks).expect("a folder");
    let args = [
        "--control".to_owned(),
        format!("unix:{}", of("control").display()),
        "--disks".to_owned(),
        disks.display().to_string(),
        "--persist".to_owned(),
    ];
    let server = Server::daemon(&args);
    let mut control = Control::open(&of("control"));
    std::fs::write(of("a"), [7; 1 << 20]).expect("an image");
    control.ok("blockdev-add", node("a", "raw", &of("a")));
    control.ok("object-add", creds("s", "server", &of("server")));
    let start = json!({"addr": unix(&of("nbd")), "tls-creds": "s"});
    control.ok("nbd-server-start", start.clone());
    // What is there needs the name no more.
    control.ok("object-del", json!({"id": "s"}));
    control.ok("block-export-add", json!({"id": "x", "type": "nbd", "node-name": "a"}));
    let uri = format!("nbd+unix:///a?socket={}", of("nbd").display());
    let check = |uri: &str| {
        reads(uri, Some(of("client"))).expect("a client of the same authority");
        reads(uri, Some(of("nobody"))).expect_err("a client that shows no certificate");
        reads(uri, None).expect_err("a client in the clear");
    };
    check(&uri);
    // The next server is none in the clear.
    server.kill();
    let server = Server::daemon(&args);
    check(&uri);
    let mut control = Control::open(&of("control"));
    control.ok("nbd-server-stop", json!({}));
    let all = creds("all", "server", &of("server"));
    let all = [("verify-peer", json!(false))].into_iter().fold(all, |mut all, (key, value)| {
        all[key] = value;
        all
    });
    control.ok("object-add", all);
    let start = json!({"addr": unix(&of("nbd")), "tls-creds": "all"});
    control.ok("nbd-server-start", start);
    control.ok("block-export-add", json!({"id": "x", "type": "nbd", "node-name": "a"}));
    reads(&uri, Some(of("nobody"))).expect("a client that shows no certificate");
    reads(&uri, None).expect_err("a client in the clear");
    server.stop();
}

#[test]
fn an_export_of_qemus_nbd_server_is_reached_by_tls() {
    let dir = certificates();
    let of = |name: &str| dir.path().join(name);
    let (_daemon, mut theirs) = Daemon::start();
    std::fs::write(of("a"), [7; 1 << 20]).expect("an image");
    theirs.ok("blockdev-add", json!({"driver": "file", "node-name": "a", "filename": of("a")}));
    theirs.ok("object-add", creds("s", "server", &of("server")));
    theirs.ok("nbd-server-start", json!({"addr": unix(&of("nbd")), "tls-creds": "s"}));
    theirs.ok("block-export-add", json!({"id": "a", "type": "nbd", "node-name": "a"}));
    let mut empty = Empty::new();
    let control = &mut empty.control;
    control.ok("object-add", creds("c", "client", &of("client")));
    control.ok("object-add", creds("o", "client", &of("server")));
    let disk = |more: Value| {
        let server = json!({"type": "unix", "path": of("nbd")});
        let mut file = json!({"driver": "nbd", "server": server, "export": "a"});
        more.as_object().into_iter().flatten().for_each(|(key, of)| file[key] = of.clone());
        json!({"driver": "raw", "node-name": "d", "read-only": true, "file": file})
    };
    let said = control.call("blockdev-add", disk(json!({}))).expect_err("in the clear");
    assert!(said.contains("TLS"), "{said}");
    let said = control.call("blockdev-add", disk(json!({"tls-creds": "c"}))).expect_err("no name");
    assert!(said.contains("tls-hostname"), "{said}");
    let wrong = json!({"tls-creds": "c", "tls-hostname": "elsewhere"});
    control.call("blockdev-add", disk(wrong)).expect_err("a server of another name");
    let right = json!({"tls-creds": "c", "tls-hostname": "localhost"});
    control.ok("blockdev-add", disk(right));
    control.ok("nbd-server-start", json!({"addr": unix(&empty.dir.path().join("nbd"))}));
    control.ok("block-export-add", json!({"id": "d", "type": "nbd", "node-name": "d"}));
    let uri = format!("nbd+unix:///d?socket={}", empty.dir.path().join("nbd").display());
    reads(&uri, None).expect("what the other server has");
    theirs.ok("quit", json!({}));
}

/// What is said of certificates that are not there, and of words that there are not.
fn wrong(dir: &Path) -> Vec<(&'static str, Value)> {
    let with = |mut value: Value, key: &str, more: Value| {
        value[key] = more;
        value
    };
    let good = creds("t", "server", &dir.join("server"));
    let bare = json!({"qom-type": "tls-creds-x509", "id": "t"});
    let start = |id: &str| json!({"addr": unix(&dir.join("n")), "tls-creds": id});
    let disk = |id: &str| {
        let server = json!({"type": "unix", "path": dir.join("n")});
        json!({"driver": "nbd", "node-name": "d", "server": server, "tls-creds": id})
    };
    vec![
        ("object-add", bare),
        ("object-add", with(good.clone(), "nope", json!(1))),
        ("object-add", with(good.clone(), "endpoint", json!("peer"))),
        ("object-add", with(good.clone(), "verify-peer", json!("yes"))),
        ("object-add", with(good.clone(), "dir", json!(1))),
        ("nbd-server-start", start("t")),
        ("blockdev-add", disk("t")),
        ("object-add", good),
        ("object-add", creds("c", "client", &dir.join("client"))),
        ("blockdev-add", disk("t")),
        ("nbd-server-start", start("c")),
        ("object-del", json!({"id": "c"})),
        ("nbd-server-start", start("c")),
        ("nbd-server-start", with(start("t"), "nope", json!(1))),
        ("nbd-server-start", start("t")),
        ("object-del", json!({"id": "t"})),
        ("object-del", json!({"id": "t"})),
        ("nbd-server-stop", json!({})),
    ]
}

#[test]
fn what_is_wrong_with_certificates_is_said_as_qemu_says_it() {
    let dir = certificates();
    let say = |control: &mut Control| -> Vec<String> {
        let all = wrong(dir.path()).into_iter();
        all.map(|(command, arguments)| {
            let end = control.call(command, arguments.clone());
            format!("{command} {arguments} {end:?}")
        })
        .collect()
    };
    let (_daemon, mut theirs) = Daemon::start();
    let mut empty = Empty::new();
    assert_eq!(say(&mut theirs), say(&mut empty.control));
    // What differs says more here, or is not offered.
    let control = &mut empty.control;
    let mut of = creds("t", "server", &dir.path().join("client"));
    let said = control.call("object-add", of.clone()).expect_err("no server's");
    assert!(said.contains("client/server-cert.pem"), "{said}");
    (of["endpoint"], of["verify-peer"]) = ("client".into(), false.into());
    let said = control.call("object-add", of).expect_err("anybody's");
    assert!(said.contains("any server"), "{said}");
    theirs.ok("quit", json!({}));
}
