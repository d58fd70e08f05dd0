//! What headers begin with, and how text of theirs is shown.

pub(super) const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";

/// Text of a header for a message: nothing that a terminal would act on, and not too much of it.
pub(super) fn shown(text: &str) -> String {
    let plain = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().take(64).map(plain).collect()
}

/// The bytes that should have been a magic number, for a message.
pub(super) fn first_bytes(bytes: &[u8]) -> String {
    let first: String = bytes
        .iter()
        .take(MAGIC.len())
        .flat_map(|byte| byte.escape_ascii())
        .map(char::from)
        .collect();
    format!("\"{first}\"")
}
