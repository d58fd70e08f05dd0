//! A connection whose bytes are moved without waiting, encrypted or not.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use ringtap_io::{File, Mem, OpenFile, Part, receive_now, send_now};
use rustix::net::{Shutdown, shutdown};
use rustls::ClientConnection;

#[cfg(test)]
use super::sim_tests::Stream;

/// Plaintext of a record.
const RECORD: usize = 16 << 10;
/// The most sealed bytes that wait for the socket.
const SEALED: usize = 512 << 10;

/// A connection in its transmission phase.
pub(super) struct Channel {
    wire: Wire,
    tls: Option<RefCell<Tls>>,
    /// The last read of the socket filled all that it was given.
    more: Cell<bool>,
}

struct Tls {
    session: Box<ClientConnection>,
    plain: Box<[u8; RECORD]>,
}

/// What carries the bytes.
enum Wire {
    Socket(OpenFile),
    #[cfg(test)]
    Simulated(Stream),
}

impl Wire {
    fn file(&self) -> File {
        match self {
            Wire::Socket(socket) => socket.handle(),
            #[cfg(test)]
            Wire::Simulated(stream) => stream.file(),
        }
    }

    fn receive(&self, mem: Mem, more: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Socket(socket) => receive_now(socket.as_fd(), mem, more),
            #[cfg(test)]
            Wire::Simulated(stream) => stream.receive(mem, more),
        }
    }

    fn send<'a>(&self, parts: impl IntoIterator<Item = Part<'a>>) -> io::Result<usize> {
        match self {
            Wire::Socket(socket) => send_now(socket.as_fd(), parts),
            #[cfg(test)]
            Wire::Simulated(stream) => stream.send(parts),
        }
    }

    fn shut(&self, how: Shutdown) {
        match self {
            Wire::Socket(socket) => _ = shutdown(socket, how),
            #[cfg(test)]
            Wire::Simulated(stream) => stream.shut(how),
        }
    }
}

/// The wire as rustls reads and writes it.
struct Now<'a>(&'a Wire);

impl Read for Now<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.receive(Mem::EMPTY, bytes)
    }
}

impl Write for Now<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send([Part::Bytes(bytes)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Channel {
    pub(super) fn new(socket: OwnedFd, session: Option<ClientConnection>) -> Channel {
        let tls = session.map(|mut session| {
            session.set_buffer_limit(Some(SEALED));
            RefCell::new(Tls { session: Box::new(session), plain: Box::new([0; RECORD]) })
        });
        Channel { wire: Wire::Socket(OpenFile::new(socket)), tls, more: Cell::new(true) }
    }

    #[cfg(test)]
    pub(super) fn simulated(stream: Stream) -> Channel {
        Channel { wire: Wire::Simulated(stream), tls: None, more: Cell::new(true) }
    }

    /// For operations that wait for it.
    pub(super) fn file(&self) -> File {
        self.wire.file()
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Receive what there is: into `mem`, then into `more`. 0 is the stream's end.
    pub(super) fn receive(&self, mem: Mem, more: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            None => {
                if !self.more.replace(true) {
                    return Err(ErrorKind::WouldBlock.into());
                }
                let moved = self.wire.receive(mem, more)?;
                self.more.set(moved == mem.len() + more.len());
                Ok(moved)
            }
            Some(tls) => tls.borrow_mut().receive(&self.wire, mem, more),
        }
    }

    /// Send the parts one after the other, as far as that goes at once.
    pub(super) fn send<'a>(&self, parts: impl IntoIterator<Item = Part<'a>>) -> io::Result<usize> {
        match &self.tls {
            None => self.wire.send(parts),
            Some(tls) => tls.borrow_mut().send(&self.wire, parts),
        }
    }

    /// Whether nothing of what was sent waits here any more.
    pub(super) fn flush(&self) -> io::Result<bool> {
        self.tls.as_ref().map_or(Ok(true), |tls| tls.borrow_mut().flush(&self.wire))
    }

    /// End it: whoever waits for it sees that.
    pub(super) fn shut(&self) {
        self.wire.shut(Shutdown::Both);
    }

    /// Nothing more is sent: who reads it sees its end.
    pub(super) fn shut_sending(&self) {
        self.wire.shut(Shutdown::Write);
    }
}

impl Tls {
    fn receive(&mut self, wire: &Wire, mem: Mem, more: &mut [u8]) -> io::Result<usize> {
        loop {
            let into = if mem.is_empty() { RECORD.min(more.len()) } else { RECORD.min(mem.len()) };
            match self.session.reader().read(&mut self.plain[..into]) {
                Ok(taken) if mem.is_empty() => {
                    more[..taken].copy_from_slice(&self.plain[..taken]);
                    return Ok(taken);
                }
                Ok(taken) => return Ok(mem.copy_from(&self.plain[..taken])),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if self.session.read_tls(&mut Now(wire))? == 0 {
                return Ok(0);
            }
            self.session.process_new_packets().map_err(io::Error::other)?;
        }
    }

    fn send<'a>(
        &mut self,
        wire: &Wire,
        parts: impl IntoIterator<Item = Part<'a>>,
    ) -> io::Result<usize> {
        let mut taken = 0;
        'parts: for part in parts {
            let len = match part {
                Part::Bytes(bytes) => bytes.len(),
                Part::Mem(mem) => mem.len(),
            };
            let mut done = 0;
            while done < len {
                let wrote = match part {
                    Part::Bytes(bytes) => self.session.writer().write(&bytes[done..])?,
                    Part::Mem(mem) => {
                        let count = mem.window(done, RECORD).copy_to(&mut self.plain[..]);
                        self.session.writer().write(&self.plain[..count])?
                    }
                };
                (done, taken) = (done + wrote, taken + wrote);
                if wrote == 0 {
                    break 'parts;
                }
            }
        }
        match self.flush(wire) {
            Ok(false) if taken == 0 => Err(ErrorKind::WouldBlock.into()),
            Ok(_) => Ok(taken),
            Err(error) => Err(error),
        }
    }

    fn flush(&mut self, wire: &Wire) -> io::Result<bool> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut Now(wire)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}
