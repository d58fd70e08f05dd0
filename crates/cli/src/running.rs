//! What a running server is asked for by several verbs.

use std::path::Path;

use anyhow::{Context, bail};
use ringtap_daemon::Error;
use ringtap_image::{Format, SecretSource, is_store};
use serde_json::{Value, json};

use crate::qmp::Qmp;

/// The disks with their exports, as the server tells of them; or one.
pub(crate) fn found(qmp: &mut Qmp, node: Option<&str>) -> anyhow::Result<Vec<Value>> {
    let asked = node.map_or(json!({}), |node| json!({ "__ringtap_node-name": node }));
    let mut nodes = qmp.call("query-named-block-nodes", asked.clone())?;
    let exports = qmp.call("query-block-exports", asked)?;
    let Some(nodes) = nodes.as_array_mut() else { bail!("the server tells of no disks") };
    nodes.retain(|one| node.is_none_or(|node| one["node-name"] == node));
    for one in nodes.iter_mut() {
        let name = one["node-name"].clone();
        let of = elements(&exports).filter(|export| export["node-name"] == name);
        one["exports"] = of.cloned().collect();
    }
    match (nodes.is_empty(), node) {
        (true, Some(node)) => bail!("no disk is called {node:?}: see `ringtap disk list`"),
        _ => Ok(std::mem::take(nodes)),
    }
}

/// A path that means the same to the server, which may have another folder.
pub(crate) fn absolute(path: &Path) -> anyhow::Result<String> {
    if is_store(path) {
        return Ok(path.display().to_string());
    }
    let path = std::path::absolute(path).with_context(|| format!("{}", path.display()))?;
    let text = path.to_str().map(str::to_owned);
    text.with_context(|| format!("{}: QMP takes only paths in UTF-8", path.display()))
}

/// Say what opens an image.
pub(crate) fn opened_by(
    disk: &mut Value,
    format: Format,
    node: &str,
    secret: Option<&SecretSource>,
) -> anyhow::Result<()> {
    let id = secret_id(node);
    match (format, secret) {
        (Format::Luks, Some(_)) => disk["key-secret"] = id.into(),
        (Format::Qcow2, Some(_)) => {
            disk["encrypt"] = json!({ "format": "luks", "key-secret": id });
        }
        (Format::Luks, None) => {
            let why = "an encrypted image wants its secret: --secret file:PATH, of a job's target --target-secret";
            return Err(Error::Usage(why.into()).into());
        }
        (other, Some(_)) => {
            let why = format!("a secret opens luks and qcow2 images, and this one is {other}");
            return Err(Error::Usage(why).into());
        }
        (_, None) => {}
    }
    Ok(())
}

fn secret_id(node: &str) -> String {
    format!("ringtap-disk-{node}")
}

/// Do something while the server knows a secret.
pub(crate) fn with_secret(
    qmp: &mut Qmp,
    node: &str,
    secret: Option<&SecretSource>,
    work: impl FnOnce(&mut Qmp) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let Some(source) = secret else { return work(qmp) };
    let SecretSource::File(path) = source else {
        return Err(Error::Usage(format!("{source}: the server takes file:PATH alone")).into());
    };
    let id = secret_id(node);
    let file = absolute(path)?;
    qmp.call("object-add", json!({ "qom-type": "secret", "id": id, "file": file }))?;
    let done = work(qmp);
    qmp.call("object-del", json!({ "id": id }))?;
    done
}

pub(crate) fn elements(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A text, or none.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
