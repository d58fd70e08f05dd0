//! The folder of a run: `run.json` (plan, machine, what could not run), `samples.jsonl` (one sample a line, appended
//! as it comes), `servers/` (stderr of every server), and the report made from them.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::env::Missing;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::plan::Plan;
use crate::sample::{Sample, Stage};

/// How far a run came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It runs, or its lab was killed.
    Running,
    /// All rounds are done.
    Complete,
    /// It was interrupted.
    Interrupted,
    /// It ended early because of an error.
    Failed,
}

/// An arm of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// Where it runs.
    pub stage: Stage,
    /// Its name: the backend's, with `#2` behind it for the A/A twin.
    pub name: String,
    /// The backend.
    pub backend: String,
    /// What it is.
    pub title: String,
    /// It goes through a page cache, so it is not ranked with those that go to the disk.
    #[serde(default)]
    pub cached: bool,
    /// What its figures leave out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
    /// The command line of its server, once it has run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// A cell of the matrix that cannot run here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skip {
    /// Where it would run.
    pub stage: Stage,
    /// The backend.
    pub backend: String,
    /// The workload; `None` for all of them.
    pub workload: Option<String>,
    /// Why not, and what would help.
    #[serde(flatten)]
    pub missing: Missing,
}

/// What was written to the disks before they were measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Bytes: all of every disk.
    pub bytes: u64,
    /// Bytes that the file system had allocated for them then.
    pub allocated: u64,
    /// How often a disk was written again, because something of it had been discarded.
    pub again: u32,
}

/// The file with the run's plan, machine and state.
pub const RECORD: &str = "run.json";
/// The file with its samples.
pub const SAMPLES: &str = "samples.jsonl";

/// Held back for the last `run.json`, which says how a run ended, on a disk that is full, too: more than any has.
const SPARE_BYTES: usize = 256 << 10;

/// The schema of `run.json` and `samples.jsonl` that this lab writes. It rises whenever a lab of before could not read, or
/// would misread, what is written; every earlier one is read for ever. 0: before schemas had numbers.
pub const SCHEMA: u32 = 1;

/// `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The schema of the folder: [`SCHEMA`] of the lab that wrote it.
    #[serde(default)]
    pub schema: u32,
    /// Version of the lab that wrote it.
    pub lab: String,
    /// When it began, RFC 3339.
    pub began: String,
    /// When it ended.
    pub ended: Option<String>,
    /// How far it came.
    pub state: State,
    /// Why it ended early, and what else went wrong beside the samples.
    #[serde(default)]
    pub troubles: Vec<String>,
    /// What was asked.
    pub plan: Plan,
    /// Where it ran.
    pub host: Host,
    /// The guest, in words, as earlier versions of the lab wrote it.
    #[serde(default)]
    pub guest: Option<String>,
    /// The guest of each stage, in words.
    #[serde(default)]
    pub stages: Vec<(Stage, String)>,
    /// What was written to the disks beforehand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<Written>,
    /// Arms, in the order of the report; the first of a stage is its reference.
    pub arms: Vec<Arm>,
    /// What could not run.
    pub skipped: Vec<Skip>,
}

/// A run's folder while it is written.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    samples: File,
    /// Room for the last `run.json`: a file without a name, so that a lab that is killed leaves none.
    spare: Option<File>,
}

impl Folder {
    /// Makes the folder. One that holds a run already is refused.
    pub fn create(path: &Path) -> Result<Folder> {
        fs::create_dir_all(path.join("servers")).map_err(Error::file("create", path))?;
        let file = path.join(SAMPLES);
        let samples =
            File::options().append(true).create_new(true).open(&file).map_err(|e| {
                match e.kind() {
                    std::io::ErrorKind::AlreadyExists => Error::Plan(format!(
                        "{} holds a run already; name another folder with --out",
                        path.display()
                    )),
                    _ => Error::file("create", &file)(e),
                }
            })?;
        let spare = tempfile::tempfile_in(path).and_then(|mut spare| {
            spare.write_all(&vec![0; SPARE_BYTES])?;
            Ok(spare)
        });
        let spare = Some(spare.map_err(Error::file("hold back room in", path))?);
        Ok(Folder { path: path.to_owned(), samples, spare })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a server's stderr goes.
    pub fn log(&self, stage: Stage, arm: &str) -> PathBuf {
        self.path.join("servers").join(format!("{stage}-{arm}.log"))
    }

    /// Appends a sample.
    pub fn append(&mut self, sample: &Sample) -> Result<()> {
        let wrong = Error::file("append to", &self.path.join(SAMPLES));
        let mut line = serde_json::to_vec(sample).map_err(|e| Error::Plan(e.to_string()))?;
        line.push(b'\n');
        self.samples.write_all(&line).map_err(wrong)
    }

    /// Writes `run.json` anew; a reader sees the old one or the new one.
    pub fn write_record(&mut self, record: &Record) -> Result<()> {
        let text = serde_json::to_string_pretty(record).map_err(|e| Error::Plan(e.to_string()))?;
        if record.state != State::Running {
            self.spare = None;
        }
        replace(&self.path.join(RECORD), &(text + "\n"))
    }
}

/// Writes `text` beside `path` and renames it there. Another process that does the same has a file of its own.
pub fn replace(path: &Path, text: &str) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = fs::write(&beside, text).map_err(Error::file("write", &beside));
    let renamed =
        written.and_then(|()| fs::rename(&beside, path).map_err(Error::file("write", path)));
    if renamed.is_err() {
        let _ = fs::remove_file(&beside);
    }
    renamed
}

/// What is read of `run.json` before all else.
#[derive(Deserialize)]
struct Made {
    #[serde(default)]
    schema: u32,
    #[serde(default)]
    lab: String,
}

/// Reads a run's folder, of this schema or an earlier one. A last line that was cut (the lab was killed while it wrote) is left out.
pub fn read(path: &Path) -> Result<(Record, Vec<Sample>)> {
    let file = path.join(RECORD);
    let text = fs::read_to_string(&file).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Plan(format!(
            "{} holds no run (there is no run.json): name a folder that `ringtap compare` made, as in ringtap-runs",
            path.display()
        )),
        _ => Error::file("read", &file)(e),
    })?;
    let wrong = |e| Error::Output { what: "run.json", found: format!("{}: {e}", file.display()) };
    let Made { schema, lab } = serde_json::from_str(&text).map_err(wrong)?;
    if schema > SCHEMA {
        return Err(Error::Plan(format!(
            "{} has schema {schema}, made by version {lab}; this version, {}, reads schemas up to {SCHEMA}: use that one or a \
             later one",
            file.display(),
            env!("CARGO_PKG_VERSION")
        )));
    }
    let record = serde_json::from_str(&text).map_err(wrong)?;
    let file = path.join(SAMPLES);
    // As bytes: the last line may end in the middle of a letter.
    let lines: Vec<Vec<u8>> =
        BufReader::new(File::open(&file).map_err(Error::file("read", &file))?)
            .split(b'\n')
            .collect::<std::io::Result<_>>()
            .map_err(Error::file("read", &file))?;
    let mut samples = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        match serde_json::from_slice(line) {
            Ok(sample) => samples.push(sample),
            Err(_) if at + 1 == lines.len() => {}
            Err(e) => {
                let found = format!("{} line {}: {e}", file.display(), at + 1);
                return Err(Error::Output { what: "samples.jsonl", found });
            }
        }
    }
    Ok((record, samples))
}
