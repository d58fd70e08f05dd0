//! The simulated disk: files, devices, events and sockets that several reactors may share.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringtap_io::{File, Wall, Witness};

use crate::end::End;
use crate::medium::{Bad, Cell, Kind, Lacks, Medium, Style};
use crate::pipe::{Event, Socket};
use crate::stamp::SECTOR;
use crate::versions::OpId;

/// When the simulated world begins.
const BEGINNING: Wall = 1_790_000_000_000_000_000;

/// Everything that keeps bytes, and the faults it was told to have. Clones are the same disk.
///
/// Made for small disks: it keeps every sector that has space in memory, each for itself.
#[derive(Clone, Debug)]
pub struct Disk {
    state: Arc<Mutex<State>>,
}

/// What an operation chosen by [`Disk::fail_operations`] does instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fail with this errno; any of its sectors may have been written (or read) all the same.
    Errno(i32),
    /// Move only a part of the bytes, where there is more than one alignment unit of them.
    Short,
}

/// Which transfers a bad range refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refuses {
    /// Reads only.
    Reads,
    /// Writes (and holes punched, zeros, space reserved) only.
    Writes,
    /// All of them.
    All,
}

#[derive(Clone, Debug)]
pub(crate) enum Thing {
    /// Shared with copies of the disk, and copied itself when one of them changes it.
    Medium(Arc<Medium>),
    Event(Event),
    Socket(Socket),
}

#[derive(Clone, Debug)]
struct Slot {
    generation: u32,
    thing: Option<Thing>,
    witness: Option<Arc<Witness>>,
}

#[derive(Clone, Debug)]
pub(crate) struct State {
    sector: usize,
    slots: Vec<Slot>,
    pub(crate) capacity: Option<u64>,
    pub(crate) forgetful: bool,
    faults: Vec<(Range<u64>, Fault)>,
    /// Operations on files and devices begun.
    pub(crate) begun: u64,
    /// Operations of every kind begun, to name them by.
    pub(crate) ids: OpId,
    /// Operations that changed something and completed.
    pub(crate) completed: u64,
    pub(crate) turns: u64,
    pub(crate) cut_at: Option<u64>,
    pub(crate) cut: bool,
    /// The wall clock.
    pub(crate) clock: Wall,
}

impl State {
    pub(crate) fn thing(&mut self, file: File) -> Option<&mut Thing> {
        let slot = self.slots.get_mut(file.slot() as usize)?;
        if slot.generation != file.generation() {
            return None;
        }
        slot.thing.as_mut()
    }

    pub(crate) fn look(&self, file: File) -> Option<&Medium> {
        match &self.slots.get(file.slot() as usize)? {
            Slot { generation, thing: Some(Thing::Medium(medium)), .. }
                if *generation == file.generation() =>
            {
                Some(medium)
            }
            _ => None,
        }
    }

    pub(crate) fn medium(&mut self, file: File) -> Option<&mut Medium> {
        match self.thing(file)? {
            Thing::Medium(medium) => Some(Arc::make_mut(medium)),
            Thing::Event(_) | Thing::Socket(_) => None,
        }
    }

    fn socket(&mut self, file: File) -> io::Result<&Socket> {
        match self.thing(file) {
            Some(Thing::Socket(socket)) => Ok(socket),
            _ => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    pub(crate) fn witness(&self, file: File) -> Option<Arc<Witness>> {
        let slot = self.slots.get(file.slot() as usize)?;
        slot.witness.clone().filter(|_| slot.generation == file.generation())
    }

    pub(crate) fn set_witness(&mut self, file: File, witness: Arc<Witness>) {
        if let Some(slot) = self.slots.get_mut(file.slot() as usize) {
            slot.witness = Some(witness);
        }
    }

    fn add(&mut self, thing: Thing) -> File {
        let free = self.slots.iter().position(|slot| slot.thing.is_none());
        let index = free.unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, thing: None, witness: None });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        (slot.thing, slot.witness) = (Some(thing), None);
        File::from_parts(index as u32, slot.generation)
    }

    /// Sectors that may yet be given space, where that is limited.
    pub(crate) fn room(&self) -> Option<u64> {
        let capacity = self.capacity? / self.sector as u64;
        let used: u64 = self
            .slots
            .iter()
            .filter_map(|slot| match &slot.thing {
                Some(Thing::Medium(medium)) if medium.kind == Kind::Regular => {
                    Some(medium.sectors_with_space())
                }
                _ => None,
            })
            .sum();
        Some(capacity.saturating_sub(used))
    }

    pub(crate) fn fault(&self) -> Option<Fault> {
        self.faults.iter().find(|(range, _)| range.contains(&self.begun)).map(|(_, fault)| *fault)
    }
}

impl Disk {
    /// A disk whose medium writes sectors of so many bytes whole or not at all.
    pub fn new(sector: usize) -> Disk {
        Disk::from_state(State {
            sector: sector.max(1),
            slots: Vec::new(),
            capacity: None,
            forgetful: false,
            faults: Vec::new(),
            begun: 0,
            ids: 0,
            completed: 0,
            turns: 0,
            cut_at: None,
            cut: false,
            clock: BEGINNING,
        })
    }

    fn from_state(state: State) -> Disk {
        Disk { state: Arc::new(Mutex::new(state)) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, of 512 bytes or, one of four, of 4096.
    pub fn any(rng: &mut fastrand::Rng) -> Disk {
        Disk::new(if rng.u8(0..4) == 0 { 4096 } else { SECTOR })
    }

    /// Bytes of a sector.
    pub fn sector(&self) -> u64 {
        self.lock().sector as u64
    }

    /// A file of `size` bytes, all hole, that grows when written past its end. Transfers whose
    /// offset, length or memory is not a multiple of `align` fail with EINVAL, as under O_DIRECT;
    /// 1 takes all.
    pub fn add_file(&self, size: u64, align: usize) -> File {
        let mut state = self.lock();
        let medium = Medium::new(Kind::Regular, state.sector, align.max(1), size);
        state.add(Thing::Medium(Arc::new(medium)))
    }

    /// A block device of `size` bytes: it does not grow, and reserves no space.
    pub fn add_device(&self, size: u64, align: usize) -> File {
        let mut state = self.lock();
        let medium = Medium::new(Kind::Device, state.sector, align.max(1), size);
        state.add(Thing::Medium(Arc::new(medium)))
    }

    /// An eventfd.
    pub fn add_event(&self) -> File {
        self.lock().add(Thing::Event(Event::default()))
    }

    /// Two ends of a stream.
    pub fn add_sockets(&self) -> (File, File) {
        let (left, right) = Socket::pair();
        let mut state = self.lock();
        (state.add(Thing::Socket(left)), state.add(Thing::Socket(right)))
    }

    /// Two ends of a stream, here and on a disk of another host.
    pub fn connect(&self, other: &Disk) -> (File, File) {
        let (near, far) = Socket::pair();
        let near = self.lock().add(Thing::Socket(near));
        (near, other.lock().add(Thing::Socket(far)))
    }

    /// What an end of a stream has received, so many bytes at most, as recv gives it that does not wait: none at the stream's
    /// end, [`ErrorKind::WouldBlock`] before anything has come.
    pub fn receive_now(&self, end: File, most: usize) -> io::Result<Vec<u8>> {
        let mut state = self.lock();
        let socket = state.socket(end)?;
        let mut incoming = socket.incoming();
        if incoming.bytes.is_empty() && !incoming.closed && most > 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let len = most.min(incoming.bytes.len());
        Ok(incoming.bytes.drain(..len).collect())
    }

    /// Send by an end of a stream; all of it goes at once.
    pub fn send_now(&self, end: File, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        let mut outgoing = state.socket(end)?.outgoing();
        if outgoing.closed {
            return Err(ErrorKind::BrokenPipe.into());
        }
        outgoing.bytes.extend(bytes);
        Ok(())
    }

    /// Nothing more is sent by this end of a stream: the other reads what there is, and then its end.
    pub fn shut(&self, end: File) {
        if let Ok(socket) = self.lock().socket(end) {
            socket.shut();
        }
    }

    /// Nothing more moves by this end of a stream either way.
    pub fn hang_up(&self, end: File) {
        let mut state = self.lock();
        if let Some(Thing::Socket(socket)) = state.thing(end) {
            socket.close();
        }
    }

    /// Close a handle: operations on it give EBADF from then on, the other end of a socket is told.
    /// A file and its bytes are gone with it.
    pub fn close(&self, file: File) {
        let mut state = self.lock();
        if let Some(Thing::Socket(socket)) = state.thing(file) {
            socket.close();
        }
        if state.thing(file).is_some() {
            let slot = &mut state.slots[file.slot() as usize];
            slot.thing = None;
            slot.generation = slot.generation.wrapping_add(1);
        }
    }

    /// From now on files have space for so many bytes in sum; what is over fails with ENOSPC.
    pub fn limit_space(&self, bytes: u64) {
        self.lock().capacity = Some(bytes);
    }

    /// Whether a sync or a durable write that fails also drops from the cache what a sync should have written, so that a
    /// later one succeeds without it: what Linux does with its page cache, that of files which take any alignment.
    pub fn forget_on_failed_sync(&self, forgetful: bool) {
        self.lock().forgetful = forgetful;
    }

    /// Let the operations with these numbers fail. Operations on files and devices count, from 1, in
    /// the order in which they begin.
    pub fn fail_operations(&self, numbers: Range<u64>, fault: Fault) {
        self.lock().faults.push((numbers, fault));
    }

    /// Let no further operation fail by its number.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// Operations on files and devices begun so far.
    pub fn operations(&self) -> u64 {
        self.lock().begun
    }

    /// Bytes of a file that can no longer be read or written: EIO, or a transfer that stops short.
    pub fn break_range(&self, file: File, range: Range<u64>, refuses: Refuses) {
        if let Some(medium) = self.lock().medium(file) {
            let (reads, writes) = match refuses {
                Refuses::Reads => (true, false),
                Refuses::Writes => (false, true),
                Refuses::All => (true, true),
            };
            medium.bad.push(Bad { range, reads, writes });
        }
    }

    /// What could no longer be read or written can be again.
    pub fn mend(&self) {
        for slot in &mut self.lock().slots {
            if let Some(Thing::Medium(medium)) = &mut slot.thing {
                Arc::make_mut(medium).bad.clear();
            }
        }
    }

    /// Let operations on ranges of a file fail with EOPNOTSUPP, as on a file system without them.
    pub fn set_lacks(&self, file: File, lacks: Lacks) {
        if let Some(medium) = self.lock().medium(file) {
            medium.lacks = lacks;
        }
    }

    /// The power goes at this turn, counted from 1 over all reactors of the disk.
    pub fn cut_power_at_turn(&self, turn: u64) {
        self.lock().cut_at = Some(turn);
    }

    /// Turns so far.
    pub fn turns(&self) -> u64 {
        self.lock().turns
    }

    /// Whether the power has gone.
    pub fn is_cut(&self) -> bool {
        self.lock().cut
    }

    /// The file's size as readers see it.
    pub fn size(&self, file: File) -> u64 {
        self.lock().look(file).map_or(0, Medium::size)
    }

    /// Bytes of space that the file has.
    pub fn allocated(&self, file: File) -> u64 {
        let state = self.lock();
        let sector = state.sector as u64;
        state.look(file).map_or(0, |medium| medium.sectors_with_space() * sector)
    }

    /// The file's bytes from `offset` as readers see them, zeros past its end.
    pub fn peek(&self, file: File, offset: u64, to: &mut [u8]) {
        to.fill(0);
        if let Some(medium) = self.lock().look(file) {
            for piece in medium.pieces(offset, to.len()) {
                medium.read(&piece, &mut to[piece.at..piece.at + piece.within.len()]);
            }
        }
    }

    /// Put bytes into the file, stable, before a run.
    pub fn poke(&self, file: File, offset: u64, from: &[u8]) {
        let mut state = self.lock();
        state.ids += 1;
        let (id, at) = (state.ids, state.completed);
        if let Some(medium) = state.medium(file) {
            let pieces = medium.pieces(offset, from.len());
            for piece in &pieces {
                medium.write(id, piece, &from[piece.at..piece.at + piece.within.len()]);
            }
            let sectors: Vec<u64> = pieces.iter().map(|piece| piece.sector).collect();
            medium.complete(id, &sectors, at, true);
        }
    }

    /// Call `each` with the number of every sector that ever had space and, one after the other,
    /// all the bytes it may hold if the power goes now; `None` is zeros.
    pub fn each_outcome(&self, file: File, mut each: impl FnMut(u64, Option<&[u8]>)) {
        // The lock is not held while strangers are called: they may ask the disk something.
        let medium = match self.lock().thing(file) {
            Some(Thing::Medium(medium)) => Some(medium.clone()),
            _ => None,
        };
        if let Some(medium) = medium {
            medium.outcomes(|sector, cell| each(sector, Cell::bytes(cell)));
        }
    }

    /// A disk as such an end left this one.
    pub fn after(&self, end: End, seed: u64) -> Disk {
        match end {
            End::PowerCut => self.after_power_cut(seed),
            End::Kill => self.after_kill(seed),
        }
    }

    /// A disk as the power cut left this one: one of the allowed outcomes, chosen by the seed. Its
    /// files have the same handles; faults are gone but for bad ranges; events and sockets are gone.
    pub fn after_power_cut(&self, seed: u64) -> Disk {
        let state = self.lock();
        let mut rng = fastrand::Rng::with_seed(seed);
        let style = match rng.u8(0..8) {
            0 => Style::Oldest,
            1 => Style::Newest,
            2..4 => Style::Prefix(rng.u64(0..=state.ids)),
            _ => Style::Any,
        };
        let slots = state.slots.iter().map(|slot| {
            let thing = match &slot.thing {
                Some(Thing::Medium(medium)) => {
                    Some(Thing::Medium(Arc::new(medium.after_power_cut(style, &mut rng))))
                }
                _ => None,
            };
            Slot { generation: slot.generation, thing, witness: None }
        });
        let slots = slots.collect();
        Disk::from_state(State {
            slots,
            faults: Vec::new(),
            begun: 0,
            turns: 0,
            cut_at: None,
            cut: false,
            ..*state
        })
    }

    /// A disk as a killed program left this one: what had completed is there, though still not stable;
    /// what was in flight has happened in part, as the seed says. Its files have the same handles;
    /// faults are gone but for bad ranges; events and sockets are gone.
    ///
    /// To kill a program at a turn let the power go there ([`Disk::cut_power_at_turn`]) and go on with
    /// this disk instead of [`Disk::after_power_cut`].
    pub fn after_kill(&self, seed: u64) -> Disk {
        let state = self.lock();
        let mut rng = fastrand::Rng::with_seed(seed);
        let completed = state.completed + 1;
        let slots = state.slots.iter().map(|slot| {
            let thing = match &slot.thing {
                Some(Thing::Medium(medium)) => {
                    let mut medium = medium.clone();
                    Arc::make_mut(&mut medium).kill(completed, &mut rng);
                    Some(Thing::Medium(medium))
                }
                _ => None,
            };
            Slot { generation: slot.generation, thing, witness: None }
        });
        let slots = slots.collect();
        Disk::from_state(State {
            slots,
            faults: Vec::new(),
            begun: 0,
            completed,
            turns: 0,
            cut_at: None,
            cut: false,
            ..*state
        })
    }

    /// A disk of its own with the same content, cache and all.
    pub(crate) fn copy(state: &State) -> Disk {
        Disk::from_state(state.clone())
    }
}
