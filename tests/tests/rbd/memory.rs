//! What the disks of one server cost together.

use std::fs;
use std::thread;
use std::time::Duration;

use ringtap_tests::{Server, load};

use crate::cluster::{Cluster, MIB, cluster};

/// Its proportional set size: of what it shares with other programs its part.
fn memory(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("its memory");
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("its size");
    let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok());
    kib.expect("a number") << 10
}

/// The most that a server has with so many disks, which guests write to and read all at once.
fn most(cluster: &Cluster, disks: usize) -> u64 {
    let folder = cluster.path(&format!("m-{disks}"));
    fs::create_dir(&folder).expect("a folder");
    let sockets: Vec<String> =
        (0..disks).map(|disk| cluster.text(&format!("m-{disk}.vhost"))).collect();
    for (disk, socket) in sockets.iter().enumerate() {
        let image = cluster.name(&format!("m-{disk}"));
        let text = format!("image = '{image}'\nformat = 'raw'\nvhost-user = '{socket}'\n");
        fs::write(folder.join(format!("m{disk}.toml")), text).expect("a file");
    }
    let control = format!("unix:{}", cluster.text("m.control"));
    let server =
        Server::daemon(["--control", &control, "--disks", folder.to_str().expect("plain")]);
    let loads: Vec<_> = sockets.into_iter().map(|socket| load(socket, "3")).collect();
    let mut most = 0;
    while !loads.iter().all(|load| load.is_finished()) {
        most = most.max(memory(server.pid()));
        thread::sleep(Duration::from_millis(20));
    }
    for load in loads {
        let told = load.join().expect("the load");
        let wanted = (&0.into(), &0.into());
        assert_eq!((&told["verify"]["mismatches"], &told["errors"]), wanted, "{told}");
    }
    server.stop();
    most
}

#[test]
fn ten_disks_cost_little_more_than_one() {
    let Some(cluster) = cluster() else { return };
    for disk in 0..10 {
        cluster.ok("rbd", &["create", "--size", "64M", &format!("m-{disk}")]);
    }
    let (one, ten) = (most(&cluster, 1), most(&cluster, 10));
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    println!("one disk {:.1} MiB, ten {:.1} MiB", mib(one), mib(ten));
    assert!(ten < one + 40 * MIB, "one {:.1} MiB, ten {:.1} MiB", mib(one), mib(ten));
}
