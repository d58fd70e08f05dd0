//! One place of a medium: what it is known to hold, and what it was given since the last sync.

/// Names an operation of a disk; later operations have greater numbers.
pub(crate) type OpId = u64;

#[derive(Clone, Debug)]
struct Version<T> {
    by: OpId,
    value: T,
    /// The disk's count of completions when the operation completed.
    completed: Option<u64>,
    /// A failed sync dropped it from the cache: no later sync will write it.
    forgotten: bool,
}

/// A stable value and the values written over it since, oldest first.
#[derive(Clone, Debug)]
pub(crate) struct Versions<T> {
    stable: T,
    since: Vec<Version<T>>,
}

impl<T: Clone> Versions<T> {
    pub(crate) fn new(stable: T) -> Versions<T> {
        Versions { stable, since: Vec::new() }
    }

    /// What a reader sees while the power is on.
    pub(crate) fn view(&self) -> &T {
        self.since.last().map_or(&self.stable, |version| &version.value)
    }

    pub(crate) fn stable(&self) -> &T {
        &self.stable
    }

    pub(crate) fn is_dirty(&self) -> bool {
        !self.since.is_empty()
    }

    pub(crate) fn push(&mut self, by: OpId, value: T) {
        match self.since.last_mut() {
            Some(last) if last.by == by => last.value = value,
            _ => self.since.push(Version { by, value, completed: None, forgotten: false }),
        }
    }

    pub(crate) fn complete(&mut self, by: OpId, at: u64) {
        for version in self.since.iter_mut().filter(|version| version.by == by) {
            version.completed = Some(at);
        }
    }

    /// Make stable what this operation wrote.
    pub(crate) fn harden(&mut self, by: OpId) {
        let last = self.since.iter().rposition(|version| version.by == by);
        self.settle(last);
    }

    /// Make stable what had completed when the disk had counted `mark` completions.
    pub(crate) fn sync(&mut self, mark: u64) {
        let last = self.since.iter().rposition(|version| {
            !version.forgotten && version.completed.is_some_and(|completed| completed <= mark)
        });
        self.settle(last);
    }

    /// A sync of what had completed at `mark` failed, and the cache calls it clean all the same.
    pub(crate) fn forget(&mut self, mark: u64) {
        for version in &mut self.since {
            version.forgotten |= version.completed.is_some_and(|completed| completed <= mark);
        }
    }

    /// The program that wrote was killed: what had completed is there, of what was in flight as much
    /// as `choose` says, given how many values that may be. All of it has completed by now.
    pub(crate) fn kill(&mut self, at: u64, choose: impl FnOnce(usize) -> usize) {
        let done = self.since.iter().rposition(|version| version.completed.is_some());
        let sure = done.map_or(0, |last| last + 1);
        self.since.truncate(sure + choose(self.since.len() - sure));
        for version in &mut self.since {
            version.completed.get_or_insert(at);
        }
    }

    fn settle(&mut self, last: Option<usize>) {
        if let Some(last) = last {
            if let Some(version) = self.since.drain(..=last).next_back() {
                self.stable = version.value;
            }
        }
    }

    /// Everything it may hold after a power cut, the stable value first.
    pub(crate) fn outcomes(&self) -> impl ExactSizeIterator<Item = &T> {
        Outcomes { versions: self, at: 0 }
    }

    /// The newest value by an operation not later than `by`.
    pub(crate) fn as_of(&self, by: OpId) -> &T {
        let kept = self.since.iter().rev().find(|version| version.by <= by);
        kept.map_or(&self.stable, |version| &version.value)
    }
}

struct Outcomes<'a, T> {
    versions: &'a Versions<T>,
    at: usize,
}

impl<'a, T> Iterator for Outcomes<'a, T> {
    type Item = &'a T;

    fn next(&mut self) -> Option<&'a T> {
        let at = self.at;
        self.at += 1;
        match at {
            0 => Some(&self.versions.stable),
            _ => self.versions.since.get(at - 1).map(|version| &version.value),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.versions.since.len() + 1).saturating_sub(self.at);
        (left, Some(left))
    }
}

impl<T> ExactSizeIterator for Outcomes<'_, T> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(versions: &Versions<char>) -> String {
        versions.outcomes().collect()
    }

    #[test]
    fn a_kill_keeps_what_had_completed_and_some_of_what_had_not() {
        let mut place = Versions::new('0');
        place.push(1, 'a');
        place.push(2, 'b');
        place.push(3, 'c');
        place.complete(2, 1);
        let mut less = place.clone();
        less.kill(5, |in_flight| {
            assert_eq!(in_flight, 1);
            0
        });
        assert_eq!((*less.view(), all(&less)), ('b', "0ab".to_owned()));
        place.kill(5, |in_flight| in_flight);
        assert_eq!((*place.view(), all(&place)), ('c', "0abc".to_owned()));
        place.sync(5);
        assert_eq!(all(&place), "c");
    }

    #[test]
    fn a_sync_keeps_what_had_completed_when_it_began() {
        let mut place = Versions::new('0');
        place.push(1, 'a');
        place.push(2, 'b');
        place.push(3, 'c');
        assert_eq!(all(&place), "0abc");
        place.complete(2, 1);
        place.complete(3, 2);
        place.sync(1);
        assert_eq!(all(&place), "bc");
        place.sync(2);
        assert_eq!(all(&place), "c");
    }

    #[test]
    fn a_durable_write_does_not_harden_what_came_after() {
        let mut place = Versions::new('0');
        place.push(1, 'a');
        place.push(2, 'b');
        place.harden(1);
        assert_eq!(all(&place), "ab");
        assert_eq!((*place.view(), *place.as_of(1)), ('b', 'a'));
    }

    #[test]
    fn what_a_failed_sync_forgot_no_later_sync_keeps() {
        let mut place = Versions::new('0');
        place.push(1, 'a');
        place.complete(1, 1);
        place.forget(1);
        place.sync(5);
        assert_eq!(all(&place), "0a");
        place.push(2, 'b');
        place.complete(2, 6);
        place.sync(6);
        assert_eq!(all(&place), "b");
    }
}
