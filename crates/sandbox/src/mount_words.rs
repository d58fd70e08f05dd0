//! Words of the kernel's tables of mounts.

/// A word of /proc/self/mounts or mountinfo as it is: blanks, tabs, newlines and backslashes are written as a backslash and three
/// octal digits.
pub fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let byte = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match byte {
            Some(byte) => {
                out.push(byte);
                rest = &after[3..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_digits_are_read_and_nothing_else_is() {
        for (word, plain) in [
            (r"/mnt/a\040b\134", r"/mnt/a b\"),
            (r"/srv/my\040disk\134040", r"/srv/my disk\040"),
            (r"\011\012", "\t\n"),
            (r"\", r"\"),
            (r"\9", r"\9"),
            (r"\04", r"\04"),
            (r"\777", r"\777"),
        ] {
            assert_eq!(unescaped(word.as_bytes()), plain.as_bytes(), "{word}");
        }
    }
}
