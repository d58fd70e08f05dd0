//! Replies gathered over a turn, sent with one operation.

use std::cell::Cell;
use std::ops::Range;

use ringtap_io::{Buffer, File, Io, Op, Time};

use super::pieces::Pieces;
use super::pipes::Pipe;
use super::reply::{Head, MAX_HEAD};
use super::tls::Sealer;

/// Replies in the order they will be sent, with what has to be kept until then.
pub(super) struct Batch {
    heads: Buffer,
    used: usize,
    pieces: Pieces,
    /// Kept until the batch is sent.
    pub(super) buffers: Vec<Buffer>,
    pub(super) pipes: Vec<Pipe>,
    /// The slots these replies come from: busy until the batch is sent.
    pub(super) slots: Vec<usize>,
}

impl Batch {
    /// Room for the replies of so many slots.
    pub(super) fn new(io: &Io, slots: usize) -> Result<Batch, i32> {
        let heads = io.buffer(slots * MAX_HEAD)?;
        let (buffers, slots) = (Vec::with_capacity(slots), Vec::with_capacity(slots));
        Ok(Batch { heads, used: 0, pieces: Pieces::default(), buffers, pipes: Vec::new(), slots })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Add a head; one for each slot, as there is room for no more.
    pub(super) fn head(&mut self, head: &Head) {
        let (bytes, from) = (head.bytes(), self.used);
        self.used += bytes.len();
        self.heads.bytes_mut()[from..self.used].copy_from_slice(bytes);
        self.pieces.push(&self.heads, from..self.used);
    }

    /// Add data of a buffer, which goes into `buffers` before the batch is sent.
    pub(super) fn data(&mut self, buffer: &Buffer, range: Range<usize>) {
        self.pieces.push(buffer, range);
    }

    /// Add what a pipe holds, so many bytes.
    pub(super) fn piped(&mut self, pipe: Pipe, len: usize) {
        self.pieces.pipe(pipe.to_send(len));
        self.pipes.push(pipe);
    }

    /// Send everything; `since` is when the client last took some of it. Errors as the kernel gives
    /// them, a positive errno.
    pub(super) async fn send(
        &self,
        io: &Io,
        socket: File,
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        for mem in self.pieces.mems() {
            let mut sent = 0;
            while sent < mem.len() {
                let rest = mem.window(sent, usize::MAX);
                since.set(Some(io.now()));
                match io.run(Op::Send { file: socket, mem: rest }).await {
                    n if n > 0 => sent += n as usize,
                    0 => return Err(libc::EPIPE),
                    n if n == -libc::EINTR => {}
                    n => return Err(-n),
                }
            }
        }
        Ok(())
    }

    /// As [`Batch::send`], through TLS. Nothing of it is in pipes.
    pub(super) async fn send_sealed(
        &self,
        io: &Io,
        socket: File,
        sealer: &mut Sealer,
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        for piece in self.pieces.slices() {
            sealer.push(io, socket, piece, since).await?;
        }
        sealer.flush(io, socket, since).await
    }

    /// Empty it; the buffers, pipes and slots must have been taken out.
    pub(super) fn clear(&mut self) {
        self.used = 0;
        self.pieces.clear();
    }
}
