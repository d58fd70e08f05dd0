//! An NBD server on a simulated disk: slow, in any order, and not always well.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ringtap_io::{Buffer, File, Io, Op, Signal};
use ringtap_sim::Disk;

use crate::nbd::handshake::{Agreed, Replies};
use crate::nbd::requests::Command;
use crate::nbd::wire::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, can, chunk, cmd, cmd_flag, errno,
};

/// What it serves, and how.
pub(super) struct Export {
    pub(super) disk: Disk,
    pub(super) file: File,
    pub(super) agreed: Agreed,
    pub(super) rng: RefCell<fastrand::Rng>,
    /// One in so many requests is told that the server is shutting down; 0 is never.
    pub(super) leaves: u32,
    /// Connections that were told so.
    pub(super) left: Cell<usize>,
}

/// One connection.
struct Connection {
    export: Rc<Export>,
    end: File,
    in_flight: Cell<usize>,
    ended: Signal,
}

/// What was asked for.
struct Request {
    command: Command,
    cookie: u64,
    payload: Option<Buffer>,
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Export {
    fn one_in(&self, odds: u32) -> bool {
        odds > 0 && self.rng.borrow_mut().u32(0..odds) == 0
    }

    /// Serve one connection until its client has sent all: as it ends, nothing that came by it is carried out any more.
    pub(super) async fn converse(self: Rc<Export>, io: Io, end: File) {
        let connection = Rc::new(Connection {
            export: self.clone(),
            end,
            in_flight: Cell::new(0),
            ended: Signal::default(),
        });
        let mut leaves = false;
        while let Some(request) = connection.next(&io).await {
            if request.command.kind == cmd::DISC {
                break;
            }
            if !leaves && self.one_in(self.leaves) {
                leaves = true;
                self.left.set(self.left.get() + 1);
            }
            if leaves {
                connection.reply(&request, errno::ESHUTDOWN, &[]);
                continue;
            }
            connection.in_flight.set(connection.in_flight.get() + 1);
            let (connection, door) = (connection.clone(), io.clone());
            io.spawn(async move {
                connection.serve(&door, request).await;
                connection.in_flight.set(connection.in_flight.get() - 1);
                connection.ended.notify(&door);
            });
        }
        loop {
            let ended = connection.ended.wait(&io);
            if connection.in_flight.get() == 0 {
                break;
            }
            ended.await;
        }
        self.disk.close(end);
    }
}

impl Connection {
    async fn exactly(&self, io: &Io, len: usize) -> Option<Buffer> {
        let bytes = io.buffer(len).expect("memory");
        let mut done = 0;
        while done < len {
            let mem = bytes.mem().window(done, usize::MAX);
            match io.run(Op::Recv { file: self.end, mem }).await {
                moved if moved > 0 => done += moved as usize,
                _ => return None,
            }
        }
        Some(bytes)
    }

    /// None where the connection has ended.
    async fn next(&self, io: &Io) -> Option<Request> {
        let extended = self.export.agreed.replies == Replies::Extended;
        let (magic, len) = match extended {
            true => (EXTENDED_REQUEST_MAGIC, 32),
            false => (REQUEST_MAGIC, 28),
        };
        let head = self.exactly(io, len).await?;
        let head = head.bytes();
        assert_eq!(half(head, 0), magic, "what follows is no request");
        let (flags, kind) = ((half(head, 4) >> 16) as u16, half(head, 4) as u16);
        let len = if extended { word(head, 24) } else { half(head, 24).into() };
        let command = Command { kind, flags, offset: word(head, 16), len };
        let cookie = word(head, 8);
        let payload = match kind {
            cmd::WRITE => Some(self.exactly(io, len as usize).await?),
            _ => None,
        };
        Some(Request { command, cookie, payload })
    }

    async fn serve(&self, io: &Io, request: Request) {
        let long = self.export.one_in(8);
        let wait = self.export.rng.borrow_mut().u64(0..if long { 4_000_000 } else { 100_000 });
        io.sleep(wait).await;
        // One that fails was carried out or not.
        let fails = self.export.one_in(96);
        let mut data = Vec::new();
        if !fails || self.export.rng.borrow_mut().bool() {
            data = self.carry_out(io, &request).await;
        }
        self.reply(&request, if fails { errno::EIO } else { 0 }, &data);
    }

    async fn carry_out(&self, io: &Io, request: &Request) -> Vec<u8> {
        let Export { file, agreed, .. } = *self.export;
        let Command { kind, flags, offset, len } = request.command;
        let durable = flags & cmd_flag::FUA != 0 || !agreed.can(can::FLUSH);
        let op = match (kind, &request.payload) {
            (cmd::READ, _) => {
                let mut bytes = io.buffer(len as usize).expect("memory");
                let read = io.read(file, offset, bytes.mem()).await.expect("read");
                bytes.bytes_mut()[read..].fill(0);
                return bytes.bytes().to_vec();
            }
            (cmd::WRITE, Some(payload)) => {
                io.write(file, offset, payload.mem(), durable).await.expect("written");
                return vec![];
            }
            (cmd::FLUSH, _) => Op::Sync { file },
            // What is trimmed may stay.
            (cmd::TRIM, _) if self.export.one_in(2) => return vec![],
            (cmd::WRITE_ZEROES, _) if flags & cmd_flag::NO_HOLE != 0 => {
                Op::ZeroRange { file, offset, len }
            }
            (cmd::TRIM | cmd::WRITE_ZEROES, _) => Op::PunchHole { file, offset, len },
            _ => panic!("a request of kind {kind}"),
        };
        io.to_the_end(op).await.expect("carried out");
        if durable && kind != cmd::FLUSH {
            io.sync(file).await.expect("stable");
        }
        vec![]
    }

    /// Answer it; nobody may be there any more.
    fn reply(&self, request: &Request, error: u32, data: &[u8]) {
        let Command { kind, offset, .. } = request.command;
        let replies = self.export.agreed.replies;
        let mut bytes = Vec::new();
        let mut put = |piece: &[u8]| bytes.extend_from_slice(piece);
        if replies == Replies::Simple {
            put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
            put(&error.to_be_bytes());
            put(&request.cookie.to_be_bytes());
            put(if error == 0 { data } else { &[] });
        } else {
            let place = offset.to_be_bytes();
            let hole = data.iter().all(|byte| *byte == 0) && self.export.one_in(2);
            let (says, payload) = match (kind, error) {
                (_, 1..) => (chunk::ERROR, [&error.to_be_bytes()[..], &[0; 2]].concat()),
                (cmd::READ, 0) if hole && replies == Replies::Extended => {
                    let len = (data.len() as u64).to_be_bytes();
                    (chunk::OFFSET_HOLE, [place, len].concat())
                }
                (cmd::READ, 0) if hole => {
                    let len = (data.len() as u32).to_be_bytes();
                    (chunk::OFFSET_HOLE, [&place[..], &len].concat())
                }
                (cmd::READ, 0) => (chunk::OFFSET_DATA, [&place[..], data].concat()),
                _ => (chunk::NONE, vec![]),
            };
            let magic = match replies {
                Replies::Extended => EXTENDED_REPLY_MAGIC,
                _ => STRUCTURED_REPLY_MAGIC,
            };
            put(&magic.to_be_bytes());
            put(&chunk::DONE.to_be_bytes());
            put(&says.to_be_bytes());
            put(&request.cookie.to_be_bytes());
            if replies == Replies::Extended {
                put(&place);
                put(&(payload.len() as u64).to_be_bytes());
            } else {
                put(&(payload.len() as u32).to_be_bytes());
            }
            put(&payload);
        }
        _ = self.export.disk.send_now(self.end, &bytes);
    }
}
