//! How near what disks have of one device comes to their shares, on this machine:
//!
//!     target/release/examples/shares FILE [SECONDS [ROUNDS]]
//!
//! FILE, a gigabyte or more of data, is read from at random past the page cache, 4 KiB at once, by several disks, each with a
//! thread of its own. Every round measures each case for so many seconds, of which the first third does not count; what is
//! printed are medians of each round's own ratios. Where there is fio, it does the same without Ringtap.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_image::{CacheMode, Format, OpenOptions};
use ringtap_io::{Ring, Tasks};
use ringtap_vbd::{Disk, Kind, Request, Share, Vbd};

const LEN: u64 = 4096;

/// What a load had: requests a second, and what 99 of 100 took no longer than, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Had {
    iops: f64,
    p99: f64,
}

struct Bench {
    file: PathBuf,
    time: Duration,
}

impl Bench {
    /// Several disks at once, each with so many requests in flight, and a weight where shares are to hold.
    fn run(&self, loads: &[(u64, u32)]) -> Vec<Had> {
        let disks: Vec<Disk> = loads.iter().map(|(_, weight)| self.disk(*weight)).collect();
        thread::scope(|scope| {
            let all: Vec<_> = disks
                .iter()
                .zip(loads)
                .enumerate()
                .map(|(seed, (disk, (depth, _)))| {
                    scope.spawn(move || load(disk, self.time, *depth, seed as u64))
                })
                .collect();
            all.into_iter().map(|load| load.join().expect("no panic")).collect()
        })
    }

    fn disk(&self, weight: u32) -> Disk {
        let options = OpenOptions {
            format: Some(Format::Raw),
            read_only: true,
            cache: CacheMode::None,
            ..OpenOptions::default()
        };
        let image = ringtap_image::open(&self.file, &options).expect("an image");
        let disk = Disk::from(Vbd::new(image, CacheMode::None));
        disk.share_device();
        disk.set_share(Share { weight, ..Share::default() }).expect("a share");
        disk
    }

    /// Two loads of fio's, likewise.
    fn fio(&self, depths: [u64; 2]) -> Option<[f64; 2]> {
        let mut fio = Command::new("fio");
        let time = self.time.as_secs().max(1);
        fio.args(["--ioengine=io_uring", "--direct=1", "--rw=randread", "--bs=4k", "--readonly"])
            .args(["--time_based", "--output-format=terse", "--terse-version=3"])
            .arg(format!("--runtime={}", time * 2 / 3 + 1))
            .arg(format!("--ramp_time={}", time / 3))
            .arg(format!("--filename={}", self.file.display()));
        for depth in depths {
            fio.arg(format!("--name=depth{depth}")).arg(format!("--iodepth={depth}"));
        }
        let out = fio.output().ok().filter(|out| out.status.success())?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let iops = |line: &str| line.split(';').nth(7)?.parse::<f64>().ok();
        let found: Vec<f64> = text.lines().filter_map(iops).collect();
        found.try_into().ok()
    }
}

/// Keep so many requests in flight for so long.
fn load(disk: &Disk, time: Duration, depth: u64, seed: u64) -> Had {
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
    let (vbd, took) = (Rc::new(disk.fork()), Rc::new(std::cell::RefCell::new(vec![])));
    let began = Instant::now();
    let (counted, end) = (began + time / 3, began + time);
    for slot in 0..depth {
        let (io, vbd, took) = (tasks.io().clone(), vbd.clone(), took.clone());
        let mut rng = fastrand::Rng::with_seed(seed * 1000 + slot);
        tasks.spawn(async move {
            let buffer = io.buffer(LEN as usize).expect("memory");
            loop {
                let offset = rng.u64(0..vbd.size() / LEN) * LEN;
                let (kind, mem, before) = (Kind::Read, buffer.mem(), Instant::now());
                let request = Request { kind, offset, len: LEN, mem, fua: false };
                vbd.serve(&io, request).await.expect("served");
                let now = Instant::now();
                if now >= end {
                    return;
                }
                if before >= counted {
                    took.borrow_mut().push((now - before).as_nanos() as f64 / 1e3);
                }
            }
        });
    }
    tasks.run().expect("the ring works");
    let mut took = took.take();
    took.sort_unstable_by(f64::total_cmp);
    let iops = took.len() as f64 / (time * 2 / 3).as_secs_f64();
    Had { iops, p99: took.get(took.len() * 99 / 100).copied().unwrap_or(0.0) }
}

fn jain(of: &[Had]) -> f64 {
    let sum: f64 = of.iter().map(|had| had.iops).sum();
    let squares: f64 = of.iter().map(|had| had.iops * had.iops).sum();
    sum * sum / (of.len() as f64 * squares)
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(f64::NAN)
}

#[derive(Default)]
struct Lines(Vec<(&'static str, Vec<f64>)>);

impl Lines {
    fn add(&mut self, name: &'static str, value: f64) {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, all)) => all.push(value),
            None => self.0.push((name, vec![value])),
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().expect("a file of a gigabyte or more");
    let mut number =
        |usual: u64| arguments.next().map_or(usual, |text| text.parse().expect("a number"));
    let (time, rounds) = (Duration::from_secs(number(3)), number(5));
    let bench = Bench { file: Path::new(&file).to_owned(), time };
    println!("{file}, {} s each, {rounds} rounds", time.as_secs());
    let mut lines = Lines::default();
    for _ in 0..rounds {
        let sum = |had: &[Had]| had.iter().map(|had| had.iops).sum::<f64>();
        let [alone, quiet] = [32, 1].map(|depth| bench.run(&[(depth, 0)])[0]);
        lines.add("one alone, 32 in flight: reads a second", alone.iops);
        lines.add("one alone, 1 in flight: reads a second", quiet.iops);
        lines.add("one alone, 1 in flight: p99, microseconds", quiet.p99);
        for (weight, names) in [
            (0, ["two equal, without shares: Jain", "two equal, without shares: sum by one alone"]),
            (100, ["two equal, with shares: Jain", "two equal, with shares: sum by one alone"]),
        ] {
            let had = bench.run(&[(32, weight), (32, weight)]);
            lines.add(names[0], jain(&had));
            lines.add(names[1], sum(&had) / alone.iops);
        }
        for (weight, names) in [
            (
                0,
                [
                    "quiet beside loud, without shares: reads by alone",
                    "quiet beside loud, without shares: p99 by alone",
                    "loud beside quiet, without shares: reads by alone",
                ],
            ),
            (
                100,
                [
                    "quiet beside loud, with shares: reads by alone",
                    "quiet beside loud, with shares: p99 by alone",
                    "loud beside quiet, with shares: reads by alone",
                ],
            ),
        ] {
            let had = bench.run(&[(1, weight), (32, weight)]);
            lines.add(names[0], had[0].iops / quiet.iops);
            lines.add(names[1], had[0].p99 / quiet.p99);
            lines.add(names[2], had[1].iops / alone.iops);
        }
        if let Some([beside, _]) = bench.fio([1, 32]) {
            lines
                .add("quiet beside loud, fio alone: reads by ringtap's alone", beside / quiet.iops);
        }
        let had = bench.run(&[(32, 100), (32, 200), (32, 400)]);
        lines.add("weights 1:2:4: the second by the first", had[1].iops / had[0].iops);
        lines.add("weights 1:2:4: the third by the first", had[2].iops / had[0].iops);
        lines.add("weights 1:2:4: sum by one alone", sum(&had) / alone.iops);
    }
    for (name, all) in lines.0 {
        let (low, high) = all
            .iter()
            .fold((f64::MAX, 0.0_f64), |(low, high), value| (low.min(*value), high.max(*value)));
        println!("{name}: {:.3} ({low:.3} to {high:.3})", median(all));
    }
}
