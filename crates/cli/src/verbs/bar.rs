//! Progress of long work: on a terminal, once it takes longer than two seconds; or as asked.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use ringtap_vbd::Progress;

use crate::args::Output;

/// How long work may take before a terminal is told of it.
const SOON: Duration = Duration::from_secs(2);

/// Options about what is said on the way.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct Talk {
    /// Show progress on stdout, at once and to a file too [default: on a terminal, after two seconds]
    #[arg(short, long)]
    pub(crate) progress: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// What goes to stdout is for a program: progress goes to stderr
    #[arg(skip)]
    pub(crate) beside: bool,
}

impl Talk {
    /// The same beside results in that form.
    pub(crate) fn beside(self, output: Output) -> Talk {
        Talk { beside: output == Output::Json, ..self }
    }
}

/// Shows how far the work is, until dropped.
pub(crate) struct Bar {
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    /// Show how much of `total` bytes is done.
    pub(crate) fn show(talk: Talk, progress: &Arc<Progress>, total: u64) -> Bar {
        let progress = progress.clone();
        let line = move |_| {
            let part = progress.done() as f64 / total.max(1) as f64;
            format!("    ({:.2}/100%)", part.min(1.0) * 100.0)
        };
        match wait(talk, stderr().is_terminal()) {
            // Asked for, it is a result.
            Some(wait) if talk.progress && !talk.beside => Bar::after(wait, stdout(), line),
            Some(wait) => Bar::after(wait, stderr(), line),
            None => Bar { thread: None },
        }
    }

    /// Show for how long it has gone on, of work whose end is not known.
    pub(crate) fn ticking(talk: Talk) -> Bar {
        match wait(Talk { progress: false, ..talk }, stderr().is_terminal()) {
            Some(wait) => Bar::after(wait, stderr(), elapsed),
            None => Bar { thread: None },
        }
    }

    fn after(
        wait: Duration,
        mut to: impl Write + Send + 'static,
        line: impl Fn(Duration) -> String + Send + 'static,
    ) -> Bar {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            let began = Instant::now();
            let mut shown = false;
            loop {
                let over = ended.recv_timeout(Duration::from_millis(200));
                shown |= began.elapsed() > wait;
                let over = !matches!(over, Err(RecvTimeoutError::Timeout));
                if shown {
                    let end = if over { "\n" } else { "" };
                    // In one write, as others may write there too. Nobody may read it.
                    let line = format!("{}\r{end}", line(began.elapsed()));
                    let _ = to.write_all(line.as_bytes()).and_then(|()| to.flush());
                }
                if over {
                    return;
                }
            }
        });
        Bar { thread: Some((end, thread)) }
    }
}

fn elapsed(time: Duration) -> String {
    format!("    ({} s)", time.as_secs())
}

/// How long to be silent; none: for ever.
fn wait(talk: Talk, terminal: bool) -> Option<Duration> {
    match talk {
        Talk { quiet: true, .. } => None,
        Talk { progress: true, .. } => Some(Duration::ZERO),
        _ => terminal.then_some(SOON),
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.thread.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn only_a_terminal_is_told_unasked_and_not_at_once() {
        let talk = |progress, quiet| Talk { progress, quiet, beside: false };
        for (talk, terminal, silent) in [
            (talk(false, false), false, None),
            (talk(false, false), true, Some(SOON)),
            (talk(true, false), false, Some(Duration::ZERO)),
            (talk(true, false), true, Some(Duration::ZERO)),
            (talk(false, true), true, None),
            (talk(true, true), true, None),
        ] {
            assert_eq!(wait(talk, terminal), silent, "{talk:?}, a terminal: {terminal}");
        }
    }

    #[derive(Clone, Default)]
    struct Said(Arc<Mutex<Vec<u8>>>);

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn short_work_is_done_in_silence_and_long_work_ends_its_line() {
        let said = |wait| {
            let said = Said::default();
            drop(Bar::after(wait, said.clone(), elapsed));
            String::from_utf8(said.0.lock().expect("no panic").clone()).expect("text")
        };
        assert_eq!(said(Duration::from_secs(3600)), "");
        assert_eq!(said(Duration::ZERO), "    (0 s)\r\n");
    }
}
