//! Names of snapshots and bitmaps: text as a rule, but other programs write any bytes.

/// A name as it is shown and looked for, and its bytes where those are no UTF-8. A byte that belongs to no character is shown as
/// `\xE9`: names that differ in such bytes are not shown alike.
pub(super) fn of_bytes(bytes: &[u8]) -> (String, Option<Vec<u8>>) {
    let mut shown = String::new();
    for chunk in bytes.utf8_chunks() {
        shown.push_str(chunk.valid());
        for byte in chunk.invalid() {
            shown.push_str(&format!("\\x{byte:02X}"));
        }
    }
    let odd = std::str::from_utf8(bytes).is_err().then(|| bytes.to_vec());
    (shown, odd)
}

/// The bytes that an image holds of a name.
pub(super) fn bytes<'a>(shown: &'a str, odd: &'a Option<Vec<u8>>) -> &'a [u8] {
    odd.as_deref().unwrap_or(shown.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_come_back_and_are_shown_apart() {
        let all: [&[u8]; 5] = [b"", "h\u{e9}".as_bytes(), b"h\xe9", b"h\xe8", b"\xe9h\xff\xc3"];
        let mut seen = std::collections::HashSet::new();
        for name in all {
            let (shown, odd) = of_bytes(name);
            assert_eq!(bytes(&shown, &odd), name);
            assert!(seen.insert(shown));
        }
        assert_eq!(of_bytes(b"h\xe9").0, "h\\xE9");
    }
}
