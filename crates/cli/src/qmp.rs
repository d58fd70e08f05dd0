//! A client of the control socket.

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use serde_json::de::IoRead;
use serde_json::{Deserializer, StreamDeserializer, Value, json};

/// What a server of a former version does not know and can do without, and what is otherwise there, if that is less.
const DISPENSABLE: [(&str, &str); 3] = [
    ("__ringtap_node-name", ""),
    (
        "__ringtap_persist",
        "where it keeps its disks (--persist), the next server opens what this writes to, too, until ringtap disk remove \
         takes that away",
    ),
    (
        "__ringtap_checkpoint",
        "where the backup fails once this command has gone, the checkpoint stays, and no backup is to go on from it: \
         take it away by ringtap disk checkpoint remove",
    ),
];

/// Which of them a server refuses.
fn dispensable(refusal: &str) -> Option<(&'static str, &'static str)> {
    let name = refusal.strip_prefix("Parameter '")?.strip_suffix("' is unexpected")?;
    let name = name.rsplit('.').next()?;
    DISPENSABLE.into_iter().find(|(key, _)| *key == name)
}

/// Leave out a key, wherever it stands; whether it was there.
fn leave_out(value: &mut Value, key: &str) -> bool {
    let mut found = false;
    match value {
        Value::Object(members) => {
            found = members.remove(key).is_some();
            members.values_mut().for_each(|value| found |= leave_out(value, key));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| found |= leave_out(value, key)),
        _ => {}
    }
    found
}

/// A connection that has negotiated.
pub(crate) struct Qmp {
    path: PathBuf,
    /// Events that came before replies.
    events: Vec<Value>,
    stream: UnixStream,
    said: StreamDeserializer<'static, IoRead<BufReader<UnixStream>>, Value>,
}

impl Qmp {
    /// Connect.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Qmp> {
        let hint = "is `ringtap daemon`, or `ringtap serve --control`, running there?";
        let stream = UnixStream::connect(path)
            .with_context(|| format!("cannot connect to {}, {hint}", path.display()))?;
        let reader = BufReader::new(stream.try_clone()?);
        let said = Deserializer::from_reader(reader).into_iter();
        let mut qmp = Qmp { path: path.to_owned(), events: vec![], stream, said };
        if qmp.hear()?.get("QMP").is_none() {
            bail!("who listens on {} does not speak QMP", path.display());
        }
        qmp.call("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn hear(&mut self) -> anyhow::Result<Value> {
        let said = self.said.next().ok_or_else(|| anyhow!("the server has closed the connection"));
        said.and_then(|said| Ok(said?)).with_context(|| format!("at {}", self.path.display()))
    }

    /// What events of that name have told so far.
    pub(crate) fn events(&self, name: &str) -> impl Iterator<Item = &Value> {
        self.events.iter().filter(move |event| event["event"] == name).map(|event| &event["data"])
    }

    /// Have a command carried out; what it returns. Of a server of a former version it is asked without what that does not
    /// know, where that is told.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let mut arguments = arguments;
        loop {
            // Nothing was done where a parameter was refused.
            let end = self.call_once(command, &arguments);
            let refused = end.as_ref().err().and_then(|error| dispensable(&error.to_string()));
            match refused {
                Some((key, told)) if leave_out(&mut arguments, key) => {
                    if !told.is_empty() {
                        tracing::warn!(
                            "the server is older than this command and does not know {key}: {told}"
                        );
                    }
                }
                _ => return end,
            }
        }
    }

    fn call_once(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        self.stream
            .write_all(request.to_string().as_bytes())
            .with_context(|| format!("cannot send to {}", self.path.display()))?;
        loop {
            let mut said = self.hear()?;
            if let Some(error) = said.get("error") {
                bail!("{}", error["desc"].as_str().unwrap_or("the server refuses"));
            }
            if let Some(answer) = said.get_mut("return") {
                return Ok(answer.take());
            }
            self.events.push(said);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_older_server_does_not_know_is_left_out_where_it_may_be() {
        let of = |name: &str| dispensable(&format!("Parameter '{name}' is unexpected"));
        assert_eq!(of("__ringtap_persist").expect("it may").0, "__ringtap_persist");
        assert_eq!(
            of("actions.1.data.__ringtap_checkpoint").expect("it may").0,
            "__ringtap_checkpoint"
        );
        assert!(of("__ringtap_scratch").is_none());
        assert!(dispensable("Duplicate nodes with node-name='__ringtap_persist'").is_none());
        let mut all = json!({ "actions": [{ "a": 1 }, { "data": { "k": 1, "l": 2 } }] });
        assert!(leave_out(&mut all, "k") && !leave_out(&mut all, "k"));
        assert_eq!(all, json!({ "actions": [{ "a": 1 }, { "data": { "l": 2 } }] }));
    }
}
