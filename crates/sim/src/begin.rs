//! How an operation begins: what it will do and give is settled then, when it does it is not.

use ringtap_io::{File, Key, Mem, Op};

use crate::disk::{Fault, State, Thing};
use crate::medium::{Kind, Medium, Piece};
use crate::reactor::{Data, Flight, Lie, Sim, What};

/// Memory of a transfer has to be aligned to this at most.
const MEMORY_ALIGN: usize = 512;

/// What is left of a transfer, or its errno.
type Length = Result<usize, i32>;

impl Sim {
    pub(crate) fn begin(
        &mut self,
        state: &mut State,
        key: Key,
        op: Op,
        done: &mut Vec<(Key, i32)>,
    ) {
        state.ids += 1;
        let mut flight = Flight {
            key: Some(key),
            id: state.ids,
            what: What::Nothing,
            left: Vec::new(),
            touched: Vec::new(),
            result: 0,
        };
        match op {
            Op::Read { file, offset, mem } => {
                flight.what = What::Read { file, mem };
                let length = self.read_length(state, file, offset, mem);
                self.transfer(state, &mut flight, file, offset, length);
            }
            Op::Write { file, offset, mem, durable } => {
                flight.what = What::Write { file, data: Data::There(mem), durable };
                let length = self.write_length(state, file, offset, mem);
                self.transfer(state, &mut flight, file, offset, length);
            }
            Op::Sync { file } => {
                flight.what = What::Sync { file, mark: state.completed };
                self.change(state, &mut flight, file, |_| Ok(Vec::new()));
            }
            Op::PunchHole { file, offset, len } => {
                flight.what = What::Zero { file, keep_space: false };
                self.change(state, &mut flight, file, |medium| {
                    does(!medium.lacks.punch)?;
                    Ok(medium.pieces_with_space(offset, range(medium, offset, len)?))
                });
            }
            Op::ZeroRange { file, offset, len } => {
                flight.what = What::Zero { file, keep_space: true };
                let room = state.room();
                self.change(state, &mut flight, file, |medium| {
                    does(!medium.lacks.zero_range)?;
                    with_space(medium, room, offset, len)
                });
            }
            Op::Allocate { file, offset, len } => {
                flight.what = What::Reserve { file };
                let room = state.room();
                self.change(state, &mut flight, file, |medium| {
                    does(medium.kind == Kind::Regular && !medium.lacks.allocate)?;
                    with_space(medium, room, offset, len)
                });
            }
            Op::SetLen { file, len } => {
                flight.what = What::SetLen { file, len };
                self.change(state, &mut flight, file, |medium| match medium.kind {
                    Kind::Regular => Ok(Vec::new()),
                    Kind::Device => Err(libc::EINVAL),
                });
            }
            Op::Timeout { nanos } => {
                flight.what = What::Timeout { until: self.now.saturating_add(nanos) };
                flight.result = -libc::ETIME;
            }
            Op::ReadEvent { file } => {
                (flight.what, flight.result) = (What::ReadEvent { file }, 8);
            }
            Op::SignalEvent { file } => {
                (flight.what, flight.result) = (What::SignalEvent { file }, 8);
            }
            Op::Cancel { file } => flight.result = self.cancel(file),
            Op::Recv { file, mem } => flight.what = What::Recv { file, mem },
            Op::Send { file, mem } => flight.what = What::Send { file, mem },
            Op::PollIn { file } => {
                (flight.what, flight.result) = (What::PollIn { file }, libc::POLLIN.into());
            }
            // A stream takes any number of bytes.
            Op::PollOut { .. } => flight.result = libc::POLLOUT.into(),
            // Of drivers that only a real kernel has.
            Op::Command { .. } => flight.result = -libc::EOPNOTSUPP,
            // Their files are elsewhere.
            Op::Forget { .. } | Op::Status { .. } => flight.result = -libc::EOPNOTSUPP,
        }
        if self.lie == Some(Lie::EarlyWrites) {
            end_early(&mut flight, done);
        }
        self.flights.push(flight);
    }

    /// End what waits on a file; transfers are past cancelling. Gives how many that were.
    fn cancel(&mut self, file: File) -> i32 {
        let waits = |flight: &&mut Flight| match flight.what {
            What::ReadEvent { file: on }
            | What::Recv { file: on, .. }
            | What::PollIn { file: on } => on == file,
            _ => false,
        };
        let mut count = 0;
        for flight in self.flights.iter_mut().filter(waits) {
            (flight.what, flight.result) = (What::Nothing, -libc::ECANCELED);
            count += 1;
        }
        count
    }

    fn one_in(&mut self, odds: u32) -> bool {
        odds > 0 && self.rng.u32(0..odds) == 0
    }

    /// The length of a transfer that may stop short, before a multiple of `grain` on the file.
    pub(crate) fn shortened(&mut self, offset: u64, len: usize, grain: usize) -> usize {
        if self.one_in(self.chances.short) { self.cut_short(offset, len, grain) } else { len }
    }

    fn cut_short(&mut self, offset: u64, len: usize, grain: usize) -> usize {
        let first = grain - (offset % grain as u64) as usize;
        if len <= first {
            return len;
        }
        first + self.rng.usize(0..(len - first).div_ceil(grain)) * grain
    }

    /// What befalls any operation on a file: counted, broken or interrupted. Gives whether its bytes
    /// are to be cut short.
    fn befall(&mut self, state: &mut State) -> Result<bool, i32> {
        state.begun += 1;
        match state.fault() {
            Some(Fault::Errno(errno)) => Err(errno),
            Some(Fault::Short) => Ok(true),
            None if self.one_in(self.chances.interrupted) => Err(libc::EINTR),
            None => Ok(false),
        }
    }

    fn read_length(&mut self, state: &mut State, file: File, offset: u64, mem: Mem) -> Length {
        // At the end of a file Linux gives 0 before it looks at the alignment.
        if state.look(file).is_some_and(|medium| offset >= medium.size()) {
            return Ok(0);
        }
        let medium = aligned(state, file, offset, mem)?;
        let left = medium.size().saturating_sub(offset);
        Ok(usize::try_from(left).map_or(mem.len(), |left| left.min(mem.len())))
    }

    fn write_length(&mut self, state: &mut State, file: File, offset: u64, mem: Mem) -> Length {
        let room = state.room();
        let medium = aligned(state, file, offset, mem)?;
        if mem.is_empty() {
            return Ok(0);
        }
        if medium.kind == Kind::Device {
            let left = medium.size().saturating_sub(offset).min(mem.len() as u64) as usize;
            return if left == 0 { Err(libc::ENOSPC) } else { Ok(left) };
        }
        let Some(mut room) = room else { return Ok(mem.len()) };
        for piece in medium.pieces(offset, mem.len()) {
            if !medium.has_space(piece.sector) {
                if room == 0 {
                    let fits = piece.at - piece.at % medium.align;
                    return if fits == 0 { Err(libc::ENOSPC) } else { Ok(fits) };
                }
                room -= 1;
            }
        }
        Ok(mem.len())
    }

    /// Settle what a read or write moves and gives.
    fn transfer(
        &mut self,
        state: &mut State,
        flight: &mut Flight,
        file: File,
        offset: u64,
        length: Length,
    ) {
        let planned = match length {
            Ok(planned) => planned,
            Err(errno) => {
                flight.result = -errno;
                return;
            }
        };
        let writes = matches!(flight.what, What::Write { .. });
        let length = self.befallen_length(state, file, offset, planned, writes);
        if let Some(medium) = state.look(file) {
            flight.left = medium.pieces(offset, length.unwrap_or(planned));
        }
        match length {
            Ok(length) => flight.result = length as i32,
            Err(errno) => {
                flight.result = -errno;
                self.some_of(&mut flight.left, errno);
            }
        }
    }

    /// What is left of a transfer after all that may befall it.
    fn befallen_length(
        &mut self,
        state: &mut State,
        file: File,
        offset: u64,
        length: usize,
        writes: bool,
    ) -> Length {
        let cut_short = self.befall(state)?;
        if self.one_in(self.chances.again) {
            return Err(libc::EAGAIN);
        }
        let Some(medium) = state.look(file) else { return Err(libc::EBADF) };
        let grain = medium.grain();
        let length = match cut_short {
            true => self.cut_short(offset, length, grain),
            false => self.shortened(offset, length, grain),
        };
        // A transfer that meets bad sectors may stop before them, or fail.
        let end = offset + length as u64;
        let Some(bad) = medium.first_bad(offset..end, writes) else { return Ok(length) };
        let good = (bad - bad % grain as u64).saturating_sub(offset) as usize;
        if good > 0 && self.rng.bool() { Ok(good) } else { Err(libc::EIO) }
    }

    /// What an operation that fails so has touched: after EIO any of its sectors, else none.
    fn some_of(&mut self, pieces: &mut Vec<Piece>, errno: i32) {
        self.rng.shuffle(pieces);
        let most = if errno == libc::EIO { pieces.len() } else { 0 };
        pieces.truncate(self.rng.usize(0..=most));
    }

    /// Settle what an operation on a range (or the whole file) changes: the pieces that `pieces` finds.
    fn change(
        &mut self,
        state: &mut State,
        flight: &mut Flight,
        file: File,
        pieces: impl FnOnce(&Medium) -> Result<Vec<Piece>, i32>,
    ) {
        let found = match state.thing(file) {
            Some(Thing::Medium(medium)) => pieces(medium).map(|pieces| {
                let hits_bad = pieces.iter().any(|piece| medium.is_bad(piece));
                (pieces, hits_bad)
            }),
            Some(_) => Err(libc::EINVAL),
            None => Err(libc::EBADF),
        };
        let (mut pieces, hits_bad) = match found {
            Ok(found) => found,
            Err(errno) => {
                flight.result = -errno;
                return;
            }
        };
        let end = self.befall(state);
        if let Err(errno) = end.and(if hits_bad { Err(libc::EIO) } else { Ok(()) }) {
            flight.result = -errno;
            self.some_of(&mut pieces, errno);
        }
        if self.lie != Some(Lie::ZeroDoesNothing) {
            flight.left = pieces;
        }
    }
}

/// Complete a write now, and let it go on from a copy of its bytes.
fn end_early(flight: &mut Flight, done: &mut Vec<(Key, i32)>) {
    let What::Write { data, .. } = &mut flight.what else { return };
    if flight.result <= 0 {
        return;
    }
    if let Data::There(mem) = *data {
        let mut bytes = vec![0; mem.len()];
        mem.copy_to(&mut bytes);
        *data = Data::Copied(bytes);
    }
    done.extend(flight.key.take().map(|key| (key, flight.result)));
}

/// Whether there is such an operation.
fn does(it: bool) -> Result<(), i32> {
    if it { Ok(()) } else { Err(libc::EOPNOTSUPP) }
}

/// The pieces of a range that is to have space afterwards.
fn with_space(
    medium: &Medium,
    room: Option<u64>,
    offset: u64,
    len: u64,
) -> Result<Vec<Piece>, i32> {
    let len = range(medium, offset, len)?;
    let pieces = medium.pieces(offset, len as usize);
    let new = pieces.iter().filter(|piece| !medium.has_space(piece.sector)).count();
    match room {
        Some(room) if new as u64 > room && medium.kind == Kind::Regular => Err(libc::ENOSPC),
        _ => Ok(pieces),
    }
}

/// The medium, if it takes a transfer of this shape.
fn aligned(state: &mut State, file: File, offset: u64, mem: Mem) -> Result<&Medium, i32> {
    let medium = match state.thing(file) {
        Some(Thing::Medium(medium)) => medium,
        Some(_) => return Err(libc::ESPIPE),
        None => return Err(libc::EBADF),
    };
    if offset.checked_add(mem.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
        return Err(libc::EFBIG);
    }
    let align = medium.align as u64;
    let fits = offset % align == 0
        && mem.len() as u64 % align == 0
        && (align == 1 || mem.is_aligned(medium.align.min(MEMORY_ALIGN)));
    if fits { Ok(medium) } else { Err(libc::EINVAL) }
}

/// The length of a range that fallocate takes: a device's has to lie in it, in whole blocks.
fn range(medium: &Medium, offset: u64, len: u64) -> Result<u64, i32> {
    let end = offset.checked_add(len).filter(|end| len > 0 && *end <= i64::MAX as u64);
    let Some(end) = end else { return Err(libc::EINVAL) };
    if medium.kind == Kind::Regular {
        return Ok(len);
    }
    let end = end.min(medium.size());
    let align = medium.align as u64;
    if offset >= end || offset % align != 0 || end % align != 0 {
        return Err(libc::EINVAL);
    }
    Ok(end - offset)
}
