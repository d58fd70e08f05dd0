//! Persistent bitmaps with QEMU as the other party: each notes its writes in what the other left.

use std::path::Path;
use std::process::Command;

use ringtap_image::qcow2::Bits;
use ringtap_image::{CacheMode, Format, OpenOptions, open};
use ringtap_io::{Io, Ring, Tasks};
use ringtap_vbd::{Kind, Request, Vbd};
use serde_json::Value;

const SIZE: u64 = 24 << 20;

fn run(folder: &Path, program: &str, args: &[&str]) -> String {
    let mut command = Command::new("timeout");
    let end = command.current_dir(folder).args(["60", program]).args(args).output();
    let end = end.expect("timeout runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(end.status.success(), "{program} {args:?}: {}{}", text(&end.stdout), text(&end.stderr));
    text(&end.stdout)
}

/// The dirty ranges of a bitmap, as qemu-nbd shows them.
fn over_nbd(folder: &Path, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let server = ["--", "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, "image", "]"];
    let said = run(folder, "nbdinfo", &[&["--json", &*map][..], &server].concat());
    let map: Vec<Value> = serde_json::from_str(&said).expect("JSON");
    let number = |extent: &Value, key: &str| extent[key].as_u64().expect("a number");
    let dirty = map.iter().filter(|extent| number(extent, "type") == 1);
    dirty.map(|extent| (number(extent, "offset"), number(extent, "length"))).collect()
}

struct Case {
    dir: tempfile::TempDir,
    rng: fastrand::Rng,
    bits: Bits,
    options: &'static str,
}

impl Case {
    fn new(seed: u64, options: &'static str) -> Case {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.expect("a folder");
        let mut rng = fastrand::Rng::with_seed(seed);
        let granularity = 512u64 << rng.u32(0..10);
        let path = dir.path();
        let size = SIZE.to_string();
        run(path, "qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, "image", &size]);
        let text = granularity.to_string();
        run(path, "qemu-img", &["bitmap", "--add", "-g", &text, "image", "on"]);
        run(path, "qemu-img", &["bitmap", "--add", "--disable", "image", "off"]);
        let bits = Bits::new(SIZE, granularity.trailing_zeros() as u8).expect("few bits");
        Case { dir, rng, bits, options }
    }

    fn range(&mut self) -> (u64, u64) {
        let len =
            512 * if self.rng.u8(0..6) == 0 { self.rng.u64(1..4000) } else { self.rng.u64(1..64) };
        (512 * self.rng.u64(0..=(SIZE - len) / 512), len)
    }

    fn write_with_qemu(&mut self) {
        let mut args: Vec<String> = vec!["-f".into(), "qcow2".into()];
        for _ in 0..10 {
            let (at, len) = self.range();
            let what = ["write", "write -z", "write -z -u"][self.rng.usize(0..3)];
            args.extend(["-c".into(), format!("{what} {at} {len}")]);
            self.bits.set(at, len);
        }
        args.push("image".into());
        run(self.dir.path(), "qemu-io", &args.iter().map(String::as_str).collect::<Vec<_>>());
    }

    fn open(&self) -> Vbd {
        let cache = CacheMode::Writeback;
        let options = OpenOptions { format: Some(Format::Qcow2), cache, ..OpenOptions::default() };
        let image = open(&self.dir.path().join("image"), &options);
        Vbd::new(image.unwrap_or_else(|error| panic!("{}: {error}", self.options)), cache)
    }

    fn write_with_ringtap(&mut self) {
        let vbd = self.open();
        let found = vbd.bitmaps().and_then(|bitmaps| bitmaps.get("on").cloned());
        let found = found.expect("the bitmap");
        assert!(found.runs().eq(self.bits.runs()), "{}: what QEMU noted", self.options);
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        let mut asks = Vec::new();
        for _ in 0..40 {
            let (at, len) = self.range();
            let kind = match self.rng.u8(0..6) {
                0 => Kind::Discard,
                1 => Kind::WriteZeroes { unmap: self.rng.bool(), fast: false },
                _ => Kind::Write,
            };
            self.bits.set(at, len);
            asks.push((kind, at, len));
        }
        let io = tasks.io().clone();
        let all = async move {
            for (kind, offset, len) in asks {
                serve(&vbd, &io, kind, offset, len).await;
            }
            vbd.close(&io).await
        };
        tasks.block_on(all).expect("the ring turns").expect("closed");
        assert!(found.runs().eq(self.bits.runs()), "{}: what Ringtap noted", self.options);
    }

    fn compare(&self) {
        let path = self.dir.path();
        let ours: Vec<_> = self.bits.runs().collect();
        assert_eq!(over_nbd(path, "on"), ours, "{}", self.options);
        assert_eq!(over_nbd(path, "off"), [], "{}", self.options);
        run(path, "qemu-img", &["check", "-q", "-f", "qcow2", "image"]);
    }
}

async fn serve(vbd: &Vbd, io: &Io, kind: Kind, offset: u64, len: u64) {
    let buffer = io.buffer(if kind == Kind::Write { len as usize } else { 0 }).expect("memory");
    let request = Request { kind, offset, len, mem: buffer.mem(), fua: false };
    vbd.serve(io, request).await.expect("served");
}

#[test]
fn each_notes_its_writes_in_what_the_other_left() {
    for (seed, options) in (0..).zip([
        "compat=1.1",
        "cluster_size=512",
        "cluster_size=2M",
        "extended_l2=on,cluster_size=16k",
        "refcount_bits=1,cluster_size=4k",
        "data_file=data,data_file_raw=on",
    ]) {
        let mut case = Case::new(seed, options);
        for _ in 0..2 {
            case.write_with_qemu();
            case.write_with_ringtap();
            case.compare();
        }
    }
}

/// Whoever opens an image to write and is killed leaves a bitmap that QEMU does not believe, and that
/// Ringtap goes on with; after QEMU has written, nobody does.
#[test]
fn what_a_killed_server_leaves_is_believed_by_its_successor_alone() {
    let mut case = Case::new(9, "compat=1.1");
    let write = |case: &Case, offset: u64| {
        let vbd = case.open();
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        let io = tasks.io().clone();
        let served = async move { serve(&vbd, &io, Kind::Write, offset, 4096).await };
        tasks.block_on(served).expect("the ring turns");
        case.bits.set(offset, 4096);
    };
    write(&case, 1 << 20);
    let flags = |case: &Case| {
        let said = run(case.dir.path(), "qemu-img", &["info", "-U", "--output=json", "image"]);
        let info: Value = serde_json::from_str(&said).expect("JSON");
        let bitmaps = &info["format-specific"]["data"]["bitmaps"];
        [0, 1].map(|number: usize| bitmaps[number]["flags"].to_string())
    };
    assert_eq!(flags(&case), [r#"["in-use","auto"]"#, "[]"]);
    // It was dropped without being closed: the next goes on.
    write(&case, 5 << 20);
    case.write_with_ringtap();
    case.compare();
    assert_eq!(flags(&case), [r#"["auto"]"#, "[]"]);
    write(&case, 9 << 20);
    case.write_with_qemu();
    let vbd = case.open();
    assert!(vbd.bitmaps().is_none_or(|bitmaps| bitmaps.get("on").is_none()));
    drop(vbd);
    assert_eq!(flags(&case), [r#"["in-use","auto"]"#, "[]"]);
    let words = ["check", "-q", "-f", "qcow2", "image"];
    // The writes of the killed one, which QEMU did not take up, may leak.
    let mut check = Command::new("timeout");
    let end = check.current_dir(case.dir.path()).args(["60", "qemu-img"]).args(words).output();
    assert!(matches!(end.expect("timeout runs").status.code(), Some(0 | 3)));
}
