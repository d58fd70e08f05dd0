//! A client of the control socket.

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use serde_json::de::IoRead;
use serde_json::{Deserializer, StreamDeserializer, Value, json};

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

    /// Have a command carried out; what it returns.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
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
