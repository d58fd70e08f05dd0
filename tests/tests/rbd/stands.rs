//! An OSD that stands still.

use std::time::{Duration, Instant};

use ringtap_tests::{is_well, load, patience};
use rustix::process::{Signal, kill_process};

use crate::cluster::own_cluster;

/// What the metrics say of the oldest request, in seconds.
fn oldest(cluster: &crate::cluster::Cluster, port: u16) -> f64 {
    let text = cluster.ok("curl", &["-s", &format!("http://127.0.0.1:{port}/metrics")]);
    let line = text.lines().find(|line| line.starts_with("ringtap_disk_oldest_request_seconds{"));
    let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn a_standing_osd_is_seen_and_nothing_is_lost() {
    let Some(cluster) = own_cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "64M", "s"]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
    let port = port.expect("a port").port();
    let server = cluster.serve("s", "raw", &["--metrics", &format!("127.0.0.1:{port}")]);
    let guest = load(cluster.sockets("s").1, "3");
    std::thread::sleep(Duration::from_millis(500));
    kill_process(cluster.osd(), Signal::STOP).expect("it is there");
    let end = Instant::now() + patience();
    while oldest(&cluster, port) < 1.0 {
        assert!(Instant::now() < end, "its age is not shown");
        std::thread::sleep(Duration::from_millis(100));
    }
    kill_process(cluster.osd(), Signal::CONT).expect("it is there");
    is_well(guest);
    assert!(oldest(&cluster, port) < 1.0);
    cluster.io("s", &["write -P 4 0 1M", "read -P 4 0 1M"]);
    server.stop();
}
