//! Sizes as people write them.

/// Bytes of a size like `4096`, `0x1000`, `10G`, `1.5T`; powers of 1024, at most 2^62.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let size = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => {
            let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            u64::from_str_radix(digits, 16).ok().filter(|_| plain)
        }
        None => {
            // No exponents, groups of digits or parts of a byte.
            let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = text[number.len()..].trim_end_matches(['b', 'B']);
            let plain = number.bytes().all(|digit| digit.is_ascii_digit())
                || (!unit.is_empty() && number.bytes().all(|c| c.is_ascii_digit() || c == b'.'));
            parse_size::Config::new().with_binary().parse_size(text).ok().filter(|_| plain)
        }
    };
    size.filter(|bytes| *bytes <= 1 << 62)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("10G", 10 << 30),
            ("1.5M", 3 << 19),
            ("2TiB", 2 << 40),
            ("1.5E", 3 << 59),
            ("0x10000", 65536),
            ("1.3k", 1331),
            ("512B", 512),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "G",
            "-1",
            "1X",
            "1.3",
            "1.3B",
            "1_000",
            "1 k",
            "k1",
            "1.",
            "9999999999T",
            "5E",
            "16E",
            "nan",
            "1e5",
            "0x",
            "0x1g",
            "0x-1",
        ] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
