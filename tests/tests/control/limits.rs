//! Limits of disks and of groups of disks, by QMP and by hand.

use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_tests::{Server, patience, program};
use serde_json::json;

use crate::{Empty, ok};

/// How many requests of one disk limits hold at present.
fn held(empty: &mut Empty, node: &str) -> u64 {
    let all = empty.control.ok("query-blockstats", json!({}));
    let all = all.as_array().expect("disks");
    let of = all.iter().find(|disk| disk["node-name"] == node).expect("the disk");
    of["__ringtap_state"]["limits"]["waiting"].as_u64().expect("a number")
}

#[test]
fn limits_come_with_disks_and_groups_and_change() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let control = &mut empty.control;
    control.ok(
        "object-add",
        json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 100, "iops-total-max": 200}}),
    );
    for id in ["a/b", "", "a,b", &"x".repeat(300)] {
        let why = control.call("object-add", json!({"qom-type": "throttle-group", "id": id}));
        assert!(why.expect_err("no name").contains("expects an identifier"), "{id}");
    }
    let limits = |control: &mut ringtap_tests::Control| {
        control.ok("qom-get", json!({"path": "/objects/g", "property": "limits"}))
    };
    assert_eq!(limits(control), json!({"iops-total": 100, "iops-total-max": 200}));
    let value = json!({"bps-read": 4096});
    control.ok("qom-set", json!({"path": "g", "property": "limits", "value": value}));
    assert_eq!(
        limits(control),
        json!({"iops-total": 100, "iops-total-max": 200, "bps-read": 4096})
    );
    // As QEMU's clients add it: the filter is the node's name.
    let inner = json!({"driver": "null-co", "size": 65536, "node-name": "inner"});
    control.ok(
        "blockdev-add",
        json!({"driver": "throttle", "node-name": "t", "throttle-group": "g", "file": inner}),
    );
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!((&nodes[1]["node-name"], &nodes[1]["group"]), (&json!("t"), &json!("g")));
    let own = json!({"iops-write": 7, "bps-total": 9});
    control
        .ok("__ringtap_throttle", json!({"node-name": "a", "limits": own, "throttle-group": "g"}));
    let nodes = control.ok("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["__ringtap_limits"], own);
    assert_eq!((&nodes[0]["iops_wr"], &nodes[0]["bps"]), (&json!(7), &json!(9)));
    for (command, arguments, said) in [
        ("object-add", json!({"qom-type": "throttle-group", "id": "g"}), "duplicate object 'g'"),
        ("object-del", json!({"id": "g"}), "in use"),
        ("qom-set", json!({"path": "h", "property": "limits", "value": {}}), "does not exist"),
        ("qom-set", json!({"path": "g", "property": "limits", "value": {"iops": 1}}), "unexpected"),
        ("qom-get", json!({"path": "g", "property": "x"}), "not found"),
        ("__ringtap_throttle", json!({"node-name": "a", "throttle-group": "h"}), "does not exist"),
        (
            "__ringtap_throttle",
            json!({"node-name": "a", "limits": {"iops-read-max": 1}}),
            "needs the limit",
        ),
        (
            "blockdev-add",
            json!({"driver": "null-co", "node-name": "n", "__ringtap_throttle-group": "h"}),
            "does not exist",
        ),
    ] {
        let refusal = control.call(command, arguments.clone()).expect_err(said);
        assert!(refusal.contains(said), "{command} {arguments}: {refusal}");
    }
    control.ok("__ringtap_throttle", json!({"node-name": "a", "throttle-group": ""}));
    control.ok("blockdev-del", json!({"node-name": "t"}));
    control.ok("object-del", json!({"id": "g"}));
}

/// A client that has requests in flight which are held for minutes: limits that change let them go, and so do the end of an
/// export and that of the server.
#[test]
fn nobody_is_held_longer_than_somebody_wants() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let uri = empty.nbd();
    let readers = |empty: &mut Empty| {
        empty.export("e", "a", "nbd", json!({"name": "e"}));
        empty
            .control
            .ok("__ringtap_throttle", json!({"node-name": "a", "limits": {"bps-total": 1000}}));
        // The first passes; the second waits for more than two minutes.
        let reads = ["-r", "-f", "raw", "-c", "read 0 128k", "-c", "read 128k 128k", &uri("e")];
        let client = Command::new("qemu-io").args(reads).spawn().expect("qemu-io");
        let began = Instant::now();
        while held(empty, "a") == 0 {
            assert!(began.elapsed() < patience(), "nothing is held");
            std::thread::sleep(Duration::from_millis(10));
        }
        client
    };
    let mut client = readers(&mut empty);
    empty.control.ok("__ringtap_throttle", json!({"node-name": "a", "limits": {"bps-total": 0}}));
    assert!(client.wait().expect("its end").success());
    empty.control.ok("block-export-del", json!({"id": "e"}));

    let mut client = readers(&mut empty);
    empty.control.ok("block-export-del", json!({"id": "e", "mode": "hard"}));
    let gone = empty.control.event();
    assert_eq!(gone.0, "BLOCK_EXPORT_DELETED");
    _ = client.wait();
    let mut client = readers(&mut empty);
    empty.server.stop();
    _ = client.wait();
}

#[test]
fn people_set_limits() {
    let empty = Empty::new();
    let added = empty.said(&["add", "null:1M", "--help"]);
    assert!(added.contains("--iops"), "{added}");
    let socket = empty.text("control");
    let mut make = Command::new(ringtap_tests::ringtap());
    ok(make.args(["create", "-q", &empty.text("a"), "1M"]));
    let image = empty.text("a");
    let add = ["add", &image, "-f", "raw", "--node-name", "a", "--bps", "2M"];
    empty.said(&[&add[..], &["--iops-read", "5"]].concat());
    assert_eq!(empty.said(&["limit", "a"]), "bps-total 2097152, iops-read 5\n");
    assert_eq!(empty.said(&["group", "g", "--iops", "50:90:3"]).lines().count(), 1);
    let said = empty.said(&["limit", "a", "--none", "--iops", "9", "--group", "g"]);
    assert_eq!(said, "iops-total 9, and those of group g\n");
    let (code, said) = empty.refused(&["group", "g", "--remove"]);
    assert!(code == Some(1) && said.contains("in use"), "{said}");
    let said = empty.said(&["limit", "a", "--none", "--no-group", "--output", "json"]);
    assert_eq!(said, "{\"group\":null,\"limits\":{}}\n");
    empty.said(&["group", "g", "--remove"]);
    let (code, said) = empty.refused(&["limit", "a", "--iops", "2:1"]);
    assert!(code == Some(2) && said.contains("less than"), "{said}");
    drop(socket);
}

/// Shares of the device, beside limits: of a disk and of a group.
#[test]
fn people_set_shares() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "1M");
    let share = |empty: &mut Empty| {
        let all = empty.control.ok("query-blockstats", json!({}));
        let of = all.as_array().expect("disks").iter().find(|disk| disk["node-name"] == "a");
        of.expect("the disk")["__ringtap_state"]["share"].clone()
    };
    assert!(share(&mut empty).is_null());
    let said = empty.said(&["limit", "a", "--weight", "200", "--floor-bps", "1M"]);
    assert!(said.contains("weight 200") && said.contains("floor-bps 1048576"), "{said}");
    let told = share(&mut empty);
    assert_eq!((&told["weight"], &told["who"]), (&json!(200), &json!("disk")));
    let said = empty.said(&["limit", "a", "--none"]);
    assert_eq!(said, "no limits\n");
    assert!(share(&mut empty).is_null());
    empty.said(&["group", "g", "--weight", "50"]);
    empty.said(&["limit", "a", "--group", "g"]);
    let told = share(&mut empty);
    assert_eq!((&told["weight"], &told["who"]), (&json!(50), &json!("group")));
    let (code, said) = empty.refused(&["limit", "a", "--weight", "10001"]);
    assert!(code == Some(2) && said.contains("1 to 10000"), "{said}");
    let limits = json!({"__ringtap_weight": 10_001});
    let refusal =
        empty.control.call("__ringtap_throttle", json!({"node-name": "a", "limits": limits}));
    assert!(refusal.expect_err("too much").contains("1 to 10000"));
}

/// On the command line of `ringtap serve`.
#[test]
fn a_served_disk_may_have_limits_from_the_start() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| dir.path().join(name).display().to_string();
    let control = format!("unix:{}", text("control"));
    let disk = ["null:1M", "--node-name", "a", "--iops", "100", "--weight", "70", "--group", "g"];
    let group = ["--throttle-group", "g,bps=1M:2M", "--control", &control];
    let _server = Server::start([&group[..], &disk[..]].concat());
    let mut client = ringtap_tests::Control::open(&dir.path().join("control"));
    let nodes = client.ok("query-named-block-nodes", json!({}));
    assert_eq!((&nodes[0]["iops"], &nodes[0]["group"]), (&json!(100), &json!("g")));
    assert_eq!(nodes[0]["__ringtap_limits"]["__ringtap_weight"], 70);
    let group = client.ok("qom-get", json!({"path": "g", "property": "limits"}));
    assert_eq!(group, json!({"bps-total": 1 << 20, "bps-total-max": 2 << 20}));
    let ringtap = ringtap_tests::ringtap().display().to_string();
    let wrong =
        program(&ringtap, "ringtap", ["serve", "null:1M", "--group", "h", "--control", &control]);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && said.contains("no such group"), "{said}");
}

/// Also one that is not served yet, for its image is not there, has its group.
#[test]
fn a_group_stays_as_long_as_a_disk_that_is_left_out_names_it() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| dir.path().join(name).display().to_string();
    let (control, late) = (format!("unix:{}", text("control")), text("late.raw"));
    let server = Server::start([
        "--throttle-group",
        "g,iops=10",
        "--control",
        &control,
        "null:1M",
        "--node-name",
        "a",
        &late,
        "-f",
        "raw",
        "--node-name",
        "late",
        "--group",
        "g",
    ]);
    let mut client = ringtap_tests::Control::open(&dir.path().join("control"));
    let refusal = client.call("object-del", json!({"id": "g"}));
    assert!(refusal.expect_err("the disk that is to come has it").contains("in use"));
    let mut make = Command::new(ringtap_tests::ringtap());
    ok(make.args(["create", "-q", &late, "1M"]));
    server.signal(1);
    let began = Instant::now();
    let group = loop {
        let nodes = client.ok("query-named-block-nodes", json!({}));
        let nodes = nodes.as_array().expect("nodes");
        if let Some(late) = nodes.iter().find(|node| node["node-name"] == "late") {
            break late["group"].clone();
        }
        assert!(began.elapsed() < patience(), "it is not served");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(group, "g");
    let refusal = client.call("object-del", json!({"id": "g"}));
    assert!(refusal.expect_err("it has it").contains("in use"));
}
