//! Names of images, as QEMU writes them: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][:KEY=VALUE]…`, with a backslash before a `:`,
//! `/`, `@`, `=` or backslash that belongs to a part.

use std::fmt;
use std::path::PathBuf;

/// Of what is said of every image in its name.
const SHAPE: &str = "write rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][:conf=FILE][:id=USER]";

/// An image of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The pool.
    pub pool: String,
    /// The namespace in it; empty: the pool's own.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// A snapshot of it.
    pub snapshot: Option<String>,
    /// Which cluster, and as whom.
    pub cluster: ClusterName,
    text: String,
}

/// How a cluster is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterName {
    /// Its configuration; none: that of CEPH_CONF, else where Ceph looks.
    pub conf: Option<String>,
    /// The user, without `client.`; none: that of CEPH_ARGS, else admin.
    pub id: Option<String>,
    /// Options of Ceph's configuration.
    pub options: Vec<(String, String)>,
}

/// The files that opening any image reads.
pub(crate) fn usual_files() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/ceph"), "/usr/share/ceph".into()];
    files.extend(std::env::var_os("CEPH_CONF").map(PathBuf::from));
    files.extend(std::env::var_os("CEPH_KEYRING").map(PathBuf::from));
    // Names of hosts.
    let names = ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf"];
    files.extend(names.map(PathBuf::from));
    files
}

/// A name's text up to the first of `ends` that no backslash stands before, without backslashes; and what follows, from
/// that character on.
fn part<'a>(text: &'a str, ends: &[char]) -> (String, &'a str) {
    let mut out = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => out.extend(chars.next().map(|(_, char)| char)),
            char if ends.contains(&char) => return (out, &text[at..]),
            char => out.push(char),
        }
    }
    (out, "")
}

impl Name {
    /// Read one; else what is wrong with it.
    pub fn parse(text: &str) -> Result<Name, String> {
        let rest =
            text.strip_prefix("rbd:").ok_or_else(|| format!("it is no name of RBD: {SHAPE}"))?;
        if rest.starts_with("//") {
            return Err(format!("it is not written as a URI: {SHAPE}"));
        }
        let (pool, rest) = part(rest, &['/', '@', ':']);
        let rest = rest.strip_prefix('/').ok_or_else(|| format!("the pool is missing: {SHAPE}"))?;
        let (first, rest) = part(rest, &['/', '@', ':']);
        let (namespace, image, rest) = match rest.strip_prefix('/') {
            Some(rest) => {
                let (image, rest) = part(rest, &['/', '@', ':']);
                (first, image, rest)
            }
            None => (String::new(), first, rest),
        };
        let (snapshot, rest) = match rest.strip_prefix('@') {
            Some(rest) => {
                let (snapshot, rest) = part(rest, &[':']);
                (Some(snapshot), rest)
            }
            None => (None, rest),
        };
        let empty = pool.is_empty() || image.is_empty() || snapshot.as_deref() == Some("");
        if empty || rest.starts_with(['/', '@']) {
            return Err(format!("a part of it is empty, or one too many: {SHAPE}"));
        }
        let cluster = ClusterName::parse(rest)?;
        let text = text.to_owned();
        Ok(Name { pool, namespace, image, snapshot, cluster, text })
    }

    /// The files that opening it reads, as far as its name and the environment say: the configuration, and the folder
    /// with it, where keyrings are.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = self.cluster.conf.iter().map(PathBuf::from).collect();
        let keyring = self.cluster.options.iter().filter(|(key, _)| key == "keyring");
        files.extend(keyring.map(|(_, value)| PathBuf::from(value)));
        files
    }

    /// As Ceph's own tools call it.
    pub(crate) fn spec(&self) -> String {
        let namespace = if self.namespace.is_empty() { "" } else { "/" };
        let Name { pool, namespace: space, image, .. } = self;
        format!("{pool}{namespace}{space}/{image}")
    }
}

impl ClusterName {
    fn parse(mut rest: &str) -> Result<ClusterName, String> {
        let mut cluster = ClusterName::default();
        while let Some(after) = rest.strip_prefix(':') {
            let (key, value) = part(after, &['=', ':']);
            let Some(value) = value.strip_prefix('=') else {
                return Err(format!("{key} has no value: {SHAPE}"));
            };
            let (value, next) = part(value, &[':']);
            rest = next;
            match key.as_str() {
                "conf" => cluster.conf = Some(value),
                "id" => cluster.id = Some(value),
                "key" => {
                    return Err(
                        "a key stands in no name, where others see it: put it into a file, and name \
                                that by :keyring=FILE or in Ceph's configuration"
                            .into(),
                    );
                }
                _ => cluster.options.push((key, value)),
            }
        }
        Ok(cluster)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_qemu_writes_them() {
        for (text, pool, namespace, image, snapshot) in [
            ("rbd:rbd/vm", "rbd", "", "vm", None),
            ("rbd:rbd/vm@s1", "rbd", "", "vm", Some("s1")),
            ("rbd:p/ns/vm@s1:id=me", "p", "ns", "vm", Some("s1")),
            (r"rbd:a\/b/c\@d\:e@f@g", "a/b", "", "c@d:e", Some("f@g")),
        ] {
            let name = Name::parse(text).expect(text);
            let found = (&*name.pool, &*name.namespace, &*name.image, name.snapshot.as_deref());
            assert_eq!(found, (pool, namespace, image, snapshot), "{text}");
            assert_eq!(name.to_string(), text);
        }
        let name = Name::parse(r"rbd:p/i:conf=/a\:b.conf:id=me:mon_host=h\:1=2").expect("a name");
        assert_eq!(name.cluster.conf.as_deref(), Some("/a:b.conf"));
        assert_eq!(name.cluster.id.as_deref(), Some("me"));
        assert_eq!(name.cluster.options, [("mon_host".to_owned(), "h:1=2".to_owned())]);
        assert_eq!(Name::parse("rbd:p/ns/vm").expect("a name").spec(), "p/ns/vm");
    }

    #[test]
    fn what_is_no_name_is_told() {
        for (text, said) in [
            ("rbd:vm", "pool is missing"),
            ("rbd:/vm", "empty"),
            ("rbd:p/", "empty"),
            ("rbd:p/i@", "empty"),
            ("rbd:p/a/b/c", "one too many"),
            ("rbd://p/i", "URI"),
            ("rbd:p/i:conf", "no value"),
            ("rbd:p/i:key=AQ==", "keyring"),
            ("nbd://x", "no name of RBD"),
        ] {
            let error = Name::parse(text).expect_err(text);
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
