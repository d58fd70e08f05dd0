//! How far the log ratios of rounds lie apart.

/// Standard deviation of log ratios.
pub fn deviation(logs: &[(u32, f64)]) -> f64 {
    let count = logs.len() as f64;
    let mean = logs.iter().map(|log| log.1).sum::<f64>() / count;
    (logs.iter().map(|log| (log.1 - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_of_a_handful() {
        let logs = [(0, 1.0), (1, 3.0), (2, 5.0)];
        assert!((deviation(&logs) - 2.0).abs() < 1e-12);
    }
}
