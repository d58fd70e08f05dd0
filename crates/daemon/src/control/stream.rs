//! `block-stream`: what lies below a disk's topmost image, brought into it.

use std::path::PathBuf;

use ringtap_vbd::OnError;
use serde_json::json;

use super::copies::Common;
use super::jobs::JobType;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::resume::whole;
use super::shape::{Done, arguments, words};
use super::table::Command;
use crate::chain::{layers, position};
use crate::running::{Running, Served, Then};
use crate::stream::Stream;

words! {
    /// What becomes of a job that meets an error.
    enum StreamOnError { "report" Report, "ignore" Ignore, "stop" Stop, "enospc" Enospc }
}

arguments! {
    /// `block-stream`
    struct BlockStream {
        "job-id" job_id: Option<String>,
        /// The disk: its topmost image is the one that takes all.
        "device" device: String,
        /// The image that stays below, by its file; none where it is not said.
        "base" base: Option<String>,
        /// The same by its node.
        "base-node" base_node: Option<String>,
        /// The lowest image that is brought up, by its node.
        "bottom" bottom: Option<String>,
        /// How the topmost image is to name what stays.
        "backing-file" backing_file: Option<String>,
        "speed" speed: Option<u64>,
        "on-error" on_error: Option<StreamOnError>,
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
        let common = Common {
            job_id: self.job_id.clone(),
            speed: self.speed,
            auto_finalize: self.auto_finalize,
            auto_dismiss: self.auto_dismiss,
        };
        let mut new = running.new_job(&self.device, JobType::Stream, common)?;
        new.waits = false;
        let Some(served) = new.disk.and_then(|disk| running.disks.get(&disk)) else {
            return refuse("the disk is gone".into());
        };
        if served.vbd.info().read_only {
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
        let on_error = match self.on_error {
            None | Some(StreamOnError::Report) => OnError::Report,
            Some(StreamOnError::Ignore) => OnError::Ignore,
            Some(StreamOnError::Stop) => OnError::Stop,
            Some(StreamOnError::Enospc) => OnError::StopWhereFull,
        };
        let stream = Stream { disk, vbd, base, backing_file: self.backing_file, on_error };
        if let Err(error) = stream.check() {
            return match &self.base_node {
                Some(name) => {
                    refuse(format!("Node '{name}' is not a backing image of '{}'", self.device))
                }
                None => Err(error.into()),
            };
        }
        let base = stream.base.as_deref().map(whole).filter(|base| base.to_str().is_some());
        let named = &stream.backing_file;
        let on_error = self.on_error.map(StreamOnError::word);
        let more = json!({ "base": base, "backing-file": named, "on-error": on_error });
        new.line = running.line(&new, Self::NAME, more);
        let of = new.disk;
        let begun = running.begin_job(new, move |job| {
            stream.run(job)?;
            Ok(Box::new(move |running: &mut Running| of.iter().for_each(|of| running.retie(*of)))
                as Then)
        });
        begun.map(|()| Done {}).map_err(Refusal::from)
    }
}
