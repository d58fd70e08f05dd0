//! `block-commit`: what a disk's topmost images hold, or some between, brought into one below.

use std::path::{Path, PathBuf};

use ringtap_vbd::OnErrors;
use serde_json::json;

use super::command::Command;
use super::copies::{Common, OnErrorWord, slowdown};
use super::job_words::JobType;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::chain::{Layer, layers, position};
use crate::commit::Commit;
use crate::identity::identity;
use crate::ids::DiskId;
use crate::inner::InnerCommit;
use crate::jobs::New;
use crate::ledger::whole;
use crate::running::{Running, Served, Then};

arguments! {
    /// `block-commit`
    struct BlockCommit {
        "job-id" job_id: Option<String>,
        "device" device: String,
        /// The image below, by its file; the deepest where it is not said.
        "base" base: Option<String>,
        /// The same by its node.
        "base-node" base_node: Option<String>,
        /// The uppermost of those that go, by its file; the disk's topmost where it is not said.
        "top" top: Option<String>,
        /// The same by its node.
        "top-node" top_node: Option<String>,
        /// How the image upon those that go is to name the one below.
        "backing-file" backing_file: Option<String>,
        "speed" speed: Option<u64>,
        "on-error" on_error: Option<OnErrorWord>,
        /// By how many percent guests may be slowed, where the topmost image goes.
        "__ringtap_max-slowdown" max_slowdown: Option<u32>,
        "auto-finalize" auto_finalize: Option<bool>,
        "auto-dismiss" auto_dismiss: Option<bool>,
    }
}

/// Which images it is about: how many lie upon each.
struct Which {
    top: usize,
    base: usize,
}

impl Command for BlockCommit {
    const NAME: &'static str = "block-commit";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(self.begin(running));
    }
}

/// Where in a disk an image lies that a client names.
struct Looked<'a> {
    running: &'a Running,
    served: &'a Served,
    below: &'a [Layer],
}

impl Looked<'_> {
    fn by_file(&self, file: &str) -> Option<usize> {
        let file = Path::new(file);
        let is_top = self.served.file.is_some() && identity(file) == self.served.file;
        if is_top { Some(0) } else { position(self.below, file).map(|at| at + 1) }
    }

    fn by_node(&self, name: &str) -> Result<usize, Refusal> {
        if name == self.served.node() {
            return Ok(0);
        }
        let path = self.running.path_of_node(name)?;
        let found = position(self.below, &path).map(|at| at + 1);
        found.ok_or_else(|| Refusal::new(format!("'{name}' is not in this backing file chain")))
    }
}

impl BlockCommit {
    fn which(&self, looked: &Looked<'_>) -> Result<Which, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        let top = match (&self.top, &self.top_node) {
            (Some(_), Some(_)) => {
                return refuse("'top-node' and 'top' are mutually exclusive".into());
            }
            (None, Some(name)) => looked.by_node(name)?,
            (Some(file), None) => looked
                .by_file(file)
                .ok_or_else(|| Refusal::new(format!("Top image file {file} not found")))?,
            (None, None) => 0,
        };
        let base = match (&self.base, &self.base_node) {
            (Some(_), Some(_)) => {
                return refuse("'base-node' and 'base' are mutually exclusive".into());
            }
            (None, Some(name)) => {
                let base = looked.by_node(name)?;
                if base < top {
                    return refuse(format!("'{name}' is not in this backing file chain"));
                }
                base
            }
            (Some(file), None) => {
                let found = looked.by_file(file).filter(|base| *base > top);
                found.ok_or_else(|| {
                    Refusal::new(format!("Can't find '{file}' in the backing chain"))
                })?
            }
            (None, None) => looked.below.len(),
        };
        if base == top {
            return refuse("cannot commit an image into itself".into());
        }
        if top == 0 && self.backing_file.is_some() {
            return refuse("'backing-file' specified, but 'top' is the active layer".into());
        }
        Ok(Which { top, base })
    }

    fn begin(self, running: &mut Running) -> Result<Done, Refusal> {
        let gone = || Refusal::new("the disk is gone");
        let common = Common {
            job_id: self.job_id.clone(),
            speed: self.speed,
            auto_finalize: self.auto_finalize,
            auto_dismiss: self.auto_dismiss,
        };
        if running.node(&self.device).is_none() {
            return Err(Refusal::no_device(format!("Device '{}' not found", self.device)));
        }
        let new = running.new_job(&self.device, JobType::Commit, common)?;
        let of = new.disk.ok_or_else(gone)?;
        let served = running.disks.get(&of).ok_or_else(gone)?;
        if served.vbd.is_read_only() {
            return Err(Refusal::new(format!("Node '{}' is read-only", self.device)));
        }
        let image = served.vbd.image();
        let image =
            image.map_err(|error| Refusal::new(format!("Node '{}': {error}", self.device)))?;
        let below = layers(&*image);
        let which = self.which(&Looked { running, served, below: &below })?;
        let path =
            |at: usize| below.get(at - 1).map(|layer| layer.path.clone()).unwrap_or_default();
        let base = path(which.base);
        match which.top {
            0 => begin_whole(running, new, of, base, &self),
            _ if self.max_slowdown.is_some() => Err(Refusal::new(
                "'__ringtap_max-slowdown' is for commits of the topmost image: others slow no guest",
            )),
            top => {
                let top = path(top);
                begin_inner(running, new, of, InnerPaths { top, base }, self)
            }
        }
    }
}

/// It is one disk, whose images are on either side.
fn on_errors(of: Option<OnErrorWord>) -> OnErrors {
    let on_error = OnErrorWord::meant(of);
    OnErrors { source: on_error, target: on_error }
}

/// The topmost images go, and the disk goes on in the one below.
fn begin_whole(
    running: &mut Running,
    mut new: New,
    of: DiskId,
    base: PathBuf,
    asked: &BlockCommit,
) -> Result<Done, Refusal> {
    let (said, on_error) = (asked.max_slowdown, asked.on_error);
    new.upon = running.may_write_below(of, &base).map_err(Refusal::new)?;
    let Some(served) = running.disks.get(&of) else { return Err(Refusal::new("it is gone")) };
    let (disk, vbd) = (served.disk.clone(), served.vbd.clone());
    let (max_slowdown, on_errors) = (slowdown(said)?, on_errors(on_error));
    let upon = running.upon_which_image(of, &base);
    let commit = Commit { disk, vbd, base: Some(base), upon, max_slowdown, on_errors };
    if let Some(base) = commit.base().filter(|base| base.to_str().is_some()) {
        new.line = running.line(
            &new,
            BlockCommit::NAME,
            json!({
                "base": base,
                "__ringtap_max-slowdown": said,
                "on-error": on_error.map(OnErrorWord::word),
            }),
        );
        new.line.iter_mut().for_each(|line| line.files.push((base.clone(), None)));
    }
    let begun = running.begin_job(new, move |job| {
        let moved = commit.run(job)?;
        Ok(Box::new(move |running: &mut Running| running.moved(of, moved)) as Then)
    });
    begun.map(|()| Done {}).map_err(Refusal::from)
}

/// The uppermost of those that go, and the one below.
struct InnerPaths {
    top: PathBuf,
    base: PathBuf,
}

/// Some between go, and the disk stays in its topmost image.
fn begin_inner(
    running: &mut Running,
    mut new: New,
    of: DiskId,
    paths: InnerPaths,
    asked: BlockCommit,
) -> Result<Done, Refusal> {
    let (backing_file, on_error) = (asked.backing_file, asked.on_error);
    let InnerPaths { top, base } = paths;
    new.waits = false;
    new.upon = running.may_write_below(of, &base).map_err(Refusal::new)?;
    let beside = running.beside(of, &new.upon);
    let Some(served) = running.disks.get(&of) else { return Err(Refusal::new("it is gone")) };
    let (disk, vbd) = (served.disk.clone(), served.vbd.clone());
    let commit =
        InnerCommit { disk, vbd, beside, top, base, backing_file, on_errors: on_errors(on_error) };
    commit.check()?;
    let [top, base] = [&commit.top, &commit.base].map(|path| whole(path));
    if top.to_str().is_some() && base.to_str().is_some() {
        let more = json!({
            "top": top,
            "base": base,
            "backing-file": commit.backing_file,
            "on-error": on_error.map(OnErrorWord::word),
        });
        new.line = running.line(&new, BlockCommit::NAME, more);
        new.line.iter_mut().for_each(|line| line.files.push((base.clone(), None)));
    }
    let all = new.with_upon();
    let begun = running.begin_job(new, move |job| {
        commit.run(job)?;
        Ok(Box::new(move |running: &mut Running| {
            all.iter().for_each(|of| running.retie(*of));
            running.close_unused(Box::new(|_| ()));
        }) as Then)
    });
    begun.map(|()| Done {}).map_err(Refusal::from)
}
