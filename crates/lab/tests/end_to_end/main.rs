//! The whole lab on a small disk: native, loop devices and qemu-nbd for real; Ctrl-C in the middle.

mod bad;
mod own;
mod remote;
mod sweep;
mod two;
mod usual;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use ringtap_lab::CompareArgs;
use ringtap_lab::env::Env;
use ringtap_lab::plan::Plan;
use ringtap_lab::report;
use ringtap_lab::run::{self, folder::State};
use ringtap_lab::sample::{Metric, Sample, Stage, Stall};
use ringtap_lab::selftest;
use ringtap_lab::stop::Stop;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: CompareArgs,
}

struct Bench {
    dir: tempfile::TempDir,
    env: Env,
}

impl Bench {
    fn new() -> Bench {
        // Paths with spaces are paths.
        let dir = tempfile::Builder::new()
            .prefix("lab test ")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))
            .unwrap();
        // No ringtap: its rows must come out as not run, with the reason.
        Bench {
            dir,
            env: Env::new("/nonexistent/ringtap".into(), "/nonexistent/ringtap-lab".into()),
        }
    }

    /// One whose `ringtap` is that of this build.
    fn of_this_build() -> Bench {
        let test = std::env::current_exe().unwrap();
        let ringtap = test.ancestors().nth(2).unwrap().join("ringtap");
        assert!(ringtap.is_file(), "{} is missing: cargo build", ringtap.display());
        let lab = env!("CARGO_BIN_EXE_ringtap-lab").into();
        Bench { env: Env::new(ringtap, lab), ..Bench::new() }
    }

    fn plan(&self, words: &str) -> Plan {
        let dir = self.dir.path().to_str().unwrap();
        let words = ["compare", "--dir", dir, "--seed", "5", "--size", "32M", "--ramp", "0"]
            .into_iter()
            .chain(words.split_whitespace());
        Plan::from_args(&Cli::parse_from(words).args).unwrap()
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Nothing that the lab made or started is left: no scratch folder, loop device, mount or process.
    fn assert_clean(&self) {
        let left: Vec<_> = std::fs::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with("run"))
            .collect();
        assert!(left.is_empty(), "left in the folder of the disks: {left:?}");
        let ours = self.dir.path().to_str().unwrap();
        for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
            let backing =
                std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            assert!(
                !backing.contains(ours),
                "{:?} is still attached to {backing}",
                entry.file_name()
            );
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(ours), "still mounted: {mounts}");
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            assert!(!command.contains(ours), "still running: {command}");
        }
    }
}

fn samples(run: &Path) -> Vec<Sample> {
    run::folder::read(run).unwrap().1
}

#[test]
fn what_a_job_discards_is_written_again() {
    let bench = Bench::new();
    let job = bench.dir.path().join("run-trim.fio");
    std::fs::write(&job, "[trim]\nrw=trim\nbs=1M\ndirect=1\nioengine=sync\nnumber_ios=8\n")
        .unwrap();
    let arguments =
        ["compare", "--stages", "host", "--rounds", "1", "--backends", "loop", "--fio-job"];
    let mut arguments = arguments.map(std::ffi::OsString::from).to_vec();
    arguments.push(job.into());
    let settings = ["--seed", "5", "--size", "32M", "--ramp", "0", "--seconds", "0.1", "--dir"];
    arguments.extend(settings.map(Into::into));
    arguments.push(bench.dir.path().into());
    let plan = Plan::from_args(&Cli::parse_from(arguments).args).unwrap();
    if let Some(missing) = bench.env.loop_devices() {
        panic!("{}: {}", missing.reason, missing.remedy);
    }
    run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let written = report::load(&bench.out()).unwrap().run.written.unwrap();
    assert_eq!((written.bytes, written.allocated), (32 << 20, 32 << 20));
    // Before the twin; after it nobody comes.
    assert_eq!(written.again, 1);
}

#[test]
fn small_disks_for_real() {
    let bench = Bench::new();
    let plan = bench.plan(
        "--stages host --rounds 2 --seconds 0.3 --backends native,loop,loop-direct,qemu-nbd,ringtap-nbd \
         --workloads randread-4k-qd32,write-1m-qd8,dd-throughput,dd-latency-direct",
    );
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    let failed: Vec<_> =
        samples.iter().filter_map(|s| s.error.as_ref().map(|e| (&s.arm, &s.workload, e))).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!((ended.state, ended.failures), (State::Complete, 0));

    let analysis = report::load(&bench.out()).unwrap();
    let arms: Vec<&str> = analysis.run.arms.iter().map(|arm| arm.name.as_str()).collect();
    assert!(arms.starts_with(&["native", "native#2"]), "{arms:?}");
    assert!(
        arms.len() >= 3,
        "loop devices (root) or qemu-nbd must be there: {:?}",
        analysis.run.skipped
    );
    for arm in &arms {
        let mut client_cpu = 0.0;
        for round in 0..2 {
            let of =
                |s: &&Sample| s.arm == *arm && s.round == round && s.workload == "randread-4k-qd32";
            let sample = samples
                .iter()
                .find(of)
                .unwrap_or_else(|| panic!("{arm} has no sample in round {round}"));
            assert!(sample.metrics[&Metric::Iops].value > 0.0);
            client_cpu += sample.metrics[&Metric::ClientCpu].value;
            let server = sample.metrics.get(&Metric::ServerCpu).map(|value| value.value);
            assert_eq!(server.is_some(), *arm == "qemu-nbd", "{arm}: {server:?}");
            assert!(server.is_none_or(|cpu| cpu > 0.0), "a server that works costs CPU");
        }
        // fio counts its CPU time in milliseconds: on a busy machine one short run may have none.
        assert!(client_cpu > 0.0, "{arm}: fio works, so it costs CPU");
    }
    // The disk is smaller than 1 GiB, and that is said.
    let dd = samples.iter().find(|s| s.workload == "dd-throughput").unwrap();
    assert!(dd.note.as_ref().unwrap().contains("32 MiB"), "{:?}", dd.note);
    // What cannot run is a row with its reason.
    for (backend, workload) in [("ringtap-nbd", None), ("qemu-nbd", Some("dd-throughput"))] {
        let skip = analysis
            .run
            .skipped
            .iter()
            .find(|s| s.backend == backend && s.workload.as_deref() == workload);
        let skip =
            skip.unwrap_or_else(|| panic!("{backend} {workload:?} is not among what was skipped"));
        assert!(!skip.missing.reason.is_empty() && !skip.missing.remedy.is_empty());
    }
    // Two rounds are points.
    assert!(analysis.rows.iter().all(|row| row.interval.is_none()));
    let table = report::table::render(&analysis, false, Some(160));
    let ringtap = analysis.run.skipped.iter().find(|skip| skip.backend == "ringtap-nbd").unwrap();
    assert!(
        table.contains("native#2")
            && table.contains("points only")
            && table.contains(&ringtap.missing.reason),
        "{table}"
    );
    // The folder is not overwritten.
    assert!(run::run(&plan, &bench.env, &bench.out(), &Stop::default()).is_err());
    bench.assert_clean();
}

#[test]
fn ctrl_c_leaves_a_readable_part_and_nothing_else() {
    let bench = Bench::new();
    let plan = bench.plan("--stages host --rounds 50 --backends native,loop,qemu-nbd --workloads randread-4k-qd1 --seconds 0.4");
    let out = bench.out();
    let stop = Stop::on_signals().unwrap();
    let over = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            // A few samples, and one more half done.
            let until = Instant::now() + Duration::from_secs(60);
            let lines = || {
                std::fs::read_to_string(out.join("samples.jsonl"))
                    .unwrap_or_default()
                    .lines()
                    .count()
            };
            while lines() < 5 && Instant::now() < until && !over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::thread::sleep(Duration::from_millis(150));
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::INT)
                .unwrap();
        });
        let began = Instant::now();
        let ended = run::run(&plan, &bench.env, &out, &stop);
        over.store(true, Ordering::SeqCst);
        assert!(began.elapsed() < Duration::from_secs(90));
        ended.unwrap()
    });
    assert_eq!(ended.state, State::Interrupted);
    bench.assert_clean();

    let analysis = report::load(&out).unwrap();
    assert_eq!(analysis.run.state, State::Interrupted);
    let samples = samples(&out);
    assert!(samples.len() >= 5 && samples.len() < 50, "{}", samples.len());
    assert!(
        samples.iter().all(|s| s.error.is_none()),
        "the interrupted sample is left out, not failed"
    );
    let table = report::table::render(&analysis, false, Some(160));
    assert!(table.contains("PARTIAL: interrupted"), "{table}");
    let page = report::write_html(&out, &analysis).unwrap();
    assert!(std::fs::read_to_string(page).unwrap().contains("PARTIAL"));
}

#[test]
fn a_disk_without_room_is_refused_before_anything_starts() {
    let bench = Bench::new();
    let mut plan = bench.plan("--stages host --backends native --workloads randread-4k-qd1");
    plan.size = 1 << 60;
    let error = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("MiB free") && text.contains("--size"), "{text}");
    assert!(!bench.out().exists());
    bench.assert_clean();
}

#[test]
fn a_server_that_dies_of_its_guest_is_alone_in_failing() {
    let bench = Bench::new();
    let script = bench.dir.path().join("run-ringtap");
    let text = "#!/bin/sh\ncase \"$*\" in *--help*) exit 0;; esac\nfor word; do socket=$word; done\n\
        exec python3 -c 'import socket, sys\nserver = socket.socket(socket.AF_UNIX)\nserver.bind(sys.argv[1])\n\
        server.listen()\nserver.accept()\nsys.exit(\"no taste for guests\")' \"$socket\"\n";
    std::fs::write(&script, text).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let plan = bench.plan(
        "--stages guest --rounds 1 --seconds 0.1 --backends ubd,ringtap-vhost --workloads randread-4k-qd1",
    );
    let ended =
        run::run(&plan, &Env::new(script.clone(), script.clone()), &bench.out(), &Stop::default())
            .unwrap();
    assert_eq!((ended.state, ended.samples), (State::Complete, 3));
    let analysis = report::load(&bench.out()).unwrap();
    let [failure] = &analysis.failures[..] else { panic!("{:?}", analysis.failures) };
    assert_eq!((failure.arm.as_str(), failure.samples), ("ringtap-vhost", 2));
    assert!(failure.error.contains("no taste for guests"), "{}", failure.error);
    bench.assert_clean();
}

#[test]
fn one_boot_of_a_real_guest() {
    let bench = Bench::new();
    if let Err(missing) = bench.env.appliance() {
        panic!("{}: {}", missing.reason, missing.remedy);
    }
    let plan = bench.plan(
        "--stages guest --rounds 1 --seconds 0.2 --backends ubd,loop,qsd-vhost,ringtap-vhost \
         --workloads randread-4k-qd32,randwrite-4k-qd1,dd-throughput,dd-latency-direct",
    );
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    let failed: Vec<_> = samples.iter().filter_map(|s| s.error.as_ref()).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(ended.state, State::Complete);
    for arm in ["ubd", "ubd#2", "loop", "qsd-vhost"] {
        let of = |workload: &str| {
            let sample = samples.iter().find(|s| s.arm == arm && s.workload == workload);
            sample.unwrap_or_else(|| panic!("{arm} has no sample of {workload}")).metrics.clone()
        };
        let read = of("randread-4k-qd32");
        assert!(read[&Metric::Iops].value > 0.0 && read[&Metric::ClientCpu].value > 0.0, "{arm}");
        assert_eq!(read.contains_key(&Metric::ServerCpu), arm == "qsd-vhost", "{arm}");
        assert!(of("dd-latency-direct")[&Metric::TimePerOp].value > 0.0);
        assert!(of("dd-throughput")[&Metric::Bandwidth].value > 0.0);
    }
    let analysis = report::load(&bench.out()).unwrap();
    let guest = analysis.run.stages.iter().find(|(stage, _)| *stage == Stage::Guest);
    assert!(guest.is_some_and(|(_, words)| words.contains("User-Mode Linux")));
    assert!(analysis.run.skipped.iter().any(|skip| skip.backend == "ringtap-vhost"));
}

fn lab() -> PathBuf {
    env!("CARGO_BIN_EXE_ringtap-lab").into()
}

#[test]
fn files_are_copied_and_archived_and_flushes_counted_on_the_host() {
    let bench = Bench::new();
    let env = Env::new("/nonexistent/ringtap".into(), lab());
    let plan = bench.plan(
        "--stages host --rounds 1 --seconds 0.1 --backends native,loop,qemu-nbd,qemu-nbd-unsafe \
         --workloads filecopy,filecopy-durable,archive,durability,rated-50,dd-throughput-dsync",
    );
    let ended = run::run(&plan, &env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    let failed: Vec<_> =
        samples.iter().filter_map(|s| s.error.as_ref().map(|e| (&s.arm, &s.workload, e))).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(ended.state, State::Complete);
    let of =
        |arm: &str, workload: &str| samples.iter().find(|s| s.arm == arm && s.workload == workload);
    let copy = of("native", "filecopy").unwrap();
    assert!(copy.metrics[&Metric::CopyIndex].value > 0.0);
    assert!(copy.note.as_ref().unwrap().contains("cached copy"));
    assert!(copy.ledger.as_ref().unwrap().program > Some(0.0));
    assert!(of("native", "archive").unwrap().metrics[&Metric::Files].value > 0.0);
    assert!(of("qemu-nbd", "rated-50").unwrap().metrics[&Metric::Iops].value > 0.0);
    // A disk of the host's own has a ledger: what the program wrote is what its disk took.
    let dd = of("native", "dd-throughput-dsync").unwrap().ledger.as_ref().unwrap();
    assert_eq!(dd.program, Some(f64::from(32 << 20)));
    let analysis = report::load(&bench.out()).unwrap();
    if let Some(check) = analysis.durability.iter().find(|check| check.arm == "qemu-nbd") {
        assert!(check.durable && check.flushes >= 0.9, "{check:?}");
        let lies = analysis.durability.iter().find(|check| check.arm == "qemu-nbd-unsafe").unwrap();
        assert!(!lies.durable && lies.flushes < 0.1, "{lies:?}");
    } else {
        assert!(analysis.run.skipped.iter().any(|s| s.workload.as_deref() == Some("durability")));
    }
}

#[test]
fn a_guest_builds_volumes_and_snapshots() {
    let bench = Bench::new();
    let env = Env::new("/nonexistent/ringtap".into(), lab());
    if ringtap_lab::process::find("dmsetup").is_none() {
        panic!("dmsetup is needed: apt-get install dmsetup");
    }
    let plan = bench.plan(
        "--stages guest --rounds 1 --seconds 0.1 --backends ubd,lvm,lvm-snapshot,lvm-snapshot-itself,lvm-thin \
         --workloads randwrite-4k-qd1,snapshot-life,filecopy-durable",
    );
    let ended = run::run(&plan, &env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    let failed: Vec<_> =
        samples.iter().filter_map(|s| s.error.as_ref().map(|e| (&s.arm, &s.workload, e))).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(ended.state, State::Complete);
    for arm in ["lvm", "lvm-snapshot", "lvm-thin"] {
        let write = samples.iter().find(|s| s.arm == arm && s.workload == "randwrite-4k-qd1");
        let write = write.unwrap_or_else(|| panic!("{arm} wrote nothing"));
        let disk = write.ledger.as_ref().unwrap().disk.unwrap();
        assert!(disk.written > 0.0, "{arm}: what is below the volume saw writes");
        if arm == "lvm-snapshot" {
            // Each first write of a chunk is read and written to the copy as well.
            assert!(
                disk.read > 0.0 && disk.written > write.ledger.as_ref().unwrap().program.unwrap()
            );
        }
    }
    for copy in samples.iter().filter(|s| s.workload == "filecopy-durable") {
        let ledger = copy.ledger.as_ref().unwrap();
        let (asked, disk) = (ledger.program.unwrap(), ledger.disk.unwrap());
        assert!(asked > 0.0 && disk.written > 0.0, "{}: {ledger:?}", copy.arm);
    }
    for arm in ["lvm-snapshot", "lvm-snapshot-itself"] {
        let life = samples.iter().find(|s| s.workload == "snapshot-life" && s.arm == arm);
        assert_eq!(life.map(|life| life.curve.len()), Some(11), "{arm}");
    }
    let analysis = report::load(&bench.out()).unwrap();
    assert_eq!(analysis.curves.len(), 2);
    assert!(report::page::render(&analysis).contains("The life of a snapshot"));
}

/// The lab itself runs in a guest, whose kernel has a device-mapper and an NBD client, root and all: its host stage makes
/// devices there, and leaves none, interrupted or not.
#[test]
fn a_host_with_a_device_mapper_and_an_nbd_client_uses_them() {
    let bench = Bench::new();
    if ringtap_lab::process::find("dmsetup").is_none() {
        panic!("dmsetup is needed: apt-get install dmsetup");
    }
    // The guest has a /tmp of its own, and the clone may lie below the host's.
    let tool = "/opt/ringtap-lab";
    let appliance = ringtap_guest::Appliance::builder(ringtap_guest::Machine::Uml)
        .modules(["dm_mod", "dm_snapshot", "dm_thin_pool", "nbd"])
        .file(lab(), tool)
        .build(&ringtap_guest::Appliance::default_cache());
    let appliance = appliance.unwrap_or_else(|e| panic!("{e}"));
    let disk = bench.dir.path().join("run-disk");
    std::fs::File::create(&disk).unwrap().set_len(1 << 30).unwrap();
    let machine = ringtap_guest::Uml::new(&appliance).memory(512 << 20).ubd(&disk).boot().unwrap();
    let script = format!(
        "set -e\nmkfs.ext4 -q -F {}\nmkdir -p /mnt/lab\nmount -t ext4 {} /mnt/lab\ncd /mnt/lab\n\
         mkdir two\\ words\nset -- compare --stages host --backends native,qemu-nbd-kernel,lvm,lvm-snapshot,lvm-thin --size 32M --ramp 0 \
         --seconds 0.2 --workloads randwrite-4k-qd1,snapshot-life --dir '/mnt/lab/two words'\n\
         {tool} \"$@\" --rounds 1 --out run >&2\n\
         {tool} \"$@\" --rounds 500 --out cut >&2 &\nlab=$!\n\
         until dmsetup ls | grep -q ^snap && [ -s cut/samples.jsonl ]; do\n\
         if [ ! -e /proc/$lab/exe ]; then wait $lab || echo \"ended too early with $?\" >&2; exit 1; fi\nsleep 0.05; done\n\
         kill -INT $lab\nwait $lab || echo \"ended with $?\" >&2\n\
         dmsetup ls >&2\nlosetup -a >&2\nfor pid in /sys/block/nbd*/pid; do [ ! -e $pid ] || echo $pid >&2; done\nls . two\\ words >&2\ncat run/samples.jsonl",
        machine.disks()[0],
        machine.disks()[0],
    );
    let output = machine.exec(&script, Duration::from_secs(300)).unwrap().success().unwrap();
    let samples: Vec<Sample> =
        output.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for arm in ["native", "qemu-nbd-kernel", "lvm", "lvm-snapshot", "lvm-thin"] {
        let sample = samples.iter().find(|s| s.arm == arm && s.workload == "randwrite-4k-qd1");
        let sample = sample.unwrap_or_else(|| panic!("{arm}: {}", output.stderr));
        assert!(sample.error.is_none() && sample.metrics[&Metric::Iops].value > 0.0, "{sample:?}");
    }
    let life = samples.iter().find(|s| s.workload == "snapshot-life").unwrap();
    assert_eq!((life.arm.as_str(), life.curve.len()), ("lvm-snapshot", 11), "{life:?}");
    let left = output.stderr.rsplit("report: ").next().unwrap();
    assert!(left.contains("ended with 3"), "interrupted with a snapshot taken: {left}");
    for sign in ["ringtap-lab", "/dev/loop", "/sys/block/nbd"] {
        assert!(!left.contains(sign), "{left}");
    }
}

/// A server that is stopped in the middle of a load by schedule is a stall with its length and its layer.
#[test]
fn a_stall_is_told_with_its_layer() {
    let bench = Bench::new();
    let plan =
        bench.plan("--stages host --rounds 1 --seconds 4 --backends qemu-nbd --workloads rated-50");
    let ours = bench.dir.path().to_str().unwrap().to_owned();
    let running = |sign: &[&str]| {
        std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let all = sign.iter().all(|part| line.contains(part));
            let pid = entry.file_name().to_str()?.parse().ok()?;
            all.then(|| rustix::process::Pid::from_raw(pid)).flatten()
        })
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                // The load by schedule and not the one before, which finds out what the server carries.
                let load = running(&["fio", "--name=rated", &ours]);
                let server = running(&["qemu-nbd", &ours]).filter(|_| load.is_some());
                if let Some(server) = server {
                    std::thread::sleep(Duration::from_millis(1000));
                    let signal = |signal| rustix::process::kill_process(server, signal);
                    let stopped = signal(rustix::process::Signal::STOP);
                    std::thread::sleep(Duration::from_millis(800));
                    let _ = stopped.and_then(|()| signal(rustix::process::Signal::CONT));
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
        over.store(true, Ordering::SeqCst);
    });
    bench.assert_clean();
    let samples = samples(&bench.out());
    let stalled: Vec<&Stall> = samples.iter().flat_map(|sample| &sample.stalls).collect();
    let longest = stalled.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let longest = longest.unwrap_or_else(|| panic!("no stall: {samples:?}"));
    assert!(longest.seconds > 0.7 && longest.at > 0.5, "{stalled:?}");
    assert!(
        longest.server.is_some_and(|ran| ran < 0.5),
        "a stopped server does not run: {longest:?}"
    );
    let page = report::page::render(&report::load(&bench.out()).unwrap());
    assert!(page.contains("Stalls: over 100 ms") && page.contains("what stood still"));
}

/// The self-test for real. How near a busy machine comes to what is known is not asserted; limits are kept on any.
#[test]
fn what_is_known_beforehand_is_measured() {
    let bench = Bench::new();
    let plan = bench.plan("--stages host --rounds 6 --seconds 0.6");
    let outcome = selftest::run(&plan, &bench.env, 2, &Stop::default()).unwrap();
    bench.assert_clean();
    assert_eq!(outcome.skipped, Vec::<String>::new(), "nbdkit, qemu-nbd and root must be there");
    let find = |words: &str| {
        let found = outcome.findings.iter().find(|finding| finding.known.contains(words));
        found.unwrap_or_else(|| panic!("{words}: {:?}", outcome.findings))
    };
    for words in ["two equal disks", "100 MB/s", "1 ms more", "5 % slower"] {
        let (low, high) = find(words).interval.unwrap_or_else(|| panic!("{words}: no interval"));
        assert!(low <= high && low > 0.0, "{words}: {low} to {high}");
    }
    assert!(find("100 MB/s").measured < 1.1e8, "{:?}", find("100 MB/s"));
    assert!(find("1 ms more").measured > 0.5e6, "{:?}", find("1 ms more"));
    assert!(find("a server that flushes").measured >= 0.9 && find("a server that flushes").found);
    assert!(find("ignores flushes").measured < 0.1 && find("ignores flushes").found);
    let text = selftest::text(&outcome);
    assert!(
        text.contains("told apart wrongly in") && text.contains("| 1.2 | 0.1 | none |"),
        "{text}"
    );
}

#[test]
fn a_job_file_of_the_users_runs_on_every_wire() {
    let bench = Bench::new();
    let job = bench.dir.path().join("run-mine.fio");
    std::fs::write(&job, "[mine]\nrw=randrw\nbs=4k\nnumber_ios=50\ndirect=1\nioengine=psync\n")
        .unwrap();
    let mut plan = bench.plan("--stages host --rounds 1 --backends native,qemu-nbd");
    plan.workloads = vec![ringtap_lab::workload::job_file(&job).unwrap().name().into()];
    run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    let samples = samples(&bench.out());
    for arm in ["native", "native#2", "qemu-nbd"] {
        let sample = samples.iter().find(|s| s.arm == arm).unwrap_or_else(|| panic!("{arm}"));
        assert!(sample.error.is_none(), "{sample:?}");
        assert!(sample.metrics[&Metric::Iops].value > 0.0);
    }
    let analysis = report::load(&bench.out()).unwrap();
    assert!(analysis.rows.iter().any(|row| row.workload.starts_with("job:")));
}

#[test]
fn what_a_killed_lab_left_the_next_one_removes() {
    let bench = Bench::new();
    let dir = bench.dir.path();
    let words = |out: &str, rounds: &str| {
        let mut command = std::process::Command::new(lab());
        command.args(["compare", "--stages", "host", "--backends", "native,loop,qemu-nbd"]);
        command.args(["--workloads", "randread-4k-qd1", "--size", "32M", "--ramp", "0"]);
        command.args(["--seconds", "0.3", "--rounds", rounds, "--dir"]).arg(dir);
        command.arg("--out").arg(dir.join(out));
        command.env("TMPDIR", dir).stdout(std::process::Stdio::null());
        command
    };
    let mut killed = words("run-killed", "50").spawn().unwrap();
    let lines = || {
        let file = dir.join("run-killed/samples.jsonl");
        std::fs::read_to_string(file).unwrap_or_default().lines().count()
    };
    let until = Instant::now() + Duration::from_secs(60);
    while lines() < 4 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(lines() >= 4, "samples of the killed run are kept");
    let scratch = || {
        let entries = std::fs::read_dir(dir).unwrap().flatten();
        entries.filter(|e| e.file_name().to_string_lossy().starts_with("ringtap-lab-")).count()
    };
    assert!(scratch() > 0, "a killed lab cannot clean up");
    // Its servers get a signal when it dies; a moment later nothing holds the disks.
    std::thread::sleep(Duration::from_millis(500));
    run::scratch::sweep(dir, Duration::ZERO);
    assert_eq!(scratch(), 0);
    bench.assert_clean();
    let analysis = report::load(&dir.join("run-killed")).unwrap();
    assert_eq!(analysis.run.state, State::Running);
    assert!(report::words::state_in_words(&analysis).contains("was killed"));
}
