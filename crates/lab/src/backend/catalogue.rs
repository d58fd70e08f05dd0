//! What the files of this folder have, put together: all backends by stage, what a reader calls them and what they are compared with.

use std::sync::{LazyLock, Mutex, PoisonError};

use super::{Backend, FILES};
use crate::sample::Stage;

/// What a file of this folder has for the catalogue.
pub struct File {
    /// Its backends.
    pub entries: &'static [Entry],
    /// What a reader calls a backend of that name, on whatever stage: short, for charts.
    pub labels: &'static [(&'static str, &'static str)],
    /// Comparisons of these with others, or of others with these.
    pub peers: &'static [Peers],
}

/// An entry of the catalogue.
pub struct Entry {
    /// The name in plans and flags.
    pub name: &'static str,
    /// Where its load runs.
    pub stage: Stage,
    /// Its place among those of its stage. The first is what the others are measured against, and runs twice (the A/A twin).
    pub place: u16,
    /// What it is, with the options that make it comparable.
    pub title: &'static str,
    /// Compared unless the user names backends.
    pub usual: bool,
    /// The backend.
    pub backend: &'static dyn Backend,
}

impl Entry {
    /// One that is compared unless the user names backends.
    pub const fn usual(
        stage: Stage,
        place: u16,
        name: &'static str,
        title: &'static str,
        backend: &'static dyn Backend,
    ) -> Entry {
        Entry { name, stage, place, title, usual: true, backend }
    }

    /// One that is compared only where it is named.
    pub const fn named(
        stage: Stage,
        place: u16,
        name: &'static str,
        title: &'static str,
        backend: &'static dyn Backend,
    ) -> Entry {
        Entry { name, stage, place, title, usual: false, backend }
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.stage, self.name)
    }
}

/// Comparisons beside the one with the stage's reference: Ringtap with a peer over the same transport, and the questions that the
/// published comparisons asked.
#[derive(Clone, Copy, Debug)]
pub struct Peers {
    /// Their place among all, which is the order of the report.
    pub place: u16,
    /// Where.
    pub stage: Stage,
    /// Which backend.
    pub arm: &'static str,
    /// Against which others.
    pub against: &'static [&'static str],
}

/// All backends, in the order of the report.
pub fn all() -> impl Iterator<Item = &'static Entry> + Clone {
    static ALL: LazyLock<Vec<&Entry>> = LazyLock::new(|| {
        let mut all: Vec<_> = FILES.iter().flat_map(|file| file.entries).collect();
        all.sort_by_key(|entry| (entry.stage, entry.place));
        all
    });
    ALL.iter().copied()
}

/// All comparisons with peers, in the order of the report.
pub fn peers() -> impl Iterator<Item = &'static Peers> {
    static ALL: LazyLock<Vec<&Peers>> = LazyLock::new(|| {
        let mut all: Vec<_> = FILES.iter().flat_map(|file| file.peers).collect();
        all.sort_by_key(|peers| peers.place);
        all
    });
    ALL.iter().copied()
}

/// The backend of that name on that stage.
pub fn find(stage: Stage, name: &str) -> Option<&'static Entry> {
    let known = all().find(|entry| entry.stage == stage && entry.name == name);
    known.or_else(|| added(stage, name))
}

/// What was added. A handful in the life of a program; they are kept for good, as the catalogue is.
static ADDED: Mutex<Vec<&'static Entry>> = Mutex::new(Vec::new());

/// Adds backends of the user's, in the place of those of that name that were added before.
pub(super) fn add(name: &str, entries: impl IntoIterator<Item = Entry>) {
    let mut known = ADDED.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|entry| entry.name != name);
    known.extend(entries.into_iter().map(|entry| &*Box::leak(Box::new(entry))));
}

/// The backend of that name on that stage, if it was added.
pub fn added(stage: Stage, name: &str) -> Option<&'static Entry> {
    let known = ADDED.lock().unwrap_or_else(PoisonError::into_inner);
    known.iter().copied().find(|entry| entry.stage == stage && entry.name == name)
}

/// What a reader calls a backend of that name.
pub fn label(name: &str) -> Option<&'static str> {
    let mut labels = FILES.iter().flat_map(|file| file.labels);
    labels.find(|(of, _)| *of == name).map(|(_, label)| *label)
}

/// The backend of a stage that is known to be slower, and the one that it is otherwise.
pub fn known_slow(stage: Stage) -> Option<(&'static str, &'static str)> {
    let mut entries = all().filter(|entry| entry.stage == stage);
    entries.find_map(|entry| Some((entry.name, entry.backend.slow_of()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Image, xen};

    #[test]
    fn each_stage_of_the_published_comparisons_has_an_arm_that_is_known_to_be_slower() {
        for stage in Stage::ALL {
            let (slow, base) = known_slow(stage).unwrap_or_else(|| panic!("{stage} has none"));
            assert!(find(stage, slow).is_some() && find(stage, base).is_some(), "{stage}");
        }
    }

    /// Everything that lists, plans and pages ask of a backend is in the catalogue.
    #[test]
    fn every_backend_has_its_words_and_nothing_else_does() {
        let times = |stage, name: &str| {
            all().filter(|entry| entry.stage == stage && entry.name == name).count()
        };
        for entry in all() {
            assert_eq!(times(entry.stage, entry.name), 1, "{entry:?} is there twice");
            assert_eq!(find(entry.stage, entry.name).unwrap().title, entry.title);
            assert!(entry.title.len() > 7, "{entry:?} has no title");
            assert!(
                label(entry.name).is_some_and(|label| label.len() < 45),
                "{entry:?} has no label"
            );
        }
        let labels: Vec<_> = FILES.iter().flat_map(|file| file.labels).collect();
        for (at, (name, _)) in labels.iter().enumerate() {
            assert!(all().any(|entry| entry.name == *name), "{name} is no backend");
            assert!(labels[..at].iter().all(|(other, _)| other != name), "{name} is there twice");
        }
        for peers in peers() {
            for name in std::iter::once(&peers.arm).chain(peers.against) {
                assert_eq!(times(peers.stage, name), 1, "{} {name}", peers.stage);
            }
        }
        let places = |places: Vec<_>| assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
        places(all().map(|entry| (entry.stage, entry.place)).collect());
        places(peers().map(|peers| (Stage::Host, peers.place)).collect());
        for stage in Stage::ALL {
            assert!(all().any(|entry| entry.stage == stage && entry.usual), "{stage}");
        }
    }

    #[test]
    fn titles_say_when_an_overlay_is_made() {
        for entry in all() {
            let in_xen = entry.backend.in_xen().is_some_and(xen::Way::is_overlay);
            if in_xen || matches!(entry.backend.image(), Image::Overlay(_)) {
                let says = entry.title.contains("made anew for each load that writes");
                assert!(says || entry.title.starts_with("the same"), "{}", entry.title);
            }
        }
    }
}
