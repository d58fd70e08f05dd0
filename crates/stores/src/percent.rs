//! Names as they stand in URIs, where what may mean something else is written as `%XX`.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

/// What of a path means itself.
const IN_PATHS: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A name with its slashes, as a URI has it.
pub fn encoded(name: impl AsRef<[u8]>) -> String {
    percent_encode(name.as_ref(), IN_PATHS).to_string()
}

/// One part of such a name.
pub(crate) fn part(name: &str) -> String {
    const IN_PARTS: &AsciiSet = &IN_PATHS.add(b'/');
    percent_encode(name.as_bytes(), IN_PARTS).to_string()
}

/// Without its `%XX`; none where that is no UTF-8.
pub fn decoded(path: &str) -> Option<String> {
    percent_decode_str(path).decode_utf8().ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_read_again() {
        for (name, text) in [("a/b-c.d_e~", "a/b-c.d_e~"), ("x&y ?#%:", "x%26y%20%3F%23%25%3A")] {
            assert_eq!((encoded(name).as_str(), decoded(text).as_deref()), (text, Some(name)));
        }
        assert_eq!((part("a/b"), encoded(b"\xff")), ("a%2Fb".into(), "%FF".into()));
        assert_eq!(decoded("%FF"), None);
    }
}
