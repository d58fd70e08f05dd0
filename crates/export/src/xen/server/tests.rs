//! A server beside an xenstored in memory.

use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::time::{Duration, Instant};

use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Disk;

use super::*;
use crate::xen::Wanted;
use crate::xen::xenstore::fake::Fake;

/// No domain has that number: where these tests run there may be a real 7.
const BACK: &str = "backend/vbd/50000/51712";
const NAME: &str = "xen50000-51712";
const KEY: Key = (50000, 51712);

/// What was opened, in order.
#[derive(Default)]
struct Opened(Mutex<Vec<String>>);

impl Disks for Opened {
    fn open(&self, wanted: &Wanted<'_>) -> Result<Disk, String> {
        self.0.lock().expect("a list").push(wanted.params.to_owned());
        Ok(ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(
            Box::new(Null::new(1 << 20, false)),
            CacheMode::None,
        )))
    }

    fn close(&self, _: &str) {}
}

fn server(
    disks: &Arc<Opened>,
    reach: impl Fn() -> io::Result<Store> + Send + Sync + 'static,
) -> Server {
    let options = Options { queues: 1, persistent: true };
    let (reach, disks) = (Arc::new(reach), disks.clone());
    // None are there.
    Server { records: PathBuf::new(), reach, options, disks, devices: Mutex::default() }
}

/// As the toolstack does, but that it writes all at once: what is looked for comes last.
fn attach(fake: &Fake, params: &str) {
    let front = "/local/domain/50000/device/vbd/51712";
    fake.set(&format!("{front}/state"), "1");
    for (node, value) in [("params", params), ("mode", "w"), ("online", "1"), ("state", "1")] {
        fake.set(&format!("{BACK}/{node}"), value);
    }
    for (node, value) in [("frontend", front), ("script", "/etc/xen/scripts/block-ringtap")] {
        fake.set(&format!("{BACK}/{node}"), value);
    }
}

fn within_ten_seconds(mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    done()
}

#[test]
fn nodes_belong_to_disks() {
    assert_eq!(key("backend/vbd/7/51712"), Some((7, 51712)));
    assert_eq!(key("backend/vbd/7/51712/state"), Some((7, 51712)));
    for none in ["backend/vbd", "backend/vbd/7", "backend/vbd/x/1", "backend/vbd3/7/1"] {
        assert_eq!(key(none), None, "{none}");
    }
}

#[test]
fn a_server_that_sees_no_more_ends_and_says_why() {
    let server = server(&Arc::default(), || Ok(Fake::gone()));
    let stop = Stop::new().expect("a stop");
    let bell = Arc::new(Bell::new().expect("a bell"));
    let theirs = stop.clone();
    let thread = std::thread::spawn(move || {
        poll(&mut [PollFd::new(&theirs, PollFlags::IN)], None).expect("a stop");
    });
    server.lock().insert(KEY, Running { bell, thread });
    let thread = std::thread::spawn(move || server.serve(&stop).expect_err("no xenstored"));
    assert!(within_ten_seconds(|| thread.is_finished()));
}

#[test]
fn a_disk_that_fails_is_served_again_after_a_pause() {
    let (fake, reached) = (Fake::default(), AtomicUsize::new(0));
    attach(&fake, "a disk");
    let theirs = fake.clone();
    // The first is the server's own.
    let server = server(&Arc::default(), move || match reached.fetch_add(1, AcqRel) {
        1 => Err(io::ErrorKind::OutOfMemory.into()),
        _ => Ok(theirs.connect()),
    });
    let stop = Stop::new().expect("a stop");
    std::thread::scope(|scope| {
        let begun = Instant::now();
        scope.spawn(|| server.serve(&stop).expect("a stop"));
        let offered =
            within_ten_seconds(|| fake.get(&format!("{BACK}/state")).as_deref() == Some("2"));
        stop.raise();
        assert!(offered && begun.elapsed() >= Duration::from_secs(1));
    });
}

#[test]
fn a_disk_of_the_same_number_is_another() {
    let (fake, disks) = (Fake::default(), Arc::<Opened>::default());
    let theirs = fake.clone();
    let server = server(&disks, move || Ok(theirs.connect()));
    let stop = Stop::new().expect("a stop");
    std::thread::scope(|scope| {
        scope.spawn(|| server.serve(&stop).expect("a stop"));
        // The second is made where the first still is: its thread has missed that it was removed.
        let opened = ["one", "two"].map(|params| {
            attach(&fake, params);
            within_ten_seconds(|| disks.0.lock().expect("a list").iter().any(|one| one == params))
        });
        stop.raise();
        assert_eq!(opened, [true, true]);
    });
}

/// Its thread takes a moment more to end, and rings no second time.
#[test]
fn a_disk_that_has_said_its_end_is_made_anew() {
    let fake = Fake::default();
    attach(&fake, "a disk");
    let theirs = fake.clone();
    let server = server(&Arc::default(), move || Ok(theirs.connect()));
    let stop = Stop::new().expect("a stop");
    let bell = || Arc::new(Bell::new().expect("a bell"));
    let theirs = stop.clone();
    let waits = move || {
        poll(&mut [PollFd::new(&theirs, PollFlags::IN)], None).expect("a stop");
    };
    let running = Running { bell: bell(), thread: std::thread::spawn(waits) };
    let said = running.bell.clone();
    server.lock().insert(KEY, running);
    for ended in [false, true] {
        said.ended.store(ended, Release);
        let considered = server.consider(&mut fake.connect(), KEY, &bell(), &stop);
        assert!(considered.expect("xenstore"));
        assert_eq!(!Arc::ptr_eq(&server.lock()[&KEY].bell, &said), ended);
    }
    stop.raise();
    let devices = std::mem::take(&mut *server.lock());
    devices.into_values().for_each(|device| device.thread.join().expect("no panic"));
}

#[test]
fn records_of_disks_that_are_gone_are_forgotten() {
    let (fake, dir) = (Fake::default(), tempfile::tempdir().expect("a folder"));
    attach(&fake, "a disk");
    let names = [format!("{NAME}q0"), "xen50001-51712q0".into(), "something else".into()];
    for name in &names {
        std::fs::write(dir.path().join(name), "").expect("a file");
    }
    forget_gone(&mut Fake::gone(), dir.path());
    let left = || names.each_ref().map(|name| dir.path().join(name).exists());
    assert_eq!(left(), [true; 3], "nobody knows");
    forget_gone(&mut fake.connect(), dir.path());
    assert_eq!(left(), [true, false, true]);
}
