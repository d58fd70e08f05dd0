//! How facts are printed.

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::PrettyFormatter;

/// For whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people.
    #[default]
    #[value(alias = "human")]
    Text,
    /// JSON, for programs.
    Json,
}

/// JSON as QEMU's programs lay it out, for those who read it by lines: four blanks a level.
pub(crate) fn pretty(value: &(impl Serialize + ?Sized)) -> serde_json::Result<String> {
    let mut text = vec![];
    let formatter = PrettyFormatter::with_indent(b"    ");
    value.serialize(&mut Serializer::with_formatter(&mut text, formatter))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A size with three digits that count, as QEMU's programs write them.
pub(crate) fn human(bytes: u64) -> String {
    let (mut unit, mut size) = (0, bytes as f64);
    while size >= 1000.0 && unit < 6 {
        size /= 1024.0;
        unit += 1;
    }
    let name = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit];
    let digits = match size {
        _ if size >= 99.95 => 0,
        _ if size >= 9.995 => 1,
        _ if size >= 0.9995 => 2,
        _ => 3,
    };
    let text = format!("{size:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_in_round_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1536, "1.5 KiB"),
            (331_776, "324 KiB"),
            (10 << 30, "10 GiB"),
            (1_288_490_189, "1.2 GiB"),
            (1_073_741_824_000, "0.977 TiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
