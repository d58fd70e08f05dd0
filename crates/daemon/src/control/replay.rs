//! Commands that the server itself has carried out: exports that are written down, when it begins.

use std::sync::mpsc::Receiver;

use serde_json::{Map, Value, json};

use super::outgoing::Outgoing;
use super::table;
use crate::Address;
use crate::ids::DiskId;
use crate::running::{Event, Running};
use crate::threads::contained;

/// Show a disk as is written down of it; why not, for each that is not.
pub(crate) fn replay(running: &mut Running, inbox: &Receiver<Event>, id: DiskId) -> Vec<String> {
    let Some(served) = running.disks.get_mut(&id) else { return vec![] };
    let node = served.node().to_owned();
    // Each that comes is noted again.
    let exports = std::mem::take(&mut served.disk.keeping.exports);
    let mut wrong = vec![];
    for export in exports {
        if let Err(why) = show(running, inbox, &node, &export) {
            wrong.push(format!("{node}: the export {}: {why}", export["id"]));
            if let Some(served) = running.disks.get_mut(&id) {
                served.disk.keeping.exports.push(export);
            }
        }
    }
    wrong
}

fn show(
    running: &mut Running,
    inbox: &Receiver<Event>,
    node: &str,
    export: &Value,
) -> Result<(), String> {
    let mut arguments = export.as_object().cloned().ok_or("it is no table")?;
    let creds = arguments.remove("tls-creds");
    let most = arguments.remove("max-connections");
    if let Some(server) = arguments.remove("server") {
        let address = server.as_str().ok_or("server: write an address")?;
        let addr = match Address::nbd(address)? {
            Address::Unix(path) => {
                json!({ "type": "unix", "data": { "path": path.to_string_lossy() } })
            }
            Address::Tcp { host, port } => {
                json!({ "type": "inet", "data": { "host": host, "port": port.to_string() } })
            }
            Address::Systemd(_) => return Err("server: write unix:PATH or tcp:HOST:PORT".into()),
        };
        if !running.has_nbd_server() {
            let mut start = Map::from_iter([("addr".to_owned(), addr)]);
            if let Some(creds) = creds {
                // Never without them: who connects would be served in the clear.
                start.insert("tls-creds".to_owned(), add_creds(running, inbox, creds)?);
            }
            start.extend(most.map(|most| ("max-connections".to_owned(), most)));
            carry_out(running, inbox, "nbd-server-start", start)?;
        }
    }
    arguments.insert("node-name".to_owned(), node.into());
    carry_out(running, inbox, "block-export-add", arguments)
}

/// Have the certificates of an NBD server that are written down of its exports; their id.
fn add_creds(
    running: &mut Running,
    inbox: &Receiver<Event>,
    creds: Value,
) -> Result<Value, String> {
    let Value::Object(mut arguments) = creds else {
        return Err("tls-creds: it is no table".into());
    };
    let id = arguments.get("id").cloned().ok_or("tls-creds: there is no id")?;
    if !running.tls_creds.contains_key(id.as_str().unwrap_or_default()) {
        arguments.insert("qom-type".to_owned(), "tls-creds-x509".into());
        arguments.insert("endpoint".to_owned(), "server".into());
        carry_out(running, inbox, "object-add", arguments)?;
    }
    Ok(id)
}

/// Have a command carried out, and wait for its reply; what else happens meanwhile is seen to later.
pub(super) fn carry_out(
    running: &mut Running,
    inbox: &Receiver<Event>,
    command: &str,
    arguments: Map<String, Value>,
) -> Result<(), String> {
    let out = Outgoing::of_server().map_err(|error| error.to_string())?;
    let entry = table::find(command).ok_or("there is no such command")?;
    entry.begin(arguments, out.begin(None), &running.events);
    let mut later = vec![];
    while out.state().under_way.is_some() {
        match inbox.recv() {
            Ok(Event::Do(what)) => _ = contained(|| what(running)),
            Ok(other) => later.push(other),
            Err(_) => break,
        }
    }
    // Whoever waits for them attends to this inbox.
    later.into_iter().for_each(|event| _ = running.events.send(event));
    let bytes = std::mem::take(&mut out.state().bytes);
    let said: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    match said.get("error") {
        None => Ok(()),
        Some(error) => Err(error["desc"].as_str().unwrap_or("it failed").to_owned()),
    }
}
