//! Whether a series of rounds has come to a steady level: SNIA's rule for solid-state storage (Performance Test
//! Specification, steady state), five rounds in a row.

/// Rounds that are looked at together.
pub const WINDOW: usize = 5;
/// Largest and smallest may lie apart by this share of their mean.
pub const RANGE: f64 = 0.2;
/// The line through them may rise or fall by this share of it from the first to the last.
pub const DRIFT: f64 = 0.1;

/// What some values did beside their mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Movement {
    /// From the smallest to the largest.
    pub range: f64,
    /// From the first to the last along the least-squares line, falling or rising.
    pub drift: f64,
}

impl Movement {
    /// Of values in the order of time; none without values or with a mean of 0.
    pub fn of(values: &[f64]) -> Option<Movement> {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        if values.len() < 2 || mean <= 0.0 || !mean.is_finite() {
            return None;
        }
        let middle = (count - 1.0) / 2.0;
        let (mut with_time, mut of_time) = (0.0, 0.0);
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for (at, value) in values.iter().enumerate() {
            let time = at as f64 - middle;
            with_time += time * (value - mean);
            of_time += time * time;
            least = least.min(*value);
            most = most.max(*value);
        }
        let slope = with_time / of_time;
        Some(Movement { range: (most - least) / mean, drift: slope.abs() * (count - 1.0) / mean })
    }

    /// Whether it is little enough.
    pub fn is_steady(self) -> bool {
        self.range <= RANGE && self.drift <= DRIFT
    }
}

/// The first round from which five in a row are steady; the outer `None` where there are no five.
pub fn first_steady(values: &[f64]) -> Option<Option<usize>> {
    (values.len() >= WINDOW).then(|| {
        values
            .windows(WINDOW)
            .position(|window| Movement::of(window).is_some_and(Movement::is_steady))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_level_is_steady_at_once() {
        assert_eq!(first_steady(&[100.0; 6]), Some(Some(0)));
        // Up and down by 9 % around the mean: a range of 18 %, and hardly a slope.
        assert_eq!(first_steady(&[91.0, 109.0, 91.0, 109.0, 91.0]), Some(Some(0)));
        assert_eq!(first_steady(&[100.0; 4]), None, "four rounds are not judged");
        assert_eq!(first_steady(&[0.0; 5]), Some(None), "nothing is no level");
    }

    #[test]
    fn a_range_of_more_than_a_fifth_is_not() {
        assert_eq!(first_steady(&[89.0, 111.0, 89.0, 111.0, 89.0]), Some(None));
        // One that is out spoils each window that holds it.
        assert_eq!(first_steady(&[100.0, 100.0, 130.0, 100.0, 100.0, 100.0, 100.0]), Some(None));
        let more = [100.0, 130.0, 100.0, 100.0, 100.0, 100.0, 100.0];
        assert_eq!(first_steady(&more), Some(Some(2)));
    }

    #[test]
    fn a_slope_of_more_than_a_tenth_is_not() {
        let line = |step: f64| (0..5).map(|at| 100.0 + step * f64::from(at)).collect::<Vec<_>>();
        assert!((Movement::of(&line(2.0)).unwrap().drift - 8.0 / 104.0).abs() < 1e-12);
        assert_eq!(first_steady(&line(2.0)), Some(Some(0)));
        assert_eq!(first_steady(&line(3.0)), Some(None), "12 % of 106");
        assert_eq!(first_steady(&line(-3.0)), Some(None), "falling as well as rising");
    }

    #[test]
    fn a_disk_that_settles_is_steady_from_where_it_has() {
        // A fresh SSD: it falls from twice its level to it.
        let series: Vec<f64> = (0..12).map(|at| 100.0 * (1.0 + (-f64::from(at)).exp2())).collect();
        let Some(Some(first)) = first_steady(&series) else { panic!("{series:?}") };
        // 106, 103, 101.6, 100.8, 100.4: a range of 6 %.
        assert_eq!(first, 4);
        assert!(!Movement::of(&series[3..8]).unwrap().is_steady());
    }
}
