//! Threads of a disk on processors and in a control group of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Server, load, ok, patience, ringtap_of};
use rustix::thread::{CpuSet, sched_getaffinity};

/// What each thread of a process is called, and one line of what the kernel says of it.
fn threads(process: u32, file: &str, key: &str) -> BTreeMap<String, String> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("the process lives");
    let told = tasks.flatten().filter_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        let text = fs::read_to_string(task.path().join(file)).ok()?;
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some((name.trim().to_owned(), line[key.len()..].trim().to_owned()))
    });
    told.collect()
}

/// What is told of each of these threads, once all are there.
fn of(process: u32, names: &[&str], file: &str, key: &str) -> Vec<String> {
    let began = Instant::now();
    loop {
        let all = threads(process, file, key);
        let found = names.iter().map(|name| {
            all.iter().find(|(thread, _)| thread.contains(name)).map(|(_, told)| told.clone())
        });
        if let Some(found) = found.collect::<Option<Vec<_>>>() {
            return found;
        }
        assert!(began.elapsed() < patience(), "no {names:?} among {all:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A server of one disk by vhost-user, NBD and FUSE, with a client at each, and what it says of its threads for so long.
fn served(more: &[&str], look: impl FnOnce(u32)) {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::File::create(path("a.img")).and_then(|file| file.set_len(64 << 20)).expect("a file");
    let (image, socket, nbd) = (path("a.img"), path("vhost"), format!("unix:{}", path("nbd")));
    let (fuse, pid) = (path("file"), path("pid"));
    let args = [&*image, "-f", "raw", "--vhost-user", &socket, "--nbd", &nbd, "--fuse", &fuse];
    let args = [&args[..], &["--pid-file", &pid], more].concat();
    let server = Server::start(&args);
    let process = fs::read_to_string(&pid).expect("its number").trim().parse().expect("a number");
    let guest = load(socket, "3");
    let uri = format!("nbd+unix:///?socket={}", path("nbd"));
    let client = thread::spawn(move || {
        ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write 0 4k", "-c", "sleep 2500", &uri])
    });
    fs::read(&fuse).expect("the file");
    look(process);
    ringtap_tests::is_well(guest);
    client.join().expect("the client");
    let said = server.stop();
    assert!(!said.contains("a thread of the disk"), "{said}");
}

const THREADS: [&str; 3] = ["vq0", "nbd", "fu0"];

#[test]
fn threads_of_a_disk_run_on_its_processors() {
    let own = sched_getaffinity(None).expect("those that there are");
    let last = (0..CpuSet::MAX_CPU).rfind(|&one| own.is_set(one)).expect("one").to_string();
    served(&["--cpus", &last], |process| {
        let found = of(process, &THREADS, "status", "Cpus_allowed_list:");
        assert_eq!(found, [&*last; 3]);
        let main = of(process, &["ringtap"], "status", "Cpus_allowed_list:");
        assert!(own.count() == 1 || main != [&*last], "{main:?}: all of it is there");
    });
    let refused = ringtap_of(&["serve", "null:1M", "--nbd", "unix:/nowhere/a", "--cpus", "1-0"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no range"), "{refused:?}");
}

/// A control group, gone when this drops.
struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A new one of version 2, where there are such and we may.
fn group() -> Result<Group, String> {
    let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
    let root = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let place = words.next()?;
        (words.next()? == "cgroup2").then_some(place)
    });
    let root = Path::new(root.ok_or("there is no cgroup2 here")?);
    let path = root.join(format!("ringtap-test-{}", std::process::id()));
    fs::create_dir(&path).map_err(|_| "no control group can be made here".to_owned())?;
    Ok(Group(path))
}

#[test]
fn threads_of_a_disk_are_charged_to_its_control_group() {
    let group = match group() {
        Ok(group) => group,
        Err(why) => return println!("skipped: {why}"),
    };
    let path = group.0.display().to_string();
    let name = group.0.file_name().and_then(|name| name.to_str()).expect("plain");
    let args = ["serve", "null:1M", "--nbd", "unix:/nowhere/a", "--cgroup", &path];
    let refused = ringtap_of(&args);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains(&format!("echo threaded > {path}/cgroup.type")), "{said}");
    fs::write(group.0.join("cgroup.type"), "threaded").expect("it is threaded");
    served(&["--cgroup", &path], |process| {
        let found = of(process, &THREADS, "cgroup", "0::/");
        assert_eq!(found, [name; 3]);
        let main = of(process, &["ringtap"], "cgroup", "0::");
        assert!(!main[0].contains(name), "{main:?}");
    });
}
