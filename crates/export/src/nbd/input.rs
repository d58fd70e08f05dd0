//! What a client sent: received in large runs, payloads straight to where they belong.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use ringtap_io::{Buffer, File, Io, Op, PAGE, Time};

use super::pieces::Pieces;
use super::receive::{Gone, receive};
use super::tls::Opener;

/// Bytes received at once: the requests of a deep queue with small payloads.
const RUN: usize = 256 << 10;
/// Payloads from here on are worth an operation of their own: beside them little is received.
const LARGE: usize = 32 << 10;

/// Bytes received and not yet used.
pub(super) struct Input {
    buffer: Buffer,
    from: usize,
    to: usize,
    /// Bytes to receive beyond what is needed.
    ahead: usize,
    pieces: Pieces,
    /// Since when no byte of the payload came that is being received.
    pub(super) paying: Rc<Cell<Option<Time>>>,
    /// Opens what was received, where there is TLS.
    pub(super) opener: Option<Opener>,
}

impl Input {
    pub(super) fn new(io: &Io) -> Result<Input, i32> {
        let buffer = io.buffer(RUN)?;
        let (pieces, paying) = (Pieces::default(), Rc::default());
        Ok(Input { buffer, from: 0, to: 0, ahead: RUN, pieces, paying, opener: None })
    }

    /// Begin with what another server has received.
    pub(super) fn begin_with(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        let room = self.buffer.bytes_mut().get_mut(..bytes.len()).ok_or(Gone)?;
        room.copy_from_slice(bytes);
        (self.from, self.to) = (0, bytes.len());
        Ok(())
    }

    /// What is there.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer.bytes()[self.from..self.to]
    }

    /// Use up the first bytes.
    pub(super) fn consume(&mut self, len: usize) {
        self.from = (self.from + len).min(self.to);
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        }
    }

    /// Receive more, one byte at least; never called with a full buffer.
    pub(super) async fn fill(&mut self, io: &Io, socket: File) -> Result<(), Gone> {
        if self.from > 0 {
            self.buffer.bytes_mut().copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        if let Some(opener) = &mut self.opener {
            let room = &mut self.buffer.bytes_mut()[self.to..];
            self.to += opener.read(io, socket, room).await?;
            return Ok(());
        }
        let room = self.buffer.mem().window(self.to, self.ahead);
        self.to += receive(io, Op::Recv { file: socket, mem: room }).await?;
        Ok(())
    }

    /// Move a payload into the `range` that it has in a buffer: what is there by copying, the rest straight from the socket.
    pub(super) async fn payload(
        &mut self,
        io: &Io,
        socket: File,
        payload: &mut Buffer,
        range: Range<usize>,
    ) -> Result<(), Gone> {
        let Range { start, end: len } = range;
        self.ahead = if len - start >= LARGE { PAGE } else { RUN };
        let there = (len - start).min(self.to - self.from);
        let mut done = start + there;
        payload.bytes_mut()[start..done].copy_from_slice(&self.bytes()[..there]);
        self.consume(there);
        while let Some(opener) = self.opener.as_mut().filter(|_| done < len) {
            self.paying.set(Some(io.now()));
            done += opener.read(io, socket, &mut payload.bytes_mut()[done..len]).await?;
        }
        while done < len {
            // All that was there is used up, so what follows the payload goes to the front.
            self.pieces.clear();
            self.pieces.push(payload, done..len);
            self.pieces.push(&self.buffer, 0..self.ahead);
            let Some(mem) = self.pieces.mems().next() else { return Err(Gone) };
            self.paying.set(Some(io.now()));
            let received = receive(io, Op::Recv { file: socket, mem }).await?;
            let part = received.min(len - done);
            done += part;
            self.to = received - part;
        }
        self.paying.set(None);
        Ok(())
    }

    /// Throw `len` bytes away.
    pub(super) async fn discard(
        &mut self,
        io: &Io,
        socket: File,
        mut len: usize,
    ) -> Result<(), Gone> {
        loop {
            let part = len.min(self.to - self.from);
            self.consume(part);
            len -= part;
            if len == 0 {
                self.paying.set(None);
                return Ok(());
            }
            self.paying.set(Some(io.now()));
            self.fill(io, socket).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use ringtap_io::{OpenFile, Ring, Tasks};

    use super::*;

    #[test]
    fn payloads_of_every_size_arrive_whole() {
        let (mut client, server) = UnixStream::pair().expect("a socket pair");
        let server = OpenFile::new(server.into());
        let sizes = [1, 100, 4096, 5000, LARGE - 1, LARGE, 1 << 20, 3, RUN + 1, 1 << 20, 1 << 20];
        let fill = |i: usize, at: usize| (at * 31 + i * 7 + at / 256) as u8;
        let writer = std::thread::spawn(move || {
            for (i, len) in sizes.iter().enumerate() {
                let bytes: Vec<u8> = (0..*len).map(|at| fill(i, at)).collect();
                client.write_all(&[b'H'; 28]).expect("sent");
                client.write_all(&bytes).expect("sent");
            }
        });
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let io = tasks.io().clone();
        tasks
            .block_on(async move {
                let socket = server.handle();
                let mut input = Input::new(&io).expect("memory");
                for (i, len) in sizes.iter().enumerate() {
                    while input.bytes().len() < 28 {
                        input.fill(&io, socket).await.expect("bytes");
                    }
                    assert_eq!(&input.bytes()[..28], &[b'H'; 28]);
                    input.consume(28);
                    if i % 4 == 3 {
                        input.discard(&io, socket, *len).await.expect("bytes");
                        continue;
                    }
                    let mut payload = io.buffer(*len).expect("memory");
                    // Large ones in two parts.
                    let part = if *len > RUN { *len / 3 } else { *len };
                    for range in [0..part, part..*len] {
                        input.payload(&io, socket, &mut payload, range).await.expect("bytes");
                    }
                    assert!(payload.bytes().iter().enumerate().all(|(at, b)| *b == fill(i, at)));
                }
                assert!(input.bytes().is_empty());
                assert_eq!(input.fill(&io, socket).await, Err(Gone));
            })
            .expect("the ring");
        writer.join().expect("the writer");
    }
}
