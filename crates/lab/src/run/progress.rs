//! Progress: on a terminal a bar with what runs and how long it will still take, elsewhere a line every ten seconds. Both end
//! at 100 %, where the run did.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is written where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);
/// From this share on the pace so far says how long it will take.
const PACED: f64 = 0.05;

/// Progress of a run, in seconds of expected work.
pub struct Progress {
    bar: ProgressBar,
    state: Arc<Mutex<State>>,
    lines: Option<Lines>,
}

/// Who writes lines, until the sender is dropped.
struct Lines {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    began: Instant,
    expected: f64,
    work: f64,
    done: f64,
    text: String,
}

impl State {
    /// The share that is done; whole only once the run is.
    fn share(&self) -> f64 {
        (self.done / self.work).min(0.99)
    }

    fn left(&self) -> Duration {
        let (share, passed) = (self.share(), self.began.elapsed().as_secs_f64());
        // At first the expectation is all there is.
        let all = if share < PACED { self.expected } else { passed / share };
        Duration::from_secs_f64((all * (1.0 - share)).ceil())
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Progress {
    /// Of a run that is expected to take so many seconds, and whose samples are so many seconds of them.
    pub fn new(expected: f64, work: f64) -> Progress {
        let bar = ProgressBar::new(1000);
        if let Ok(style) =
            ProgressStyle::with_template("{bar:24} {percent:>3} % {prefix:>9} left  {wide_msg}")
        {
            bar.set_style(style);
        }
        let writer = bar.is_hidden().then(|| Box::new(std::io::stderr()) as Box<dyn Write + Send>);
        Progress::on(bar, writer, EVERY, expected, work)
    }

    fn on(
        bar: ProgressBar,
        writer: Option<Box<dyn Write + Send>>,
        every: Duration,
        expected: f64,
        work: f64,
    ) -> Progress {
        let state = State {
            began: Instant::now(),
            expected,
            work: work.max(1e-3),
            done: 0.0,
            text: String::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let lines = writer.map(|writer| Lines::start(writer, every, state.clone()));
        Progress { bar, state, lines }
    }

    /// Says what runs now.
    pub fn say(&self, text: &str) {
        text.clone_into(&mut locked(&self.state).text);
        self.bar.set_message(text.to_owned());
        self.show();
    }

    /// Samples that were expected to take `seconds` are done.
    pub fn advance(&self, seconds: f64) {
        locked(&self.state).done += seconds;
        self.show();
    }

    fn show(&self) {
        let state = locked(&self.state);
        self.bar.set_position((1000.0 * state.share()) as u64);
        self.bar.set_prefix(in_words(state.left()));
        self.bar.tick();
    }

    /// Prints a line above the bar.
    pub fn note(&self, text: &str) {
        if self.bar.is_hidden() {
            eprintln!("{text}");
        } else {
            self.bar.println(text);
        }
    }

    /// All is done.
    pub fn finish(&mut self) {
        let took = in_words(locked(&self.state).began.elapsed());
        // The bar's own count of what is left is of no use any more.
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {percent:>3} % {wide_msg}") {
            self.bar.set_style(style);
        }
        self.bar.set_position(1000);
        self.bar.finish_with_message(format!("took {took}"));
        if let Some(lines) = self.lines.take() {
            locked(&self.state).text = format!("took {took}");
            // Received, it is the end.
            let _ = lines.stop.send(());
            let _ = lines.thread.join();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if !self.bar.is_finished() {
            self.bar.finish_and_clear();
        }
        if let Some(Lines { stop, thread }) = self.lines.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

impl Lines {
    fn start(
        mut writer: Box<dyn Write + Send>,
        every: Duration,
        state: Arc<Mutex<State>>,
    ) -> Lines {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                let (share, text) = match stopped.recv_timeout(every) {
                    Err(RecvTimeoutError::Timeout) => {
                        let state = locked(&state);
                        let left = in_words(state.left());
                        (100.0 * state.share(), format!("{left} left  {}", state.text))
                    }
                    Ok(()) => (100.0, locked(&state).text.clone()),
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                // Who does not read is not told.
                let _ = writeln!(writer, "{share:>3.0} %  {text}");
                if share >= 100.0 {
                    return;
                }
            }
        });
        Lines { stop, thread }
    }
}

fn locked(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn in_words(time: Duration) -> String {
    let (minutes, seconds) = (time.as_secs() / 60, time.as_secs() % 60);
    if minutes > 0 { format!("{minutes}m{seconds:02}s") } else { format!("{seconds}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Written {
        fn lines(&self) -> Vec<String> {
            let bytes = self.0.lock().unwrap().clone();
            String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
        }
    }

    fn started() -> (Progress, Written) {
        let written = Written::default();
        let writer = Some(Box::new(written.clone()) as Box<dyn Write + Send>);
        let every = Duration::from_millis(5);
        (Progress::on(ProgressBar::hidden(), writer, every, 90.0, 20.0), written)
    }

    fn until(written: &Written, what: &str) {
        let limit = Instant::now() + Duration::from_secs(30);
        while !written.lines().iter().any(|line| line.contains(what)) {
            assert!(Instant::now() < limit, "no {what:?} in {:?}", written.lines());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn without_a_terminal_lines_come_by_themselves_and_end_at_all() {
        let (mut progress, written) = started();
        progress.say("booting");
        until(&written, "  0 %  1m30s left  booting");
        progress.advance(10.0);
        progress.say("round 2");
        until(&written, " 50 %  ");
        // Samples may be more than were expected; the run is over when it says so.
        progress.advance(30.0);
        until(&written, " 99 %  ");
        progress.finish();
        let lines = written.lines();
        assert!(lines.last().unwrap().starts_with("100 %  took 0s"), "{lines:?}");
        drop(progress);
        assert_eq!(written.lines(), lines);
    }

    #[test]
    fn a_run_that_ended_early_does_not_end_at_all_of_it() {
        let (progress, written) = started();
        progress.advance(10.0);
        until(&written, " 50 %");
        drop(progress);
        assert!(!written.lines().iter().any(|line| line.contains("100 %")));
    }
}
