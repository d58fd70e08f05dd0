//! The wire: a stream of JSON values in, of any shape and from anybody; lines of ASCII out.
//!
//! Source: QEMU, docs/interop/qmp-spec.rst.

use std::io;

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{CharEscape, Formatter, Serializer};

/// The longest value that is taken; a list of many disks' options needs no tenth of it.
pub const MAX_MESSAGE: usize = 1 << 20;
/// How deep objects and lists may lie in each other.
pub const MAX_DEPTH: usize = 64;

/// Why a part of the stream is no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Something stands where no value can begin.
    #[error("JSON parse error, expecting value")]
    NoValue,
    /// The value is not what JSON allows.
    #[error("JSON parse error, invalid value")]
    Invalid,
    /// A byte that no value can hold. What came before it is forgotten: with one a client that has lost its
    /// place begins anew.
    #[error("JSON parse error, stray byte 0x{0:02x}")]
    Stray(u8),
    /// Longer than [`MAX_MESSAGE`].
    #[error("JSON value is longer than {MAX_MESSAGE} bytes")]
    TooLong,
    /// Deeper than [`MAX_DEPTH`].
    #[error("JSON nesting depth limit exceeded: {MAX_DEPTH}")]
    TooDeep,
}

/// Where in a value the stream is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Between two values.
    #[default]
    Between,
    /// In an object or a list.
    Within,
    /// In a string, which this byte ends.
    Text { quote: u8, escaped: bool },
    /// In a number or a word that no object or list is around.
    Word,
}

/// Finds the values of a stream, however it is cut into pieces. It holds no more than one value, and of what is
/// longer or deeper than allowed nothing.
#[derive(Debug, Default)]
pub struct Scanner {
    state: State,
    depth: usize,
    /// The value so far, in JSON of the standard: QMP also takes 'single' quotes.
    value: Vec<u8>,
    /// Why the value is not taken; the rest of it is passed over.
    refused: Option<Malformed>,
}

impl Scanner {
    /// Take a piece of the stream; `found` is told of each value that ends in it, in their order.
    pub fn feed(&mut self, piece: &[u8], mut found: impl FnMut(Result<Value, Malformed>)) {
        for byte in piece {
            self.take(*byte, &mut found);
        }
    }

    /// Bytes that are kept of a value that has not ended.
    pub fn held(&self) -> usize {
        self.value.len()
    }

    fn take(&mut self, byte: u8, found: &mut impl FnMut(Result<Value, Malformed>)) {
        let space = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        let text = matches!(self.state, State::Text { .. });
        // No byte of UTF-8 is 0xF8 or more.
        if byte >= 0xF8 || (byte < b' ' && (text || !space)) {
            *self = Scanner::default();
            return found(Err(Malformed::Stray(byte)));
        }
        match self.state {
            State::Between => match byte {
                _ if space => {}
                b'{' | b'[' => {
                    self.state = State::Within;
                    self.open(byte);
                }
                b'"' | b'\'' => self.begin_text(byte),
                b'}' | b']' | b',' | b':' => found(Err(Malformed::NoValue)),
                _ => {
                    self.state = State::Word;
                    self.keep(byte);
                }
            },
            State::Within => match byte {
                b'{' | b'[' => self.open(byte),
                b'}' | b']' => {
                    self.keep(byte);
                    self.depth -= 1;
                    if self.depth == 0 {
                        found(self.end());
                    }
                }
                b'"' | b'\'' => self.begin_text(byte),
                _ => self.keep(byte),
            },
            State::Text { quote, escaped } => self.text(byte, quote, escaped, found),
            State::Word => match byte {
                _ if space => found(self.end()),
                b'{' | b'[' | b'}' | b']' | b'"' | b'\'' | b',' | b':' => {
                    found(self.end());
                    self.take(byte, found);
                }
                _ => self.keep(byte),
            },
        }
    }

    fn open(&mut self, byte: u8) {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            self.refuse(Malformed::TooDeep);
        }
        self.keep(byte);
    }

    fn begin_text(&mut self, quote: u8) {
        self.state = State::Text { quote, escaped: false };
        self.keep(b'"');
    }

    fn text(
        &mut self,
        byte: u8,
        quote: u8,
        escaped: bool,
        found: &mut impl FnMut(Result<Value, Malformed>),
    ) {
        let within = |escaped| State::Text { quote, escaped };
        match byte {
            // JSON of the standard knows no such escape.
            b'\'' if escaped => {
                self.value.pop();
                self.keep(byte);
                self.state = within(false);
            }
            _ if escaped => {
                self.keep(byte);
                self.state = within(false);
            }
            b'\\' => {
                self.keep(byte);
                self.state = within(true);
            }
            _ if byte == quote => {
                self.keep(b'"');
                self.state = State::Within;
                if self.depth == 0 {
                    found(self.end());
                }
            }
            b'"' => {
                self.keep(b'\\');
                self.keep(byte);
            }
            _ => self.keep(byte),
        }
    }

    fn keep(&mut self, byte: u8) {
        if self.refused.is_some() {
            return;
        }
        if self.value.len() == MAX_MESSAGE {
            return self.refuse(Malformed::TooLong);
        }
        self.value.push(byte);
    }

    fn refuse(&mut self, why: Malformed) {
        self.refused.get_or_insert(why);
        self.value = Vec::new();
    }

    /// What the value is that has just ended.
    fn end(&mut self) -> Result<Value, Malformed> {
        let Scanner { value, refused, .. } = std::mem::take(self);
        match refused {
            Some(why) => Err(why),
            None => serde_json::from_slice(&value).map_err(|_| Malformed::Invalid),
        }
    }
}

/// Writes JSON in ASCII.
struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for letter in fragment.chars() {
            if letter.is_ascii() && letter != '\x7f' {
                writer.write_all(&[letter as u8])?;
            } else {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn write_char_escape<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        serde_json::ser::CompactFormatter.write_char_escape(writer, escape)
    }
}

/// A value as it goes out: one line of ASCII.
pub fn line(value: &Value) -> Vec<u8> {
    let mut line = vec![];
    // Memory takes all of it, and a value has nothing that JSON has not.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut line, Ascii));
    line.extend_from_slice(b"\r\n");
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn all(stream: &[u8], at_a_time: usize) -> Vec<Result<Value, Malformed>> {
        let (mut scanner, mut found) = (Scanner::default(), vec![]);
        for piece in stream.chunks(at_a_time) {
            scanner.feed(piece, |value| found.push(value));
            assert!(scanner.held() <= MAX_MESSAGE);
        }
        found
    }

    fn each(stream: &[u8]) -> Vec<Result<Value, Malformed>> {
        let found = all(stream, stream.len().max(1));
        for at_a_time in [1, 2, 3, 7] {
            assert_eq!(all(stream, at_a_time), found, "{at_a_time} bytes at a time");
        }
        found
    }

    #[test]
    fn values_are_found_without_lines_between_them() {
        let found = each(b"{\"a\":[1,{}]}{\"b\":\"}\\\"{\"}\n[1]3 true\t\"x\"nu\"y\"");
        let wanted = [
            Ok(json!({"a": [1, {}]})),
            Ok(json!({"b": "}\"{"})),
            Ok(json!([1])),
            Ok(json!(3)),
            Ok(json!(true)),
            Ok(json!("x")),
            Err(Malformed::Invalid),
            Ok(json!("y")),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn single_quotes_are_quotes() {
        let found = each(br#"{'it\'s "x"': "it's", "\'": '\"\\'}"#);
        assert_eq!(found, [Ok(json!({"it's \"x\"": "it's", "'": "\"\\"}))]);
    }

    #[test]
    fn a_stray_byte_begins_anew() {
        for stray in [0u8, 1, b'\x1b', 0xff] {
            let cut = [b"{\"execute\": \"qu", &[stray][..], b"{}"].concat();
            assert_eq!(each(&cut), [Err(Malformed::Stray(stray)), Ok(json!({}))]);
        }
        // A string ends on its line.
        assert_eq!(each(b"[\"a\n[2]"), [Err(Malformed::Stray(b'\n')), Ok(json!([2]))]);
    }

    #[test]
    fn what_is_no_value_is_told_once_and_passed_over() {
        assert_eq!(each(b"{]{}"), [Err(Malformed::Invalid), Ok(json!({}))]);
        assert_eq!(each(b"}{}"), [Err(Malformed::NoValue), Ok(json!({}))]);
        assert_eq!(each(b"{\"a\":}{}"), [Err(Malformed::Invalid), Ok(json!({}))]);
        assert_eq!(each(b"[\"\xc3\x28\"]{}"), [Err(Malformed::Invalid), Ok(json!({}))]);
    }

    #[test]
    fn values_that_are_too_long_or_too_deep_are_passed_over() {
        let long = [b"{\"a\": \"", &vec![b'x'; MAX_MESSAGE][..], b"{[\"}[1]"].concat();
        assert_eq!(all(&long, 4096), [Err(Malformed::TooLong), Ok(json!([1]))]);
        let deep = |depth: usize| ["[".repeat(depth), "]".repeat(depth), "[1]".into()].concat();
        assert!(each(deep(MAX_DEPTH).as_bytes()).iter().all(Result::is_ok));
        let found = each(deep(MAX_DEPTH + 1).as_bytes());
        assert_eq!(found, [Err(Malformed::TooDeep), Ok(json!([1]))]);
        // A million brackets are held by nobody.
        let mut scanner = Scanner::default();
        scanner.feed(&vec![b'['; 1 << 20], |_| panic!("it has no end"));
        assert_eq!(scanner.held(), 0);
    }

    #[test]
    fn what_goes_out_is_ascii_on_a_line() {
        let sent = line(&json!({"text": "a\"\u{1}\u{7f}é\u{1f600}\n"}));
        assert_eq!(sent, b"{\"text\":\"a\\\"\\u0001\\u007f\\u00e9\\ud83d\\ude00\\n\"}\r\n");
    }
}
