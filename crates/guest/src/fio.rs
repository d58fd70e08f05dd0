//! What fio reports with `--output-format=json`: the one place that knows its words.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Why a report is none, or tells of no I/O.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// Engines may talk before it, but then it must come.
    #[error("no {{ in its output")]
    Nothing,
    /// It is cut off, or something else.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A report without a list of jobs, or with an empty one.
    #[error("no jobs")]
    NoJobs,
    /// A number that is always there.
    #[error("no {0} of the job")]
    Lacks(&'static str),
    /// The job has ended badly.
    #[error("fio reports error {code} ({}) in job {job:?}", cause(*code))]
    Failed {
        /// Its name.
        job: String,
        /// An errno.
        code: i64,
    },
    /// The job has ended well and done nothing.
    #[error("not one I/O was done in the time measured, by job {job:?}")]
    Idle {
        /// Its name.
        job: String,
    },
}

fn cause(code: i64) -> std::io::Error {
    i32::try_from(code)
        .map_or_else(|_| std::io::Error::other("no errno"), std::io::Error::from_raw_os_error)
}

/// A report.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// `fio-3.33`
    #[serde(rename = "fio version", default = "unnamed")]
    pub version: String,
    #[serde(rename = "global options", default)]
    global: Options,
    jobs: Option<Vec<Job>>,
}

type Options = BTreeMap<String, serde_json::Value>;

fn unnamed() -> String {
    "fio".into()
}

/// A job, or a group of jobs that are reported as one.
#[derive(Clone, Debug, Deserialize)]
pub struct Job {
    /// Its name.
    #[serde(rename = "jobname", default)]
    pub name: String,
    error: Option<i64>,
    #[serde(rename = "job options", default)]
    options: Options,
    usr_cpu: Option<f64>,
    sys_cpu: Option<f64>,
    job_runtime: Option<f64>,
    steadystate: Option<SteadyState>,
    /// What it has read.
    #[serde(default)]
    pub read: Side,
    /// What it has written.
    #[serde(default)]
    pub write: Side,
}

#[derive(Clone, Debug, Deserialize)]
struct SteadyState {
    attained: Option<i64>,
}

/// The reads of a job, or its writes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Side {
    /// I/Os in the measured time.
    pub total_ios: f64,
    /// Bytes of them.
    pub io_bytes: f64,
    /// I/Os a second.
    pub iops: Option<f64>,
    /// Bytes a second; `bw` is in KiB.
    pub bw_bytes: Option<f64>,
    /// Milliseconds measured.
    pub runtime: f64,
    /// From the submission of an I/O to its completion; percentiles are there with `--lat_percentiles=1` only.
    pub lat_ns: Latency,
    /// Of completion alone.
    pub clat_ns: Latency,
    iops_min: Option<f64>,
    iops_max: Option<f64>,
    iops_mean: Option<f64>,
    iops_samples: Option<f64>,
}

/// Nanoseconds.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// The mean.
    pub mean: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
    percentile: Option<BTreeMap<String, f64>>,
}

impl Report {
    /// Reads a report. What engines say before it, and whatever stands behind it, is skipped.
    ///
    /// # Errors
    /// Where there is none.
    pub fn parse(text: &str) -> Result<Report, Unreadable> {
        let start = text.find('{').ok_or(Unreadable::Nothing)?;
        let mut stream = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Report>();
        stream.next().ok_or(Unreadable::Nothing)?.map_err(Unreadable::Json)
    }

    /// All jobs.
    ///
    /// # Errors
    /// Where the report has no list of them.
    pub fn jobs(&self) -> Result<&[Job], Unreadable> {
        self.jobs.as_deref().ok_or(Unreadable::NoJobs)
    }

    /// The first job.
    ///
    /// # Errors
    /// Where there is none.
    pub fn first(&self) -> Result<&Job, Unreadable> {
        self.jobs()?.first().ok_or(Unreadable::NoJobs)
    }

    /// An option of a job, or of all jobs; empty where it was not given.
    pub fn option(&self, job: &Job, name: &str) -> String {
        let given = job.options.get(name).or_else(|| self.global.get(name));
        given.and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
    }
}

impl Job {
    /// Its writes or its reads.
    pub fn side(&self, write: bool) -> &Side {
        if write { &self.write } else { &self.read }
    }

    /// Whether it has ended well.
    ///
    /// # Errors
    /// Where it has not, or does not say.
    pub fn succeeded(&self) -> Result<(), Unreadable> {
        match self.error {
            Some(0) => Ok(()),
            Some(code) => Err(Unreadable::Failed { job: self.name.clone(), code }),
            None => Err(Unreadable::Lacks("error")),
        }
    }

    /// Its writes or its reads, of which there are some.
    ///
    /// # Errors
    /// Where it has failed or done none.
    pub fn done(&self, write: bool) -> Result<&Side, Unreadable> {
        self.succeeded()?;
        let side = self.side(write);
        if side.total_ios == 0.0 {
            return Err(Unreadable::Idle { job: self.name.clone() });
        }
        Ok(side)
    }

    /// CPU seconds of its threads, by fio's own account.
    pub fn cpu_seconds(&self) -> f64 {
        let share = self.usr_cpu.unwrap_or(0.0) + self.sys_cpu.unwrap_or(0.0);
        let runtime = self.job_runtime.unwrap_or(self.read.runtime.max(self.write.runtime));
        share / 100.0 * runtime / 1e3
    }

    /// Whether it was to reach a steady state and has not.
    pub fn missed_steady_state(&self) -> bool {
        self.steadystate.as_ref().is_some_and(|state| state.attained == Some(0))
    }
}

impl Side {
    /// I/Os a second.
    ///
    /// # Errors
    /// Where the report lacks it.
    pub fn rate(&self) -> Result<f64, Unreadable> {
        self.iops.ok_or(Unreadable::Lacks("iops"))
    }

    /// Bytes a second.
    ///
    /// # Errors
    /// Where the report lacks it.
    pub fn bandwidth(&self) -> Result<f64, Unreadable> {
        self.bw_bytes.ok_or(Unreadable::Lacks("bw_bytes"))
    }

    /// How far the rate moved from one sample of fio's (half a second) to another, as a share of the mean, where there are at least
    /// so many.
    pub fn movement(&self, samples: usize) -> Option<f64> {
        let enough = self.iops_samples? >= samples as f64;
        let mean = self.iops_mean.filter(|mean| enough && *mean > 0.0)?;
        Some((self.iops_max? - self.iops_min?) / mean)
    }
}

impl Latency {
    /// The percentile of that number, as in `99.9`; fio prints 0 where it has none.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let value = self.percentile.as_ref()?.get(&format!("{percent:.6}"))?;
        Some(*value).filter(|value| *value > 0.0)
    }

    /// Whether percentiles were asked for.
    pub fn has_percentiles(&self) -> bool {
        self.percentile.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: i64, ios: u64) -> String {
        format!(
            r#"fio: connected to a server
{{ "fio version": "fio-3.33", "global options": {{ "bs": "4k" }}, "jobs": [ {{ "jobname": "a", "error": {error},
  "usr_cpu": 10, "sys_cpu": 30.0, "job_runtime": 500, "job options": {{ "rw": "randread" }},
  "steadystate": {{ "ss": "bw:10%", "attained": 0 }},
  "read": {{ "total_ios": {ios}, "iops": 2.5, "runtime": 501, "iops_min": 80, "iops_max": 120, "iops_mean": 100.0, "iops_samples": 5,
    "lat_ns": {{ "percentile": {{ "50.000000": 0, "99.900000": 42 }} }} }} }} ] }}
trailing words"#
        )
    }

    #[test]
    fn a_report_is_read_past_what_engines_say() {
        let report = Report::parse(&report(0, 7)).unwrap();
        let job = report.first().unwrap();
        let side = job.done(false).unwrap();
        assert_eq!((side.total_ios, side.rate().unwrap()), (7.0, 2.5));
        assert_eq!(
            (side.lat_ns.percentile(99.9), side.lat_ns.percentile(50.0)),
            (Some(42.0), None)
        );
        assert!(side.lat_ns.has_percentiles() && !side.clat_ns.has_percentiles());
        assert_eq!((side.movement(5), side.movement(6)), (Some(0.4), None));
        assert!((job.cpu_seconds() - 0.2).abs() < 1e-9, "40 % of half a second");
        assert_eq!(
            (report.option(job, "bs"), report.option(job, "rw")),
            ("4k".into(), "randread".into())
        );
        assert!(job.missed_steady_state() && report.version == "fio-3.33");
        assert!(matches!(side.bandwidth(), Err(Unreadable::Lacks("bw_bytes"))));
    }

    #[test]
    fn what_failed_or_did_nothing_is_no_result() {
        let done = |text: &str, write| -> String {
            let report = Report::parse(text);
            let of = report.and_then(|report| report.first()?.done(write).cloned());
            of.unwrap_err().to_string()
        };
        let full = done(&report(28, 5), false);
        assert!(full.contains("error 28 (No space left") && full.contains("\"a\""), "{full}");
        assert!(done(&report(0, 0), false).contains("not one I/O"));
        assert!(done(&report(0, 5), true).contains("not one I/O"), "it has only read");
        assert!(done(r#"{"jobs": [{}]}"#, true).contains("no error of the job"));
        assert!(done("fio: bad option", true).contains("no {"));
        assert!(
            done("{}", true).contains("no jobs")
                && done("{\"jobs\": []}", true).contains("no jobs")
        );
        assert!(done("{\"jobs\": [", true).contains("EOF"));
    }
}
