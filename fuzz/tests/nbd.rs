//! The NBD wire under arbitrary bytes, with a corpus of what real clients say.
//!
//! The files of the corpus are the client's side of whole connections (nbdinfo, nbdcopy, nbdsh,
//! qemu-img, qemu-io, fio), so each target sees the part of them that it knows how to take.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bolero::{TypeGenerator, check};
use ringtap_export::Stop;
use ringtap_export::nbd::wire::{
    IHAVEOPT, MAX_PAYLOAD, OPTION_REPLY_MAGIC, REQUEST_MAGIC, can, errno,
};
use ringtap_export::nbd::{
    Choice, Command, Facts, Handshake, Header, Listener, NamedExport, Rules, Server, Step,
};
use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Vbd;

fn exports() -> Vec<Facts> {
    let export = |name: &str| Facts {
        name: name.into(),
        description: "an export".into(),
        size: 1 << 30,
        flags: can::FLUSH,
        preferred_block: 4096,
        contexts: vec!["base:allocation".into(), format!("qemu:dirty-bitmap:{name}")],
    };
    vec![export("disk"), export("other")]
}

/// Lead a handshake through, given so many bytes at a time. Gives what the server says, how it
/// ended, and the bytes it took.
fn shake(input: &[u8], at_a_time: usize) -> (Vec<u8>, Option<Step>, usize) {
    let mut handshake = Handshake::new(exports(), None);
    let mut output = vec![];
    let (mut from, mut to) = (0, 0);
    loop {
        let (used, step) = handshake.advance(&input[from..to], &mut output);
        assert!(used <= to - from);
        from += used;
        match step {
            Step::Again => assert!(used > 0, "it would go round for ever"),
            Step::More if to == input.len() => return (output, None, from),
            Step::More => {
                // What is looked at as a whole is bounded, whatever the client says.
                assert!(to - from <= (64 << 10) + 16 + at_a_time);
                to = input.len().min(to + at_a_time);
            }
            end => return (output, Some(end), from),
        }
    }
}

fn check_handshake(input: &[u8]) {
    let whole = shake(input, usize::MAX >> 1);
    let piece = 1 + input.len() / 4096;
    assert_eq!(whole, shake(input, piece), "it depends on how the bytes arrive");
    let (output, end, used) = whole;
    if let Some(Step::Transmission(Choice { export, structured, contexts })) = end {
        assert!(export < 2);
        assert!(structured || contexts.is_empty());
        assert!(contexts.numbers().all(|number| number < 2));
        return;
    }
    // 16 bytes of an option bring no more than the list of both exports.
    assert!(output.len() <= (used / 16 + 1) * 200);
    let mut rest = &output[..];
    while !rest.is_empty() {
        assert_eq!(rest[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        let len = u32::from_be_bytes(rest[16..20].try_into().expect("four")) as usize;
        rest = &rest[20 + len..];
    }
}

#[test]
fn handshake_of_bytes() {
    check!().for_each(check_handshake);
}

/// An option that is nearly right.
#[derive(Debug, TypeGenerator)]
enum Say {
    Plain(#[generator(0..16)] u32),
    Info {
        go: bool,
        name: Name,
        wishes: Vec<u16>,
    },
    Context {
        set: bool,
        name: Name,
        queries: Vec<Name>,
    },
    /// A length that is not that of the data.
    Wrong {
        #[generator(0..16)]
        option: u32,
        len: u16,
        data: Vec<u8>,
    },
    /// An option longer than any that is looked at.
    Long {
        #[generator(0..16)]
        option: u32,
        #[generator(0..300_000)]
        len: u32,
    },
}

#[derive(Debug, TypeGenerator)]
enum Name {
    Empty,
    Disk,
    Base,
    Allocation,
    Dirty,
    Qemu,
    Other(Vec<u8>),
    /// A name of another length than it says.
    Lie(#[generator(0..5000)] u16, Vec<u8>),
}

impl Name {
    fn write(&self, data: &mut Vec<u8>) {
        let bytes = match self {
            Name::Lie(len, bytes) => {
                data.extend(u32::from(*len).to_be_bytes());
                data.extend(bytes);
                return;
            }
            Name::Empty => &[][..],
            Name::Disk => b"disk",
            Name::Base => b"base:",
            Name::Allocation => b"base:allocation",
            Name::Dirty => b"qemu:dirty-bitmap:disk",
            Name::Qemu => b"qemu:",
            Name::Other(bytes) => bytes,
        };
        data.extend((bytes.len() as u32).to_be_bytes());
        data.extend(bytes);
    }
}

impl Say {
    fn write(&self, bytes: &mut Vec<u8>) {
        let mut data = vec![];
        let (option, len) = match self {
            Say::Plain(option) => (*option, None),
            Say::Info { go, name, wishes } => {
                name.write(&mut data);
                data.extend((wishes.len() as u16).to_be_bytes());
                wishes.iter().for_each(|wish| data.extend(wish.to_be_bytes()));
                (if *go { 7 } else { 6 }, None)
            }
            Say::Context { set, name, queries } => {
                name.write(&mut data);
                data.extend((queries.len() as u32).to_be_bytes());
                queries.iter().for_each(|query| query.write(&mut data));
                (if *set { 10 } else { 9 }, None)
            }
            Say::Long { option, len } => {
                data.resize(*len as usize, 0);
                (*option, None)
            }
            Say::Wrong { option, len, data: wrong } => {
                data.extend(wrong);
                (*option, Some(u32::from(*len)))
            }
        };
        bytes.extend(IHAVEOPT.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend(len.unwrap_or(data.len() as u32).to_be_bytes());
        bytes.extend(data);
    }
}

#[test]
fn handshake_of_options() {
    check!().with_type::<(bool, Vec<Say>)>().for_each(|(structured, all)| {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        if *structured {
            Say::Plain(8).write(&mut bytes);
        }
        all.iter().for_each(|say| say.write(&mut bytes));
        check_handshake(&bytes);
    });
}

fn check_request(header: &Header, rules: &Rules) {
    let range = header.offset.checked_add(u64::from(header.len)).filter(|end| *end <= rules.size);
    match header.check(rules) {
        Err(error) => {
            let known =
                [errno::EPERM, errno::EINVAL, errno::ENOSPC, errno::EOVERFLOW].contains(&error);
            assert!(known, "error {error}");
            assert!(rules.read_only || error != errno::EPERM);
        }
        Ok(Command::Disconnect | Command::Flush) => {}
        Ok(command) => {
            assert!(range.is_some(), "{command:?} is past the end");
            match command {
                Command::Read { whole } => {
                    assert!(header.len <= MAX_PAYLOAD && (rules.structured || !whole));
                }
                Command::Write => {
                    assert!(header.len <= MAX_PAYLOAD && header.payload() == header.len);
                }
                Command::BlockStatus { .. } => assert!(rules.status && header.len > 0),
                _ => {}
            }
            let writes =
                matches!(command, Command::Write | Command::Trim | Command::WriteZeroes { .. });
            assert!(!(writes && rules.read_only));
        }
    }
}

#[test]
fn requests_of_bytes() {
    check!().for_each(|input: &[u8]| {
        // Requests follow the handshake, where there is one.
        let (_, end, used) = shake(input, usize::MAX >> 1);
        let choice = match end {
            Some(Step::Transmission(choice)) => Some(choice),
            _ => None,
        };
        let mut rest = if choice.is_some() { &input[used..] } else { input };
        for read_only in [false, true] {
            let rules = Rules {
                size: 1 << 30,
                read_only,
                structured: choice.is_none_or(|choice| choice.structured),
                status: choice.is_none_or(|choice| !choice.contexts.is_empty()),
            };
            while let Some(parsed) = Header::parse(rest) {
                let Ok(header) = parsed else { break };
                check_request(&header, &rules);
                let skip = Header::LEN + header.payload() as usize;
                rest = rest.get(skip..).unwrap_or(&[]);
            }
        }
    });
}

#[derive(Debug, TypeGenerator)]
struct Ask {
    flags: u16,
    #[generator(0..10)]
    kind: u16,
    cookie: u64,
    /// Near the start or the end of the disk, or anywhere.
    near: (u8, u32),
    anywhere: u64,
    #[generator(0..24)]
    len_bits: u8,
    len: u32,
}

impl Ask {
    fn header(&self, size: u64) -> Header {
        let offset = match self.near {
            (0..=99, more) => u64::from(more % 100_000),
            (100..=199, less) => size.saturating_sub(u64::from(less % 100_000)),
            _ => self.anywhere,
        };
        // Lengths of every magnitude, and absurd ones.
        let len = if self.near.0 == 255 { self.len } else { self.len & ((1 << self.len_bits) - 1) };
        // Any flags at times, the known ones mostly, or every request would be refused for them.
        let mask = [0, 1, 0x1f, 0xffff][usize::from(self.near.0 % 4)];
        Header { flags: self.flags & mask, kind: self.kind, cookie: self.cookie, offset, len }
    }
}

#[test]
fn requests_by_their_fields() {
    check!().with_type::<(Ask, bool, bool, bool, u64)>().for_each(
        |(ask, read_only, structured, status, size)| {
            let rules = Rules {
                size: *size,
                read_only: *read_only,
                structured: *structured,
                status: *status,
            };
            check_request(&ask.header(*size), &rules);
        },
    );
}

/// A server on a null disk of 1 GiB, for as long as the test runs.
struct Live {
    socket: PathBuf,
    stop: Stop,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Live {
    fn new() -> Live {
        let dir = tempfile::TempDir::new().expect("a folder");
        let socket = dir.path().join("nbd");
        let listener = Listener::Unix(UnixListener::bind(&socket).expect("a socket"));
        let vbd = Arc::new(Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::None));
        let export = |name: &str| NamedExport {
            name: name.into(),
            description: "an export".into(),
            vbd: vbd.clone(),
        };
        let server = Server::new(vec![listener], vec![export("disk"), export("other")]);
        let stop = Stop::new().expect("an eventfd");
        let theirs = stop.clone();
        let thread = std::thread::spawn(move || server.serve(&theirs).expect("the server"));
        Live { socket, stop, thread: Some(thread), _dir: dir }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            let end = thread.join();
            if !std::thread::panicking() {
                end.expect("the server's thread");
            }
        }
    }
}

/// Say all of `bytes`, take everything that is answered, until the server closes.
fn talk(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let mut speaking = stream.try_clone().expect("a descriptor");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The server may close in the middle of it.
            let _ = speaking.write_all(bytes);
            let _ = speaking.shutdown(Shutdown::Write);
        });
        let mut heard = vec![];
        match stream.read_to_end(&mut heard) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        heard
    })
}

fn still_serves(socket: &Path) {
    let mut bytes = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk".to_vec();
    bytes.extend(b"\x25\x60\x95\x13\0\0\0\x03cookie!!");
    bytes.extend([0; 12]);
    let heard = talk(socket, &bytes);
    assert_eq!(heard[28..], *b"\x67\x44\x66\x98\0\0\0\0cookie!!");
}

#[test]
fn a_server_of_bytes() {
    let live = Live::new();
    let socket = live.socket.as_path();
    check!().with_iterations(300).for_each(|input: &[u8]| {
        talk(socket, input);
    });
    still_serves(&live.socket);
}

#[test]
fn a_server_of_requests() {
    let live = Live::new();
    let socket = live.socket.as_path();
    let target = check!().with_iterations(300);
    target.with_type::<(bool, Vec<Ask>, Vec<u8>)>().for_each(|(structured, asks, junk)| {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        if *structured {
            Say::Plain(8).write(&mut bytes);
            let queries = vec![Name::Allocation];
            Say::Context { set: true, name: Name::Disk, queries }.write(&mut bytes);
        }
        Say::Info { go: true, name: Name::Disk, wishes: vec![] }.write(&mut bytes);
        let rules =
            Rules { size: 1 << 30, read_only: false, structured: *structured, status: *structured };
        let mut answers = 0;
        for ask in asks {
            let header = ask.header(rules.size);
            bytes.extend(REQUEST_MAGIC.to_be_bytes());
            bytes.extend(header.flags.to_be_bytes());
            bytes.extend(header.kind.to_be_bytes());
            bytes.extend(header.cookie.to_be_bytes());
            bytes.extend(header.offset.to_be_bytes());
            bytes.extend(header.len.to_be_bytes());
            if header.check(&rules) == Ok(Command::Disconnect) {
                break;
            }
            if header.payload() > MAX_PAYLOAD {
                // Too long to send here: the client leaves in the middle.
                break;
            }
            bytes.resize(bytes.len() + header.payload() as usize, 0x5a);
            answers += 1;
        }
        bytes.extend(junk);
        let heard = talk(socket, &bytes);
        if *structured {
            assert_eq!(finished(&heard), answers);
        }
    });
    still_serves(&live.socket);
}

/// Answers that are complete in what a server said with structured replies.
fn finished(heard: &[u8]) -> usize {
    // The greeting, then the handshake: its last word is the acknowledgement of GO.
    let mut rest = &heard[18..];
    while rest.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
        let len = u32::from_be_bytes(rest[16..20].try_into().expect("four")) as usize;
        rest = &rest[20 + len..];
    }
    let mut count = 0;
    while !rest.is_empty() {
        if rest.starts_with(b"\x67\x44\x66\x98") {
            count += 1;
            rest = &rest[16..];
            continue;
        }
        assert!(rest.starts_with(b"\x66\x8e\x33\xef"));
        count += usize::from(rest[5] & 1);
        let len = u32::from_be_bytes(rest[16..20].try_into().expect("four")) as usize;
        rest = &rest[20 + len..];
    }
    count
}
