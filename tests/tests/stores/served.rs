//! Exports of every kind of server, served on.

use ringtap_tests::{is_well, ok};

use crate::bench::{ALL, Bench, Kind, MIB};

#[test]
fn what_a_guest_writes_is_on_the_server_and_nothing_else() {
    for kind in ALL {
        let bench = Bench::new();
        bench.raw("a.raw", 64 * MIB);
        let source = bench.source(kind, "a.raw");
        let server = bench.serve(&bench.uri(), &["-f", "raw"]);
        bench.io_well(&["write -P 1 0 4M", "write -P 2 8M 512", "write -f -P 3 9M 64k", "flush"]);
        bench.holds("a.raw", "raw", &["read -P 1 0 4M", "read -P 2 8M 512", "read -P 3 9M 64k"]);
        bench.io_well(&["write -z 1M 1M", "discard 2M 1M", "write -z -u 3M 64k", "flush"]);
        bench.io_well(&["read -P 0 1M 1M", "read -P 0 3M 64k", "read -P 1 4032k 64k"]);
        is_well(bench.load("2"));
        let said = server.stop();
        assert!(
            !said.contains("connection is lost") && !said.contains("ERROR"),
            "{kind:?}: {said}"
        );
        source.stop();
    }
}

#[test]
fn holes_are_told_of_where_the_server_tells() {
    for kind in ALL {
        let bench = Bench::new();
        bench.raw("a.raw", 64 * MIB);
        let source = bench.source(kind, "a.raw");
        let server = bench.serve(&bench.uri(), &["-f", "raw"]);
        bench.io_well(&["write -P 1 8M 1M", "flush"]);
        let uri = format!("nbd+unix:///d?socket={}", bench.text("nbd"));
        let map = ok("nbdinfo", "libnbd-bin", &["--map", "--totals", &uri]);
        let holes = map.lines().any(|line| line.contains("hole,zero") && line.contains("98.4%"));
        // Where replies are simple there is no way to tell.
        assert_eq!(holes, kind != Kind::NbdkitSimple, "{kind:?}: {map}");
        server.stop();
        source.stop();
    }
}

#[test]
fn a_connection_is_encrypted_where_that_is_asked() {
    let bench = Bench::new();
    bench.raw("a.raw", 8 * MIB);
    let certificates = include_str!("../../../crates/export/tests/nbd/certificates.py");
    let place = bench.dir.path().display().to_string();
    ok("python3", "python3", &["-c", certificates, &place]);
    let listen = format!("unix:{}", bench.text("source"));
    let tls = bench.text("server");
    let image = bench.text("a.raw");
    let words = ["serve", "-f", "raw", "--name", "e", "--tls", "require", "--tls-dir", &tls];
    let args = words.iter().copied().chain(["--nbd", &listen]).skip(1);
    let source = ringtap_tests::Server::start([&*image].into_iter().chain(args));
    let socket = bench.text("source");
    let uri = |folder: &str| {
        format!(
            "nbds+unix:///e?socket={socket}&tls-hostname=localhost&tls-certificates={}",
            bench.text(folder)
        )
    };
    let server = bench.serve(&uri("client"), &["-f", "raw"]);
    bench.io_well(&["write -P 1 0 4M", "write -P 2 5M 4k", "flush", "read -P 1 0 4M"]);
    is_well(bench.load("1"));
    server.stop();
    bench.holds("a.raw", "raw", &["read -P 1 7M 0"]);
    for (uri, why) in [
        (uri("nobody"), "TLS"),
        (uri("client").replace("hostname=localhost", "hostname=other"), "certificate"),
        (uri("client").replace("nbds+", "nbd+"), "nbds://"),
    ] {
        let said = crate::bench::refusal(&["info", "-f", "raw", &uri]);
        assert!(said.contains(why), "{why}: {said}");
    }
    source.stop();
}

/// As an operator does before they expire: the server is started anew with the others.
#[test]
fn certificates_that_were_replaced_are_taken_at_the_next_connection() {
    let bench = Bench::new();
    bench.raw("a.raw", 8 * MIB);
    let certificates = include_str!("../../../crates/export/tests/nbd/certificates.py");
    let replace = || {
        ok("python3", "python3", &["-c", certificates, &bench.text("")]);
    };
    let (image, listen) = (bench.text("a.raw"), format!("unix:{}", bench.text("source")));
    let tls = bench.text("server");
    let args = [&*image, "-f", "raw", "--name", "e", "--tls", "require", "--tls-dir", &tls];
    let source = || ringtap_tests::Server::start(args.iter().chain(&["--nbd", &listen]));
    replace();
    let first = source();
    let uri = format!(
        "nbds+unix:///e?socket={}&tls-hostname=localhost&tls-certificates={}&reconnect=5",
        bench.text("source"),
        bench.text("client")
    );
    let server = bench.serve(&uri, &["-f", "raw"]);
    bench.io_well(&["write -P 1 0 64k", "flush"]);
    first.stop();
    replace();
    let second = source();
    bench.io_well(&["read -P 1 0 64k"]);
    server.stop();
    second.stop();
}

#[test]
fn a_disk_is_added_and_moved_to_a_server_while_its_guest_writes() {
    let bench = Bench::new();
    bench.raw("a.raw", 64 * MIB);
    bench.raw("b.raw", 64 * MIB);
    let source = bench.source(Kind::Nbdkit, "a.raw");
    let control = bench.text("control");
    let listen = format!("unix:{control}");
    let server = bench
        .serve(&bench.text("b.raw"), &["-f", "raw", "--node-name", "vm", "--control", &listen]);
    bench.io_well(&["write -P 6 0 8M"]);
    let guest = bench.load("4");
    // What a guest writes while it is copied goes to both.
    crate::bench::said(&["disk", "mirror", "--control", &listen, "vm", &bench.uri(), "-f", "raw"]);
    is_well(guest);
    bench.io_well(&["write -P 7 63M 1M", "flush"]);
    let mut qmp = ringtap_tests::Control::open(&bench.path("control"));
    let node = qmp.ok("query-named-block-nodes", serde_json::json!({}));
    assert!(node.to_string().contains("nbd+unix:///e"), "{node}");
    let at = serde_json::json!({ "type": "unix", "path": bench.text("source") });
    let of = serde_json::json!({ "driver": "nbd", "server": at, "export": "e" });
    let more =
        serde_json::json!({ "driver": "raw", "node-name": "again", "read-only": true, "file": of });
    qmp.ok("blockdev-add", more);
    qmp.ok("blockdev-del", serde_json::json!({ "node-name": "again" }));
    server.stop();
    source.stop();
    bench.holds("a.raw", "raw", &["read -P 7 63M 1M"]);
    // Who starts the old command line again is told where the disk is now.
    let nbd = format!("unix:{}", bench.text("nbd"));
    let why = crate::bench::refusal(&["serve", &bench.text("b.raw"), "-f", "raw", "--nbd", &nbd]);
    assert!(why.contains("nbd+unix:///e"), "{why}");
}
