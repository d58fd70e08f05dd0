//! Workloads inside a guest: scripts for its shell, and what they print.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringtap_guest::{Guest, standby};

use crate::error::{Error, Result};
use crate::process;
use crate::run::mark::Mark;
use crate::run::meter;
use crate::run::scratch::settle;
use crate::sample::Layer;
use crate::stop::Stop;
use crate::workload::job::{Job, Target};
use crate::workload::machine::{Files, Logged, Machine, Tool};
use crate::workload::{Measured, Settings, Workload, fio, rated};

/// Where a file system is mounted in the guest.
pub const PLACE: &str = "/mnt/disk";

/// Tries to read the guest's clock.
const CLOCK_TRIES: u32 = 3;

/// Runs scripts in the guest and looks out for the wish to end.
pub struct Shell<'a> {
    /// The guest.
    pub machine: &'a Guest,
    /// The wish.
    pub stop: &'a Stop,
    /// Lines before each script.
    first: &'a str,
}

impl<'a> Shell<'a> {
    /// A shell in that guest.
    pub fn new(machine: &'a Guest, stop: &'a Stop) -> Shell<'a> {
        Shell { machine, stop, first: "" }
    }

    /// The same, with lines before each script.
    pub fn after(self, first: &'a str) -> Shell<'a> {
        Shell { first, ..self }
    }
}

impl Shell<'_> {
    /// Runs a script that must succeed.
    pub fn run(&self, script: &str, limit: Duration) -> Result<process::Output> {
        self.timed(script, limit).map(|(output, _)| output)
    }

    /// The same, with the time that it took by this machine's clock.
    pub fn timed(&self, script: &str, limit: Duration) -> Result<(process::Output, Duration)> {
        let (output, _) = self.finished(script, limit)?;
        let elapsed = output.elapsed;
        Ok((process::Output { stdout: output.stdout, stderr: output.stderr }, elapsed))
    }

    /// Runs a script that must succeed, and says when it was seen to have ended.
    fn finished(
        &self,
        script: &str,
        limit: Duration,
    ) -> Result<(ringtap_guest::Output, SystemTime)> {
        let job = match self.first {
            "" => self.machine.start(script)?,
            first => self.machine.start(&format!("{first}\n{script}"))?,
        };
        let until = Instant::now() + limit;
        while !job.is_done() && Instant::now() < until {
            self.stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        let end = SystemTime::now();
        // What a job printed comes a moment after its end.
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(5);
        let output = job.wait(left).and_then(ringtap_guest::Output::success)?;
        Ok((output, end))
    }

    /// By how many milliseconds the guest's clock is ahead of this machine's: of a few tries that which took least.
    pub fn clock_ahead(&self) -> Result<f64> {
        let mut best: Option<(Duration, f64)> = None;
        for _ in 0..CLOCK_TRIES {
            let (output, end) = self.finished("exec date +%s%N", Duration::from_secs(60))?;
            let (elapsed, end) =
                (output.elapsed, end.duration_since(UNIX_EPOCH).unwrap_or_default());
            let there: f64 = output.stdout.trim().parse().map_err(|_| Error::Output {
                what: "the guest's clock",
                found: format!("{:?}", output.stdout),
            })?;
            let here = end.as_secs_f64() * 1e3 - elapsed.as_secs_f64() * 500.0;
            if best.is_none_or(|(least, _)| elapsed < least) {
                best = Some((elapsed, there / 1e6 - here));
            }
        }
        Ok(best.map_or(0.0, |(_, ahead)| ahead))
    }
}

/// Where a workload runs.
pub struct Place<'a> {
    /// The guest.
    pub shell: &'a Shell<'a>,
    /// The block device.
    pub device: &'a str,
    /// The block device below it, whose traffic is counted.
    pub base: &'a str,
    /// The disk's file on this machine.
    pub disk: &'a Path,
    /// The binary that has the lab's tools.
    pub tool: &'a Path,
    /// Bytes of the guest's memory.
    pub memory: u64,
    /// From where costs and bytes count.
    pub mark: &'a Mark<'a>,
}

/// Runs one workload on a block device of the guest.
pub fn measure(
    workload: &dyn Workload,
    settings: &Settings,
    place: &Place<'_>,
) -> Result<Measured> {
    let inside = Inside { place, settings, passed: RefCell::default() };
    let measured = workload.run(&inside)?;
    Ok(Measured { disk: inside.passed.take(), ..measured })
}

/// What passed the disk since its statistics said `before`.
fn passed(place: &Place<'_>, before: Option<String>) -> Option<Layer> {
    before.zip(statistics(place)).and_then(|(then, now)| meter::between(&then, &now))
}

fn statistics(place: &Place<'_>) -> Option<String> {
    let name = place.base.rsplit('/').next()?;
    let script = format!("cat /sys/block/{name}/stat");
    place.shell.run(&script, Duration::from_secs(20)).ok().map(|output| output.stdout)
}

/// Before the lines that tell the statistics of the disk.
const COUNTS: &str = "ringtap counts ";

/// Runs a script, and counts in the same breath what passes the disk meanwhile: each script of its own costs the guest
/// some ten processes.
fn counted(
    place: &Place<'_>,
    script: &str,
    limit: Duration,
) -> Result<(process::Output, Option<Layer>)> {
    let name = place.base.rsplit('/').next().unwrap_or_default();
    let count = format!("read -r counts </sys/block/{name}/stat; echo \"{COUNTS}$counts\"");
    let output =
        place.shell.run(&format!("{count}\n{script}\nstatus=$?\n{count}\nexit $status"), limit)?;
    let (counts, rest): (Vec<&str>, Vec<&str>) =
        output.stdout.split_inclusive('\n').partition(|line| line.starts_with(COUNTS));
    let texts: Vec<&str> = counts.iter().filter_map(|line| line.strip_prefix(COUNTS)).collect();
    let disk = match texts[..] {
        [before, after] => meter::between(before, after),
        _ => None,
    };
    Ok((process::Output { stdout: rest.concat(), ..output }, disk))
}

/// A command line of fio's, run by the one that stands by.
pub fn fio_line(words: &[String]) -> String {
    standby::call(&line("fio", words))
}

/// A guest, as a workload sees it.
struct Inside<'a> {
    place: &'a Place<'a>,
    settings: &'a Settings,
    /// What passed the disk.
    passed: RefCell<Option<Layer>>,
}

impl Inside<'_> {
    /// How long most may take: a disk that is emulated on a translated processor, beside other work, may need a fifth of a
    /// second for a write.
    fn limit(&self) -> Duration {
        let patience = if self.place.shell.machine.accelerator() == "tcg" { 480 } else { 120 };
        Duration::from_secs(patience) + 3 * (self.settings.run + self.settings.ramp)
    }

    fn counted(&self, script: &str, limit: Duration) -> Result<process::Output> {
        let (output, disk) = counted(self.place, script, limit)?;
        self.passed.replace(disk);
        Ok(output)
    }
}

impl Machine for Inside<'_> {
    fn settings(&self) -> &Settings {
        self.settings
    }

    fn memory(&self) -> u64 {
        self.place.memory
    }

    fn disk(&self) -> &str {
        self.place.device
    }

    fn target(&self) -> Target {
        Target::Path(self.place.device.into())
    }

    fn job(&self, job: Job) -> Result<Measured> {
        let accelerator = self.place.shell.machine.accelerator();
        let mut words = fio::args(job, &self.target(), self.settings);
        // User-Mode Linux runs on this machine's processor as it is.
        words.extend(fio::clock().filter(|_| accelerator == "uml"));
        if accelerator == "tcg" {
            words.push(fio::TRANSLATED_CLOCK.into());
        }
        fio::parse(&self.counted(&fio_line(&words), self.limit())?.stdout, job, self.settings)
    }

    fn job_file(&self, text: &str) -> Result<String> {
        let script = format!(
            "cat >/tmp/job.fio <<'END OF JOB'\n{text}END OF JOB\nfio --output-format=json /tmp/job.fio"
        );
        Ok(self.counted(&script, Duration::from_secs(3600))?.stdout)
    }

    fn logged(&self, words: &dyn Fn(&str) -> Vec<String>) -> Result<Logged> {
        let log = rated::log_file("/tmp/rated");
        let script = format!(
            "{} >/tmp/rated.json && cat /tmp/rated.json && echo ==== && cat {log}; rm -f /tmp/rated*",
            fio_line(&words("/tmp/rated"))
        );
        let ahead_ms = self.place.shell.clock_ahead()?;
        let said = self.counted(&script, self.limit())?.stdout;
        let (json, log) = said.split_once("\n====\n").ok_or_else(|| Error::Output {
            what: "fio's log",
            found: "nothing behind its JSON".into(),
        })?;
        Ok(Logged { json: json.into(), log: log.into(), ahead_ms })
    }

    fn dd(&self, words: &[String], most: Option<u64>) -> Result<String> {
        let script = match most {
            None => line("LC_ALL=C dd", words),
            // dd tells how far it came when it is interrupted.
            Some(most) => {
                line(&format!("LC_ALL=C timeout -s INT {most} dd"), words) + " || [ $? = 124 ]"
            }
        };
        Ok(self.counted(&script, self.limit())?.stderr)
    }

    fn script(&self, script: &str) -> Result<String> {
        Ok(self.counted(script, self.limit())?.stdout)
    }

    /// What was kept back for the disk counts as well.
    fn files(&self, work: &mut dyn FnMut(&dyn Files) -> Result<Measured>) -> Result<Measured> {
        let place = self.place;
        place.shell.run(&format!("set -e\n{}sync", mount(place.device)), LONG)?;
        let mounted = Mounted { place, before: RefCell::new(statistics(place)) };
        place.mark.begin();
        let measured = work(&mounted);
        let unmounted = place.shell.run(&format!("umount {PLACE}"), LONG);
        self.passed.replace(passed(place, mounted.before.take()));
        // Where the work has failed it may be what is in the way of that.
        let measured = measured?;
        unmounted?;
        Ok(measured)
    }
}

/// How long what works on files may take.
const LONG: Duration = Duration::from_secs(900);

/// An ext4 on the disk, mounted at [`PLACE`].
struct Mounted<'a> {
    place: &'a Place<'a>,
    before: RefCell<Option<String>>,
}

impl Files for Mounted<'_> {
    fn dir(&self) -> &str {
        PLACE
    }

    fn run(&self, tool: Tool, words: &[String]) -> Result<String> {
        let program = match tool {
            Tool::Bonnie => "bonnie++".into(),
            Tool::Own => format!("'{}'", self.place.tool.display()),
        };
        Ok(self.place.shell.run(&line(&program, words), LONG)?.stdout)
    }

    fn settle(&self) -> Result<()> {
        self.place.shell.run("sync", LONG).map(drop)
    }

    /// Unmounted and mounted again, so that nothing of it is in the guest's cache; then this machine's cache as well.
    fn cold(&self) -> Result<()> {
        let device = self.place.device;
        let script = format!(
            "set -e\numount {PLACE}\nmount -t ext4 {device} {PLACE}\nsync\necho 3 >/proc/sys/vm/drop_caches\n"
        );
        self.place.shell.run(&script, LONG)?;
        settle(self.place.disk)?;
        self.before.replace(statistics(self.place));
        self.place.mark.begin();
        Ok(())
    }

    fn timed(&self, command: &str) -> Result<(String, f64)> {
        let (output, elapsed) = self.place.shell.timed(command, LONG)?;
        Ok((output.stderr, elapsed.as_secs_f64()))
    }
}

/// Shell lines that make an ext4 on a device and mount it at [`PLACE`].
pub fn mount(device: &str) -> String {
    format!(
        "mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 {device}\n\
         mkdir -p {PLACE}\nmount -t ext4 {device} {PLACE}\nchmod 777 {PLACE}\n"
    )
}

/// A command line for the guest's shell.
pub fn line(program: &str, words: &[String]) -> String {
    let quoted = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    std::iter::once(program.to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}
