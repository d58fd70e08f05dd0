//! Which image a sidecar is of, and whether that is in the state in which the sidecar's writer left it.
//!
//! It is the same file or device by its identity. It is in that state: after a clean stop, where it was last written to at
//! the very time at which it was then; after a kill, where the witness of the image's changes says so
//! ([`crate::Standing`]); after a power cut, where nobody has written to it since the machine started, and it was not put
//! back to a time before the bits were last written as a whole. A device has no such time, and the kernel counts bytes written to it only
//! since it has been there: those must be as many as at the clean stop, or none where the machine has been started since.
//! All that must be so of an external data file, too.

use std::io;
use std::sync::atomic::Ordering::SeqCst;

use ringtap_io::{Lent, Wall, Witness, Words};
use rustix::time::{ClockId, clock_gettime};

use super::layout::{DataFile, Known, Meta, Next};
use super::memory::BitMemory;
use crate::file_facts::Facts;
use crate::number::new_number;
use crate::{Container, RestartLog, Standing, boot, record};

/// What memory of a session begins with.
const MAGIC: u64 = 0x5254_4150_4249_5401;
/// The same where not all that changed is in the memory of bits.
const SHORT: u64 = 0x5254_4150_4249_5402;
const BOOT: usize = 1;
/// Bytes written to the device when it began.
const WRITTEN: usize = 3;
const WITNESS: usize = 7;
const WORDS: usize = WITNESS + Witness::WORDS;
/// Of an external data file: bytes written to the device when it began, and its witness.
const DATA_WRITTEN: usize = WORDS;
const DATA_WITNESS: usize = WORDS + 7;
const DATA_WORDS: usize = DATA_WITNESS + Witness::WORDS;

/// An image that is open, as a sidecar knows it.
pub struct Binding {
    identity: String,
    boot: u128,
    /// When the machine started.
    booted: Wall,
    container: Container,
    opened: Known,
    data: Option<Data>,
    /// What says how the image stands, as long as this is there.
    session: std::sync::OnceLock<(Words, Vec<Lent>)>,
}

/// The external data file of an image that is open.
struct Data {
    identity: String,
    container: Container,
    opened: Known,
}

/// What a sidecar says of an image.
#[derive(Debug)]
pub(super) struct Found {
    session: u64,
    known: Known,
    data: Option<DataFile>,
}

/// What a sidecar's bits are worth.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Those in memory are exact.
    InMemory,
    /// Those that are stored are.
    Stored,
    /// And with the regions logged they are all that may have changed.
    StoredAndLogged,
    /// Nothing.
    Lost(String),
}

impl Binding {
    /// That of an image that nobody has written to since it was opened, nor to its external data file.
    pub fn of(container: &Container, data: Option<&Container>) -> io::Result<Binding> {
        let none =
            || io::Error::new(io::ErrorKind::Unsupported, "nothing tells its file from others");
        let identify =
            |container: &Container| record::identity_of(&container.place().at()).ok_or_else(none);
        let identity = identify(container)?;
        let data = data.map(|data| Ok::<_, io::Error>((identify(data)?, data))).transpose()?;
        let folder = RestartLog::usual_folder();
        crate::restart::make_folder(&folder)?;
        let boot = boot::identity(&folder)?;
        let nanos = |clock| {
            let time = clock_gettime(clock);
            (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
        };
        let booted = nanos(ClockId::Realtime).saturating_sub(nanos(ClockId::Boottime));
        let binding = Binding::simulated(container, identity, boot, booted);
        Ok(match data {
            Some((identity, data)) => binding.with_data(data, identity),
            None => binding,
        })
    }

    /// The same, of which a simulation says all that.
    pub fn simulated(container: &Container, identity: String, boot: u128, booted: Wall) -> Binding {
        let (opened, session) = (of(container.facts_at_first()), Default::default());
        Binding {
            identity,
            boot,
            booted,
            container: container.clone(),
            opened,
            data: None,
            session,
        }
    }

    /// The same of an image with an external data file.
    pub fn with_data(self, data: &Container, identity: String) -> Binding {
        let opened = of(data.facts_at_first());
        Binding { data: Some(Data { identity, container: data.clone(), opened }), ..self }
    }

    /// The image.
    pub(super) fn container(&self) -> &Container {
        &self.container
    }

    /// Whether it is that of an image.
    pub fn is_of(&self, image: &Container) -> bool {
        record::identity_of(&image.place().at()).as_ref() == Some(&self.identity)
    }

    /// Whether both are of one image.
    pub(super) fn is_same(&self, other: &Binding) -> bool {
        self.identity == other.identity
    }

    /// How this image stood, and the number of the memory that says how it stands, where a sidecar is of it; or of the image
    /// before, whose disk was about to go on in this one when its server was killed or the power was cut.
    pub(super) fn found_in(&self, meta: &Meta) -> Option<Found> {
        if meta.identity == self.identity {
            return Some(Found {
                session: meta.session,
                known: meta.known,
                data: meta.data.clone(),
            });
        }
        let next = meta.next.as_ref().filter(|_| !meta.closed);
        let next = next.filter(|next| next.identity == self.identity)?;
        Some(Found { session: next.session, known: next.known, data: next.data.clone() })
    }

    /// Changes are noted from now on; gives the number of the memory in which they are.
    pub(super) fn begin(&self, memory: &dyn BitMemory) -> io::Result<u64> {
        let number = new_number();
        let count = if self.data.is_some() { DATA_WORDS } else { WORDS };
        let words = memory.words(number, Some(count))?;
        let set = |at: usize, value: u64| words.get(at).map(|word| word.store(value, SeqCst));
        set(BOOT, (self.boot >> 64) as u64);
        set(BOOT + 1, self.boot as u64);
        let data = self.data.iter().map(|data| (&data.container, DATA_WRITTEN, DATA_WITNESS));
        let mut lent = vec![];
        for (container, written, witness) in
            [(&self.container, WRITTEN, WITNESS)].into_iter().chain(data)
        {
            let facts = container.file_facts();
            set(written, facts.written.unwrap_or_default());
            Witness::reset(&words, witness, facts.modified.unwrap_or_default());
            // A restart log's words stay: it tells how the image stands when it is opened.
            lent.extend(container.witness().lend(words.clone(), witness));
        }
        set(0, MAGIC);
        let _first = self.session.set((words, lent));
        Ok(number)
    }

    /// See [`super::BitmapStore::memory_is_short`].
    pub(super) fn memory_is_short(&self) {
        let word = self.session.get().and_then(|(words, _)| words.first());
        word.inspect(|word| word.store(SHORT, SeqCst));
    }

    /// What is to be believed.
    pub(super) fn judge(&self, meta: &Meta, found: &Found, memory: &dyn BitMemory) -> Verdict {
        let same_boot = meta.boot == format!("{:032x}", self.boot);
        let same_data = match (&self.data, &found.data) {
            (Some(own), Some(data)) => own.identity == data.identity,
            (own, data) => own.is_none() && data.is_none(),
        };
        if !same_data {
            return Verdict::Lost("its data file is another".into());
        }
        let end = match meta.closed {
            true => self.of_all(found, |now, then| after_close(now, then, same_boot)),
            false if same_boot => return self.after_kill(found.session, memory),
            false => self.of_all(found, |now, then| self.after_power_cut(now, then)),
        };
        let good = if meta.closed { Verdict::Stored } else { Verdict::StoredAndLogged };
        end.map_or_else(Verdict::Lost, |()| good)
    }

    /// Whether the image is as it was, and its data file.
    fn of_all(
        &self,
        found: &Found,
        is_well: impl Fn(&Known, &Known) -> Result<(), String>,
    ) -> Result<(), String> {
        is_well(&self.opened, &found.known).map_err(|why| format!("the image {why}"))?;
        let data = self.data.as_ref().zip(found.data.as_ref());
        let end = data.map_or(Ok(()), |(own, data)| is_well(&own.opened, &data.known));
        end.map_err(|why| format!("its data file {why}"))
    }

    fn after_kill(&self, session: u64, memory: &dyn BitMemory) -> Verdict {
        let Ok(words) = memory.words(session, None) else { return gone() };
        let word = |at: usize| words.get(at).map_or(0, |word| word.load(SeqCst));
        let begin = word(0);
        let boot = u128::from(word(BOOT)) << 64 | u128::from(word(BOOT + 1));
        if ![MAGIC, SHORT].contains(&begin) || boot != self.boot {
            return gone();
        }
        let standing = |container: &Container, written, witness| match container.standing() {
            Some(standing) => standing.clone(),
            None => {
                let said = Witness::read(&words, witness);
                Standing::of(said, &container.facts_at_first(), word(written))
            }
        };
        let own = standing(&self.container, WRITTEN, WITNESS);
        let data = self.data.as_ref();
        let data = data.map(|data| standing(&data.container, DATA_WRITTEN, DATA_WITNESS));
        for standing in [Some(own), data].into_iter().flatten() {
            if let Standing::Other(why) | Standing::Unknown(why) = standing {
                return Verdict::Lost(why);
            }
        }
        if begin == MAGIC { Verdict::InMemory } else { Verdict::StoredAndLogged }
    }

    fn after_power_cut(&self, now: &Known, then: &Known) -> Result<(), String> {
        let Some(modified) = now.modified else {
            return match now.written {
                Some(0) => Ok(()),
                _ => Err("was written to since the machine started: it is a device".into()),
            };
        };
        if modified > self.booted {
            return Err("was written to since the machine started".into());
        }
        if then.modified.is_none_or(|before| modified < before) {
            return Err("was put back to an earlier state".into());
        }
        Ok(())
    }

    /// What is to be written of it, with no bitmaps. `closed`: nobody writes to it any more. `next`: the disk is about to go
    /// on in that one.
    pub(super) fn describe(
        &self,
        session: u64,
        closed: bool,
        next: Option<&Next>,
        region: u64,
    ) -> Meta {
        Meta {
            identity: self.identity.clone(),
            boot: format!("{:032x}", self.boot),
            session,
            region,
            known: known(&self.container),
            data: self.data_file(),
            closed,
            next: next.filter(|_| !closed).cloned(),
            part: None,
            bitmaps: vec![],
        }
    }

    /// What is to be written of the image that a disk is about to go on in, which it is.
    pub(super) fn as_next(&self, session: u64) -> Next {
        let (identity, known) = (self.identity.clone(), known(&self.container));
        Next { identity, session, known, data: self.data_file() }
    }

    fn data_file(&self) -> Option<DataFile> {
        let data = self.data.as_ref()?;
        Some(DataFile { identity: data.identity.clone(), known: known(&data.container) })
    }
}

fn known(container: &Container) -> Known {
    if let Some(file) = container.open_file() {
        // A time of modification that waits in memory would be older after a power cut.
        let _ = rustix::fs::fsync(file);
    }
    of(container.file_facts())
}

fn after_close(now: &Known, closed: &Known, same_boot: bool) -> Result<(), String> {
    let same = match (now.modified, now.written) {
        (Some(modified), _) => closed.modified == Some(modified),
        (None, Some(written)) if same_boot => closed.written == Some(written),
        (None, Some(written)) => written == 0,
        (None, None) => false,
    };
    if same { Ok(()) } else { Err("was written to by something else".into()) }
}

fn gone() -> Verdict {
    Verdict::Lost("what a killed server noted of it is gone".to_owned())
}

fn of(facts: Facts) -> Known {
    Known { modified: facts.modified, written: facts.written }
}
