//! Two loads at once on this machine: a backend is started twice, on two disks of the same device, and one fio drives
//! both. fio lets its jobs go together, and both last equally long: all of their time is common.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::backend::{Access, Served};
use crate::error::{Error, Result};
use crate::process;
use crate::run::scratch::settle;
use crate::run::{Place, Runner, Running};
use crate::sample::Stage;
use crate::stop::Stop;
use crate::workload::fio::escape;
use crate::workload::two::{self, Shape};
use crate::workload::{Kind, Measured, Settings};

/// The stage, prepared.
#[derive(Debug)]
pub struct Two {
    disks: [PathBuf; 2],
}

impl Two {
    /// Writes both disks.
    pub fn prepare(runner: &mut Runner<'_>) -> Result<Two> {
        Ok(Two { disks: [runner.disk("two-a.raw")?, runner.disk("two-b.raw")?] })
    }

    /// One round: a block for each arm.
    pub fn round(&self, runner: &mut Runner<'_>, round: u32, order: &[&Running]) -> Result<()> {
        for (position, arm) in (0..).zip(order) {
            let place = |workload| Place { stage: Stage::Two, arm, workload, round, position };
            let mut served = Vec::new();
            let mut failed = None;
            for (nth, disk) in (1..).zip(&self.disks) {
                match runner.start_nth(Stage::Two, arm, disk, nth) {
                    Ok(one) => served.push(one),
                    Err(Error::Interrupted) => return Err(Error::Interrupted),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            if let Some(error) = &failed {
                for workload in arm.rounds() {
                    runner.fail(place(workload), error)?;
                }
            } else {
                let command = served.first().and_then(|one| one.server.as_ref());
                if let Some(command) = command.map(|server| server.command_line.clone()) {
                    runner.remember_command(Stage::Two, &arm.name, &command)?;
                }
                let settings = runner.plan.settings(round);
                for workload in arm.rounds() {
                    let Kind::Two(shape) = workload.kind else { continue };
                    let stop = runner.stop;
                    let alive: Result<()> = served
                        .iter_mut()
                        .filter_map(|one| one.server.as_mut())
                        .try_for_each(process::Server::check);
                    let served = &served;
                    runner.sample(place(workload), None, None, |_| {
                        alive?;
                        measure(shape, served, &settings, stop)
                    })?;
                }
            }
            for one in served {
                if let Err(error) = one.end() {
                    runner.trouble(Stage::Two, &arm.name, &error);
                }
            }
            self.disks.iter().try_for_each(|disk| settle(disk))?;
        }
        Ok(())
    }
}

fn measure(shape: Shape, served: &[Served], settings: &Settings, stop: &Stop) -> Result<Measured> {
    let depths = shape.depths();
    let jobs: Vec<Vec<String>> = served
        .iter()
        .zip([depths.0, depths.1])
        .map(|(one, depth)| job(&one.access, depth))
        .collect::<Result<_>>()?;
    let run = |jobs: &[Vec<String>], settings: &Settings| -> Result<Vec<two::Load>> {
        let limit = Duration::from_secs(60) + 2 * (settings.run + settings.ramp);
        let mut command = Command::new("fio");
        for (at, job) in jobs.iter().enumerate() {
            // What stands behind --name is that job's, so each has all of it.
            command.arg(format!("--name=load{at}"));
            command.args(two::common_args(shape, settings, settings.ramp.as_secs_f64())).args(job);
        }
        let text = process::run(command, limit, stop)?.stdout;
        // What a page cache still holds of one run is not written back at the cost of the next.
        rustix::fs::sync();
        let loads: Vec<two::Load> = two::jobs(&text)?
            .iter()
            .map(|job| two::load(job, shape.write))
            .collect::<Result<_>>()?;
        if loads.len() == jobs.len() {
            return Ok(loads);
        }
        let found = format!("{} jobs of {}", loads.len(), jobs.len());
        Err(Error::Output { what: "fio's JSON", found })
    };
    let alone =
        |job: &Vec<String>| two::long_enough(settings, |s| run(std::slice::from_ref(job), s));
    let alone: Vec<two::Load> =
        jobs.iter().map(alone).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    let both = two::long_enough(settings, |s| run(&jobs, s))?;
    match (&alone[..], &both[..]) {
        (&[first, second], &[a, b]) => Ok(two::measured([first, second], [a, b], shape)),
        _ => Err(Error::Output { what: "fio's JSON", found: "not two loads".into() }),
    }
}

fn job(access: &Access, depth: u32) -> Result<Vec<String>> {
    let mut args = match access {
        Access::File(path) | Access::Block(path) => vec![
            format!("--filename={}", escape(&path.display().to_string())),
            "--ioengine=io_uring".into(),
        ],
        Access::Nbd { uri, .. } => vec!["--ioengine=nbd".into(), format!("--uri={uri}")],
        other => return Err(Error::Plan(format!("fio on the host does not reach {other:?}"))),
    };
    args.push(format!("--iodepth={depth}"));
    Ok(args)
}
