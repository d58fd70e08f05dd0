//! Verbs on images of Ceph.

use std::fs;

use serde_json::Value;

use crate::cluster::{Cluster, MIB, cluster};

/// A raw file with something in it.
fn file(cluster: &Cluster, name: &str) -> String {
    let path = cluster.text(name);
    cluster.ok("qemu-img", &["create", "-q", "-f", "raw", &path, "32M"]);
    cluster.io_on(&path, "raw", &["write -P 7 8M 3M", "write -P 9 30000k 12k"]);
    path
}

#[test]
fn verbs_take_an_image_of_ceph() {
    let Some(cluster) = cluster() else { return };
    let path = file(&cluster, "v.raw");
    let name = cluster.name("v");
    cluster.said(&["convert", "-q", "-f", "raw", "-O", "raw", &path, &name]);
    cluster.ok("rbd", &["export", "v", &cluster.text("v.exported")]);
    let same =
        fs::read(&path).expect("read") == fs::read(cluster.path("v.exported")).expect("read");
    assert!(same, "what rbd exports is what was converted");
    cluster.ok("qemu-img", &["compare", "-f", "raw", "-F", "raw", &path, &name]);
    cluster.said(&["compare", "-f", "raw", "-F", "raw", &name, &path]);

    let info: Value =
        serde_json::from_str(&cluster.said(&["info", "-f", "raw", "--output", "json", &name]))
            .expect("JSON");
    assert_eq!((&info["virtual-size"], &info["format"]), (&(32 * MIB).into(), &"raw".into()));
    let map = cluster.said(&["map", "-f", "raw", "--output", "json", &name]);
    let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
    let data = |it: &&Value| it["data"] == true;
    let at: Vec<_> = map.iter().filter(data).map(|it| (&it["start"], &it["length"])).collect();
    // Objects of 4 MiB, of which no more is there than was written.
    let (first, second) = ((8 * MIB, 3 * MIB), (28 * MIB, 30_012 * 1024 - 28 * MIB));
    let of = |(start, len): (u64, u64)| (Value::from(start), Value::from(len));
    let wanted = [of(first), of(second)];
    assert_eq!(at, wanted.iter().map(|(start, len)| (start, len)).collect::<Vec<_>>(), "{map:?}");
    cluster.said(&["measure", "-f", "raw", "-O", "qcow2", &name]);

    // As it was at a snapshot, in a namespace, and by CEPH_CONF.
    cluster.ok("rbd", &["snap", "create", "v@s1"]);
    cluster.io_on(&name, "raw", &["write -P 1 0 1M"]);
    let at_snapshot = name.replace("/v:", "/v@s1:");
    cluster.said(&["compare", "-f", "raw", "-F", "raw", &at_snapshot, &path]);
    cluster.ok("rbd", &["namespace", "create", "rbd/ns"]);
    let inside = "rbd:rbd/ns/v";
    cluster.said(&["convert", "-q", "-f", "raw", "-O", "raw", &name, inside]);
    cluster.ok("qemu-img", &["compare", "-f", "raw", "-F", "raw", &name, inside]);
    // A clone has what its parent has.
    cluster.ok("rbd", &["snap", "protect", "v@s1"]);
    cluster.ok("rbd", &["clone", "v@s1", "clone"]);
    cluster.said(&["compare", "-f", "raw", "-F", "raw", &cluster.name("clone"), &path]);

    let local = cluster.text("v.qcow2");
    cluster.said(&["convert", "-q", "-f", "raw", "-O", "qcow2", &at_snapshot, &local]);
    cluster.ok("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &path, &local]);
    cluster.said(&["resize", "-q", "-f", "raw", &cluster.name("clone"), "48M"]);
    let info = cluster.ok("rbd", &["info", "--format", "json", "clone"]);
    assert!(info.contains(&format!("\"size\":{}", 48 * MIB)), "{info}");
    let locks = cluster.ok("rbd", &["lock", "ls", "v"]);
    assert!(!locks.contains("client"), "no lock is left: {locks}");
}

#[test]
fn formats_lie_on_images_of_ceph() {
    let Some(cluster) = cluster() else { return };
    let path = file(&cluster, "f.raw");
    let (ours, qemus) = (cluster.name("ours"), cluster.name("qemus"));
    cluster.said(&["convert", "-q", "-f", "raw", "-O", "qcow2", &path, &ours]);
    cluster.ok("qemu-img", &["check", "-q", "-f", "qcow2", &ours]);
    cluster.ok("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &path, &ours]);
    cluster.said(&["check", "-q", "-f", "qcow2", &ours]);
    // One that grows as it is written to, made elsewhere.
    cluster.ok("qemu-img", &["create", "-q", "-f", "qcow2", &qemus, "64M"]);
    let server = cluster.serve("qemus", "qcow2", &[]);
    cluster.io("qemus", &["write -P 5 1M 20M", "flush", "discard 2M 1M", "read -P 5 4M 17M"]);
    server.stop();
    cluster.ok("qemu-img", &["check", "-q", "-f", "qcow2", &qemus]);
    cluster.io_on(&qemus, "qcow2", &["read -P 5 4M 17M", "read -P 0 30M 34M"]);

    // An overlay here, of a base there: committed to it, and laid over another.
    let overlay = cluster.text("over.qcow2");
    cluster.said(&["convert", "-q", "-f", "raw", "-O", "raw", &path, &cluster.name("base")]);
    cluster.said(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        &cluster.name("base"),
        "-F",
        "raw",
        &overlay,
    ]);
    cluster.io_on(&overlay, "qcow2", &["write -P 3 16M 1M", "read -P 7 8M 3M"]);
    cluster.said(&["commit", "-q", "-f", "qcow2", &overlay]);
    cluster.io_on(&cluster.name("base"), "raw", &["read -P 3 16M 1M", "read -P 7 8M 3M"]);
    cluster.said(&["convert", "-q", "-f", "raw", "-O", "raw", &path, &cluster.name("other")]);
    cluster.said(&[
        "rebase",
        "-q",
        "-f",
        "qcow2",
        "-b",
        &cluster.name("other"),
        "-F",
        "raw",
        &overlay,
    ]);
    cluster.io_on(&overlay, "qcow2", &["read -P 3 16M 1M", "read -P 7 8M 3M"]);

    // LUKS, which QEMU opens.
    let (secret, luks) = (cluster.text("secret"), cluster.name("luks"));
    fs::write(&secret, "sesame").expect("a secret");
    let from = format!("file:{secret}");
    let options = "version=1,iter-time=10";
    let words =
        ["convert", "-q", "-f", "raw", "-O", "luks", "-o", options, "--target-secret", &from];
    cluster.said(&[&words[..], &[&path, &luks]].concat());
    let object = format!("secret,id=s,file={secret}");
    let conf = cluster.text("ceph.conf");
    let file = format!("file.driver=rbd,file.pool=rbd,file.image=luks,file.conf={conf}");
    let opened = format!("driver=luks,key-secret=s,{file}");
    let said = cluster.ok(
        "qemu-io",
        &[
            "--object",
            &object,
            "-c",
            "read -P 7 8M 3M",
            "-c",
            "read -P 0 0 8M",
            "--image-opts",
            &opened,
        ],
    );
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn snapshots_and_clones_are_the_clusters() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "32M", "c"]);
    let name = cluster.name("c");
    let server = cluster.serve("c", "raw", &[]);
    cluster.io("c", &["write -P 1 0 8M", "flush"]);
    // While it is served.
    cluster.said(&["snapshot", "-c", "s1", &name]);
    cluster.io("c", &["write -P 2 4M 1M", "write -P 2 12M 512k", "flush"]);
    let why = cluster.refusal(&["snapshot", "-a", "s1", &name]);
    assert!(why.contains("exclusive lock"), "{why}");
    server.stop();
    let list: Value = serde_json::from_str(&cluster.said(&["snapshot", "--output", "json", &name]))
        .expect("JSON");
    assert_eq!((&list[0]["name"], list.as_array().map(Vec::len)), (&"s1".into(), Some(1)));
    let judge = cluster.ok("qemu-img", &["snapshot", "-l", &name]);
    assert!(judge.contains("s1"), "{judge}");

    // What has changed since, as Ceph's own tool says it.
    let changed = cluster.said(&["map", "--since", "s1", "-f", "raw", "--output", "json", &name]);
    let changed: Vec<Value> = serde_json::from_str(&changed).expect("JSON");
    let ranges = |list: &[Value], start: &str| -> Vec<(Value, Value)> {
        list.iter().map(|it| (it[start].clone(), it["length"].clone())).collect()
    };
    let diff = cluster.ok("rbd", &["diff", "--from-snap", "s1", "--format", "json", "c"]);
    let diff: Vec<Value> = serde_json::from_str(&diff).expect("JSON");
    assert_eq!(ranges(&changed, "start"), ranges(&diff, "offset"));
    assert_eq!(changed.len(), 2, "{changed:?}");

    // A copy of then is brought up to date, and another becomes an overlay's base.
    let at = |name: &str| cluster.text(name);
    let (full, next) = (at("full.raw"), at("next.qcow2"));
    let then = cluster.name("c@s1");
    cluster.said(&["convert", "-q", "-f", "raw", &then, &full]);
    cluster.said(&[
        "convert",
        "-q",
        "--since",
        "s1",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-B",
        &full,
        "-o",
        "backing_fmt=raw",
        &name,
        &next,
    ]);
    let same = |copy: &str, format: &str| {
        cluster.said(&["compare", "-f", "raw", "-F", format, &name, copy]);
        cluster.ok("qemu-img", &["compare", "-f", "raw", "-F", format, &name, copy]);
    };
    same(&next, "qcow2");
    // Only that is in it.
    let map = cluster.ok("qemu-img", &["map", "--output", "json", &next]);
    let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
    let own = map.iter().filter(|it| it["depth"] == 0).filter_map(|it| it["length"].as_u64());
    assert!((1..4 * MIB).contains(&own.sum()), "{map:?}");
    cluster.said(&["convert", "-q", "-n", "--since", "s1", "-f", "raw", "-O", "raw", &name, &full]);
    same(&full, "raw");
    let why = cluster.refusal(&["convert", "--since", "s1", "-f", "raw", &name, &at("alone.raw")]);
    assert!(why.contains("name the copy of then"), "{why}");

    cluster.ok("rbd", &["snap", "protect", "c@s1"]);
    let clone = cluster.name("child");
    cluster.said(&["create", "-q", "-b", &cluster.name("c@s1"), &clone, "48M"]);
    let info = cluster.ok("rbd", &["info", "--format", "json", "child"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!((&info["size"], &info["parent"]["snapshot"]), (&(48 * MIB).into(), &"s1".into()));
    cluster.io_on(&clone, "raw", &["read -P 1 0 8M", "write -P 5 1M 1M", "read -P 0 8M 40M"]);
    let why = cluster.refusal(&["snapshot", "-d", "s1", &name]);
    assert!(why.contains("clones"), "{why}");

    cluster.said(&["snapshot", "-a", "s1", &name]);
    cluster.io_on(&name, "raw", &["read -P 1 0 8M", "read -P 0 12M 512k"]);
    cluster.ok("rbd", &["rm", "--no-progress", "child"]);
    cluster.ok("rbd", &["snap", "unprotect", "c@s1"]);
    cluster.said(&["snapshot", "-d", "s1", &name]);
    assert_eq!(cluster.said(&["snapshot", &name]), "");
}

#[test]
fn refusals_of_ceph_say_what_to_do() {
    let Some(cluster) = cluster() else { return };
    cluster.said(&["create", "-q", "-f", "raw", &cluster.name("w"), "16M"]);
    cluster.ok("rbd", &["snap", "create", "w@s"]);
    let snapshot = cluster.name("w@s");
    let nobodys = format!("rbd:rbd/w:conf={}", cluster.text("none.conf"));
    let listen = format!("unix:{}", cluster.text("w.socket"));
    for (args, said) in [
        (vec!["info", "-f", "raw", "rbd:nowhere/w"], "no pool nowhere"),
        (vec!["info", "-f", "raw", "rbd:rbd/nothing"], "no image rbd/nothing"),
        (vec!["info", "-f", "raw", "rbd:rbd/w@nothing"], "no snapshot nothing"),
        (vec!["info", "-f", "raw", "rbd:w"], "pool is missing"),
        (vec!["info", "-f", "raw", "rbd:rbd/w:key=AQ=="], "keyring"),
        (vec!["info", "-f", "raw", "rbd:rbd/w:nonsense=1"], "no option of Ceph"),
        (vec!["info", "-f", "raw", &nobodys], "none.conf"),
        (vec!["create", "-q", "-f", "raw", "rbd:rbd/w", "16M"], "already"),
        (vec!["serve", &snapshot, "-f", "raw", "--nbd", &listen], "--read-only"),
        (vec!["serve", "rbd:rbd/w", "--nbd", &listen], "-f raw"),
    ] {
        let why = cluster.refusal(&args);
        assert!(why.contains(said), "{args:?}: {why}");
    }
    // One that could not be written is not left behind.
    let dry = ["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", "data_file=/nowhere/x"];
    file(&cluster, "w.raw");
    cluster.refusal(&[&dry[..], &[&cluster.text("w.raw"), &cluster.name("half")]].concat());
    assert!(!cluster.ok("rbd", &["ls"]).contains("half"));
}
