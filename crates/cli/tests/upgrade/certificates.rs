//! Certificates that clients of the control socket have named go on by their names, and so does the NBD server that shows them.

use std::fs;
use std::process::Command;

use crate::bench::{Bench, ends, image, said, stop};
use crate::jobs::qmp;
use crate::names::ok;
use crate::tls::{certificates, tls_client};

/// What `nbdinfo` says of the export there; none where it is refused.
fn export(bench: &Bench, name: &str) -> Option<String> {
    let (socket, keys) = (bench.path("nbd.sock"), bench.path("client"));
    let scheme = if name.is_empty() { "nbd" } else { "nbds" };
    let tls = format!("&tls-certificates={}&tls-hostname=localhost", keys.display());
    let uri = format!("{scheme}+unix:///a?socket={}{tls}", socket.display());
    let output = Command::new("nbdinfo").args(["--size", &uri]).output().expect("nbdinfo");
    output.status.success().then(|| said(&output))
}

fn object(bench: &Bench, id: &str, endpoint: &str) -> String {
    let folder = bench.path(endpoint);
    format!(
        r#"{{"qom-type":"tls-creds-x509","id":"{id}","endpoint":"{endpoint}","dir":"{}"}}"#,
        folder.display()
    )
}

#[test]
fn certificates_given_at_run_time_go_on() {
    let mut bench = Bench::new();
    certificates(&bench);
    image(&bench, "qcow2");
    bench.ends_with("create -q -f raw b.raw 64M", 0);
    let folder = bench.path("");
    let at = |name: &str| folder.join(name).display().to_string();
    let (_child, mut server) = bench.serve("daemon --control unix:c.sock");
    ok(&bench, "object-add", &object(&bench, "s", "server"));
    ok(&bench, "object-add", &object(&bench, "c", "client"));
    bench.ends_with(
        "disk add b.raw -f raw --node-name b --vhost-user vu.sock --control unix:c.sock",
        0,
    );
    let address = format!(r#"{{"type":"unix","data":{{"path":"{}"}}}}"#, at("nbd.sock"));
    let start = format!(r#"{{"addr":{address},"tls-creds":"s","max-connections":9}}"#);
    ok(&bench, "nbd-server-start", &start);
    // A server that shows nothing goes on, too.
    let load = bench.load("vu.sock", 3);
    let mut follow = |bench: &mut Bench, words: &str| {
        let next = bench.upgrade(&format!("unix:c.sock {words}"));
        ends(server);
        server = next;
    };
    follow(&mut bench, "");
    bench.verified(load);
    let again = qmp(&bench, &format!(r#"{{"execute":"nbd-server-start","arguments":{start}}}"#));
    assert!(again.contains("already running"), "{again}\n{}", bench.log());
    let disk = at("a.qcow2");
    let add = r#"{"driver":"qcow2","node-name":"a","file":{"driver":"file","filename":"PATH"}}"#;
    ok(&bench, "blockdev-add", &add.replace("PATH", &disk));
    ok(
        &bench,
        "block-export-add",
        r#"{"type":"nbd","id":"e","node-name":"a","name":"a","writable":true}"#,
    );
    // Its server has them whether they have a name or not.
    ok(&bench, "object-del", r#"{"id":"s"}"#);
    let (load, client) = (bench.load("vu.sock", 8), tls_client(&bench));
    for _ in 0..3 {
        follow(&mut bench, "--close-tls");
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    client.verified(&bench);
    bench.verified(load);
    assert!(export(&bench, "").is_none(), "who speaks no TLS is served");
    let size = export(&bench, "a").expect("who does is not");
    assert_eq!(size.trim(), (64 << 20).to_string());
    // The names are those that there were, no more and no less.
    for (id, is_there) in [("s", false), ("c", true)] {
        let delete = format!(r#"{{"execute":"object-del","arguments":{{"id":"{id}"}}}}"#);
        let answer = qmp(&bench, &delete);
        assert_eq!(answer.contains("return"), is_there, "{id}: {answer}");
    }
    // Those that cannot be read any more are told by the next process, and this one goes on.
    let load = bench.load("vu.sock", 2);
    ok(&bench, "object-add", &object(&bench, "c", "client"));
    let keys = bench.path("client");
    fs::rename(&keys, bench.path("elsewhere")).expect("it moves");
    let refused = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(refused.contains("the certificates c"), "{refused}");
    fs::rename(bench.path("elsewhere"), &keys).expect("it moves back");
    bench.verified(load);
    follow(&mut bench, "");
    assert!(export(&bench, "a").is_some(), "{}", bench.log());
    stop(server);
}
