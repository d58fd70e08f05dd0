//! What the user is told of a verb's work while it goes on, and how signals end it.

use std::sync::{Arc, Mutex, PoisonError};

use ringtap_image_tools::{Error, Note, Progress, Watch, Watcher};

use super::bar::{Bar, Talk};
use super::stop::Signals;
use crate::output::Output;

/// Work that takes long: a bar shows how far it is.
pub(crate) struct Work {
    talk: Talk,
    /// The first signal ends it in order.
    stops: bool,
    begun: Mutex<Option<Begun>>,
}

/// The part that takes long.
struct Begun {
    /// Kept for what it does when it goes.
    _bar: Bar,
    signals: Option<anyhow::Result<Signals>>,
}

impl Work {
    /// Work that signals end as they end any process.
    pub(crate) fn shown(talk: Talk) -> Arc<Work> {
        Arc::new(Work { talk, stops: false, begun: Mutex::default() })
    }

    /// Work that puts in order what it leaves when a signal comes.
    pub(crate) fn stoppable(talk: Talk) -> Arc<Work> {
        Arc::new(Work { talk, stops: true, begun: Mutex::default() })
    }

    /// Work that puts in order what it leaves when a signal comes, and of which only a part can be told how far it is, or none:
    /// until that begins, for how long it has gone on.
    pub(crate) fn ticking(talk: Talk) -> Arc<Work> {
        let begun = Begun { _bar: Bar::ticking(talk), signals: None };
        Arc::new(Work { talk, stops: true, begun: Mutex::new(Some(begun)) })
    }

    /// The bar is to be gone from here on.
    pub(crate) fn over(&self) {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// What it ended with, the signal named where that was it. The bar is gone from here on.
    pub(crate) fn ended<T>(&self, end: Result<T, Error>) -> anyhow::Result<T> {
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (end, begun.and_then(|begun| begun.signals)) {
            (Err(error), Some(signals)) if error.is_stopped() => {
                let why = signals.map_or_else(|error| error, |signals| signals.stopped().into());
                let doing = error.doing().into_iter().rev().map(str::to_owned);
                Err(doing.fold(why, anyhow::Error::context))
            }
            (end, _) => Ok(end?),
        }
    }
}

impl Watch for Work {
    fn begins(&self, total: u64, progress: &Arc<Progress>) {
        let signals = self.stops.then(|| Signals::stop(progress));
        if matches!(signals, Some(Err(_))) {
            progress.stop();
        }
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *begun {
            Some(ticking) if total == 0 => ticking.signals = signals,
            before => {
                // What was shown before ends first.
                drop(before.take());
                *before = Some(Begun { _bar: Bar::show(self.talk, progress, total), signals });
            }
        }
    }

    fn note(&self, note: &Note) {
        if !(self.talk.quiet && note.is_warning()) {
            tell(note);
        }
    }
}

/// Work of which nobody can tell how far it is: with `-p` as not begun and then as done, else for how long it has gone on.
pub(crate) fn show<T, E>(talk: Talk, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let progress = Arc::new(Progress::default());
    let _bar = match talk.progress {
        true => Bar::show(talk, &progress, 1),
        false => Bar::ticking(talk),
    };
    let end = work();
    progress.set(u64::from(end.is_ok()));
    end
}

/// Tells what is worth knowing on stderr.
struct Notes {
    warnings_alone: bool,
}

impl Watch for Notes {
    fn note(&self, note: &Note) {
        if note.is_warning() || !self.warnings_alone {
            tell(note);
        }
    }
}

/// Once, however many images of a command it holds of.
fn tell(note: &Note) {
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let kind = if note.is_warning() { "warning" } else { "note" };
    let line = format!("ringtap: {kind}: {note}");
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if !told.contains(&line) {
        tell!("{line}");
        told.push(line);
    }
}

/// Of work of which no more is told.
pub(crate) fn notes() -> Watcher {
    Arc::new(Notes { warnings_alone: false })
}

/// The same where programs read what is printed, and perhaps stderr with it.
pub(crate) fn notes_beside(output: Output) -> Watcher {
    Arc::new(Notes { warnings_alone: output == Output::Json })
}
