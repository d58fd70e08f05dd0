//! The disk of the local cache fails, or is full, and the store is as good as ever.

use std::fs;
use std::path::Path;

use ringtap_tests::{Control, Server, file_system_of, ok, plain};
use serde_json::{Value, json};

use crate::bench::{Bench, MIB, pattern, said};
use crate::origin::{Fault, Origin};

/// Serves an object with its cache in a folder, and tells what it says of that.
struct Cached {
    server: Server,
    control: Control,
}

impl Cached {
    fn serve(bench: &Bench, origin: &Origin, folder: &Path) -> Cached {
        let address = format!("unix:{}", bench.text("control"));
        let cache = ["--cache-dir", plain(folder), "--control", &address];
        let more = [&["-f", "raw", "--read-only", "--node-name", "d"][..], &cache].concat();
        let server = bench.serve(&origin.uri(), &more);
        Cached { server, control: Control::open(&bench.path("control")) }
    }

    fn told(&mut self) -> Value {
        let path = json!({ "path": "disks/d/layers/local_cache" });
        self.control.ok("__ringtap_inspect", path)
    }

    /// What it says at its end, in which the cache is given up once.
    fn ends(mut self, folder: &Path, why: &str) {
        let told = self.told();
        assert_eq!(told["folder"], plain(folder));
        assert!(told["given_up"].as_str().is_some_and(|told| told.contains(why)), "{told}");
        let log = self.server.stop();
        assert_eq!(log.matches("the cache").count(), 1, "{log}");
        assert!(log.contains(why), "{log}");
    }
}

/// The folder is private, as a cache is.
fn small(filled: bool) -> ringtap_tests::SetUp {
    let set_up = file_system_of(4, "tmpfs", &[], "");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(set_up.folder(), mode).expect("changed");
    if filled {
        let filler = "head -c 5M /dev/zero > \"$0/filler\" || true";
        ok("sh", "dash", &["-c", filler, plain(set_up.folder())]);
    }
    set_up
}

#[test]
fn a_guest_reads_on_from_the_store_where_the_disk_of_the_cache_fails() {
    let bench = Bench::new();
    let object = pattern(8 * MIB);
    let origin = Origin::new(object.clone());
    let cache = bench.path("cache");
    let mut first = Cached::serve(&bench, &origin, &cache);
    assert!(bench.whole() == object);
    assert_eq!(first.told()["given_up"], Value::Null);
    first.server.stop();
    // In the place of what is kept comes a disk of the same bytes, which is to fail.
    let folder = fs::read_dir(&cache).expect("the cache").next().expect("one").expect("one").path();
    let (data, disk) = (folder.join("data"), bench.text("disk.qcow2"));
    fs::remove_file(&data).expect("removed");
    let below = Origin::new(object.clone());
    let name = below.uri().replace("reconnect=20", "reconnect=never");
    said(&["create", "-q", "-f", "qcow2", "-b", &name, "-F", "raw", &disk]);
    let failing = Server::start([&*disk, "-f", "qcow2", "--fuse", plain(&data)]);
    below.with(|state| state.always = Some(Fault::Status(500)));
    let served = Cached::serve(&bench, &origin, &cache);
    origin.with(|state| state.asked.clear());
    assert!(bench.whole() == object, "what the cache cannot give comes from the store");
    assert!(!origin.with(|state| state.asked.is_empty()));
    served.ends(&cache, "cannot read: Input/output error");
    failing.stop();
    // A disk that took its place holds zeros: what could not be read is not taken for there.
    fs::File::create(&data).expect("made").set_len(8 << 20).expect("its size");
    let next = Cached::serve(&bench, &origin, &cache);
    assert!(bench.whole() == object);
    next.server.stop();
}

#[test]
fn a_cache_that_has_no_room_is_given_up_and_the_guest_does_not_see_it() {
    let bench = Bench::new();
    let object = pattern(8 * MIB);
    let origin = Origin::new(object.clone());
    for (filled, why) in [(false, "cannot write: No space left"), (true, "No space left")] {
        let place = small(filled);
        let served = Cached::serve(&bench, &origin, place.folder());
        for _ in 0..2 {
            assert!(bench.whole() == object);
        }
        served.ends(place.folder(), why);
    }
}
