//! `block-stream`: what lies below a disk's topmost image, brought into it.

use std::path::{Path, PathBuf};

use ringtap_vbd::Job;
use serde_json::json;

use super::command::Command;
use super::copies::{Common, OnErrorWord};
use super::job_words::JobType;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments};
use crate::Error;
use crate::chain::{layers, position};
use crate::identity::identity;
use crate::ids::DiskId;
use crate::inner_stream::InnerStream;
use crate::ledger::whole;
use crate::running::{Running, Served, Then};
use crate::stream::Stream;

arguments! {
    /// `block-stream`
    struct BlockStream {
        "job-id" job_id: Option<String>,
        /// The disk, whose topmost image takes all; or an image below, by its node, that takes what lies below it.
        "device" device: String,
        /// The image below that takes it, by its file.
        "__ringtap_into" into: Option<String>,
        /// The image that stays below, by its file; none where it is not said.
        "base" base: Option<String>,
        /// The same by its node.
        "base-node" base_node: Option<String>,
        /// The lowest image that is brought up, by its node.
        "bottom" bottom: Option<String>,
        /// How the topmost image is to name what stays.
        "backing-file" backing_file: Option<String>,
        "speed" speed: Option<u64>,
        "on-error" on_error: Option<OnErrorWord>,
        "auto-finalize" auto_finalize: Option<bool>,
        "auto-dismiss" auto_dismiss: Option<bool>,
    }
}

impl Command for BlockStream {
    const NAME: &'static str = "block-stream";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(self.begin(running));
    }
}

/// What a job does.
type Work = Box<dyn FnOnce(&Job) -> Result<(), Error> + Send>;

/// A disk, and which of its images takes what lies below that.
struct Taker {
    of: DiskId,
    /// None where it is the topmost.
    into: Option<PathBuf>,
}

impl Running {
    /// The image that a stream is into: that of the node, which may lie below a disk, or one of the disk's by its file.
    fn taker(&self, stream: &BlockStream) -> Result<Taker, Refusal> {
        let device = &stream.device;
        let busy = |why: &str| Refusal::new(format!("Node '{device}' is busy: {why}"));
        let (below, own) = match self.graph.lower.get(device) {
            Some(lower) => {
                let upon = self.upon(lower).and_then(|served| self.node(served.node()));
                (Some(lower.path.clone()), upon.ok_or_else(|| busy("it lies below no disk"))?)
            }
            None => (None, self.one_of(Some(device), None)?),
        };
        let of = self.topmost(own).ok_or_else(|| busy("several nodes lie upon it"))?;
        let path = || self.disks.get(&own).map(|served| served.disk.path.clone());
        let below = below.or_else(|| if of == own { None } else { path() });
        match (below, &stream.into) {
            (below, None) => Ok(Taker { of, into: below }),
            (None, Some(file)) => {
                let above = self.place_in(of, Path::new(file), device)?;
                Ok(Taker { of, into: (above > 0).then(|| PathBuf::from(file)) })
            }
            (Some(_), Some(_)) => {
                Err(Refusal::new("'__ringtap_into' is for a 'device' that nothing lies upon"))
            }
        }
    }

    /// How many images of a disk lie upon that file.
    fn place_in(&self, of: DiskId, file: &Path, device: &str) -> Result<usize, Refusal> {
        let served = self.disks.get(&of).ok_or_else(|| Refusal::new("the disk is gone"))?;
        if served.file.is_some() && identity(file) == served.file {
            return Ok(0);
        }
        let image = served.vbd.image();
        let image = image.map_err(|error| Refusal::new(format!("Node '{device}': {error}")))?;
        let found = position(&layers(&*image), file).map(|at| at + 1);
        found.ok_or_else(|| Refusal::new(format!("{} is no image of '{device}'", file.display())))
    }
}

impl BlockStream {
    /// What lies below the lowest image that is brought up; none where that is the deepest.
    fn under(
        &self,
        running: &Running,
        served: &Served,
        bottom: &str,
    ) -> Result<Option<PathBuf>, Refusal> {
        let image = served.vbd.image();
        let image =
            image.map_err(|error| Refusal::new(format!("Node '{}': {error}", self.device)))?;
        let below = layers(&*image);
        let at = match bottom == served.node() {
            true => Some(0),
            false => position(&below, &running.path_of_node(bottom)?).map(|at| at + 1),
        };
        let outside = || {
            let device = &self.device;
            Refusal::new(format!("Node '{bottom}' is not in a chain starting from '{device}'"))
        };
        Ok(below.get(at.ok_or_else(outside)?).map(|layer| layer.path.clone()))
    }

    fn begin(self, running: &mut Running) -> Result<Done, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        for (one, other, names) in [
            (&self.base, &self.base_node, "'base' and 'base-node'"),
            (&self.base, &self.bottom, "'base' and 'bottom'"),
            (&self.bottom, &self.base_node, "'bottom' and 'base-node'"),
        ] {
            if one.is_some() && other.is_some() {
                return refuse(format!("{names} cannot be specified at the same time"));
            }
        }
        let Taker { of, into } = running.taker(&self)?;
        let upon = match &into {
            Some(into) => running.may_write_below(of, into).map_err(Refusal::new)?,
            None => vec![],
        };
        let node = running.disks.get(&of).map(|served| served.node().to_owned());
        let common = Common {
            job_id: Some(self.job_id.clone().unwrap_or_else(|| self.device.clone())),
            speed: self.speed,
            auto_finalize: self.auto_finalize,
            auto_dismiss: self.auto_dismiss,
        };
        let mut new = running.new_job(&node.unwrap_or_default(), JobType::Stream, common)?;
        (new.waits, new.upon) = (false, upon);
        let Some(served) = running.disks.get(&of) else {
            return refuse("the disk is gone".into());
        };
        if served.vbd.is_read_only() {
            return refuse(format!("Node '{}' is read-only", self.device));
        }
        let base = match (&self.base, &self.base_node, &self.bottom) {
            (Some(file), ..) => Some(PathBuf::from(file)),
            (None, Some(name), _) => Some(running.path_of_node(name)?),
            (None, None, Some(name)) => self.under(running, served, name)?,
            (None, None, None) => None,
        };
        if base.is_none() && self.backing_file.is_some() {
            return refuse("backing file specified, but streaming the entire chain".into());
        }
        let (disk, vbd) = (served.disk.clone(), served.vbd.clone());
        let on_error = OnErrorWord::meant(self.on_error);
        let path = |path: &PathBuf| Some(whole(path)).filter(|path| path.to_str().is_some());
        let more = json!({
            "base": base.as_ref().and_then(path),
            "__ringtap_into": into.as_ref().and_then(path),
            "backing-file": self.backing_file,
            "on-error": self.on_error.map(OnErrorWord::word),
        });
        let (base_given, backing_file) = (base.is_some(), self.backing_file.clone());
        let work: Work = match into.clone() {
            None => {
                let stream = Stream { disk, vbd, base, backing_file, on_error };
                stream.check().map_err(|error| self.outside(error, base_given))?;
                Box::new(move |job: &Job| stream.run(job))
            }
            Some(into) => {
                let beside = running.beside(of, &new.upon);
                let stream = InnerStream { disk, vbd, beside, into, base, backing_file, on_error };
                stream.check().map_err(|error| self.outside(error, base_given))?;
                Box::new(move |job: &Job| stream.run(job))
            }
        };
        new.line = running.line(&new, Self::NAME, more);
        let files = into.as_ref().and_then(path).map(|into| (into, None));
        new.line.iter_mut().for_each(|line| line.files.extend(files.clone()));
        let all = new.with_upon();
        let begun = running.begin_job(new, move |job| {
            work(job)?;
            Ok(Box::new(move |running: &mut Running| {
                all.iter().for_each(|of| running.retie(*of));
                running.close_unused(Box::new(|_| ()));
            }) as Then)
        });
        begun.map(|()| Done {}).map_err(Refusal::from)
    }

    /// Why what was to stay cannot, as QEMU says it.
    fn outside(&self, error: Error, base_given: bool) -> Refusal {
        let device = &self.device;
        match (&self.base_node, &self.bottom) {
            (Some(name), _) => {
                Refusal::new(format!("Node '{name}' is not a backing image of '{device}'"))
            }
            (None, Some(name)) if base_given => {
                Refusal::new(format!("Node '{name}' is not in a chain starting from '{device}'"))
            }
            _ => error.into(),
        }
    }
}
