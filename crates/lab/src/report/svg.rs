//! Charts as inline SVG, drawn by plotters. plotters writes colours as numbers: each number of `INKS` stands for one of
//! the page's CSS variables and is replaced by it, so that light, dark and print reach the charts.

use std::error::Error;

use maud::{Markup, PreEscaped, html};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Serialize;

/// A colour of the page.
pub type Ink = RGBColor;
/// Ringtap.
pub const OURS: Ink = RGBColor(1, 0, 1);
/// What everything is compared with.
pub const REFERENCE: Ink = RGBColor(2, 0, 1);
/// All others.
pub const PEER: Ink = RGBColor(3, 0, 1);
/// Text and whiskers.
pub const TEXT: Ink = RGBColor(4, 0, 1);
/// Text that stands back.
pub const SOFT: Ink = RGBColor(5, 0, 1);
/// Lines of a grid.
pub const GRID: Ink = RGBColor(6, 0, 1);
/// What lies between a reference and its twin.
pub const BAND: Ink = RGBColor(7, 0, 1);
/// The ground of a card.
pub const CARD: Ink = RGBColor(8, 0, 1);
/// What was published.
pub const PUBLISHED: Ink = RGBColor(9, 0, 1);

const INKS: [(Ink, &str); 9] = [
    (OURS, "ours"),
    (REFERENCE, "ref"),
    (PEER, "peer"),
    (TEXT, "ink"),
    (SOFT, "soft"),
    (GRID, "line"),
    (BAND, "band"),
    (CARD, "card"),
    (PUBLISHED, "published"),
];

/// What is drawn on.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Whether it could be.
pub type Drawn = Result<(), Box<dyn Error>>;

/// A point of a curve: a median with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// A share, 0 to 1.
    pub share: f64,
    /// Bytes a second.
    pub rate: f64,
    /// 95 % interval of `rate`, from six rounds on.
    pub interval: Option<(f64, f64)>,
}

/// A drawing of so many pixels; `label` is what a screen reader says instead.
pub fn draw(size: (u32, u32), label: &str, paint: impl FnOnce(&Area<'_>) -> Drawn) -> Markup {
    let mut text = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        paint(&area).and_then(|()| Ok(area.present()?))
    };
    if let Err(error) = drawn {
        return html! { p.bad { (label) ": this chart could not be drawn: " (error) } };
    }
    let from = text.find('>').map_or(0, |at| at + 1);
    let to = text.rfind("</svg>").unwrap_or(text.len());
    let inner = themed(&text[from..to]);
    let (width, height) = size;
    html! {
        svg role="img" aria-label=(label) width=(width) height=(height) viewBox=(format!("0 0 {width} {height}")) { (PreEscaped(inner)) }
    }
}

/// The page's colours and font, and nothing that says what is so anyway.
fn themed(text: &str) -> String {
    let mut text = text.replace(" opacity=\"1\"", "").replace(" font-family=\"sans-serif\"", "");
    for (from, to) in [(">\n", ">"), ("\n</text>", "</text>"), (" stroke=\"none\"", "")] {
        text = text.replace(from, to);
    }
    for (ink, name) in INKS {
        let number = format!("\"#{:02X}{:02X}{:02X}\"", ink.0, ink.1, ink.2);
        text = text.replace(&number, &format!("\"var(--{name})\""));
    }
    text
}

/// Text of so many pixels. plotters takes the height of a line for that of its letters.
pub fn font(size: f64, ink: Ink, horizontal: HPos) -> TextStyle<'static> {
    let pos = Pos::new(horizontal, VPos::Center);
    ("sans-serif", size * 1.24).into_font().color(&ink).pos(pos)
}

/// The colour of a backend: the stage's reference, Ringtap, or another.
pub fn ink(backend: &str, reference: &str) -> Ink {
    if backend == reference {
        REFERENCE
    } else if backend.starts_with("ringtap") || backend.starts_with("tap-") {
        OURS
    } else {
        PEER
    }
}

/// Powers of ten between the two exponents, and steps between them where there are few.
pub fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let within = |steps: &[f64]| -> Vec<f64> {
        (low.floor() as i32..=high.ceil() as i32)
            .flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)))
            .filter(|tick| (low..=high).contains(&tick.log10()))
            .collect()
    };
    let sets: [&[f64]; 3] = [&[1.0], &[1.0, 2.0, 5.0], &[1.0, 2.0, 3.0, 4.0, 5.0, 7.0]];
    sets.into_iter().map(within).find(|ticks| ticks.len() >= 4).unwrap_or_else(|| within(sets[2]))
}

/// Zero and up to five round numbers, the last not below `largest`.
pub fn linear_ticks(largest: f64) -> Vec<f64> {
    let raw = largest.max(f64::MIN_POSITIVE) / 4.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .iter()
        .map(|m| m * power)
        .find(|step| *step >= raw)
        .unwrap_or(10.0 * power);
    (0..=5).map(|i| step * f64::from(i)).take_while(|tick| *tick < largest + step * 0.999).collect()
}

/// Places at least `room` apart within `from` to `to`, each as near to what it wants as its neighbours let it.
pub fn spread(wanted: &[f64], room: f64, from: f64, to: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places = vec![0.0; wanted.len()];
    let mut least = from;
    for &at in &order {
        places[at] = wanted[at].max(least);
        least = places[at] + room;
    }
    let mut most = to;
    for &at in order.iter().rev() {
        places[at] = places[at].min(most);
        most = places[at] - room;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_end() {
        assert_eq!(linear_ticks(179_000.0), [0.0, 50_000.0, 100_000.0, 150_000.0, 200_000.0]);
        for largest in [1e-9, 0.3, 1.0, 7.3, 999.0, 1e12] {
            let ticks = linear_ticks(largest);
            assert!(*ticks.last().unwrap() >= largest * 0.999, "{largest}: {ticks:?}");
        }
        assert_eq!(log_ticks(1.9, 3.1), [100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(log_ticks(0.82, 1.01), [7.0, 10.0]);
        assert_eq!(log_ticks(1.0, 5.0), [10.0, 100.0, 1000.0, 10_000.0, 100_000.0]);
    }

    #[test]
    fn names_stand_apart_and_near_what_they_belong_to() {
        assert_eq!(spread(&[50.0, 10.0], 15.0, 0.0, 100.0), [50.0, 10.0]);
        assert_eq!(spread(&[50.0, 52.0, 51.0], 15.0, 0.0, 100.0), [50.0, 80.0, 65.0]);
        assert_eq!(spread(&[99.0, 99.0], 15.0, 0.0, 100.0), [85.0, 100.0]);
        assert!(spread(&[], 15.0, 0.0, 1.0).is_empty());
    }

    #[test]
    fn every_colour_is_the_pages_and_words_are_escaped() {
        let svg = draw((90, 20), "what \"it\" shows", |area| {
            for (at, (ink, _)) in (0..).zip(INKS) {
                area.draw(&Circle::new((9 * at, 10), 4, ink.filled()))?;
            }
            area.draw(&Text::new("<b> & c", (1, 1), font(12.0, TEXT, HPos::Left)))?;
            Ok(())
        });
        let text = svg.into_string();
        assert!(!text.contains("\"#"), "{text}");
        for (_, name) in INKS {
            assert!(text.contains(&format!("var(--{name})")), "{name}: {text}");
        }
        assert!(text.contains("&lt;b&gt; &amp; c"), "{text}");
        assert!(text.contains("aria-label=\"what &quot;it&quot; shows\""), "{text}");
    }
}
