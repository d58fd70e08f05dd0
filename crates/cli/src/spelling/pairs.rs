//! Lists of keys and values, and words that stand in them.

use std::ffi::OsStr;

/// The pairs of a list such as `a=1,b.c=2`; two commas are one within a value.
pub(super) fn pairs(text: &str) -> Vec<(String, String)> {
    let parts = text.replace(",,", "\0");
    let parts = parts.split(',').filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let part = part.replace('\0', ",");
        match part.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None => (part, String::new()),
        }
    };
    parts.map(pair).collect()
}

/// Whether a value means yes.
pub(super) fn is_on(value: &str) -> bool {
    matches!(value, "on" | "yes" | "true")
}

/// Whether a word may be an image that is described.
pub(super) fn is_json(text: &str) -> bool {
    text.starts_with("json:") && !std::path::Path::new(OsStr::new(text)).exists()
}
