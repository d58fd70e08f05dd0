//! Names on the command line: formats, cache modes, sizes, options of formats.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::{
    OsStringValueParser, PathBufValueParser, PossibleValue, PossibleValuesParser, TypedValueParser,
};
use ringtap_image::{CacheMode, Format, foreign_name, parse_size};
use ringtap_image_tools::NamedFormat;
use ringtap_io::Engine;

/// Takes the path of an image. What QEMU's programs take beside paths is not looked for among the files,
/// unless one is there.
pub(crate) fn image() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(image_path)
}

/// The same of a path that is parsed already.
pub(crate) fn image_path(path: PathBuf) -> Result<PathBuf, String> {
    match foreign_name(path.as_os_str().as_bytes()).filter(|_| !path.exists()) {
        Some(why) => Err(format!("{why} (a file of that name: ./{})", path.display())),
        None => Ok(path),
    }
}

/// Takes the name of a backing file as it is to stand in an image.
pub(crate) fn backing() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|name| {
        name.into_string().map_err(|_| {
            "it is no UTF-8, and names within images are that here: rename the file, or name a link to it"
        })
    })
}

/// Takes every format by each of its names.
pub(crate) fn format() -> impl TypedValueParser<Value = Format> {
    let values = Format::ALL.map(|format| {
        PossibleValue::new(format.name()).aliases(format.aliases()).help(format.about())
    });
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Format>())
}

/// As [`format()`], with the name as it was said.
pub(crate) fn named_format() -> impl TypedValueParser<Value = NamedFormat> {
    let values = Format::ALL.map(|format| {
        PossibleValue::new(format.name()).aliases(format.aliases()).help(format.about())
    });
    PossibleValuesParser::new(values).try_map(|name| name.parse::<NamedFormat>())
}

/// Cache modes by their names on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheName {
    /// O_DIRECT past the host's page cache; flushes are carried out.
    None,
    /// The host's page cache; flushes are carried out.
    Writeback,
    /// The host's page cache; each write is stable before it is acknowledged.
    Writethrough,
    /// O_DIRECT; each write is stable before it is acknowledged.
    Directsync,
    /// The host's page cache, and flushes are ignored: a power cut may lose anything.
    Unsafe,
}

impl From<CacheName> for CacheMode {
    fn from(name: CacheName) -> CacheMode {
        match name {
            CacheName::None => CacheMode::None,
            CacheName::Writeback => CacheMode::Writeback,
            CacheName::Writethrough => CacheMode::Writethrough,
            CacheName::Directsync => CacheMode::DirectSync,
            CacheName::Unsafe => CacheMode::Unsafe,
        }
    }
}

/// What carries out operations, as users name it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum EngineName {
    /// The kernel's rings.
    #[value(name = "io_uring")]
    IoUring,
    /// Threads that block in system calls.
    Threads,
}

impl From<EngineName> for Engine {
    fn from(name: EngineName) -> Engine {
        match name {
            EngineName::IoUring => Engine::IoUring,
            EngineName::Threads => Engine::Threads,
        }
    }
}

/// A size in bytes, or like 10G.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    parse_size(text).ok_or_else(|| "write a size in bytes, or like 512, 64k, 10G, 1.5T".into())
}

/// A size that says how many zeros make a hole.
pub(crate) fn hole(text: &str) -> Result<u64, String> {
    let fits = |size: &u64| *size % 512 == 0 && *size <= 16 << 20;
    size(text).ok().filter(fits).ok_or_else(|| "write a multiple of 512 bytes, at most 16M".into())
}

/// The pairs of lists such as `a=1,b=2`; two commas are one within a value. A key alone stands for
/// `key=on`.
pub(crate) fn pairs(lists: &[String]) -> Result<Vec<(String, String)>, String> {
    let mut pairs = vec![];
    for list in lists {
        for part in split(list) {
            let (key, value) = part.split_once('=').unwrap_or((&part, "on"));
            if key.is_empty() {
                return Err(format!("{list:?}: write options as key=value,key=value"));
            }
            pairs.push((key.to_owned(), value.to_owned()));
        }
    }
    Ok(pairs)
}

/// Whether a list of options only asks which there are.
pub(crate) fn asks_for_help(lists: &[String]) -> bool {
    lists.iter().flat_map(|list| split(list)).any(|part| part == "help" || part == "?")
}

fn split(list: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = list.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// A switch: on or off, as QEMU writes them, or yes, no, true, false.
pub(crate) fn switch(key: &str, text: &str) -> Result<bool, String> {
    match text {
        "on" | "yes" | "true" => Ok(true),
        "off" | "no" | "false" => Ok(false),
        _ => Err(format!("{key}={text}: write {key}=on or {key}=off")),
    }
}

/// What becomes of a restart log that is in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RestartLogName {
    /// Take up what it holds.
    Use,
    /// Leave the image as it is.
    Drop,
    /// Decide as where nothing is said, and serve it also where no log can be kept of it.
    Optional,
}

impl RestartLogName {
    /// What becomes of one, and nothing else.
    pub(crate) fn decision() -> impl clap::builder::TypedValueParser<Value = RestartLogName> {
        let names = [RestartLogName::Use, RestartLogName::Drop];
        let values = names.into_iter().filter_map(|name| name.to_possible_value());
        PossibleValuesParser::new(values)
            .map(|name| RestartLogName::from_str(&name, false).expect("one of these"))
    }
}

impl From<RestartLogName> for ringtap_image::RestartChoice {
    fn from(name: RestartLogName) -> ringtap_image::RestartChoice {
        match name {
            RestartLogName::Use => ringtap_image::RestartChoice::Use,
            RestartLogName::Drop => ringtap_image::RestartChoice::Drop,
            RestartLogName::Optional => ringtap_image::RestartChoice::Optional,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_taken_apart() {
        let lists = ["cluster_size=64k,backing_file=a,,b".to_owned(), "lazy_refcounts".to_owned()];
        let found = pairs(&lists).expect("options");
        let found: Vec<_> = found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let wanted = [("cluster_size", "64k"), ("backing_file", "a,b"), ("lazy_refcounts", "on")];
        assert_eq!(found, wanted);
        assert!(pairs(&["=1".to_owned()]).is_err());
        assert!(asks_for_help(&["size=1,help".to_owned()]));
        assert!(!asks_for_help(&lists));
    }
}
