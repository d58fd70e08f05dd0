//! Small drawings that stand in a table's cell: a ratio with its interval, values of rounds, a latency alone and beside
//! another load.

use maud::Markup;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::super::svg::{
    self, Area, BAND, CARD, Drawn, GRID, Ink, PUBLISHED, SOFT, TEXT, draw, font,
};

/// The height of a cell's drawing.
pub const HEIGHT: u32 = 22;
/// The width of one that shows a ratio.
pub const RATIO: u32 = 104;
const MIDDLE: i32 = 11;

/// A logarithmic axis around 1.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    width: i32,
    reach: f64,
}

impl Axis {
    /// One on which all of `ratios` lie, as far as a factor of thirty; never so near that nothing looks like much.
    pub fn around(width: u32, ratios: impl Iterator<Item = f64>) -> Axis {
        let reach = ratios.filter(|r| *r > 0.0).map(|ratio| ratio.ln().abs()).fold(0.0, f64::max);
        Axis { width: width as i32, reach: (reach * 1.1).clamp(1.3f64.ln(), 30f64.ln()) }
    }

    fn x(self, ratio: f64) -> i32 {
        let half = f64::from(self.width) / 2.0 - 5.0;
        let share = (ratio.max(1e-9).ln() / self.reach).clamp(-1.0, 1.0);
        (f64::from(self.width) / 2.0 + half * share).round() as i32
    }

    fn is_beyond(self, ratio: f64) -> bool {
        ratio.max(1e-9).ln().abs() > self.reach
    }

    /// 1, and a round ratio on either side.
    fn ticks(self) -> [(f64, &'static str); 3] {
        const SIDES: [(f64, &str, &str); 6] = [
            (20.0, "1/20", "20"),
            (10.0, "1/10", "10"),
            (5.0, "1/5", "5"),
            (3.0, "1/3", "3"),
            (2.0, "1/2", "2"),
            (1.5, "0.67", "1.5"),
        ];
        let fits = SIDES.into_iter().find(|(ratio, ..)| ratio.ln() <= self.reach * 0.92);
        let (ratio, low, high) = fits.unwrap_or((1.2, "0.83", "1.2"));
        [(1.0 / ratio, low), (1.0, "1"), (ratio, high)]
    }

    /// The axis for a table's head.
    pub fn head(self) -> Markup {
        draw((self.width as u32, 16), "axis: times as good, logarithmic", |area| {
            for (at, label) in self.ticks() {
                let x = self.x(at);
                area.draw(&Text::new(label, (x, 6), font(10.5, SOFT, HPos::Center)))?;
                area.draw(&PathElement::new(vec![(x, 13), (x, 16)], SOFT))?;
            }
            Ok(())
        })
    }
}

/// A ratio in a cell.
#[derive(Clone, Debug)]
pub struct Ratio<'a> {
    /// What it is, in words.
    pub label: &'a str,
    /// The ratio.
    pub ratio: f64,
    /// Its interval.
    pub interval: Option<(f64, f64)>,
    /// What lies between a reference and its twin.
    pub band: Option<(f64, f64)>,
    /// What was published, as a range.
    pub published: Option<(f64, f64)>,
    /// The colour.
    pub ink: Ink,
    /// Drawn as a ring: no verdict stands on it.
    pub open: bool,
}

/// Draws a ratio on its axis.
pub fn ratio(axis: Axis, of: &Ratio<'_>) -> Markup {
    draw((axis.width as u32, HEIGHT), of.label, |area| {
        if let Some((low, high)) = of.band {
            let ends = [(axis.x(low), 0), (axis.x(high).max(axis.x(low) + 1), HEIGHT as i32)];
            area.draw(&Rectangle::new(ends, BAND.filled()))?;
        }
        let one = axis.x(1.0);
        area.draw(&PathElement::new(vec![(one, 0), (one, HEIGHT as i32)], SOFT))?;
        if let Some((low, high)) = of.published {
            let (low, high) = (axis.x(low), axis.x(high));
            let ends = [(low - 3, MIDDLE - 8), (high + 3, MIDDLE + 8)];
            area.draw(&Rectangle::new(ends, PUBLISHED.stroke_width(2)))?;
        }
        if let Some((low, high)) = of.interval {
            whisker(area, (axis.x(low), axis.x(high)), of.ink)?;
        }
        let at = (axis.x(of.ratio), MIDDLE);
        if axis.is_beyond(of.ratio) {
            let step = if of.ratio < 1.0 { 8 } else { -8 };
            let tip = vec![at, (at.0 + step, MIDDLE - 5), (at.0 + step, MIDDLE + 5)];
            area.draw(&Polygon::new(tip, of.ink.filled()))?;
        } else if of.open {
            area.draw(&Circle::new(at, 4, CARD.filled()))?;
            area.draw(&Circle::new(at, 4, of.ink.stroke_width(2)))?;
        } else {
            area.draw(&Circle::new(at, 5, of.ink.filled()))?;
        }
        Ok(())
    })
}

fn whisker(area: &Area<'_>, (low, high): (i32, i32), ink: Ink) -> Drawn {
    area.draw(&PathElement::new(vec![(low, MIDDLE), (high, MIDDLE)], ink.stroke_width(2)))?;
    for x in [low, high] {
        area.draw(&PathElement::new(vec![(x, MIDDLE - 4), (x, MIDDLE + 4)], ink.stroke_width(2)))?;
    }
    Ok(())
}

/// Values of an arm from zero to `end`: a bar for the median, its interval, a dot for each round.
#[derive(Clone, Debug)]
pub struct Strip<'a> {
    /// What it is, in words.
    pub label: &'a str,
    /// The median.
    pub median: f64,
    /// Whether that is a bound: the bar is an outline then.
    pub bound: bool,
    /// Its interval.
    pub interval: Option<(f64, f64)>,
    /// The rounds.
    pub rounds: Vec<f64>,
    /// The colour.
    pub ink: Ink,
}

/// Draws values on an axis from zero to `end`.
pub fn strip(width: u32, end: f64, of: &Strip<'_>) -> Markup {
    let x =
        |value: f64| 1 + (f64::from(width - 8) * value / end.max(f64::MIN_POSITIVE)).round() as i32;
    draw((width, HEIGHT), of.label, |area| {
        area.draw(&PathElement::new(vec![(1, 0), (1, HEIGHT as i32)], GRID))?;
        let bar = [(1, 4), (x(of.median), HEIGHT as i32 - 4)];
        if of.bound {
            area.draw(&Rectangle::new(bar, of.ink))?;
        } else {
            area.draw(&Rectangle::new(bar, of.ink.mix(0.55).filled()))?;
        }
        if let Some((low, high)) = of.interval {
            let ends = vec![(x(low), MIDDLE), (x(high), MIDDLE)];
            area.draw(&PathElement::new(ends, TEXT.stroke_width(2)))?;
        }
        for value in &of.rounds {
            area.draw(&Circle::new((x(*value), MIDDLE), 2, CARD.filled()))?;
            area.draw(&Circle::new((x(*value), MIDDLE), 2, TEXT))?;
        }
        Ok(())
    })
}

/// A latency alone and beside another load, on a logarithmic axis of time.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// What it is, in words.
    pub label: &'a str,
    /// Alone.
    pub alone: f64,
    /// Beside the other load.
    pub together: f64,
    /// Its interval.
    pub interval: Option<(f64, f64)>,
    /// The colour.
    pub ink: Ink,
}

/// Draws from a ring (alone) to a dot (together) between the powers of ten `low` and `high`.
pub fn span(width: u32, (low, high): (f64, f64), of: &Span<'_>) -> Markup {
    let x = |value: f64| {
        let share = (value.max(1.0).log10() - low) / (high - low).max(1e-9);
        6 + (f64::from(width - 12) * share.clamp(0.0, 1.0)).round() as i32
    };
    draw((width, HEIGHT), of.label, |area| {
        for tick in svg::log_ticks(low, high) {
            area.draw(&PathElement::new(vec![(x(tick), 0), (x(tick), HEIGHT as i32)], GRID))?;
        }
        let (from, to) = ((x(of.alone), MIDDLE), (x(of.together), MIDDLE));
        area.draw(&PathElement::new(vec![from, to], of.ink.mix(0.4).stroke_width(4)))?;
        if let Some((low, high)) = of.interval {
            whisker(area, (x(low), x(high)), of.ink)?;
        }
        area.draw(&Circle::new(from, 4, CARD.filled()))?;
        area.draw(&Circle::new(from, 4, of.ink.stroke_width(2)))?;
        area.draw(&Circle::new(to, 5, of.ink.filled()))?;
        Ok(())
    })
}

/// The axis of [`span`] for a table's head.
pub fn span_head(width: u32, (low, high): (f64, f64), label: impl Fn(f64) -> String) -> Markup {
    let x = |value: f64| {
        6 + (f64::from(width - 12) * (value.log10() - low) / (high - low).max(1e-9)).round() as i32
    };
    draw((width, 16), "axis: time, logarithmic", |area| {
        let mut last = -100;
        for tick in svg::log_ticks(low, high) {
            let at = x(tick);
            if at - last > 46 && at > 12 && at < width as i32 - 16 {
                area.draw(&Text::new(label(tick), (at, 6), font(10.5, SOFT, HPos::Center)))?;
                area.draw(&PathElement::new(vec![(at, 13), (at, 16)], SOFT))?;
                last = at;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_is_even_and_holds_what_it_shows() {
        let axis = Axis::around(100, [0.5, 1.9].into_iter());
        assert_eq!(axis.x(1.0), 50);
        assert_eq!(axis.x(2.0) - 50, 50 - axis.x(0.5));
        assert!(!axis.is_beyond(0.5) && axis.x(0.5) >= 5 && axis.x(0.5) < 12);
        assert_eq!(axis.ticks()[2], (2.0, "2"));
        let far = Axis::around(100, [1e6].into_iter());
        assert!(far.is_beyond(1e6) && far.x(1e6) == 95);
        let none = Axis::around(100, std::iter::empty());
        assert_eq!(none.ticks()[2].1, "1.2");
    }
}
