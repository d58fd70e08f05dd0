//! The progress bar: on a terminal what runs and how long it will still take; elsewhere nothing.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress of a run, in seconds of expected work.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    expected: f64,
    done: f64,
}

impl Progress {
    /// A bar for `expected` seconds of work.
    pub fn new(expected: f64) -> Progress {
        let bar = ProgressBar::new(1000);
        if let Ok(style) =
            ProgressStyle::with_template("{bar:24} {percent:>3} % {prefix:>9} left  {wide_msg}")
        {
            bar.set_style(style);
        }
        Progress { bar, began: Instant::now(), expected: expected.max(1e-3), done: 0.0 }
    }

    /// Says what runs now.
    pub fn say(&self, text: &str) {
        self.bar.set_prefix(self.left());
        self.bar.set_message(text.to_owned());
        self.bar.tick();
    }

    /// Work that was expected to take `seconds` is done.
    pub fn advance(&mut self, seconds: f64) {
        self.done += seconds;
        self.bar.set_position((1000.0 * (self.done / self.expected).min(1.0)) as u64);
        self.bar.set_prefix(self.left());
    }

    /// Time left: the work left, by the pace so far.
    fn left(&self) -> String {
        let passed = self.began.elapsed().as_secs_f64();
        // Before the first step the expectation is all there is.
        let pace = if self.done > 0.0 { passed / self.done } else { 1.0 };
        let left = Duration::from_secs_f64(((self.expected - self.done).max(0.0) * pace).ceil());
        let (minutes, seconds) = (left.as_secs() / 60, left.as_secs() % 60);
        if minutes > 0 { format!("{minutes}m{seconds:02}s") } else { format!("{seconds}s") }
    }

    /// Prints a line above the bar.
    pub fn note(&self, text: &str) {
        if self.bar.is_hidden() {
            eprintln!("{text}");
        } else {
            self.bar.println(text);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
