//! A guest that goes from host to host, and the exclusive locks of its images with it.

use std::thread;
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Machine, Output, Qemu};
use ringtap_tests::{Server, patience};

use crate::cluster::{Cluster, MIB, cluster};

const LONG: Duration = Duration::from_secs(400);
const IMAGES: [(&str, &str); 2] = [("moves", "raw"), ("moves2", "qcow2")];

impl Cluster {
    /// Who has an image's lock: none, or one.
    fn owner(&self, image: &str) -> Option<String> {
        let said = self.ok("rbd", &["lock", "ls", image, "--format", "json"]);
        let locks: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let locks = locks.as_array().expect("a list");
        assert!(locks.len() <= 1, "{said}");
        Some(locks.first()?["address"].as_str().expect("an address").to_owned())
    }

    fn owners(&self) -> Vec<Option<String>> {
        IMAGES.iter().map(|(image, _)| self.owner(image)).collect()
    }

    /// Wait until both locks are others' than those; whose they are then.
    fn have_gone_from(&self, former: &[Option<String>]) -> Vec<Option<String>> {
        let until = Instant::now() + patience();
        loop {
            let now = self.owners();
            if now.iter().zip(former).all(|(now, then)| now.is_some() && now != then) {
                return now;
            }
            assert!(Instant::now() < until, "{now:?} are those of {former:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// A server of both at one end.
    fn end(&self, end: &str, more: &[&str]) -> Server {
        let mut words: Vec<String> = vec![];
        for (image, format) in IMAGES {
            let socket = self.text(&format!("{image}.{end}"));
            words.extend(
                [&*self.name(image), "-f", format, "--vhost-user", &socket].map(str::to_owned),
            );
            words.extend(more.iter().map(|word| (*word).to_owned()));
            if format == "qcow2" {
                // There is no restart log of it for a kill.
                words.extend(["--cache", "writethrough"].map(str::to_owned));
            }
        }
        Server::start(words)
    }
}

/// What fio writes and checks without end, on both disks.
const LOAD: &str = "cd /tmp; n=0
    while [ ! -e stop ]; do
        for disk in vda vdb; do
            fio --name=v --filename=/dev/$disk --rw=randwrite --direct=1 --size=8m --bs=4k --iodepth=8 --ioengine=libaio \
                --fsync=100 --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_state_save=0 --randseed=$n \
                >out 2>&1 || { cat out >&2; exit 1; }
        done
        n=$((n + 1))
    done
    echo $n";

#[test]
fn the_locks_go_with_a_guest_there_and_back_and_over_a_kill() {
    let Some(cluster) = cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "64M", "moves"]);
    cluster.said(&["create", "-q", "-f", "qcow2", &cluster.name("moves2"), "64M"]);
    let (one, other) = (cluster.end("1", &[]), cluster.end("2", &["--incoming"]));
    let first = cluster.owners();
    assert!(first.iter().all(Option::is_some), "{first:?}");
    let appliance = Appliance::builder(Machine::Pc)
        .programs(["fio", "dd"])
        .build(&Appliance::default_cache())
        .unwrap_or_else(|error| panic!("{error}"));
    let of = |end: &str| {
        let qemu = Qemu::new(&appliance).memory(512 * MIB);
        IMAGES.iter().fold(qemu, |qemu, (image, _)| {
            qemu.vhost_user(cluster.path(&format!("{image}.{end}")), 1)
        })
    };
    let guest = of("1").boot().unwrap_or_else(|error| panic!("{error}"));
    let job = guest.start(LOAD).expect("the guest takes it");
    thread::sleep(Duration::from_secs(3));
    let migrated = guest.migrate(of("2"), LONG).unwrap_or_else(|error| panic!("{error}"));
    println!("there: {:?}, {:?} of that at rest", migrated.total, migrated.downtime);
    assert!(!job.is_done(), "the load has failed");
    let second = cluster.have_gone_from(&first);
    // The end that it came to is killed, and followed at once.
    other.kill();
    let begun = Instant::now();
    let other = cluster.end("2", &[]);
    println!("the next server was ready after {:.2?}", begun.elapsed());
    let third = cluster.have_gone_from(&second);
    thread::sleep(Duration::from_secs(3));
    assert!(!job.is_done(), "the load has failed");
    let migrated = guest.migrate(of("1"), LONG).unwrap_or_else(|error| panic!("{error}"));
    println!("back: {:?}, {:?} of that at rest", migrated.total, migrated.downtime);
    thread::sleep(Duration::from_secs(3));
    cluster.have_gone_from(&third);
    guest.exec("touch /tmp/stop", LONG).expect("it is told");
    let end = job.wait(LONG).and_then(Output::success).unwrap_or_else(|error| panic!("{error}"));
    assert!(end.stdout.trim().parse::<u32>().expect("a number") > 0);
    guest.shutdown(patience()).expect("it goes down");
    let said = one.stop();
    assert_eq!(said.matches("the disk has left").count(), 2, "{said}");
    assert_eq!(said.matches("the disk is here").count(), 2, "{said}");
    assert!(!said.contains("ERROR"), "{said}");
    other.stop();
    assert!(cluster.owners().iter().all(Option::is_none), "a lock is left");
    // Clusters that a killed server took and nothing refers to are no harm.
    cluster.said(&["check", "-r", "leaks", "-f", "qcow2", &cluster.name("moves2")]);
}
