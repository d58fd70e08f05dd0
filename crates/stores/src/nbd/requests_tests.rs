//! Operations as requests, answered in every way.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_io::{Holds, Io, Key, Op, OpenRemote, Remote, Session, Tasks, reactor};

use super::handshake::{Agreed, Replies};
use super::requests::{Command, Requests, Who};
use super::wire::{can, cmd, cmd_flag};

/// Has operations come here, in the place of a connection.
#[derive(Default)]
struct Desk {
    came: RefCell<Vec<(Key, Op)>>,
    requests: RefCell<Requests>,
}

struct Here;

thread_local! {
    static DESK: Rc<Desk> = Rc::new(Desk::default());
}

impl Remote for Here {
    fn session(self: Arc<Self>, _: &Io) -> Rc<dyn Session> {
        DESK.with(|desk| desk.clone() as _)
    }

    fn close(&self) {}
}

impl Session for Desk {
    fn begin(&self, _: &Io, key: Key, op: Op) {
        self.came.borrow_mut().push((key, op));
    }

    fn cancel(&self, io: &Io, key: Key) {
        self.requests.borrow_mut().cancel(io, |who| matches!(who, Who::Here(k) if *k == key));
    }
}

const FULL: u16 = can::FLUSH | can::FUA | can::TRIM | can::WRITE_ZEROES | can::FAST_ZERO;

fn agreed(can: u16) -> Agreed {
    let (replies, status) = (Replies::Structured, Some(1));
    Agreed { size: 1 << 40, can, block: 1, preferred: 4096, most: 1 << 20, replies, status }
}

/// What is asked of a server that answers all with an error, or all well; and the operation's result.
fn asked(
    agreed: &Agreed,
    op: impl Fn(ringtap_io::File, ringtap_io::Mem) -> Op,
    error: i32,
) -> (Vec<Command>, i32) {
    let remote = OpenRemote::new(Arc::new(Here));
    let mut tasks = Tasks::new(reactor().expect("a reactor"));
    let io = tasks.io().clone();
    let buffer = io.buffer(3 << 20).expect("memory");
    let op = op(remote.handle(), buffer.mem());
    let result = Rc::new(RefCell::new(None));
    let (keep, door) = (result.clone(), io.clone());
    tasks.spawn(async move { *keep.borrow_mut() = Some(door.run(op).await) });
    tasks.run_ready();
    let desk = DESK.with(Rc::clone);
    let (key, op) = desk.came.borrow_mut().pop().expect("it came");
    let mut requests = desk.requests.borrow_mut();
    requests.begin(&io, agreed, Who::Here(key), op);
    let mut commands = vec![];
    while let Some((cookie, request)) = requests.take_next() {
        commands.push(request.command);
        let len = request.command.len;
        let sent = requests.find(cookie).expect("it was sent");
        (sent.got, sent.error) = (len, error);
        sent.holds = Some(Holds { len: 4096, hole: true, zero: true });
        requests.answered(&io, agreed, cookie);
        assert!(requests.find(cookie).is_none(), "nobody waits for that any more");
    }
    drop(requests);
    tasks.run_ready();
    let result = result.borrow_mut().take().expect("it has ended");
    drop(buffer);
    (commands, result)
}

fn command(kind: u16, flags: u16, offset: u64, len: u64) -> Command {
    Command { kind, flags, offset, len }
}

#[test]
fn reads_and_writes_move_what_the_server_takes_at_once() {
    let full = agreed(FULL);
    let read = |offset| move |file, mem| Op::Read { file, offset, mem };
    let (commands, result) = asked(&full, read(512), 0);
    assert_eq!((commands, result), (vec![command(cmd::READ, 0, 512, 1 << 20)], 1 << 20));
    let (commands, result) = asked(&full, read((1 << 40) - 100), 0);
    assert_eq!((commands, result), (vec![command(cmd::READ, 0, (1 << 40) - 100, 100)], 100));
    assert_eq!(asked(&full, read(1 << 40), 0), (vec![], 0));
    assert_eq!(asked(&full, read(0), libc::EIO).1, -libc::EIO);
    let past = |file, mem| Op::Write { file, offset: 1 << 40, mem, durable: false };
    assert_eq!(asked(&full, past, 0), (vec![], -libc::ENOSPC));
}

#[test]
fn what_must_be_stable_is() {
    let write = |file, mem: ringtap_io::Mem| Op::Write {
        file,
        offset: 0,
        mem: mem.window(0, 4096),
        durable: true,
    };
    let (commands, result) = asked(&agreed(FULL), write, 0);
    assert_eq!((commands, result), (vec![command(cmd::WRITE, cmd_flag::FUA, 0, 4096)], 4096));
    let without = agreed(can::FLUSH);
    let flushed = vec![command(cmd::WRITE, 0, 0, 4096), command(cmd::FLUSH, 0, 0, 0)];
    assert_eq!(asked(&without, write, 0), (flushed, 4096));
    assert_eq!(asked(&without, write, libc::ENOSPC).1, -libc::ENOSPC);
    assert_eq!(asked(&agreed(0), write, 0).1, 4096);
    assert_eq!(asked(&agreed(0), |file, _| Op::Sync { file }, 0), (vec![], 0));
}

#[test]
fn ranges_go_in_pieces_to_their_end() {
    let (offset, len) = (4096, (5 << 29) + 512);
    let (commands, result) = asked(&agreed(FULL), |file, _| Op::Forget { file, offset, len }, 0);
    assert_eq!((commands.len(), result), (3, 0));
    let total: u64 = commands.iter().map(|one| one.len).sum();
    assert_eq!((total, commands[2].offset), (len, offset + (2 << 30)));
    let punch = |file, _| Op::PunchHole { file, offset, len: 512 };
    let (commands, _) = asked(&agreed(FULL), punch, 0);
    assert_eq!(commands, [command(cmd::WRITE_ZEROES, cmd_flag::FAST_ZERO, offset, 512)]);
    let zero = |file, _| Op::ZeroRange { file, offset, len: 512 };
    let (commands, _) = asked(&agreed(can::WRITE_ZEROES), zero, 0);
    assert_eq!(commands, [command(cmd::WRITE_ZEROES, cmd_flag::NO_HOLE, offset, 512)]);
    assert_eq!(asked(&agreed(can::FLUSH), zero, 0), (vec![], -libc::EOPNOTSUPP));
    let status = |file, _| Op::Status { file, offset, len };
    let told = Holds::of_result(asked(&agreed(FULL), status, 0).1);
    assert_eq!(told, Holds { len: 4096, hole: true, zero: true });
    let untold = Agreed { status: None, ..agreed(FULL) };
    assert_eq!(
        Holds::of_result(asked(&untold, status, 0).1),
        Holds { len, hole: false, zero: false }
    );
}

#[test]
fn blocks_are_asked_of_whole_and_to_the_end() {
    let large = Agreed { block: 4096, size: (1 << 20) + 700, ..agreed(FULL) };
    let asked = |offset, len| {
        let status = move |file, _| Op::Status { file, offset, len };
        let (commands, result) = asked(&large, status, 0);
        let range = commands.first().map(|one| (one.offset, one.len));
        (range, Holds::of_result(result))
    };
    let zeros = |len| Holds { len, hole: true, zero: true };
    let data = |len| Holds { len, hole: false, zero: false };
    // The server says 4096 bytes.
    assert_eq!(asked(512, 1024), (Some((0, 4096)), zeros(1024)));
    assert_eq!(asked(4096 + 512, 1 << 16), (Some((4096, 17 << 12)), zeros(4096 - 512)));
    assert_eq!(asked((1 << 20) - 512, 8192), (Some(((1 << 20) - 4096, 4096)), zeros(512)));
    // No whole block, and behind the end.
    assert_eq!(asked(1 << 20, 1024), (None, data(1024)));
    assert_eq!(asked((1 << 20) + 1024, 512), (None, zeros(512)));
}
