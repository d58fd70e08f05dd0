//! Arguments of programs as the user writes them: words of a shell, and what QEMU's say of a drive.

use serde::Deserialize;

use crate::error::{Error, Result};

/// The words of a command line.
pub(super) fn words(line: &str) -> Result<Vec<String>> {
    shlex::split(line).filter(|words| !words.is_empty()).ok_or_else(|| {
        Error::Plan(format!("{line:?} is no command: a quote is not closed, or it is empty"))
    })
}

/// The arguments that define the drive `id`.
pub(super) fn qemu_words(text: &str, id: &str) -> Result<Vec<String>> {
    if !text.trim_start().starts_with('-') {
        return Ok(vec!["-drive".into(), format!("if=none,id={id},{text}")]);
    }
    if !text.contains("{id}") {
        return Err(Error::Plan(format!(
            "--qemu {text:?} names no {{id}}: write -drive if=none,id={{id}},file=…, or only the options of -drive"
        )));
    }
    Ok(words(text)?.into_iter().map(|word| word.replace("{id}", id)).collect())
}

/// What QEMU's arguments say of a drive or node.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Node {
    node_name: Option<String>,
    read_only: Option<bool>,
}

impl Node {
    /// Reads what stands behind `-drive` or `-blockdev`.
    fn read(text: &str) -> Result<Node> {
        if text.starts_with('{') {
            return serde_json::from_str(text).map_err(|error| {
                Error::Plan(format!(
                    "--qemu: {text:?} is no JSON object of a node: {error}; write it in single quotes, its words in double ones"
                ))
            });
        }
        // A doubled comma is one in a file's name.
        let text = text.replace(",,", "\0");
        let pairs = || text.split(',').filter_map(|pair| pair.split_once('='));
        let last = |names: [&str; 2]| pairs().rfind(|(key, _)| names.contains(key));
        Ok(Node {
            node_name: last(["id", "node-name"]).map(|(_, name)| name.into()),
            read_only: last(["readonly", "read-only"])
                .map(|(_, value)| ["on", "true", "yes"].contains(&value)),
        })
    }
}

/// Whether QEMU's arguments open the drive for reading alone; None where they do not say.
pub(super) fn read_only(text: &str) -> Result<Option<bool>> {
    const ID: &str = "d0";
    let words = qemu_words(text, ID)?;
    let options = ["-drive", "--drive", "-blockdev", "--blockdev"];
    let nodes = words.windows(2).filter(|pair| options.contains(&pair[0].as_str()));
    let nodes = nodes.map(|pair| Node::read(&pair[1])).collect::<Result<Vec<_>>>()?;
    // What else they open is not the disk.
    let ours = nodes.into_iter().filter(|node| node.node_name.as_deref() == Some(ID));
    Ok(ours.map(|node| node.read_only).reduce(|a, b| Some(a? && b?)).flatten())
}

/// Whether they do, or can be made to: to the options of `-drive` alone one more can be added.
pub(super) fn may_be_read_only(text: &str) -> Result<bool> {
    Ok(read_only(text)?.unwrap_or(!text.trim_start().starts_with('-')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_arguments() {
        assert_eq!(
            qemu_words("file=/x,cache=none", "d3").unwrap(),
            ["-drive", "if=none,id=d3,file=/x,cache=none"]
        );
        let whole = "-blockdev driver=file,filename='/a b',node-name={id}";
        assert_eq!(
            qemu_words(whole, "d1").unwrap(),
            ["-blockdev", "driver=file,filename=/a b,node-name=d1"]
        );
        assert!(qemu_words("-drive file=/x", "d1").is_err());
    }
}
