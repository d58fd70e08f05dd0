//! The commands there are, each with what it takes, what it answers, and what carries it out; and the events.
//! What clients are told of them is made from this.

use std::sync::mpsc::Sender;

use serde_json::{Map, Value, json};

use super::command::Command;
use super::outgoing::{RawReply, Reply, Told};
use super::refusal::Refusal;
use super::schema::Schema;
use super::shape::{Done, answer, arguments, whole, words};
use super::{
    about, active, backups, bitmaps, check, commit, copies, create, delete, exports, inspect, jobs,
    moment, nbd_server, nodes, pause, query, regions, reopen, resize, room, secrets, snapshot,
    stream, throttle, upgrade,
};
use crate::running::{Event, Running};

/// The command that must come first.
pub(super) const NEGOTIATE: &str = "qmp_capabilities";

/// One command.
pub(super) struct Entry {
    name: &'static str,
    arguments: fn(&mut Schema) -> String,
    answer: fn(&mut Schema) -> String,
    read: fn(Map<String, Value>, RawReply, &Sender<Event>),
    check: fn(Map<String, Value>) -> Result<(), Refusal>,
}

impl Entry {
    const fn of<C: Command>() -> Entry {
        use super::schema::Shape;
        let (arguments, answer) = (C::shape, C::Answer::shape);
        Entry { name: C::NAME, arguments, answer, read: read::<C>, check: check::<C> }
    }

    /// Whether arguments make sense, as far as can be told without looking at what is served.
    pub(super) fn check(&self, arguments: Map<String, Value>) -> Result<(), Refusal> {
        (self.check)(arguments)
    }

    /// Have it carried out, if its arguments make sense.
    pub(super) fn begin(
        &self,
        arguments: Map<String, Value>,
        reply: RawReply,
        inbox: &Sender<Event>,
    ) {
        (self.read)(arguments, reply, inbox);
    }
}

fn check<C: Command>(arguments: Map<String, Value>) -> Result<(), Refusal> {
    whole::<C>(arguments, "").map(drop)
}

fn read<C: Command>(arguments: Map<String, Value>, reply: RawReply, inbox: &Sender<Event>) {
    match whole::<C>(arguments, "") {
        Err(refusal) => reply.give(Err(refusal)),
        Ok(command) => {
            let reply = Reply::new(reply);
            tracing::debug!("control: {}", C::NAME);
            // Where nobody attends any more the reply says so, as it drops.
            let _ = inbox.send(Event::Do(Box::new(move |running| {
                // Dropped where the process ends, the reply says so.
                if !running.quit {
                    command.run(running, reply);
                }
            })));
        }
    }
}

words! {
    /// None is offered.
    enum Capability { "oob" OutOfBand }
}

arguments! {
    /// `qmp_capabilities`
    struct Negotiate { "enable" enable: Option<Vec<Capability>> }
}

impl Command for Negotiate {
    const NAME: &'static str = NEGOTIATE;
    type Answer = Done;

    fn run(self, _: &mut Running, reply: Reply<Done>) {
        reply.give(Ok(Done {}));
    }
}

answer! {
    /// One command.
    struct CommandInfo { "name" name: String }
}

arguments! {
    /// `query-commands`
    struct QueryCommands {}
}

impl Command for QueryCommands {
    const NAME: &'static str = "query-commands";
    type Answer = Vec<CommandInfo>;

    fn run(self, _: &mut Running, reply: Reply<Self::Answer>) {
        reply.give(Ok(names().map(|name| CommandInfo { name: name.to_owned() }).collect()));
    }
}

arguments! {
    /// `query-qmp-schema`
    struct QuerySchema {}
}

impl Command for QuerySchema {
    const NAME: &'static str = "query-qmp-schema";
    type Answer = Vec<Value>;

    fn run(self, _: &mut Running, reply: Reply<Self::Answer>) {
        reply.give(Ok(schema()));
    }
}

/// Whether a client asks for nothing that there is not.
pub(super) fn negotiate(arguments: Map<String, Value>) -> Result<Value, Refusal> {
    let wanted = whole::<Negotiate>(arguments, "")?.enable.unwrap_or_default();
    match wanted.first() {
        None => Ok(json!({})),
        Some(wanted) => Err(Refusal::new(format!("Capability {} not available", wanted.word()))),
    }
}

/// All commands.
const COMMANDS: &[Entry] = &[
    Entry::of::<Negotiate>(),
    Entry::of::<about::QueryVersion>(),
    Entry::of::<QueryCommands>(),
    Entry::of::<QuerySchema>(),
    Entry::of::<about::Quit>(),
    Entry::of::<query::QueryNodes>(),
    Entry::of::<query::QueryBlock>(),
    Entry::of::<query::QueryStats>(),
    Entry::of::<query::QueryExports>(),
    Entry::of::<inspect::Inspect>(),
    Entry::of::<check::Check>(),
    Entry::of::<nodes::Add>(),
    Entry::of::<delete::Delete>(),
    Entry::of::<create::BlockdevCreate>(),
    Entry::of::<reopen::Reopen>(),
    Entry::of::<active::SetActive>(),
    Entry::of::<resize::Resize>(),
    Entry::of::<snapshot::Snapshot>(),
    Entry::of::<snapshot::SnapshotSync>(),
    Entry::of::<moment::Transaction>(),
    Entry::of::<secrets::AddObject>(),
    Entry::of::<secrets::DeleteObject>(),
    Entry::of::<throttle::SetProperty>(),
    Entry::of::<throttle::GetProperty>(),
    Entry::of::<throttle::Throttle>(),
    Entry::of::<commit::BlockCommit>(),
    Entry::of::<stream::BlockStream>(),
    Entry::of::<copies::BlockdevMirror>(),
    Entry::of::<backups::BlockdevBackup>(),
    Entry::of::<bitmaps::AddBitmap>(),
    Entry::of::<bitmaps::RemoveBitmap>(),
    Entry::of::<bitmaps::ClearBitmap>(),
    Entry::of::<bitmaps::EnableBitmap>(),
    Entry::of::<bitmaps::DisableBitmap>(),
    Entry::of::<bitmaps::MergeBitmaps>(),
    Entry::of::<regions::BitmapRegions>(),
    Entry::of::<regions::MarkBitmap>(),
    Entry::of::<jobs::QueryJobs>(),
    Entry::of::<jobs::QueryBlockJobs>(),
    Entry::of::<jobs::JobCancel>(),
    Entry::of::<jobs::JobPause>(),
    Entry::of::<jobs::JobResume>(),
    Entry::of::<jobs::JobComplete>(),
    Entry::of::<jobs::JobFinalize>(),
    Entry::of::<jobs::JobDismiss>(),
    Entry::of::<jobs::BlockJobCancel>(),
    Entry::of::<jobs::BlockJobPause>(),
    Entry::of::<jobs::BlockJobResume>(),
    Entry::of::<jobs::BlockJobComplete>(),
    Entry::of::<jobs::BlockJobFinalize>(),
    Entry::of::<jobs::BlockJobDismiss>(),
    Entry::of::<jobs::SetSpeed>(),
    Entry::of::<pause::Pause>(),
    Entry::of::<room::Resume>(),
    Entry::of::<exports::AddExport>(),
    Entry::of::<exports::DeleteExport>(),
    Entry::of::<nbd_server::StartNbd>(),
    Entry::of::<nbd_server::StopNbd>(),
    Entry::of::<upgrade::Upgrade>(),
];

/// An event that may be told.
struct EventEntry {
    name: &'static str,
    data: fn(&mut Schema) -> String,
}

impl EventEntry {
    const fn of<E: Told>() -> EventEntry {
        EventEntry { name: E::NAME, data: E::shape }
    }
}

/// All events.
const EVENTS: &[EventEntry] = &[
    EventEntry::of::<query::ExportDeleted>(),
    EventEntry::of::<snapshot::SnapshotTaken>(),
    EventEntry::of::<jobs::StatusChange>(),
    EventEntry::of::<jobs::BlockJobReady>(),
    EventEntry::of::<jobs::BlockJobError>(),
    EventEntry::of::<jobs::JobBehind>(),
    EventEntry::of::<jobs::BlockJobPending>(),
    EventEntry::of::<jobs::BlockJobCompleted>(),
    EventEntry::of::<jobs::BlockJobCancelled>(),
    EventEntry::of::<room::BlockIoError>(),
    EventEntry::of::<pause::Paused>(),
    EventEntry::of::<pause::Resumed>(),
];

pub(super) fn find(name: &str) -> Option<&'static Entry> {
    COMMANDS.iter().find(|entry| entry.name == name)
}

/// The names of all commands.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    COMMANDS.iter().map(|entry| entry.name)
}

/// All commands and events, and the types that they name.
pub(super) fn schema() -> Vec<Value> {
    let mut schema = Schema::default();
    let commands = COMMANDS.iter().map(|entry| {
        let (arguments, answer) = ((entry.arguments)(&mut schema), (entry.answer)(&mut schema));
        json!({ "name": entry.name, "meta-type": "command", "arg-type": arguments, "ret-type": answer })
    });
    let mut all: Vec<Value> = commands.collect();
    all.extend(EVENTS.iter().map(|entry| {
        json!({ "name": entry.name, "meta-type": "event", "arg-type": (entry.data)(&mut schema) })
    }));
    all.extend(schema.into_values());
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_schema_names_nothing_that_it_does_not_explain() {
        let all = schema();
        let names: HashSet<&str> = all.iter().filter_map(|one| one["name"].as_str()).collect();
        assert_eq!(names.len(), all.len(), "each name once");
        let known = |value: &Value| {
            assert!(value.as_str().is_some_and(|name| names.contains(name)), "{value}");
        };
        for one in &all {
            for key in ["arg-type", "ret-type", "element-type"] {
                one.get(key).into_iter().for_each(known);
            }
            for key in ["members", "variants"] {
                let parts = one.get(key).and_then(Value::as_array);
                parts.into_iter().flatten().for_each(|part| known(&part["type"]));
            }
        }
    }
}
