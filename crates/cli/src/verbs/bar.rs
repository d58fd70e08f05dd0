//! Progress of long work: a bar on a terminal, once it takes longer than two seconds; as asked by `-p` in qemu-img's form,
//! which scripts read.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ringtap_vbd::Progress;

use crate::output::Output;

/// How long work may take before a terminal is told of it.
const SOON: Duration = Duration::from_secs(2);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(200);

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

    /// Of a verb that takes no `-p`.
    pub(crate) fn unasked(quiet: bool) -> Talk {
        Talk { quiet, ..Talk::default() }
    }
}

/// Shows how far the work is, until dropped.
pub(crate) struct Bar {
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    /// Show how much of `total` bytes is done.
    pub(crate) fn show(talk: Talk, progress: &Arc<Progress>, total: u64) -> Bar {
        let (progress, total) = (progress.clone(), total.max(1));
        if !talk.progress {
            let bar = styled(total, "{bar:24} {percent:>3} %  {eta} left");
            return Bar::drawn(talk, bar, move |bar| bar.set_position(progress.done().min(total)));
        }
        let line = move || {
            let part = progress.done() as f64 / total as f64;
            format!("    ({:.2}/100%)", part.min(1.0) * 100.0)
        };
        match talk {
            Talk { quiet: true, .. } => Bar { thread: None },
            Talk { beside: true, .. } => Bar::lines(stderr(), line),
            // Asked for, it is a result.
            _ => Bar::lines(stdout(), line),
        }
    }

    /// Show for how long it has gone on, of work whose end is not known.
    pub(crate) fn ticking(talk: Talk) -> Bar {
        Bar::drawn(talk, styled(1, "{spinner} {elapsed}"), ProgressBar::tick)
    }

    /// A bar on a terminal, once the work takes long.
    fn drawn(talk: Talk, bar: ProgressBar, look: impl Fn(&ProgressBar) + Send + 'static) -> Bar {
        if talk.quiet || !stderr().is_terminal() {
            return Bar { thread: None };
        }
        let began = Instant::now();
        Bar::every_while(move |over| {
            if bar.is_hidden() && began.elapsed() > SOON {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            look(&bar);
            if over {
                bar.abandon();
            }
        })
    }

    /// The line of qemu-img's `-p`, over and over.
    fn lines(
        mut to: impl Write + Send + 'static,
        line: impl Fn() -> String + Send + 'static,
    ) -> Bar {
        Bar::every_while(move |over| {
            let end = if over { "\n" } else { "" };
            // In one write, as others may write there too. Nobody may read it.
            let line = format!("{}\r{end}", line());
            let _ = to.write_all(line.as_bytes()).and_then(|()| to.flush());
        })
    }

    /// Look every while, and once when it is over.
    fn every_while(mut look: impl FnMut(bool) + Send + 'static) -> Bar {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                let over = ended.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout);
                look(over);
                if over {
                    return;
                }
            }
        });
        Bar { thread: Some((end, thread)) }
    }
}

/// A bar that is not shown yet.
fn styled(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
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
    fn the_line_that_was_asked_for_ends_however_short_the_work_was() {
        let said = Said::default();
        drop(Bar::lines(said.clone(), || "    (0.00/100%)".to_owned()));
        let said = String::from_utf8(said.0.lock().expect("no panic").clone()).expect("text");
        assert_eq!(said, "    (0.00/100%)\r\n");
    }

    #[test]
    fn templates_are_known() {
        for template in ["{bar:24} {percent:>3} %  {eta} left", "{spinner} {elapsed}"] {
            ProgressStyle::with_template(template).expect(template);
        }
    }
}
