//! The plan of a run: from a TOML file, from flags, and checked before anything starts.

mod file;
mod names;
mod own;
mod published;
pub mod question;
pub mod quick;
mod servers;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::own::Own;
use crate::backend::{self, Entry};
use crate::cli::CompareArgs;
use crate::error::{Error, Result};
use crate::sample::Stage;
use crate::workload::{self, Workload};
pub use file::PlanFile;
use file::{placed, read};
use names::{NEAR, nearness, unknown, unlisted};
use question::Question;

/// Fewest bytes of a disk.
const SMALLEST: u64 = 32 << 20;
/// What every plan checks before it measures.
const DURABILITY: &str = "durability";
/// Most bytes of a disk; what a stage needs in all is a few times as much.
const LARGEST: u64 = 64 << 40;

/// What is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Stages, in the order in which they take turns.
    pub stages: Vec<Stage>,
    /// Backends by stage, in the order of the report; the first of a stage is its reference.
    pub backends: Vec<(Stage, String)>,
    /// Workloads, in the order in which they run on an arm.
    pub workloads: Vec<String>,
    /// Rounds: every arm once in each.
    pub rounds: u32,
    /// Bytes of each disk.
    pub size: u64,
    /// Seconds that fio measures.
    pub seconds: f64,
    /// Seconds that fio runs before it measures.
    pub ramp: f64,
    /// Seed of order, blocks and bootstrap.
    pub seed: u64,
    /// Where the disks are made.
    pub dir: PathBuf,
    /// Seconds that all may be expected to take: what takes longest is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<f64>,
    /// Seconds that a guest may take to boot, where that is not the usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_limit: Option<f64>,
    /// Bytes of a guest's memory, where that is not the usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Workloads that run on some backends only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub only: BTreeMap<String, Vec<String>>,
    /// Loads of stages that an earlier run of this plan has measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<(Stage, String)>,
    /// Ways of the user's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<Own>,
    /// What the run is made to answer; everything else that it shows is exploratory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub questions: Vec<Question>,
    /// Whether loads share the time of a round by their own noise, and not evenly.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sized_by_noise: bool,
    /// Two arms nearer than this share are called no different.
    #[serde(default = "full_margin")]
    pub margin: f64,
}

/// The margin of a full run, as a share.
pub const FULL_MARGIN: f64 = 0.05;
/// The margin of a quick run, as a share.
pub const QUICK_MARGIN: f64 = 0.08;

fn full_margin() -> f64 {
    FULL_MARGIN
}

impl Plan {
    /// The plan that these flags (and the file they name) ask for. What is wrong in the file is named with its line.
    pub fn from_args(args: &CompareArgs) -> Result<Plan> {
        let path = args.plan.as_deref();
        let quick = args.quick.then_some("quick").filter(|_| path.is_none());
        let bare = args.names_nothing().then_some("quick");
        let known = args.known.as_deref().or(quick).or(bare);
        let (text, file) = match (path, known) {
            (Some(_), Some(name)) => {
                return Err(Error::Plan(format!(
                    "--plan and the plan {name:?} are two plans: give one"
                )));
            }
            (Some(path), None) => read(path)?,
            (None, Some("quick")) if args.names_nothing() => (String::new(), quick::plan()),
            (None, Some("quick") | None) => (String::new(), PlanFile::default()),
            (None, Some("published")) => (String::new(), published::plan()),
            (None, Some(name)) if servers::find(name).is_some() => {
                (String::new(), servers::find(name).unwrap_or_default())
            }
            (None, Some(name)) => {
                let servers = servers::PLANS.iter().map(|(name, _)| *name);
                let known: Vec<&str> = ["quick", "published"].into_iter().chain(servers).collect();
                let text = unlisted("plan", name, &known);
                return Err(Error::Plan(format!("{text}; two images are compared by naming both")));
            }
        };
        Plan::of(args, known, file).map_err(|error| match (error, path) {
            (Error::Plan(what), Some(path)) => Error::Plan(placed(path, &text, &what)),
            (error, _) => error,
        })
    }

    fn of(args: &CompareArgs, known: Option<&str>, file: PlanFile) -> Result<Plan> {
        let quick = args.quick || known == Some("quick");
        let mut stages = stages(args.stages.as_ref().or(file.stages.as_ref()))?;
        let named = args.backends.as_ref().or(file.backends.as_ref());
        let backends = backends(&stages, named, quick)?;
        // What one source names must fit together; where a flag narrows a file, the rest goes.
        if args.backends.is_some() || args.stages.is_none() {
            check_homes(named, &backends, &stages)?;
        }
        if args.stages.is_some() || args.backends.is_none() && file.stages.is_some() {
            check_stages(&stages, &backends)?;
        } else if !backends.is_empty() {
            stages.retain(|stage| backends.iter().any(|(of, _)| of == stage));
        }
        let mut workloads = {
            let named = args.workloads.as_ref().or(file.workloads.as_ref());
            let jobs = !args.fio_job.is_empty() || file.fio_jobs.is_some();
            // A job file alone is what is asked for.
            if named.is_none() && jobs { Vec::new() } else { workloads(&stages, named, quick)? }
        };
        for path in args.fio_job.iter().chain(file.fio_jobs.iter().flatten()) {
            let path = std::path::absolute(path).map_err(Error::file("find", path))?;
            let name = workload::job_file(&path)?.name();
            // Named twice it is still one workload.
            if !workloads.iter().any(|known| known == name) {
                workloads.push(name.to_owned());
            }
        }
        // First of all: who does not flush is named best nowhere.
        if !workloads.iter().any(|known| known == DURABILITY) {
            workloads.push(DURABILITY.into());
        }
        let size = match args.size.as_ref().or(file.size.as_ref()) {
            Some(text) => parse_size(text)?,
            None if quick => 128 << 20,
            None => 1 << 30,
        };
        let usual = if quick { (12, 0.25, 0.0) } else { (12, 3.0, 0.5) };
        let seed = args
            .seed
            .or(file.seed)
            .unwrap_or_else(|| jiff::Timestamp::now().as_millisecond().unsigned_abs());
        // Flags win over the file: who names backends or workloads wants all of them together.
        let named = args.backends.is_some() || args.workloads.is_some();
        let only = file.only.filter(|_| !named).unwrap_or_default();
        check_only(&only)?;
        let mut plan = Plan {
            stages,
            backends,
            workloads,
            rounds: args.rounds.or(file.rounds).unwrap_or(usual.0),
            size,
            seconds: args.seconds.or(file.seconds).unwrap_or(usual.1),
            ramp: args.ramp.or(file.ramp).unwrap_or(usual.2),
            seed,
            dir: args.dir.clone().or(file.dir).unwrap_or_else(usual_dir),
            within: args.within,
            boot_limit: args.boot_limit.or(file.boot_limit),
            memory: args
                .memory
                .as_ref()
                .or(file.memory.as_ref())
                .map(|m| parse_size(m))
                .transpose()?,
            only,
            measured: Vec::new(),
            own: Vec::new(),
            questions: Vec::new(),
            // Who names a time means it.
            sized_by_noise: known == Some("quick")
                && args.names_nothing()
                && args.seconds.is_none(),
            margin: if quick { QUICK_MARGIN } else { FULL_MARGIN },
        };
        plan.add_own(args)?;
        plan.questions = match known {
            Some("quick") if args.names_nothing() => quick::question(&plan),
            Some("published") => question::published(&plan),
            _ => question::usual(&plan),
        };
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<()> {
        let refuse = |text: String| Err(Error::Plan(text));
        if self.rounds == 0 || self.rounds > 1000 {
            return refuse(format!(
                "{} rounds: give 1 to 1000 (12 and more for answers)",
                self.rounds
            ));
        }
        if !(0.05..=3600.0).contains(&self.seconds) {
            return refuse(format!("{} seconds a run: give 0.05 to 3600", self.seconds));
        }
        if !(0.0..=3600.0).contains(&self.ramp) {
            return refuse(format!("{} seconds of ramp: give 0 to 3600", self.ramp));
        }
        if let Some(limit) = self.boot_limit.filter(|limit| !(1.0..=3600.0).contains(limit)) {
            return refuse(format!("a boot_limit of {limit} seconds: give 1 to 3600"));
        }
        if let Some(memory) = self.memory.filter(|memory| !(64 << 20..=64 << 30).contains(memory)) {
            return refuse(format!("a guest of {} MiB: give 64M to 64G", memory >> 20));
        }
        if self.size < SMALLEST || self.size % (1 << 20) != 0 {
            return refuse(format!(
                "a disk of {} bytes: give whole MiB, at least {} MiB",
                self.size,
                SMALLEST >> 20
            ));
        }
        if self.size > LARGEST {
            return refuse(format!(
                "a disk of {} bytes: give at most {} TiB",
                self.size,
                LARGEST >> 40
            ));
        }
        if !self.dir.is_dir() {
            return refuse(format!(
                "--dir {}: no such folder; make it, or name another",
                self.dir.display()
            ));
        }
        let runs = |stage: &Stage| {
            // It comes with every plan, and may be all that is asked.
            let alone = self.workloads.len() == 1;
            let measures = |w: &&dyn Workload| (alone || !w.is_check()) && w.runs_on(*stage);
            self.workloads().iter().any(measures)
        };
        if let Some(idle) = self.stages.iter().find(|stage| !runs(stage)) {
            let (kind, all) = if idle.is_contention() {
                ("two loads at once", "contention")
            } else {
                ("one load", "fio, dd, bonnie")
            };
            return refuse(format!(
                "stage {idle} runs {kind}, and no such workload is in the plan: add --workloads {all}"
            ));
        }
        question::check(&self.questions).or_else(refuse)?;
        if self.backends.is_empty() {
            let stages: Vec<&str> = self.stages.iter().map(|stage| stage.name()).collect();
            return refuse(format!("none of the backends runs on stage {}", stages.join(" or ")));
        }
        Ok(())
    }

    /// The stage's backends.
    pub fn entries(&self, stage: Stage) -> Vec<&'static Entry> {
        self.backends
            .iter()
            .filter(|(of, _)| *of == stage)
            .filter_map(|(_, name)| backend::find(stage, name))
            .collect()
    }

    /// The workloads.
    pub fn workloads(&self) -> Vec<&'static dyn Workload> {
        self.workloads.iter().filter_map(|name| workload::find(name)).collect()
    }

    /// Whether the plan runs a workload on a backend of a stage.
    pub fn runs(&self, stage: Stage, workload: &str, backend: &str) -> bool {
        let is = |name: &str| match name.split_once('/') {
            Some((of, name)) => of == stage.name() && name == backend,
            None => name == backend,
        };
        self.only.get(workload).is_none_or(|some| some.iter().any(|name| is(name)))
    }

    /// What the workloads of one round share.
    pub fn settings(&self, round: u32) -> workload::Settings {
        workload::Settings {
            size: self.size,
            run: Duration::from_secs_f64(self.seconds),
            ramp: Duration::from_secs_f64(self.ramp),
            seed: self.seed.wrapping_add(u64::from(round)) & 0x7fff_ffff,
            capacity: None,
        }
    }
}

/// Names in `only` are those of workloads and backends.
fn check_only(only: &BTreeMap<String, Vec<String>>) -> Result<()> {
    for (workload, backends) in only {
        if workload::find(workload).is_none() {
            let known: Vec<&str> = workload::all().map(|w| w.name()).collect();
            return Err(unknown("workload", workload, &known));
        }
        // A name may be that of one stage: two/loop.
        for name in backends {
            let (stages, name) = match name.split_once('/') {
                Some((stage, name)) => (self::stages(Some(&vec![stage.to_owned()]))?, name),
                None => (Stage::ALL.to_vec(), name.as_str()),
            };
            check_backends(&[name.to_owned()], &stages)?;
        }
    }
    Ok(())
}

/// TMPDIR when it is set, else /var/tmp: /tmp may be memory.
fn usual_dir() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// Bytes of "1G", "256M" (powers of 1024).
pub fn parse_size(text: &str) -> Result<u64> {
    ringtap_load::parse_size(text).map_err(Error::Plan)
}

fn stages(names: Option<&Vec<String>>) -> Result<Vec<Stage>> {
    let Some(names) = names else { return Ok(Stage::USUAL.to_vec()) };
    let known: Vec<&str> = Stage::ALL.iter().map(|stage| stage.name()).collect();
    let mut stages = Vec::new();
    for name in names {
        let stage = Stage::ALL.into_iter().find(|stage| stage.name() == name);
        stages.push(stage.ok_or_else(|| unknown("stage", name, &known))?);
    }
    Ok(in_order(Stage::ALL.iter().copied(), &stages))
}

fn backends(
    stages: &[Stage],
    names: Option<&Vec<String>>,
    quick: bool,
) -> Result<Vec<(Stage, String)>> {
    let of = |entry: &Entry| (entry.stage, entry.name.to_owned());
    let entries = backend::all().filter(|entry| stages.contains(&entry.stage));
    let Some(names) = names else {
        // Volumes take longer to make than a quick comparison has.
        let left_out = |entry: &&Entry| quick && entry.backend.inner().is_volume();
        return Ok(entries.filter(|e| e.usual && !left_out(e)).map(of).collect());
    };
    check_backends(names, stages)?;
    Ok(entries.filter(|entry| names.iter().any(|name| name == entry.name)).map(of).collect())
}

/// Each named backend runs on one of the stages.
fn check_homes(
    named: Option<&Vec<String>>,
    backends: &[(Stage, String)],
    stages: &[Stage],
) -> Result<()> {
    let lost = |name: &&String| !backends.iter().any(|(_, known)| known == *name);
    let Some(name) = named.into_iter().flatten().find(lost) else { return Ok(()) };
    let on: Vec<&str> =
        backend::all().filter(|entry| entry.name == name).map(|entry| entry.stage.name()).collect();
    let stages: Vec<&str> = stages.iter().map(|stage| stage.name()).collect();
    Err(Error::Plan(format!(
        "backend {name:?} runs on stage {}, and the plan has {}: add {} to --stages, or leave the backend out",
        on.join(", "),
        stages.join(", "),
        on.first().unwrap_or(&"")
    )))
}

/// Each stage has one of the backends.
fn check_stages(stages: &[Stage], backends: &[(Stage, String)]) -> Result<()> {
    let idle = |stage: &&Stage| !backends.iter().any(|(of, _)| of == *stage);
    let Some(stage) = stages.iter().find(idle) else { return Ok(()) };
    let known: Vec<&str> =
        backend::all().filter(|entry| entry.stage == *stage).map(|entry| entry.name).collect();
    Err(Error::Plan(format!(
        "stage {:?} has none of these backends; it has {}",
        stage.name(),
        known.join(", ")
    )))
}

fn check_backends(names: &[String], stages: &[Stage]) -> Result<()> {
    let of = |stages: &[Stage]| {
        let on = backend::all().filter(|entry| stages.contains(&entry.stage));
        on.map(|entry| entry.name).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let all = of(&Stage::ALL);
    let Some(name) = names.iter().find(|name| !all.contains(&name.as_str())) else {
        return Ok(());
    };
    // A name that would not run on the plan's stages helps only where no other is near.
    let here = of(stages);
    let near = here.iter().any(|known| nearness(name, known) > NEAR);
    Err(unknown("backend", name, if near { &here } else { &all }))
}

fn workloads(stages: &[Stage], names: Option<&Vec<String>>, quick: bool) -> Result<Vec<String>> {
    let Some(names) = names else {
        return Ok(workload::all()
            .filter(|workload| workload.listed().quick || !quick)
            .filter(|workload| stages.iter().any(|stage| workload.runs_on(*stage)))
            .map(|workload| workload.name().to_owned())
            .collect());
    };
    let groups = workload::groups();
    let mut wanted = Vec::new();
    for name in names {
        if let Some((_, members)) = groups.iter().find(|(group, _)| group == name) {
            wanted.extend_from_slice(members);
        } else if let Some(workload) = workload::all().find(|w| w.name() == *name) {
            wanted.push(workload.name());
        } else {
            let known: Vec<&str> = groups
                .iter()
                .map(|(group, _)| *group)
                .chain(workload::all().map(|workload| workload.name()))
                .collect();
            return Err(unknown("workload", name, &known));
        }
    }
    Ok(in_order(workload::all().map(|workload| workload.name()), &wanted)
        .into_iter()
        .map(str::to_owned)
        .collect())
}

/// Those of `all` that are wanted, each once.
fn in_order<T: PartialEq>(all: impl Iterator<Item = T>, wanted: &[T]) -> Vec<T> {
    all.filter(|one| wanted.contains(one)).collect()
}

#[cfg(test)]
mod tests;
