//! Images as QEMU's block layer describes them: `driver=qcow2,file.filename=PATH`, or as JSON.

use ringtap_stores::percent::encoded;
use serde_json::Value;

use super::pairs::{is_json, is_on, pairs};

/// One image, in Ringtap's words.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) path: String,
    pub(super) format: Option<String>,
    /// The IDs of the secrets that open it and what lies below.
    pub(super) secrets: Vec<String>,
    pub(super) share: bool,
    /// Nobody may write to it.
    pub(super) read_only: bool,
    /// The metadata context of an NBD export that is asked for in place of what is allocated.
    pub(super) context: Option<String>,
}

/// What says how to cache, how much to lock or what a node is called, and changes nothing here.
const NEEDLESS: [&str; 23] = [
    "node-name",
    "auto-read-only",
    "discard",
    "detect-zeroes",
    "cache.direct",
    "cache.no-flush",
    "aio",
    "locking",
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-size",
    "cache-clean-interval",
    "overlap-check",
    "overlap-check.template",
    "readahead",
    "timeout",
    "reconnect-delay",
    "open-timeout",
];

impl Node {
    /// What a word describes; none where it is a path as it is.
    pub(super) fn of(text: &str, described: bool) -> Result<Option<Node>, String> {
        let facts = if is_json(text) {
            let said = text.trim_start_matches("json:");
            let value = serde_json::from_str(&in_double_quotes(said));
            let value: Value =
                value.map_err(|error| format!("an image described in JSON: {error}"))?;
            let mut facts = vec![];
            flatten("", &value, &mut facts);
            facts
        } else if described {
            pairs(text)
        } else {
            return Ok(prefixed(text).map(|path| Node { path, ..Node::default() }));
        };
        Node::from_facts(text, &facts).map(Some)
    }

    fn from_facts(text: &str, facts: &[(String, String)]) -> Result<Node, String> {
        let mut node = Node::default();
        let (mut driver, mut protocol) = (None, None);
        let mut server = Server::default();
        let mut ceph = Ceph::default();
        for (at, (key, value)) in facts.iter().enumerate() {
            // Of what is said twice the last holds.
            if facts[at + 1..].iter().any(|(later, _)| later == key) {
                continue;
            }
            // What lies in the file is a file's own.
            let (within, own) = match key.strip_prefix("file.") {
                Some(own) => (true, own),
                None => (false, key.as_str()),
            };
            match own {
                "driver" if within => protocol = Some(value.clone()),
                "driver" => driver = Some(value.clone()),
                "filename" => node.path.clone_from(value),
                "force-share" => node.share |= is_on(value),
                _ if !within && is_secret(own) => node.secrets.push(value.clone()),
                "read-only" => node.read_only |= is_on(value),
                "x-dirty-bitmap" => node.context = Some(value.clone()),
                "encrypt.format" if value == "luks" => {}
                "url" | "host" | "port" | "path" | "export" | "type" | "server.type"
                | "server.host" | "server.port" | "server.path" => {
                    server.set(own.trim_start_matches("server."), value);
                }
                "pool" | "namespace" | "image" | "snapshot" | "conf" | "user" => {
                    ceph.set(own, value);
                }
                "sslverify" if is_on(value) => {}
                // `file=NAME`: short for its file name.
                "file" if !within => node.path.clone_from(value),
                _ if NEEDLESS.contains(&own) => {}
                _ => {
                    return Err(format!(
                        "an image that is described: {key} is not known here; named may be driver, file.driver, \
                                        file.filename, key-secret and force-share, and what NBD, HTTP and RBD need"
                    ));
                }
            }
        }
        let is_protocol =
            |name: &str| matches!(name, "file" | "host_device" | "nbd" | "http" | "https" | "rbd");
        if let Some(name) = &driver {
            if is_protocol(name) {
                // Bytes as they are, as QEMU takes it: who wrote them does not decide what they are.
                protocol = driver.replace("raw".to_owned());
            }
        }
        node.format = driver;
        if protocol.as_deref() != Some("rbd") && !ceph.is_empty() {
            return Err(format!("{text}: a pool, an image and so on are those of file.driver=rbd"));
        }
        match protocol.as_deref() {
            None => {}
            Some("rbd") if node.path.is_empty() => node.path = ceph.name()?,
            Some("rbd") if ceph.is_empty() && node.path.starts_with("rbd:") => {}
            Some("rbd") => {
                return Err(format!(
                    "{text}: of the driver rbd either a filename that begins with rbd: is named, or pool, image and what they need"
                ));
            }
            Some("file" | "host_device") => node.path = local(&node.path),
            Some("nbd") => node.path = server.nbd()?,
            Some("http" | "https") => node.path = server.url,
            Some(other) => {
                return Err(format!(
                    "{text}: the driver {other} is QEMU's own, and not read from here"
                ));
            }
        }
        if let Some(
            format
            @ ("blkdebug" | "quorum" | "blkverify" | "null-co" | "throttle" | "copy-on-read"),
        ) = node.format.as_deref()
        {
            return Err(format!(
                "{text}: the driver {format} is QEMU's own, and not read from here"
            ));
        }
        if node.path.is_empty() {
            return Err(format!("{text}: name the file, with file.filename=PATH"));
        }
        if let Some(path) = prefixed(&node.path) {
            node.path = path;
        }
        Ok(node)
    }
}

/// Whether a member names the secret of an image, or of one below it.
fn is_secret(key: &str) -> bool {
    let own = key.trim_start_matches("backing.");
    matches!(own, "key-secret" | "encrypt.key-secret")
}

/// Where an NBD server or an object is.
#[derive(Default)]
struct Server {
    url: String,
    host: String,
    port: String,
    path: String,
    export: String,
}

impl Server {
    fn set(&mut self, key: &str, value: &str) {
        let field = match key {
            "url" => &mut self.url,
            "host" => &mut self.host,
            "port" => &mut self.port,
            "path" => &mut self.path,
            "export" => &mut self.export,
            _ => return,
        };
        value.clone_into(field);
    }

    fn nbd(&self) -> Result<String, String> {
        let export = &encoded(&self.export);
        match (self.path.as_str(), self.host.as_str()) {
            ("", "") => {
                Err("an NBD server is named by file.host and file.port, or file.path".into())
            }
            ("", host) => {
                let port = if self.port.is_empty() { "" } else { ":" };
                let slash = if export.is_empty() { "" } else { "/" };
                Ok(format!("nbd://{host}{port}{}{slash}{export}", self.port))
            }
            (path, _) => {
                let slash = if export.is_empty() { "" } else { "/" };
                Ok(format!("nbd+unix://{slash}{export}?socket={}", encoded(path)))
            }
        }
    }
}

/// An image of Ceph, by what QEMU calls its parts.
#[derive(Default)]
struct Ceph {
    pool: String,
    namespace: String,
    image: String,
    snapshot: String,
    conf: String,
    user: String,
}

impl Ceph {
    fn set(&mut self, key: &str, value: &str) {
        let field = match key {
            "pool" => &mut self.pool,
            "namespace" => &mut self.namespace,
            "image" => &mut self.image,
            "snapshot" => &mut self.snapshot,
            "conf" => &mut self.conf,
            "user" => &mut self.user,
            _ => return,
        };
        value.clone_into(field);
    }

    fn is_empty(&self) -> bool {
        let Ceph { pool, namespace, image, snapshot, conf, user } = self;
        [pool, namespace, image, snapshot, conf, user].into_iter().all(String::is_empty)
    }

    fn name(&self) -> Result<String, String> {
        if self.pool.is_empty() || self.image.is_empty() {
            return Err("an image of Ceph is named by file.pool and file.image".into());
        }
        let mut name = format!("rbd:{}", escaped(&self.pool));
        for (before, part) in [
            ("/", &self.namespace),
            ("/", &self.image),
            ("@", &self.snapshot),
            (":conf=", &self.conf),
            (":id=", &self.user),
        ] {
            if !part.is_empty() {
                name += &format!("{before}{}", escaped(part));
            }
        }
        Ok(name)
    }
}

/// A part of a name of RBD, with a backslash before what would end it.
fn escaped(part: &str) -> String {
    let mut text = String::new();
    for letter in part.chars() {
        if matches!(letter, ':' | '/' | '@' | '=' | '\\') {
            text.push('\\');
        }
        text.push(letter);
    }
    text
}

/// A name with a prefix that only QEMU's programs know, without it.
fn prefixed(text: &str) -> Option<String> {
    if std::path::Path::new(text).exists() {
        return None;
    }
    if let Some(path) = text.strip_prefix("file:").filter(|path| !path.is_empty()) {
        return Some(local(path));
    }
    let server = text.strip_prefix("nbd:")?;
    if server.starts_with("//") {
        return None;
    }
    let (place, export) = server.split_once(":exportname=").unwrap_or((server, ""));
    let export = encoded(export);
    match place.strip_prefix("unix:") {
        Some(path) => Some(format!("nbd+unix:///{export}?socket={}", encoded(path))),
        None => Some(format!("nbd://{place}/{export}")),
    }
}

/// A file's name that is not taken for a server's.
fn local(path: &str) -> String {
    if path.contains(':') && !path.starts_with(['/', '.']) {
        format!("./{path}")
    } else {
        path.to_owned()
    }
}

/// JSON whose strings may be in single quotes, as QEMU's parser takes it.
fn in_double_quotes(text: &str) -> String {
    let (mut found, mut within) = (String::new(), None);
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (within, letter) {
            (None, '"' | '\'') => {
                within = Some(letter);
                found.push('"');
            }
            (Some(quote), _) if letter == quote => {
                within = None;
                found.push('"');
            }
            (Some('\''), '"') => found.push_str("\\\""),
            (Some(_), '\\') => match letters.next() {
                Some('\'') => found.push('\''),
                Some(next) => found.extend(['\\', next]),
                None => found.push('\\'),
            },
            _ => found.push(letter),
        }
    }
    found
}

/// The members of a JSON object as pairs with dots in their keys.
fn flatten(key: &str, value: &Value, facts: &mut Vec<(String, String)>) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                let inner = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                flatten(&inner, value, facts);
            }
        }
        Value::String(text) => facts.push((key.to_owned(), text.clone())),
        Value::Bool(is) => facts.push((key.to_owned(), if *is { "on" } else { "off" }.to_owned())),
        other => facts.push((key.to_owned(), other.to_string())),
    }
}
