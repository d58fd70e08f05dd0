//! Progress of long work: on a terminal, once it takes longer than two seconds; or as asked.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use ringtap_vbd::Progress;

/// Options about what is said on the way.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Talk {
    /// Show progress at once, to a file too [default: after two seconds, on a terminal]
    #[arg(short, long)]
    pub(crate) progress: bool,

    /// Say nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Shows how far the work is, until dropped.
pub(crate) struct Bar {
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    /// Show how much of `total` bytes is done.
    pub(crate) fn show(talk: Talk, progress: &Arc<Progress>, total: u64) -> Bar {
        let terminal = stderr().is_terminal();
        if talk.quiet || !(talk.progress || terminal) {
            return Bar { thread: None };
        }
        let progress = progress.clone();
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            let began = Instant::now();
            let mut shown = false;
            loop {
                let over = ended.recv_timeout(Duration::from_millis(200));
                shown |= talk.progress || began.elapsed() > Duration::from_secs(2);
                let over = !matches!(over, Err(RecvTimeoutError::Timeout));
                if shown {
                    let part = progress.done() as f64 / total.max(1) as f64;
                    let mut err = stderr().lock();
                    let _ = write!(err, "    ({:.2}/100%)\r", part.min(1.0) * 100.0);
                    if over {
                        let _ = writeln!(err);
                    }
                    let _ = err.flush();
                }
                if over {
                    return;
                }
            }
        });
        Bar { thread: Some((end, thread)) }
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
