//! What was read once is read here, and no wrong byte is.

use std::fs;
use std::path::{Path, PathBuf};

use ringtap_tests::ok;

use crate::bench::{Bench, MIB, pattern, refusal, said};
use crate::origin::{Fault, Origin};

const CHUNK: usize = 256 << 10;

impl Bench {
    fn serve_cached(&self, uri: &str, more: &[&str]) -> ringtap_tests::Server {
        let cache = self.text("cache");
        let head = ["-f", "raw", "--read-only", "--cache-dir", &cache];
        self.serve(uri, &[&head[..], more].concat())
    }
}

/// Chunks that were asked for, but for the first byte that opening asks for.
fn asked(origin: &Origin) -> Vec<u64> {
    let asked = origin.with(|state| std::mem::take(&mut state.asked));
    let mut chunks: Vec<u64> =
        asked.iter().filter(|(_, to)| *to > 0).map(|(from, _)| from / CHUNK as u64).collect();
    chunks.sort_unstable();
    chunks
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(dir).expect("the folder");
    found.map(|entry| entry.expect("a file").path()).collect()
}

/// Nobody but these options names the folders.
#[test]
fn a_confined_server_reaches_its_cache_and_its_list_in_folders_of_the_system() {
    let bench = Bench::new();
    let object = pattern(2 * MIB);
    let origin = Origin::new(object.clone());
    let run = tempfile::tempdir_in("/run").expect("a folder");
    let at = |name: &str| run.path().join(name).display().to_string();
    let more = ["-f", "raw", "--read-only", "--sandbox", "on", "--cache-dir", &at("cache")];
    let server = bench.serve(&origin.uri(), &[&more[..], &["--record", &at("list")]].concat());
    assert!(bench.whole()[..object.len()] == object[..]);
    server.stop();
    assert_eq!(files(&run.path().join("cache")).len(), 1);
    let list = fs::read_to_string(at("list")).expect("the list");
    assert!(list.lines().count() > 8, "{list}");
    let server = bench.serve(&origin.uri(), &[&more[..], &["--boot-list", &at("list")]].concat());
    origin.with(|state| state.always = Some(Fault::Status(500)));
    assert!(bench.whole()[..object.len()] == object[..]);
    server.stop();
}

#[test]
fn what_is_kept_is_not_asked_for_again_after_an_end_or_a_kill() {
    let bench = Bench::new();
    let object = pattern(8 * MIB + 700);
    let origin = Origin::new(object.clone());
    let server = bench.serve_cached(&origin.uri(), &[]);
    assert!(bench.whole()[..object.len()] == object[..]);
    let first = asked(&origin);
    assert_eq!(first, (0..33).collect::<Vec<_>>(), "each once");
    server.stop();
    // The server only says that it is the same object.
    let server = bench.serve_cached(&origin.uri(), &[]);
    origin.with(|state| state.always = Some(Fault::Status(500)));
    assert!(bench.whole()[..object.len()] == object[..]);
    // As other processes find it while it is open.
    said(&["compare", "-f", "raw", "-F", "raw", &bench.text("copy"), &bench.text("copy")]);
    server.kill();
    origin.with(|state| state.always = None);
    let server = bench.serve_cached(&origin.uri(), &[]);
    assert!(bench.whole()[..object.len()] == object[..]);
    assert_eq!(asked(&origin), [0; 0]);
    server.stop();
    // Another object of that name has nothing of the first.
    origin.with(|state| {
        state.object = vec![9; 8 * MIB + 700];
        state.etag = Some("\"two\"".into());
    });
    let server = bench.serve_cached(&origin.uri(), &[]);
    bench.io_well(&["read -P 9 0 8M"]);
    server.stop();
    assert_eq!(files(&bench.path("cache")).len(), 2);
}

#[test]
fn a_cache_is_shared_by_processes_and_its_size_is_kept_to() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(8 * MIB));
    let cache = bench.text("cache");
    let server = bench.serve_cached(&origin.uri(), &[]);
    bench.io_well(&["read -P 1 0 4k", "read 1M 2M"]);
    let before = asked(&origin);
    // What it has brought is soon stable, and then there for others.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let (uri, local) = (origin.uri(), bench.text("local"));
    fs::write(&local, pattern(8 * MIB)).expect("written");
    said(&["compare", "-f", "raw", "-F", "raw", "--cache-dir", &cache, &uri, &local]);
    let after = asked(&origin);
    assert!(!before.is_empty() && before.iter().all(|chunk| !after.contains(chunk)), "{after:?}");
    let of_first = files(&bench.path("cache"));
    server.stop();
    let other = Origin::new(pattern(8 * MIB));
    let size = ["--cache-size", "10M"];
    let server = bench.serve_cached(&other.uri(), &size);
    assert!(bench.whole() == pattern(8 * MIB));
    server.stop();
    let left = files(&bench.path("cache"));
    assert!(left.len() == 1 && left != of_first, "{left:?}");
}

#[test]
fn an_index_finds_wrong_bytes_and_they_are_never_kept() {
    let bench = Bench::new();
    let mut object = pattern(4 * MIB + 700);
    object[MIB..2 * MIB].fill(0);
    let image = bench.path("disk.img");
    fs::write(&image, &object).expect("written");
    let www = bench.text("www");
    fs::create_dir(&www).expect("made");
    let printed = said(&["publish", &bench.text("disk.img"), &www]);
    let digest = printed.lines().last().expect("a line").to_owned();
    let index = fs::read(bench.path("www/disk.img.rtidx")).expect("the index");
    assert_eq!(fs::read(bench.path("www/disk.img")).expect("the image"), object);
    // By another's hand: that of the tools of this host.
    let sum = ok("sha256sum", "coreutils", &[&bench.text("www/disk.img.rtidx")]);
    assert_eq!(format!("digest=sha256:{}", &sum[..64]), digest);
    let origin = Origin::new(object.clone());
    origin.with(|state| {
        state.beside = vec![(".rtidx".into(), index.clone())];
        // Nothing else tells what these bytes are.
        state.etag = None;
    });
    let uri = format!("{}&{digest}", origin.uri());
    let server = bench.serve_cached(&uri, &[]);
    assert!(bench.whole()[..object.len()] == object[..]);
    let chunks = asked(&origin);
    assert!(!chunks.contains(&4) && chunks.contains(&0) && chunks.contains(&16), "{chunks:?}");
    server.stop();
    fs::remove_dir_all(bench.path("cache")).expect("removed");
    let server = bench.serve_cached(&uri, &[]);
    origin.with(|state| state.always = Some(Fault::Wrong));
    assert!(bench.io(&["read -P 1 0 4k"]).contains("error"));
    origin.with(|state| state.always = None);
    bench.io_well(&["read -P 1 0 4k"]);
    let log = server.stop();
    assert!(log.contains("are not those of its index"), "{log}");
    // An index that another put there, and none.
    let info = |uri: &str| refusal(&["info", "-f", "raw", uri]);
    let mut other = index.clone();
    other[30] ^= 1;
    origin.with(|state| state.beside[0].1 = other);
    assert!(info(&uri).contains("is not the one that digest=sha256:"));
    origin.with(|state| state.object.push(1));
    origin.with(|state| state.beside[0].1 = index);
    assert!(info(&uri).contains("publish it again"));
    origin.with(|state| state.beside.clear());
    assert!(info(&uri).contains("names an index, and there is none"));
}

#[test]
fn what_was_recorded_is_there_before_anybody_asks() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(16 * MIB));
    let list = bench.text("list");
    let server = bench.serve_cached(&origin.uri(), &["--record", &list]);
    bench.io_well(&["read 9M 4k", "read 1M 512k", "read 9M 8k"]);
    server.stop();
    let text = fs::read_to_string(&list).expect("the list");
    assert_eq!(text.lines().skip(1).collect::<Vec<_>>(), ["36", "4", "5"]);
    let fetched = |bench: &Bench, more: &[&str]| {
        fs::remove_dir_all(bench.path("cache")).expect("removed");
        asked(&origin);
        let server = bench.serve_cached(&origin.uri(), more);
        let until = std::time::Instant::now() + ringtap_tests::patience();
        while origin.with(|state| state.asked.len()) < 4 {
            assert!(std::time::Instant::now() < until, "nothing is fetched");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        server.stop();
        asked(&origin)
    };
    assert_eq!(fetched(&bench, &["--boot-list", &list]), [4, 5, 36]);
    // As publish puts it there.
    origin.with(|state| state.beside = vec![(".rtboot".into(), text.into_bytes())]);
    assert_eq!(fetched(&bench, &[]), [4, 5, 36]);
}

#[test]
fn an_image_is_brought_here_behind_its_guest() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(8 * MIB));
    let server = bench.serve_cached(&origin.uri(), &["--fill"]);
    bench.io_well(&["read -P 1 0 4k"]);
    let until = std::time::Instant::now() + ringtap_tests::patience();
    while origin.with(|state| state.asked.len()) < 33 {
        assert!(std::time::Instant::now() < until, "not all of it is fetched");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    origin.with(|state| state.always = Some(Fault::Status(500)));
    assert!(bench.whole() == pattern(8 * MIB));
    server.stop();
    assert_eq!(asked(&origin), (0..32).collect::<Vec<_>>(), "each once");
}

/// What lies below an overlay that is written to is looked at before it is opened to stay.
#[test]
fn what_is_read_below_an_overlay_is_recorded_and_a_server_that_takes_over_goes_on_with_the_list() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(16 * MIB));
    let (list, top) = (bench.text("list"), bench.text("top.qcow2"));
    said(&["create", "-q", "-f", "qcow2", "-b", &origin.uri(), "-F", "raw", &top]);
    let control = format!("unix:{}", bench.text("control"));
    let more = ["-f", "qcow2", "--record", &list, "--control", &control];
    let server = bench.serve(&top, &more);
    bench.io_well(&["read 9M 4k", "write 15M 64k", "read 1M 512k"]);
    let numbers = || {
        let text = fs::read_to_string(&list).expect("the list");
        let lines = text.lines().skip(1).filter(|line| *line != "0");
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(numbers(), ["36", "4", "5"]);
    let told = said(&["upgrade", &control, "--output", "json"]);
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    bench.io_well(&["read 2M 4k"]);
    let pid = told["pid"].as_i64().expect("a process") as i32;
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is there");
    server.ends();
    assert_eq!(numbers(), ["36", "4", "5", "8"]);
}

#[test]
fn a_cache_that_somebody_cuts_is_read_as_nothing_and_not_as_zeros() {
    let bench = Bench::new();
    let object = pattern(8 * MIB);
    let origin = Origin::new(object.clone());
    let server = bench.serve_cached(&origin.uri(), &[]);
    assert!(bench.whole() == object);
    let cache = files(&bench.path("cache")).remove(0);
    let data = fs::File::options().write(true).open(cache.join("data")).expect("the data");
    data.set_len(MIB as u64).expect("cut");
    assert!(bench.whole() == object, "what is not here any more is brought again");
    let log = server.stop();
    assert_eq!(log.matches("somebody has cut it").count(), 1, "{log}");
    let server = bench.serve_cached(&origin.uri(), &[]);
    assert!(bench.whole() == object);
    server.stop();
}
