//! What two real guests have of one device, whose disks lie on one file system and are served by one process: ratios, which are
//! printed; what a shared machine makes of them no test can hold to. `docs/measured.md` has what they were, and the command.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_guest::{Appliance, Guest, Machine, Output, Qemu, fio};
use ringtap_tests::{Control, Server, patience};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);
/// What a load takes to begin in a translated guest, and what of its first requests does not count.
const BEGINS: Duration = Duration::from_secs(3);

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().expect("a number"))
}

/// Data for a disk: not holes, which no device is asked for.
fn image(path: &Path, size: u64) {
    let mut file = File::create(path).expect("a file");
    let mut rng = fastrand::Rng::with_seed(size);
    for _ in 0..size / MIB {
        let part: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(MIB as usize).collect();
        file.write_all(&part).expect("written");
    }
    file.sync_all().expect("synced");
}

/// What a load had: requests a second, by the server's count and the host's clock; and what 99 of 100 took no longer than, in
/// microseconds, by the guest's.
#[derive(Clone, Copy)]
struct Had {
    rate: f64,
    p99: f64,
}

struct Bench {
    guests: [Guest; 2],
    control: Control,
    time: Duration,
}

impl Bench {
    fn new(folder: &Path, time: Duration) -> (Bench, Server) {
        let path = |name: &str| folder.join(name);
        let text = |path: &PathBuf| path.to_str().expect("a plain path").to_owned();
        let control = path("control");
        let mut words = vec!["--control".to_owned(), format!("unix:{}", control.display())];
        for name in ["a", "b"] {
            image(&path(name), 512 * MIB);
            let socket = text(&path(&format!("{name}.sock")));
            words.extend([text(&path(name)), "-f".into(), "raw".into()]);
            words.extend(["--node-name".into(), name.into(), "--vhost-user".into(), socket]);
        }
        let server = Server::start(words);
        let appliance = Appliance::builder(Machine::Pc).programs(["fio"]);
        let appliance = appliance.build(&Appliance::default_cache());
        let appliance = appliance.unwrap_or_else(|error| panic!("{error}"));
        let guests = ["a", "b"].map(|name| {
            let qemu = Qemu::new(&appliance).memory(512 * MIB).cpus(1);
            let qemu = qemu.vhost_user(path(&format!("{name}.sock")), 1);
            qemu.boot().unwrap_or_else(|error| panic!("{error}"))
        });
        (Bench { guests, control: Control::open(&control), time }, server)
    }

    /// Weights of both disks, 0 where none is said, and the most requests a second of the first.
    fn policy(&mut self, weights: [u64; 2], cap: u64) {
        for (node, weight) in ["a", "b"].into_iter().zip(weights) {
            let cap = if node == "a" { cap } else { 0 };
            let limits = json!({ "__ringtap_weight": weight, "iops-total": cap });
            self.control.ok("__ringtap_throttle", json!({ "node-name": node, "limits": limits }));
        }
    }

    /// Both guests at once, each with so many requests in flight; one with none rests.
    fn run(&mut self, depths: [u32; 2]) -> [Had; 2] {
        let time = self.time;
        // Until it is told to stop: the clock of a translated guest may run ahead. Stopped so, fio ends with a status of its own.
        let load = |depth: u32| {
            format!(
                "fio --name=load --thread --filename=/dev/vda --rw=randread --bs=4k --iodepth={depth} --ioengine=libaio --direct=1 \
                 --readonly --norandommap --time_based --runtime=3600 --ramp_time=1 --lat_percentiles=1 --output-format=json >/tmp/said; cat /tmp/said"
            )
        };
        let guests: Vec<(usize, &Guest)> =
            self.guests.iter().enumerate().filter(|(at, _)| depths[*at] > 0).collect();
        let jobs: Vec<_> = guests
            .iter()
            .map(|(at, guest)| (*at, guest.start(&load(depths[*at])).expect("it begins")))
            .collect();
        thread::sleep(BEGINS);
        let (began, before) = (Instant::now(), served(&mut self.control));
        thread::sleep(time);
        let (took, after) = (began.elapsed().as_secs_f64(), served(&mut self.control));
        let mut had = [0, 1].map(|at| Had { rate: (after[at] - before[at]) / took, p99: 0.0 });
        for (at, job) in jobs {
            assert!(!job.is_done(), "the load had ended before it was measured");
            let stop = self.guests[at].exec("killall -TERM fio", LONG).and_then(Output::success);
            stop.unwrap_or_else(|error| panic!("{error}"));
            let said = job.wait(LONG).and_then(Output::success);
            let said = said.unwrap_or_else(|error| {
                panic!("{error}: {}", stuck(&self.guests[at], &mut self.control))
            });
            let report = fio::Report::parse(&said.stdout).unwrap_or_else(|error| panic!("{error}"));
            let job = report.first().and_then(|job| job.done(false));
            let reads = job.unwrap_or_else(|error| panic!("{error}"));
            println!("guest {at}, {} in flight: {:.0} reads a second", depths[at], had[at].rate);
            had[at].p99 = reads.lat_ns.percentile(99.0).expect("percentiles") / 1e3;
        }
        had
    }
}

/// What there is to see where a load does not end: whether reads are still served, what the server has, and what fio waits for.
fn stuck(guest: &Guest, control: &mut Control) -> String {
    let before = served(control);
    thread::sleep(Duration::from_secs(1));
    let after = served(control);
    let tree = control.ok("__ringtap_inspect", json!({}));
    let look = "for t in /proc/[0-9]*/task/*; do
            case $(cat $t/comm) in fio) echo $t; grep -e State -e Sig -e ShdPnd $t/status; cat $t/stack ;; esac
        done
        cat /sys/block/vda/inflight";
    let seen = guest.exec(look, LONG);
    format!("reads {before:?}, then {after:?}\n{tree:#}\n{seen:?}")
}

/// How many reads both disks have served.
fn served(control: &mut Control) -> [f64; 2] {
    let stats = control.ok("query-blockstats", json!({}));
    ["a", "b"].map(|node| {
        let is_it = |one: &&Value| one["node-name"] == node;
        let found = stats.as_array().into_iter().flatten().find(is_it);
        let reads = found.and_then(|it| it["stats"]["rd_operations"].as_f64());
        reads.unwrap_or_else(|| panic!("no reads of {node}: {stats}"))
    })
}

fn sum(had: [Had; 2]) -> f64 {
    had[0].rate + had[1].rate
}

fn jain(had: [Had; 2]) -> f64 {
    let squares: f64 = had.iter().map(|had| had.rate * had.rate).sum();
    sum(had) * sum(had) / (2.0 * squares)
}

/// What was seen of each line, once a round.
#[derive(Default)]
struct Lines(Vec<(String, Vec<f64>)>);

impl Lines {
    fn add(&mut self, name: &str, value: f64) {
        match self.0.iter_mut().find(|(other, _)| other == name) {
            Some((_, all)) => all.push(value),
            None => self.0.push((name.to_owned(), vec![value])),
        }
    }

    fn print(&mut self) {
        for (name, all) in &mut self.0 {
            all.sort_by(f64::total_cmp);
            println!(
                "{name}: {:.3} ({:.3} to {:.3})",
                all[all.len() / 2],
                all[0],
                all[all.len() - 1]
            );
        }
    }
}

/// In the folder `RINGTAP_FOLDER`, or in /var/tmp; `RINGTAP_ROUNDS` rounds, each case for `RINGTAP_SECONDS`.
#[test]
#[ignore = "two guests under TCG for minutes, and what it prints is measured"]
fn two_guests_share_a_device() {
    let folder = std::env::var_os("RINGTAP_FOLDER").map_or("/var/tmp".into(), PathBuf::from);
    let dir = tempfile::tempdir_in(folder).expect("a folder");
    let (mut bench, server) =
        Bench::new(dir.path(), Duration::from_secs(number("RINGTAP_SECONDS", 5)));
    let mut lines = Lines::default();
    for _ in 0..number("RINGTAP_ROUNDS", 3) {
        bench.policy([0, 0], 0);
        let alone = bench.run([32, 0])[0];
        let quiet = bench.run([1, 0])[0];
        lines.add("one alone, 32 in flight: reads a second", alone.rate);
        lines.add("one alone, 1 in flight: reads a second", quiet.rate);
        lines.add("one alone, 1 in flight: p99, microseconds", quiet.p99);
        for (weight, how) in [(0, "without shares"), (100, "with shares")] {
            bench.policy([weight; 2], 0);
            let equal = bench.run([32, 32]);
            lines.add(&format!("two equal, {how}: Jain"), jain(equal));
            lines.add(&format!("two equal, {how}: sum by one alone"), sum(equal) / alone.rate);
            let [soft, loud] = bench.run([1, 32]);
            let name = |what: &str| format!("{what}, {how}");
            lines.add(&name("quiet beside loud: reads by alone"), soft.rate / quiet.rate);
            lines.add(&name("quiet beside loud: p99 by alone"), soft.p99 / quiet.p99);
            lines.add(&name("loud beside quiet: reads by alone"), loud.rate / alone.rate);
        }
        bench.policy([100, 200], 0);
        let had = bench.run([32, 32]);
        lines.add("weights 1:2: the second by the first", had[1].rate / had[0].rate);
        lines.add("weights 1:2: sum by one alone", sum(had) / alone.rate);
        for cap in [100, 1000, 3000] {
            bench.policy([0, 0], cap);
            let [held, free] = bench.run([32, 32]);
            lines.add(
                &format!("cap of {cap} beside one without: reads by cap"),
                held.rate / cap as f64,
            );
            lines.add(&format!("beside a cap of {cap}: reads by alone"), free.rate / alone.rate);
        }
    }
    lines.print();
    for guest in bench.guests {
        guest.shutdown(patience()).unwrap_or_else(|error| panic!("{error}"));
    }
    let said = server.stop();
    assert!(!said.contains("ERROR"), "{said}");
}
