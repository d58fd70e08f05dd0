//! Images of Ceph that guests use.

use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, is_well, load, patience};
use serde_json::json;

use crate::cluster::{Cluster, MIB, cluster};

#[test]
fn what_a_guest_writes_is_there() {
    let Some(cluster) = cluster() else { return };
    for sandbox in ["off", "on"] {
        let image = format!("g-{sandbox}");
        cluster.ok("rbd", &["create", "--size", "64M", &image]);
        let server = cluster.serve(&image, "raw", &["--sandbox", sandbox]);
        let (_, vhost) = cluster.sockets(&image);
        is_well(load(vhost, "1"));
        cluster.io(&image, &["write -P 1 0 6M", "write -P 2 8M 512", "write -f -P 3 9M 64k"]);
        cluster.io(&image, &["write -z 1M 1M", "discard 2M 1M", "write -z -u 3M 64k", "flush"]);
        let reads = ["read -P 1 0 1M", "read -P 0 1M 1M", "read -P 0 3M 64k", "read -P 3 9M 64k"];
        cluster.io(&image, &reads);
        let said = server.stop();
        assert!(!said.contains("ERROR"), "{said}");
        cluster.io_on(&cluster.name(&image), "raw", &reads);
    }
}

/// What lies below is on no command line: Ringtap has recorded it.
#[test]
fn an_overlay_upon_an_image_is_served_by_a_confined_server() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "u"]);
    let server = cluster.serve("u", "raw", &[]);
    cluster.io("u", &["write -P 6 1M 1M", "flush"]);
    server.stop();
    let (top, nbd) = (cluster.text("u.qcow2"), cluster.text("u.top"));
    cluster.said(&["create", "-q", "-f", "qcow2", "-b", &cluster.name("u"), "-F", "raw", &top]);
    let address = format!("unix:{nbd}");
    let server =
        Server::start([&*top, "-f", "qcow2", "--sandbox", "on", "--name", "d", "--nbd", &address]);
    let uri = format!("nbd+unix:///d?socket={nbd}");
    cluster.io_on(&uri, "raw", &["read -P 6 1M 1M", "write -P 7 2M 64k", "read -P 7 2M 64k"]);
    server.stop();
}

#[test]
fn clients_of_the_control_socket_add_images_as_for_qemu() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "q"]);
    let at = cluster.path("q.control");
    let control = format!("unix:{}", at.display());
    let none = cluster.text("none");
    let server = Server::daemon(["--control", &*control, "--disks", &none, "--allow", "rbd:"]);
    let mut control = Control::open(&at);
    let file = json!({
        "driver": "rbd", "pool": "rbd", "image": "q", "conf": cluster.text("ceph.conf"),
    });
    let node = json!({ "driver": "raw", "node-name": "d", "file": file });
    control.ok("blockdev-add", node);
    let address = json!({ "type": "unix", "data": { "path": cluster.sockets("q").0 } });
    control.ok("nbd-server-start", json!({ "addr": address }));
    let export =
        json!({ "type": "nbd", "id": "e", "node-name": "d", "name": "d", "writable": true });
    control.ok("block-export-add", export);
    cluster.io("q", &["write -P 7 1M 1M", "flush"]);
    let overlay = json!({ "node-name": "d", "snapshot-file": cluster.text("q.qcow2"), "snapshot-node-name": "e" });
    let why = control.call("blockdev-snapshot-sync", overlay).expect_err("it is elsewhere");
    assert!(why.contains("is no file of this host"), "{why}");
    server.stop();
    cluster.io_on(&cluster.name("q"), "raw", &["read -P 7 1M 1M"]);
}

#[test]
fn holes_are_told_of() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "64M", "h"]);
    let server = cluster.serve("h", "raw", &[]);
    let map = || cluster.ok("nbdinfo", &["--map", &cluster.nbd("h")]);
    let holes = |map: &str| map.lines().filter(|line| line.ends_with("hole,zero")).count();
    assert_eq!(holes(&map()), 1);
    // What is known of the range is not believed once something was written.
    cluster.io("h", &["write -P 1 8M 1M"]);
    let after = map();
    assert!(holes(&after) == 2 && after.contains(&format!("{}", 8 * MIB)), "{after}");
    cluster.io("h", &["discard 8M 4M"]);
    assert_eq!(holes(&map()), 1);
    server.stop();
}

/// Until the server shows so many bytes.
fn shows(cluster: &Cluster, image: &str, bytes: u64) {
    let end = Instant::now() + patience();
    while cluster.ok("nbdinfo", &["--size", &cluster.nbd(image)]).trim() != bytes.to_string() {
        assert!(Instant::now() < end, "the size is not seen");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn it_is_resized_while_it_is_served() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "r"]);
    let control = cluster.text("r.control");
    let more = ["--node-name", "vm", "--control", &*format!("unix:{control}")];
    let server: Server = cluster.serve("r", "raw", &more);
    shows(&cluster, "r", 16 * MIB);
    // By Ceph's own tool, and by the monitor's command.
    cluster.ok("rbd", &["resize", "--no-progress", "--size", "32M", "r"]);
    shows(&cluster, "r", 32 * MIB);
    let mut qmp = Control::open(&cluster.path("r.control"));
    qmp.ok("block_resize", json!({ "node-name": "vm", "size": 48 * MIB }));
    shows(&cluster, "r", 48 * MIB);
    cluster.io("r", &["write -P 1 47M 1M", "read -P 1 47M 1M"]);
    let info = cluster.ok("rbd", &["info", "--format", "json", "r"]);
    assert!(info.contains(&format!("\"size\":{}", 48 * MIB)), "{info}");
    server.stop();
}

/// The thread that looks at what waits for the cluster has nothing to look at.
#[test]
fn nothing_looks_at_a_disk_that_is_idle() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "idle"]);
    let server = cluster.serve("idle", "raw", &[]);
    cluster.io("idle", &["write -P 6 1M 1M", "flush", "read -P 6 1M 1M"]);
    let switches = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("its threads");
        let read = |name: &str, task: &std::path::Path| {
            std::fs::read_to_string(task.join(name)).unwrap_or_default()
        };
        let all = tasks.filter_map(|task| Some(task.ok()?.path()));
        let watches = all.filter(|task| read("comm", task).trim() == "rbd waits");
        let counts: Vec<String> = watches
            .map(|task| {
                read("status", &task).lines().filter(|line| line.contains("voluntary")).collect()
            })
            .collect();
        assert_eq!(counts.len(), 1, "one thread looks");
        counts
    };
    let end = Instant::now() + patience();
    while {
        let before = switches();
        std::thread::sleep(Duration::from_secs(5));
        before != switches()
    } {
        assert!(Instant::now() < end, "it goes on looking");
    }
    cluster.io("idle", &["read -P 6 1M 1M"]);
    server.stop();
}
