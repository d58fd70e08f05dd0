//! The programs that put load on a server, and what they report.

use crate::arms::{Arm, Kind};
use crate::cpu;
use crate::lines::Line;
use crate::qemu10::Qemu10;
use anyhow::{Context, Result};
use clap::{Args, FromArgMatches};
use ringtap_guest::fio::Report;
use ringtap_lab::process::launch::Launch;
use ringtap_load::{Latency, LoadArgs, Outcome};
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// One measurement of one arm, as the client saw it.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Requests per second.
    pub iops: f64,
    /// Latency, from a client that tells it.
    pub lat_ns: Option<Latency>,
    /// All requests sent, also outside of the measured window: what the server worked for.
    pub requests: u64,
    /// CPU seconds of the client per request.
    pub client_cpu_per_request: f64,
}

/// Who puts load on the servers.
#[derive(Clone, Debug)]
pub enum Client {
    /// Ringtap's load loop on the blkio crate.
    Blkio,
    /// fio's nbd engine.
    FioNbd,
    /// The same as [`Client::Blkio`], and fio's rbd engine on an arm without a server.
    Rbd(Rbd),
    /// `qemu-img bench` of QEMU 10 on vhost-user.
    QemuImg(Qemu10),
}

/// An image of Ceph that fio reaches by itself.
#[derive(Clone, Debug)]
pub struct Rbd {
    /// The cluster's configuration.
    pub conf: PathBuf,
    /// The image's name, in the pool `rbd`.
    pub image: String,
}

/// How long and where to measure.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Seconds of the measured window.
    pub seconds: f64,
    /// CPU to stay on.
    pub cpu: Option<usize>,
}

/// The first argument that turns a program of this crate into its own load client, so that the
/// client is a process by itself and can be pinned and killed.
const AS_CLIENT: &str = "load";

/// Runs as a load client if started as one; to be called first in `main`.
pub fn as_client() -> Option<ExitCode> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    if args.first()? != AS_CLIENT {
        return None;
    }
    let command = LoadArgs::augment_args(clap::Command::new(AS_CLIENT));
    let args = LoadArgs::from_arg_matches(&command.get_matches_from(args));
    let outcome = args.map_err(anyhow::Error::from).and_then(|args| {
        let output = args.output;
        ringtap_load::run(args).map(|outcome| (outcome.render(output), outcome.failed()))
    });
    match outcome {
        Ok((text, failed)) => {
            println!("{text}");
            Some(ExitCode::from(u8::from(failed)))
        }
        Err(error) => {
            eprintln!("{error:#}");
            Some(ExitCode::FAILURE)
        }
    }
}

impl Client {
    /// For the report.
    pub fn name(&self) -> &'static str {
        match self {
            Client::Blkio => "blkio crate 0.5 (libblkio's virtio driver)",
            Client::FioNbd => "fio --ioengine=nbd",
            Client::Rbd(_) => "blkio crate 0.5 (libblkio's virtio driver); fio --ioengine=rbd",
            Client::QemuImg(_) => "qemu-img bench of QEMU 10 (virtio-blk-vhost-user)",
        }
    }

    /// Puts the load of `line` on `arm`, whose server is running.
    pub fn measure(&self, arm: &Arm, line: &Line, run: Run) -> Result<Measured> {
        match self {
            Client::Rbd(rbd) if arm.kind == Kind::Native => fio_rbd(rbd, line, run),
            _ if arm.kind == Kind::Native => load(arm, line, run),
            Client::Blkio | Client::Rbd(_) => load(arm, line, run),
            Client::FioNbd => fio_nbd(arm, line, run),
            Client::QemuImg(qemu) => qemu_img(qemu, arm, line, run),
        }
    }
}

fn finish(launch: &Launch, run: Run, seconds: f64) -> Result<String> {
    let limit = Duration::from_secs_f64(seconds + 60.0);
    Ok(launch.on(run.cpu).output(limit, crate::interrupt::stop())?)
}

fn load(arm: &Arm, line: &Line, run: Run) -> Result<Measured> {
    let ramp = arm.ramp.unwrap_or((run.seconds / 8.0).min(0.5));
    let target = match (&arm.launch, &arm.image) {
        (None, Some(image)) => ["--native".into(), image.display().to_string()],
        _ => ["--socket".into(), arm.socket.display().to_string()],
    };
    let words = format!(
        "{AS_CLIENT} --rw {} --bs {} --depth {} --queues {} --seconds {} --ramp {ramp} --output json",
        line.rw, line.bs, line.depth, arm.queues, run.seconds
    );
    let words = words.split(' ').map(String::from).chain(target);
    let launch = Launch::new(std::env::current_exe()?, words);
    let text = finish(&launch, run, run.seconds + ramp)?;
    let outcome: Outcome = serde_json::from_str(&text).context("the load client's report")?;
    Ok(Measured {
        iops: outcome.iops,
        client_cpu_per_request: outcome.cpu_seconds / outcome.ios.max(1) as f64,
        lat_ns: Some(outcome.lat_ns),
        requests: outcome.total_ios,
    })
}

fn fio_nbd(arm: &Arm, line: &Line, run: Run) -> Result<Measured> {
    let socket = arm.socket.display();
    let uri = format!("--uri=nbd+unix:///{}?socket={socket}", crate::nbd::EXPORT);
    fio(["--ioengine=nbd".into(), uri], vec![], line, run)
}

fn fio_rbd(rbd: &Rbd, line: &Line, run: Run) -> Result<Measured> {
    let env = vec![("CEPH_CONF".into(), rbd.conf.clone().into())];
    let words = ["--ioengine=rbd", "--pool=rbd", "--clientname=admin", "--busy_poll=0"];
    let words = words.map(String::from).into_iter().chain([format!("--rbdname={}", rbd.image)]);
    fio(words, env, line, run)
}

/// fio has no ramp here: its counts leave the ramp out, and the server's CPU time would not.
fn fio(
    engine: impl IntoIterator<Item = String>,
    env: Vec<(String, OsString)>,
    line: &Line,
    run: Run,
) -> Result<Measured> {
    let words = [
        "--name=line".into(),
        format!("--rw={}", line.rw),
        format!("--bs={}", line.bs),
        format!("--iodepth={}", line.depth),
        format!("--runtime={}ms", (run.seconds * 1000.0) as u64),
        "--time_based".into(),
        "--norandommap".into(),
        "--randrepeat=0".into(),
        "--random_generator=tausworthe64".into(),
        "--clat_percentiles=0".into(),
        "--lat_percentiles=1".into(),
        "--percentile_list=50:90:99:99.9".into(),
        "--output-format=json".into(),
    ];
    let words = words.into_iter().chain(engine);
    let launch = Launch { env, ..Launch::new("fio", words) };
    let text = finish(&launch, run, run.seconds)?;
    read_fio(&text, line.writes())
}

/// The same load by fio on a block device of a guest, for its shell: the report goes to `/tmp/fio` there.
pub(crate) fn fio_in_guest(device: &str, line: &Line, seconds: f64) -> String {
    format!(
        "fio --name=line --filename={device} --rw={} --bs={} --iodepth={} --runtime={}ms --time_based \
             --direct=1 --ioengine=io_uring --norandommap --randrepeat=0 \
             --random_generator=tausworthe64 --clat_percentiles=0 --lat_percentiles=1 \
             --percentile_list=50:90:99:99.9 --output-format=json --output=/tmp/fio >&2",
        line.rw,
        line.bs,
        line.depth,
        (seconds * 1000.0) as u64,
    )
}

/// Reads fio's JSON, which other text may precede.
pub(crate) fn read_fio(text: &str, writes: bool) -> Result<Measured> {
    let report = Report::parse(text).context("fio's report")?;
    let job = report.first()?;
    let side = job.done(writes)?;
    let latency = &side.lat_ns;
    let number = |value: Option<f64>| value.context("fio's report lacks latencies");
    let percentile = |percent| number(latency.percentile(percent)).map(|ns| ns as u64);
    Ok(Measured {
        iops: side.rate()?,
        lat_ns: Some(Latency {
            mean: number(latency.mean)?,
            p50: percentile(50.0)?,
            p90: percentile(90.0)?,
            p99: percentile(99.0)?,
            p999: percentile(99.9)?,
            max: number(latency.max)? as u64,
        }),
        requests: side.total_ios as u64,
        client_cpu_per_request: job.cpu_seconds() / side.total_ios,
    })
}

/// `qemu-img bench` runs a given number of requests: a short run finds how many fill the time.
fn qemu_img(qemu: &Qemu10, arm: &Arm, line: &Line, run: Run) -> Result<Measured> {
    let bench = |count: u64| -> Result<f64> {
        let words = format!(
            "bench -t none -d {} -c {count} -s {} {}--image-opts driver=virtio-blk-vhost-user,cache.direct=on,path={}",
            line.depth,
            line.bs,
            if line.writes() { "-w " } else { "" },
            arm.socket.display()
        );
        let launch = qemu.launch("qemu-img", words.split(' '));
        let text = finish(&launch, run, 10.0 * run.seconds)?;
        let seconds = text
            .split("Run completed in ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next()?.parse().ok());
        seconds.with_context(|| format!("qemu-img bench does not tell its time: {text}"))
    };
    let short = if line.small() { 5000 } else { 100 };
    let rate = short as f64 / bench(short)?.max(0.001);
    let count = ((rate * run.seconds) as u64).max(short);
    let clients_cpu = || cpu::of_reaped_children(std::process::id());
    let before = clients_cpu()?;
    let seconds = bench(count)?;
    let client_cpu = (clients_cpu()? - before).as_secs_f64();
    Ok(Measured {
        iops: count as f64 / seconds,
        lat_ns: None,
        requests: short + count,
        client_cpu_per_request: client_cpu / count as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIO: &str = r#"fio: a note before the report
{"jobs":[{"error":0,"usr_cpu":30.0,"sys_cpu":20.0,
"read":{"total_ios":1000,"iops":500.5,"runtime":2000,
  "lat_ns":{"mean":10.5,"max":99,"percentile":{"50.000000":10,"90.000000":15,"99.000000":20,"99.900000":30}}},
"write":{"total_ios":0,"iops":0.0,"runtime":0,"lat_ns":{"mean":0,"max":0}}}]}"#;

    #[test]
    fn reads_fio() {
        let measured = read_fio(FIO, false).unwrap();
        assert_eq!((measured.iops, measured.requests), (500.5, 1000));
        assert!((measured.client_cpu_per_request - 0.001).abs() < 1e-12);
        let lat = measured.lat_ns.unwrap();
        assert_eq!([lat.p50, lat.p90, lat.p99, lat.p999, lat.max], [10, 15, 20, 30, 99]);
    }

    #[test]
    fn fio_that_failed_or_measured_nothing_is_an_error() {
        assert!(read_fio(FIO, true).is_err());
        assert!(read_fio(&FIO.replace("\"error\":0", "\"error\":5"), false).is_err());
        assert!(read_fio("fio: cannot connect", false).is_err());
    }
}
