//! Copying images: the ways, each once per case and round, in an order that rotates.

use crate::experiment::order;
use crate::image::Fs;
use crate::report::show;
use crate::{cpu, interrupt};
use anyhow::{Context, Result};
use ringtap_lab::process::find;
use ringtap_lab::process::launch::Launch;
use ringtap_lab::stats::medians::{Ratio, median};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest that one copy may take.
const LIMIT: Duration = Duration::from_secs(300);
/// Data and holes of the source, in turn.
const STRETCH: u64 = 8 << 20;

/// From which format to which, and how.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// For people and for `--only`: `raw-qcow2`, `raw-qcow2-zstd`, `raw-raw-direct`.
    pub name: String,
    from: &'static str,
    to: &'static str,
    /// How clusters are compressed, if they are.
    compression: Option<&'static str>,
    /// Past the page cache on both sides.
    direct: bool,
}

impl Case {
    /// All of a file system.
    pub fn all(fs: Fs) -> Vec<Case> {
        let mut cases = Vec::new();
        let mut add = |from, to, compression: Option<&'static str>, direct: bool| {
            let mut name = format!("{from}-{to}");
            for word in compression.into_iter().chain(direct.then_some("direct")) {
                name = format!("{name}-{word}");
            }
            cases.push(Case { name, from, to, compression, direct });
        };
        // tmpfs knows no other way than its pages.
        let modes: &[bool] = if fs == Fs::Ext4 { &[false, true] } else { &[false] };
        for direct in modes {
            for (from, to) in
                [("raw", "raw"), ("raw", "qcow2"), ("qcow2", "raw"), ("qcow2", "qcow2")]
            {
                add(from, to, None, *direct);
            }
        }
        if fs == Fs::Tmpfs {
            add("raw", "qcow2", Some("zlib"), false);
            add("raw", "qcow2", Some("zstd"), false);
        }
        cases
    }
}

/// The images of one file system: the same disk in each format.
pub struct Sources<'a> {
    dir: &'a Path,
    size: u64,
}

impl<'a> Sources<'a> {
    /// A disk of `size` bytes in `dir`, half of it a hole; what there is of it compresses to about half.
    pub fn write(dir: &'a Path, size: u64) -> Result<Sources<'a>> {
        let sources = Sources { dir, size };
        let raw = sources.of("raw");
        let failed = || format!("cannot write {}", raw.display());
        let mut file = File::create(&raw).with_context(failed)?;
        file.set_len(size).with_context(failed)?;
        let mut page = [0x52; 4096];
        let mut random = fastrand::Rng::with_seed(1);
        let mut piece = Vec::with_capacity(1 << 20);
        for at in (0..size).step_by(1 << 20).filter(|at| at / STRETCH % 2 == 0) {
            interrupt::check()?;
            piece.clear();
            while piece.len() < 1 << 20 {
                random.fill(&mut page[..2048]);
                piece.extend_from_slice(&page);
            }
            file.seek(SeekFrom::Start(at)).with_context(failed)?;
            file.write_all(&piece[..(size - at).min(1 << 20) as usize]).with_context(failed)?;
        }
        file.sync_all().with_context(failed)?;
        let qcow2 = sources.of("qcow2");
        let words = ["convert", "-f", "raw", "-O", "qcow2"].map(OsString::from);
        let files = [raw.into(), qcow2.clone().into()];
        sources.run(&Launch::new("qemu-img", words.into_iter().chain(files)))?;
        File::open(&qcow2)?.sync_all()?;
        Ok(sources)
    }

    fn of(&self, format: &str) -> PathBuf {
        self.dir.join(format!("source.{format}"))
    }

    fn target(&self) -> PathBuf {
        self.dir.join("target")
    }

    /// Where it is and what it is like, for the report.
    pub fn place(&self) -> Result<String> {
        let (kind, dir) = (crate::image::file_system(self.dir)?, self.dir.display());
        Ok(format!(
            "{} MiB, every other {} MiB a hole, in {dir} ({kind})",
            self.size >> 20,
            STRETCH >> 20
        ))
    }

    /// Have the memory at hand that a copy will fill. A virtual machine gives its host back what was free for
    /// seconds, and whoever takes it next waits: a copy took six times as long, as was seen.
    fn touch_memory(&self) -> Result<()> {
        let path = self.dir.join("scratch");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&path)?;
            let piece = vec![0; 1 << 20];
            (0..self.size / piece.len() as u64).try_for_each(|_| file.write_all(&piece))
        };
        let written = write();
        fs::remove_file(&path)?;
        Ok(written?)
    }

    /// What a program prints; how long it and its children took, by the clock and on processors.
    fn run(&self, launch: &Launch) -> Result<(Duration, Duration)> {
        let own = std::process::id();
        let before = cpu::of_reaped_children(own)?;
        let began = Instant::now();
        launch.output(LIMIT, crate::interrupt::stop())?;
        Ok((began.elapsed(), cpu::of_reaped_children(own)?.saturating_sub(before)))
    }
}

/// A program that copies.
#[derive(Clone, Debug)]
pub enum Way {
    /// `ringtap convert`.
    Ringtap(PathBuf),
    /// The same of a build with a name.
    Build(String, PathBuf),
    /// `qemu-img convert` with these options.
    Qemu(&'static [&'static str]),
    /// nbdcopy, with nbdkit below raw images and qemu-nbd below qcow2.
    Nbdcopy,
}

impl Way {
    /// The ways, Ringtap first.
    pub fn all(ringtap: PathBuf) -> Vec<Way> {
        vec![Way::Ringtap(ringtap), Way::Qemu(&[]), Way::Qemu(&["-W", "-m", "16"]), Way::Nbdcopy]
    }

    fn name(&self) -> String {
        match self {
            Way::Ringtap(_) => "ringtap".into(),
            Way::Build(name, _) => name.clone(),
            Way::Qemu(options) => format!("qemu-img {}", options.join(" ")).trim().into(),
            Way::Nbdcopy => "nbdcopy".into(),
        }
    }

    /// What makes the target first, which is not measured, and the copy.
    fn launches(&self, case: &Case, sources: &Sources) -> Result<Vec<Launch>, &'static str> {
        let (from, to) = (sources.of(case.from), sources.target());
        let (from_text, to_text) = (from.display().to_string(), to.display().to_string());
        if let Way::Nbdcopy = self {
            if case.compression.is_some() || case.direct {
                return Err("has no such mode");
            }
            if find("nbdcopy").is_none() || find("nbdkit").is_none() {
                return Err("libnbd-bin or nbdkit is not installed");
            }
            let server = |format, path: &str, more: &[&str]| -> Vec<String> {
                let words: Vec<&str> = match format {
                    "raw" => vec!["[", "nbdkit", "--exit-with-parent", "file", path, "]"],
                    _ => {
                        [&["[", "qemu-nbd", "--cache=unsafe", "-f", format][..], more, &[path, "]"]]
                            .concat()
                    }
                };
                words.into_iter().map(String::from).collect()
            };
            let mut words = vec!["--".into()];
            words.extend(server(case.from, &from_text, &["-r"]));
            let mut launches = Vec::new();
            if case.to == "raw" {
                words.push(to_text);
            } else {
                let create = ["create", "-q", "-f", case.to, &to_text, &sources.size.to_string()]
                    .map(String::from);
                launches.push(Launch::new("qemu-img", create));
                words.insert(0, "--destination-is-zero".into());
                words.extend(server(case.to, &to_text, &[]));
            }
            launches.push(Launch::new("nbdcopy", words));
            return Ok(launches);
        }
        let (program, own) = match self {
            Way::Ringtap(path) | Way::Build(_, path) => (path.clone(), &[][..]),
            Way::Qemu(options) => ("qemu-img".into(), *options),
            Way::Nbdcopy => return Err("is no converter"),
        };
        let mut words: Vec<String> =
            ["convert", "-q", "-f", case.from, "-O", case.to].map(String::from).into();
        words.extend(own.iter().map(ToString::to_string));
        if let Some(kind) = case.compression {
            words.extend(["-c".into(), "-o".into(), format!("compression_type={kind}")]);
        }
        if case.direct {
            words.extend(["-t", "none", "-T", "none"].map(String::from));
        }
        words.extend([from_text, to_text]);
        Ok(vec![Launch::new(program, words)])
    }

    fn measure(&self, case: &Case, sources: &Sources, verify: bool) -> Result<(f64, f64)> {
        interrupt::check()?;
        let target = sources.target();
        match fs::remove_file(&target) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error)?,
            _ => {}
        }
        // What the last copy left to be written is not this one's.
        rustix::fs::syncfs(File::open(sources.dir)?)?;
        let launches = self.launches(case, sources).map_err(anyhow::Error::msg)?;
        if !case.direct {
            sources.touch_memory()?;
        }
        let mut took = Default::default();
        for launch in &launches {
            took = sources.run(launch)?;
        }
        if verify {
            let words = ["compare", "-q", "-f", case.from, "-F", case.to].map(OsString::from);
            let files = [sources.of(case.from).into(), target.into()];
            sources
                .run(&Launch::new("qemu-img", words.into_iter().chain(files)))
                .context("the copy is not as its source")?;
        }
        Ok((took.0.as_secs_f64(), took.1.as_secs_f64()))
    }
}

/// One copy.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub(crate) round: usize,
    pub(crate) way: String,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
}

/// One case's copies, and what follows from them.
#[derive(Debug, Serialize)]
pub struct Section {
    /// What was copied.
    pub case: Case,
    /// In the order of measurement.
    pub samples: Vec<Sample>,
    rows: Vec<Row>,
}

impl Section {
    /// The ways that could not be measured, and why.
    pub fn missing(&self) -> impl Iterator<Item = (&str, &str)> {
        self.rows.iter().filter_map(|row| Some((&*row.way, &**row.missing.as_ref()?)))
    }
}

#[derive(Debug, Serialize)]
struct Row {
    way: String,
    /// Why there are no numbers.
    missing: Option<String>,
    seconds: f64,
    cpu_seconds: f64,
    /// How many times as fast as this one Ringtap is.
    ratio: Option<Ratio>,
}

/// Measure one case. The first of `ways` is what the others are compared with.
pub fn measure(case: Case, ways: &[Way], sources: &Sources, rounds: usize) -> Result<Section> {
    let mut samples: Vec<Sample> = Vec::new();
    let mut missing: Vec<Option<String>> = ways.iter().map(|_| None).collect();
    for round in 0..rounds {
        for index in order(ways.len(), round) {
            let way = &ways[index];
            if missing[index].is_some() {
                continue;
            }
            match way.measure(&case, sources, round == 0) {
                Ok((seconds, cpu_seconds)) => {
                    samples.push(Sample { round, way: way.name(), seconds, cpu_seconds });
                }
                Err(error) => {
                    interrupt::check()?;
                    missing[index] = Some(crate::experiment::reason(&error));
                }
            }
        }
    }
    let of = |way: &Way, value: fn(&Sample) -> f64| -> Vec<f64> {
        samples.iter().filter(|sample| sample.way == way.name()).map(value).collect()
    };
    let rate = |sample: &Sample| 1.0 / sample.seconds;
    let rows = ways.iter().zip(missing).enumerate().map(|(index, (way, missing))| Row {
        way: way.name(),
        missing,
        seconds: median(&of(way, |sample| sample.seconds)),
        cpu_seconds: median(&of(way, |sample| sample.cpu_seconds)),
        ratio: ways
            .first()
            .filter(|_| index > 0)
            .and_then(|first| Ratio::of_rounds(&of(first, rate), &of(way, rate))),
    });
    let rows = rows.collect();
    Ok(Section { case, samples, rows })
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<24} {:>8} {:>8}   ringtap / this [95 %]", self.case.name, "s", "CPU s")?;
        for row in &self.rows {
            if let Some(reason) = &row.missing {
                writeln!(f, "  {:<22} not measured: {reason}", row.way)?;
                continue;
            }
            let ratio = row.ratio.map(show).unwrap_or_default();
            writeln!(
                f,
                "  {:<22} {:>8.3} {:>8.2}   {ratio}",
                row.way, row.seconds, row.cpu_seconds
            )?;
        }
        let measured = self.rows.iter().filter(|row| row.ratio.is_some());
        let Some(best) = measured.min_by(|a, b| a.seconds.total_cmp(&b.seconds)) else {
            return writeln!(f, "  OPEN: nothing to compare");
        };
        let reached = best.ratio.is_some_and(|ratio| ratio.value >= 1.0);
        let word = if reached { "reached" } else { "NOT REACHED" };
        let ratio = best.ratio.map(show).unwrap_or_default();
        writeln!(f, "  {word}: rate ≥ 1 × {}: {ratio}", best.way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_measured_and_compared() {
        let dir = tempfile::tempdir().unwrap();
        let sources = Sources::write(dir.path(), 20 << 20).unwrap();
        let raw = fs::read(sources.of("raw")).unwrap();
        assert_eq!(raw.len(), 20 << 20);
        let data = |at: u64| raw[at as usize..][..4096].iter().any(|byte| *byte != 0);
        assert!(data(0) && !data(STRETCH) && data(2 * STRETCH));
        // Whoever copies by the book stands in for Ringtap.
        let ways =
            [Way::Qemu(&["-m", "4"]), Way::Qemu(&[]), Way::Qemu(&["--no-such"]), Way::Nbdcopy];
        for case in Case::all(Fs::Tmpfs) {
            let compresses = case.compression.is_some();
            let section = measure(case, &ways, &sources, 1).unwrap();
            assert_eq!(section.rows[3].missing.is_some(), compresses, "{section}");
            assert!(section.rows[1].ratio.is_some(), "{section}");
            let text = section.to_string();
            assert!(text.contains("not measured: qemu-img failed"), "{text}");
            assert!(text.contains("rate ≥ 1 ×"), "{text}");
        }
        // A copy that is none is told.
        let case = Case::all(Fs::Tmpfs).remove(0);
        let liar = [Way::Ringtap("true".into())];
        let section = measure(case, &liar, &sources, 1).unwrap();
        assert!(section.samples.is_empty(), "{section}");
        assert!(section.to_string().contains("not as its source"), "{section}");
    }
}
