//! What a virtual disk may hold, from what its guest asked for and was told.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::history::{Event, History};
use crate::{Token, Violation};

/// A write (0: what was there at first) and the value it gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    by: u64,
    value: u64,
}

#[derive(Clone, Debug)]
struct Sector {
    /// What a read that begins now may give; writes in flight included.
    view: Vec<Held>,
    /// What it may hold after a power cut now: always all of `view`, and more.
    medium: Vec<Held>,
    /// Writes in flight.
    writers: u32,
}

#[derive(Clone, Debug)]
enum Request {
    Write {
        range: Range<u64>,
        durable: bool,
        certain: bool,
        beside: Vec<u64>,
    },
    /// The sectors that were not yet sure to be stable, with the writes it covers.
    Flush {
        covers: Vec<(u64, Vec<u64>)>,
    },
    Read {
        range: Range<u64>,
        seen: Vec<Seen>,
    },
}

/// What a read may give for one sector.
#[derive(Clone, Debug)]
struct Seen {
    values: Vec<Held>,
    /// Whether a write was in flight beside the read.
    disturbed: bool,
}

/// A virtual disk of sectors that hold values, as a guest knows it.
///
/// Tell it when a request begins and when it ends. A sector may be read as any write that has begun
/// and was not surely overwritten: by one that began after it had ended, and has ended itself. It may
/// survive a power cut as any write that was not surely overwritten by one that is stable: ended
/// before an acknowledged flush began, or acknowledged as durable. A write that failed may have
/// happened or not. All zeros is value 0.
#[derive(Clone, Debug)]
pub struct Model {
    sectors: Vec<Sector>,
    in_flight: BTreeMap<Token, Request>,
    last: u64,
    history: History,
}

impl Model {
    /// A disk of so many sectors, all zeros and stable.
    pub fn new(sectors: u64) -> Model {
        Model::holding(&vec![0; sectors as usize])
    }

    /// A disk that holds these values, stable: what was found after a power cut, for example.
    pub fn holding(values: &[u64]) -> Model {
        let sector = |value: &u64| {
            let held = vec![Held { by: 0, value: *value }];
            Sector { view: held.clone(), medium: held, writers: 0 }
        };
        Model {
            sectors: values.iter().map(sector).collect(),
            in_flight: BTreeMap::new(),
            last: 0,
            history: History::default(),
        }
    }

    /// Sectors of the disk.
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// A write, or write-zeroes with value 0, begins. `durable`: with FUA, or the disk has no
    /// volatile cache.
    pub fn begin_write(&mut self, range: Range<u64>, value: u64, durable: bool) -> Token {
        self.change(range, value, durable, true)
    }

    /// A discard begins. It may make its sectors zeros, each for itself, or leave them.
    pub fn begin_discard(&mut self, range: Range<u64>) -> Token {
        self.change(range, 0, false, false)
    }

    fn change(&mut self, range: Range<u64>, value: u64, durable: bool, certain: bool) -> Token {
        let token = self.next();
        let held = Held { by: token.0, value };
        let writes = self.in_flight.iter().filter_map(|(token, request)| match request {
            Request::Write { .. } => Some(token.0),
            _ => None,
        });
        let beside = writes.collect();
        for request in self.in_flight.values_mut() {
            let Request::Read { range: read, seen } = request else { continue };
            for (sector, seen) in read.clone().zip(seen) {
                if range.contains(&sector) {
                    seen.values.push(held);
                    seen.disturbed = true;
                }
            }
        }
        for sector in range.clone() {
            let sector = &mut self.sectors[sector as usize];
            sector.view.push(held);
            sector.medium.push(held);
            sector.writers += 1;
        }
        let event = match certain {
            true => Event::Wrote { range: range.clone(), value, durable },
            false => Event::Discarded { range: range.clone() },
        };
        self.history.push(token, event);
        self.in_flight.insert(token, Request::Write { range, durable, certain, beside });
        token
    }

    /// A flush begins.
    pub fn begin_flush(&mut self) -> Token {
        let token = self.next();
        let unsure = (0..).zip(&self.sectors).filter(|(_, sector)| sector.medium.len() > 1);
        let covers = unsure.map(|(number, sector)| {
            (number, sector.view.iter().map(|held| held.by).collect::<Vec<u64>>())
        });
        let covers = covers.collect();
        self.history.push(token, Event::Flushes);
        self.in_flight.insert(token, Request::Flush { covers });
        token
    }

    /// A read begins.
    pub fn begin_read(&mut self, range: Range<u64>) -> Token {
        let token = self.next();
        let sectors = &self.sectors[range.start as usize..range.end as usize];
        let seen = sectors
            .iter()
            .map(|sector| Seen { values: sector.view.clone(), disturbed: sector.writers > 0 });
        let seen = seen.collect();
        self.history.push(token, Event::Reads { range: range.clone() });
        self.in_flight.insert(token, Request::Read { range, seen });
        token
    }

    fn next(&mut self) -> Token {
        self.last += 1;
        Token(self.last)
    }

    /// A write, discard or flush was acknowledged.
    pub fn acknowledge(&mut self, token: Token) {
        self.history.push(token, Event::Acknowledged);
        match self.in_flight.remove(&token) {
            Some(Request::Write { range, durable, certain, beside }) => {
                for sector in range {
                    let sector = &mut self.sectors[sector as usize];
                    sector.writers -= 1;
                    let stays = |held: &Held| held.by >= token.0 || beside.contains(&held.by);
                    if certain {
                        sector.view.retain(stays);
                    }
                    if certain && durable {
                        sector.medium.retain(stays);
                    }
                }
            }
            Some(Request::Flush { covers }) => {
                for (number, writes) in covers {
                    let stays = |held: &Held| held.by > token.0 || writes.contains(&held.by);
                    self.sectors[number as usize].medium.retain(stays);
                }
            }
            Some(Request::Read { .. }) | None => {}
        }
    }

    /// A request failed: a write may have happened or not, a flush promises nothing.
    pub fn fail(&mut self, token: Token) {
        self.history.push(token, Event::Failed);
        if let Some(Request::Write { range, .. }) = self.in_flight.remove(&token) {
            for sector in range {
                self.sectors[sector as usize].writers -= 1;
            }
        }
    }

    /// Whoever served the disk was killed: what was in flight may have happened or not.
    pub fn fail_all(&mut self) {
        let tokens: Vec<Token> = self.in_flight.keys().copied().collect();
        for token in tokens {
            self.fail(token);
        }
    }

    /// A read gave these values, one for each sector.
    pub fn read_returned(&mut self, token: Token, values: &[u64]) -> Result<(), Violation> {
        self.history.push(token, Event::Returned(values.to_vec()));
        let Some(Request::Read { range, seen }) = self.in_flight.remove(&token) else {
            return Ok(());
        };
        for ((number, seen), value) in range.zip(seen).zip(values) {
            if !seen.values.iter().any(|held| held.value == *value) {
                return Err(self.violation("a read", number, *value, &seen.values));
            }
            if !seen.disturbed {
                // Nobody wrote: from now on it is this one.
                self.sectors[number as usize].view.retain(|held| held.value == *value);
            }
        }
        Ok(())
    }

    /// The values that a read which begins now may give for a sector.
    pub fn may_read(&self, sector: u64) -> Vec<u64> {
        values(&self.sectors[sector as usize].view)
    }

    /// The values that a sector may hold after a power cut now.
    pub fn may_hold(&self, sector: u64) -> Vec<u64> {
        values(&self.sectors[sector as usize].medium)
    }

    /// Whether a sector may hold this value after a power cut now.
    pub fn check_after_cut(&self, sector: u64, value: u64) -> Result<(), Violation> {
        let medium = &self.sectors[sector as usize].medium;
        if medium.iter().any(|held| held.value == value) {
            return Ok(());
        }
        Err(self.violation("after a power cut", sector, value, medium))
    }

    /// Whether a whole disk found after a power cut now, one value for each sector, may be.
    pub fn check_disk_after_cut(&self, values: &[u64]) -> Result<(), Violation> {
        (0..).zip(values).try_for_each(|(sector, value)| self.check_after_cut(sector, *value))
    }

    /// Whether a whole disk that is read now, one value for each sector, may be.
    pub fn check_disk_alive(&self, values: &[u64]) -> Result<(), Violation> {
        (0..).zip(values).try_for_each(|(sector, value)| {
            let view = &self.sectors[sector as usize].view;
            match view.iter().any(|held| held.value == *value) {
                true => Ok(()),
                false => Err(self.violation("by who lives on", sector, *value, view)),
            }
        })
    }

    fn violation(
        &self,
        found_by: &'static str,
        sector: u64,
        found: u64,
        allowed: &[Held],
    ) -> Violation {
        let story = self.history.of_sector(sector);
        Violation { sector, found, allowed: values(allowed), found_by, story }
    }
}

fn values(held: &[Held]) -> Vec<u64> {
    let mut values: Vec<u64> = held.iter().map(|held| held.value).collect();
    values.sort_unstable();
    values.dedup();
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_certain_when_acknowledged_and_stable_when_flushed() {
        let mut model = Model::new(4);
        let write = model.begin_write(1..3, 7, false);
        assert_eq!((model.may_read(1), model.may_hold(1)), (vec![0, 7], vec![0, 7]));
        model.acknowledge(write);
        assert_eq!((model.may_read(1), model.may_hold(1)), (vec![7], vec![0, 7]));
        let flush = model.begin_flush();
        let later = model.begin_write(2..4, 8, false);
        model.acknowledge(later);
        model.acknowledge(flush);
        assert_eq!(
            (model.may_hold(1), model.may_hold(2), model.may_hold(3)),
            (vec![7], vec![7, 8], vec![0, 8])
        );
        assert!(model.check_disk_after_cut(&[0, 7, 8, 0]).is_ok());
        assert_eq!(model.check_disk_after_cut(&[0, 0, 8, 0]).map_err(|v| v.sector), Err(1));
    }

    #[test]
    fn a_flush_covers_what_was_acknowledged_before_it_only() {
        let mut model = Model::new(1);
        let write = model.begin_write(0..1, 7, false);
        let flush = model.begin_flush();
        model.acknowledge(write);
        model.acknowledge(flush);
        assert_eq!(model.may_hold(0), [0, 7]);
        let flush = model.begin_flush();
        model.fail(flush);
        assert_eq!(model.may_hold(0), [0, 7]);
        let flush = model.begin_flush();
        model.acknowledge(flush);
        assert_eq!(model.may_hold(0), [7]);
    }

    #[test]
    fn writes_side_by_side_leave_either_and_a_read_settles_it() {
        let mut model = Model::new(1);
        let (a, b) = (model.begin_write(0..1, 1, false), model.begin_write(0..1, 2, false));
        model.acknowledge(b);
        let read = model.begin_read(0..1);
        model.read_returned(read, &[2]).expect("allowed");
        assert_eq!(model.may_read(0), [1, 2]);
        model.acknowledge(a);
        assert_eq!(model.may_read(0), [1, 2]);
        let read = model.begin_read(0..1);
        model.read_returned(read, &[1]).expect("allowed");
        assert_eq!((model.may_read(0), model.may_hold(0)), (vec![1], vec![0, 1, 2]));
        let flush = model.begin_flush();
        model.acknowledge(flush);
        assert_eq!(model.may_hold(0), [1]);
        let read = model.begin_read(0..1);
        let violation = model.read_returned(read, &[2]).expect_err("settled");
        assert!(violation.to_string().contains("read of 0..1"), "{violation}");
    }

    #[test]
    fn a_durable_write_needs_no_flush_and_overtakes_none_beside_it() {
        let mut model = Model::new(1);
        let beside = model.begin_write(0..1, 1, false);
        let durable = model.begin_write(0..1, 2, true);
        model.acknowledge(durable);
        assert_eq!(model.may_hold(0), [1, 2]);
        model.acknowledge(beside);
        let durable = model.begin_write(0..1, 3, true);
        assert_eq!(model.may_hold(0), [1, 2, 3]);
        model.acknowledge(durable);
        assert_eq!(model.may_hold(0), [3]);
    }

    #[test]
    fn discards_and_failed_writes_may_have_happened() {
        let mut model = Model::holding(&[5]);
        let discard = model.begin_discard(0..1);
        model.acknowledge(discard);
        assert_eq!((model.may_read(0), model.may_hold(0)), (vec![0, 5], vec![0, 5]));
        let write = model.begin_write(0..1, 6, true);
        model.fail(write);
        assert_eq!((model.may_read(0), model.may_hold(0)), (vec![0, 5, 6], vec![0, 5, 6]));
        let read = model.begin_read(0..1);
        model.read_returned(read, &[5]).expect("allowed");
        assert_eq!(model.may_read(0), [5]);
    }

    #[test]
    fn a_read_may_give_what_was_written_and_overwritten_beside_it() {
        let mut model = Model::new(1);
        let read = model.begin_read(0..1);
        for value in [1, 2] {
            let write = model.begin_write(0..1, value, false);
            model.acknowledge(write);
        }
        let late = model.begin_read(0..1);
        model.read_returned(read, &[1]).expect("it was there meanwhile");
        assert!(model.read_returned(late, &[1]).is_err());
    }
}
