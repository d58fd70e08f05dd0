//! `block-stream`: what lies below a disk's topmost image, brought into it.

use ringtap_vbd::OnError;
use serde_json::json;

use super::copies::Common;
use super::jobs::JobType;
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::resume::whole;
use super::shape::{Done, arguments, words};
use super::table::Command;
use crate::running::{Running, Then};
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
    fn begin(self, running: &mut Running) -> Result<Done, Refusal> {
        let refuse = |text: String| Err(Refusal::new(text));
        if self.backing_file.is_some() && self.base.is_none() && self.base_node.is_none() {
            return refuse("backing file specified, but streaming the entire chain".into());
        }
        let common = Common {
            job_id: self.job_id,
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
        let base = running.base(self.base, self.base_node.as_deref())?;
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
