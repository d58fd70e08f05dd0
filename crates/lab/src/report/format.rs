//! Numbers and verdicts in words.

use super::row::Row;
use crate::sample::{Unit, Value};
use crate::stats::decision::{BLOCKS, Decision, ROUNDS, Why};

/// A value with its unit: `179 k/s`, `1.2 GB/s`, `23.4 µs`, `≥ 524 MB/s`.
pub fn value(value: Value, unit: Unit) -> String {
    let bound = if value.at_least { "≥ " } else { "" };
    format!("{bound}{}", number(value.value, unit))
}

/// A number with its unit.
pub fn number(number: f64, unit: Unit) -> String {
    match unit {
        Unit::PerSecond => scaled(number, &[(1e6, " M/s"), (1e3, " k/s"), (1.0, "/s")]),
        Unit::BytesPerSecond => {
            scaled(number, &[(1e9, " GB/s"), (1e6, " MB/s"), (1e3, " kB/s"), (1.0, " B/s")])
        }
        Unit::Nanoseconds => {
            scaled(number, &[(1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1.0, " ns")])
        }
        Unit::CpuPerMillion | Unit::CpuPerGib => format!("{} s", digits(number)),
        Unit::Share => format!("{} %", digits(number * 100.0)),
        Unit::Factor => digits(number),
    }
}

/// A number on an axis: 2 GB/s, not 2.00 GB/s.
pub fn tick(value: f64, unit: Unit) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let text = number(value, unit);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, name) = text.split_at(end);
    if digits.contains('.') {
        format!("{}{name}", digits.trim_end_matches('0').trim_end_matches('.'))
    } else {
        text
    }
}

fn scaled(number: f64, steps: &[(f64, &str)]) -> String {
    let (step, name) = steps
        .iter()
        .find(|(step, _)| number.abs() >= *step)
        .or(steps.last())
        .copied()
        .unwrap_or((1.0, ""));
    format!("{}{name}", digits(number / step))
}

/// Three digits that count.
pub fn digits(number: f64) -> String {
    let places = match number.abs() {
        n if n >= 99.95 => 0,
        n if n >= 9.995 => 1,
        n if n > 0.0 && n < 0.0995 => 3,
        _ => 2,
    };
    format!("{number:.places$}")
}

/// `1.42`, `≥ 3.2`, `0.081`.
pub fn ratio(row: &Row) -> String {
    let bound = match row.bound {
        Some(">=") => "≥ ",
        Some(_) => "≤ ",
        None => "",
    };
    row.ratio.map_or_else(|| "–".into(), |ratio| format!("{bound}{}", digits(ratio)))
}

/// `1.36–1.50`, or nothing.
pub fn interval(ends: Option<(f64, f64)>) -> String {
    ends.map_or_else(String::new, |(low, high)| format!("{}–{}", digits(low), digits(high)))
}

/// The interval that decides.
pub fn decision(row: &Row) -> String {
    interval(row.interval.map(|i| (i.low, i.high)))
}

/// The answer in words.
pub fn verdict(row: &Row) -> String {
    match row.decision {
        Decision::Faster => "faster".into(),
        Decision::Slower => "slower".into(),
        Decision::NoDifference { margin } => {
            format!("no difference (within {} %)", digits(margin * 100.0))
        }
        Decision::Open { more: Some(1) } => "open (1 more round)".into(),
        Decision::Open { more: Some(more) } => format!("open ({more} more rounds)"),
        Decision::Open { more: None } => "open (not by more rounds)".into(),
        Decision::Withheld { why: Why::TooFew } => {
            format!("points only (under {ROUNDS} rounds or {BLOCKS} boots)")
        }
        Decision::Withheld { why: reason } => why(reason).into(),
        Decision::Exploratory if row.headline => "exploratory".into(),
        Decision::Exploratory => String::new(),
    }
}

/// `1 round`, `12 rounds`.
pub fn rounds(count: usize) -> String {
    if count == 1 { "1 round".into() } else { format!("{count} rounds") }
}

/// Why a comparison has no answer.
pub fn why(why: Why) -> &'static str {
    match why {
        Why::TooFew => "points only",
        Why::RoundsMissing => "no answer: rounds are missing",
        Why::Bound => "bound only",
        Why::ControlFailed => "no answer: the A/A control failed",
        Why::NoControl => "no answer: no A/A control",
        Why::Blind => "blind here",
        Why::Unproven => "no difference seen, not shown that one could be",
        Why::OtherGenerator => "not comparable: another load generator",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        for (number, text) in [
            (1.0, "1.00"),
            (0.0812, "0.081"),
            (0.5, "0.50"),
            (12.34, "12.3"),
            (99.96, "100"),
            (179.5, "180"),
            (0.0, "0.00"),
        ] {
            assert_eq!(digits(number), text);
        }
    }

    #[test]
    fn axis_labels_lose_their_zeros() {
        assert_eq!(tick(2e9, Unit::BytesPerSecond), "2 GB/s");
        assert_eq!(tick(2.5e6, Unit::PerSecond), "2.5 M/s");
        assert_eq!(tick(100.0, Unit::PerSecond), "100/s");
        assert_eq!(tick(0.0, Unit::PerSecond), "0");
    }

    #[test]
    fn units() {
        assert_eq!(number(179_512.0, Unit::PerSecond), "180 k/s");
        assert_eq!(number(144.5, Unit::PerSecond), "144/s");
        assert_eq!(number(1.2e9, Unit::BytesPerSecond), "1.20 GB/s");
        assert_eq!(number(23_400.0, Unit::Nanoseconds), "23.4 µs");
        assert_eq!(
            value(Value { value: 5.368e8, at_least: true }, Unit::BytesPerSecond),
            "≥ 537 MB/s"
        );
        assert_eq!(number(2.123, Unit::CpuPerMillion), "2.12 s");
    }
}
