//! Real files, with QEMU's programs as the judge: images with odd options, written to by both in
//! turns, must hold the same for both, and be without fault.

use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_image::{CacheMode, Format, OpenOptions, Status};
use ringtap_io::{Io, Ring, Tasks};
use ringtap_vbd::{Error, Kind, Request, Vbd};

const SIZE: usize = 3 << 20;

/// Run a program with a time limit; its output, where it succeeds.
fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let command = [&["60", program], args].concat();
    let end = Command::new("timeout").args(&command).output().map_err(|e| e.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match end.status.success() {
        true => Ok(text(&end.stdout)),
        false => Err(format!("{command:?}: {}{}", text(&end.stdout), text(&end.stderr))),
    }
}

fn qemu(program: &str, args: &[&str]) -> String {
    run(program, args).unwrap_or_else(|error| panic!("{error}"))
}

/// A folder with a chain of images, and what the topmost has to hold.
struct Case {
    dir: tempfile::TempDir,
    options: &'static str,
    image: PathBuf,
    holds: Vec<u8>,
    rng: fastrand::Rng,
    cache: CacheMode,
    cluster: usize,
}

impl Case {
    /// `options` is what follows `-o`; BELOW and DATA stand for files.
    fn new(seed: u64, options: &'static str, backing: Option<&str>) -> Case {
        // In memory where that can be: each of the many programs run here syncs.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.expect("a folder");
        let mut rng = fastrand::Rng::with_seed(seed);
        let image = dir.path().join("image.qcow2");
        let mut holds = vec![0; SIZE];
        let mut o = options.replace("DATA", &dir.path().join("data").display().to_string());
        if let Some(format) = backing {
            let below = dir.path().join("below");
            // A backing file may be shorter than what lies upon it.
            let len = SIZE - rng.usize(0..3) * 100 * 512;
            let raw = dir.path().join("raw");
            for byte in &mut holds[..len] {
                *byte = 0;
            }
            for _ in 0..6 {
                let at = rng.usize(0..len - 200_000) & !511;
                let n = rng.usize(1..200_000);
                let value = rng.u8(1..);
                holds[at..at + n].fill(value);
            }
            std::fs::write(&raw, &holds[..len]).expect("a file");
            let text = |path: &Path| path.display().to_string();
            qemu("qemu-img", &["convert", "-O", format, &text(&raw), &text(&below)]);
            std::fs::remove_file(raw).expect("removed");
            let comma = if o.is_empty() { "" } else { "," };
            o += &format!("{comma}backing_file=below,backing_fmt={format}");
        }
        let path = image.display().to_string();
        let size = SIZE.to_string();
        let o = if o.is_empty() { "compat=1.1".to_owned() } else { o };
        qemu("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &o, &path, &size]);
        let cache = if rng.bool() { CacheMode::None } else { CacheMode::Writeback };
        let info = qemu("qemu-img", &["info", "--output=json", &path]);
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let cluster = info["cluster-size"].as_u64().expect("a number") as usize;
        let mut case = Case { dir, options, image, holds, rng, cache, cluster };
        if case.compresses() {
            case.compress_some();
        }
        case
    }

    /// Whether QEMU compresses clusters of such an image.
    fn compresses(&self) -> bool {
        !self.options.contains("data_file") && !self.options.contains("preallocation")
    }

    /// Compressed clusters; QEMU writes them only where nothing is.
    fn compress_some(&mut self) {
        let cluster = self.cluster;
        let mut args: Vec<String> = vec!["-f".into(), "qcow2".into()];
        for at in (0..SIZE).step_by(cluster).filter(|at| at + cluster <= SIZE) {
            if self.rng.usize(0..SIZE / cluster) < 12 {
                let value = self.rng.u8(1..);
                self.holds[at..at + cluster].fill(value);
                args.extend(["-c".into(), format!("write -c -P {value} {at} {cluster}")]);
            }
        }
        args.extend(["-c".into(), "flush".into(), self.path()]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        qemu("qemu-io", &args);
    }

    fn path(&self) -> String {
        self.image.display().to_string()
    }

    fn range(&mut self) -> (usize, usize) {
        let len = match self.rng.u8(0..4) {
            0 => self.rng.usize(1..=1200),
            1 => self.rng.usize(1..=64),
            _ => 8 * self.rng.usize(1..=16),
        } * 512;
        let at = self.rng.usize(0..=(SIZE - len) / 512) * 512;
        (at, len)
    }

    fn write_with_qemu(&mut self) {
        let mut args: Vec<String> = vec!["-f".into(), "qcow2".into()];
        for _ in 0..12 {
            let (at, len) = self.range();
            let value = self.rng.u8(1..);
            let what = match self.rng.u8(0..6) {
                0 => {
                    self.holds[at..at + len].fill(0);
                    format!("write -z {at} {len}")
                }
                1 => {
                    self.holds[at..at + len].fill(0);
                    format!("write -z -u {at} {len}")
                }
                _ => {
                    self.holds[at..at + len].fill(value);
                    format!("write -P {value} {at} {len}")
                }
            };
            args.extend(["-c".into(), what]);
        }
        args.push(self.path());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        qemu("qemu-io", &args);
    }

    fn options(&self, read_only: bool) -> OpenOptions {
        let format = Some(Format::Qcow2);
        OpenOptions { format, cache: self.cache, read_only, ..OpenOptions::default() }
    }

    fn open(&self, read_only: bool) -> Vbd {
        let image = ringtap_image::open(&self.image, &self.options(read_only));
        Vbd::new(image.unwrap_or_else(|error| panic!("{}: {error}", self.options)), self.cache)
    }

    /// Many requests at random, four at a time.
    fn write_with_ringtap(&mut self) {
        let vbd = self.open(false);
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        for _ in 0..16 {
            // Ranges that do not meet, so that the order does not matter.
            let mut ranges: Vec<(usize, usize)> = Vec::new();
            while ranges.len() < 4 {
                let (at, len) = self.range();
                if ranges.iter().all(|(other, n)| at + len <= *other || other + n <= at) {
                    ranges.push((at, len));
                }
            }
            for (at, len) in ranges {
                let value = self.rng.u8(1..);
                let kind = match self.rng.u8(0..8) {
                    0 => Kind::WriteZeroes { unmap: true, fast: false },
                    1 => Kind::WriteZeroes { unmap: false, fast: false },
                    2 => Kind::Discard,
                    _ => Kind::Write,
                };
                let fua = self.rng.u8(0..8) == 0;
                match kind {
                    Kind::Write => self.holds[at..at + len].fill(value),
                    Kind::WriteZeroes { .. } => self.holds[at..at + len].fill(0),
                    _ => {}
                }
                let (vbd, io) = (vbd.fork(), tasks.io().clone());
                tasks.spawn(async move {
                    serve(&vbd, &io, kind, at, len, value, fua).await.expect("served");
                });
            }
            tasks.run().expect("the ring turns");
            if self.rng.u8(0..8) == 0 {
                let (vbd, io) = (vbd.fork(), tasks.io().clone());
                let flush = async move { vbd.flush(&io).await };
                tasks.block_on(flush).expect("the ring turns").expect("a flush");
            }
        }
        let found = read_all(&vbd, &mut tasks);
        self.accept_discards(&found);
        let io = tasks.io().clone();
        tasks.block_on(async move { vbd.close(&io).await }).expect("turns").expect("closed");
    }

    /// Discarded sectors may be zeros or what they were.
    fn accept_discards(&mut self, found: &[u8]) {
        for (index, (new, old)) in found.chunks(512).zip(self.holds.chunks_mut(512)).enumerate() {
            let zeros = new.iter().all(|byte| *byte == 0);
            assert!(zeros || new == old, "{}: sector {index} is wrong", self.options);
            old.copy_from_slice(new);
        }
    }

    fn compare(&mut self) {
        let vbd = self.open(true);
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        let found = read_all(&vbd, &mut tasks);
        let wrong = found.iter().zip(&self.holds).position(|(one, other)| one != other);
        assert_eq!(wrong, None, "{}: the first byte that differs", self.options);
        self.compare_map(&vbd, &mut tasks);
        drop(vbd);
        // QEMU has the last word.
        let raw = self.dir.path().join("holds");
        std::fs::write(&raw, &self.holds).expect("a file");
        let (path, raw) = (self.path(), raw.display().to_string());
        qemu("qemu-img", &["compare", "-q", "-f", "qcow2", "-F", "raw", &path, &raw]);
        let check = run("qemu-img", &["check", "-f", "qcow2", &path]);
        check.unwrap_or_else(|error| panic!("{}: {error}", self.options));
    }

    /// What Ringtap and QEMU say of where everything lies.
    fn compare_map(&self, vbd: &Vbd, tasks: &mut Tasks) {
        let (vbd, io) = (vbd.fork(), tasks.io().clone());
        let ours = async move {
            let (mut all, mut at) = (Vec::<(u64, Status)>::new(), 0);
            while at < SIZE as u64 {
                let status = vbd.status(&io, at, SIZE as u64 - at).await?;
                all.push((at, status));
                at += status.len;
            }
            Ok::<_, Error>(all)
        };
        let ours = tasks.block_on(ours).expect("turns").expect("status");
        let mut sectors = Vec::new();
        for (at, status) in ours {
            let data = status.allocated && !status.zero;
            // Where no layer has it, QEMU names the last that was asked.
            let depth = status.depth.saturating_sub(u32::from(!status.present));
            for sector in 0..status.len / 512 {
                let offset = status.at.filter(|_| data).map(|from| from + 512 * sector);
                sectors.push((at + 512 * sector, u64::from(depth), data, offset));
            }
        }
        let json = qemu("qemu-img", &["map", "--output=json", "-f", "qcow2", &self.path()]);
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let mut theirs = Vec::new();
        for entry in json.as_array().expect("a list") {
            let number = |key: &str| entry[key].as_u64();
            let start = number("start").expect("a start");
            let data = entry["data"].as_bool().expect("a truth");
            for at in (0..number("length").expect("a length")).step_by(512) {
                let offset = number("offset").filter(|_| data).map(|from| from + at);
                theirs.push((start + at, number("depth").expect("a depth"), data, offset));
            }
        }
        assert_eq!(sectors.len(), theirs.len());
        let wrong = sectors.iter().zip(&theirs).find(|(one, other)| one != other);
        assert_eq!(wrong, None, "{}: ours and theirs: offset, depth, data, place", self.options);
    }

    fn play(mut self) {
        for round in 0..2 {
            if round > 0 || self.rng.bool() {
                self.write_with_qemu();
            }
            self.compare();
            // Narrow refcounts have no room for so many references.
            let narrow = ["refcount_bits=1", "refcount_bits=2"];
            if self.compresses() && !narrow.iter().any(|option| self.options.contains(option)) {
                let name = format!("round {round}");
                qemu("qemu-img", &["snapshot", "-c", &name, &self.path()]);
            }
            self.write_with_ringtap();
            self.compare();
        }
    }
}

async fn serve(
    vbd: &Vbd,
    io: &Io,
    kind: Kind,
    at: usize,
    len: usize,
    value: u8,
    fua: bool,
) -> Result<(), Error> {
    let mut buffer = io.buffer(len).map_err(Error::Os)?;
    buffer.bytes_mut().fill(value);
    let (offset, len) = (at as u64, len as u64);
    vbd.serve(io, Request { kind, offset, len, mem: buffer.mem(), fua }).await
}

fn read_all(vbd: &Vbd, tasks: &mut Tasks) -> Vec<u8> {
    let (vbd, io) = (vbd.fork(), tasks.io().clone());
    let all = async move {
        let buffer = io.buffer(SIZE).map_err(Error::Os)?;
        let (kind, len) = (Kind::Read, SIZE as u64);
        vbd.serve(&io, Request { kind, offset: 0, len, mem: buffer.mem(), fua: false }).await?;
        Ok::<_, Error>(buffer.bytes().to_vec())
    };
    tasks.block_on(all).expect("the ring turns").expect("a read")
}

#[test]
fn images_of_odd_shapes() {
    for (seed, options) in (0..).zip([
        "",
        "cluster_size=512",
        "cluster_size=1k,refcount_bits=64",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=2M",
        "refcount_bits=8,lazy_refcounts=on",
        "compat=0.10",
        "compat=0.10,cluster_size=4k",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,refcount_bits=2",
        "extended_l2=on,cluster_size=2M",
        "data_file=DATA",
        "data_file=DATA,data_file_raw=on",
        "data_file=DATA,extended_l2=on,cluster_size=32k",
        "preallocation=metadata",
        "preallocation=falloc,cluster_size=8k",
        "preallocation=full,extended_l2=on",
        "compression_type=zstd",
        "compression_type=zstd,extended_l2=on",
    ]) {
        Case::new(seed, options, None).play();
    }
}

#[test]
fn overlays_of_odd_shapes() {
    for (seed, (options, below)) in (0..).zip([
        ("", "raw"),
        ("", "qcow2"),
        ("cluster_size=512", "raw"),
        ("cluster_size=4k,compat=0.10", "qcow2"),
        ("cluster_size=2M", "qcow2"),
        ("extended_l2=on", "raw"),
        ("extended_l2=on,cluster_size=16k", "qcow2"),
        ("extended_l2=on,cluster_size=1M", "raw"),
        ("data_file=DATA", "qcow2"),
    ]) {
        Case::new(seed, options, Some(below)).play();
    }
}

/// Zeros for a part of a cluster take it whole, and no room, where nothing else is in it or below; where something is, they
/// are written.
#[test]
fn a_part_of_an_empty_cluster_becomes_zeros_without_room() {
    for (seed, options, below) in [(60, "", None), (61, "", Some("raw")), (62, "", Some("qcow2"))] {
        let mut case = Case::new(seed, options, below);
        let cluster = case.cluster;
        let empty = |case: &Case, at: usize| case.holds[at..at + cluster].iter().all(|it| *it == 0);
        let places = (0..SIZE - cluster).step_by(cluster);
        let (free, full): (Vec<_>, Vec<_>) = places.partition(|at| empty(&case, *at));
        let vbd = case.open(false);
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        let taken = || std::fs::metadata(&case.image).expect("the image").len();
        // Zeros that are written down below, as bytes, are no hole there.
        let (io, one) = (tasks.io().clone(), vbd.fork());
        let holes = async move {
            let mut holes = vec![];
            for at in free {
                let status = one.status(&io, at as u64, cluster as u64).await?;
                if status.zero && status.len >= cluster as u64 {
                    holes.push(at);
                }
            }
            Ok::<_, ringtap_image::Error>(holes)
        };
        let free = tasks.block_on(holes).expect("the ring turns").expect("known");
        let (first, other, second) = (free[0], free[1], full.first().copied());
        let (io, one) = (tasks.io().clone(), vbd.fork());
        let zeros = async move {
            let zero = Kind::WriteZeroes { unmap: false, fast: false };
            // The table comes with it.
            serve(&one, &io, zero, other, 512, 0, false).await?;
            one.flush(&io).await
        };
        tasks.block_on(zeros).expect("the ring turns").expect("served");
        let before = taken();
        let (io, one) = (tasks.io().clone(), vbd.fork());
        let all = async move {
            for (unmap, at, len) in
                [(false, 1024, 512), (true, 2048, cluster - 4096), (true, 0, cluster)]
            {
                let zero = Kind::WriteZeroes { unmap, fast: false };
                serve(&one, &io, zero, first + at, len, 0, false).await?;
            }
            one.flush(&io).await?;
            Ok::<_, ringtap_image::Error>(())
        };
        tasks.block_on(all).expect("the ring turns").expect("served");
        assert_eq!(taken(), before, "{below:?}");
        let (io, one) = (tasks.io().clone(), vbd.fork());
        let rest = async move {
            let zero = Kind::WriteZeroes { unmap: true, fast: false };
            if let Some(at) = second {
                serve(&one, &io, zero, at + 512, 512, 0, false).await?;
            }
            serve(&one, &io, Kind::Write, first + 512, 512, 9, false).await?;
            serve(&one, &io, zero, first + 1024, 512, 0, false).await?;
            vbd.close(&io).await
        };
        tasks.block_on(rest).expect("the ring turns").expect("served");
        if let Some(at) = second {
            case.holds[at + 512..at + 1024].fill(0);
        }
        case.holds[first + 512..first + 1024].fill(9);
        case.compare();
    }
}

/// A write of several clusters whose first holds something already, and not in all of the rest: what lies
/// behind that is to be found, too.
#[test]
fn writes_go_on_behind_what_a_cluster_holds_already() {
    for (seed, (options, below)) in (50..).zip([
        ("extended_l2=on,cluster_size=16k", Some("qcow2")),
        ("data_file=DATA,extended_l2=on,cluster_size=16k", Some("qcow2")),
        ("data_file=DATA,extended_l2=on,cluster_size=16k", None),
        ("data_file=DATA,data_file_raw=on,extended_l2=on,cluster_size=16k", None),
    ]) {
        let mut case = Case::new(seed, options, below);
        let vbd = case.open(false);
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
        let io = tasks.io().clone();
        let all = async move {
            let zero = Kind::WriteZeroes { unmap: true, fast: false };
            serve(&vbd, &io, zero, 0, 128 << 10, 0, false).await?;
            serve(&vbd, &io, Kind::Write, 24 << 10, 4096, 1, false).await?;
            serve(&vbd, &io, Kind::Write, 18 << 10, 60 << 10, 2, false).await?;
            vbd.close(&io).await
        };
        tasks.block_on(all).expect("the ring turns").expect("served");
        case.holds[..128 << 10].fill(0);
        case.holds[18 << 10..78 << 10].fill(2);
        case.compare();
    }
}

/// QEMU that writes refcounts late and is killed leaves the image dirty: it can be read as it is, and
/// is repaired before it is written to.
#[test]
fn what_qemu_left_dirty_is_repaired_before_it_is_written_to() {
    let mut case = Case::new(40, "lazy_refcounts=on", None);
    let orders = ["write -P 7 1M 1M", "flush", "abort"];
    let mut killed = Command::new("timeout");
    killed.args(["60", "qemu-io", "-f", "qcow2"]);
    for order in orders {
        killed.args(["-c", order]);
    }
    let end = killed.arg(case.path()).output().expect("timeout runs");
    assert!(!end.status.success(), "it was to be killed");
    case.holds[1 << 20..2 << 20].fill(7);
    let is_dirty = |case: &Case| std::fs::read(&case.image).expect("the image")[79] & 1 == 1;
    assert!(is_dirty(&case));
    run("qemu-img", &["check", "-f", "qcow2", &case.path()]).expect_err("refcounts are wrong");
    let vbd = case.open(true);
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("a ring")));
    assert!(read_all(&vbd, &mut tasks) == case.holds);
    drop(vbd);
    assert!(is_dirty(&case));
    case.write_with_ringtap();
    assert!(!is_dirty(&case));
    case.compare();
}
