//! TLS on a connection: what is received is opened, what is sent is sealed.
//!
//! One session serves the task that receives and the one that sends. Whoever has received something
//! opens all of it at once, so that the other never finds a whole record.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_io::{Buffer, File, Io, Op, Time};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus,
};

use super::credentials::Credentials;
use super::peer::Peer;
use super::receive::{Gone, receive};

/// Bytes received at once.
const LANDING: usize = 128 << 10;
/// Bytes sent at once, and sealed at once: a record holds 16 KiB, and a few bytes of its own.
const OUT: usize = 256 << 10;
const SEALED: usize = 64 << 10;
/// Smaller pieces are put together before they are sealed.
const SMALL: usize = 8 << 10;

/// The session.
struct Session(RefCell<State>);

struct State {
    session: UnbufferedServerConnection,
    /// What was received of a record that is not whole yet.
    sealed: Vec<u8>,
    /// What was opened, and how much of it has been taken.
    opened: Vec<u8>,
    taken: usize,
    /// What the session itself has to say.
    to_say: Vec<u8>,
    /// The client has said that nothing follows.
    closed: bool,
    /// It failed, and the client was told why: rustls is not to be asked for anything any more.
    failed: bool,
}

impl State {
    /// Open what was received.
    fn open(&mut self) -> Result<(), rustls::Error> {
        if self.failed {
            return Err(rustls::Error::General("the session has failed before".into()));
        }
        loop {
            let UnbufferedStatus { mut discard, state, .. } =
                self.session.process_tls_records(&mut self.sealed);
            let (mut blocked, mut failed) = (false, None);
            match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record?;
                        discard += record.discard;
                        self.opened.extend_from_slice(record.payload);
                    }
                }
                Ok(ConnectionState::EncodeTlsData(data)) => encode(data, &mut self.to_say),
                Ok(ConnectionState::TransmitTlsData(data)) => data.done(),
                Ok(ConnectionState::PeerClosed) => self.closed = true,
                Ok(_) => blocked = true,
                Err(error) => failed = Some(error),
            }
            self.sealed.drain(..discard);
            if let Some(error) = failed {
                self.failed = true;
                // The client is told why.
                let last = self.session.process_tls_records(&mut self.sealed).state;
                if let Ok(ConnectionState::EncodeTlsData(data)) = last {
                    encode(data, &mut self.to_say);
                }
                return Err(error);
            }
            if blocked {
                return Ok(());
            }
        }
    }
}

fn encode<D>(mut data: EncodeTlsData<'_, D>, to: &mut Vec<u8>) {
    let from = to.len();
    if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
        to.resize(from + size.required_size, 0);
        let len = data.encode(&mut to[from..]).unwrap_or(0);
        to.truncate(from + len);
    }
}

impl Session {
    fn new(credentials: &Credentials) -> Result<Rc<Session>, rustls::Error> {
        let session = UnbufferedServerConnection::new(credentials.config())?;
        let (sealed, opened, to_say) = (vec![], vec![], vec![]);
        let state =
            State { session, sealed, opened, taken: 0, to_say, closed: false, failed: false };
        Ok(Rc::new(Session(RefCell::new(state))))
    }

    /// Take what was received.
    fn receive(&self, bytes: &[u8]) -> Result<(), rustls::Error> {
        let mut state = self.0.borrow_mut();
        state.sealed.extend_from_slice(bytes);
        state.open()
    }

    /// What the session itself has to say now.
    fn says(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.borrow_mut().to_say)
    }

    /// Whether it is agreed on.
    fn is_agreed(&self) -> bool {
        !self.0.borrow().session.is_handshaking()
    }

    fn is_closed(&self) -> bool {
        self.0.borrow().closed
    }

    /// Move what was opened; gives how much.
    fn take(&self, into: &mut [u8]) -> usize {
        let mut state = self.0.borrow_mut();
        let left = &state.opened[state.taken..];
        let len = left.len().min(into.len());
        into[..len].copy_from_slice(&left[..len]);
        state.taken += len;
        if state.taken == state.opened.len() {
            state.opened.clear();
            state.taken = 0;
        }
        len
    }

    /// Seal some bytes, or the word that nothing follows; gives how many bytes that makes, none where
    /// there is no room for them.
    fn seal(&self, bytes: Option<&[u8]>, into: &mut [u8]) -> Result<Option<usize>, i32> {
        let mut state = self.0.borrow_mut();
        let state = &mut *state;
        if state.open().is_err() {
            return Err(libc::EPROTO);
        }
        // What the session has to say comes first, for it was sealed first.
        let said = state.to_say.len();
        let Some((first, into)) = into.split_at_mut_checked(said) else { return Ok(None) };
        let ConnectionState::WriteTraffic(mut traffic) =
            state.session.process_tls_records(&mut state.sealed).state.map_err(|_| libc::EPROTO)?
        else {
            return Err(libc::EPIPE);
        };
        let sealed = match bytes {
            Some(bytes) => traffic.encrypt(bytes, into),
            None => traffic.queue_close_notify(into),
        };
        match sealed {
            Ok(len) => {
                first.copy_from_slice(&state.to_say);
                state.to_say.clear();
                Ok(Some(said + len))
            }
            Err(EncryptError::InsufficientSize(size)) if size.required_size <= OUT => Ok(None),
            Err(_) => Err(libc::EPROTO),
        }
    }
}

/// The receiving side of a session.
pub(super) struct Opener {
    session: Rc<Session>,
    landing: Buffer,
}

/// Agree on a session; `already` was received. None where that fails, and the client and the log were
/// told why.
pub(super) async fn agree(
    io: &Io,
    socket: File,
    credentials: &Credentials,
    peer: Peer,
    already: &[u8],
) -> Option<(Opener, Sealer)> {
    let session = Session::new(credentials).ok()?;
    let mut opener = Opener::new(io, session.clone()).ok()?;
    let sealer = Sealer::new(io, session.clone()).ok()?;
    let mut received = session.receive(already);
    loop {
        let says = session.says();
        if !says.is_empty() {
            send_plain(io, socket, &says).await.ok()?;
        }
        if let Err(error) = received {
            tracing::info!("TLS with an NBD client ({peer}) failed: {error}");
            return None;
        }
        if session.is_agreed() {
            return Some((opener, sealer));
        }
        received = match opener.land(io, socket).await {
            Ok(received) => received,
            Err(Gone) => {
                tracing::info!("an NBD client ({peer}) left while TLS was agreed on");
                return None;
            }
        };
    }
}

impl Opener {
    fn new(io: &Io, session: Rc<Session>) -> Result<Opener, i32> {
        Ok(Opener { session, landing: io.buffer(LANDING)? })
    }

    async fn land(&mut self, io: &Io, socket: File) -> Result<Result<(), rustls::Error>, Gone> {
        let received = receive(io, Op::Recv { file: socket, mem: self.landing.mem() }).await?;
        Ok(self.session.receive(&self.landing.bytes()[..received]))
    }

    /// Receive one byte at least.
    pub(super) async fn read(
        &mut self,
        io: &Io,
        socket: File,
        into: &mut [u8],
    ) -> Result<usize, Gone> {
        loop {
            match self.session.take(into) {
                0 if self.session.is_closed() => return Err(Gone),
                0 => {}
                len => return Ok(len),
            }
            if let Err(error) = self.land(io, socket).await? {
                tracing::warn!("an NBD client broke its TLS session ({error}): closed");
                return Err(Gone);
            }
        }
    }
}

/// The sending side of a session.
pub(super) struct Sealer {
    session: Rc<Session>,
    /// Small pieces that are sealed together.
    small: Vec<u8>,
    out: Buffer,
    used: usize,
}

impl Sealer {
    fn new(io: &Io, session: Rc<Session>) -> Result<Sealer, i32> {
        Ok(Sealer { session, small: Vec::with_capacity(2 * SMALL), out: io.buffer(OUT)?, used: 0 })
    }

    /// Send a piece, sooner or later; `since` is when the client last took something.
    pub(super) async fn push(
        &mut self,
        io: &Io,
        socket: File,
        piece: &[u8],
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        if piece.len() >= SMALL || self.small.len() + piece.len() > 2 * SMALL {
            self.seal_small(io, socket, since).await?;
        }
        if piece.len() < SMALL {
            self.small.extend_from_slice(piece);
            return Ok(());
        }
        for part in piece.chunks(SEALED) {
            self.seal(io, socket, Some(part), since).await?;
        }
        Ok(())
    }

    /// Send everything now.
    pub(super) async fn flush(
        &mut self,
        io: &Io,
        socket: File,
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        self.seal_small(io, socket, since).await?;
        self.send(io, socket, since).await
    }

    /// Tell the client that nothing follows.
    pub(super) async fn close(
        &mut self,
        io: &Io,
        socket: File,
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        self.seal(io, socket, None, since).await?;
        self.send(io, socket, since).await
    }

    async fn seal_small(
        &mut self,
        io: &Io,
        socket: File,
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        if self.small.is_empty() {
            return Ok(());
        }
        let small = std::mem::take(&mut self.small);
        let sealed = self.seal(io, socket, Some(&small), since).await;
        self.small = small;
        self.small.clear();
        sealed
    }

    async fn seal(
        &mut self,
        io: &Io,
        socket: File,
        bytes: Option<&[u8]>,
        since: &Cell<Option<Time>>,
    ) -> Result<(), i32> {
        loop {
            let room = &mut self.out.bytes_mut()[self.used..];
            match self.session.seal(bytes, room)? {
                Some(len) => {
                    self.used += len;
                    return Ok(());
                }
                None if self.used == 0 => return Err(libc::EPROTO),
                None => self.send(io, socket, since).await?,
            }
        }
    }

    async fn send(&mut self, io: &Io, socket: File, since: &Cell<Option<Time>>) -> Result<(), i32> {
        let used = std::mem::take(&mut self.used);
        send(io, socket, &self.out, used, since).await
    }
}

/// Send bytes as they are.
pub(super) async fn send_plain(io: &Io, socket: File, bytes: &[u8]) -> Result<(), i32> {
    let mut buffer = io.buffer(bytes.len())?;
    buffer.bytes_mut().copy_from_slice(bytes);
    send(io, socket, &buffer, bytes.len(), &Cell::new(None)).await
}

/// Send the first bytes of a buffer. Errors as the kernel gives them, a positive errno.
async fn send(
    io: &Io,
    socket: File,
    buffer: &Buffer,
    len: usize,
    since: &Cell<Option<Time>>,
) -> Result<(), i32> {
    let mut sent = 0;
    while sent < len {
        since.set(Some(io.now()));
        let mem = buffer.mem().window(sent, len - sent);
        match io.run(Op::Send { file: socket, mem }).await {
            n if n > 0 => sent += n as usize,
            0 => return Err(libc::EPIPE),
            n if n == -libc::EINTR => {}
            n => return Err(-n),
        }
    }
    Ok(())
}
