//! What changes while disks are served, written to the folder of disks before anybody is told that it has changed.
//!
//! After each event it is looked whether a file would say something else now. Replies and events wait until what would
//! is stable: a thread of its own writes it, so nobody waits for a disk on the thread that serves.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::control::{Held, hold_back, let_go};
use crate::keeper::{Keeper, Work};
use crate::running::{Event, Running};
use crate::threads::{contained, spawn};
use crate::written::{UNFINISHED, write};
use crate::{Error, kept};

impl Keeper {
    /// Begin to keep a folder.
    pub(crate) fn start(folder: &Path, events: Sender<Event>) -> Result<Keeper, Error> {
        let failed = |error: io::Error| {
            let folder = folder.display();
            Error::File(format!("cannot keep what changes in {folder}: {error}"))
        };
        fs::create_dir_all(folder).map_err(failed)?;
        for entry in fs::read_dir(folder).map_err(failed)?.flatten() {
            if entry.file_name().to_string_lossy().ends_with(UNFINISHED) {
                // What a killed server was about to write was told nobody.
                let _ = fs::remove_file(entry.path());
            }
        }
        let (work, inbox) = channel();
        let undone = Arc::<AtomicUsize>::default();
        let (theirs, place) = (undone.clone(), folder.to_owned());
        let thread = spawn("keeper", move || write_all(&place, &inbox, &theirs, &events))?;
        let (work, thread) = (Some(work), Some(thread));
        let (folder, texts, owed) = (folder.to_owned(), BTreeMap::new(), BTreeSet::new());
        Ok(Keeper { folder, texts, work, undone, owed, thread })
    }
}

/// Handle an event: what it changes is stable before anybody is told.
pub(crate) fn keeping<T>(running: &mut Running, handle: impl FnOnce(&mut Running) -> T) -> T {
    if running.keeper.is_none() {
        return handle(running);
    }
    hold_back();
    let end = handle(running);
    let held = let_go();
    if let Some(mut keeper) = running.keeper.take() {
        keeper.look(running, held);
        running.keeper = Some(keeper);
    }
    end
}

/// As [`keeping`], of something that a client asked for.
pub(crate) fn carry_out(running: &mut Running, what: impl FnOnce(&mut Running)) {
    keeping(running, |running| _ = contained(|| what(running)));
}

impl Keeper {
    /// What there is now is what the files say.
    pub(crate) fn know(&mut self, running: &Running) {
        let known = kept::texts(running);
        self.texts.extend(known.into_iter().filter_map(|(file, text)| Some((file, text.ok()?))));
    }

    /// Wait until what has changed is written, though no longer than so.
    pub(crate) fn settle(&self, limit: Duration) {
        let began = Instant::now();
        while self.undone.load(SeqCst) > 0 && began.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn look(&mut self, running: &mut Running, mut held: Vec<Held>) {
        let mut work = Work { removed: vec![], written: vec![], held: vec![] };
        // What ends with the server comes again with the next.
        if !running.quit {
            self.place_new(running);
            let now = kept::texts(running);
            let stays = |file: &PathBuf| now.contains_key(file);
            work.removed.extend(self.texts.keys().filter(|file| !stays(file)).cloned());
            self.texts.retain(|file, _| stays(file));
            for (file, text) in now {
                match text {
                    Ok(text) if self.texts.get(&file) != Some(&text) => {
                        self.texts.insert(file.clone(), text.clone());
                        work.written.push((file, text));
                    }
                    Ok(_) => {}
                    Err(why) => {
                        tracing::error!("{} is not kept: {why}", file.display());
                        std::mem::take(&mut held)
                            .into_iter()
                            .for_each(|held| held.tell(Some(&why)));
                    }
                }
            }
        }
        self.pay(&mut work);
        if work.removed.is_empty() && work.written.is_empty() && self.undone.load(SeqCst) == 0 {
            return held.into_iter().for_each(|held| held.tell(None));
        }
        work.held = held;
        self.undone.fetch_add(1, SeqCst);
        if let Some(thread) = &self.work {
            // It lives as long as this.
            let _ = thread.send(work);
        }
    }

    /// Find names for the files of what has come.
    fn place_new(&self, running: &mut Running) {
        let taken = |file: &Path| self.texts.contains_key(file) || file.exists();
        let free = |name: &str| {
            let first = std::iter::once(self.folder.join(format!("{name}.toml")));
            let more = (2..).map(|number| self.folder.join(format!("{name}-{number}.toml")));
            first.chain(more).find(|file| !taken(file))
        };
        for served in running.disks.values_mut() {
            if served.disk.keeping.file.is_none() && kept::stands_alone(served) {
                served.disk.keeping.file = free(served.node());
            }
        }
        let files = &mut running.looked.groups;
        files.retain(|name, _| running.groups.contains_key(name));
        for name in running
            .groups
            .keys()
            .filter(|name| !files.contains_key(*name))
            .cloned()
            .collect::<Vec<_>>()
        {
            let file = free(&format!("group-{name}"));
            files.extend(file.map(|file| (name, file)));
        }
    }

    /// Where something has changed what failed before is tried again.
    fn pay(&mut self, work: &mut Work) {
        if work.removed.is_empty() && work.written.is_empty() {
            return;
        }
        let is_written = |file: &PathBuf| work.written.iter().any(|(written, _)| written == file);
        let owed: Vec<_> = self.owed.iter().filter(|file| !is_written(file)).cloned().collect();
        for file in owed {
            match self.texts.get(&file) {
                Some(text) => work.written.push((file, text.clone())),
                None if !work.removed.contains(&file) => work.removed.push(file),
                None => {}
            }
        }
        self.owed.clear();
    }
}

fn write_all(folder: &Path, inbox: &Receiver<Work>, undone: &AtomicUsize, events: &Sender<Event>) {
    for work in inbox {
        let panicked = || Err(io::Error::other("a panic, of which the log tells"));
        let end =
            contained(|| write(folder, &work.removed, &work.written)).unwrap_or_else(panicked);
        let why = end.err().map(|error| {
            let folder = folder.display();
            let why = format!("it is done, and not kept for the next server: {folder}: {error}");
            tracing::error!("{why}");
            let files: Vec<PathBuf> = work.written.iter().map(|(file, _)| file.clone()).collect();
            let removed = work.removed.clone();
            let note = move |running: &mut Running| {
                let owed = files.into_iter().chain(removed);
                running.keeper.iter_mut().for_each(|keeper| keeper.owed.extend(owed.clone()));
            };
            // Nobody attends any more where the process ends.
            let _ = events.send(Event::Do(Box::new(note)));
            why
        });
        work.held.into_iter().for_each(|held| held.tell(why.as_deref()));
        undone.fetch_sub(1, SeqCst);
    }
}
