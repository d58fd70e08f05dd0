//! Disks described by files in a folder, one a file: the options of `ringtap serve` as keys of TOML.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use clap::{Args, Command, FromArgMatches};
use ringtap_daemon::{Described, Error, Folder, ReadFile};
use serde_json::{Map, Number, Value};
use toml::de::{DeTable, DeValue};

use crate::limits::NamedGroup;
use crate::names;
use crate::serve::{OF_DISK, ServeArgs, config};

/// The key of the image, which has no option.
const IMAGE: &str = "image";
/// The table of an export that a client of the control socket wants; its keys are those of `block-export-add`.
const EXPORT: &str = "export";
/// The table of a group of disks with limits.
const GROUP: &str = "throttle-group";
/// A key less like a known one than this is like none.
const ALIKE: f64 = 0.75;

/// Something that is wrong, and where in the text.
type Wrong = (usize, String);

/// The folder, with what reads its files.
pub(crate) fn folder(path: PathBuf, keep: bool) -> Folder {
    Folder { path, keep, read: reader() }
}

/// What reads such files.
pub(crate) fn reader() -> ReadFile {
    let reader = Reader::new();
    Arc::new(move |file| reader.read(file))
}

struct Reader {
    command: Mutex<Command>,
    /// Options of a disk, and whether each is a flag.
    keys: Vec<(String, bool)>,
}

impl Reader {
    fn new() -> Reader {
        let command = ServeArgs::augment_args(Command::new("serve").no_binary_name(true))
            .mut_arg("disk", |arg| arg.value_parser(names::image()));
        let of_disk = command
            .get_arguments()
            .filter(|arg| arg.get_help_heading() == Some(OF_DISK) && !arg.is_hide_set());
        let keys = of_disk.filter_map(|arg| {
            let least = arg.get_num_args().map_or(1, |range| range.min_values());
            Some((arg.get_long()?.to_owned(), least == 0))
        });
        let keys = keys.collect();
        Reader { command: Mutex::new(command), keys }
    }

    fn read(&self, file: &Path) -> Result<Described, String> {
        let shown = file.display();
        let text = std::fs::read_to_string(file).map_err(|error| format!("{shown}: {error}"))?;
        self.describe(file, &text).map_err(|(at, what)| {
            let line = text[..at.min(text.len())].matches('\n').count() + 1;
            format!("{shown}:{line}: {what}")
        })
    }

    fn describe(&self, file: &Path, text: &str) -> Result<Described, Wrong> {
        let table = DeTable::parse(text).map_err(|error| {
            (error.span().map_or(0, |span| span.start), error.message().to_owned())
        })?;
        let mut described = Described::default();
        let (mut image, mut words, mut exports) = (None, vec![], vec![]);
        for (key, value) in table.get_ref() {
            let (at, name, of) = (key.span().start, key.get_ref().as_ref(), value.get_ref());
            let placed = |what: String| (at, what);
            match name {
                IMAGE => {
                    let path = of.as_str().filter(|path| !path.is_empty());
                    let path = path.ok_or_else(|| placed(format!("{name}: write its path")))?;
                    image = Some((at, path.to_owned()));
                }
                EXPORT => {
                    for (place, table) in tables(of).ok_or_else(|| placed(form(name)))? {
                        let export = json(table).map_err(|what| (place, what))?;
                        exports.push(Value::from(export));
                    }
                }
                GROUP => {
                    for (place, table) in tables(of).ok_or_else(|| placed(form(name)))? {
                        let NamedGroup(name, limits) =
                            group(table).map_err(|what| (place, format!("{GROUP}: {what}")))?;
                        described.groups.push((name, limits));
                    }
                }
                _ => {
                    let known = self.keys.iter().find(|(key, _)| key == name);
                    let flag = known.ok_or_else(|| placed(self.unknown(name)))?.1;
                    let options = options(name, of, flag).map_err(placed)?;
                    words.push((at, options));
                }
            }
        }
        let Some((at, image)) = image else {
            return match words.first() {
                None if exports.is_empty() => Ok(described),
                first => {
                    Err((first.map_or(0, |(at, _)| *at), format!("there is no {IMAGE} = \"PATH\"")))
                }
            };
        };
        let all = words.iter().flat_map(|(_, options)| options.iter().cloned());
        let mut disk = self.disk(&image, all.collect()).map_err(|what| {
            // Each alone says where it is.
            let wrong = |options: &Vec<String>| self.disk(&image, options.clone()).err();
            let found = words.iter().find_map(|(at, options)| Some((*at, wrong(options)?)));
            found.unwrap_or((at, what))
        })?;
        if disk.node_name.is_none() && disk.name.is_empty() {
            disk.node_name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        }
        disk.keeping.exports = exports;
        described.disk = Some(disk);
        Ok(described)
    }

    fn disk(&self, image: &str, options: Vec<String>) -> Result<ringtap_daemon::Disk, String> {
        // An image that looks like an option is one all the same; its own options follow it.
        let image = if image.starts_with('-') { format!("./{image}") } else { image.to_owned() };
        let words = std::iter::once(image).chain(options);
        let mut command = self.command.lock().unwrap_or_else(PoisonError::into_inner);
        let matches = command.try_get_matches_from_mut(words).map_err(|error| plain(&error))?;
        drop(command);
        let args = ServeArgs::from_arg_matches(&matches).map_err(|error| plain(&error))?;
        let config = config(args, &matches).map_err(|error: Error| error.to_string())?;
        config.disks.into_iter().next().ok_or_else(|| "there is no disk".to_owned())
    }

    fn unknown(&self, name: &str) -> String {
        let own = [IMAGE, EXPORT, GROUP];
        let all = self.keys.iter().map(|(key, _)| key.as_str()).chain(own);
        let near = all.map(|key| (strsim::jaro_winkler(key, name), key));
        let nearest = near.max_by(|one, other| one.0.total_cmp(&other.0));
        match nearest.filter(|(alike, _)| *alike >= ALIKE) {
            Some((_, key)) => format!("there is no key {name}: did you mean {key}?"),
            None => format!(
                "there is no key {name}: the keys are {IMAGE} and the options of a disk of ringtap serve"
            ),
        }
    }
}

fn form(name: &str) -> String {
    format!("write a table headed [[{name}]]")
}

/// The tables of a list, and where each begins.
fn tables<'a, 'i>(of: &'a DeValue<'i>) -> Option<Vec<(usize, &'a DeTable<'i>)>> {
    let one = |value: &'a toml::Spanned<DeValue<'i>>| {
        Some((value.span().start, value.get_ref().as_table()?))
    };
    of.as_array()?.iter().map(one).collect()
}

/// What clap says, in a line.
fn plain(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    let text = line.trim_start_matches("error: ").to_owned();
    // Of a value that is no value of its option the rest says what is one.
    let possible = error.to_string();
    let possible = possible.lines().map(str::trim).find(|line| line.starts_with("[possible"));
    possible.map_or(text.clone(), |possible| format!("{text} {possible}"))
}

/// A key as options of the command line.
fn options(name: &str, of: &DeValue<'_>, flag: bool) -> Result<Vec<String>, String> {
    let one = |value: &DeValue<'_>| -> Result<String, String> {
        match value {
            DeValue::Boolean(true) if flag => Ok(format!("--{name}")),
            DeValue::Boolean(false) if flag && name != "ublk" => Ok(format!("--{name}=false")),
            DeValue::String(text) => Ok(format!("--{name}={text}")),
            DeValue::Integer(number) => Ok(format!("--{name}={}", number.as_str())),
            _ => Err(format!("{name}: write a string, a number, true or a list of strings")),
        }
    };
    match of {
        DeValue::Boolean(false) if name == "ublk" => Ok(vec![]),
        DeValue::Array(all) => all.iter().map(|value| one(value.get_ref())).collect(),
        value => Ok(vec![one(value)?]),
    }
}

/// A group as it is written on the command line, read.
fn group(table: &DeTable<'_>) -> Result<NamedGroup, String> {
    let text = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) => Ok(number.as_str().to_owned()),
        _ => Err("write strings and numbers".to_owned()),
    };
    let mut name = None;
    let mut parts = vec![];
    for (key, value) in table {
        match key.get_ref().as_ref() {
            "name" => name = Some(text(value.get_ref())?),
            key => parts.push(format!("{key}={}", text(value.get_ref())?)),
        }
    }
    let name = name.ok_or("there is no name = \"NAME\"")?;
    std::iter::once(name).chain(parts).collect::<Vec<_>>().join(",").parse()
}

/// A table as an object of the control socket.
fn json(table: &DeTable<'_>) -> Result<Map<String, Value>, String> {
    let of = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let key: &std::borrow::Cow<'_, str> = key.get_ref();
        Ok((key.to_string(), json_of(key, value.get_ref())?))
    };
    table.iter().map(of).collect()
}

fn json_of(key: &str, value: &DeValue<'_>) -> Result<Value, String> {
    Ok(match value {
        DeValue::String(text) => text.as_ref().into(),
        DeValue::Boolean(is) => (*is).into(),
        DeValue::Integer(number) => {
            let parsed = number.as_str().parse::<Number>();
            parsed.map_err(|_| format!("{key}: {} is no number", number.as_str()))?.into()
        }
        DeValue::Array(all) => {
            let all = all.iter().map(|value| json_of(key, value.get_ref()));
            all.collect::<Result<Vec<Value>, String>>()?.into()
        }
        DeValue::Table(table) => json(table)?.into(),
        _ => {
            return Err(format!("{key}: write a string, a number, true, false, a list or a table"));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_daemon::Address;
    use ringtap_image::{CacheMode, Format};

    fn read(text: &str) -> Result<Described, String> {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("vm1.toml");
        std::fs::write(&path, text).expect("a file");
        let read = Reader::new().read(&path);
        read.map_err(|what| what.replace(&format!("{}/", dir.path().display()), ""))
    }

    #[test]
    fn a_file_says_what_the_command_line_would() {
        let described = read(
            "# A disk.\nimage = '/srv/a b.qcow2'\nformat = \"qcow2\"\ncache = 'writeback'\nqueues = 4\n\
             read-only = false\nvhost-user = '/run/a.sock'\nnbd = ['unix:/run/b', 'tcp:h:1']\niops = 1000\nbps = '10M:20M:3'\n\
             ublk = true\non-error = 'report'\ngroup = 'g'\nweight = 200\nl2-cache-size = '32M'\n\
             [[throttle-group]]\nname = 'g'\niops = 500\nweight = 50\n[[export]]\nid = 'e'\ntype = 'nbd'\nwritable = true\n",
        );
        let described = described.expect("a disk");
        let disk = described.disk.expect("a disk");
        assert_eq!(disk.path, Path::new("/srv/a b.qcow2"));
        assert_eq!((disk.options.format, disk.queues), (Some(Format::Qcow2), 4));
        assert_eq!((disk.options.cache, disk.options.read_only), (CacheMode::Writeback, false));
        assert_eq!((disk.node_name.as_deref(), disk.ublk), (Some("vm1"), Some(None)));
        assert_eq!(disk.nbd[0], Address::Unix("/run/b".into()));
        assert_eq!((disk.limits.iops.total.average, disk.limits.bps.total.burst), (1000, 20 << 20));
        assert_eq!(described.groups[0].1.limits.iops.total.average, 500);
        assert_eq!((disk.share.weight, described.groups[0].1.share.weight), (200, 50));
        assert_eq!(disk.keeping.exports[0]["writable"], true);
        let groups = read("[[throttle-group]]\nname = 'g'\n").expect("a group");
        assert!(groups.disk.is_none() && groups.groups.len() == 1);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (text, said) in [
            (
                "image = 'a'\nfromat = 'raw'\n",
                "vm1.toml:2: there is no key fromat: did you mean format?",
            ),
            ("image = 'a'\n\nzzz = 1\n", "vm1.toml:3: there is no key zzz: the keys are"),
            ("image = 'a'\nformat = 'raww'\n", "vm1.toml:2: invalid value 'raww'"),
            ("image = 'a'\ncache = 'none'\nqueues = 'many'\n", "vm1.toml:3: invalid value 'many'"),
            ("image = 'a'\nread-only = 1.5\n", "vm1.toml:2: read-only: write"),
            ("image = 'a'\nqueues = 2\n", "vm1.toml:2: a: --queues"),
            ("format = 'raw'\n", "vm1.toml:1: there is no image"),
            ("image = 'a\n", "vm1.toml:1: "),
            ("image = 'a'\nexport = 1\n", "vm1.toml:2: write a table headed [[export]]"),
            (
                "image = 'a'\n[[throttle-group]]\niops = 5\n",
                "vm1.toml:2: throttle-group: there is no name",
            ),
            (
                "image = 'a'\nsecret = 'file:/nonexistent'\n",
                "vm1.toml:2: a: cannot read the secret",
            ),
        ] {
            let what = read(text).expect_err(text);
            assert!(what.starts_with(said), "{text}: {what}");
        }
    }
}
