//! Block devices of one host over one file, all of them inside one guest: this host's kernel need not
//! have ublk.
//!
//! Nobody caches (O_DIRECT throughout), so the devices are there together and only loads take turns.

use crate::arms::{Arm, Kind};
use crate::client::{Measured, fio_in_guest, read_fio};
use crate::experiment::{Failure, Results, Sample, order};
use crate::interrupt;
use crate::lines::Line;
use anyhow::{Context, Result, bail};
use ringtap_guest::{Appliance, Cache, Drive, Guest, Kernel, Machine, Qemu};
use ringtap_lab::process::launch::Launch;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the arm that the others are compared with.
pub const RINGTAP: &str = "ringtap";

/// The longest that one script in the guest may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// Shell functions: `start NAME COMMAND…` leaves a server behind, `until_there NAME TEST…` waits until
/// the test holds or the server has ended, `used NAME` prints nanoseconds of CPU it has used.
const LIBRARY: &str = r#"
start() {
    name=$1; shift
    setsid "$@" >/tmp/$name.log 2>&1 </dev/null &
    echo $! >/tmp/$name.pid
}
until_there() {
    name=$1; shift
    until "$@"; do
        kill -0 $(cat /tmp/$name.pid) 2>/dev/null || { cat /tmp/$name.log >&2; exit 1; }
        sleep 0.1
    done
}
used() {
    cat /proc/$(cat /tmp/$1.pid)/task/*/schedstat | awk '{ all += $1 } END { printf "%.0f\n", all }'
}
set -e
"#;

/// What is to be measured.
pub struct Plan<'a> {
    /// Version of the guest's kernel, at least.
    pub kernel: &'a [u64],
    /// Bytes of each file.
    pub size: u64,
    /// Folder for the guest's disk.
    pub dir: &'a Path,
    /// The workloads.
    pub lines: &'a [Line],
    /// Rounds.
    pub rounds: usize,
    /// Seconds per measurement.
    pub seconds: f64,
}

/// The programs that are compared.
pub struct Peers<'a> {
    /// Ringtap's binary.
    pub ringtap: &'a Path,
    /// Another build of it, to set beside.
    pub other: Option<&'a Path>,
    /// rublk's binary.
    pub rublk: Option<&'a Path>,
}

/// One way to reach the file's bytes.
struct Way {
    arm: Arm,
    /// What fio is pointed at.
    device: String,
    /// The server, as `start` was told its name.
    server: Option<String>,
}

impl Way {
    fn new(name: &str, kind: Kind, device: &str, server: Option<&str>) -> Way {
        let arm = Arm {
            name: name.into(),
            kind,
            rival: RINGTAP,
            launch: None,
            socket: PathBuf::new(),
            image: None,
            queues: 1,
            ramp: None,
            prepare: Vec::new(),
            missing: None,
        };
        Way { arm, device: device.into(), server: server.map(str::to_owned) }
    }
}

/// A guest with every device of [`Plan`] in it.
pub struct Host {
    guest: Guest,
    ways: Vec<Way>,
}

impl Host {
    /// Boots the guest and makes the devices. What cannot be made is an arm with its reason; only
    /// Ringtap must.
    pub fn boot(plan: &Plan, peers: &Peers) -> Result<Host> {
        let programs =
            [("ringtap", Some(peers.ringtap)), ("other", peers.other), ("rublk", peers.rublk)];
        let programs = programs.into_iter().filter_map(|(name, path)| Some((name, path?)));
        // One file for all but those that would be kept off it by its lock.
        let mut host = Host::with(plan, programs, &["shared", "user", "other"])?;
        host.make_devices(peers)?;
        Ok(host)
    }

    /// Boots the guest with these builds of Ringtap alone, each of which serves a file of its own.
    pub fn of_builds<'a>(
        plan: &Plan,
        builds: impl IntoIterator<Item = (String, &'a Path)>,
    ) -> Result<Host> {
        let builds: Vec<(String, &Path)> = builds.into_iter().collect();
        let files: Vec<String> = builds.iter().map(|(name, _)| name.replace(' ', "-")).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let programs = files.iter().copied().zip(builds.iter().map(|(_, path)| *path));
        let mut host = Host::with(plan, programs, &files)?;
        for (number, ((name, _), file)) in builds.iter().zip(&files).enumerate() {
            let way = Way::new(name, Kind::Ringtap, &format!("/dev/ublkb{number}"), Some(file));
            host.add(
                way,
                &format!(
                    "start {file} /tmp/{file} serve /mnt/files/{file} -f raw --ublk={number}
                     until_there {file} grep -q ready /tmp/{file}.log"
                ),
            );
        }
        Ok(host)
    }

    /// A guest with these programs, and files of the plan's size.
    fn with<'a>(
        plan: &Plan,
        programs: impl IntoIterator<Item = (&'a str, &'a Path)>,
        files: &[&str],
    ) -> Result<Host> {
        let cache = Appliance::default_cache();
        let appliance = Appliance::builder(Machine::Pc)
            .kernel(Kernel::pc_since(&cache, plan.kernel)?)
            .programs(["fio", "mke2fs", "dd", "losetup", "nbd-client", "setpriv"])
            .modules(["ublk_drv", "nbd"])
            .build(&cache)?;
        let (disk, share) = (plan.dir.join("disk"), plan.dir.join("share"));
        File::create(&disk)?.set_len(files.len() as u64 * plan.size + (128 << 20))?;
        fs::create_dir(&share)?;
        for (name, path) in programs {
            // Without what only a debugger wants: it comes slowly into a guest.
            let words = ["-o".into(), share.join(name).into_os_string(), path.into()];
            Launch::new("strip", words).output(PATIENCE, interrupt::stop())?;
        }
        let guest = Qemu::new(&appliance)
            .memory(1536 << 20)
            .virtio_blk(Drive::raw(&disk).cache(Cache::Unsafe))
            .share(&share, "/mnt/share")
            .boot()?;
        let host = Host { guest, ways: Vec::new() };
        let size = plan.size >> 20;
        host.told(&format!(
            "cp /mnt/share/* /tmp
             mkdir -p /mnt/files
             mke2fs -q -t ext4 /dev/vda
             mount -t ext4 /dev/vda /mnt/files
             for file in {}; do
                 dd if=/dev/urandom of=/mnt/files/$file bs=1M count={size} status=none
             done
             sync",
            files.join(" ")
        ))?;
        Ok(host)
    }

    fn make_devices(&mut self, peers: &Peers) -> Result<()> {
        let ringtap = Way::new(RINGTAP, Kind::Ringtap, "/dev/ublkb0", Some("ringtap"));
        self.told(
            "start ringtap /tmp/ringtap serve /mnt/files/shared -f raw --name disk --ublk=0 \
                 --nbd unix:/tmp/nbd
             until_there ringtap grep -q ready /tmp/ringtap.log",
        )?;
        self.ways.push(ringtap);
        self.add(
            Way::new("loop direct-io", Kind::Direct, "/dev/loop0", None),
            "losetup --direct-io=on /dev/loop0 /mnt/files/shared
             [ $(cat /sys/block/loop0/loop/dio) = 1 ]",
        );
        let rublk = |name, device, server| Way::new(name, Kind::Direct, device, Some(server));
        let (copying, zero_copy) = (
            rublk("rublk", "/dev/ublkb1", "rublk"),
            rublk("rublk zero copy", "/dev/ublkb2", "rublk2"),
        );
        match peers.rublk {
            Some(_) => {
                self.add(
                    copying,
                    "start rublk /tmp/rublk add loop -n 1 -q 2 --foreground -f /mnt/files/shared
                     until_there rublk [ -b /dev/ublkb1 ]",
                );
                self.add(
                    zero_copy,
                    "uname -r | awk -F '[.-]' '{ exit $1 * 1000 + $2 < 6016 }' || {
                         echo 'the kernel has no zero copy (Linux 6.16)' >&2; exit 1; }
                     start rublk2 /tmp/rublk add loop -n 2 -q 2 -z --foreground -f /mnt/files/shared
                     until_there rublk2 [ -b /dev/ublkb2 ]",
                );
            }
            None => {
                let why = "not found: apt-get install libclang-dev; cargo install rublk; --rublk";
                self.leave_out(copying, why);
                self.leave_out(zero_copy, why);
            }
        }
        self.add(
            Way::new("kernel NBD", Kind::Direct, "/dev/nbd0", Some("ringtap")),
            "nbd-client -unix /tmp/nbd /dev/nbd0 -N disk -C 2 >&2
             [ $(cat /sys/block/nbd0/size) != 0 ]",
        );
        self.add(
            Way::new("ringtap as a user", Kind::Other, "/dev/ublkb3", Some("user")),
            "chmod 666 /dev/ublk-control
             chown 1000 /mnt/files/user
             start udev sh -c 'until [ -e /dev/ublkc3 ]; do sleep 0.1; done; chown 1000 /dev/ublkc3'
             start user /usr/bin/setpriv --reuid=1000 --regid=1000 --clear-groups \
                 /tmp/ringtap serve /mnt/files/user -f raw --ublk=3
             until_there user grep -q ready /tmp/user.log",
        );
        if peers.other.is_some() {
            self.add(
                Way::new("other build", Kind::Other, "/dev/ublkb4", Some("other")),
                "start other /tmp/other serve /mnt/files/other -f raw --ublk=4
                 until_there other grep -q ready /tmp/other.log",
            );
        }
        self.ways.push(Way::new("the file itself", Kind::Native, "/mnt/files/shared", None));
        Ok(())
    }

    fn add(&mut self, way: Way, script: &str) {
        match self.told(script) {
            Ok(_) => self.ways.push(way),
            Err(error) => self.leave_out(way, &format!("{error:#}")),
        }
    }

    fn leave_out(&mut self, mut way: Way, why: &str) {
        way.arm.missing = why.lines().next().map(str::to_owned);
        self.ways.push(way);
    }

    /// What a script says that must succeed.
    fn told(&self, script: &str) -> Result<String> {
        interrupt::check()?;
        let output = self.guest.exec(&format!("{LIBRARY}{script}\n"), PATIENCE)?;
        if output.status != 0 {
            let said = [output.stderr.trim(), output.stdout.trim()].join(" ");
            bail!("status {}: {}", output.status, said.trim());
        }
        Ok(output.stdout)
    }

    /// The ways, for the report.
    pub fn arms(&self) -> Vec<Arm> {
        self.ways.iter().map(|way| way.arm.clone()).collect()
    }

    /// What the guest is and how Ringtap's devices move bytes.
    pub fn conditions(&self) -> Result<Vec<String>> {
        let said = self.told(
            "echo Guest: Linux $(uname -r), $(nproc) processors, clock \
                 $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)
             /tmp/ringtap list",
        )?;
        let mut conditions: Vec<String> = said.lines().map(str::to_owned).collect();
        conditions[0] += &format!(", {}", self.guest.accelerator());
        Ok(conditions)
    }

    /// Measures everything, in rounds whose order rotates.
    pub fn measure(&self, plan: &Plan, tick: impl Fn(usize, &str, &str)) -> Results {
        let mut results = Results::default();
        let each = self.ways.iter().flat_map(|way| plan.lines.iter().map(move |line| (way, line)));
        for (way, line) in each {
            if let Some(reason) = &way.arm.missing {
                let (line, arm) = (line.name.clone(), way.arm.name.clone());
                results.failures.push(Failure { line, arm, reason: reason.clone() });
            }
        }
        for round in 0..plan.rounds {
            for line in plan.lines {
                for way in order(self.ways.len(), round).map(|i| &self.ways[i]) {
                    let (line_name, arm) = (line.name.clone(), way.arm.name.clone());
                    let failed = |f: &Failure| f.line == line_name && f.arm == arm;
                    if results.failures.iter().any(failed) {
                        continue;
                    }
                    tick(round, &line_name, &arm);
                    match self.load(way, line, plan.seconds) {
                        Ok((measured, cpu)) => results.samples.push(Sample {
                            round,
                            line: line_name,
                            arm,
                            measured,
                            server_cpu_per_request: cpu,
                            server_memory: None,
                        }),
                        Err(_) if interrupt::check().is_err() => {
                            results.interrupted = true;
                            return results;
                        }
                        Err(error) => results.failures.push(Failure {
                            line: line_name,
                            arm,
                            reason: format!("{error:#}"),
                        }),
                    }
                }
            }
        }
        results
    }

    /// One load; what fio saw, and CPU seconds of the server per request.
    fn load(&self, way: &Way, line: &Line, seconds: f64) -> Result<(Measured, Option<f64>)> {
        let fio = fio_in_guest(&way.device, line, seconds);
        let used = way.server.as_ref().map_or("echo".into(), |server| format!("used {server}"));
        let said = self.told(&format!("{used}\n{fio}\n{used}\ncat /tmp/fio"))?;
        let measured = read_fio(&said, line.writes())?;
        let mut counts = said.lines().map_while(|line| line.parse::<f64>().ok());
        let cpu = match way.server {
            Some(_) => {
                let (before, after) = (counts.next(), counts.next());
                let nanos = after.zip(before).map(|(after, before)| after - before);
                let nanos = nanos.context("the guest does not tell the server's CPU time")?;
                Some(nanos.max(0.0) / 1e9 / measured.requests.max(1) as f64)
            }
            None => None,
        };
        Ok((measured, cpu))
    }
}
